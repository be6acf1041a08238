"""Between dense and packed: how a value gets into the other form, each conversion emitted once, next to what it converts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.graph import Emitter, Request, Window, expr
from dualkv_compile.passes.layout import Dim, Kind, Layout, Size, is_constant, over_tokens, product, regroup
from dualkv_compile.passes.values import Value

aten = torch.ops.aten


class Converter:
    def __init__(self, emitter: Emitter, num_rows: Size):
        self.emitter = emitter
        self.num_rows = num_rows
        self._made: dict[Any, fx.Node] = {}

    def num_tokens(self, window: Window) -> Size:
        return self.emitter.request(Request("pack_index", window)).meta["val"].shape[0]

    def packed_shape(self, dims: Sequence[Dim], window: Window) -> list[Size]:
        tokens = self.num_tokens(window)
        sizes = {Kind.ROW: 1, Kind.COLUMN: tokens}
        return [product(sizes.get(a.kind, a.size) for a in dim) for dim in dims]

    # -- packed -> dense ---------------------------------------------------------------------------------------------------

    def unpack(self, value: Value) -> fx.Node:
        """[.., T', ..] -> the dense shape. Positions that are not in the packed order read zero."""
        key = ("unpack", value.packed)
        if key not in self._made:
            with self.emitter.after(value.packed):
                self._made[key] = self._unpack(value)
        return self._made[key]

    def _unpack(self, value: Value) -> fx.Node:
        e, atoms = self.emitter, value.layout.atoms()
        index = e.request(Request("unpack_index", value.window))
        tokens = self.num_tokens(value.window)
        row, column = (next(i for i, a in enumerate(atoms) if a.kind is kind) for kind in (Kind.ROW, Kind.COLUMN))
        others = [i for i in range(len(atoms)) if i not in (row, column)]
        present = [i for i in range(len(atoms)) if i != row]
        x = e.reshape(value.packed, [tokens if i == column else atoms[i].size for i in present])
        x = e.permute(x, [present.index(i) for i in [column, *others]])
        x = e.reshape(x, [tokens, product(atoms[i].size for i in others)])
        x = e.call(torch.ops.dualkv.unpack.default, x, index)
        x = e.reshape(x, [self.num_rows, atoms[column].size, *(atoms[i].size for i in others)])
        now = [row, column, *others]
        x = e.permute(x, [now.index(i) for i in range(len(atoms))])
        x = e.reshape(x, [product(a.size for a in dim) for dim in value.layout.dims])
        fake = value.fake
        if isinstance(fake, torch.Tensor) and fake.is_contiguous() and not x.meta["val"].is_contiguous():  # some operations insist on it
            x = e.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return x

    def fill_padding(self, value: Value, dense: fx.Node, number: bool | int | float) -> fx.Node:
        """`dense`, the dense form of a token value, with a number at its padding positions."""
        e, atoms = self.emitter, value.layout.atoms()
        with e.after(dense):
            mask = self.valid(value.layout, value.window)
            x = e.reshape(dense, [a.size for a in atoms])
            other = e.call(aten.scalar_tensor.default, number, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
            return e.reshape(e.call(aten.where.self, mask, x, other), list(dense.meta["val"].shape))

    def valid(self, layout: Layout, window: Window) -> fx.Node:
        """True at real positions; one dimension per atom of the layout, of size 1 where the atom is neither row nor column."""
        e, atoms = self.emitter, layout.atoms()
        x = e.request(Request("valid", window))
        kinds = [a.kind for a in atoms if a.kind in (Kind.ROW, Kind.COLUMN)]
        x = e.permute(x, [0, 1] if kinds[0] is Kind.ROW else [1, 0])
        return e.reshape(x, [a.size if a.kind in (Kind.ROW, Kind.COLUMN) else 1 for a in atoms])

    # -- dense -> packed ---------------------------------------------------------------------------------------------------

    def operand(self, value: Value, dims: Sequence[Dim], window: Window, expand: bool = False) -> fx.Node:
        """A value as an operand of a packed operation whose result has `dims` where the value's own dimensions are.

        `expand`: for operations that do not broadcast.
        """
        if value.is_packed:
            node = value.packed
        elif value.is_token:
            node = self._once(("pack", value.dense, window), value.dense, lambda: self._pack(value, window))
        else:
            met = tuple(d if over_tokens(d) else () for d in dims)
            node = self._once(("plain", value.dense, met, window), value.dense, lambda: self._plain(value, dims, window))
        if expand:
            shape = self.packed_shape(dims, window)
            if [expr(n) for n in node.meta["val"].shape] != [expr(n) for n in shape]:
                node = self.emitter.call(aten.expand.default, node, shape)
        return node

    def _once(self, key, source: fx.Node, make) -> fx.Node:
        if key not in self._made:
            with self.emitter.after(source):
                self._made[key] = make()
        return self._made[key]

    def _pack(self, value: Value, window: Window) -> fx.Node:
        """One element per packed token of `window`, read from the row that stands for it."""
        e, atoms = self.emitter, value.layout.atoms()
        index = e.request(Request("pack_index", window))
        row, column = (next(i for i, a in enumerate(atoms) if a.kind is kind) for kind in (Kind.ROW, Kind.COLUMN))
        others = [i for i in range(len(atoms)) if i not in (row, column)]
        x = e.reshape(value.dense, [a.size for a in atoms])
        x = e.permute(x, [row, column, *others])
        x = e.reshape(x, [atoms[row].size * atoms[column].size, *(atoms[i].size for i in others)])
        x = e.call(aten.index_select.default, x, 0, index)
        now = [column, *others]
        x = e.permute(x, [now.index(i) for i in range(len(atoms)) if i != row])
        return e.reshape(x, self.packed_shape(value.layout.dims, window))

    def _plain(self, value: Value, dims: Sequence[Dim], window: Window) -> fx.Node:
        node = value.dense
        for d, (own, out) in enumerate(zip(value.layout.dims, dims, strict=True)):
            if own and over_tokens(out):
                node = self._plain_dim(node, d, own, out, window)
        return node

    def _plain_dim(self, node: fx.Node, d: int, own: Dim, out: Dim, window: Window) -> fx.Node:
        """Dimension d of a plain operand meets a token dimension: it is constant along it, or it is indexed by the column."""
        e = self.emitter
        if is_constant(own):
            return e.call(aten.slice.Tensor, node, d, 0, 1)
        if len(out) == 1 and out[0].kind is Kind.COLUMN:
            return e.call(aten.index_select.default, node, d, e.request(Request("window_columns", window)))
        factors = regroup([own], [a.size for a in out])
        if factors is None or any(over_tokens((a,)) and not is_constant(f) for f, a in zip(factors, out, strict=True)):
            raise Barrier("meets data that differs from row to row")
        shape = list(node.meta["val"].shape)
        x = e.reshape(node, shape[:d] + [a.size for a in out] + shape[d + 1 :])
        for i, a in enumerate(out):
            if over_tokens((a,)):
                x = e.call(aten.slice.Tensor, x, d + i, 0, 1)
        return e.reshape(x, shape[:d] + [product(a.size for a in out if not over_tokens((a,)))] + shape[d + 1 :])
