"""Attention: found by meaning, rewritten into one call of the shared-prompt op.

A site is either a scaled_dot_product_attention call, or the product of a score and values where the score was followed from

    scores = query @ key.transpose    ->  * scale  ->  + mask | masked_fill(mask, -inf)  ->  softmax  ->  @ value

through whatever views, casts and order of these steps the program uses. A score is never computed unless something else reads it.

    out[B, H, S, D] = attention_site(q, k, v, mask)          becomes
    out[1, H, T', D], lse = dualkv.shared_prompt_attention(q', k', v', tables, scale)
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes import masks, sequence_masks
from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.graph import Request, Window
from dualkv_compile.passes.layout import Atom, Kind, Layout, is_columns, over_tokens, product, same
from dualkv_compile.passes.mask_profile import Refused
from dualkv_compile.passes.simplify import grad_enabled
from dualkv_compile.passes.values import Value

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Mask:
    """One mask applied to the scores; its element broadcasts against (b, h, q, kv). kind: "bool" (True = may attend), "additive", or "fill"
    (True = gets the number `fill`; with "bool", False does). factor: what the scores are multiplied with after the mask."""

    value: Value
    kind: str
    dtype: torch.dtype
    fill: float | None = None
    factor: float = 1.0
    rank: int = 4  # of the scores that it broadcasts against: 4, or 3 where there is no dimension of heads

    @property
    def element(self):
        return self.value.element


@dataclasses.dataclass(frozen=True)
class Score:
    """softmax?(cap * tanh(scale / cap * q k)?  masked by `masks`)."""

    query: Value  # layout (batch)(column)(feature)
    key: Value  # layout (batch)(feature)(column)
    scale: float = 1.0
    softcap: float = 0.0
    capping: bool = False  # tanh seen, its factor not yet
    masks: tuple[Mask, ...] = ()
    sinks: Value | None = None  # one more score per head, which attends to nothing; the keys are then one more
    is_top: bool = False  # the largest score of each query, to be subtracted from the scores
    is_probability: bool = False


# -- scores -----------------------------------------------------------------------------------------------------------------


def is_score_product(a: Value, b: Value) -> bool:
    """Whether a batched product pairs every token with every token of its row."""

    if not (a.is_token and b.is_token and a.score is None and b.score is None):
        return False
    (batch_a, m, k), (batch_b, k2, n) = a.layout.dims, b.layout.dims
    # the rows are in the batch, or the batch is one row
    rows = all(any(x.kind is Kind.ROW for x in (*batch, *columns)) for batch, columns in ((batch_a, m), (batch_b, n)))
    return rows and is_columns(m) and is_columns(n) and not over_tokens(k) and not over_tokens(k2)


def score_product(engine, op, a: Value, b: Value) -> Value:
    engine.sites_found += not op.node.meta.get("describes", False)
    batch = a.layout.dims[0]
    key = b.layout.column
    dims = (batch, a.layout.dims[1], (Atom(Kind.KEY, key.size, key.offset),))
    return Value(op.node, Layout(dims), score=Score(a, b))


def through_scores(engine, op) -> Any:
    """One operation of which an operand is a score."""
    from dualkv_compile.passes.rules import (
        RULES,  # the rules of views serve scores too; they themselves find scores here
    )

    target = op.target
    if any(_is_score(v) and grad_enabled(v.node) != engine.emitter.region.grad_enabled for v in op.values):
        raise Barrier("computes a part of the attention without gradients")
    if target in _VIEWS:
        score = op.args[0]
        result = RULES[target](op)
        if _batch_order(result.layouts) != _batch_order(score.layout) and target in _REORDERING:
            raise Barrier("reorders the rows or heads of attention scores")
        return Value(op.node, result.layouts, score=score.score)
    if target in (aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default):
        if target is aten.detach.default:
            raise Barrier("detaches attention scores")
        if target is aten._to_copy.default and not op.node.meta["val"].is_floating_point():
            raise Barrier("casts attention scores to integers")
        return Value(op.node, op.args[0].layout, score=op.args[0].score)
    if target is aten._softmax.default:
        return softmax(op)
    if target is aten.cat.default:
        return with_sinks(op)
    if target in (aten.max.dim, aten.amax.default):
        return top_score(engine, op)
    if target is aten.sub.Tensor:
        return subtract_top(op)
    if target is aten.slice.Tensor:
        return without_sinks(op)
    if target is aten.bmm.default and op.args[0].score is not None and op.args[1].score is None:
        return weighted_values(engine, op)
    if target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return scale_scores(op)
    if target is aten.neg.default:
        return scale_scores(op, -1.0)
    if target is aten.tanh.default:
        return cap_scores(op)
    if target is aten.add.Tensor:
        if op.kwargs.get("alpha", 1) != 1:
            raise Barrier("adds a scaled mask to attention scores")
        score, other = (op.args[0], op.args[1]) if _is_score(op.args[0]) else (op.args[1], op.args[0])
        return add_to_scores(op, other, score)
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _is_score(op.args[0]):
        fill = _number(op.args[2])
        return with_mask(op, op.args[0], op.args[1], "fill", fill)
    if target in (aten.where.self, aten.where.ScalarOther) and _is_score(op.args[1]) and not _is_score(op.args[2]):
        fill = _number(op.args[2])
        if fill is None or not (fill == float("-inf") or masks.is_masking(fill, op.args[1].fake.dtype)):
            raise Barrier("replaces attention scores by other numbers")
        return with_mask(op, op.args[1], op.args[0], "bool", fill)
    raise Barrier(f"attention scores are read by {target}")


_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}


_REORDERING = {aten.permute.default, aten.transpose.int}


def _batch_order(layout: Layout) -> list[int]:
    """Which row and heads come in which order: heads of equal size differ in nothing but their place."""
    return [id(a) for a in layout.atoms() if a.kind in (Kind.ROW, Kind.FEATURE)]


def _is_score(value: Any) -> bool:
    return isinstance(value, Value) and value.score is not None


def _number(argument: Any) -> float | None:
    """A Python number, or the number that a scalar tensor of the graph is known to hold."""
    if isinstance(argument, (int, float)):
        return float(argument)
    if isinstance(argument, Value) and not argument.is_token and argument.element is not None:
        number = masks.constant_value(argument.element)
        return None if number is None else float(number)
    return None


def softmax(op) -> Value:
    score = op.args[0]
    dim = op.args[1] % len(score.layout.dims)
    kinds = [a.kind for a in score.layout.dims[dim]]
    if kinds != [Kind.KEY] or score.score.is_probability or score.score.capping or score.score.is_top:
        raise Barrier("normalises attention scores over something else than the keys")
    return Value(op.node, score.layout, score=dataclasses.replace(score.score, is_probability=True))


def with_sinks(op) -> Value:
    """cat([scores, sinks.expand(B, heads, S, 1)], -1)"""
    tensors, value = op.args[0], op.args[0][0]
    rank = len(value.layout.dims)
    if len(tensors) != 2 or not _is_score(value) or _is_score(tensors[1]) or op.arg(1, 0) % rank != rank - 1:
        raise Barrier("concatenates attention scores")
    score, sinks = value.score, tensors[1]
    *batch, query, key = value.layout.dims
    heads = [a for dim in batch for a in dim if a.kind is not Kind.ROW]
    own = [a for dim in sinks.layout.dims for a in dim if a.kind is not Kind.CONSTANT]
    if score.is_probability or score.is_top or score.sinks is not None or len(own) != 1 or len(heads) != 1:
        raise Barrier("concatenates attention scores with something else than one number per head")
    per_head = [i for i, dim in enumerate(sinks.layout.dims) if any(a is own[0] for a in dim)] == [
        i for i, dim in enumerate(value.layout.dims) if any(a is heads[0] for a in dim)
    ]
    if sinks.is_token or not per_head or sinks.layout.dims[-1] or not same(own[0].size, heads[0].size):
        raise Barrier("concatenates attention scores with something else than one number per head")
    layout = Layout((*batch, query, (Atom(Kind.KEY, op.shape[-1], key[0].offset),)))
    return Value(op.node, layout, score=dataclasses.replace(score, sinks=sinks))


def top_score(engine, op) -> Any:
    value, dims = op.args[0], op.args[1]
    dim = dims[0] if isinstance(dims, (list, tuple)) else dims
    last = len(value.layout.dims) - 1
    over_keys = dim % (last + 1) == last and [a.kind for a in value.layout.dims[last]] == [Kind.KEY]
    if not op.arg(2, False) or not over_keys or value.score.is_probability or value.score.is_top:
        raise Barrier("reduces attention scores")
    node = engine.result_node(op.node, 0) if op.target is aten.max.dim else op.node
    top = Value(node, Layout((*value.layout.dims[:-1], ())), score=dataclasses.replace(value.score, is_top=True))
    return [top, None] if op.target is aten.max.dim else top


def subtract_top(op) -> Value:
    """softmax does not change when each query's scores are shifted by one number."""
    value, top = op.args[:2]
    if not (_is_score(value) and _is_score(top) and top.score.is_top and dataclasses.replace(top.score, is_top=False) == value.score):
        raise Barrier("subtracts something else than their maximum from attention scores")
    return Value(op.node, value.layout, score=value.score)


