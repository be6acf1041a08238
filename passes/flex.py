"""flex_attention: rewritten like any other site, if its mask, its scores and its block mask are understood.

    out, lse, _ = flex_attention(q, k, v, score_mod, (..., mask_mod), scale, ...)        becomes
    out', lse' = dualkv.shared_prompt_attention(q', k', v', tables, scale, softcap)

What its two functions do was recorded beside it (`dualkv_compile.passes.functions`) and is followed as scores that are written by hand
are. The block mask is another matter: blocks of scores that it leaves out are masked whatever the mask says, and in those that it calls
full no mask is applied, so it must say the same as the mask. It does where `create_block_mask` computes it in the graph, from this very
mask; one that comes from outside is compared with the mask, at every call, block by block.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from dualkv_compile.passes import masks, sites
from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.functions import same_computation
from dualkv_compile.passes.graph import Request, Window
from dualkv_compile.passes.layout import Layout, Size, same
from dualkv_compile.passes.symbolic import BATCH
from dualkv_compile.passes.values import Undescribed, Value

aten = torch.ops.aten


def attention(engine, op) -> list[Value | None]:
    """The three results of flex_attention: output, logarithm of the softmax's denominator (base 2), largest score."""
    engine.sites_found += 1
    if engine.choice.is_row:
        raise Barrier("its block mask is over a packed row")
    query, key, value, _, block_mask, _, options = op.args[:7]
    scores = op.description["scores"]
    if isinstance(scores, Undescribed):
        raise Barrier(scores.reason)
    if scores.score is None or not value.is_token:
        raise Barrier("attends to or from something that does not belong to tokens")
    if scores.score.capping:
        raise Barrier("caps attention scores by something that is not a known number")
    is_read = {u.args[1] for u in op.node.users if u.users}
    if 2 in is_read or (1 in is_read and options.get("BACKEND") == "FLASH"):
        raise Barrier("reads the largest attention scores, or their sum in another base")
    applied = scores.score.masks
    q, k, v = (sites.heads(x, 2, 3) for x in (query, key, value))
    causal = masks.conjunction(list(applied))
    if causal.kind == "causal_if":
        causal = sites.asked_of_the_data(engine, op, applied, q)
    proved = _is_made_of_this_mask(op, causal)
    if causal.kind != "refused" and not proved and not all(b.pure and b.dense is not None for b in block_mask[2:10] if b is not None):
        raise Barrier("its block mask is computed by the model")
    layout = Layout(query.layout.dims[:-1] + value.layout.dims[-1:])
    score = scores.score
    out, lse = sites.rewrite(engine, op, q, k, v, causal, score.scale, score.softcap, layout, gives_zero=True)
    if not proved:
        _Blocks(engine, op, causal).require()
    in_base_2 = engine.emitter.call(aten.mul.Scalar, lse, 1 / math.log(2))
    return [out, Value(engine.result_node(op.node, 1), Layout(query.layout.dims[:-1]), packed=in_base_2), None]


def _is_made_of_this_mask(op, mask: masks.Verdict) -> bool:
    """Whether the block mask is what create_block_mask gives for this mask: for every row, not only for the first."""
    made, given = op.node.kwargs["blocks"], op.node.args[4]
    if made is None or not same_computation(made, given[2:10]):
        return False
    for_all_rows = same(given[2].meta["val"].shape[0], 1)
    return mask.kind == "causal" and not (for_all_rows and mask.data is not None and BATCH in mask.data.free_symbols)


