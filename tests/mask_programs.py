"""Mask programs for the tests of masks: tracing, evaluation of symbolic elements by brute force, random programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dualkv_compile.passes import masks
from dualkv_compile.passes.symbolic import Data, Equals, index


@dataclasses.dataclass
class Traced:
    """A program's graph and the element of its (single) result."""

    placeholders: list[fx.Node]
    element: masks.Element | None
    targets: set[Any]


def trace(program: Callable, args: Sequence[torch.Tensor], *, kinds: Sequence[str] = (), mode: str = "fake") -> Traced:
    gm = make_fx(program, tracing_mode=mode)(*args)
    kinds = list(kinds) + ["data"] * (len(args) - len(kinds))
    elements: dict[fx.Node, Any] = {}
    placeholders = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            elements[node] = masks.input_element(node, kind=kinds[len(placeholders)])
            placeholders.append(node)
        elif node.op == "call_function":
            elements[node] = masks.evaluate(node, elements.get)
    (output,) = gm.graph.find_nodes(op="output")
    return Traced(placeholders, elements.get(output.args[0]), {n.target for n in gm.graph.nodes})


def verdict_of(
    program: Callable, args: Sequence[torch.Tensor], *, kinds: Sequence[str] = (), mode: str = "fake", dtype=None
) -> masks.Verdict:
    """The verdict on a program that makes a mask; `dtype` is that of the scores, by default the mask's own."""
    element = trace(program, args, kinds=kinds, mode=mode).element
    if element is None:
        return masks.Verdict("refused", "unknown")
    scores = dtype or (torch.float32 if element.is_condition else element.dtype)
    return masks.classify(element, kind="bool" if element.is_condition else "additive", dtype=scores)


# -- brute force ---------------------------------------------------------------------------------------------


