"""What a mask means: the element of its tensor, an expression over (b, h, q, kv), classified.

    i2 - i3 >= 0  and  not attention_mask[i0, i3] == 0        causal, where the keys' attention_mask is not zero
    i2 - i3 >= 0  and  3 >= i2 - i3                           causal within a window of 4
    i2 - i3 >= -1                                             refused: a query may see a later key

How, step by step:
 1. the masks of a site become one condition: where a query may attend to a key;
 2. `mask_profile` cuts the distances q - kv into intervals within which the condition depends on data alone;
 3. it must be false for negative distances, the same on [0, window), and false beyond;
 4. there, it must be a condition on the key, a condition on the query, or both. A condition on the two together, as
    in a mask that is a buffer or an argument, is assumed to be causality itself, which becomes a fact to check.

What is not provably of this form is refused, with a reason. `evaluate` and `input_element` make the elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean

from dualkv_compile.passes.element_rules import constant_element, evaluate, input_element
from dualkv_compile.passes.mask_data import emit_condition, emit_fact, padding_source, verdict_data_atoms
from dualkv_compile.passes.mask_profile import Profile, Refused, check_readable, named
from dualkv_compile.passes.symbolic import (
    AXES,
    AXIS_NAMES,
    KEY,
    QUERY,
    AtLeast,
    Data,
    Element,
    Equals,
    as_condition,
    index,
    is_number,
)

_CAUSAL = AtLeast(QUERY - KEY, 0)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a mask was proved to be.

    kind: "causal": for every index and all data, a query sees a key exactly if 0 <= q - kv (and q - kv < window) and
    `key_data` holds at (b, kv) and `query_data` holds at (b, q), each None if there is no such condition.
    "causal_if": the same, provided that all `facts`, conditions over (b, h, q, kv), hold at every index; they are to
    be checked on the actual tensors. "refused": neither was proved, because of `reason`.
    """

    kind: str
    reason: str = ""
    window: int | None = None
    key_data: Boolean | None = None
    query_data: Boolean | None = None
    facts: tuple[Boolean, ...] = ()

    @property
    def data(self) -> Boolean | None:
        parts = [p for p in (self.key_data, self.query_data) if p is not None]
        return sympy.And(*parts) if parts else None

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"refused: {self.reason}"
        window = "" if self.window is None else f" within a window of {self.window}"
        data = "" if self.data is None else f", where {named(self.data)}"
        facts = "".join(f", provided that {named(f)}" for f in self.facts)
        return f"causal{window}{data}{facts}"


# -- elements over the axes of attention ---------------------------------------------------------------------


def align_to_scores(element: Element, rank: int, axes: Sequence[str]) -> Element:
    """The element of a mask of `rank` dimensions that broadcasts against scores, over (b, h, q, kv).

    `axes` names what each dimension of the scores is: "b", "h", "q", "kv", or "1" for a dimension of size one.
    """
    if rank != len(element.shape) or rank > len(axes):
        raise ValueError(f"a mask of {len(element.shape)} dimensions does not align with scores over {axes}")
    own = axes[len(axes) - rank :]
    shape: list[Any] = [1] * len(AXES)
    mapping = {}
    for dim, axis in enumerate(own):
        if axis != "1":
            at = AXIS_NAMES.index(axis)
            shape[at] = element.shape[dim]
            mapping[index(dim)] = AXES[at]
    if element.is_condition:
        return Element(tuple(shape), element.dtype, element.value.xreplace(mapping))
    cases = tuple((t if is_number(t) else t.xreplace(mapping), c.xreplace(mapping)) for t, c in element.value)
    return Element(tuple(shape), element.dtype, cases)


def constant_value(element: Element) -> bool | int | float | None:
    """The number that an element is at every index, or None."""
    if element.is_condition:
        return bool(element.value) if element.value in (sympy.true, sympy.false) else None
    (value, _), *others = element.value
    return value if is_number(value) and not others else None


def is_arange(element: Element, dim: int) -> Any:
    """The offset, a number or a symbolic size, if the element is the index along `dim` plus an offset; else None."""
    if element.is_condition or len(element.value) != 1 or not element.shape:
        return None
    offset = sympy.sympify(element.value[0][0]) - index(dim % len(element.shape))
    if offset.has(Data) or offset.free_symbols & {index(d) for d in range(len(element.shape))}:
        return None
    return int(offset) if offset.is_Integer else offset


def is_masking(number: float, dtype: torch.dtype, factor: float = 1.0) -> bool:
    """Whether attention scores of this dtype have probability zero once this number is added, or put in their place, and they are then
    multiplied with `factor`."""
    return number <= least_masking(dtype, factor)


def least_masking(dtype: torch.dtype, factor: float = 1.0) -> float:
    """The largest number that, added to a score, masks it; what masks before scores are divided by a head dim's root masks after it too."""
    spare = 1.0 if dtype == torch.float16 else 16.0
    return max(torch.finfo(dtype).min / 2, _least_masking(dtype)) / min(factor * spare, 1.0)


def _least_masking(dtype: torch.dtype) -> float:
    # -1e9 itself, as bfloat16 rounds it
    return -1e4 if dtype == torch.float16 else -998244352.0


# -- classification ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Applied:
    """One mask applied to scores of a dtype. `element` is right-aligned to (b, h, q, kv).

    kind: "bool" (True = may attend), "additive", or "fill" (True = the score becomes the number `fill`). factor: what the scores are
    multiplied with after the mask.
    """

    element: Element
    kind: str
    dtype: torch.dtype
    fill: float | None = None
    factor: float = 1.0


