"""What a mask means: the element of its tensor, an expression over (b, h, q, kv), classified.

    i2 - i3 >= 0  and  not attention_mask[i0, i3] == 0        causal, where the keys' attention_mask is not zero
    i2 - i3 >= 0  and  3 >= i2 - i3                           causal within a window of 4
    i2 - i3 >= -1                                             refused: a query may see a later key

How, step by step:
 1. the masks of a site become one condition: where a query may attend to a key;
 2. its atoms are sorted: thresholds on the distance q - kv, tests of data, and everything else, which must not matter;
 3. the thresholds cut the distances into finitely many intervals; within one, what is left is a Boolean function of at most
    `MAX_ATOMS` tests of data, compared as a truth table: false for negative distances, the same function on [0, window), false beyond;
 4. that function must be a condition on the key, a condition on the query, or both.

What is not provably of this form is refused, with a reason. `evaluate` and `input_element` make the elements.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean

from dualkv_compile.passes.element_rules import constant_element, evaluate, input_element
from dualkv_compile.passes.mask_data import emit_condition, emit_fact, padding_source, verdict_data_atoms
from dualkv_compile.passes.symbolic import (
    AXES,
    AXIS_NAMES,
    HEAD,
    KEY,
    QUERY,
    AtLeast,
    Data,
    Element,
    Equals,
    as_condition,
    atoms_of,
    index,
    is_number,
    threshold_points,
    truth_at,
)

MAX_ATOMS = 6

_DISTANCE = sympy.Symbol("distance", integer=True)
_CAUSAL = AtLeast(QUERY - KEY, 0)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a mask was proved to be.

    kind: "causal": for every index and all data, a query sees a key exactly if 0 <= q - kv (and q - kv < window) and `key_data` holds at
    (b, kv) and `query_data` holds at (b, q), each None if there is no such condition.
    "causal_if": the same, provided that all `facts`, conditions over (b, h, q, kv), hold at every index; they are to be checked on the
    actual tensors. "refused": neither was proved, because of `reason`.
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
        data = "" if self.data is None else f", where {_named(self.data)}"
        facts = "".join(f", provided that {_named(f)}" for f in self.facts)
        return f"causal{window}{data}{facts}"


class _Refused(Exception):
    """This mask is not causal, or not provably so, because …"""


# -- elements over the axes of attention ----------------------------------------------------------------------------------------------


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
    """The offset, a number or a symbolic size, if the element is the index along `dim` plus an offset; otherwise None."""
    if element.is_condition or len(element.value) != 1:
        return None
    offset = sympy.sympify(element.value[0][0]) - index(dim % len(element.shape))
    if offset.has(Data) or offset.free_symbols & {index(d) for d in range(len(element.shape))}:
        return None
    return int(offset) if offset.is_Integer else offset


def is_masking(number: float, dtype: torch.dtype) -> bool:
    """Whether a number added to (or put in place of) attention scores of this dtype makes their probability exactly zero."""
    return number <= max(torch.finfo(dtype).min / 2, _least_masking(dtype))


def _least_masking(dtype: torch.dtype) -> float:
    # -1e9 itself, as bfloat16 rounds it
    return -1e4 if dtype == torch.float16 else -998244352.0


# -- classification ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Applied:
    """One mask applied to scores. kind: "bool" (True = may attend), "additive", or "fill" (True = the score becomes the number `fill`);
    `element` is over the axes of the scores, right-aligned to (b, h, q, kv); `dtype` is that of the scores."""

    element: Element
    kind: str
    dtype: torch.dtype
    fill: float | None = None


def classify(element: Element, *, kind: str, dtype: torch.dtype, fill: float | None = None) -> Verdict:
    """What one mask means."""
    return conjunction([Applied(element, kind, dtype, fill)])


def conjunction(applied: Sequence[Applied], is_causal: bool = False) -> Verdict:
    """What several masks of one site mean together. is_causal: `q >= kv` holds in addition."""
    try:
        sizes = _sizes([a.element for a in applied])
        condition, facts = (_CAUSAL if is_causal else sympy.true), []
        for mask in applied:
            allowed, assumed = _allowed(mask, sizes)
            condition = sympy.And(condition, allowed)
            facts += assumed
        return _classified(condition, facts, sizes)
    except _Refused as refusal:
        return Verdict("refused", str(refusal))


def negate(element: Element) -> Element:
    """The element of the logical not."""
    return Element(element.shape, torch.bool, sympy.Not(as_condition(element)))


def _sizes(elements: Sequence[Element]) -> tuple[Any, ...]:
    """The sizes of the four axes; 1 where no mask extends along one."""
    sizes: list[Any] = [1] * len(AXES)
    for element in elements:
        if len(element.shape) > len(AXES):
            raise _Refused("it has more than four dimensions")
        for axis, size in zip(range(len(AXES) - len(element.shape), len(AXES)), element.shape, strict=True):
            sizes[axis] = size if size != 1 else sizes[axis]
    return tuple(sizes)


def _allowed(mask: Applied, sizes: Sequence[Any]) -> tuple[Boolean, list[Boolean]]:
    """Where a mask lets a query attend to a key, and what must hold at every index for that to be all it does."""
    shift = {index(d): AXES[d + len(AXES) - len(mask.element.shape)] for d in range(len(mask.element.shape))}
    if mask.kind == "bool":
        return as_condition(mask.element).xreplace(shift), []
    if mask.kind == "fill":
        if mask.fill is None or not is_masking(mask.fill, mask.dtype):
            raise _Refused(f"scores are replaced by {mask.fill}, which is no masking constant")
        return sympy.Not(as_condition(mask.element)).xreplace(shift), []
    if mask.element.is_condition:
        raise _Refused("it adds a Boolean to the scores")
    allowed, facts = [], []
    for value, condition in mask.element.value:
        condition = condition.xreplace(shift)
        if is_number(value) and value == 0:
            allowed.append(condition)
        elif isinstance(value, Data):
            value = value.xreplace(shift)
            allowed.append(sympy.And(condition, Equals(value, 0)))
            least = sympy.sympify(max(torch.finfo(mask.dtype).min / 2, _least_masking(mask.dtype)))
            facts.append(sympy.Or(sympy.Not(condition), Equals(value, 0), AtLeast(least, value)))
        elif not (is_number(value) and is_masking(value, mask.dtype)) and _can_hold(condition, sizes):
            what = "is neither 0 nor a masking constant" if is_number(value) else "depends on positions"
            raise _Refused(f"its value {_named(sympy.sympify(value))} {what}")
    return sympy.Or(*allowed), facts


def _can_hold(condition: Boolean, sizes: Sequence[Any]) -> bool:
    try:
        return any(any(table) for _, _, table in _Profile(condition, sizes).intervals)
    except _Refused:
        return True


def _classified(condition: Boolean, facts: list[Boolean], sizes: Sequence[Any]) -> Verdict:
    profile = _Profile(condition, sizes)
    pairwise = [a for a in profile.used_atoms if a.has(Data) and {QUERY, KEY} <= a.free_symbols]
    for fact in facts:
        _check_readable(fact)
    if len(pairwise) != 1:
        verdict = profile.verdict()
        return dataclasses.replace(verdict, kind="causal_if", facts=tuple(facts)) if facts else verdict
    # a mask that is read from data, as a buffer or an argument: causal if that data is
    (atom,) = pairwise
    for assumed in (_CAUSAL, sympy.Not(_CAUSAL)):
        try:
            verdict = _Profile(condition.xreplace({atom: assumed}), sizes).verdict()
        except _Refused:
            continue
        agrees = sympy.Or(sympy.And(atom, assumed), sympy.And(sympy.Not(atom), sympy.Not(assumed)))
        _check_readable(agrees)
        return dataclasses.replace(verdict, kind="causal_if", facts=(agrees, *facts))
    raise _Refused(f"it is not causal whatever the data is ({_named(atom)})")


class _Profile:
    """A condition cut into intervals of the distance q - kv.

    `intervals`: (first, last, table), ends None where there is none; `table` is the truth table of what is left over `atoms`, in order.
    """

    def __init__(self, condition: Boolean, sizes: Sequence[Any]):
        self.sizes = sizes
        known = {a: truth for a in atoms_of(condition) if (truth := _decided(a, sizes)) is not None}
        condition = condition.xreplace(known)
        atoms = atoms_of(condition)
        points: dict[Boolean, tuple[int, ...]] = {}
        over_distance: dict[Boolean, Boolean] = {}
        for atom in atoms:
            over = _over_distance(atom)
            changes = threshold_points(over, _DISTANCE) if over is not None else None
            if changes is not None:
                over_distance[atom], points[over] = over, changes
        self.atoms = [a for a in atoms if a not in over_distance]
        if len(self.atoms) > MAX_ATOMS:
            raise _Refused(f"it tests more than {MAX_ATOMS} things besides the distance of query and key")
        condition = condition.xreplace(over_distance)
        self.intervals = []
        cuts = sorted({0} | {p for ps in points.values() for p in ps})
        for first, last in itertools.pairwise([None, *cuts, None]):
            last = None if last is None else last - 1
            if self._is_reached(first, last):
                at = first if first is not None else last
                left = truth_at(condition, list(points), _DISTANCE, at)
                self.intervals.append((first, last, _truth_table(left, self.atoms)))

    @property
    def used_atoms(self) -> list[Boolean]:
        used = {i for _, _, table in self.intervals for i in _used(table, len(self.atoms))}
        return [self.atoms[i] for i in sorted(used)]

    def _is_reached(self, first: int | None, last: int | None) -> bool:
        queries, keys = self.sizes[2], self.sizes[3]
        beyond = first is not None and isinstance(queries, int) and queries != 1 and first > queries - 1
        before = last is not None and isinstance(keys, int) and keys != 1 and last < 1 - keys
        return not (beyond or before)

    def verdict(self) -> Verdict:
        """Raises _Refused if this is not causal."""
        for _, last, table in self.intervals:
            if last is not None and last < 0 and any(table):
                raise _Refused(f"a query may see a later key{self._depending(table)}")
        ahead = [(first, table) for first, last, table in self.intervals if last is None or last >= 0]
        seen = ahead[0][1]
        if not any(seen):
            raise _Refused("a query never sees its own key")
        end = next((i for i, (_, table) in enumerate(ahead) if table != seen), len(ahead))
        for first, table in ahead[end:]:
            if any(table):
                raise _Refused(f"what a query sees changes at a distance of {first}")
        window = ahead[end][0] if end < len(ahead) else None
        key_data, query_data = self._split(seen)
        return Verdict("causal", "", window, key_data, query_data)

    def _depending(self, table: tuple[bool, ...]) -> str:
        used = [_named(self.atoms[i]) for i in _used(table, len(self.atoms))]
        return f", depending on {', '.join(used)}" if used else ""

    def _split(self, table: tuple[bool, ...]) -> tuple[Boolean | None, Boolean | None]:
        """A truth table as a condition on the key and a condition on the query."""
        used = _used(table, len(self.atoms))
        for i in used:
            _check_readable(self.atoms[i])
            if not self.atoms[i].has(Data):
                raise _Refused(f"it depends on absolute positions ({_named(self.atoms[i])})")
            if HEAD in self.atoms[i].free_symbols:
                raise _Refused(f"it depends on the head ({_named(self.atoms[i])})")
            if {QUERY, KEY} <= self.atoms[i].free_symbols:
                raise _Refused(f"it compares data of the query with data of the key ({_named(self.atoms[i])})")
        of_query = [i for i in used if QUERY in self.atoms[i].free_symbols]
        of_key = [i for i in used if i not in of_query]
        rows = list(itertools.product((False, True), repeat=len(self.atoms)))
        allows = {row for row, value in zip(rows, table, strict=True) if value}
        key_rows = {tuple(row[i] for i in of_key) for row in allows}
        query_rows = {tuple(row[i] for i in of_query) for row in allows}
        for row in rows:
            both = tuple(row[i] for i in of_key) in key_rows and tuple(row[i] for i in of_query) in query_rows
            if both != (row in allows):
                raise _Refused("its condition on the key depends on the query")
        return self._condition(of_key, key_rows), self._condition(of_query, query_rows)

    def _condition(self, used: list[int], rows: set[tuple[bool, ...]]) -> Boolean | None:
        if not used:
            return None
        symbols = [sympy.Dummy(f"atom{i}") for i in used]
        simplest = sympy.SOPform(symbols, [list(map(int, row)) for row in sorted(rows)])
        return simplest.xreplace(dict(zip(symbols, (self.atoms[i] for i in used), strict=True)))


def _truth_table(condition: Boolean, atoms: Sequence[Boolean]) -> tuple[bool, ...]:
    rows = itertools.product((sympy.false, sympy.true), repeat=len(atoms))
    return tuple(bool(condition.xreplace(dict(zip(atoms, row, strict=True)))) for row in rows)


def _used(table: tuple[bool, ...], count: int) -> list[int]:
    """Which of the atoms a truth table depends on. Atom i flips bit count - 1 - i of a row's number."""
    return [i for i in range(count) if any(table[r] != table[r ^ (1 << (count - 1 - i))] for r in range(len(table)))]


