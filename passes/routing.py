"""Tokens sorted by what they are routed to, as grouped experts run them: sorted, multiplied group by group, put back in order.

    keys, positions = sort(expert[T*k])         hidden[positions // k]        ends = cumsum(histc(keys))
    grouped_mm(hidden[positions // k], weights, ends)                          result[inverse of positions]

Sorting mixes tokens, but what happens in between treats each entry on its own, and the inverse order undoes the sort. So the whole runs
on packed entries, as long as nothing else looks at the order: what a `Routed` value is makes each step's claim. Anything that is not of
this form gets the values computed dense, from the sort on, like attention scores that are read by something else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree

from dualkv_compile.passes import masks
from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.graph import Window
from dualkv_compile.passes.layout import Dim, Kind, Layout, product, same
from dualkv_compile.passes.simplify import is_pointwise
from dualkv_compile.passes.values import Value

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    """One sort of entries: `dims` are theirs, rows, columns and the entries of a token."""

    dims: Dim
    window: Window

    @property
    def tokens(self) -> Dim:
        return self.dims[:2]

    @property
    def entries_per_token(self) -> Any:
        return product(a.size for a in self.dims[2:])


@dataclasses.dataclass(frozen=True)
class Routed:
    """kind: "keys" (the sorted numbers), "positions" (where each stood), "tokens" (which token that is), "values" (anything computed entry
    by entry), "counts" and "ends" (entries per key, and their running sum), "inverse" (where each entry is now)."""

    order: Order
    kind: str


def sort(op) -> list[Value]:
    """sort(x) of a flat token value."""
    x = op.args[0]
    (dim,) = x.layout.dims
    if [a.kind for a in dim[:2]] != [Kind.ROW, Kind.COLUMN] or any(a.kind is not Kind.FEATURE for a in dim[2:]) or not x.shared:
        raise Barrier("works across tokens")
    order, e = Order(dim, x.window), op.engine.emitter
    both = e.call(op.target, op.operand(x, x.layout.dims, x.window), *op.args[1:], **op.kwargs)
    return [_routed(op, order, kind, e.getitem(both, i), i) for i, kind in enumerate(("keys", "positions"))]


def through_routing(engine, op) -> Any:
    """One operation of which an operand is sorted."""
    routed = [v for v in op.values if v.routed is not None]
    order = routed[0].routed.order
    if any(v.routed.order is not order for v in routed):
        raise Barrier("mixes entries of different orders")
    target, kinds = op.target, [v.routed.kind for v in routed]
    name = target._schema.name
    if target is aten.index.Tensor:
        return _index(op, order)
    if target is aten.index_put.default:
        return _inverse(op, order)
    if target in (aten.floor_divide.default, aten.div.Tensor_mode) and kinds == ["positions"]:
        if not same(op.args[1], order.entries_per_token) or op.kwargs.get("rounding_mode", "floor") != "floor":
            raise Barrier("divides positions by something else than the entries per token")
        return _call(op, order, "tokens")
    if target is aten.histc.default and kinds == ["keys"]:
        bins, low, high = op.arg(1, 100), op.arg(2, 0), op.arg(3, 0)
        if low != 0 or high != bins - 1:
            raise Barrier("counts sorted entries other than one by one")
        return _call(op, order, "counts")
    if target is aten.cumsum.default and kinds == ["counts"]:
        return _call(op, order, "ends")
    if name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback"):
        return _grouped_product(op, order)
    if target in (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default):
        return _call(op, order, kinds[0] if _holds(op.node.meta["val"].dtype, kinds[0]) else "values")
    if target in (aten.empty_like.default, aten.zeros_like.default):
        from dualkv_compile.passes.rules import full_like

        return full_like(op)
    if all(k in ("values", "keys") for k in kinds) and _is_entry_wise(op, routed):
        return _call(op, order, "values")
    raise Barrier(f"sorted tokens are read by {target}")


def _holds(dtype: torch.dtype, kind: str) -> bool:
    """Whether numbers of this kind are exact in `dtype`. Keys are few, and histc wants them as floats; positions may be beyond 2**24."""
    return kind == "values" or dtype in (torch.int32, torch.int64, torch.float64) or (kind == "keys" and dtype == torch.float32)


def _is_entry_wise(op, routed: list[Value]) -> bool:
    """Whether an operation treats dimension 0 of what is sorted entry by entry."""
    target, x = op.target, routed[0]
    rank = len(x.layout.dims)
    if target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return same(op.shape[0], x.fake.shape[0])
    if target in (aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten._softmax.default):
        at = op.arg(1, 0)
        return at % (rank + 1 if target is aten.unsqueeze.default else rank) != 0
    if target in (aten.split.Tensor, aten.split_with_sizes.default):
        return op.arg(2, 0) % rank != 0
    if target in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default):
        return bool(op.arg(1)) and all(d % rank != 0 for d in op.arg(1))
    if target is aten.mm.default:
        return len(routed) == 1 and op.args[0] is x and not op.args[1].is_token
    if not is_pointwise(target):
        return target in (aten.masked_fill.Scalar, aten.where.self, aten.where.ScalarOther) and _aligns(op)
    return _aligns(op)


def _aligns(op) -> bool:
    """Element by element: what is sorted has the result's rank, what is not does not vary along the entries."""
    rank = len(op.shape)
    for v in op.values:
        if v.routed is None and (v.is_token or (len(v.layout.dims) == rank and not same(v.fake.shape[0], 1))):
            return False
        if v.routed is not None and len(v.layout.dims) != rank:
            return False
    return True


