"""ATen operation -> the symbolic element of its result, given those of its operands.

One small rule per operation in the table `RULES`; an operation without a rule has an unknown element, and so has one
whose rule meets something that it cannot write exactly.

    arange(S)[None, None, None, :] <= arange(S)[None, None, :, None]         i2 - i3 >= 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx as fx

from dualkv_compile.passes import element_arithmetic, element_places
from dualkv_compile.passes.element_call import (
    Call,
    Rule,
    constant,
)
from dualkv_compile.passes.symbolic import (
    Data,
    Element,
    Equals,
    Source,
    Unknown,
    condition_element,
    index,
    number_element,
    rounded,
    sizes_of,
)

RULES: dict[Any, Rule] = {**element_places.RULES, **element_arithmetic.RULES}


def evaluate(node: fx.Node, arg_elements: Callable[[fx.Node], Element | None]) -> Element | None:
    """The symbolic element of a node's result, from those of its arguments (`arg_elements`); None if it is unknown."""
    rule = RULES.get(node.target)
    if rule is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    try:
        return rule(Call(node, arg_elements))
    except Unknown:
        return None


def input_element(node: fx.Node, kind: str) -> Element:
    """The element of a graph input.

    kind: "data", of which nothing is known; "padding_mask", a tensor that holds nothing but 0 and 1; "positions", an
    integer tensor that holds 0, 1, 2, … along its last dimension. What the last two say is taken on trust: whoever
    says it checks it at the call.
    """
    tensor = node.meta["val"]
    sizes = sizes_of(tensor)
    if kind == "positions":
        return number_element(tensor, [(index(len(sizes) - 1) if sizes[-1] != 1 else 0, sympy.true)])
    data = Data(Source(node), *(0 if n == 1 else index(d) for d, n in enumerate(sizes)))
    not_zero = sympy.Not(Equals(data, 0))
    if tensor.dtype == torch.bool:
        return condition_element(tensor, not_zero)
    if kind == "padding_mask":
        return number_element(
            tensor, [(rounded(1, tensor.dtype), not_zero), (rounded(0, tensor.dtype), sympy.Not(not_zero))]
        )
    return number_element(tensor, [(data, sympy.true)])


def constant_element(node: fx.Node, value: bool | float) -> Element | None:
    """The element of a tensor that holds one number everywhere."""
    try:
        return constant(node.meta["val"], value)
    except Unknown:
        return None