def without_sinks(op) -> Value:
    """probabilities[..., :-1] where the sinks were the last key"""
    value = op.args[0]
    last = len(value.layout.dims) - 1
    start, step = op.arg(2), op.arg(4, 1)
    key = value.layout.dims[-1]
    dropped = op.arg(1, 0) % (last + 1) == last and start in (None, 0) and step == 1 and key and same(op.shape[-1] + 1, key[0].size)
    if not (value.score.is_probability and value.score.sinks is not None and dropped):
        raise Barrier("takes a part of the attention scores")
    layout = Layout((*value.layout.dims[:-1], (Atom(Kind.KEY, op.shape[-1], key[0].offset),)))
    return Value(op.node, layout, score=value.score)


def scale_scores(op, number: float | None = None) -> Value:
    """`number`: the factor, where it is no argument."""
    divides = op.target in (aten.div.Tensor, aten.div.Scalar)
    value = op.args[0] if _is_score(op.args[0]) else op.args[1]
    if number is None:
        other = op.args[1] if value is op.args[0] else op.args[0]
        number = _number(other) if not _is_score(other) else None
    if number is None or number == 0 or (divides and not _is_score(op.args[0])):
        raise Barrier("scales attention scores by something that is not a known number")
    score: Score = value.score
    factor = 1.0 / number if divides else number
    if score.is_probability or score.sinks is not None or score.is_top or (score.masks and factor < 0):
        raise Barrier("scales attention scores after they were normalised")
    if score.capping:
        # cap * tanh(x * scale): the op computes cap * tanh(x * scale' / cap), for either sign of cap, as tanh is odd
        score = dataclasses.replace(score, softcap=abs(factor), scale=score.scale * factor, capping=False)
    elif score.softcap:
        raise Barrier("scales attention scores after they were capped")
    else:
        applied = tuple(dataclasses.replace(m, factor=m.factor * factor) for m in score.masks)
        score = dataclasses.replace(score, scale=score.scale * factor, masks=applied)
    return Value(op.node, value.layout, score=score)


