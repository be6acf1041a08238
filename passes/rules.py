"""ATen operation -> what each dimension of its result indexes, and how the operation is written on packed operands.

A rule gets an `Op` and returns a `Result`, or raises Barrier with the reason why the operation mixes tokens. Operations without a rule
are barriers. A rule is one claim: *applied to packed operands, the operation gives the packed form of its dense result*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from dualkv_compile.passes import masks, routing, sites
from dualkv_compile.passes.align import align, align_batch
from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.functions import DESCRIPTION
from dualkv_compile.passes.graph import Request, Window
from dualkv_compile.passes.layout import (
    Atom,
    Dim,
    Kind,
    Layout,
    Size,
    is_columns,
    is_constant,
    is_sequences,
    over_tokens,
    product,
    regroup,
    same,
)
from dualkv_compile.passes.values import AtPadding, Value

aten = torch.ops.aten


@dataclasses.dataclass
class Result:
    """Layout(s) of an operation's result(s); None: plain. `build` emits the packed operation (default: same call, operands packed).

    `unshared`: the operation is token-wise, but its result differs between the copies of a token, because …
    """

    layouts: Layout | Sequence[Layout] | None
    build: Callable[[], fx.Node] | None = None
    unshared: str | None = None


class Op:
    """One operation of the recorded graph, its arguments resolved to Values."""

    def __init__(self, engine, node: fx.Node):
        self.engine = engine
        self.node = node
        self.target = node.target
        self.args, kwargs = pytree.tree_map_only(fx.Node, engine.values.__getitem__, (node.args, node.kwargs))
        self.kwargs = {k: v for k, v in kwargs.items() if k not in DESCRIPTION}
        self.description = {k: v for k, v in kwargs.items() if k in DESCRIPTION}
        self.values: list[Value] = [v for v in pytree.tree_leaves((self.args, self.kwargs), is_leaf=_is_value) if _is_value(v)]

    def arg(self, index: int, default: Any = None) -> Any:
        """A positional argument by its place in the schema, wherever the call put it."""
        if index < len(self.args):
            return self.args[index]
        arguments = self.target._schema.arguments
        if index < len(arguments):
            return self.kwargs.get(arguments[index].name, default)
        return default

    @property
    def shape(self) -> Sequence[Size]:
        return self.node.meta["val"].shape

    def window(self) -> Window:
        """The window that the packed operands are in (or, if none is packed yet, that of the first token operand)."""
        tokens = [v for v in self.values if v.is_token]
        return next((v for v in tokens if v.is_packed), tokens[0]).window

    def packed_args(self) -> tuple:
        """The arguments with each tensor in packed form, unaligned: for operations whose token operands are all of one layout."""
        window = self.window()
        return tuple(pytree.tree_map_only(Value, lambda v: self.operand(v, v.layout.dims, window), a, is_leaf=_is_value) for a in self.args)

    def packed_kwargs(self) -> dict:
        window = self.window()
        return pytree.tree_map_only(Value, lambda v: self.operand(v, v.layout.dims, window), self.kwargs, is_leaf=_is_value)

    def operand(self, value: Value, dims: Sequence[Dim], window: Window, expand: bool = False) -> fx.Node:
        return self.engine.convert.operand(value, dims, window, expand)


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


RULES: dict[Any, Callable[[Op], Result]] = {}


def rule(*targets):
    def register(function):
        for target in targets:
            RULES[target] = function
        return function

    return register


def _dim(op: Op, dim: int, rank: int | None = None) -> int:
    rank = len(op.args[0].layout.dims) if rank is None else rank
    return dim + rank if dim < 0 else dim


def _keep_tokens_apart(op: Op, value: Value, dims: Sequence[int]) -> None:
    for d in dims:
        if over_tokens(value.layout.dims[d]):
            raise Barrier("works across tokens")


# -- element by element ----------------------------------------------------------------------------------------------------


@rule(
    "pointwise",  # every ATen operation tagged pointwise
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.polar.default,
    aten.complex.default,
)
def pointwise(op: Op) -> Result:
    if not op.values:  # of a number, as vmap writes it
        return Result(Layout.plain(op.shape, Kind.CONSTANT))
    rank = max(len(v.layout.dims) for v in op.values)
    dims, unshared = align(op.values, rank)

    def build():
        window = Layout(dims).column
        window = Window.of(window.offset, window.size)

        def operand(v):
            return op.operand(v, dims[rank - len(v.layout.dims) :], window)

        args, kwargs = pytree.tree_map_only(Value, operand, (op.args, op.kwargs), is_leaf=_is_value)
        return op.engine.emitter.call(op.target, *args, **kwargs)

    return Result(Layout(dims), build, unshared)


# -- views -----------------------------------------------------------------------------------------------------------------


def _reshaped(op: Op, dims: Sequence[Dim]) -> Result:
    """A result that has its operand's elements in its operand's order, under other dimensions."""
    layout = Layout(tuple(dims))

    def build():
        window = op.window()
        x = op.operand(op.args[0], op.args[0].layout.dims, window)
        return op.engine.emitter.reshape(x, op.engine.convert.packed_shape(layout.dims, window))

    return Result(layout, build)


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(op: Op) -> Result:
    dims = regroup(op.args[0].layout.dims, op.shape)
    if dims is None:
        if op.args[0].is_token:
            raise Barrier("reshapes across tokens")
        return Result(None)
    return _reshaped(op, dims)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Op) -> Result:
    x = op.args[0]
    rank = len(x.layout.dims)
    chosen = op.arg(1, range(rank))
    chosen = [_dim(op, d) for d in ([chosen] if isinstance(chosen, int) else chosen)]
    return _reshaped(op, [d for i, d in enumerate(x.layout.dims) if i not in chosen or not same(x.fake.shape[i], 1)])


@rule(aten.unsqueeze.default)
def unsqueeze(op: Op) -> Result:
    dims = list(op.args[0].layout.dims)
    at = _dim(op, op.args[1], len(dims) + 1)
    return _reshaped(op, dims[:at] + [()] + dims[at:])


@rule(aten.permute.default)
def permute(op: Op) -> Result:
    dims = op.args[0].layout.dims
    return Result(Layout(tuple(dims[_dim(op, d)] for d in op.args[1])))


@rule(aten.transpose.int)
def transpose(op: Op) -> Result:
    dims = list(op.args[0].layout.dims)
    a, b = _dim(op, op.args[1]), _dim(op, op.args[2])
    dims[a], dims[b] = dims[b], dims[a]
    return Result(Layout(tuple(dims)))


@rule(aten.t.default)
def t(op: Op) -> Result:
    return Result(Layout(tuple(reversed(op.args[0].layout.dims))))


@rule(aten.expand.default)
def expand(op: Op) -> Result:
    x = op.args[0]
    new = len(op.shape) - len(x.layout.dims)
    dims = list(Layout.plain(op.shape[:new], Kind.CONSTANT).dims)
    for own, before, after in zip(x.layout.dims, x.fake.shape, op.shape[new:], strict=True):
        dims.append(own if same(before, after) else (Atom(Kind.CONSTANT, after),))
    layout = Layout(tuple(dims))

    def build():
        window = op.window()
        packed = op.operand(x, x.layout.dims, window)
        return op.engine.emitter.call(aten.expand.default, packed, op.engine.convert.packed_shape(layout.dims, window))

    return Result(layout, build)


@rule(aten.repeat.default)
def repeat(op: Op) -> Result:
    """x.repeat(1, 3, 1): index r * n + i of a repeated dimension is i, whatever r."""
    x = op.args[0]
    dims = [()] * (len(op.shape) - len(x.layout.dims)) + list(x.layout.dims)
    for d, times in enumerate(op.args[1]):
        if same(times, 1):
            continue
        if over_tokens(dims[d]):
            raise Barrier("repeats tokens")
        dims[d] = (Atom(Kind.CONSTANT, times), *dims[d])
    return Result(Layout(tuple(dims)))


@rule(aten.view_as_complex.default, aten.view_as_real.default)
def pairs(op: Op) -> Result:
    """The last dimension, of size two, becomes one complex number, or the other way round."""
    x = op.args[0]
    if op.target is aten.view_as_real.default:
        return Result(Layout(x.layout.dims + Layout.plain([2]).dims))
    _keep_tokens_apart(op, x, [len(x.layout.dims) - 1])

    def build():
        packed = op.operand(x, x.layout.dims, op.window())
        if not packed.meta["val"].is_contiguous():  # the pairs must lie side by side
            packed = op.engine.emitter.call(aten.clone.default, packed, memory_format=torch.contiguous_format)
        return op.engine.emitter.call(op.target, packed)

    return Result(Layout(x.layout.dims[:-1]), build)


@rule(aten.slice.Tensor)
def slice_(op: Op) -> Result | Value:
    x, dim = op.args[0], _dim(op, op.arg(1, 0))
    start, step, size = op.arg(2), op.arg(4, 1), op.shape[dim]
    own = x.layout.dims[dim]
    if same(size, x.fake.shape[dim]):
        return Result(x.layout, lambda: op.operand(x, x.layout.dims, op.window()))
    if not over_tokens(own):
        kind = Kind.CONSTANT if is_constant(own) else Kind.FEATURE
        return Result(_with_dim(x.layout, dim, () if same(size, 1) else (Atom(kind, size),)))
    if not is_columns(own) or not same(step, 1):
        raise Barrier("slices across tokens")
    start = 0 if start is None else start
    start = start + x.fake.shape[dim] if start < 0 else start
    return columns(op, x, dim, start, size)


def columns(op: Op, x: Value, dim: int, start: Size, size: Size) -> Result | Value:
    """x[..., start : start + size, ...] of a column dimension."""
    *rows, atom = x.layout.dims[dim]
    layout = _with_dim(x.layout, dim, (*rows, _column(op, size, atom.offset + start)))
    if not x.is_packed:
        if same(size, 1):
            raise Barrier("takes a single column")
        return op.engine.dense_result(op, Result(layout), shared=x.shared)
    window = Window.of(atom.offset + start, size)
    index = op.engine.emitter.request(Request("subselect", window, base=(x.window,)))
    packed = op.engine.emitter.call(aten.index_select.default, x.packed, dim, index)
    value = Value(op.node, layout, packed=packed)
    if not same(size, 1):
        return value
    dense = op.engine.read_dense(value, op, "takes a single column")
    return Value(op.node, Layout.plain(dense.meta["val"].shape), dense=dense)


def _column(op: Op, size: Size, offset: Size) -> Atom:
    """The columns [offset, offset + size) of the batch; where they begin before it (a shift to later columns) and are as many as the
    batch's, index i stands for column i instead: it holds what depends on that column's past alone, the same in all copies. In a row of
    sequences it is not."""
    before = isinstance(offset, int) and offset < 0
    if before and op.engine.choice.is_row:
        raise Barrier("moves tokens to later columns, into another sequence")
    if before and same(size, op.engine.choice.num_columns):
        offset = 0
    return Atom(Kind.COLUMN, size, offset)


def _with_dim(layout: Layout, dim: int, new: Dim) -> Layout:
    return Layout(layout.dims[:dim] + (new,) + layout.dims[dim + 1 :])


@rule(aten.select.int)
def select(op: Op) -> Result | Value:
    x, dim, index = op.args[0], _dim(op, op.args[1]), op.args[2]
    own = x.layout.dims[dim]
    if not over_tokens(own):
        return Result(Layout(x.layout.dims[:dim] + x.layout.dims[dim + 1 :]))
    if x.is_packed and len(own) == 1 and own[0].kind is Kind.COLUMN:
        column = columns(op, x, dim, index + x.fake.shape[dim] if index < 0 else index, 1)
        dense = op.engine.emitter.call(aten.select.int, column.dense, dim, 0)
        return dataclasses.replace(column, layout=Layout.plain(op.shape), dense=dense)
    raise Barrier("selects one row or column")


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def split(op: Op) -> Result:
    x = op.args[0]
    dim = _dim(op, op.arg(1, 0) if op.target is aten.unbind.int else op.arg(2, 0))
    _keep_tokens_apart(op, x, [dim])
    kind = Kind.CONSTANT if is_constant(x.layout.dims[dim]) else Kind.FEATURE
    if op.target is aten.unbind.int:
        return Result([Layout(x.layout.dims[:dim] + x.layout.dims[dim + 1 :])] * len(op.node.meta["val"]))
    sizes = [piece.shape[dim] for piece in op.node.meta["val"]]
    return Result([_with_dim(x.layout, dim, () if same(n, 1) else (Atom(kind, n),)) for n in sizes])


@rule(aten.cat.default)
def cat(op: Op) -> Result:
    # torch.cat passes over tensors of shape [0], whatever the rank of the others (an empty cache)
    tensors = [v for v in op.args[0] if len(v.layout.dims) != 1 or not same(v.fake.shape[0], 0)]
    dim = _dim(op, op.arg(1, 0), len(op.shape))
    if len(tensors) == 1:
        (x,) = tensors
        return Result(x.layout, lambda: op.operand(x, x.layout.dims, op.window()))
    if any(len(v.layout.dims) != len(op.shape) for v in tensors):
        raise Barrier("concatenates tensors of different rank")
    if any(over_tokens(v.layout.dims[dim]) for v in tensors):
        return cat_columns(op, tensors, dim)
    others = [dataclasses.replace(v, layout=_with_dim(v.layout, dim, ())) for v in tensors]
    dims, unshared = align(others, len(op.shape))
    layout = _with_dim(Layout(dims), dim, (Atom(Kind.FEATURE, op.shape[dim]),))

    def build():
        window = op.window()
        operands = [op.operand(v, _with_dim(layout, dim, v.layout.dims[dim]).dims, window, expand=True) for v in tensors]
        return op.engine.emitter.call(aten.cat.default, operands, dim)

    return Result(layout, build, unshared)


def cat_columns(op: Op, tensors: Sequence[Value], dim: int) -> Result:
    """Pieces that follow each other along the columns, as a loop over chunks of columns makes them.

        cat([a[:, 0:4], b[:, 4:9]], 1)      becomes      cat([a', b'], 1) in the order of the packed tokens of columns 0 to 8
    """
    pieces = [v.layout.dims[dim] for v in tensors]
    if any([a.kind for a in piece] != [Kind.COLUMN] for piece in pieces):
        raise Barrier("concatenates tokens with something else than columns")
    end = pieces[0][0].offset
    for (atom,) in pieces:
        if not same(atom.offset, end):
            raise Barrier("concatenates columns that do not follow each other")
        end = end + atom.size
    column = (Atom(Kind.COLUMN, op.shape[dim], pieces[0][0].offset),)
    dims, unshared = align([dataclasses.replace(v, layout=_with_dim(v.layout, dim, column)) for v in tensors], len(op.shape))

    def build():
        e = op.engine.emitter
        window, parts = Window.of(column[0].offset, column[0].size), tuple(v.window for v in tensors)
        operands = [op.operand(v, _with_dim(Layout(dims), dim, v.layout.dims[dim]).dims, v.window, expand=True) for v in tensors]
        joined = e.call(aten.cat.default, operands, dim)
        return e.call(aten.index_select.default, joined, dim, e.request(Request("subselect", window, base=parts)))

    return Result(Layout(dims), build, unshared)


@rule(aten.stack.default)
def stack(op: Op) -> Result:
    tensors, dim = op.args[0], _dim(op, op.arg(1, 0), len(op.shape))
    dims, unshared = align(tensors, len(op.shape) - 1)
    layout = Layout(dims[:dim] + Layout.plain([op.shape[dim]]).dims + dims[dim:])

    def build():
        operands = [op.operand(v, dims, op.window(), expand=True) for v in tensors]
        return op.engine.emitter.call(aten.stack.default, operands, dim)

    return Result(layout, build, unshared)


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def scatter_part(op: Op) -> Result:
    """A write into a part of a tensor: its own dimension may not run over tokens, all others must be those of what is written."""
    x, part, dim = op.args[0], op.args[1], _dim(op, op.arg(2, 0))
    _keep_tokens_apart(op, x, [dim])
    if op.target is aten.select_scatter.default:
        part_dims = part.layout.dims[:dim] + ((),) + part.layout.dims[dim:]
    else:
        _keep_tokens_apart(op, part, [dim])
        part_dims = part.layout.dims
    others = [dataclasses.replace(x, layout=_with_dim(x.layout, dim, ()))]
    others.append(dataclasses.replace(part, layout=_with_dim(Layout(part_dims), dim, ())))
    dims, unshared = align(others, len(op.shape))
    layout = _with_dim(Layout(dims), dim, (Atom(Kind.FEATURE, op.shape[dim]),))

    def build():
        window = op.window()
        whole = op.operand(x, _with_dim(layout, dim, x.layout.dims[dim]).dims, window, expand=True)
        if op.target is aten.select_scatter.default:
            written = op.operand(part, layout.dims[:dim] + layout.dims[dim + 1 :], window, expand=True)
        else:
            written = op.operand(part, _with_dim(layout, dim, part.layout.dims[dim]).dims, window, expand=True)
        return op.engine.emitter.call(op.target, whole, written, *op.args[2:], **op.kwargs)

    return Result(layout, build, unshared)


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(op: Op) -> Any:
    x, pads, moves_tokens = op.args[0], op.args[1], False
    dims = list(x.layout.dims)
    for i in range(len(pads) // 2):
        d, before, after = len(dims) - 1 - i, pads[2 * i], pads[2 * i + 1]
        if same(before, 0) and same(after, 0):
            continue
        if over_tokens(dims[d]):
            if not is_columns(dims[d]) or (is_sequences(dims[d]) and not isinstance(before, int)):
                raise Barrier("pads across tokens")
            moves_tokens = True
            *rows, atom = dims[d]
            dims[d] = (*rows, _column(op, op.shape[d], atom.offset - before))
        else:
            dims[d] = (Atom(Kind.FEATURE, op.shape[d]),)
    result = Result(Layout(tuple(dims)))
    return op.engine.causal(op, result) if moves_tokens else result


# -- along features ---------------------------------------------------------------------------------------------------------


def _reduced(op: Op, dims: Sequence[int], keepdim: bool, outputs: int = 1) -> Result:
    x = op.args[0]
    dims = [_dim(op, d) for d in dims]
    if any(over_tokens(x.layout.dims[d]) for d in dims):
        raise Barrier("reduces over tokens")
    kept = [() if i in dims else d for i, d in enumerate(x.layout.dims) if keepdim or i not in dims]
    layout = Layout(tuple(kept))
    return Result(layout if outputs == 1 else [layout] * outputs)


@rule(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.any.dims,
    aten.all.dims,
)
def reduce_dims(op: Op) -> Result:
    every = range(len(op.args[0].layout.dims))
    return _reduced(op, op.arg(1) or every, op.arg(2, False))


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def reduce_variance(op: Op) -> Result:
    every = range(len(op.args[0].layout.dims))
    outputs = 2 if "mean" in op.target._schema.name else 1
    return _reduced(op, op.arg(1) or every, op.kwargs.get("keepdim", False), outputs)


@rule(aten.linalg_vector_norm.default)
def vector_norm(op: Op) -> Result:
    return _reduced(op, op.arg(2) or range(len(op.args[0].layout.dims)), op.arg(3, False))


@rule(aten.sum.default, aten.mean.default, aten.any.default, aten.all.default, aten.max.default, aten.min.default, aten.prod.default)
def reduce_all(op: Op) -> Result:
    return _reduced(op, range(len(op.args[0].layout.dims)), False)


@rule(aten.any.dim, aten.all.dim, aten.prod.dim_int)
def reduce_dim(op: Op) -> Result:
    return _reduced(op, [op.args[1]], op.arg(2, False))


@rule(aten.argmax.default, aten.argmin.default)
def arg_reduce(op: Op) -> Result:
    dims = range(len(op.args[0].layout.dims)) if op.arg(1) is None else [op.arg(1)]
    return _reduced(op, dims, op.arg(2, False))


@rule(aten.max.dim, aten.min.dim)
def reduce_with_index(op: Op) -> Result:
    return _reduced(op, [op.args[1]], op.arg(2, False), outputs=2)


_RUNNING = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)


@rule(aten._softmax.default, aten._log_softmax.default, *_RUNNING)
def along_dim(op: Op) -> Result:
    x, dim = op.args[0], _dim(op, op.args[1])
    own, outputs = x.layout.dims[dim], 2 if isinstance(op.node.meta["val"], (tuple, list)) else 1
    if x.is_token and own == (x.layout.column,) and op.target in _RUNNING:
        return op.engine.causal(op, Result(x.layout if outputs == 1 else [x.layout] * outputs))
    _keep_tokens_apart(op, x, [dim])
    layout = _with_dim(x.layout, dim, own and (Atom(Kind.FEATURE, x.fake.shape[dim]),))
    return Result(layout if outputs == 1 else [layout] * outputs)


@rule(aten.convolution.default)
def convolution(op: Op) -> Any:
    """A convolution along columns, rows and channels apart: index i of its result reads the operand's indices up to i + reach - padding.

    It stands for the last column that it reads, so that it depends on no later one:

        conv1d(x[B, C, S], w[C, 1, 4], padding=3)[..., :S]             columns 0 to S - 1
        conv1d(pad(x[B, C, S], (3, 0)), w[C, 1, 4])                    the same: the operand begins at column -3
    """
    x, weight, bias, stride, padding, dilation, transposed, _, _ = (op.arg(i) for i in range(9))
    dims = x.layout.dims
    if not x.is_token or len(dims) != 3 or [[a.kind for a in d] for d in (dims[0], dims[2])] != [[Kind.ROW], [Kind.COLUMN]]:
        raise Barrier("convolves something else than the columns of each row")
    if weight.is_token or (bias is not None and bias.is_token) or transposed or not same(stride[0], 1):
        raise Barrier("convolves tokens with a stride, transposed, or with weights that belong to tokens")
    reach = (weight.fake.shape[2] - 1) * dilation[0]
    column = _column(op, op.shape[2], dims[2][0].offset + reach - padding[0])
    return op.engine.causal(op, Result(Layout((dims[0], *Layout.plain([op.shape[1]]).dims, (column,)))))


@rule(aten.roll.default)
def roll(op: Op) -> Result | Value:
    """labels.roll(-1, 1): index i stands for the column after it; what came around stands where no column of the batch is."""
    x, shifts, dims = op.args[0], op.args[1], [_dim(op, d) for d in op.arg(2, [])]
    if dims and not any(over_tokens(x.layout.dims[d]) for d in dims):
        return Result(_without_constants(x.layout, dims))
    layout = x.layout
    whole = Atom(Kind.COLUMN, op.engine.choice.num_columns)
    own = layout.dims[dims[0]] if len(dims) == 1 else ()
    forward = is_columns(own) and own[-1] == whole and isinstance(shifts[0], int) and shifts[0] < 0
    if not forward or x.is_packed:
        raise Barrier("rolls tokens around")
    layout = _with_dim(layout, dims[0], (*own[:-1], Atom(Kind.COLUMN, layout.column.size, -shifts[0])))
    return op.engine.dense_result(op, Result(layout), shared=x.shared)


def _without_constants(layout: Layout, dims: Sequence[int]) -> Layout:
    for d in dims:
        layout = _with_dim(layout, d, layout.dims[d] and (Atom(Kind.FEATURE, product(a.size for a in layout.dims[d])),))
    return layout


@rule(aten.sort.default, aten.sort.stable, aten.topk.default, aten.flip.default)
def within_dim(op: Op) -> Result | list[Value]:
    x = op.args[0]
    if op.target is aten.topk.default:
        dims, outputs = [op.arg(2, -1)], 2
    elif op.target is aten.flip.default:
        dims, outputs = op.args[1], 1
    else:
        dims, outputs = [op.kwargs.get("dim", op.arg(1, -1))], 2
    dims = [_dim(op, d) for d in dims]
    if op.target in (aten.sort.default, aten.sort.stable) and op.engine.runs_packed(x) and len(x.layout.dims) == 1 and x.is_token:
        return routing.sort(op)
    _keep_tokens_apart(op, x, dims)
    layout = x.layout
    for d in dims:
        size = (op.node.meta["val"][0] if outputs == 2 else op.node.meta["val"]).shape[d]
        layout = _with_dim(layout, d, () if same(size, 1) else (Atom(Kind.FEATURE, size),))
    return Result([layout] * outputs if outputs > 1 else layout)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def normalise(op: Op) -> Result:
    x, shape = op.args[0], op.args[1]
    if any(v.is_token for v in op.values if v is not x):
        raise Barrier("normalises with weights that belong to tokens")
    rank = len(x.layout.dims)
    _keep_tokens_apart(op, x, range(rank - len(shape), rank))
    dims = x.layout.dims[: rank - len(shape)]
    statistics = Layout(dims + ((),) * len(shape))
    out = Layout(dims + Layout.plain(x.fake.shape[rank - len(shape) :]).dims)
    return Result([out] + [statistics] * (len(op.node.meta["val"]) - 1))


# -- matrix products --------------------------------------------------------------------------------------------------------


@rule(aten.mm.default)
def mm(op: Op) -> Result:
    return Result(_product(op, op.args[0], op.args[1]))


@rule(aten.addmm.default)
def addmm(op: Op) -> Result:
    bias, a, b = op.args[:3]
    if bias.is_token or len(bias.layout.dims) > 1:
        raise Barrier("adds something else than a bias")
    return Result(_product(op, a, b))


def _product(op: Op, a: Value, b: Value) -> Layout:
    (m, k), (k2, n) = a.layout.dims, b.layout.dims
    if over_tokens(k) or over_tokens(k2):
        raise Barrier("sums over tokens")
    if over_tokens(m) and over_tokens(n):
        raise Barrier("multiplies tokens with tokens")
    op.engine.count_product(a, b, op.shape, a.fake.shape[-1])
    return Layout((m, n))


@rule(aten.bmm.default)
def bmm(op: Op) -> Result | Value:
    a, b = op.args[:2]
    if sites.is_score_product(a, b):
        return sites.score_product(op.engine, op, a, b)
    (batch_a, m, k), (batch_b, k2, n) = a.layout.dims, b.layout.dims
    if over_tokens(k) or over_tokens(k2):
        raise Barrier("sums over tokens")
    if over_tokens(m) and over_tokens(n):
        raise Barrier("multiplies tokens with tokens")
    batch = align_batch(batch_a, batch_b)
    layout = Layout((batch, m, n))

    def build():
        window = op.window()
        shape = op.engine.convert.packed_shape([batch], window)
        operands = [op.operand(v, (batch,) + v.layout.dims[1:], window) for v in (a, b)]
        operands = [op.engine.emitter.call(aten.expand.default, x, shape + [-1, -1]) for x in operands]
        return op.engine.emitter.call(op.target, *operands)

    op.engine.count_product(a, b, op.shape, a.fake.shape[-1])
    return Result(layout, build)


@rule(aten.baddbmm.default)
def baddbmm(op: Op) -> Result | Value:
    added, a, b = op.args[:3]
    if not sites.is_score_product(a, b):
        raise Barrier("has no rule for packed tokens")
    return sites.add_to_scores(op, added, sites.score_product(op.engine, op, a, b))


# -- look-ups ---------------------------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def embedding(op: Op) -> Result:
    weight, index = op.args[:2]
    if weight.is_token:
        raise Barrier("looks up tokens by index")
    if op.arg(3, False):
        raise Barrier("scales gradients by how often an index occurs in the batch")
    return Result(Layout(index.layout.dims + weight.layout.dims[1:]))


@rule(aten.index.Tensor)
def index(op: Op) -> Result:
    x, indices = op.args[:2]
    at = [i for i, v in enumerate(indices) if v is not None]
    if x.is_packed and at == [0, 1]:
        return one_token_per_row(op, x, *indices[:2])
    if len(at) != 1 or indices[at[0]].fake.dtype is torch.bool:
        raise Barrier("indexes by several tensors or by a Boolean one")
    chosen = indices[at[0]]
    if x.is_token and (chosen.is_token or over_tokens(x.layout.dims[at[0]])):
        raise Barrier("looks up tokens by index")
    layout = Layout(x.layout.dims[: at[0]] + chosen.layout.dims + x.layout.dims[at[0] + 1 :])
    return Result(layout)


def one_token_per_row(op: Op, x: Value, rows: Value, columns: Value) -> Value:
    """x[arange(B), columns]: the last real token of each row, say. That it is a real one is asked of the data."""
    e, engine = op.engine.emitter, op.engine
    batch, position = x.layout.dims[:2]
    numbers = all(not v.is_token and v.pure and len(v.layout.dims) == 1 for v in (rows, columns))
    every_row = numbers and rows.element is not None and masks.is_arange(rows.element, 0) == 0
    all_rows = every_row and same(rows.fake.shape[0], engine.choice.num_rows)
    if not all_rows or [a.kind for a in batch] != [Kind.ROW] or [a.kind for a in position] != [Kind.COLUMN]:
        raise Barrier("looks up tokens by index")
    window, shape = x.window, [engine.choice.num_rows, position[0].size]
    chosen = [rows.dense, columns.dense]
    if engine.choice.drops_padding:
        real = e.call(aten.index.Tensor, e.request(Request("valid", window)), chosen)
        engine.facts[e.call(aten.all.default, real)] = None
    token = e.call(aten.index.Tensor, e.reshape(e.request(Request("unpack_index", window)), shape), chosen)
    tokens = e.call(aten.select.int, x.packed, 0, 0)
    return Value(op.node, Layout.plain(op.shape), dense=e.call(aten.index_select.default, tokens, 0, token))


@rule(aten.index_select.default)
def index_select(op: Op) -> Result:
    x, dim, chosen = op.args[0], _dim(op, op.args[1]), op.args[2]
    if x.is_token and chosen.is_token:
        raise Barrier("looks up tokens by index")
    _keep_tokens_apart(op, x, [dim])
    own = chosen.layout.dims[0] if chosen.layout.dims else ()
    return Result(_with_dim(x.layout, dim, own))


@rule(aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
def gather(op: Op) -> Result:
    rank, dim = len(op.shape), _dim(op, op.args[1], len(op.shape))
    tensors = [v for v in op.values]
    for v in tensors:
        if len(v.layout.dims) != rank:
            raise Barrier("indexes tensors of different rank")
        _keep_tokens_apart(op, v, [dim])
    result_like = op.args[2] if op.target is aten.gather.default else op.args[0]
    for d in range(rank):
        if d != dim and not all(same(v.fake.shape[d], result_like.fake.shape[d]) for v in tensors):
            raise Barrier("indexes part of a tensor")
    dims, unshared = align([dataclasses.replace(v, layout=_with_dim(v.layout, dim, ())) for v in tensors], rank)
    own = result_like.layout.dims[dim]
    layout = _with_dim(Layout(dims), dim, own and (Atom(Kind.FEATURE, op.shape[dim]),))

    def build():
        window = op.window()

        def operand(v):
            return op.operand(v, _with_dim(layout, dim, v.layout.dims[dim]).dims, window, expand=True)

        args = pytree.tree_map_only(Value, operand, op.args, is_leaf=_is_value)
        return op.engine.emitter.call(op.target, *args, **op.kwargs)

    return Result(layout, build, unshared)


# -- made from nothing ------------------------------------------------------------------------------------------------------


@rule(aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default)
def full(op: Op) -> Result:
    return Result(Layout.plain(op.shape, Kind.CONSTANT))


_LIKE = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
}


@rule(*_LIKE, aten.full_like.default, aten.new_full.default)
def full_like(op: Op) -> Value:
    """What is made in a tensor's shape has the same number everywhere and does not read the tensor."""
    fake = op.node.meta["val"]
    number = _LIKE.get(op.target)
    if number is None:
        number = op.args[1] if op.target is aten.full_like.default else op.args[2]
    dense = op.engine.emitter.call(aten.full.default, list(fake.shape), number, dtype=fake.dtype, device=fake.device)
    return Value(op.node, Layout.plain(fake.shape, Kind.CONSTANT), dense=dense, light=True, pure=True)