def classify(element: Element, *, kind: str, dtype: torch.dtype, fill: float | None = None) -> Verdict:
    """What one mask means."""
    return conjunction([Applied(element, kind, dtype, fill)])


def conjunction(applied: Sequence[Applied], is_causal: bool = False) -> Verdict:
    """What several masks of one site mean together. is_causal: `q >= kv` holds in addition."""
    try:
        condition, facts, sizes = joined(applied)
        return _classified(sympy.And(_CAUSAL, condition) if is_causal else condition, facts, sizes)
    except Refused as refusal:
        return Verdict("refused", str(refusal))


def joined(applied: Sequence[Applied]) -> tuple[Boolean, list[Boolean], tuple[Any, ...]]:
    """Where the masks of a site let a query attend to a key, what must hold for that to be all they do, and the sizes of the axes.
    Raises Refused."""
    if any(a.element is None for a in applied):
        raise Refused("it is not a known expression")
    sizes = _sizes([a.element for a in applied])
    condition, facts = sympy.true, []
    for mask in applied:
        allowed, assumed = _allowed(mask, sizes)
        condition = sympy.And(condition, allowed)
        facts += assumed
    return condition, facts, sizes


def negate(element: Element) -> Element:
    """The element of the logical not."""
    return Element(element.shape, torch.bool, sympy.Not(as_condition(element)))


def _sizes(elements: Sequence[Element]) -> tuple[Any, ...]:
    """The sizes of the four axes; 1 where no mask extends along one."""
    sizes: list[Any] = [1] * len(AXES)
    for element in elements:
        if len(element.shape) > len(AXES):
            raise Refused("it has more than four dimensions")
        for axis, size in zip(range(len(AXES) - len(element.shape), len(AXES)), element.shape, strict=True):
            sizes[axis] = size if size != 1 else sizes[axis]
    return tuple(sizes)


def _allowed(mask: Applied, sizes: Sequence[Any]) -> tuple[Boolean, list[Boolean]]:
    """Where a mask lets a query attend to a key, and what must hold at every index for that to be all it does."""
    shift = {index(d): AXES[d + len(AXES) - len(mask.element.shape)] for d in range(len(mask.element.shape))}
    if mask.fill is not None and not is_masking(mask.fill, mask.dtype, mask.factor):
        raise Refused(f"scores are replaced by {mask.fill}, which is no masking constant")
    if mask.kind == "bool":
        return as_condition(mask.element).xreplace(shift), []
    if mask.kind == "fill":
        if mask.fill is None:
            raise Refused("scores are replaced by what is no number")
        return sympy.Not(as_condition(mask.element)).xreplace(shift), []
    if mask.element.is_condition:
        raise Refused("it adds a Boolean to the scores")
    allowed, facts = [], []
    for value, condition in mask.element.value:
        condition = condition.xreplace(shift)
        if is_number(value) and value == 0:
            allowed.append(condition)
        elif isinstance(value, Data):
            value = value.xreplace(shift)
            allowed.append(sympy.And(condition, Equals(value, 0)))
            least = sympy.sympify(least_masking(mask.dtype, mask.factor))
            facts.append(sympy.Or(sympy.Not(condition), Equals(value, 0), AtLeast(least, value)))
        elif not (is_number(value) and is_masking(value, mask.dtype, mask.factor)) and _can_hold(condition, sizes):
            what = "is neither 0 nor a masking constant" if is_number(value) else "depends on positions"
            raise Refused(f"its value {named(sympy.sympify(value))} {what}")
    return sympy.Or(*allowed), facts


def _can_hold(condition: Boolean, sizes: Sequence[Any]) -> bool:
    try:
        return any(any(table) for _, _, table in Profile(condition, sizes).intervals)
    except Refused:
        return True


def _classified(condition: Boolean, facts: list[Boolean], sizes: Sequence[Any]) -> Verdict:
    profile = Profile(condition, sizes)
    pairwise = [a for a in profile.used_atoms if a.has(Data) and {QUERY, KEY} <= a.free_symbols]
    for fact in facts:
        check_readable(fact)
    if len(pairwise) != 1:
        return Verdict("causal_if" if facts else "causal", "", *profile.causal(), tuple(facts))
    # a mask that is read from data, as a buffer or an argument: causal if that data is
    (atom,) = pairwise
    for assumed in (_CAUSAL, sympy.Not(_CAUSAL)):
        try:
            found = Profile(condition.xreplace({atom: assumed}), sizes).causal()
        except Refused:
            continue
        agrees = sympy.Or(sympy.And(atom, assumed), sympy.And(sympy.Not(atom), sympy.Not(assumed)))
        check_readable(agrees)
        return Verdict("causal_if", "", *found, (agrees, *facts))
    raise Refused(f"it is not causal whatever the data is ({named(atom)})")


__all__ = [
    "AXES",
    "Applied",
    "Element",
    "Verdict",
    "align_to_scores",
    "classify",
    "conjunction",
    "constant_element",
    "constant_value",
    "emit_condition",
    "emit_fact",
    "evaluate",
    "input_element",
    "is_arange",
    "is_masking",
    "least_masking",
    "negate",
    "padding_source",
    "verdict_data_atoms",
]