def cap_scores(op) -> Value:
    score: Score = op.args[0].score
    if score.is_probability or score.masks or score.softcap or score.capping or score.sinks is not None or score.is_top:
        raise Barrier("caps attention scores after they were masked or normalised")
    return Value(op.node, op.args[0].layout, score=dataclasses.replace(score, capping=True))


def add_to_scores(op, added: Any, value: Value) -> Value:
    """score + mask, and baddbmm(mask, q, k, beta, alpha)."""
    score: Score = value.score
    if op.target is aten.baddbmm.default:
        beta, alpha = op.kwargs.get("beta", 1), op.kwargs.get("alpha", 1)
        value = Value(op.node, value.layout, score=dataclasses.replace(score, scale=score.scale * alpha))
        if beta == 0:
            return value
        if beta != 1:
            raise Barrier("adds a scaled mask to attention scores")
    if _is_score(added):
        raise Barrier("adds attention scores to attention scores")
    if not isinstance(added, Value):
        if added == 0:
            return Value(op.node, value.layout, score=score)
        raise Barrier("adds a number to attention scores")
    return with_mask(op, value, added, "additive", None)


def with_mask(op, value: Value, mask: Value, kind: str, fill: float | None) -> Value:
    score: Score = value.score
    if score.is_probability or score.capping or score.sinks is not None or score.is_top:
        raise Barrier("masks attention after it was normalised")
    if mask.is_packed or mask.score is not None:
        raise Barrier("masks attention by values that the model computes")
    axes = _score_axes(value.layout)
    if mask.element is not None:
        mask = dataclasses.replace(mask, element=masks.align_to_scores(mask.element, len(mask.layout.dims), axes))
    elif not (op.engine.choice.is_row and mask.pure):
        if kind == "additive":
            raise Barrier("adds to attention scores what is not known to be a mask: ALiBi, a learned or a relative bias, say")
        raise Barrier("masks attention by something that is not a known expression")
    added = Mask(mask, kind, op.node.meta["val"].dtype, fill, rank=len(value.layout.dims))
    return Value(op.node, value.layout, score=dataclasses.replace(score, masks=score.masks + (added,)))


