"""Masks over a row of sequences: causal within each sequence, and blind to the others.

    number[q] == number[kv]  and  q >= kv                             number: cumsum(diff(position_ids) != 1), or searchsorted(cu_seqlens)
    number[q] == number[kv]  and  position[q] >= position[kv]         position: position_ids

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
from dualkv_compile.passes.symbolic import KEY, QUERY, AtLeast, Data, Equals

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class WithinSequences:
    """`numbers` number the sequences, `positions` count up in each: then the mask is causal within sequences, and within `window`."""

    numbers: tuple[fx.Node, ...]
    positions: tuple[fx.Node, ...]
    window: int | None


def classify(applied: Sequence[Any]) -> WithinSequences:
    """What the masks of a site mean together. Raises Refused."""
    condition, facts, sizes = masks.joined(applied)
    if facts:
        raise Refused("it adds data to the scores")
    pairs = [a for a in condition.atoms(AtLeast, Equals) if a.has(Data) and {QUERY, KEY} <= a.free_symbols]
    sources = {a: _compared(a) for a in pairs}
    same_number = [a for a in pairs if isinstance(a, Equals)]
    if not same_number:
        raise Refused("it compares no numbers of sequences")
    apart = Profile(condition.xreplace(dict.fromkeys(same_number, sympy.false)), sizes)
    if any(any(table) for _, _, table in apart.intervals):
        raise Refused("a query may see a key of another sequence")
    later = {a: AtLeast(QUERY - KEY, 0) if QUERY in a.args[0].free_symbols else AtLeast(KEY - QUERY, 0) for a in pairs}
    inside = condition.xreplace({**later, **dict.fromkeys(same_number, sympy.true)})
    window, key_data, query_data = Profile(inside, sizes).causal()
    if key_data is not None or query_data is not None:
        raise Refused("it depends on data within a sequence")
    numbers = tuple(sorted({sources[a] for a in same_number}, key=str))
    return WithinSequences(numbers, tuple(sorted({sources[a] for a in pairs if a not in same_number}, key=str)), window)


def _compared(atom: Any) -> fx.Node:
    """The integer tensor of which an atom compares the query's element with the key's."""
    a, b = atom.args
    if not (isinstance(a, Data) and isinstance(b, Data)) or a.node is not b.node or a.dtype.is_floating_point or a.dtype is torch.bool:
        raise Refused(f"it compares other data of the query and the key ({named(atom)})")
    places = [[i for i in x.indices if i != 0] for x in (a, b)]
    if sorted(places, key=str) != sorted([[QUERY], [KEY]], key=str) or [i != 0 for i in a.indices] != [i != 0 for i in b.indices]:
        raise Refused(f"it reads numbers of sequences elsewhere than at the query and the key ({named(atom)})")
    return a.node


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
        x = e.reshape(value.dense, [choice.num_columns])
        if real is not None:  # padding is behind all sequences: no query of theirs sees it, and what it sees is read by nobody
            rest = e.call(aten.add.Tensor, e.call(aten.max.default, x), 1)
            x = e.call(aten.where.self, real, x, rest)
        first, second = _neighbours(e, x, choice)
        if node in found.numbers:
            _hold(engine, together, e.call(aten.eq.Tensor, first, second))
            by_number = e.call(aten.sort.default, x)
            first, second = _neighbours(e, e.getitem(by_number, 0), choice)
            of_first, of_second = _neighbours(e, e.call(aten.index_select.default, of, 0, e.getitem(by_number, 1)), choice)
            _hold(engine, e.call(aten.eq.Tensor, first, second), e.call(aten.eq.Tensor, of_first, of_second))
        if node in found.positions:
            counts = e.call(aten.eq.Scalar, e.call(aten.sub.Tensor, second, first), 1)
            if real is not None:
                counts = e.call(aten.logical_or.default, counts, e.call(aten.logical_not.default, _neighbours(e, real, choice)[1]))
            _hold(engine, together, counts)


def _neighbours(e, x: fx.Node, choice) -> tuple[fx.Node, fx.Node]:
    return e.call(aten.slice.Tensor, x, 0, 0, choice.num_columns - 1), e.call(aten.slice.Tensor, x, 0, 1, choice.num_columns)


def _hold(engine, condition: fx.Node, consequence: fx.Node) -> None:
    """The fact that one follows from the other everywhere."""
    e = engine.emitter
    engine.facts[e.call(aten.all.default, e.call(aten.logical_or.default, e.call(aten.logical_not.default, condition), consequence))] = None
