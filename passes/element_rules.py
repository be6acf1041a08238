"""ATen operation -> the symbolic element of its result, given those of its operands.

One small rule per operation in the table `RULES`; an operation without a rule has an unknown element, and so has one whose rule meets
something that it cannot write exactly.

    arange(S)[None, None, None, :] <= arange(S)[None, None, :, None]         i2 - i3 >= 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from dualkv_compile.passes.symbolic import (
    AtLeast,
    Data,
    Element,
    Equals,
    Source,
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
    substitute,
    term,
    test,
)

aten = torch.ops.aten
prims = torch.ops.prims

RULES: dict[Any, Callable[[Call], Element]] = {}


def evaluate(node: fx.Node, arg_elements: Callable[[fx.Node], Element | None]) -> Element | None:
    """The symbolic element of a node's result, or None if it is unknown. `arg_elements` gives those of its arguments."""
    rule = RULES.get(node.target)
    if rule is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    try:
        return rule(Call(node, arg_elements))
    except Unknown:
        return None


def input_element(node: fx.Node, kind: str) -> Element:
    """The element of a graph input.

    kind: "data", of which nothing is known; "padding_mask", a tensor that holds nothing but 0 and 1; "positions", an integer tensor that holds
    0, 1, 2, … along its last dimension. What the last two say is taken on trust: whoever says it checks it at the call.
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
        return _constant(node.meta["val"], value)
    except Unknown:
        return None


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
            return _scalar_element(argument)
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
        return 0 if isinstance(value, torch.SymInt) else value

    def broadcast(self, argument: Any) -> Element:
        """The element of an argument as a function of the result's index."""
        return _broadcast(self.element(argument), self.result)

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        return _dim(self.arguments[name], len(self.first().shape) if rank is None else rank)


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _scalar_element(argument: Any) -> Element:
    value = term(argument)
    if isinstance(value, bool):
        return Element((), torch.bool, sympy.sympify(value))
    return Element((), torch.float64 if isinstance(value, float) else torch.int64, ((value, sympy.true),))


def _broadcast(element: Element, tensor: torch.Tensor) -> Element:
    sizes = sizes_of(tensor)
    missing = len(sizes) - len(element.shape)
    if missing < 0 or any(n not in (1, m) for n, m in zip(element.shape, sizes[missing:], strict=True)):
        raise Unknown("a broadcast of sizes that are not known to agree")
    return substitute(element, tensor, [index(d + missing) for d in range(len(element.shape))])


def _constant(tensor: torch.Tensor, value: Any) -> Element:
    value = term(value)
    if tensor.dtype == torch.bool:
        return condition_element(tensor, sympy.Not(equal_terms(value, 0)))
    return number_element(tensor, as_cases(_scalar_element(value), tensor.dtype))


def _rule(*targets: Any):
    def register(function):
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


# -- creation ----------------------------------------------------------------------------------------------------------------------------


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
    return _constant(call.result, 0)


@_rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(call: Call) -> Element:
    return _constant(call.result, 1)


@_rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(call: Call) -> Element:
    return _constant(call.result, call["fill_value"])


@_rule(aten.scalar_tensor.default)
def _scalar_tensor(call: Call) -> Element:
    return _constant(call.result, call["s"])


@_rule(aten.fill.Scalar)
def _fill(call: Call) -> Element:
    return _constant(call.result, call["value"])


# -- the same elements elsewhere ---------------------------------------------------------------------------------------------------------


@_rule(
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.expand.default,
)
def _same(call: Call) -> Element:
    return _broadcast(call.first(), call.result)


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
    dims = [_dim(d, rank) for d in call["dims"]]
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
    flipped = {_dim(d, len(shape)) for d in call["dims"]}
    return substitute(
        call.first(), call.result, [shape[d] - 1 - index(d) if d in flipped else index(d) for d in range(len(shape))]
    )


def _offset(at: Any, size: Any, clamp: bool = False) -> Any:
    """A place along a dimension, counted from its start."""
    at = term(at)
    if is_number(at):
        if at >= 0:
            return at
        if not isinstance(size, int):
            at = size + at
        else:
            at = max(0, size + at) if clamp else size + at
    if sympy.sympify(at).is_nonnegative is not True:
        raise Unknown(f"the place {at} may count from the end")
    return term(sympy.sympify(at))


def _moved(call: Call, dim: int, at: Any) -> Element:
    rank = len(call.first().shape)
    return substitute(call.first(), call.result, [at if d == dim else index(d) for d in range(rank)])