def _score_axes(layout: Layout) -> list[str]:
    """What each dimension of a score is: "b", "h", "q", "kv"; a dimension of size 1 is "1"."""
    names = {Kind.ROW: "b", Kind.KEY: "kv", Kind.FEATURE: "h"}
    axes = []
    for dim in layout.dims:
        if not dim:
            axes.append("1")
        elif is_columns(dim):
            axes.append("q")
        elif len(dim) == 1 and dim[0].kind in names:
            axes.append(names[dim[0].kind])
        else:
            raise Barrier("masks attention scores of which rows and heads are flattened")
    if axes.count("h") > 1:
        raise Barrier("masks attention scores of more than one head dimension")
    return axes


# -- sites ------------------------------------------------------------------------------------------------------------------


def weighted_values(engine, op) -> Value:
    probability, value = op.args
    score: Score = probability.score
    if not score.is_probability:
        raise Barrier("multiplies attention scores that were not normalised with values")
    batch, query, key = probability.layout.dims
    if score.sinks is not None and same(key[0].size, score.query.layout.column.size + 1):
        raise Barrier("multiplies attention probabilities, the sinks' among them, with values")
    if not value.is_token or not is_columns(query) or [a.kind for a in key] != [Kind.KEY]:
        raise Barrier("multiplies attention probabilities with something else than values")
    q = heads(score.query, 1, 2)
    if any(a.kind is Kind.CONSTANT for a in batch) or not same(product(a.size for a in batch if a.kind is not Kind.ROW), q.num_heads):
        raise Barrier("repeats attention probabilities over heads")
    layout = Layout((batch, query, value.layout.dims[2]))
    k = heads(score.key, 2, 1)
    v = heads(value, 1, 2)
    causal = verdict(engine, op, score.masks, q)
    return rewrite(engine, op, q, k, v, causal, score.scale, score.softcap, layout, score.sinks)[0]


def attention_call(engine, op) -> Value:
    query, key, value, mask, dropout_p, is_causal, scale, _gqa = op.args
    if not (query.is_token and key.is_token and value.is_token):
        raise Barrier("attends to or from something that does not belong to tokens")
    if dropout_p != 0.0:
        raise Barrier("draws attention dropout, which rows do not share (0 or eval() avoids it)")
    applied = []
    if mask is not None:
        if mask.is_packed or (mask.element is None and not mask.pure):
            raise Barrier("its mask is not a known expression of rows and columns")
        kind = "bool" if mask.fake.dtype is torch.bool else "additive"
        axes = ["b", "h", "q", "kv"] if len(query.layout.dims) == 4 else ["b", "q", "kv"]
        per_head = len(axes) == len(mask.layout.dims) == 3 and len(query.layout.dims[0]) > 1 and not same(mask.fake.shape[0], 1)
        is_data = per_head or mask.element is None
        if not is_data:
            mask = dataclasses.replace(mask, element=masks.align_to_scores(mask.element, len(mask.layout.dims), axes))
        applied.append(Mask(mask, kind, mask.fake.dtype, rank=len(axes)))
    if is_causal and not same(query.fake.shape[-2], key.fake.shape[-2]):
        raise Barrier("is causal over queries and keys of different length")
    rank = len(query.layout.dims)
    layout = Layout(query.layout.dims[:-1] + value.layout.dims[-1:])
    q, k, v = (heads(x, rank - 2, rank - 1) for x in (query, key, value))
    # one without an expression over (b, h, q, kv), for one of flattened rows and heads
    if applied and is_data and not is_causal:
        causal = asked_of_the_data(engine, op, applied, q)
    else:
        causal = verdict(engine, op, applied, q, is_causal)
    if scale is None:
        scale = float(query.fake.shape[-1]) ** -0.5
    # where a Boolean mask hides every key, scaled_dot_product_attention gives zero, and so does the op
    gives_zero = all(m.kind == "bool" for m in applied)
    return rewrite(engine, op, q, k, v, causal, scale, 0.0, layout, gives_zero=gives_zero)[0]


