"""Symbolic elements of comparisons, logic, arithmetic and selection.

arange(S)[None, :] <= arange(S)[:, None]         i0 - i1 >= 0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from dualkv_compile.passes.element_call import (
    Call,
    Rule,
    broadcast,
    choose,
    constant,
    first_that_holds,
    register_in,
)
from dualkv_compile.passes.symbolic import (
    AtLeast,
    Element,
    Unknown,
    add_terms,
    as_cases,
    as_condition,
    at_least_terms,
    combine,
    condition_element,
    equal_terms,
    index,
    is_number,
    multiply_terms,
    number_element,
    rounded,
    sizes_of,
    term,
    test,
)

aten = torch.ops.aten

RULES: dict[Any, Rule] = {}
_rule = register_in(RULES)

# -- comparisons and logic -----------------------------------------------------------------------------------


def _compare(relation: Callable[[Any, Any], Any]) -> Callable[[Call], Element]:
    def rule(call: Call) -> Element:
        dtype = torch.result_type(*(call.example(call[name]) for name in ("self", "other")))
        dtype = torch.int64 if dtype == torch.bool else dtype
        a, b = (as_cases(call.broadcast(call[name]), dtype) for name in ("self", "other"))
        return condition_element(call.result, test(relation, a, b))

    return rule


# For numbers, NaN included, `not a >= b` and `b > a` are different; for the integers that other terms stand for they
# are the same.
def _greater(a: Any, b: Any) -> Any:
    if is_number(a) and is_number(b):
        return sympy.sympify(bool(a > b))
    return sympy.Not(at_least_terms(b, a))


for _name, _relation in {
    "eq": equal_terms,
    "ne": lambda a, b: sympy.Not(equal_terms(a, b)),
    "ge": at_least_terms,
    "le": lambda a, b: at_least_terms(b, a),
    "gt": _greater,
    "lt": lambda a, b: _greater(b, a),
}.items():
    _packet = getattr(aten, _name)
    _rule(_packet.Tensor, _packet.Scalar)(_compare(_relation))


def _logic(operation: Callable[..., Any], *names: str) -> Callable[[Call], Element]:
    def rule(call: Call) -> Element:
        if call.result.dtype != torch.bool:
            raise Unknown("bitwise arithmetic on integers")
        return condition_element(call.result, operation(*(as_condition(call.broadcast(call[n])) for n in names)))

    return rule


_and, _or = _logic(sympy.And, "self", "other"), _logic(sympy.Or, "self", "other")
_xor = _logic(lambda a, b: choose(a, sympy.Not(b), b), "self", "other")
_not = _logic(sympy.Not, "self")
_rule(aten.logical_and.default, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)(_and)
_rule(aten.logical_or.default, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)(_or)
_rule(aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)(_xor)
_rule(aten.logical_not.default, aten.bitwise_not.default)(_not)


# -- arithmetic ----------------------------------------------------------------------------------------------


def _arithmetic(
    operation: Callable[..., Any], *names: str, logical: Callable[[Call], Element] | None = None
) -> Callable[[Call], Element]:
    """Operands are converted to the result's dtype first, as the operation itself does; what it gives is rounded to
    it."""

    def rule(call: Call) -> Element:
        dtype = call.result.dtype
        if dtype == torch.bool:
            if logical is None or call.arguments.get("alpha", 1) != 1:
                raise Unknown("arithmetic on Booleans")
            return logical(call)
        operands = [_as_operand(call, call[n]) for n in names]
        exact = Element(
            sizes_of(call.result), dtype, combine(lambda *ts: _numeric(operation(call, *ts), dtype), *operands)
        )
        return number_element(call.result, as_cases(exact, dtype))

    return rule


def _as_operand(call: Call, argument: Any) -> Any:
    """Half-precision operations compute in float32 and do not round a scalar operand to half precision first."""
    dtype = call.result.dtype
    if dtype in (torch.float16, torch.bfloat16) and not call.is_tensor(argument):
        dtype = torch.float32
    return as_cases(call.broadcast(argument), dtype)


def _numeric(value: Any, dtype: torch.dtype) -> Any:
    return rounded(value, dtype) if is_number(value) else value


def _scaled_sum(call: Call, a: Any, b: Any) -> Any:
    return add_terms(a, multiply_terms(term(call.arguments.get("alpha", 1)), b))


def _difference(call: Call, a: Any, b: Any) -> Any:
    return add_terms(a, multiply_terms(multiply_terms(-1, term(call.arguments.get("alpha", 1))), b))


def _quotient(call: Call, a: Any, b: Any) -> Any:
    if not (is_number(a) and is_number(b)) or b == 0:
        raise Unknown("a division of indices, or by zero")
    return a / b


_rule(aten.add.Tensor, aten.add.Scalar)(_arithmetic(_scaled_sum, "self", "other", logical=_or))
_rule(aten.sub.Tensor, aten.sub.Scalar)(_arithmetic(_difference, "self", "other"))
_rule(aten.rsub.Scalar, aten.rsub.Tensor)(_arithmetic(lambda call, a, b: _difference(call, b, a), "self", "other"))
_rule(aten.mul.Tensor, aten.mul.Scalar)(
    _arithmetic(lambda _, a, b: multiply_terms(a, b), "self", "other", logical=_and)
)
_rule(aten.neg.default)(_arithmetic(lambda _, a: multiply_terms(-1, a), "self"))
_rule(aten.div.Tensor, aten.div.Scalar)(_arithmetic(_quotient, "self", "other"))


def _extreme(largest: bool) -> Callable[[Call], Element]:
    def rule(call: Call) -> Element:
        dtype = call.result.dtype
        if dtype == torch.bool:
            return (_or if largest else _and)(call)
        a, b = (as_cases(call.broadcast(call[n]), dtype) for n in ("self", "other"))
        cases = []
        for s, c in a:
            for t, d in b:
                if any(isinstance(x, float) and math.isnan(x) for x in (s, t)):
                    raise Unknown("the extreme of a NaN")
                first = at_least_terms(s, t) if largest else at_least_terms(t, s)
                cases += [(s, sympy.And(c, d, first)), (t, sympy.And(c, d, sympy.Not(first)))]
        return number_element(call.result, cases)

    return rule


_rule(aten.maximum.default)(_extreme(True))
_rule(aten.minimum.default)(_extreme(False))


@_rule(aten.abs.default)
def _abs(call: Call) -> Element:
    cases = []
    for value, condition in as_cases(call.first(), call.result.dtype):
        positive = at_least_terms(value, 0)
        cases += [
            (value, sympy.And(condition, positive)),
            (multiply_terms(-1, value), sympy.And(condition, sympy.Not(positive))),
        ]
    return number_element(call.result, cases)


@_rule(aten.cumsum.default)
def _cumsum(call: Call) -> Element:
    """The sum of a constant: c, 2c, 3c, …"""
    cases, dim = as_cases(broadcast(call.first(), call.result), call.result.dtype), call.dim()
    if len(cases) != 1 or not is_number(cases[0][0]):
        raise Unknown("the cumulative sum of something that is not constant")
    count = index(dim) + 1 if call.first().shape and call.first().shape[dim] != 1 else 1
    exact = Element(sizes_of(call.result), call.result.dtype, ((multiply_terms(cases[0][0], count), sympy.true),))
    return number_element(call.result, as_cases(exact, call.result.dtype))


# -- selection -----------------------------------------------------------------------------------------------


@_rule(aten.where.self)
def _where(call: Call) -> Element:
    condition = as_condition(call.broadcast(call["condition"]))
    return first_that_holds(
        call, [(call.broadcast(call["self"]), condition), (call.broadcast(call["other"]), sympy.true)]
    )


@_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(call: Call) -> Element:
    condition = as_condition(call.broadcast(call["mask"]))
    return first_that_holds(
        call, [(call.broadcast(call["value"]), condition), (call.broadcast(call["self"]), sympy.true)]
    )


@_rule(aten.tril.default)
def _tril(call: Call) -> Element:
    return _triangle(call, lambda row, column: AtLeast(row + term(call["diagonal"]), column))


@_rule(aten.triu.default)
def _triu(call: Call) -> Element:
    return _triangle(call, lambda row, column: AtLeast(column, row + term(call["diagonal"])))


def _triangle(call: Call, inside: Callable[[Any, Any], Any]) -> Element:
    sizes = sizes_of(call.result)
    row, column = (0 if sizes[d] == 1 else index(d) for d in (len(sizes) - 2, len(sizes) - 1))
    return first_that_holds(
        call,
        [(call.first(), inside(sympy.sympify(row), sympy.sympify(column))), (constant(call.result, 0), sympy.true)],
    )
