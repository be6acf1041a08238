"""What a value is at padding positions, where no padding has a part in it.

    chosen = where(mask, logp, 0)          0 at padding, if mask is False there
    chosen = logp * mask                   the same
    ratio = exp(chosen)                    1 at padding

So a sum of `ratio` over all positions can be computed although padding was left out: `Propagation.excuse_padding` puts the number there.
That a mask is False (or True) at padding is a fact about the actual tensors, asked at the call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from dualkv_compile.passes import masks
from dualkv_compile.passes.layout import is_constant, over_tokens
from dualkv_compile.passes.simplify import is_pointwise
from dualkv_compile.passes.values import AtPadding, Value

aten = torch.ops.aten


def of_result(engine, op, result: Value) -> AtPadding | None:
    """What the result of an operation, a token value, is at padding; None if nothing is known."""
    if all(v.pure for v in op.values):
        return None  # what is computed from inputs alone is there as the unmarked batch has it
    target = op.target
    if target in _MOVES:
        return _known(op.args[0])
    if target in _KEEP_ZERO:
        found = _known(op.args[0])
        return found if found is not None and found.number == 0 else None
    if target in _PRODUCTS:
        return _product(engine, op, result)
    if target in _FILLS:
        return _chosen(engine, op, result, op.args[1], op.args[2], op.args[0])
    if target in _CHOICES:
        return _chosen(engine, op, result, *op.args[:3])
    return _element_wise(op)


_MOVES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}
_KEEP_ZERO = {aten.sum.dim_IntList, aten.mean.dim, aten.mm.default}
_PRODUCTS = {aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_CHOICES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}


def _product(engine, op, result: Value) -> AtPadding | None:
    """Zero where any factor is: one of the facts is enough."""
    call, either = engine.emitter.call, None
    for v in op.values:
        known = _known(v)
        if known is not None and known.number == 0:
            fact = functools.reduce(lambda a, b: call(aten.logical_and.default, a, b), known.facts) if known.facts else None
        elif v.pure and _varies_over_tokens(v, result):
            fact = _fact(engine, v, result, is_zero=True)
        else:
            continue
        if fact is not None:
            either = fact if either is None else call(aten.logical_or.default, either, fact)
    return _element_wise(op) if either is None else AtPadding(0, (either,))


def _chosen(engine, op, result: Value, condition: Value, yes: Any, no: Any) -> AtPadding | None:
    """where(condition, yes, no): whatever the condition is if both are the same number, and one of the two if it is the same at all
    padding positions."""
    if_true, if_false, known = _known(yes), _known(no), _known(condition)
    if if_true is not None and if_false is not None and if_true.number == if_false.number:
        return AtPadding(if_false.number, if_true.facts + if_false.facts)
    if known is not None:
        chosen = if_true if known.number else if_false
        return None if chosen is None else AtPadding(chosen.number, known.facts + chosen.facts)
    chosen = if_true if if_false is None else if_false
    if chosen is None or not condition.pure:
        return None
    fact = _fact(engine, condition, result, is_zero=chosen is if_false)
    return None if fact is None else AtPadding(chosen.number, (fact, *chosen.facts))


def _varies_over_tokens(value: Value, result: Value) -> bool:
    dims = result.layout.dims[len(result.layout.dims) - len(value.layout.dims) :]
    return any(over_tokens(met) and d and not is_constant(d) for d, met in zip(value.layout.dims, dims, strict=True))


def _fact(engine, pure: Value, result: Value, is_zero: bool):
    """The fact that a value that is computed from inputs alone is zero (or nowhere zero) wherever there is padding."""
    odd = engine.emitter.call(aten.ne.Scalar if is_zero else aten.eq.Scalar, pure.dense, 0)
    return engine.zero_fact(odd, result.layout, result.window)


def _element_wise(op) -> AtPadding | None:
    """The operation on the numbers that its operands are at padding."""
    if op.target is not aten._to_copy.default and not is_pointwise(op.target):
        return None
    facts: list = []

    def one(v: Value) -> torch.Tensor:
        known = _known(v)
        if known is None:
            raise LookupError
        facts.extend(known.facts)
        # what has no dimensions counts less in type promotion
        return torch.full([1] * min(len(v.layout.dims), 1), known.number, dtype=v.fake.dtype, device="cpu")

    kwargs = {k: v for k, v in op.kwargs.items() if k != "device"}
    with _disable_current_modes():
        try:
            args, kwargs = pytree.tree_map_only(Value, one, (op.args, kwargs), is_leaf=lambda x: isinstance(x, Value))
            return AtPadding(op.target(*args, **kwargs).item(), tuple(dict.fromkeys(facts)))
        except (LookupError, RuntimeError, TypeError):
            return None


def _known(x: Any) -> AtPadding | None:
    """The number that an operand is at padding: there alone, or everywhere."""
    if isinstance(x, (bool, int, float)):
        return AtPadding(x, ())
    if not isinstance(x, Value):
        return None
    if x.at_padding is not None:
        return x.at_padding
    number = None if x.element is None else masks.constant_value(x.element)
    return None if number is None else AtPadding(number, ())
