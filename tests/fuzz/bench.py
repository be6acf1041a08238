"""A recorded graph made by hand, one ATen operation at a time, each also computed on real tensors; then rewritten and every value compared.

For each value of the rewritten graph:
 - packed: it equals the packed form of the dense result, and every real dense position reads an equal number from it;
 - dense: it equals the dense result, at padding too unless it says that it is tainted;
 - its layout: sizes multiply to the shape, copies of a token are equal, what is called constant is.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
import torch.utils._pytree as pytree
from batches import batch_of
from torch._subclasses.fake_tensor import FakeTensorMode

import dualkv_compile.backend  # registers the operators that rewritten graphs hold
from dualkv_compile.kernels.tables import NUM_TABLES
from dualkv_compile.passes.errors import Barrier, CannotDeduplicate
from dualkv_compile.passes.graph import Request, Window
from dualkv_compile.passes.layout import Kind
from dualkv_compile.passes.propagate import PackingChoice, Propagation, TokenInput
from dualkv_compile.passes.trace import Region

aten = torch.ops.aten
UNINITIALISED = (aten.empty_like.default, aten.new_empty.default)


class Bench:
    """`token` and `plain` make inputs, `call` an operation; `check` rewrites and compares."""

    def __init__(self, batch: dict, seed: int = 0, is_row: bool = False):
        """`is_row`: the real tokens of the batch's rows follow one another in one row; some padding may follow them."""
        case = batch_of(vocab=16, **batch)
        self.ids, self.mask = case["batch"]["input_ids"], case["batch"]["attention_mask"]
        marked = {"input_ids": self.ids.clone(), "attention_mask": self.mask.clone()}
        dualkv_compile.mark_shared_prompt(marked, case["prompt_length"], group_ids=case["group_ids"])
        self.plan = dualkv_compile.plan_of(marked["input_ids"])
        self.starts = [0] * len(self.ids)  # of what shares a prompt, in its row
        if is_row:
            real = self.mask.bool()
            self.ids = F.pad(self.ids[real], (0, int((~real).sum()) % 3))[None]
            lengths, pads = real.sum(1), real.int().argmax(1)
            bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            dualkv_compile.mark_shared_prompt(self.ids, case["prompt_length"] - pads, group_ids=case["group_ids"], cu_seqlens=bounds)
            self.plan = dualkv_compile.plan_of(self.ids)
            self.starts = bounds.tolist()[:-1]
        self.rows, self.columns = self.ids.shape
        self.generator = torch.Generator().manual_seed(seed)
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.real: dict[fx.Node, Any] = {}
        self.inputs: list[torch.Tensor] = []
        self.marks: dict[str, TokenInput] = {}

    # -- making ------------------------------------------------------------------------------------------------------------

    def random(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        if dtype is torch.float64:
            return torch.randn(shape, generator=self.generator, dtype=dtype)
        x = torch.randint(0, 4, shape, generator=self.generator)
        return x > 1 if dtype is torch.bool else x.to(dtype)

    def token(self, *features: int, dtype: torch.dtype = torch.float64, shared: bool = True, row_dim: int = 0) -> fx.Node:
        """[.., B, S, features]; equal in the rows of a group over the shared columns and `reach` (drawn) more, different elsewhere."""
        lead = (3,) * row_dim
        x = self.random(self.rows, self.columns, *lead, *features, dtype=dtype)
        reach = int(torch.randint(0, self.plan.owned + 1, (), generator=self.generator))
        if shared:
            for b, first in enumerate(self.plan.first_rows):
                end = max(self.plan.prompt_ends[b] - self.plan.owned + reach, 0)
                self._sequence(x, b)[:end] = self._sequence(x, first)[:end]
        x = x.movedim(2, 0) if row_dim else x
        node = self._placeholder(x.contiguous())
        row = row_dim + self.plan.is_row
        self.marks[node.name] = TokenInput(row_dim=row, column_dim=row_dim + 1, shared=shared, reach=reach)
        return node

    def _sequence(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """A row of `x` [B, S, …], or what follows the start of a sequence in the one row there is."""
        return x[0 if self.plan.is_row else number, self.starts[number] :]

    def plain(self, *shape: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        return self._placeholder(self.random(*shape, dtype=dtype))

    def _placeholder(self, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(value)
        node.meta["val"] = self.fake_mode.from_tensor(value, static_shapes=True)
        self.real[node] = value
        return node

    def call(self, target, *args, **kwargs):
        """The node of an operation, or those of its results."""
        reals = pytree.tree_map_only(fx.Node, self.real.__getitem__, (args, kwargs))
        real = target(*reals[0], **reals[1])
        fakes = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        with self.fake_mode:
            fake = target(*fakes[0], **fakes[1])
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=fake, region=Region())
        self.real[node] = real
        if isinstance(real, torch.Tensor):
            return node
        items = []
        for i, x in enumerate(real):
            item = self.graph.call_function(operator.getitem, (node, i))
            item.meta.update(val=fake[i], region=Region())
            self.real[item] = x
            items.append(item)
        return items

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.real[node].shape)

    # -- checking ----------------------------------------------------------------------------------------------------------

    def check(self, keep: bool = False) -> list:
        """Values of all call_function nodes with how they ran. Raises AssertionError for a value that is not what it claims to be."""
        nodes = [n for n in self.graph.nodes if n.op != "output" and isinstance(self.real[n], torch.Tensor)]
        self.graph.output(tuple(nodes))
        recorded = fx.GraphModule(self.root, self.graph)
        choice = PackingChoice(
            num_rows=self.rows,
            num_columns=self.columns,
            padding=self.plan.padding,
            keep_padding=keep,
            **({"owned": self.plan.owned} if "owned" in PackingChoice.__dataclass_fields__ else {}),
            is_row=self.plan.is_row,
            window_has_padding=lambda w: not self._unpadded(w),
            num_tables=NUM_TABLES,
            attention_impl="reference",
        )
        engine = _Everything(recorded, self.marks, choice, lambda r: self._fake_request(r, recorded, keep), nodes)
        with self.fake_mode:
            rewrite = engine.run()
        if not all(map(self._unpadded, rewrite.unpadded_windows)):
            raise CannotDeduplicate("windows hold padding")
        requests = [n.meta["request"] for n in rewrite.gm.graph.find_nodes(op="placeholder") if "request" in n.meta]
        extra = [self._lookup(r, recorded, keep) for r in requests]
        if rewrite.facts is not None and not bool(rewrite.facts(*self.inputs, *extra)):
            raise CannotDeduplicate("facts do not hold")
        results = rewrite.gm(*self.inputs, *extra)
        found = []
        for node, value, result in zip(nodes, engine.shown, results, strict=True):
            self._check_value(node, value, result, keep)
            found.append((node, value))
        return found

    def _unpadded(self, window: Window) -> bool:
        offset, size = int(window.offset), int(window.size)
        return bool((self.plan.starts <= offset).all() and (self.plan.stops >= offset + size).all())

    def _fake_request(self, request: Request, recorded, keep: bool) -> torch.Tensor:
        if any(w.offset < 0 or w.offset + w.size > self.columns for w in request.windows):
            raise Barrier("reads columns before or after the batch's")  # as the backend does
        return self.fake_mode.from_tensor(self._lookup(request, recorded, keep), static_shapes=True)

    def _lookup(self, request: Request, recorded, keep: bool) -> torch.Tensor:
        def packing(window, keep=keep):
            return self.plan.packing(int(window.offset), int(window.size), keep=keep)

        if request.kind == "table":
            return self.plan.attention_tables(keep=keep, hidden=request.hidden)[request.index]
        if request.kind in ("valid", "real"):
            return getattr(packing(request.window, keep=False), request.kind)
        if request.kind == "subselect":
            return packing(request.window).places_in([packing(w) for w in request.base])
        return getattr(packing(request.window), request.kind)

    def _check_value(self, node: fx.Node, value, result: torch.Tensor, keep: bool) -> None:
        expected, layout = self.real[node], value.layout
        what = f"{node.target} -> {layout}"
        sizes = [_product(a.size for a in dim) for dim in layout.dims]
        assert sizes == list(expected.shape), f"{what}: sizes of {list(expected.shape)}"
        apart = expected.reshape([a.size for a in layout.atoms()])
        for i, atom in enumerate(layout.atoms()):
            if atom.kind is Kind.CONSTANT and apart.numel() and node.target not in UNINITIALISED:
                assert _equal(apart, apart.narrow(i, 0, 1).expand_as(apart)), f"{what}: not constant"
        if node.target in UNINITIALISED:
            return
        if not layout.is_token:
            if value.packed is None:
                assert _equal(result, expected), f"{what}: dense result"
            return
        kinds = [a.kind for a in layout.atoms()]
        row, column = kinds.index(Kind.ROW), kinds.index(Kind.COLUMN)
        tokens = apart.movedim((row, column), (0, 1))  # [B, s, …]
        offset, size = int(layout.column.offset), layout.column.size
        valid = torch.ones(self.rows, size, dtype=torch.bool)  # columns beyond the batch hold what pads it
        first, last = max(offset, 0), min(offset + size, self.columns)
        if value.tainted:  # what is computed there may have read padding
            valid[:, last - offset :] = False
        valid[:, first - offset : last - offset] = self.plan.packing(first, last - first).valid
        if value.shared:
            self._check_shared(tokens, offset, keep, value.reach if value.packed is None else 0, what)
        if value.packed is None:
            other = result.reshape(apart.shape).movedim((row, column), (0, 1))
            if value.tainted:
                tokens, other = tokens[valid], other[valid]
            assert _equal(other, tokens), f"{what}: dense result"
            return
        packing = self.plan.packing(offset, size, keep=keep)
        wanted = tokens.flatten(0, 1)[packing.pack_index]
        shape = [{Kind.ROW: 1, Kind.COLUMN: packing.num_tokens}.get(a.kind, a.size) for a in layout.atoms()]
        assert list(result.shape) == _grouped(shape, layout), f"{what}: packed shape {list(result.shape)}"
        packed = result.reshape(shape).movedim((row, column), (0, 1))[0]
        assert _equal(packed, wanted), f"{what}: packed result"
        seen = packing.unpack_index.view(self.rows, size)
        real = seen < packing.num_tokens
        assert _equal(packed[seen[real]], tokens[real]), f"{what}: copies of a token"

    def _check_shared(self, tokens, offset, keep, reach, what):
        for b, first_row in enumerate(self.plan.first_rows):
            own = max(int(self.plan.prompt_ends[b]) - self.plan.owned + reach, 0)
            start = 0 if keep or self.plan.is_row else int(self.plan.starts[b])
            row, first = (0, 0) if self.plan.is_row else (b, first_row)
            for column in range(start, own):
                at, other = self.starts[b] + column - offset, self.starts[first_row] + column - offset
                if min(at, other) >= 0 and max(at, other) < tokens.shape[1]:
                    assert _equal(tokens[row, at], tokens[first, other]), f"{what}: rows of a group differ"


class _Everything(Propagation):
    """Shows each of `nodes` as it is held: packed where it is packed."""

    def __init__(self, recorded, token_inputs, choice, fake_request, nodes):
        super().__init__(recorded, token_inputs, choice, fake_request)
        self.nodes, self.shown = nodes, []

    def output(self, node: fx.Node) -> None:
        results = []
        for n in self.nodes:
            value = self.values[n]
            value = dataclasses.replace(value)
            self.shown.append(value)
            if value.score is not None:
                if self.choice.drops_padding:
                    raise CannotDeduplicate("attention scores leave the graph")
                value.layout = type(value.layout).plain(n.meta["val"].shape)
                held, value.score = self.dense(self.values[n]), None
                value.dense = held
            else:
                held = value.packed if value.packed is not None else value.dense
            results.append(held)
        self.emitter.graph.output(tuple(results))


def _product(sizes) -> int:
    result = 1
    for n in sizes:
        result *= int(n)
    return result


def _grouped(sizes, layout) -> list[int]:
    sizes = iter(sizes)
    return [_product(next(sizes) for _ in dim) for dim in layout.dims]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
