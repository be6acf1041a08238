"""The element of a tensor as a symbolic expression of its index: terms, conditions and their arithmetic.

An element of a [B, 1, S, S] causal mask is the condition `i2 - i3 >= 0`; of its additive form, the cases
`0 where i2 - i3 >= 0, -inf elsewhere`. Three kinds of things make up an element:

- *terms*, the numbers: a Python number, an integer expression that is affine in the index variables, or `Data`, an
  element read from an input of the graph of which nothing else is known;
- *conditions*: sympy Booleans over the atoms `AtLeast(a, b)` (a >= b) and `Equals(a, b)`;
- *cases*: terms under conditions of which exactly one holds.

Arithmetic is exact or it is not done: every operation returns what the tensor holds, rounded as its dtype rounds, or
raises `Unknown`. Floats are ordered only as constants, because `not a < b` is not `a >= b` for a NaN, which data may
hold.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from sympy.logic.boolalg import Boolean, BooleanFunction

Term = "int | float | sympy.Expr"
MAX_CASES = 16

# Bounds of an affine expression's coefficients and of its constant within which these dtypes hold its value exactly,
# as long as index variables stay below 2**20: a mask over more tokens than that cannot be materialised.
_AFFINE_LIMITS = {
    torch.int64: (2**20, 2**40),
    torch.float64: (2**20, 2**40),
    torch.int32: (2**8, 2**24),
    torch.float32: (4, 2**20),
}


class Unknown(Exception):
    """The element of this tensor cannot be written in this language."""


def index(dim: int) -> sympy.Symbol:
    """The variable that runs over dimension `dim` of a tensor."""
    return sympy.Symbol(f"i{dim}", integer=True, nonnegative=True)


# The axes of attention: a mask's element is brought to these four variables.
AXES = BATCH, HEAD, QUERY, KEY = tuple(index(d) for d in range(4))
AXIS_NAMES = ("b", "h", "q", "kv")


# -- atoms ---------------------------------------------------------------------------------------------------


class Source(sympy.Atom):
    """An input of the graph, as a sympy object."""

    __slots__ = ("node",)

    def __new__(cls, node: fx.Node):
        self = super().__new__(cls)
        self.node = node
        return self

    def _hashable_content(self):
        return (self.node,)

    def _sympystr(self, printer) -> str:
        return self.node.name


class Data(sympy.Expr):
    """`Data(source, *indices)`: the element of an input at these indices, uninterpreted."""

    is_commutative = True

    def __new__(cls, source: Source, *indices: Any):
        return super().__new__(cls, source, *map(sympy.sympify, indices))

    @property
    def node(self) -> fx.Node:
        return self.args[0].node

    @property
    def indices(self) -> tuple[sympy.Expr, ...]:
        return self.args[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def _sympystr(self, printer) -> str:
        return f"{self.node.name}[{', '.join(map(printer.doprint, self.indices))}]"


class AtLeast(BooleanFunction):
    """a >= b. Without data it is decided where signs tell, and kept as AtLeast(a - b, 0)."""

    @classmethod
    def eval(cls, a, b):
        if a.has(Data) or b.has(Data):
            return None
        difference = sympy.expand(a - b)
        if difference.is_nonnegative:
            return sympy.true
        if difference.is_negative:
            return sympy.false
        return None if difference == a and b == 0 else cls(difference, 0)

    def _sympystr(self, printer) -> str:
        return f"({printer.doprint(self.args[0])} >= {printer.doprint(self.args[1])})"


class Equals(BooleanFunction):
    """a == b. Without data it is decided where signs tell, and kept as Equals(a - b, 0)."""

    @classmethod
    def eval(cls, a, b):
        if a.has(Data) or b.has(Data):
            return sympy.true if a == b and not a.dtype.is_floating_point else None
        difference = sympy.expand(a - b)
        if difference.is_zero:
            return sympy.true
        if difference.is_positive or difference.is_negative:
            return sympy.false
        if difference.could_extract_minus_sign():
            difference = -difference
        return None if difference == a and b == 0 else cls(difference, 0)

    def _sympystr(self, printer) -> str:
        return f"({printer.doprint(self.args[0])} == {printer.doprint(self.args[1])})"


def atoms_of(condition: Boolean) -> list[Boolean]:
    return sorted(condition.atoms(AtLeast, Equals), key=str)


# -- terms ---------------------------------------------------------------------------------------------------


def is_number(term: Term) -> bool:
    return isinstance(term, (int, float))


def term(value: Any) -> Term:
    """Python and sympy numbers, symbolic sizes and expressions -> a term."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, fx.Node):
        return term(value.meta["val"])
    if isinstance(value, sympy.Integer):
        return int(value)
    if isinstance(value, (bool, int, float)) or (isinstance(value, sympy.Expr) and not value.is_number):
        return value
    raise Unknown(f"the scalar {value} is not understood")