# -- losses -----------------------------------------------------------------------------------------------------------------


@rule(aten.nll_loss_forward.default)
def nll_loss(op: Op) -> Any:
    """The token-wise part of the loss runs packed; what is left is a sum over one number per token.

        loss, weight = nll_loss_forward(logp[B*S, V], target[B*S], None, mean, ignore)
    becomes
        each = nll_loss_forward(logp[T', V], target[T'], None, none, ignore)
        loss = unpack(each).sum() / (target != ignore).sum()
    """
    logp, target, weight, reduction, ignore = (op.arg(i) for i in range(5))
    if not logp.is_packed or target.is_packed or not target.shared or weight is not None:
        raise Barrier("reduces over tokens")
    e, engine = op.engine.emitter, op.engine
    losses = dataclasses.replace(logp, layout=Layout(logp.layout.dims[:-1]))
    dims, unshared = align([losses, target], len(target.layout.dims))
    if unshared or Layout(dims) != losses.layout:
        raise Barrier(unshared or "reduces over tokens")
    packed_target = op.operand(target, dims, logp.window)
    each = e.getitem(e.call(op.target, logp.packed, packed_target, None, 0, ignore), 0)
    kept = e.call(aten.ne.Scalar, target.dense, ignore)
    zero = engine.zero_fact(kept, losses.layout, logp.window) if target.pure else None
    value = Value(engine.result_node(op.node, 0), losses.layout, packed=each, at_padding=None if zero is None else AtPadding(0, (zero,)))
    count = e.call(aten._to_copy.default, e.call(aten.sum.default, kept), dtype=logp.fake.dtype)
    if reduction == 0:
        return [value, Value(op.node, Layout(()), dense=e.call(aten.zeros_like.default, count))]
    engine.note_barrier(op, "reduces the loss over tokens")
    total = e.call(aten.sum.default, engine.read_dense(value, op, "reduces the loss over tokens"))
    loss = e.call(aten.div.Tensor, total, count) if reduction == 1 else total
    return [Value(op.node, Layout(()), dense=loss), Value(op.node, Layout(()), dense=count)]