def _check_readable(condition: Boolean) -> None:
    """What is left of a mask is computed again at every call, so it must be data at places that can be computed."""
    for data in condition.atoms(Data):
        if any(i.is_nonnegative is not True for i in data.indices):
            raise _Refused(f"it reads data at a place that may not exist ({_named(data)})")
    if condition.free_symbols - set(AXES):
        raise _Refused(f"it reads data at a place that depends on a size ({_named(condition)})")


def _over_distance(atom: Boolean) -> Boolean | None:
    """An atom over the indices as an atom over q - kv, or None if it depends on anything else."""
    if atom.has(Data):
        return None
    moved = sympy.expand((atom.args[0] - atom.args[1]).xreplace({QUERY: _DISTANCE + KEY}))
    if moved.free_symbols & set(AXES):
        return None
    return atom.func(moved, 0)


def _decided(atom: Boolean, sizes: Sequence[Any]) -> Boolean | None:
    """The truth of an atom that is the same at every index below the sizes. Thresholds on a numeric distance are left alone, so that a
    window stays one whatever the length."""
    if atom.has(Data):
        return None
    over = _over_distance(atom)
    if over is not None and over.free_symbols <= {_DISTANCE}:
        return None
    expression = sympy.expand(atom.args[0] - atom.args[1])
    if not expression.is_polynomial(*AXES) or any(
        sympy.degree(expression, a) > 1 for a in expression.free_symbols & set(AXES)
    ):
        return None
    least = most = expression
    for axis, size in zip(AXES, sizes, strict=True):
        slope = expression.coeff(axis, 1)
        if slope.is_Integer:
            least = least.xreplace({axis: sympy.Integer(0) if slope >= 0 else sympy.sympify(size) - 1})
            most = most.xreplace({axis: sympy.Integer(0) if slope <= 0 else sympy.sympify(size) - 1})
    least, most = sympy.expand(least), sympy.expand(most)
    if (least.free_symbols | most.free_symbols) & set(AXES):
        return None
    if isinstance(atom, Equals):
        return sympy.false if least.is_positive or most.is_negative else None
    if least.is_nonnegative:
        return sympy.true
    return sympy.false if most.is_negative else None


def _named(expression: Any) -> str:
    """An expression in the words of attention."""
    names = {axis: sympy.Symbol(name) for axis, name in zip(AXES, AXIS_NAMES, strict=True)}
    if isinstance(expression, (AtLeast, Equals)):
        relation = ">=" if isinstance(expression, AtLeast) else "=="
        return f"{_named(expression.args[0])} {relation} {_named(expression.args[1])}"
    if isinstance(expression, sympy.Not):
        return f"not {_named(expression.args[0])}"
    if isinstance(expression, (sympy.And, sympy.Or)):
        word = " and " if isinstance(expression, sympy.And) else " or "
        return "(" + word.join(sorted(map(_named, expression.args))) + ")"
    if isinstance(expression, sympy.Float):
        return f"{float(expression):g}"
    return str(expression.xreplace(names))


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
    "negate",
    "padding_source",
    "verdict_data_atoms",
]