def rounded(value: float, dtype: torch.dtype) -> int | float:
    """A number as a tensor of `dtype` holds it."""
    if dtype == torch.bool:
        return int(value != 0)
    if dtype.is_complex:
        raise Unknown("complex numbers are not understood")
    if not dtype.is_floating_point:
        if not math.isfinite(value) or value != int(value):
            raise Unknown(f"{value} is no integer")
        info = torch.iinfo(dtype)
        if not info.min <= value <= info.max:
            raise Unknown(f"{value} overflows {dtype}")
        return int(value)
    try:
        value = float(value)
    except OverflowError:
        raise Unknown(f"{value} overflows {dtype}") from None
    if dtype == torch.float64 or not math.isfinite(value):
        return value
    if dtype in (torch.float32, torch.float16):
        return _through(value, "f" if dtype == torch.float32 else "e")
    if dtype == torch.bfloat16:
        return _to_bfloat16(_through(value, "f"))
    raise Unknown(f"numbers of {dtype} are not understood")


def _through(value: float, code: str) -> float:
    try:
        return struct.unpack(code, struct.pack(code, value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _to_bfloat16(value: float) -> float:
    """Rounds a float32 number to nearest, ties to even."""
    if not math.isfinite(value):
        return value
    bits = struct.unpack("I", struct.pack("f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("f", struct.pack("I", bits))[0]


def cast_term(value: Term, dtype: torch.dtype, source: torch.dtype) -> Term:
    """A term of a tensor of dtype `source` after conversion to `dtype` (not bool)."""
    if is_number(value):
        if isinstance(value, float) and not dtype.is_floating_point and math.isfinite(value):
            value = math.trunc(value)
        return rounded(value, dtype)
    if isinstance(value, Data):
        if dtype == source or (dtype == torch.int64 and not source.is_floating_point):
            return value
        raise Unknown(f"data converted from {source} to {dtype}")
    slope_limit, offset_limit = _AFFINE_LIMITS.get(dtype, (0, 0))
    coefficients = value.as_coefficients_dict()
    offset = coefficients.pop(sympy.S.One, 0)
    if value.has(Data) or abs(offset) > offset_limit or any(abs(c) > slope_limit for c in coefficients.values()):
        raise Unknown(f"{value} may not be exact in {dtype}")
    return value


def add_terms(a: Term, b: Term) -> Term:
    if is_number(a) and is_number(b):
        return a + b
    if a == 0 and is_number(a):
        return b
    if b == 0 and is_number(b):
        return a
    return term(sympy.expand(_integral(a) + _integral(b)))


def multiply_terms(a: Term, b: Term) -> Term:
    if is_number(a) and is_number(b):
        return a * b
    if is_number(b):
        a, b = b, a
    if not is_number(a):
        raise Unknown("a product of two indices")
    return b if a == 1 else term(sympy.expand(_integral(a) * _integral(b)))


def _integral(value: Term) -> sympy.Expr | int:
    if isinstance(value, float):
        if not value.is_integer():
            raise Unknown(f"an index combined with {value}")
        return int(value)
    if not is_number(value) and value.has(Data):
        raise Unknown("arithmetic on data")
    return value


def equal_terms(a: Term, b: Term) -> Boolean:
    if is_number(a) and is_number(b):
        return sympy.true if a == b else sympy.false
    if _has_data(a) or _has_data(b):
        _check_fits(a, b)
        return Equals(_operand(a), _operand(b))
    if any(isinstance(x, float) and not x.is_integer() for x in (a, b)):
        return sympy.false
    return Equals(_integral(a), _integral(b))


def at_least_terms(a: Term, b: Term) -> Boolean:
    """a >= b."""
    if is_number(a) and is_number(b):
        return sympy.true if a >= b else sympy.false
    if any(_has_data(x) and not (isinstance(x, Data) and not x.dtype.is_floating_point) for x in (a, b)):
        raise Unknown("an ordering of floating-point data")
    if any(isinstance(x, float) and not math.isfinite(x) for x in (a, b)):
        raise Unknown("an index compared with an infinity")
    a = math.floor(a) if isinstance(a, float) else a
    b = math.ceil(b) if isinstance(b, float) else b
    _check_fits(a, b)
    return AtLeast(a, b)


def _has_data(value: Term) -> bool:
    return not is_number(value) and value.has(Data)


def _check_fits(a: Term, b: Term) -> None:
    """Data may be compared only with numbers that its dtype holds: the comparison is made again on the input itself."""
    for data, other in ((a, b), (b, a)):
        if isinstance(data, Data) and is_number(other) and data.dtype != torch.bool:
            rounded(other, data.dtype)


def _operand(value: Term) -> sympy.Expr:
    if isinstance(value, float) and math.isnan(value):
        raise Unknown("data compared with a NaN")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return sympy.sympify(value)


# -- elements ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Element:
    """The value of a tensor at index (i0, i1, …). `value` is a condition for a Boolean tensor and cases for a number.

    Never depends on the variable of a dimension of size one.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    value: Boolean | tuple[tuple[Term, Boolean], ...]

    def __post_init__(self):
        if (self.dtype == torch.bool) != isinstance(self.value, (Boolean, bool)):
            raise ValueError(f"a {self.dtype} element cannot hold {self.value}")

    @property
    def is_condition(self) -> bool:
        return self.dtype == torch.bool

    def depends_on(self, dim: int) -> bool:
        parts = (
            [self.value]
            if self.is_condition
            else [p for case in self.value for p in case if isinstance(p, sympy.Basic)]
        )
        return any(index(dim) in p.free_symbols for p in parts)

    def __str__(self) -> str:
        if self.is_condition:
            return str(self.value)
        return "; ".join(str(t) if c == sympy.true else f"{t} where {c}" for t, c in self.value)


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in tensor.shape)


def condition_element(tensor: torch.Tensor, condition: Any) -> Element:
    return Element(sizes_of(tensor), torch.bool, sympy.sympify(condition))


def number_element(tensor: torch.Tensor, cases: Sequence[tuple[Term, Boolean]]) -> Element:
    return Element(sizes_of(tensor), tensor.dtype, merge_cases(cases))


def merge_cases(cases: Sequence[tuple[Term, Boolean]]) -> tuple[tuple[Term, Boolean], ...]:
    """Joins equal terms (a NaN equals no other) and leaves out cases that cannot occur."""
    merged: dict[Any, tuple[Term, Boolean]] = {}
    for value, condition in cases:
        if is_never(condition):
            continue
        key = (isinstance(value, float) and math.isnan(value) and "nan") or (
            value + 0.0 if isinstance(value, float) else value
        )
        condition = sympy.Or(merged[key][1], condition) if key in merged else condition
        merged[key] = (value, condition)
    if len(merged) > MAX_CASES:
        raise Unknown(f"more than {MAX_CASES} different values")
    if len(merged) == 1:
        return ((next(iter(merged.values()))[0], sympy.true),)
    return tuple(merged.values())


def as_condition(element: Element) -> Boolean:
    """Where the element is not zero."""
    if element.is_condition:
        return element.value
    return sympy.Or(*(sympy.And(c, sympy.Not(equal_terms(t, 0))) for t, c in element.value))


def as_cases(element: Element, dtype: torch.dtype) -> tuple[tuple[Term, Boolean], ...]:
    """The element converted to the number type `dtype`."""
    if element.is_condition:
        one, zero = rounded(1, dtype), rounded(0, dtype)
        return merge_cases([(one, element.value), (zero, sympy.Not(element.value))])
    return merge_cases([(cast_term(t, dtype, element.dtype), c) for t, c in element.value])


def combine(
    operation: Callable[..., Term], *operands: Sequence[tuple[Term, Boolean]]
) -> tuple[tuple[Term, Boolean], ...]:
    """Applies an operation of terms to every combination of cases that can occur."""
    result: list[tuple[tuple[Term, ...], Boolean]] = [((), sympy.true)]
    for cases in operands:
        result = [((*ts, t), sympy.And(c, d)) for ts, c in result for t, d in cases]
        result = [(ts, c) for ts, c in result if not is_never(c)]
        if len(result) > MAX_CASES**2:
            raise Unknown("too many combinations of values")
    return merge_cases([(operation(*ts), c) for ts, c in result])


def test(
    operation: Callable[[Term, Term], Boolean], a: Sequence[tuple[Term, Boolean]], b: Sequence[tuple[Term, Boolean]]
) -> Boolean:
    """Where a relation of two operands holds."""
    return sympy.Or(*(sympy.And(c, d, operation(s, t)) for s, c in a for t, d in b if not is_never(sympy.And(c, d))))


def substitute(element: Element, tensor: torch.Tensor, indices: Sequence[Any]) -> Element:
    """`element` read at `indices`, expressions of the index of `tensor`."""
    ones = {index(d): sympy.Integer(0) for d, n in enumerate(sizes_of(tensor)) if n == 1}
    mapping = {}
    for dim, at in enumerate(indices):
        at = sympy.sympify(at)
        mapping[index(dim)] = sympy.Integer(0) if element.shape[dim] == 1 else at.xreplace(ones)
    sizes = sizes_of(tensor)
    if element.is_condition:
        return Element(sizes, element.dtype, element.value.xreplace(mapping))
    cases = [(t if is_number(t) else term(t.xreplace(mapping)), c.xreplace(mapping)) for t, c in element.value]
    return Element(sizes, element.dtype, merge_cases(cases))


# -- decisions -----------------------------------------------------------------------------------------------


def threshold_points(atom: Boolean, variable: sympy.Symbol) -> tuple[int, ...] | None:
    """The integers at which the truth of an atom that is affine in `variable` changes: it is constant on [point,
    next point).

    None if the atom is not of that form.
    """
    expression = atom.args[0] - atom.args[1]
    if expression.has(Data):
        return None
    slope = expression.coeff(variable, 1)
    rest = sympy.expand(expression - slope * variable)
    if not (slope.is_Integer and slope != 0 and rest.is_Integer):
        return None
    if isinstance(atom, Equals):
        return (int(-rest // slope), int(-rest // slope) + 1) if rest % slope == 0 else ()
    return (int(sympy.ceiling(-rest / slope)),) if slope > 0 else (int(sympy.floor(-rest / slope)) + 1,)


def truth_at(condition: Boolean, atoms: Sequence[Boolean], variable: sympy.Symbol, value: int) -> Boolean:
    """The condition with the truth of `atoms` at variable = value put in their place."""
    truth = {a: _decide(a, variable, value) for a in atoms}
    return condition.xreplace(truth)


def _decide(atom: Boolean, variable: sympy.Symbol, value: int) -> Boolean:
    number = (atom.args[0] - atom.args[1]).xreplace({variable: sympy.Integer(value)})
    return sympy.sympify(bool(number == 0 if isinstance(atom, Equals) else number >= 0))


def is_never(condition: Boolean) -> bool:
    """Whether a condition is false at every index. Only conditions on a single index variable are looked into."""
    if condition in (sympy.true, sympy.false):
        return condition == sympy.false
    variables = condition.free_symbols
    if len(variables) != 1:
        return False
    (variable,) = variables
    atoms = atoms_of(condition)
    points = [threshold_points(a, variable) for a in atoms]
    if variable.is_nonnegative is not True or any(p is None for p in points):
        return False
    tried = {0} | {p for ps in points for p in ps if p > 0}
    return all(truth_at(condition, atoms, variable, p) == sympy.false for p in tried)