class _Blocks:
    """The fact that a block mask and the mask say the same, of every real query and every key."""

    def __init__(self, engine, op, mask: masks.Verdict):
        self.engine, self.mask, self.call = engine, mask, engine.emitter.call
        self.given = [b if not isinstance(b, Value) else b.dense for b in op.args[4][2:10]]
        self.query_block, self.key_block = op.args[4][-3:-1]
        self.columns: Size = engine.choice.num_columns
        self.device = self.given[0].meta["val"].device
        self.query_blocks, self.key_blocks = (-(-self.columns // n) for n in (self.query_block, self.key_block))

    def require(self) -> None:
        partial, full = self.table(0, self.query_blocks, self.key_blocks), self.table(2, self.query_blocks, self.key_blocks)
        self.the_same(partial, self.table(4, self.key_blocks, self.query_blocks))
        self.the_same(full, self.table(6, self.key_blocks, self.query_blocks))
        some, every = self.seen()
        if full is not None:
            full = self.by_key(full)
            self.fact(self.call(aten.le.Tensor, full, every))
        partial = self.by_key(partial)
        computed = partial if full is None else self.call(aten.logical_or.default, partial, full)
        self.fact(self.call(aten.le.Tensor, some, computed))

    def fact(self, holds: fx.Node) -> None:
        self.engine.facts[self.call(aten.all.default, holds)] = None

    def the_same(self, table: fx.Node | None, transposed: fx.Node | None) -> None:
        """The backward reads the same blocks in another order."""
        if table is None or transposed is None:
            if table is not transposed:
                raise Barrier("its block mask lacks a part")
            return
        self.fact(self.call(aten.eq.Tensor, table, self.call(aten.transpose.int, transposed, 2, 3)))

    def table(self, at: int, rows: Size, columns: Size) -> fx.Node | None:
        """[B, H, rows, columns], True where a block is listed."""
        numbers, indices = self.given[at : at + 2]
        if numbers is None or indices is None:
            return None
        shape = list(indices.meta["val"].shape)
        if not shape[2] == rows or not (same(shape[0], 1) or shape[0] == self.engine.choice.num_rows):
            raise Barrier("its block mask covers other queries or keys than there are")
        place = self.call(aten.arange.default, shape[3], device=self.device)
        listed = self.call(aten.lt.Tensor, place, self.call(aten.unsqueeze.default, numbers, 3))
        for target, limit in ((aten.ge.Scalar, 0), (aten.lt.Scalar, columns)):
            listed = self.call(aten.logical_and.default, listed, self.call(target, indices, limit))
        indices = self.call(aten._to_copy.default, indices, dtype=torch.int64)
        index = self.call(aten.where.ScalarOther, listed, indices, columns)
        empty = self.call(aten.full.default, [*shape[:3], columns + 1], False, dtype=torch.bool, device=self.device)
        return self.call(aten.slice.Tensor, self.call(aten.scatter.value, empty, 3, index, True), 3, 0, columns)

    def by_key(self, table: fx.Node) -> fx.Node:
        """[B, H, blocks of queries, keys]"""
        at = self.call(aten.arange.default, self.columns, device=self.device)
        return self.call(aten.index_select.default, table, 3, self.call(aten.floor_divide.default, at, self.key_block))

    def seen(self) -> tuple[fx.Node, fx.Node]:
        """[B, 1, blocks of queries, keys]: whether some real query of a block sees a key, and whether every one does."""
        call, choice = self.call, self.engine.choice
        first = call(aten.arange.default, self.query_blocks, device=self.device)
        first = self.engine.emitter.reshape(call(aten.mul.Tensor, first, self.query_block), [1, 1, self.query_blocks, 1])
        last = call(aten.clamp_max.default, call(aten.add.Tensor, first, self.query_block - 1), self.columns - 1)
        key = call(aten.arange.default, self.columns, device=self.device)
        if choice.drops_padding:
            valid = self.engine.emitter.request(Request("valid", Window.of(0, self.columns)))
            start = call(aten.argmax.default, call(aten._to_copy.default, valid, dtype=torch.int64), 1)
            stop = call(aten.add.Tensor, start, call(aten.sum.dim_IntList, valid, [1]))
            start, stop = (self.engine.emitter.reshape(x, [choice.num_rows, 1, 1, 1]) for x in (start, stop))
            first = call(aten.maximum.default, first, start)
            last = call(aten.minimum.default, last, call(aten.sub.Tensor, stop, 1))
        # the queries from which a key is seen: key <= query < key + window
        nearest = call(aten.maximum.default, key, first)
        farthest, sees_all = last, call(aten.le.Tensor, key, first)
        if self.mask.window is not None:
            end = call(aten.add.Tensor, key, self.mask.window - 1)
            farthest = call(aten.minimum.default, last, end)
            sees_all = call(aten.logical_and.default, sees_all, call(aten.le.Tensor, last, end))
        some = call(aten.le.Tensor, nearest, farthest)
        hides_padding = self.mask.key_data is not None or self.mask.kind == "asked"
        if hides_padding and (choice.padding != "none" or choice.has_gaps):
            real = self.engine.emitter.request(Request("real", Window.of(0, self.columns)))
            keys = self.engine.emitter.reshape(real, [choice.num_rows, 1, 1, self.columns])
            some, sees_all = (call(aten.logical_and.default, x, keys) for x in (some, sees_all))
        no_query = call(aten.gt.Tensor, first, last)
        return some, call(aten.logical_or.default, sees_all, no_query)