def verdict(engine, op, applied, q: Heads, is_causal: bool = False) -> masks.Verdict:
    """What the masks of a site are, proved or asked of the data."""
    if engine.choice.is_row:
        return within_sequences(engine, op, applied, q, is_causal)
    causal = masks.conjunction(list(applied), is_causal=is_causal)
    if causal.kind == "causal_if" and not is_causal:
        return asked_of_the_data(engine, op, applied, q)
    return causal


def within_sequences(engine, op, applied, q: Heads, is_causal: bool) -> masks.Verdict:
    """Of a row of sequences: causal within each, and blind to the others."""
    if not applied or is_causal:
        return masks.Verdict("refused", "it is causal over the whole row, not within its sequences")
    try:
        found = sequence_masks.classify(engine, applied)
        sequence_masks.require(engine, found)
        return masks.Verdict("asked", window=found.window)
    except Refused:
        return asked_of_the_data(engine, op, applied, q)


@dataclasses.dataclass(frozen=True)
class Heads:
    """An attention operand: a packed value, and which of its feature atoms are heads and which the head dimension."""

    value: Value
    heads: tuple[Atom, ...]
    features: tuple[Atom, ...]

    @property
    def num_heads(self) -> int:
        return product(a.size for a in self.heads)


def heads(value: Value, column_dim: int, feature_dim: int) -> Heads:
    dims = value.layout.dims
    if not is_columns(dims[column_dim]):
        raise Barrier("attention over a sequence that is not the batch's columns")
    batch = [*dims[column_dim][:-1], *(a for i, dim in enumerate(dims) if i not in (column_dim, feature_dim) for a in dim)]
    if not batch or batch[0].kind is not Kind.ROW or over_tokens(dims[feature_dim]):
        raise Barrier("attention whose batch does not begin with the rows")
    return Heads(value, tuple(batch[1:]), dims[feature_dim])


def _without_repeats(engine, operand: Heads) -> Heads:
    """Looks through repeated key-value heads (expand and reshape) to the tensor that was repeated."""
    heads = operand.heads
    repeats = [a for a in heads if a.kind is Kind.CONSTANT]
    own = tuple(a for a in heads if a.kind is not Kind.CONSTANT)
    if not repeats or heads[: len(own)] != own:
        return operand
    value = operand.value
    while any(a.kind is Kind.CONSTANT for a in value.layout.atoms()):
        if value.node.target not in _LOOK_THROUGH or grad_enabled(value.node) != engine.emitter.region.grad_enabled:
            return operand
        value = engine.values[value.node.args[0]]
    atoms = value.layout.atoms()
    if not all(any(a is b for b in atoms) for a in own + operand.features):
        return operand
    return Heads(value, own, operand.features)


_LOOK_THROUGH = _VIEWS | {aten.clone.default, aten.alias.default, aten.t.default}


def _four_dims(engine, operand: Heads, window: Window) -> fx.Node:
    """[1, heads, T', D] of an operand in whatever order its dimensions are."""
    e, value = engine.emitter, operand.value
    packed = engine.convert.operand(value, value.layout.dims, window)
    tokens = engine.convert.num_tokens(window)
    atoms = [a for a in value.layout.atoms() if a.kind is not Kind.ROW]
    with e.after(packed):
        x = e.reshape(packed, [tokens if a.kind is Kind.COLUMN else a.size for a in atoms])
        order = [*operand.heads, value.layout.column, *operand.features]
        x = e.permute(x, [next(i for i, a in enumerate(atoms) if a is b) for b in order])
        return e.reshape(x, [1, product(a.size for a in operand.heads), tokens, product(a.size for a in operand.features)])