def tabulate(element: masks.Element, data: dict[fx.Node, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The tensor that an element describes, index by index."""
    out = torch.empty(shape, dtype=element.dtype)
    sizes = {
        fake.node.expr: sympy.Integer(n)
        for node, tensor in data.items()
        for fake, n in zip(node.meta["val"].shape, tensor.shape, strict=True)
        if isinstance(fake, torch.SymInt)
    }
    for at in itertools.product(*map(range, shape)):
        here = sizes | {index(d): sympy.Integer(i) for d, i in enumerate(at)}
        if element.is_condition:
            out[at] = holds(element.value, here, data)
        else:
            (value,) = (t for t, c in element.value if holds(c, here, data))
            out[at] = number(value, here, data)
    return out


def holds(condition: Any, here: dict, data: dict[fx.Node, torch.Tensor]) -> bool:
    if condition in (sympy.true, sympy.false):
        return bool(condition)
    if isinstance(condition, sympy.Not):
        return not holds(condition.args[0], here, data)
    if isinstance(condition, sympy.And):
        return all(holds(c, here, data) for c in condition.args)
    if isinstance(condition, sympy.Or):
        return any(holds(c, here, data) for c in condition.args)
    a, b = (number(x, here, data) for x in condition.args)
    return a == b if isinstance(condition, Equals) else a >= b


def number(term: Any, here: dict, data: dict[fx.Node, torch.Tensor]) -> float:
    if isinstance(term, (int, float)):
        return term
    if isinstance(term, Data):
        at = tuple(int(i.xreplace(here)) for i in term.indices)
        # a place that does not exist is only ever looked at under a condition that is false
        inside = all(0 <= i < n for i, n in zip(at, data[term.node].shape, strict=True))
        return data[term.node][at].item() if inside else math.nan
    return float(term.xreplace(here))


def run_emitted(build: Callable, data: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    """Builds a graph with `build(call, lookup)` and runs it on the data."""
    graph = fx.Graph()
    nodes = {}
    for source in data:
        nodes[source] = graph.placeholder(source.name)
    graph.output(build(lambda target, *args, **kwargs: graph.call_function(target, args, kwargs), nodes.__getitem__))
    return fx.GraphModule(torch.nn.Module(), graph)(*data.values())


def promised(verdict: masks.Verdict, data: dict[fx.Node, torch.Tensor], batch: int, length: int) -> torch.Tensor:
    """[B, S, S]: what a verdict says that a mask allows."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    allowed = (distance >= 0).expand(batch, -1, -1)
    if verdict.window is not None:
        allowed = allowed & (distance < verdict.window)
    for axis, condition in (("kv", verdict.key_data), ("q", verdict.query_data)):
        if condition is not None:
            emit = functools.partial(_emit, condition=condition, axis=axis, sizes=(batch, length))
            table = run_emitted(emit, data)
            allowed = allowed & (table[:, None, :] if axis == "kv" else table[:, :, None])
    return allowed


def _emit(call, lookup, *, condition, axis, sizes):
    return masks.emit_condition(call, condition, axis, *sizes, lookup)


def allowed_by(mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """[B, S, S] of what a mask tensor really allows."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    allowed = allowed.expand(batch, 1, length, length)
    return allowed[:, 0]


# -- random programs -----------------------------------------------------------------------------------------
#
# A program is a tree of small closures over (pad, lengths): [B, S] of 0 and 1, and [B]. What is drawn is its
# structure.

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _queries(spelling: int) -> Program:
    """[S, 1], up to leading ones."""

    def program(pad, lengths):
        n = pad.shape[1]
        return [
            lambda: torch.arange(n)[:, None],
            lambda: torch.arange(n).view(1, 1, n, 1),
            lambda: (torch.arange(1, n + 1) - 1).unsqueeze(-1),
            lambda: torch.ones(n, dtype=torch.long).cumsum(0)[:, None] - 1,
            lambda: torch.arange(n)[None].expand(n, n).t(),
            lambda: torch.arange(n, dtype=torch.float32).reshape(-1, 1),
            lambda: n - 1 - torch.arange(n).flip(0)[:, None],
        ][spelling]()

    return program


def _keys(spelling: int) -> Program:
    def program(pad, lengths):
        return _queries(spelling)(pad, lengths).transpose(-1, -2)

    return program


SPELLINGS = range(7)


def _along_keys(pad: torch.Tensor, spelling: int) -> torch.Tensor:
    rows, columns = torch.arange(pad.shape[0])[:, None, None, None], torch.arange(pad.shape[1])[None, None, None, :]
    return [
        lambda: pad[:, None, None, :].bool(),
        lambda: pad.to(torch.bool)[rows, columns],
        lambda: pad[:, None, None] != 0,
        lambda: (1.0 - pad[:, None, None, :].float()) == 0,
        lambda: pad.view(pad.shape[0], 1, 1, pad.shape[1]) > 0,
        lambda: ~pad.eq(0).unsqueeze(1).unsqueeze(2),
        lambda: pad[:, None, None].expand(-1, 1, pad.shape[1], -1) == 1,
    ][spelling]()


def _padding(spelling: int, of_query: bool) -> Program:
    def program(pad, lengths):
        allowed = _along_keys(pad, spelling)
        return allowed.transpose(-1, -2) if of_query else allowed

    return program


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


@st.composite
def causal_condition(draw) -> Program:
    """kv <= q, in many spellings."""
    q, k = _queries(draw(st.sampled_from(SPELLINGS))), _keys(draw(st.sampled_from(SPELLINGS)))
    form = draw(st.integers(0, 6))

    def program(pad, lengths):
        n = pad.shape[1]
        i, j = q(pad, lengths), k(pad, lengths)
        return [
            lambda: j <= i,
            lambda: i >= j,
            lambda: ~(j > i),
            lambda: i - j + 1 > 0,
            lambda: torch.ones(n, n, dtype=torch.bool).tril(),
            lambda: torch.full((n, n), float("-inf")).triu(1) == 0,
            lambda: torch.where(j > i, 0, 1).bool(),
        ][form]()

    return program


@st.composite
def window_condition(draw) -> tuple[Program, int]:
    q, k = _queries(draw(st.sampled_from(SPELLINGS))), _keys(draw(st.sampled_from(SPELLINGS)))
    form, window = draw(st.integers(0, 3)), draw(st.integers(1, 4))

    def program(pad, lengths):
        n = pad.shape[1]
        i, j = q(pad, lengths), k(pad, lengths)
        return [
            lambda: j > i - window,
            lambda: i - j < window,
            lambda: ~torch.ones(n, n).tril(-window).bool(),
            lambda: (i - j).abs() <= window - 1,
        ][form]()

    return program, window


@st.composite
def plain_mask(draw) -> tuple[Program, int | None, bool, bool]:
    """A causal mask as programs write it, with its window and whether keys and queries are padded."""
    parts = [draw(causal_condition())]
    window = None
    if draw(st.booleans()):
        part, window = draw(window_condition())
        parts.append(part)
    key = draw(st.booleans())
    query = draw(st.integers(0, 3)) == 0
    parts += [_padding(draw(st.sampled_from(SPELLINGS)), False)] * key + [
        _padding(draw(st.sampled_from(SPELLINGS)), True)
    ] * query
    return draw(as_mask(draw(st.permutations(parts)))), window, key, query


@st.composite
def as_mask(draw, parts: Sequence[Program]) -> Program:
    """The conjunction of conditions, as a Boolean or as a number to add."""
    form = draw(st.integers(0, 6))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)))
    least = draw(st.sampled_from((-math.inf, torch.finfo(dtype).min, -1e9 if dtype != torch.float16 else -1e4)))

    def program(pad, lengths):
        conditions = [part(pad, lengths) for part in parts]
        both = conditions[0]
        for condition in conditions[1:]:
            both = both & condition
        zero = torch.zeros((), dtype=dtype)
        return [
            lambda: both,
            lambda: both.expand(pad.shape[0], -1, -1, -1) if both.dim() == 4 else both[None, None],
            lambda: torch.where(both, zero, least),
            lambda: torch.zeros(both.shape, dtype=dtype).masked_fill(~both, least),
            lambda: (1 - both.to(dtype)) * torch.finfo(dtype).min,
            lambda: sum(torch.where(c, zero, least) for c in conditions),
            lambda: torch.where(both, zero.double(), -math.inf).to(dtype),
        ][form]()

    return program


@st.composite
def condition(draw, depth: int = 3) -> Program:
    """Any condition."""
    if depth and draw(st.integers(0, 3)):
        a, b = draw(condition(depth - 1)), draw(condition(depth - 1))
        form = draw(st.integers(0, 5))
        return lambda pad, lengths: [
            lambda: a(pad, lengths) & b(pad, lengths),
            lambda: a(pad, lengths) & b(pad, lengths),
            lambda: a(pad, lengths) | b(pad, lengths),
            lambda: a(pad, lengths) ^ b(pad, lengths),
            lambda: ~a(pad, lengths),
            lambda: torch.where(a(pad, lengths), b(pad, lengths), False),
        ][form]()
    kind = draw(st.integers(0, 9))
    if kind <= 3:
        return draw(causal_condition())
    if kind <= 5:
        return draw(window_condition())[0]
    if kind <= 7:
        return _padding(draw(st.sampled_from(SPELLINGS)), of_query=kind == 7)
    q, k = _queries(draw(st.sampled_from(SPELLINGS))), _keys(draw(st.sampled_from(SPELLINGS)))
    compare, offset = getattr(torch, draw(st.sampled_from(COMPARISONS))), draw(st.integers(-2, 2))
    if kind == 8:
        return lambda pad, lengths: compare(k(pad, lengths) + offset, q(pad, lengths))
    side = draw(st.integers(0, 2))
    return lambda pad, lengths: [
        lambda: compare(k(pad, lengths), offset),
        lambda: compare(q(pad, lengths), offset),
        lambda: compare(lengths[:, None, None, None], k(pad, lengths)),
    ][side]()


@st.composite
def any_mask(draw) -> Program:
    return draw(as_mask(draw(st.lists(condition(), min_size=1, max_size=3))))
