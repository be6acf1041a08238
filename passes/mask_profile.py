"""A mask's condition cut into intervals of the distance between query and key, and what it is in each.

The atoms of a condition are thresholds on the distance q - kv, tests of data, and everything else. The thresholds cut
the distances into finitely many intervals; within one, what is left is a Boolean function of the other atoms, of which
there may be `MAX_ATOMS`, kept as a truth table. Atoms that are neither thresholds nor tests of data must not matter.

    i2 - i3 >= 0  and  not mask[i0, i3] == 0          (.., -1]: false         [0, ..): not mask[i0, i3] == 0
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean

from dualkv_compile.passes.symbolic import (
    AXES,
    AXIS_NAMES,
    HEAD,
    KEY,
    QUERY,
    AtLeast,
    Data,
    Equals,
    atoms_of,
    threshold_points,
    truth_at,
)

MAX_ATOMS = 6
_DISTANCE = sympy.Symbol("distance", integer=True)


class Refused(Exception):
    """This mask is not causal, or not provably so, because …"""


class Profile:
    """A condition cut into intervals of the distance q - kv.

    `intervals`: (first, last, table), ends None where there is none; `table` is the truth table of what is left over
    `atoms`, in order.
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
            raise Refused(f"it tests more than {MAX_ATOMS} things besides the distance of query and key")
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
        beyond = first is not None and isinstance(queries, int) and queries > 1 and first > queries - 1
        before = last is not None and isinstance(keys, int) and keys > 1 and last < 1 - keys
        return not (beyond or before)

    def causal(self) -> tuple[int | None, Boolean | None, Boolean | None]:
        """The window, the condition on the key and that on the query, each None if there is none; or raises Refused."""
        for _, last, table in self.intervals:
            if last is not None and last < 0 and any(table):
                raise Refused(f"a query may see a later key{self._depending(table) or f', that at q + {-last} for one'}")
        ahead = [(first, table) for first, last, table in self.intervals if last is None or last >= 0]
        seen = ahead[0][1]
        if not any(seen):
            raise Refused("a query never sees its own key")
        end = next((i for i, (_, table) in enumerate(ahead) if table != seen), len(ahead))
        for first, table in ahead[end:]:
            if any(table):
                raise Refused(f"what a query sees changes at a distance of {first}")
        window = ahead[end][0] if end < len(ahead) else None
        return window, *self._split(seen)

    def _depending(self, table: tuple[bool, ...]) -> str:
        used = [named(self.atoms[i]) for i in _used(table, len(self.atoms))]
        return f", depending on {', '.join(used)}" if used else ""

    def _split(self, table: tuple[bool, ...]) -> tuple[Boolean | None, Boolean | None]:
        """A truth table as a condition on the key and a condition on the query."""
        used = _used(table, len(self.atoms))
        for i in used:
            check_readable(self.atoms[i])
            if not self.atoms[i].has(Data):
                raise Refused(f"it depends on absolute positions ({named(self.atoms[i])})")
            if HEAD in self.atoms[i].free_symbols:
                raise Refused(f"it depends on the head ({named(self.atoms[i])})")
            if {QUERY, KEY} <= self.atoms[i].free_symbols:
                raise Refused(f"it compares data of the query with data of the key ({named(self.atoms[i])})")
        of_query = [i for i in used if QUERY in self.atoms[i].free_symbols]
        of_key = [i for i in used if i not in of_query]
        rows = list(itertools.product((False, True), repeat=len(self.atoms)))
        allows = {row for row, value in zip(rows, table, strict=True) if value}
        key_rows = {tuple(row[i] for i in of_key) for row in allows}
        query_rows = {tuple(row[i] for i in of_query) for row in allows}
        for row in rows:
            both = tuple(row[i] for i in of_key) in key_rows and tuple(row[i] for i in of_query) in query_rows
            if both != (row in allows):
                raise Refused("its condition on the key depends on the query")
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


def check_readable(condition: Boolean) -> None:
    """What is left of a mask is computed again at every call, so it must be data at places that can be computed."""
    for data in condition.atoms(Data):
        if any(i.is_nonnegative is not True for i in data.indices):
            raise Refused(f"it reads data at a place that may not exist ({named(data)})")
    if condition.free_symbols - set(AXES):
        raise Refused(f"it reads data at a place that depends on a size ({named(condition)})")


def _over_distance(atom: Boolean) -> Boolean | None:
    """An atom over the indices as an atom over q - kv, or None if it depends on anything else."""
    if atom.has(Data):
        return None
    moved = sympy.expand((atom.args[0] - atom.args[1]).xreplace({QUERY: _DISTANCE + KEY}))
    if moved.free_symbols & set(AXES):
        return None
    return atom.func(moved, 0)


def _decided(atom: Boolean, sizes: Sequence[Any]) -> Boolean | None:
    """The truth of an atom that is the same at every index below the sizes.

    Thresholds on a numeric distance are left alone, so that a window stays one whatever the length.
    """
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


def named(expression: Any) -> str:
    """An expression in the words of attention."""
    names = {axis: sympy.Symbol(name) for axis, name in zip(AXES, AXIS_NAMES, strict=True)}
    if isinstance(expression, (AtLeast, Equals)):
        relation = ">=" if isinstance(expression, AtLeast) else "=="
        return f"{named(expression.args[0])} {relation} {named(expression.args[1])}"
    if isinstance(expression, sympy.Not):
        return f"not {named(expression.args[0])}"
    if isinstance(expression, (sympy.And, sympy.Or)):
        word = " and " if isinstance(expression, sympy.And) else " or "
        return "(" + word.join(sorted(map(named, expression.args))) + ")"
    if isinstance(expression, sympy.Float):
        return f"{float(expression):g}"
    return str(expression.xreplace(names))