def rewrite(
    engine, op, q: Heads, k: Heads, v: Heads, mask: masks.Verdict, scale, softcap, layout: Layout, sinks=None, gives_zero=False
) -> tuple[Value, fx.Node]:
    """The shared-prompt op in place of a site, if its mask is causal and every operand is a whole batch of tokens: its result, and the
    logarithm of each softmax's denominator, [1, H, T'].

    `gives_zero`: what the site computes for a query that sees no key is zero.
    """
    choice, result = engine.choice, engine.result_node(op.node, 0)
    whole = Window.of(0, choice.num_columns)
    for operand in (q, k, v):
        if operand.value.window != whole:
            raise Barrier("attends within a part of the columns")
        if not operand.value.shared:
            raise Barrier("attends to or from values that differ from row to row")
    if mask.kind not in ("causal", "asked"):
        raise Barrier(f"its mask is not causal: {mask.reason}")
    hidden = _padding_hidden(engine, op, mask, gives_zero)
    bare = [_without_repeats(engine, x) for x in (k, v)]
    if bare[0].num_heads == bare[1].num_heads:  # else one repeats its heads in an order of its own
        k, v = bare
    if k.num_heads != v.num_heads or q.num_heads % k.num_heads:
        raise Barrier("the numbers of query, key and value heads do not divide")
    if not scale > 0:
        raise Barrier(f"scales its scores by {scale}; the kernels want a positive scale")
    e = engine.emitter
    nodes = [_four_dims(engine, x, whole) for x in (q, k, v)]
    # hand-written attention may compute its scores in a wider type than its values
    widest = functools.reduce(torch.promote_types, [n.meta["val"].dtype for n in nodes])
    nodes = [n if n.meta["val"].dtype is widest else e.call(aten._to_copy.default, n, dtype=widest) for n in nodes]
    tables = [e.request(Request("table", index=i, hidden=hidden)) for i in range(choice.num_tables)]
    both = e.call(
        torch.ops.dualkv.shared_prompt_attention.default,
        *nodes,
        tables,
        scale,
        window=mask.window,
        softcap=softcap,
        sinks=None if sinks is None else _one_per_head(engine, sinks),
        impl=choice.attention_impl,
    )
    out = e.call(operator.getitem, both, 0)
    if widest is not result.meta["val"].dtype:
        out = e.call(aten._to_copy.default, out, dtype=result.meta["val"].dtype)
    engine.sites_rewritten += 1
    engine.count_attention(q.num_heads, product(a.size for a in q.features), product(a.size for a in v.features))
    return Value(result, layout, packed=_from_four_dims(engine, out, layout, whole)), e.call(operator.getitem, both, 1)


def _one_per_head(engine, sinks: Value) -> fx.Node:
    """[H] of what is expanded to one number for every row, head and query."""
    e = engine.emitter
    with e.after(sinks.dense):
        x = sinks.dense
        for d, dim in enumerate(sinks.layout.dims):
            if dim and all(a.kind is Kind.CONSTANT for a in dim):
                x = e.call(aten.slice.Tensor, x, d, 0, 1)
        return e.reshape(x, [product(x.meta["val"].shape)])


def _from_four_dims(engine, out: fx.Node, layout: Layout, window: Window) -> fx.Node:
    """[1, H, T', D] -> the packed shape of a site's result: (rows heads)(columns)(features), however its dimensions are grouped."""
    return engine.emitter.reshape(out, engine.convert.packed_shape(layout.dims, window))


def _padding_hidden(engine, op, mask: masks.Verdict, gives_zero: bool) -> bool:
    """Decides whether padding keys are hidden in the packed attention, and registers what must be true of the data for that."""
    choice = engine.choice
    if choice.is_row:  # padding is behind all sequences, or a sequence of its own
        return False
    hides = choice.holds_padding
    if mask.kind == "causal" and mask.key_data is None:
        if choice.drops_padding and choice.padding == "left":
            raise engine.reads_padding(op, "attends to left padding")
        hides = False
    else:
        if choice.keep_padding and choice.padding == "left" and not gives_zero:
            raise engine.reads_padding(op, "hides left padding, whose queries see no key")
        if hides and mask.window is not None and not gives_zero:
            raise engine.reads_padding(op, "hides padding, whose queries may see no key within the window")
        if mask.kind == "causal":
            _require_padding(engine, mask.key_data, "kv")
    if mask.query_data is not None:
        if choice.holds_padding:
            raise engine.reads_padding(op, "masks padding queries")
        _require_padding(engine, mask.query_data, "q")
    return hides


