"""The oracle of shared-prompt attention: a dense masked softmax over packed tokens, differentiated by autograd.

It is written from the mask's definition alone and shares no code with the kernels.
"""

import dataclasses

import torch

from dualkv_compile.kernels import build_tables


def _part_of(shape, place):
    """A function that puts [1, heads, tokens, dim] into a part of larger memory, NaN around it."""

    def laid_out(x):
        memory = x.new_full(shape(*x.shape[1:]), float("nan"))
        view = place(memory)
        return view.copy_(x)

    return laid_out


# How [1, heads, tokens, dim] lies in memory.
LAID_OUT = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dims first": lambda x: x.mT.contiguous().mT,
    "part of a projection": _part_of(lambda h, t, d: (1, t, h + 3, d), lambda m: m[:, :, 1:-2].transpose(1, 2)),
    "rows apart": _part_of(lambda h, t, d: (1, h, t, d + 5), lambda m: m[..., 2:-3]),
    "every second element": _part_of(lambda h, t, d: (1, h, t, 2 * d), lambda m: m[..., ::2]),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups as (prompt length, response lengths), and the shape of the heads."""

    groups: tuple = ((5, (3, 4)),)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    hidden: bool = False
    first_column: int = 0
    strides: tuple = ("heads first",) * 4  # of q, k, v and dout: names in LAID_OUT

    def segments(self):
        table, at = [], 0
        for prompt, responses in self.groups:
            start, at = at, at + prompt
            table.append((start, at, 0, 0))
            for length in responses:
                table.append((at, at + length, start, start + prompt))
                at += length
        return table

    @property
    def num_tokens(self):
        return self.segments()[-1][1] if self.groups else 0

    def columns(self):
        table = [(stop - start, after - before) for start, stop, before, after in self.segments()]
        parts = [torch.arange(offset, offset + length) + self.first_column for length, offset in table]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)

    def hidden_tokens(self, device="cpu"):
        """Every 7th token, and the first of all (so that a query may see nothing)."""
        return torch.arange(self.num_tokens, device=device) % 7 == 0 if self.hidden else None

    def tables(self, device="cpu"):
        hidden = self.hidden_tokens(device)
        return build_tables(self.segments(), self.columns().to(device), hidden, self.num_tokens, device)

    def inputs(self, dtype, device="cpu", seed=0):
        """q, k, v, sinks (or None), dout, dlse."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

        tokens = self.num_tokens
        q, k = random(1, self.heads, tokens, self.head_dim), random(1, self.kv_heads, tokens, self.head_dim)
        v, dout = random(1, self.kv_heads, tokens, self.value_dim), random(1, self.heads, tokens, self.value_dim)
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        dlse = random(1, self.heads, tokens).to(lse_dtype)
        q, k, v, dout = (LAID_OUT[name](x) for name, x in zip(self.strides, (q, k, v, dout), strict=True))
        return q, k, v, random(self.heads) if self.sinks else None, dout, dlse

    def visible(self, device="cpu"):
        """bool [T, T] (query, key)."""
        end = torch.zeros(self.num_tokens, dtype=torch.long, device=device)
        for start, stop, prefix_start, prefix_stop in self.segments():
            end[start:stop] = stop
            end[prefix_start:prefix_stop] = stop
        if self.hidden:
            end = torch.where(self.hidden_tokens(device), torch.arange(len(end), device=device), end)
        index = torch.arange(self.num_tokens, device=device)
        see = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
        if self.window is not None:
            columns = self.columns().to(device)
            see &= columns[:, None] - columns[None, :] < self.window
        return see


def attention(case, q, k, v, sinks, scale):
    """(out, lse) of dense masked attention, in the dtype of its arguments."""
    return _attention(case, q, k, v, sinks, scale)[:2]


def _attention(case, q, k, v, sinks, scale):
    """(out, lse, weights)."""
    repeat = case.heads // case.kv_heads
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.mT * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    see = case.visible(q.device)
    alone = ~see.any(1)
    scores = scores.masked_fill(~(see | alone[:, None]), -torch.inf)
    if sinks is not None:
        logit = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores.masked_fill(alone[:, None], -torch.inf), logit], -1)
        lse = scores.logsumexp(-1)
        weights = scores.softmax(-1)[..., :-1]
    else:
        lse = scores.logsumexp(-1).masked_fill(alone, -torch.inf)
        weights = scores.softmax(-1).masked_fill(alone[:, None], 0)
    return weights @ v, lse, weights