@_rule(aten.index.Tensor)
def _index(call: Call) -> Element:
    """x[i, None, j]: the dimensions of the index tensors, broadcast, stand where the first one is, or in front if they are not adjacent."""
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
    dim, offset, parts = _dim(call["dim"], len(call.result.shape)), sympy.Integer(0), []
    if sizes_of(call.result)[dim] == 1 or any(len(p.shape) != len(call.result.shape) for p in pieces):
        raise Unknown("a concatenation with an empty tensor")
    for i, piece in enumerate(pieces):
        size, at = piece.shape[dim], index(dim)
        here = Equals(at, offset) if size == 1 else AtLeast(offset + size - 1, at)
        moved = substitute(piece, call.result, [at - offset if d == dim else index(d) for d in range(len(piece.shape))])
        parts.append((moved, here if i < len(pieces) - 1 else sympy.true))
        offset = offset + size
    return _first_that_holds(call, parts)


def _first_that_holds(call: Call, parts: Sequence[tuple[Element, Any]]) -> Element:
    if call.result.dtype == torch.bool:
        result = sympy.false
        for element, here in reversed(parts):
            result = _choose(here, as_condition(element), result)
        return condition_element(call.result, result)
    cases, before = [], sympy.true
    for element, here in parts:
        cases += [(t, sympy.And(before, here, c)) for t, c in as_cases(element, call.result.dtype)]
        before = sympy.And(before, sympy.Not(here))
    return number_element(call.result, cases)


def _choose(condition, yes, no):
    return sympy.Or(sympy.And(condition, yes), sympy.And(sympy.Not(condition), no))


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
    return _first_that_holds(call, [(moved, sympy.And(*inside)), (_constant(call.result, call["value"]), sympy.true)])


# -- comparisons and logic ---------------------------------------------------------------------------------------------------------------


def _compare(relation: Callable[[Any, Any], Any]) -> Callable[[Call], Element]:
    def rule(call: Call) -> Element:
        dtype = torch.result_type(*(call.example(call[name]) for name in ("self", "other")))
        dtype = torch.int64 if dtype == torch.bool else dtype
        a, b = (as_cases(call.broadcast(call[name]), dtype) for name in ("self", "other"))
        return condition_element(call.result, test(relation, a, b))

    return rule


# For numbers, NaN included, `not a >= b` and `b > a` are different; for the integers that other terms stand for they are the same.
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
_xor = _logic(lambda a, b: _choose(a, sympy.Not(b), b), "self", "other")
_not = _logic(sympy.Not, "self")
_rule(aten.logical_and.default, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)(_and)
_rule(aten.logical_or.default, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)(_or)
_rule(aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)(_xor)
_rule(aten.logical_not.default, aten.bitwise_not.default)(_not)


# -- arithmetic --------------------------------------------------------------------------------------------------------------------------


def _arithmetic(
    operation: Callable[..., Any], *names: str, logical: Callable[[Call], Element] | None = None
) -> Callable[[Call], Element]:
    """Operands are converted to the result's dtype first, as the operation itself does; what it gives is rounded to it."""

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
    cases, dim = as_cases(_broadcast(call.first(), call.result), call.result.dtype), call.dim()
    if len(cases) != 1 or not is_number(cases[0][0]):
        raise Unknown("the cumulative sum of something that is not constant")
    count = index(dim) + 1 if call.first().shape and call.first().shape[dim] != 1 else 1
    exact = Element(sizes_of(call.result), call.result.dtype, ((multiply_terms(cases[0][0], count), sympy.true),))
    return number_element(call.result, as_cases(exact, call.result.dtype))


# -- selection ---------------------------------------------------------------------------------------------------------------------------


@_rule(aten.where.self)
def _where(call: Call) -> Element:
    condition = as_condition(call.broadcast(call["condition"]))
    return _first_that_holds(
        call, [(call.broadcast(call["self"]), condition), (call.broadcast(call["other"]), sympy.true)]
    )


@_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(call: Call) -> Element:
    condition = as_condition(call.broadcast(call["mask"]))
    return _first_that_holds(
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
    return _first_that_holds(
        call,
        [(call.first(), inside(sympy.sympify(row), sympy.sympify(column))), (_constant(call.result, 0), sympy.true)],
    )


__all__ = ["RULES", "constant_element", "evaluate", "input_element"]
