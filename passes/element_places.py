"""Symbolic elements of tensors that are made, moved, viewed, indexed and joined.

arange(S)[None, :]         i1                  x[:, 1:].t()         x[i1, i0 + 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from dualkv_compile.passes.element_call import (
    Call,
    Rule,
    broadcast,
    constant,
    dim_of,
    first_that_holds,
    register_in,
)
from dualkv_compile.passes.symbolic import (
    AtLeast,
    Data,
    Element,
    Equals,
    Unknown,
    add_terms,
    as_cases,
    as_condition,
    condition_element,
    index,
    is_number,
    multiply_terms,
    number_element,
    sizes_of,
    substitute,
    term,
)

aten = torch.ops.aten
prims = torch.ops.prims

RULES: dict[Any, Rule] = {}
_rule = register_in(RULES)

# -- creation ------------------------------------------------------------------------------------------------


@_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(call: Call) -> Element:
    return _progression(call, call.arguments.get("start", 0), call.arguments.get("step", 1))


@_rule(prims.iota.default)
def _iota(call: Call) -> Element:
    return _progression(call, call["start"], call["step"])


def _progression(call: Call, start: Any, step: Any) -> Element:
    start, step = term(start), term(step)
    if isinstance(start, float) or isinstance(step, float):
        raise Unknown("a progression of fractions")
    value = add_terms(start, multiply_terms(step, index(0))) if sizes_of(call.result)[0] != 1 else start
    exact = Element(sizes_of(call.result), torch.int64, ((value, sympy.true),))
    return number_element(call.result, as_cases(exact, call.result.dtype))


@_rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(call: Call) -> Element:
    return constant(call.result, 0)


@_rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(call: Call) -> Element:
    return constant(call.result, 1)


@_rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(call: Call) -> Element:
    return constant(call.result, call["fill_value"])


@_rule(aten.scalar_tensor.default)
def _scalar_tensor(call: Call) -> Element:
    return constant(call.result, call["s"])


@_rule(aten.fill.Scalar)
def _fill(call: Call) -> Element:
    return constant(call.result, call["value"])


# -- the same elements elsewhere -----------------------------------------------------------------------------


@_rule(
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.expand.default,
)
def _same(call: Call) -> Element:
    return broadcast(call.first(), call.result)


@_rule(aten._to_copy.default)
def _to_copy(call: Call) -> Element:
    return _cast(call.first(), call.result)


@_rule(prims.convert_element_type.default)
def _convert(call: Call) -> Element:
    return _cast(call.first("a"), call.result)


def _cast(element: Element, tensor: torch.Tensor) -> Element:
    if tensor.dtype == torch.bool:
        return condition_element(tensor, as_condition(element))
    return number_element(tensor, as_cases(element, tensor.dtype))


@_rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Element:
    rank = len(call.first().shape)
    at = call.dim(rank=rank + 1)
    return substitute(call.first(), call.result, [index(d + (d >= at)) for d in range(rank)])


@_rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view.default, aten._unsafe_view.default)
def _view(call: Call) -> Element:
    """Dimensions of size one come and go; dimensions along which the element is constant may be regrouped."""
    source, sizes = call.first(), sizes_of(call.result)
    return substitute(source, call.result, _matched(source, sizes))


def _matched(source: Element, sizes: Sequence[Any]) -> list[Any]:
    """For each dimension of a viewed tensor, the index in terms of the new dimensions."""
    old = [d for d, n in enumerate(source.shape) if n != 1]
    new = [d for d, n in enumerate(sizes) if n != 1]
    indices: list[Any] = [0] * len(source.shape)
    while old or new:
        if old and new and source.shape[old[0]] == sizes[new[0]]:
            indices[old.pop(0)] = index(new.pop(0))
            continue
        have, want, group = sympy.Integer(1), sympy.Integer(1), [0, 0]
        while (have != want or not all(group)) and (group[0] < len(old) or group[1] < len(new)):
            behind = have < want if have.is_Integer and want.is_Integer else group[0] < group[1]
            if group[0] < len(old) and (behind or group[1] >= len(new)):
                have, group[0] = sympy.expand(have * source.shape[old[group[0]]]), group[0] + 1
            else:
                want, group[1] = sympy.expand(want * sizes[new[group[1]]]), group[1] + 1
        if have != want or any(source.depends_on(d) for d in old[: group[0]]):
            raise Unknown("a view that splits or joins dimensions")
        old, new = old[group[0] :], new[group[1] :]
    return indices


@_rule(aten.permute.default)
def _permute(call: Call) -> Element:
    rank = len(call.first().shape)
    dims = [dim_of(d, rank) for d in call["dims"]]
    return substitute(call.first(), call.result, [index(dims.index(d)) for d in range(rank)])


@_rule(aten.transpose.int)
def _transpose(call: Call) -> Element:
    rank = len(call.first().shape)
    order = list(range(rank))
    if rank:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return substitute(call.first(), call.result, [index(d) for d in order])


@_rule(aten.t.default)
def _t(call: Call) -> Element:
    rank = len(call.first().shape)
    return substitute(call.first(), call.result, [index(rank - 1 - d) for d in range(rank)])


@_rule(aten.select.int)
def _select(call: Call) -> Element:
    dim, size = call.dim(), call.first().shape[call.dim()]
    at = _offset(call["index"], size)
    return substitute(
        call.first(), call.result, [at if d == dim else index(d - (d > dim)) for d in range(len(call.first().shape))]
    )


@_rule(aten.slice.Tensor)
def _slice(call: Call) -> Element:
    dim, size = call.dim(), call.first().shape[call.dim()]
    start = _offset(0 if call["start"] is None else call["start"], size, clamp=True)
    return _moved(call, dim, add_terms(start, multiply_terms(term(call["step"]), index(dim))))


@_rule(aten.flip.default)
def _flip(call: Call) -> Element:
    shape = call.first().shape
    flipped = {dim_of(d, len(shape)) for d in call["dims"]}
    return substitute(
        call.first(), call.result, [shape[d] - 1 - index(d) if d in flipped else index(d) for d in range(len(shape))]
    )


def _offset(at: Any, size: Any, clamp: bool = False) -> Any:
    """A place along a dimension, counted from its start."""
    at = term(at)
    if is_number(at):
        if at >= 0:
            return at
        at = size + at
        if clamp and is_number(at):
            at = max(0, at)
    if sympy.sympify(at).is_nonnegative is not True:
        raise Unknown(f"the place {at} may count from the end")
    return term(sympy.sympify(at))


def _moved(call: Call, dim: int, at: Any) -> Element:
    rank = len(call.first().shape)
    return substitute(call.first(), call.result, [at if d == dim else index(d) for d in range(rank)])


@_rule(aten.index.Tensor)
def _index(call: Call) -> Element:
    """x[i, None, j]: the dimensions of the index tensors, broadcast, stand where the first one is, or in front if
    they are not adjacent."""
    source = call.first()
    rank = len(source.shape)
    given = list(call["indices"]) + [None] * (rank - len(call["indices"]))
    indexed = [d for d, at in enumerate(given) if at is not None]
    depth = max(len(call.fake(given[d]).shape) for d in indexed)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    front = indexed[0] if adjacent else 0
    rest = iter([*range(front), *range(front + depth, len(call.result.shape))])
    return substitute(
        source,
        call.result,
        [_index_term(call, at, front, depth) if at is not None else index(next(rest)) for at in given],
    )


@_rule(aten.index_select.default)
def _index_select(call: Call) -> Element:
    return _moved(call, call.dim(), _index_term(call, call["index"], call.dim(), 1))


def _index_term(call: Call, argument: fx.Node, front: int, depth: int) -> Any:
    """The place that an index tensor reads, in terms of the result's index."""
    element = call.element(argument)
    if element.dtype in (torch.bool, torch.uint8) or len(element.value) != 1:
        raise Unknown("an index that is not one expression")
    skip = front + depth - len(element.shape)
    value = sympy.sympify(element.value[0][0])
    value = value.xreplace({index(d): index(d + skip) for d in range(len(element.shape))})
    if value.has(Data) or value.is_nonnegative is not True:
        raise Unknown("an index that may count from the end")
    return value