def asked_of_the_data(engine, op, applied, q: Heads) -> masks.Verdict:
    """A mask that is data (a buffer, or an argument made outside of the graph): the fact that it is causal and hides exactly the padding,
    for every real query, is registered; it is asked of the actual tensors at the call."""
    choice, e = engine.choice, engine.emitter
    if not all(m.value.pure and m.value.dense is not None for m in applied):
        raise Barrier("its mask is computed by the model, or drawn at random")
    device = q.value.fake.device
    at = e.call(aten.arange.default, choice.num_columns, device=device)
    allowed, rank = None, applied[0].rank
    for mask in applied:
        if mask.rank != rank:
            raise Barrier("masks attention scores of different rank")
        shape = list(mask.value.dense.meta["val"].shape)
        if rank == 3:  # rows, or rows and heads, in one dimension
            flat = len(shape) == 3 and not same(shape[0], 1)
            shape = [1] * (3 - len(shape)) + shape
            shape = ([choice.num_rows, q.num_heads] if flat and q.heads else [shape[0], 1]) + shape[1:]
        x = e.reshape(mask.value.dense, [1] * (4 - len(shape)) + shape)
        if mask.kind == "additive":
            seen, hidden = e.call(aten.eq.Scalar, x, 0), e.call(aten.le.Scalar, x, masks.least_masking(mask.dtype, mask.factor))
            known = e.call(aten.logical_or.default, seen, hidden)
            engine.facts[e.call(aten.all.default, known)] = None
        elif mask.kind == "fill" and mask.fill is None:
            raise Barrier("fills attention scores with something that is not a known number")
        elif mask.fill is not None and not masks.is_masking(mask.fill, mask.dtype, mask.factor):
            raise Barrier("fills attention scores with a number that does not mask")
        elif mask.kind == "fill":
            seen = e.call(aten.logical_not.default, x)
        else:
            seen = x
        allowed = seen if allowed is None else e.call(aten.logical_and.default, allowed, seen)
    expected = e.call(aten.ge.Tensor, e.call(aten.unsqueeze.default, at, 1), e.call(aten.unsqueeze.default, at, 0))
    b, s = choice.num_rows, choice.num_columns
    if choice.is_row:
        of = e.request(Request("sequence", Window.of(0, s)))
        in_one = e.call(aten.eq.Tensor, e.call(aten.unsqueeze.default, of, 1), e.call(aten.unsqueeze.default, of, 0))
        expected = e.call(aten.logical_and.default, expected, in_one)
    elif choice.padding != "none" or choice.has_gaps:
        keys = e.reshape(e.request(Request("real", Window.of(0, s))), [b, 1, 1, s])
        expected = e.call(aten.logical_and.default, expected, keys)
    agrees = e.call(aten.eq.Tensor, allowed, expected)
    if choice.drops_padding:
        queries = e.reshape(e.request(Request("valid", Window.of(0, s))), [b, 1, s, 1])
        padding_query = e.call(aten.logical_not.default, queries)
        agrees = e.call(aten.logical_or.default, agrees, padding_query)
    engine.facts[e.call(aten.all.default, agrees)] = None
    return masks.Verdict("asked")


def _require_padding(engine, condition, axis: str) -> None:
    """Registers that a condition on the data holds exactly at the real positions (queries: at least there)."""
    choice, e = engine.choice, engine.emitter
    source = masks.padding_source(condition, axis)
    if source is not None and source.name in engine.token_inputs and engine.token_inputs[source.name].is_padding_mask:
        return
    if not all(engine.values[data.node].pure for data in condition.atoms(masks.Data)):
        raise Barrier("its mask is computed by the model, or drawn at random")
    data = masks.emit_condition(e.call, condition, axis, choice.num_rows, choice.num_columns, engine.dense_argument)
    real = e.request(Request("real", Window.of(0, choice.num_columns)))
    agrees = aten.eq.Tensor if axis == "kv" else aten.ge.Tensor
    engine.facts[e.call(aten.all.default, e.call(agrees, data, real))] = None


def dense_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """A site that stays dense, as the user wrote it."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