def magnitudes(case, q, k, v, sinks, dout, dlse, scale):
    """Of each result the largest sum of absolute terms: P (dP - delta + dlse) is left of numbers that may all but cancel."""
    out, lse, weights = _attention(case, q, k, v, sinks, scale)
    at_sink = torch.zeros_like(lse) if sinks is None else (sinks[:, None] - lse).exp()
    repeat = case.heads // case.kv_heads
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    delta = (out.abs() * dout.abs()).sum(-1, keepdim=True) + dlse.abs()[..., None]
    terms = weights * (dout.abs() @ v.abs().mT + delta)
    dk, dv = ((x.mT @ y.abs()).unflatten(1, (case.kv_heads, repeat)).sum(2) for x, y in ((terms, q * scale), (weights, dout)))
    sums = {"out": weights @ v.abs(), "lse": torch.ones(1), "dq": terms @ k.abs() * scale, "dk": dk, "dv": dv}
    sums["dsinks"] = (at_sink * delta[..., 0]).sum(2)
    return {name: x.amax().item() for name, x in sums.items()}


def results(case, function, inputs, scale, with_dlse=True):
    """{name: tensor} of outputs and gradients; ``function(q, k, v, sinks) -> (out, lse)``."""
    *leaves, dout, dlse = inputs
    leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
    out, lse = function(*leaves)
    finite = torch.isfinite(lse)
    loss = (out * dout).sum() if out.dtype == torch.float64 else None
    wanted = [x for x in leaves if x is not None]
    if loss is None:
        outputs, cotangents = ([out, lse], [dout, dlse.masked_fill(~finite, 0)]) if with_dlse else ([out], [dout])
        grads = torch.autograd.grad(outputs, wanted, cotangents)
    else:
        if with_dlse:
            loss = loss + (lse.masked_fill(~finite, 0) * dlse).sum()
        grads = torch.autograd.grad(loss, wanted)
    names = ["dq", "dk", "dv", "dsinks"][: len(wanted)]
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def check(case, function, dtype, device="cpu", with_dlse=True, seed=0):
    """Compare with float64: |got - f64| <= 2 (|low precision oracle - f64| + eps max|f64|), everything finite.

    In float32 and float64, where the oracle itself rounds no more than the order of a sum costs, 4 eps, and eps of the terms that cancel.
    There a soft cap counts too: the kernels take tanh from an exponential, right to 2 eps of the cap however small a score is, and
    scores that are off by that weigh off by twice as much. Gradients of sinks get eps of the terms that cancel in every dtype: they are
    few numbers, so that the oracle's own error may be small by luck, and each product in them has a rounded output.
    """
    scale = case.head_dim**-0.5
    low = case.inputs(dtype, device, seed)
    exact = [None if x is None else x.double() for x in low]
    expected = results(case, lambda *a: attention(case, *a, scale), exact, scale, with_dlse)
    got = results(case, function, low, scale, with_dlse)
    # The oracle at the kernel's own precision: products of rounded inputs, statistics in float32.
    rough = results(case, lambda *a: attention(case, *a, scale), low, scale, with_dlse)
    eps = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 4)
    terms = magnitudes(case, *exact, scale) if case.num_tokens else {}
    for name, value in expected.items():
        mine = got[name].double()
        assert mine.shape == value.shape, name
        finite = torch.isfinite(value)
        assert torch.equal(torch.isfinite(mine), finite), f"{name}: not finite where it should be"
        value, mine, near = (x[finite] for x in (value, mine, rough[name].double()))
        if value.numel():
            bound = 2 * ((near - value).abs().max() + eps * value.abs().max())
            cancelling = (name == "dsinks") + (dtype.itemsize > 2) * ((name in ("dq", "dk")) + 4 * case.softcap)
            bound += torch.finfo(dtype).eps * terms.get(name, 0) * cancelling
            error = (mine - value).abs().max()
            assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}, {case}, {dtype}"
    return got


def operation(case, device="cpu", impl="triton", tables=None):
    """The operator on the case's tables (or others), as a function of q, k, v and sinks."""
    tables = case.tables(device) if tables is None else tables

    def function(q, k, v, sinks):
        scale = case.head_dim**-0.5
        return torch.ops.dualkv.shared_prompt_attention(q, k, v, tables, scale, case.window, case.softcap, sinks, impl)

    return function