@_rule(aten.cat.default)
def _cat(call: Call) -> Element:
    """Piece by piece: i < n1 reads the first tensor at i, n1 <= i < n1 + n2 the second at i - n1, …"""
    pieces = [call.element(t) for t in call["tensors"]]
    dim, offset, parts = dim_of(call["dim"], len(call.result.shape)), sympy.Integer(0), []
    if sizes_of(call.result)[dim] == 1 or any(len(p.shape) != len(call.result.shape) for p in pieces):
        raise Unknown("a concatenation with an empty tensor")
    for i, piece in enumerate(pieces):
        size, at = piece.shape[dim], index(dim)
        here = Equals(at, offset) if size == 1 else AtLeast(offset + size - 1, at)
        moved = substitute(piece, call.result, [at - offset if d == dim else index(d) for d in range(len(piece.shape))])
        parts.append((moved, here if i < len(pieces) - 1 else sympy.true))
        offset = offset + size
    return first_that_holds(call, parts)


@_rule(aten.constant_pad_nd.default)
def _pad(call: Call) -> Element:
    source = call.first()
    rank, pads = len(source.shape), [term(p) for p in call["pad"]]
    inside, indices = [], [index(d) for d in range(rank)]
    for i in range(0, len(pads), 2):
        dim = rank - 1 - i // 2
        before, after = pads[i], pads[i + 1]
        if not (sympy.sympify(before).is_nonnegative and sympy.sympify(after).is_nonnegative):
            raise Unknown("a pad that may cut off")
        if sizes_of(call.result)[dim] == 1 and (before, after) != (0, 0):
            raise Unknown("a pad of an empty tensor")
        if (before, after) != (0, 0):
            indices[dim] = index(dim) - before
            inside += [AtLeast(index(dim), before), AtLeast(before + source.shape[dim] - 1, index(dim))]
    moved = substitute(source, call.result, indices)
    return first_that_holds(call, [(moved, sympy.And(*inside)), (constant(call.result, call["value"]), sympy.true)])
