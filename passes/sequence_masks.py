"""Masks over a row of sequences: causal within each sequence, and blind to the others.

    number[q] == number[kv]  and  q >= kv                             number: cumsum(diff(position_ids) != 1), or searchsorted(cu_seqlens)
    number[q] == number[kv]  and  position[q] >= position[kv]         position: position_ids
    …                        and  not position[q] - 5 >= position[kv]            a window of 5

Which sequence a column belongs to is data. A mask that compares the query's number with the key's is taken for one of sequences; that
numbers are equal within each sequence of the plan and in no two of them is a fact, and so is that positions count up. Facts are asked of
the actual tensors at the call, and are as long as the row. Where they are true,

 1. the mask must be false whenever the numbers differ;
 2. where they are equal, positions may be replaced by columns, and what is left must be causal (within a window or not).

What is not of this form is compared with the plan as a whole, query by query and key by key (`sites.asked_of_the_data`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from dualkv_compile.passes import masks
from dualkv_compile.passes.graph import Request, Window
from dualkv_compile.passes.layout import same
from dualkv_compile.passes.mask_profile import Profile, Refused, named
from dualkv_compile.passes.symbolic import KEY, QUERY, AtLeast, Data, Equals, index

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class WithinSequences:
    """`numbers` number the sequences, `positions` count up in each: then the mask is causal within sequences, and within `window`."""

    numbers: tuple[fx.Node, ...]
    positions: tuple[fx.Node, ...]
    window: int | None


def classify(engine, applied: Sequence[Any]) -> WithinSequences:
    """What the masks of a site mean together. Raises Refused."""
    condition, facts, sizes = masks.joined(applied)
    if facts:
        raise Refused("it adds data to the scores")
    pairs = [a for a in condition.atoms(AtLeast, Equals) if a.has(Data) and {QUERY, KEY} <= a.free_symbols]
    compared = {a: _compared(engine, a) for a in pairs}
    same_number = [a for a in pairs if isinstance(a, Equals)]
    if not same_number:
        raise Refused("it compares no numbers of sequences")
    apart = Profile(condition.xreplace(dict.fromkeys(same_number, sympy.false)), sizes)
    if any(any(table) for _, _, table in apart.intervals):
        raise Refused("a query may see a key of another sequence")
    columns = {a: AtLeast(first, second) for a, (_, first, second) in compared.items() if a not in same_number}
    inside = condition.xreplace({**columns, **dict.fromkeys(same_number, sympy.true)})
    window, key_data, query_data = Profile(inside, sizes).causal()
    if key_data is not None or query_data is not None:
        raise Refused("it depends on data within a sequence")
    numbers = {compared[a][0] for a in same_number}
    positions = {compared[a][0] for a in columns}
    return WithinSequences(tuple(sorted(numbers, key=str)), tuple(sorted(positions, key=str)), window)


def _compared(engine, atom: Any) -> tuple[fx.Node, sympy.Expr, sympy.Expr]:
    """The integer tensor of which an atom compares two elements, and what it compares if each element is its column's number."""
    if not all(isinstance(x, Data) for x in atom.args):
        raise Refused(f"it compares other data of the query and the key ({named(atom)})")
    (a, plus_a), (b, plus_b) = (_without_offset(engine, x) for x in atom.args)
    if a.node is not b.node or a.dtype not in _LIMITS or (isinstance(atom, Equals) and (plus_a or plus_b)):
        raise Refused(f"it compares other data of the query and the key ({named(atom)})")
    places = [[i for i in x.indices if i != 0] for x in (a, b)]
    if places not in ([[QUERY], [KEY]], [[KEY], [QUERY]]) or [i != 0 for i in a.indices] != [i != 0 for i in b.indices]:
        raise Refused(f"it reads numbers of sequences elsewhere than at the query and the key ({named(atom)})")
    return a.node, places[0][0] + plus_a, places[1][0] + plus_b


#: How far from zero positions may be, so that what is added to them, no more than this either, does not overflow.
_LIMITS = {torch.int64: 1 << 61, torch.int32: 1 << 29}


def _without_offset(engine, data: Data) -> tuple[Data, int]:
    """Data to which a number was added: the data before, and the number."""
    node = data.node
    signs = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
    if node.target not in signs or len(node.args) != 2 or node.kwargs or type(node.args[1]) is not int:
        return data, 0
    element, number = engine.element_of(node.args[0]), signs[node.target] * node.args[1]
    (source, condition), *others = element.value if element is not None and not element.is_condition else [(None, None)]
    known = isinstance(source, Data) and condition == sympy.true and not others and source.dtype is data.dtype
    if not known or abs(number) > _LIMITS.get(data.dtype, 0):
        return data, 0
    return source.xreplace({index(d): at for d, at in enumerate(data.indices)}), number


def require(engine, found: WithinSequences) -> None:
    """Registers the facts. Raises Refused."""
    e, choice = engine.emitter, engine.choice
    values = {node: engine.values[node] for node in (*found.numbers, *found.positions)}
    if not all(v.pure and v.dense is not None and same(v.fake.numel(), choice.num_columns) for v in values.values()):
        raise Refused("what it compares is not given for each column")
    of = e.request(Request("sequence", Window.of(0, choice.num_columns)))
    before, after = _neighbours(e, of, choice)
    together = e.call(aten.eq.Tensor, before, after)
    real = e.reshape(e.request(Request("valid", Window.of(0, choice.num_columns))), [choice.num_columns]) if choice.drops_padding else None
    for node, value in values.items():
        whole = x = e.reshape(value.dense, [choice.num_columns])
        if real is not None:  # what padding sees is read by nobody
            rest = e.call(aten.add.Tensor, e.call(aten.max.default, x), 1)
            x = e.call(aten.where.self, real, x, rest)
        first, second = _neighbours(e, x, choice)
        if node in found.numbers:
            _hold(engine, together, e.call(aten.eq.Tensor, first, second))
            # by columns no query sees padding, which is behind all sequences; by positions one may, unless their numbers differ
            by_number = e.call(aten.sort.default, whole if found.positions else x)
            equal = e.call(aten.eq.Tensor, *_neighbours(e, e.getitem(by_number, 0), choice))
            sequences = _neighbours(e, e.call(aten.index_select.default, of, 0, e.getitem(by_number, 1)), choice)
            _hold(engine, equal, e.call(aten.eq.Tensor, *sequences))
        if node in found.positions:
            counts = e.call(aten.eq.Scalar, e.call(aten.sub.Tensor, second, first), 1)
            if real is not None:
                counts = e.call(aten.logical_or.default, counts, e.call(aten.logical_not.default, _neighbours(e, real, choice)[1]))
            _hold(engine, together, counts)
            limit = _LIMITS[value.fake.dtype]
            inside = e.call(aten.logical_and.default, e.call(aten.le.Scalar, x, limit), e.call(aten.ge.Scalar, x, -limit))
            engine.facts[e.call(aten.all.default, inside)] = None


def _neighbours(e, x: fx.Node, choice) -> tuple[fx.Node, fx.Node]:
    return e.call(aten.slice.Tensor, x, 0, 0, choice.num_columns - 1), e.call(aten.slice.Tensor, x, 0, 1, choice.num_columns)


def _hold(engine, condition: fx.Node, consequence: fx.Node) -> None:
    """The fact that one follows from the other everywhere."""
    e = engine.emitter
    engine.facts[e.call(aten.all.default, e.call(aten.logical_or.default, e.call(aten.logical_not.default, condition), consequence))] = None