def _index(op, order: Order) -> Value:
    x, indices = op.args[:2]
    if len(indices) != 1 or indices[0] is None or indices[0].routed is None:
        raise Barrier("indexes sorted tokens by something else than their order")
    kind = indices[0].routed.kind
    if x.routed is not None:
        if x.routed.kind != "values" or kind != "inverse":
            raise Barrier("indexes sorted tokens by something else than their order")
        packed = op.engine.emitter.call(op.target, x.packed, [indices[0].packed])
        return Value(op.node, Layout((order.dims, *Layout.plain(op.shape[1:]).dims)), packed=packed)
    if not x.is_token and kind == "keys":
        return _call(op, order, "values")
    expected = {"tokens": order.tokens, "positions": order.dims}.get(kind)
    if expected is None or not x.is_token or x.layout.dims[0] != expected or x.window != order.window or not x.shared:
        raise Barrier("looks up other tokens than those that were sorted")
    packed = op.operand(x, x.layout.dims, order.window)
    return _routed(op, order, "values", op.engine.emitter.call(op.target, packed, [indices[0].packed]))


def _inverse(op, order: Order) -> Value:
    """inverse[positions] = arange"""
    into, indices, numbers = op.args[:3]
    is_positions = len(indices) == 1 and indices[0].routed is not None and indices[0].routed.kind == "positions"
    counts = isinstance(numbers, Value) and numbers.element is not None and masks.is_arange(numbers.element, 0) == 0
    if not (is_positions and counts and into.routed is None) or op.arg(3, False):
        raise Barrier("writes sorted tokens into another tensor")
    entries = indices[0].fake.shape[0]
    if len(op.shape) != 1 or not (same(op.shape[0], entries) and same(numbers.fake.shape[0], entries)):
        raise Barrier("writes sorted tokens into another tensor")
    e, positions, fake = op.engine.emitter, indices[0].packed, op.node.meta["val"]
    size = positions.meta["val"].shape[0]
    empty = e.call(aten.empty.memory_format, [size], dtype=fake.dtype, device=fake.device)
    count = e.call(aten.arange.default, size, dtype=fake.dtype, device=fake.device)
    return _routed(op, order, "inverse", e.call(aten.index_put.default, empty, [positions], count))


def _grouped_product(op, order: Order) -> Value:
    x, weight, ends = op.args[:3]
    by_order = all(v is not None and v.routed is not None for v in (x, ends)) and (x.routed.kind, ends.routed.kind) == ("values", "ends")
    plain = weight.routed is None and not weight.is_token and len(weight.layout.dims) == 3
    if not by_order or not plain or op.arg(3) is not None or not same(ends.fake.shape[0], weight.fake.shape[0]):
        raise Barrier("multiplies sorted tokens other than group by group")
    flops = 2 * weight.fake.shape[1] * weight.fake.shape[2]
    tokens = op.engine.convert.num_tokens(order.window)
    op.engine.flops.dense = op.engine.flops.dense + flops * x.fake.shape[0]
    op.engine.flops.packed = op.engine.flops.packed + flops * tokens * order.entries_per_token
    return _call(op, order, "values")


def _call(op, order: Order, kind: str) -> Any:
    """The operation on the packed entries: as it stands, but for a view's first size."""
    e = op.engine.emitter

    def packed(v):
        return v.packed if v.routed is not None else op.engine.dense(v)

    args, kwargs = pytree.tree_map_only(Value, packed, (op.args, op.kwargs), is_leaf=lambda x: isinstance(x, Value))
    target = op.target
    if target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        target, args = aten.reshape.default, (args[0], [args[0].meta["val"].shape[0], *args[1][1:]])
    result = e.call(target, *args, **kwargs)
    if isinstance(op.node.meta["val"], (tuple, list)):
        return [_routed(op, order, kind, e.getitem(result, i), i) for i in range(len(op.node.meta["val"]))]
    return _routed(op, order, kind, result)


def _routed(op, order: Order, kind: str, packed, index: int | None = None) -> Value:
    node = op.node if index is None else op.engine.result_node(op.node, index)
    fake = op.node.meta["val"] if index is None else op.node.meta["val"][index]
    return Value(node, Layout.plain(fake.shape), packed=packed, routed=Routed(order, kind))
