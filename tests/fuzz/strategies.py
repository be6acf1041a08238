"""What is drawn: batches (how rows share prompts, lengths, padding, order) and programs. Elements of tensors come from a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import strategies as st
from programs import HEADS, TOKENS, WIDTH, Dims, Program, Register, same_size, size_of

# -- batches ----------------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw, max_rows: int = 5, max_prompt: int = 5, max_response: int = 4, padding: bool = True) -> dict:
    """Arguments of `batches.batch_of`."""
    groups, rows = [], 0
    for _ in range(draw(st.integers(1, 3))):
        size = min(draw(st.integers(1, 3)), max_rows - rows)
        if size < 1:
            break
        rows += size
        prompt = draw(st.integers(0, max_prompt))
        shortest = 1 if prompt == 0 else 0
        groups.append((prompt, [draw(st.integers(shortest, max_response)) for _ in range(size)]))
    left_pads = [draw(st.integers(0, 2)) for _ in groups] if padding and draw(st.booleans()) else None
    if not padding:
        columns = max(p + max(r) for p, r in groups)
        groups = [(p, [columns - p] * len(r)) for p, r in groups]
    order = draw(st.permutations(range(rows))) if draw(st.booleans()) else None
    return {"groups": groups, "left_pads": left_pads, "seed": draw(st.integers(0, 3)), "order": order}


# -- programs ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Writer:
    """A program under construction."""

    draw: Callable
    lines: list[str] = dataclasses.field(default_factory=list)
    parameters: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    registers: list[Register] = dataclasses.field(default_factory=list)
    inputs: set[str] = dataclasses.field(default_factory=set)
    count: int = 0

    def new(self, expression: str, dims: Dims, keep: bool = True) -> Register:
        register = Register(f"v{self.count}", tuple(dims))
        self.count += 1
        self.lines.append(f"{register.name} = {expression}")
        if keep:
            self.registers.append(register)
        return register

    def do(self, statement: str) -> None:
        self.lines.append(statement)

    def parameter(self, *shape: int) -> str:
        self.parameters.append(shape)
        return f"self.p{len(self.parameters) - 1}"

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def index(self, n: int) -> int:
        return self.draw(st.integers(0, n - 1))

    def chance(self, one_in: int) -> bool:
        """False when shrunk."""
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def data(self, name: str) -> str:
        self.inputs.add(name)
        return name


def _sized(x: Register, d: int, kept: str = "") -> Dims:
    return x.dims[:d] + (((),) if kept else ()) + x.dims[d + 1 :]


# Each operation: (writer, register) -> register, or None where it does not apply.

POINTWISE = (
    "torch.tanh({x})",
    "{x} * 0.7",
    "F.gelu({x})",
    "{x} - 0.3",
    "torch.sigmoid({x})",
    "F.silu({x})",
    "{x}.clone()",
    "{x}.contiguous()",
    "{x}.abs()",
    "-{x}",
    "{x}.clamp(-1.0, 0.5)",
    "torch.where({x} > 0.1, {x}, 0.3)",
    "{x}.masked_fill({x} > 1.0, 0.0)",
    "{x}.detach()",
    "{x} / 3.0 + 1.0",
    "torch.ones_like({x}) * 0.5 + {x}",
    "F.dropout({x}, 0.0, True)",
    "{x}.to(torch.float64)",
    "{x}.exp().log1p()",
)


def pointwise(w: Writer, x: Register) -> Register:
    return w.new(w.pick(*POINTWISE).format(x=x.name), x.dims)


def linear(w: Writer, x: Register) -> Register | None:
    n = x.dims[-1] if x.dims else ()
    if not n or not all(isinstance(f, int) for f in n):
        return None
    (a,) = (size_of(n),) if len(n) == 1 else ("*".join(map(str, n)),)
    size = eval(a)
    if size > 16:
        return None
    form, out = w.index(4), size
    weight = w.parameter(out, size)
    if form == 0:
        return w.new(f"F.linear({x.name}, {weight})", x.dims)
    if form == 1:
        return w.new(f"F.linear({x.name}, {weight}, {w.parameter(out)})", x.dims)
    if form == 2:
        return w.new(f"{x.name} @ {weight}", x.dims)
    return w.new(f"torch.einsum('...i,ij->...j', {x.name}, {weight})", x.dims)


def linear_elsewhere(w: Writer, x: Register) -> Register | None:
    """A weight on a feature dimension that is not the last."""
    where = [d for d, dim in enumerate(x.dims) if len(dim) == 1 and isinstance(dim[0], int) and 1 < dim[0] <= 16]
    if not where or len(x.dims) > 5:
        return None
    d = where[w.index(len(where))]
    names = "abcdef"[: len(x.dims)]
    out = names[:d] + "z" + names[d + 1 :]
    return w.new(f"torch.einsum('{names},{names[d]}z->{out}', {x.name}, {w.parameter(x.dims[d][0], x.dims[d][0])})", x.dims)


def norm(w: Writer, x: Register) -> Register | None:
    n = x.dims[-1] if x.dims else ()
    if len(n) != 1 or not isinstance(n[0], int) or n[0] < 2:
        return None
    form = w.index(4)
    if form == 0:
        return w.new(f"F.layer_norm({x.name}, ({n[0]},), {w.parameter(n[0])}, {w.parameter(n[0])})", x.dims)
    if form == 1:
        return w.new(f"F.rms_norm({x.name}, ({n[0]},), {w.parameter(n[0])}, 1e-3)", x.dims)
    if form == 2:
        return w.new(f"{x.name} * torch.rsqrt({x.name}.pow(2).mean(-1, keepdim=True) + 1e-3) * {w.parameter(n[0])}", x.dims)
    return w.new(f"F.normalize({x.name} + 0.01, dim=-1)", x.dims)


# any dimension, keeping the shape; {n} is its size
ALONG = (
    "{x}.softmax({d})",
    "{x}.log_softmax({d}) * 0.3",
    "{x}.cumsum({d}) * 0.3",
    "{x} - {x}.mean({d}, keepdim=True)",
    "{x} + {x}.sum({d}, keepdim=True).tanh()",
    "{x} + {x}.amax({d}, keepdim=True)",
    "{x} + {x}.max({d}, keepdim=True).values",
    "{x}.flip({d})",
    "{x}.roll(1, {d})",
    "{x}.roll(-1, {d})",
    "{x}.sort({d}).values",
    "torch.cat([torch.zeros_like({x}.narrow({d}, 0, 1)), {x}.narrow({d}, 0, {n} - 1)], {d})",
    "torch.cat([{x}.narrow({d}, 0, 1), {x}.narrow({d}, 0, {n} - 1)], {d})",
    "torch.cat([{x}.narrow({d}, 1, {n} - 1), torch.zeros_like({x}.narrow({d}, 0, 1))], {d})",
    "{x} + {x}.select({d}, 0).unsqueeze({d})",
    "{x} + {x}.select({d}, -1).unsqueeze({d})",
    "{x} + {x}.narrow({d}, 0, 1)",
    "{x}.index_select({d}, torch.arange({n} - 1, -1, -1))",
    "{x} * torch.rsqrt({x}.var({d}, keepdim=True, correction=0) + 1.0)",
    "{x}.cummax({d}).values",
    "{x}.gather({d}, {x}.argsort({d}))",
    "{x} + {x}.argmax({d}, keepdim=True)",
    "{x} / (1.0 + {x}.norm(dim={d}, keepdim=True))",
    "{x} - {x}.logsumexp({d}, keepdim=True)",
    "torch.stack([{x}, {x}.tanh()], {d}).sum({d})",
    "{x}.repeat_interleave(2, {d}).narrow({d}, 0, {n})",
    "torch.cat([{x}, {x}], {d}).narrow({d}, 1, {n})",
    "torch.cat([{x}, {x}.tanh()], {d}).narrow({d}, 0, {n})",
    "torch.logcumsumexp({x}, {d}) * 0.3",
    "F.softmin({x}, {d})",
    "{x} + {x}.index_fill({d}, torch.arange(1), 0.5)",
    "{x}.movedim({d}, 0).flip(0).movedim(0, {d})",
)


def dimension(w: Writer, x: Register) -> int:
    """Features as often as everything else together."""
    features = [d for d, dim in enumerate(x.dims) if all(isinstance(f, int) for f in dim)]
    return features[w.index(len(features))] if features and w.chance(2) else w.index(len(x.dims))


def along(w: Writer, x: Register) -> Register | None:
    if not x.dims:
        return None
    d = dimension(w, x)
    return w.new(w.pick(*ALONG).format(x=x.name, d=d, n=f"{x.name}.shape[{d}]"), x.dims)


REDUCE = (
    "{x}.mean({d})",
    "{x}.sum({d})",
    "{x}.amax({d})",
    "{x}.select({d}, 0)",
    "{x}.select({d}, -1)",
    "{x}.logsumexp({d})",
    "{x}.unbind({d})[0]",
    "{x}.mean({d}, keepdim=True)",
    "{x}.narrow({d}, 0, 1)",
    "{x}.prod({d})",
)


def reduce(w: Writer, x: Register) -> Register | None:
    if len(x.dims) < 2:
        return None
    d, how = dimension(w, x), w.pick(*REDUCE)
    if "unbind" in how and not all(isinstance(f, int) for f in x.dims[d]):
        how = REDUCE[0]
    kept = ((1,),) if "keepdim" in how or "narrow" in how else ()
    return w.new(how.format(x=x.name, d=d), x.dims[:d] + kept + x.dims[d + 1 :])


def permute(w: Writer, x: Register) -> Register | None:
    if len(x.dims) < 2:
        return None
    a, b = w.index(len(x.dims)), w.index(len(x.dims))
    if w.chance(3):
        order = w.draw(st.permutations(range(len(x.dims))))
        return w.new(f"{x.name}.permute({', '.join(map(str, order))})", tuple(x.dims[i] for i in order))
    dims = list(x.dims)
    dims[a], dims[b] = dims[b], dims[a]
    return w.new(f"{x.name}.transpose({a}, {b})", tuple(dims))


def merge(w: Writer, x: Register) -> Register | None:
    if len(x.dims) < 2:
        return None
    d = w.index(len(x.dims) - 1)
    return w.new(f"{x.name}.flatten({d}, {d + 1})", x.dims[:d] + (x.dims[d] + x.dims[d + 1],) + x.dims[d + 2 :])


def split(w: Writer, x: Register) -> Register | None:
    """A merged dimension into its factors, or a number into two."""
    where = [d for d, dim in enumerate(x.dims) if len(dim) > 1 or (len(dim) == 1 and dim[0] in (4, 8, 16))]
    if not where or len(x.dims) > 5:
        return None
    d = where[w.index(len(where))]
    dim = x.dims[d]
    if len(dim) > 1:
        cut = 1 + w.index(len(dim) - 1)
        parts = dim[:cut], dim[cut:]
    else:
        parts = w.pick(((2,), (dim[0] // 2,)), ((dim[0] // 2,), (2,)))
    dims = x.dims[:d] + parts + x.dims[d + 1 :]
    form = w.pick("{x}.unflatten({d}, ({a}, {b}))", "{x}.reshape({all})")
    return w.new(form.format(x=x.name, d=d, a=size_of(parts[0]), b=size_of(parts[1]), all=", ".join(map(size_of, dims))), dims)


def scramble(w: Writer, x: Register) -> Register | None:
    """A reshape to a permutation of the sizes, which is not the permutation of the dimensions."""
    if len(x.dims) < 2:
        return None
    order = w.draw(st.permutations(range(len(x.dims))))
    sizes = ", ".join(size_of(x.dims[i]) for i in order)
    return w.new(f"{x.name}.reshape({sizes})", x.dims if list(order) == sorted(order) else tuple(_mixed(x.dims[i]) for i in order))


def _mixed(dim: tuple) -> tuple:
    """A dimension of the same size of which nothing is known."""
    return tuple({"b": "b_", "s": "s_", "t": "s_"}.get(f, f) for f in dim)


def unsqueeze(w: Writer, x: Register) -> Register | None:
    if len(x.dims) > 4:
        return None
    d = w.index(len(x.dims) + 1)
    return w.new(f"{x.name}.unsqueeze({d})", x.dims[:d] + ((1,),) + x.dims[d:])


def expand(w: Writer, x: Register) -> Register | None:
    where = [d for d, dim in enumerate(x.dims) if dim in ((1,), ())]
    if not where:
        return None
    d, new = where[w.index(len(where))], w.pick(2, "b", "s")
    sizes = ["-1"] * len(x.dims)
    sizes[d] = str(new)
    dims = x.dims[:d] + (({"b": "b_", "s": "s_"}.get(new, new),),) + x.dims[d + 1 :]
    return w.new(f"{x.name}.expand({', '.join(sizes)})", dims)


def squeeze(w: Writer, x: Register) -> Register | None:
    where = [d for d, dim in enumerate(x.dims) if dim in ((1,), ())]
    if not where:
        return None
    d = where[w.index(len(where))]
    return w.new(f"{x.name}.squeeze({d})", x.dims[:d] + x.dims[d + 1 :])


def _broadcast(a: Dims, b: Dims) -> Dims | None:
    rank = max(len(a), len(b))
    a, b = ((),) * (rank - len(a)) + a, ((),) * (rank - len(b)) + b
    out = []
    for p, q in zip(a, b, strict=True):
        if p in ((), (1,)):
            out.append(q)
        elif q in ((), (1,)):
            out.append(p)
        elif same_size(p, q):
            # two meanings of one size (rows of a reshaped tensor): where they differ, the outcome has neither
            out.append(p if p == q else _mixed(p) if not {"t"} & {*p, *q} else _mixed(p))
        else:
            return None
    return tuple(out)


TWO = (
    "{x} + {y}",
    "{x} * torch.tanh({y})",
    "torch.where({y} > 0.0, {x}, {x} * 0.5)",
    "torch.maximum({x}, {y})",
    "{x} - {y} * 0.5",
    "torch.add({x}, {y}, alpha=0.5)",
    "torch.lerp({x}, {y}, 0.25)",
    "{x}.masked_fill({y} > 0.5, 0.1)",
    "torch.addcmul({x}, {x}, {y}, value=0.1)",
)


def combine(w: Writer, x: Register) -> Register | None:
    others = [(y, dims) for y in w.registers for dims in [_broadcast(x.dims, y.dims)] if dims is not None]
    if not others:
        return None
    y, dims = others[w.index(len(others))]
    form = w.pick(*TWO)
    if "lerp" in form and len(x.dims) != len(y.dims):
        form = TWO[0]
    if "masked_fill" in form and _broadcast(x.dims, y.dims) != x.dims:
        form = TWO[1]
    return w.new(form.format(x=x.name, y=y.name), dims)


def concatenate(w: Writer, x: Register) -> Register | None:
    if not x.dims:
        return None
    d = w.index(len(x.dims))
    fits = [
        y
        for y in w.registers
        if len(y.dims) == len(x.dims) and all(same_size(p, q) for i, (p, q) in enumerate(zip(x.dims, y.dims, strict=True)) if i != d)
    ]
    y = fits[w.index(len(fits))] if fits else x
    start = w.pick("0", f"{y.name}.shape[{d}]")
    return w.new(f"torch.cat([{x.name}, {y.name}], {d}).narrow({d}, {start}, {x.name}.shape[{d}])", x.dims)


def product(w: Writer, x: Register) -> Register | None:
    """x @ y of two registers."""
    if len(x.dims) < 2:
        return None
    fits = []
    for y in w.registers:
        if len(y.dims) == len(x.dims):
            batch = _broadcast(x.dims[:-2], y.dims[:-2])
            if batch is not None and same_size(x.dims[-1], y.dims[-2]):
                fits.append((f"{x.name} @ {y.name}", batch + (x.dims[-2], y.dims[-1])))
            if batch is not None and same_size(x.dims[-1], y.dims[-1]):
                fits.append((f"{x.name} @ {y.name}.transpose(-1, -2)", batch + (x.dims[-2], y.dims[-2])))
    if not fits:
        return None
    text, dims = fits[w.index(len(fits))]
    flat = [f for dim in dims for f in dim]
    if flat.count("s") > 1:
        last = tuple({"s": "t"}.get(f, f) for f in dims[-1])
        dims = dims[:-1] + (last,)
    flat = [f for dim in dims for f in dim]
    if any(flat.count(f) > 1 for f in ("b", "s", "t")):
        dims = tuple(map(_mixed, dims))
    return w.new(f"torch.tanh({text} * 0.3)", dims)


IN_PLACE = (
    "{y}.mul_(0.5)",
    "{y}.narrow({d}, 0, 1).mul_(0.5)",
    "{y}.select({d}, 0).add_(0.5)",
    "{y}.select({d}, -1).zero_()",
    "{y}.select({d}, 0).copy_({y}.select({d}, -1).clone())",
    "{y}.masked_fill_({y} > 0.3, 0.1)",
    "{y}[...] = {y}.tanh()",
    "{y}.narrow({d}, 0, 1).copy_({z}.narrow({d}, {n} - 1, 1))",
    "{y}.index_add_({d}, torch.zeros({n}, dtype=torch.long), {z}, alpha=0.1)",
    "{y}.index_copy_({d}, torch.arange({n}), {z}.flip({d}))",
    "{y}.transpose(0, {d}).narrow(0, 0, 1).add_(0.5)",
    "{y}.unsqueeze(0).mul_(0.8)",
    "{y}.flip({d}).mul_(2.0)",
    "{y}.add_({z}).tanh_()",
    "{y}.scatter_({d}, torch.zeros_like({z}, dtype=torch.long), {z} * 0.5)",
    "{y}.clamp_(min=-0.5)",
    "{y}.copy_({z})",
    # not "{y}.detach().mul_(0.5)": behind autograd's back, which torch.compile itself (aot_eager) differentiates unlike eager mode
    "{y}.cumsum_({d}).mul_(0.2)",
    "{y}.narrow({d}, 0, {n}).add_({z})",
    "{y}.view_as({y}).add_(0.1)",
)


def in_place(w: Writer, x: Register) -> Register | None:
    if not x.dims:
        return None
    d, how = dimension(w, x), w.pick(*IN_PLACE)
    if "view_as" in how or "flatten" in how:
        y = w.new(f"{x.name}.contiguous().clone()", x.dims, keep=False)
    else:
        y = w.new(f"{x.name} * 1.0", x.dims, keep=False)
    alias = w.new(f"{y.name}.transpose(0, {d})" if w.chance(3) else f"{y.name}.unsqueeze(0)[0]", y.dims, keep=False)
    fits = [z for z in w.registers if z.dims == x.dims and z.name != y.name] or [x]
    z = fits[w.index(len(fits))]
    w.do(how.format(y=y.name, z=z.name, d=d, n=f"{y.name}.shape[{d}]"))
    if w.chance(3):
        w.do(f"{alias.name}.mul_(1.1)")
    w.registers.append(y)
    return y


def number_along(w: Writer, x: Register) -> Register | None:
    """Something that depends on the index along one dimension alone: positions, per-row noise, features."""
    if not x.dims:
        return None
    d = w.index(len(x.dims))
    shape = ["1"] * len(x.dims)
    shape[d] = "-1"
    table = f"torch.arange({x.name}.shape[{d}], dtype=torch.float64).view({', '.join(shape)})"
    form = w.pick(
        "{x} + {t} * 0.1",
        "{x} * torch.cos({t})",
        "torch.where({t} > 0, {x}, 0.5)",
        "{x}.masked_fill({t} == 1, 0.0)",
        "{x} + torch.cos({t}.expand({x}.shape))",
        "{x} + self.columns[torch.arange({n}), 0].view({s})",
        "{x} * ({t} < {n} - 1)",
    )
    return w.new(form.format(x=x.name, t=table, n=f"{x.name}.shape[{d}]", s=", ".join(shape)), x.dims)


def of_the_batch(w: Writer, x: Register) -> Register | None:
    """Data of the batch, aligned with rows and columns by name: the mask, ids, positions, a number per row or token."""
    alone = {f: d for d, dim in enumerate(x.dims) if len(dim) == 1 for f in dim}
    kinds = []
    if "b" in alone:
        kinds.append("row_data")
    if "b" in alone and "s" in alone:
        kinds += ["attention_mask", "token_data", "own_data", "late_data", "next", "input_ids", "position"]
    if not kinds:
        return None
    kind = w.pick(*kinds)
    source = {
        "row_data": "row_data",
        "attention_mask": "attention_mask",
        "token_data": "token_data",
        "own_data": "own_data",
        "late_data": "late_data",
        "next": "F.pad(late_data, (0, 1))[:, 1:]",
        "input_ids": "input_ids",
        "position": "(attention_mask.cumsum(1) - 1).clamp(min=0)",
    }[kind]
    w.data({"position": "attention_mask", "next": "late_data"}.get(kind, kind))
    shape = ["1"] * len(x.dims)
    shape[alone["b"]] = "b"
    if kind != "row_data":
        shape[alone["s"]] = "s"
        if alone["s"] < alone["b"]:
            source = f"{source}.t()"
    if kind == "attention_mask":
        form = w.pick("{x} * {t}", "{x}.masked_fill({t} == 0, 0.0)", "torch.where({t}.bool(), {x}, 0.1)")
    elif kind == "input_ids":
        form = w.pick("{x} + {t} * 0.05", "torch.where({t} == 3, {x}, {x} * 0.5)")
    elif kind == "position":
        form = w.pick("{x} + {t} * 0.1", "{x} * torch.cos({t}.double())")
    else:
        form = w.pick("{x} + {t}", "{x} * {t}")
    return w.new(form.format(x=x.name, t=f"{source}.reshape({', '.join(shape)})"), x.dims)


def look_up(w: Writer, x: Register) -> Register | None:
    """Indexing by tensors: a reversal, rows by number, features by number."""
    if len(x.dims) < 2:
        return None
    d = w.index(len(x.dims))
    n = f"{x.name}.shape[{d}]"
    form = w.pick(
        "torch.arange({n}).flip(0)", "torch.arange({n})", "torch.zeros({n}, dtype=torch.long)", "(torch.arange({n}) - 1).clamp(min=0)"
    )
    places = [":"] * d + [form.format(n=n)]
    return w.new(f"{x.name}[{', '.join(places)}]", x.dims)


def gated(w: Writer, x: Register) -> Register | None:
    """Under no_grad, or in an activation-checkpoint region."""
    form = w.index(3)
    if form == 0:
        y = w.new("None", x.dims, keep=False)
        w.do("with torch.no_grad():")
        w.do(f"    {y.name} = torch.tanh({x.name})")
        w.registers.append(y)
        return y
    text = w.pick("lambda y: torch.tanh(y) * y", "lambda y: y + y.mean(0, keepdim=True).tanh()", "lambda y: F.gelu(y.clone().mul_(0.5))")
    return w.new(f"checkpoint({text}, {x.name}, use_reentrant=False)", x.dims)


ANY = (
    pointwise,
    linear,
    norm,
    along,
    combine,
    permute,
    split,
    merge,
    of_the_batch,
    number_along,
    in_place,
    concatenate,
    product,
    look_up,
    unsqueeze,
    expand,
    squeeze,
    reduce,
    linear_elsewhere,
    scramble,
    gated,
)
SOUND = (pointwise, linear, norm, permute, split, unsqueeze, squeeze, linear_elsewhere)


def wander(w: Writer, x: Register, steps: int, sound: bool) -> Register:
    for _ in range(steps):
        operations = SOUND if sound or w.chance(2) else ANY
        x = operations[w.index(len(operations))](w, x) or x
    return x


def back_to_tokens(w: Writer, x: Register, h: Register) -> Register:
    """h, changed by x in whatever way fits: tokens again where x still has them, one number where it does not."""
    flat = [f for dim in x.dims for f in dim]
    rest = [f for f in flat if f not in ("b", "s")]
    if flat.count("b") == 1 and flat.count("s") == 1 and all(isinstance(f, int) for f in rest):
        sizes = ", ".join(size_of((f,)) for f in flat)
        order = [flat.index("b"), flat.index("s")] + [i for i, f in enumerate(flat) if f not in ("b", "s")]
        y = f"{x.name}.reshape({sizes or 1}).permute({', '.join(map(str, order))}).flatten(2)" if rest else (
            f"{x.name}.reshape({sizes}).permute({', '.join(map(str, order))}).unsqueeze(-1)"
        )
        if len(rest) and eval("*".join(map(str, rest))) == WIDTH:
            return w.new(f"{h.name} + torch.tanh({y})", TOKENS)
        return w.new(f"{h.name} + torch.tanh({y}.sum(-1, keepdim=True))", TOKENS)
    if flat == ["b"]:
        return w.new(f"{h.name} + torch.tanh({x.name}.reshape(b, 1, 1))", TOKENS)
    if flat == ["s"]:
        return w.new(f"{h.name} + torch.tanh({x.name}.reshape(1, s, 1))", TOKENS)
    return w.new(f"{h.name} * torch.sigmoid({x.name}.mean())", TOKENS)


# -- attention --------------------------------------------------------------------------------------------------------------

# what queries, keys or values may become
UNSOUND = (
    "{x}.roll(1, 1)",
    "{x}.flip(1)",
    "{x} + row_data[:, None, None]",
    "{x}.mean(0, keepdim=True).expand_as({x})",
    "{x} * own_data[..., None]",
)

# [s, t] or what broadcasts against [b, h, s, t]; True may attend
CAUSAL = (
    "(torch.arange(s)[None, :] <= torch.arange(s)[:, None])",
    "torch.ones(s, s, dtype=torch.bool).tril()",
    "~torch.ones(s, s, dtype=torch.bool).triu(1)",
    "(self.tril[:, :, :s, :s] != 0)",
)
NOT_CAUSAL = (
    "(torch.arange(s)[None, :] >= torch.arange(s)[:, None])",
    "torch.ones(s, s, dtype=torch.bool).tril(1)",
    "torch.ones(s, s, dtype=torch.bool)",
    "(torch.ones(s, s).tril() + torch.ones(s, s)[:, :1] * 0).bool().t()",
    "((torch.arange(s)[None, :] <= torch.arange(s)[:, None]) | (torch.arange(s)[None, :] < 2))",
    "((torch.arange(s)[None, :] <= torch.arange(s)[:, None]) & (torch.arange(s)[:, None] - torch.arange(s)[None, :] != 1))",
    "((torch.arange(s)[None, :] <= torch.arange(s)[:, None]) & (torch.arange(b)[:, None, None, None] >= 0))",
    "((torch.arange(s)[None, :] <= torch.arange(s)[:, None]) | (torch.arange(b)[:, None, None, None] == 1))",
    "((torch.arange(s)[None, :] <= torch.arange(s)[:, None]) & ((input_ids != 3)[:, None, None, :] | torch.eye(s).bool()))",
    "((torch.arange(s)[None, :] <= torch.arange(s)[:, None]) & (torch.arange(s)[:, None] // 3 == torch.arange(s)[None, :] // 3))",
)


def attention(w: Writer, h: Register, sound: bool, padded: bool) -> Register:
    """h + attention of h, in one of many forms."""
    d = WIDTH // HEADS
    x = w.new(f"F.layer_norm({h.name}, ({WIDTH},))", TOKENS, keep=False)
    form = w.pick("sdpa", "matmul", "einsum", "baddbmm", "sdpa3", "flat", "transposed")
    single = form == "sdpa3"
    heads, each = (1, WIDTH) if single else (HEADS, d)
    kv = 1 if not single and w.chance(3) else heads
    if kv == heads and w.chance(2):
        packed = f"F.linear({x.name}, {w.parameter(3 * WIDTH, WIDTH)}, {w.parameter(3 * WIDTH)})"
        split = f".split({WIDTH}, dim=-1)"
        cut = w.pick(".chunk(3, -1)", split, f".view(b, s, 3, {WIDTH}).unbind(2)", f".unflatten(-1, (3, {WIDTH})).unbind(-2)")
        w.do(f"q, k, v = {packed}{cut}")
    else:
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            w.do(f"{name} = F.linear({x.name}, {w.parameter(n * each, WIDTH)})")
    if not sound and w.chance(6):
        name = w.pick("q", "k", "v")
        w.do(f"{name} = {w.pick(*UNSOUND).format(x=name)}")
        w.inputs |= {"row_data", "own_data"}
    if not single:
        cut = w.pick("{x}.view(b, s, {n}, {d}).transpose(1, 2)", "{x}.unflatten(-1, ({n}, {d})).permute(0, 2, 1, 3)")
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            w.do(f"{name} = {cut.format(x=name, n=n, d=each)}")
        if w.chance(2):
            w.do("q, k = rotate(q, torch.arange(s)), rotate(k, torch.arange(s))")
        elif w.chance(3):
            w.do("at = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, None]" if padded else "at = torch.arange(s).expand(b, 1, s)")
            w.do("q, k = rotate(q, at), rotate(k, at)")
        if w.chance(4):
            w.do(f"q, k = F.rms_norm(q, ({each},)), F.rms_norm(k, ({each},))")
    repeat = ".expand(b, {h}, s, {d})" if kv == 1 else ""
    if kv != heads and not (form == "sdpa" and w.chance(2)):
        repeat = w.pick(
            "{x}.repeat_interleave({h}, 1)",
            "{x}.expand(b, {h}, s, {d})",
            "{x}[:, :, None].expand(b, {kv}, {r}, s, {d}).reshape(b, {h}, s, {d})",
        )
        for name in "kv":
            w.do(f"{name} = {repeat.format(x=name, h=heads, kv=kv, r=heads // kv, d=each)}")
        grouped = False
    else:
        grouped = kv != heads
    # the mask
    planted = not sound and w.chance(4)
    condition = w.pick(*(NOT_CAUSAL if planted else CAUSAL))
    if not planted and w.chance(4):
        condition = f"({condition} & (torch.arange(s)[:, None] - torch.arange(s)[None, :] < 3))"
    if padded and w.chance(2):
        condition = f"({condition} & attention_mask[:, None, None, :].bool())"
        w.data("attention_mask")
    plain = condition == CAUSAL[0] and w.chance(2)
    if single or form == "flat":
        flattened = f".expand(b, {heads}, s, s).reshape(b * {heads}, s, s)"
        condition = f"({condition}).expand(b, 1, s, s)" + (".squeeze(1)" if single else flattened)
    scale = w.pick(f"{each ** -0.5!r}", "0.5", "1.0")
    if form in ("sdpa", "sdpa3"):
        extra = ", enable_gqa=True" if grouped else ""
        if plain:
            w.do(f"y = F.scaled_dot_product_attention(q, k, v, is_causal=True{extra})")
        else:
            additive = w.chance(3)
            mask = f"torch.where({condition}, 0.0, -1e30).double()" if additive else condition
            w.do(f"y = F.scaled_dot_product_attention(q, k, v, attn_mask={mask}, scale={scale}{extra})")
        y = "y" if single else "y.transpose(1, 2).reshape(b, s, -1)"
    else:
        if form == "einsum":
            w.do(f"scores = torch.einsum('bhqd,bhkd->bhqk', q, k) * {scale}")
        elif form == "baddbmm":
            w.do(f"q, k, v = (z.reshape(b * {heads}, s, {each}) for z in (q, k, v))")
            w.do("zero = torch.zeros(1, 1, 1, dtype=q.dtype)")
            w.do(f"scores = torch.baddbmm(zero, q, k.transpose(1, 2), beta=0, alpha={scale}).view(b, {heads}, s, s)")
        elif form == "flat":
            w.do(f"q, k, v = (z.reshape(b * {heads}, s, {each}) for z in (q, k, v))")
            w.do(f"scores = torch.bmm(q, k.transpose(1, 2)) * {scale}")
        elif form == "transposed":
            w.do(f"scores = (k @ q.transpose(-1, -2)).transpose(-1, -2) * {scale}")
        else:
            w.do(f"scores = (q @ k.mT) / {1 / float(scale)!r}")
        rank = (("b", HEADS), ("s",), ("t",)) if form == "flat" else (("b",), (HEADS,), ("s",), ("t",))
        if w.chance(6):
            w.do("scores = 2.0 * torch.tanh(scores / 2.0)")
        score = Register("scores", rank)
        if not sound and w.chance(6):
            score = _kept_shape(w, score)
        masked = w.pick(
            "{x}.masked_fill(~{c}, -1e30)",
            "torch.where({c}, {x}, -1e30)",
            "{x} + torch.where({c}, 0.0, -1e30)",
            "{x}.masked_fill({c} == 0, torch.finfo({x}.dtype).min)",
        )
        score = w.new(masked.format(x=score.name, c=condition), rank, keep=False)
        if not sound and w.chance(6):
            score = _kept_shape(w, score)
        axis = -1 if sound or not w.chance(8) else w.pick(-2, 1, 0)
        top = w.pick(
            "{x}.softmax({a})",
            "F.softmax({x}, {a})",
            "F.softmax({x} - {x}.max({a}, keepdim=True).values, {a})",
            "torch.softmax({x}.double(), {a}).to({x}.dtype)",
        )
        score = w.new(top.format(x=score.name, a=axis), rank, keep=not sound)
        if not sound and w.chance(5):
            score = _kept_shape(w, score)
        if form == "einsum":
            w.do(f"y = torch.einsum('bhqk,bhkd->bqhd', {score.name}, v)")
            y = "y.flatten(2)"
        elif form == "baddbmm":
            w.do(f"y = torch.bmm({score.name}.view(b * {heads}, s, s), v).view(b, {heads}, s, {each})")
            y = "y.transpose(1, 2).flatten(2)"
        elif form == "flat":
            w.do(f"y = torch.bmm({score.name}, v).view(b, {heads}, s, {each})")
            y = "y.transpose(1, 2).flatten(2)"
        elif form == "transposed":
            w.do(f"y = (v.transpose(-1, -2) @ {score.name}.transpose(-1, -2)).transpose(-1, -2)")
            y = "y.transpose(1, 2).flatten(2)"
        else:
            w.do(f"y = {score.name} @ v")
            y = "y.transpose(1, 2).contiguous().view(b, s, -1)"
    return w.new(f"{h.name} + F.linear({y}, {w.parameter(WIDTH, WIDTH)})", TOKENS)


def _kept_shape(w: Writer, score: Register) -> Register:
    """Some operation on scores or probabilities that keeps their dimensions."""
    before = list(w.registers)
    w.registers = [r for r in w.registers if len(r.dims) <= 1]
    new = w.pick(pointwise, along, number_along, of_the_batch, in_place, linear_elsewhere, look_up)(w, score) or score
    w.registers = before
    return new


def feed_forward(w: Writer, h: Register) -> Register:
    up, gate, down = w.parameter(12, WIDTH), w.parameter(12, WIDTH), w.parameter(WIDTH, 12)
    x = w.new(f"F.rms_norm({h.name}, ({WIDTH},))", TOKENS, keep=False).name
    body = w.pick("F.silu(F.linear({x}, {g})) * F.linear({x}, {u})", "F.gelu(F.linear({x}, {u}) + F.linear({x}, {g}).tanh())")
    body = f"F.linear({body.format(x=x, g=gate, u=up)}, {down})"
    if w.chance(4):
        name = f"f{w.count}"
        w.do(f"{name} = lambda {x}: {body}")
        body = f"checkpoint({name}, {x}, use_reentrant=False)"
    return w.new(f"{h.name} + {body}", TOKENS)


NEXT: Dims = (("b",), ("s-",))  # predictions of the next token: one column less


def loss(w: Writer, logits: str) -> Register:
    """What trainers compute of logits inside of the compiled function."""
    form = w.index(6)
    labels, weights = w.pick("labels", "input_ids"), w.pick("late_data", "token_data", "attention_mask", "own_data")
    if form == 0:
        return w.new(f"{logits}.log_softmax(-1)", (("b",), ("s",), (16,)))
    if form in (1, 2):
        flat = f"{logits}[:, :-1].flatten(0, 1), {w.data(labels)}[:, 1:].flatten()"
        return w.new(f"F.cross_entropy({flat}, ignore_index=-100, reduction='{w.pick('mean', 'sum')}')", ())
    logp = w.new(f"{logits}[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)", NEXT, keep=False).name
    if form == 3:
        return w.new(f"{logp} * 1.0", NEXT, keep=False)
    if form == 4:
        return w.new(f"{logp} * {w.data(weights)}[:, 1:]", NEXT, keep=False)
    mask = w.data(weights)
    return w.new(f"({logp} * {mask}[:, 1:]).sum() / (1.0 + {mask}[:, 1:].sum().abs())", ())


@st.composite
def programs(draw, sound: bool = False, padded: bool | None = None) -> Program:
    w = Writer(draw)
    padded = draw(st.booleans()) if padded is None else padded
    if padded:
        w.data("attention_mask")
    start = w.pick("F.embedding(input_ids, self.tokens)", "self.tokens[input_ids]")
    positions = w.pick("", " + self.columns[:s]", " + self.columns[torch.arange(s)]", " + F.embedding(torch.arange(s)[None], self.columns)")
    if draw(st.integers(0, 3)) == 3:
        start = w.pick("{x}", "{x}.tanh()", "{x} + {y}").format(x=w.data("features"), y=start)
    h = w.new(start + positions, TOKENS)
    for _ in range(draw(st.integers(1, 3))):
        kind = w.pick("wander", "attention", "mlp")
        if kind == "attention":
            h = attention(w, h, sound, padded)
        elif kind == "mlp":
            h = feed_forward(w, h)
        else:
            h = back_to_tokens(w, wander(w, h, draw(st.integers(1, 4)), sound), h)
        if not sound and w.chance(12):
            w.do("torch._dynamo.graph_break()")
    h = attention(w, h, sound, padded) if sound or draw(st.booleans()) else h
    logits = w.new(f"F.linear({h.name}, self.head)", (("b",), ("s",), (16,)))
    out = logits if draw(st.booleans()) else loss(w, logits.name)
    outputs = [out]
    extra = [r for r in w.registers if r is not out]
    for _ in range(draw(st.integers(0, 2))):
        outputs.append(extra[w.index(len(extra))])
    inputs = ["input_ids"] + sorted(w.inputs - {"input_ids"})
    return Program(tuple(w.lines), tuple(inputs), tuple(w.parameters), tuple(dict.fromkeys(outputs)), draw(st.booleans()), sound)
