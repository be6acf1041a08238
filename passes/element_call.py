"""What rules for symbolic elements are written with: one call of an ATen operation, and its arguments' elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from dualkv_compile.passes.symbolic import (
    Element,
    Unknown,
    as_cases,
    as_condition,
    condition_element,
    equal_terms,
    index,
    number_element,
    sizes_of,
    substitute,
    term,
)

Rule = Callable[["Call"], Element]


def register_in(rules: dict[Any, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that enters a rule into a table under each of its targets."""

    def rule_for(*targets: Any) -> Callable[[Rule], Rule]:
        def register(rule: Rule) -> Rule:
            rules.update(dict.fromkeys(targets, rule))
            return rule

        return register

    return rule_for


class Call:
    """One call of an ATen operation: its arguments by name, with elements in place of tensors."""

    def __init__(self, node: fx.Node, arg_elements: Callable[[fx.Node], Element | None]):
        self.node = node
        self.result: torch.Tensor = node.meta["val"]
        self._elements = arg_elements
        schema = node.target._schema.arguments
        self.arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
        self.arguments.update(zip((a.name for a in schema), node.args, strict=False), **node.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def first(self, name: str = "self") -> Element:
        return self.element(self.arguments[name])

    def element(self, argument: Any) -> Element:
        """The element of a tensor or scalar argument."""
        if not self.is_tensor(argument):
            return scalar_element(argument)
        element = self._elements(argument)
        if element is None:
            raise Unknown(f"{argument} is unknown")
        return element

    @staticmethod
    def is_tensor(argument: Any) -> bool:
        return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)

    def fake(self, argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    def example(self, argument: Any) -> Any:
        """A tensor or number of the argument's dtype and rank, for type promotion."""
        value = self.fake(argument)
        if isinstance(value, torch.SymInt):
            return 0
        return 0.0 if isinstance(value, torch.SymFloat) else value

    def broadcast(self, argument: Any) -> Element:
        """The element of an argument as a function of the result's index."""
        return broadcast(self.element(argument), self.result)

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        return dim_of(self.arguments[name], len(self.first().shape) if rank is None else rank)


def dim_of(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def scalar_element(argument: Any) -> Element:
    value = term(argument)
    if isinstance(value, bool):
        return Element((), torch.bool, sympy.sympify(value))
    return Element((), torch.float64 if isinstance(value, float) else torch.int64, ((value, sympy.true),))


def broadcast(element: Element, tensor: torch.Tensor) -> Element:
    sizes = sizes_of(tensor)
    missing = len(sizes) - len(element.shape)
    if missing < 0 or any(n not in (1, m) for n, m in zip(element.shape, sizes[missing:], strict=True)):
        raise Unknown("a broadcast of sizes that are not known to agree")
    return substitute(element, tensor, [index(d + missing) for d in range(len(element.shape))])


def constant(tensor: torch.Tensor, value: Any) -> Element:
    value = term(value)
    if tensor.dtype == torch.bool:
        return condition_element(tensor, sympy.Not(equal_terms(value, 0)))
    return number_element(tensor, as_cases(scalar_element(value), tensor.dtype))


def first_that_holds(call: Call, parts: Sequence[tuple[Element, Any]]) -> Element:
    if call.result.dtype == torch.bool:
        result = sympy.false
        for element, here in reversed(parts):
            result = choose(here, as_condition(element), result)
        return condition_element(call.result, result)
    cases, before = [], sympy.true
    for element, here in parts:
        cases += [(t, sympy.And(before, here, c)) for t, c in as_cases(element, call.result.dtype)]
        before = sympy.And(before, sympy.Not(here))
    return number_element(call.result, cases)


def choose(condition, yes, no):
    return sympy.Or(sympy.And(condition, yes), sympy.And(sympy.Not(condition), no))
