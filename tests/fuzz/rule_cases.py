"""For each entry of the rule table, how an operation of it is drawn: operands in drawn layouts, dimensions and numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench import Bench
from hypothesis import assume
from hypothesis import strategies as st

aten = torch.ops.aten


class Drawing:
    """A Bench, and what draws the operands for it."""

    def __init__(self, draw: Callable, bench: Bench):
        self.draw, self.bench = draw, bench
        self.call, self.shape = bench.call, bench.shape
        self.views: list[Callable] | None = None

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def flag(self, one_in: int = 2) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def dim(self, node, extra: int = 0) -> int:
        """Any dimension, counted from either end; the last one, mostly of features, as often as all others."""
        rank = len(self.shape(node)) + extra
        assume(rank > 0)
        if self.flag():
            return -1
        return self.draw(st.integers(-rank, rank - 1))

    # -- operands ----------------------------------------------------------------------------------------------------------

    def operand(self, dtype=torch.float64, packed: bool | None = None, max_views: int = 3):
        """A token tensor in some layout; the views are kept, so that `like` can make another in the same one."""
        self.features = self.draw(st.lists(st.sampled_from((4, 2, 3, 1)), min_size=0 if self.flag(4) else 1, max_size=2))
        self.row_dim = 1 if self.flag(6) else 0
        self.dtype = dtype
        self.packed = not self.flag(3) if packed is None else packed
        self.repeats = self.flag(6)  # no tokens, but repeated along some dimensions: what is said to be constant must be
        self.views = []
        node = self._base(shared=not self.flag(8))
        for _ in range(self.draw(st.integers(0, max_views))):
            view = self._view(node)
            if view is not None:
                self.views.append(view)
                node = view(node)
        return node

    def like(self, dtype=None):
        """Another token tensor of the same views."""
        before = self.dtype
        self.dtype = dtype or before
        node = self._base(shared=not self.flag(6))
        self.dtype = before
        for view in self.views:
            node = view(node)
        return node

    def _base(self, shared: bool):
        if self.repeats:
            whole = [self.bench.rows, self.bench.columns, *self.features]
            shape = [n if self.flag() else 1 for n in whole]
            return self.call(aten.expand.default, self.bench.plain(*shape, dtype=self.dtype), whole)
        if not self.packed:
            return self.bench.token(*self.features, dtype=self.dtype, shared=shared, row_dim=self.row_dim)
        node = self.call(aten.sin.default, self.bench.token(*self.features, 1, shared=shared, row_dim=self.row_dim))
        node = self.call(aten.squeeze.dim, node, -1)  # numbers of [B, S] alone are kept dense, those of [B, S, 1] are not
        if self.dtype is torch.float64:
            return node
        if self.dtype is torch.bool:
            return self.call(aten.gt.Scalar, node, 0.3)
        return self.call(aten._to_copy.default, self.call(aten.abs.default, self.call(aten.mul.Scalar, node, 3.0)), dtype=self.dtype)

    def _view(self, node):
        shape = self.shape(node)
        rank = len(shape)
        kind = self.draw(st.integers(0, 5))
        if kind == 0 and rank > 1:
            order = list(self.draw(st.permutations(range(rank))))
            return lambda x: self.call(aten.permute.default, x, order)
        if kind == 1 and rank > 1:
            d = self.draw(st.integers(0, rank - 2))
            return lambda x: self.call(aten.reshape.default, x, [*self.shape(x)[:d], shape[d] * shape[d + 1], *self.shape(x)[d + 2 :]])
        if kind == 2 and rank < 5:
            d = self.draw(st.integers(0, rank))
            return lambda x: self.call(aten.unsqueeze.default, x, d)
        if kind == 3 and self.packed:
            d = self.draw(st.integers(0, rank - 1))
            start, stop = self.draw(st.integers(0, 1)), self.draw(st.integers(-1, 0))
            if shape[d] - start + stop < 1:
                return None
            return lambda x: self.call(aten.slice.Tensor, x, d, start, shape[d] + stop)
        if kind == 4:
            where = [d for d, n in enumerate(shape) if n == 1]
            if where:
                d, n = self.pick(*where), self.pick(2, 3)
                sizes = [n if i == d else -1 for i in range(rank)]
                return lambda x: self.call(aten.expand.default, x, sizes)
        if kind == 5:
            where = [d for d, n in enumerate(shape) if n == 4]
            if where and rank < 5:
                d = self.pick(*where)
                return lambda x: self.call(aten.reshape.default, x, [*shape[:d], 2, 2, *shape[d + 1 :]])
        return None

    def partner(self, node, dtype=torch.float64):
        """What broadcasts against `node`: tokens alike, a table over some of its dimensions, a part of itself."""
        kind = self.draw(st.integers(0, 4))
        if kind <= 1:
            return self.like(dtype)
        shape = self.shape(node)
        if kind == 2 and len(shape):
            d = self.draw(st.integers(0, len(shape) - 1))
            return self.bench.plain(*[n if i == d else 1 for i, n in enumerate(shape)][self.draw(st.integers(0, d)) :], dtype=dtype)
        if kind == 3:
            return self.bench.plain(*(n if self.draw(st.booleans()) else 1 for n in shape), dtype=dtype)
        return self.bench.plain(*shape[self.draw(st.integers(0, len(shape))) :], dtype=dtype)

    def table(self, *shape):
        return self.bench.plain(*shape)


CASES: dict = {}


def case(*targets):
    def register(function):
        for target in targets:
            CASES[target] = function
        return function

    return register


@case("pointwise")
def pointwise(d: Drawing, target):
    x = d.operand()
    kind = d.draw(st.integers(0, 5))
    if kind == 0:
        return d.call(d.pick(aten.tanh.default, aten.relu.default, aten.neg.default, aten.abs.default, aten.sigmoid.default), x)
    if kind == 1:
        return d.call(d.pick(aten.mul.Scalar, aten.add.Scalar, aten.pow.Tensor_Scalar, aten.gt.Scalar), x, 2)
    if kind == 2:
        return d.call(aten.clamp.default, x, -0.5, 0.5)
    y = d.partner(x)
    if kind == 5:
        return d.call(d.pick(aten.addcmul.default, aten.lerp.Tensor), x, y, d.partner(x))
    x, y = (x, y) if d.flag() else (y, x)
    return d.call(d.pick(aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.sub.Tensor, aten.lt.Tensor, aten.atan2.default), x, y)


@case(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def copies(d, target):
    return d.call(target, d.operand())


@case(aten._to_copy.default)
def cast(d, target):
    return d.call(target, d.operand(), dtype=d.pick(torch.float32, torch.int64, torch.bool))


@case(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(d, target):
    x = d.operand()
    mask = d.partner(x, torch.bool)
    return d.call(target, x, mask, 0.5 if target is aten.masked_fill.Scalar else d.table())


@case(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def where(d, target):
    x = d.operand()
    mask = d.partner(x, torch.bool)
    args = {aten.where.self: (x, d.partner(x)), aten.where.ScalarOther: (x, 0.5), aten.where.ScalarSelf: (0.5, x)}[target]
    return d.call(target, mask, *args)


@case(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(d, target):
    x = d.operand()
    if target is not aten.reshape.default:
        x = d.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    shape = list(d.shape(x))
    for _ in range(d.draw(st.integers(1, 2))):
        form = d.draw(st.integers(0, 4))
        if form == 0 and len(shape) > 1:
            i = d.draw(st.integers(0, len(shape) - 2))
            shape[i : i + 2] = [shape[i] * shape[i + 1]]
        elif form == 1 and len(shape):
            i = d.draw(st.integers(0, len(shape) - 1))
            factors = [n for n in (2, 3, 4) if shape[i] % n == 0 and shape[i] > n]
            if factors:
                n = d.pick(*factors)
                shape[i : i + 1] = d.pick([n, shape[i] // n], [shape[i] // n, n])
        elif form == 2:
            shape = [1, *shape]
        elif form == 3:
            shape = list(d.draw(st.permutations(shape)))
        elif len(shape) > 2:
            shape = [shape[0], -1]
    return d.call(target, x, shape)


@case(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(d, target):
    x = d.operand()
    if target is aten.squeeze.default:
        return d.call(target, x)
    return d.call(target, x, d.dim(x) if target is aten.squeeze.dim else sorted({d.dim(x) % len(d.shape(x)) for _ in range(2)}))


@case(aten.unsqueeze.default)
def unsqueeze(d, target):
    x = d.operand()
    return d.call(target, x, d.dim(x, 1))


@case(aten.permute.default)
def permute(d, target):
    x = d.operand()
    return d.call(target, x, [i - len(d.shape(x)) * d.flag() for i in d.draw(st.permutations(range(len(d.shape(x)))))])


@case(aten.transpose.int)
def transpose(d, target):
    x = d.operand()
    return d.call(target, x, d.dim(x), d.dim(x))


@case(aten.t.default)
def t(d, target):
    x = d.operand()
    while len(d.shape(x)) > 2:
        x = d.call(aten.reshape.default, x, [d.shape(x)[0] * d.shape(x)[1], *d.shape(x)[2:]])
    return d.call(target, x)


@case(aten.expand.default)
def expand(d, target):
    x = d.operand()
    sizes = [d.pick(2, 3, d.bench.rows) if n == 1 else d.pick(-1, n) for n in d.shape(x)]
    return d.call(target, x, [d.pick(2, d.bench.columns)] * d.draw(st.integers(0, 1)) + [n for n in sizes])


@case(aten.slice.Tensor)
def slice_(d, target):
    x = d.operand()
    at = d.dim(x)
    n = d.shape(x)[at]
    start, stop = d.draw(st.integers(-n, n)), d.pick(n, n - 1, -1, 2**63 - 1, n + 2)
    y = d.call(target, x, at, start, stop, d.pick(1, 1, 1, 2))
    assume(all(d.shape(y)))
    return y


@case(aten.select.int)
def select(d, target):
    x = d.operand()
    at = d.dim(x)
    return d.call(target, x, at, d.draw(st.integers(-d.shape(x)[at], d.shape(x)[at] - 1)))


@case(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def split(d, target):
    x = d.operand()
    at = d.dim(x)
    n = d.shape(x)[at]
    if target is aten.unbind.int:
        return d.call(target, x, at)
    cut = d.draw(st.integers(1, n))
    return d.call(target, x, cut if target is aten.split.Tensor else [c for c in (cut, n - cut) if c], at)


@case(aten.cat.default)
def cat(d, target):
    x = d.operand()
    at = d.dim(x)
    if d.flag(3) and d.shape(x)[at] > 1:  # cut into chunks, which go different ways
        cut = d.draw(st.integers(1, d.shape(x)[at] - 1))
        chunks = [d.call(aten.slice.Tensor, x, at, 0, cut), d.call(aten.slice.Tensor, x, at, cut, 2**63 - 1)]
        chunks[0] = d.call(aten.sin.default, chunks[0])
        if d.flag(4):
            chunks.reverse()
        return d.call(target, chunks, at)
    tensors = [x]
    for _ in range(d.draw(st.integers(0, 2))):
        kind = d.draw(st.integers(0, 3))
        if kind == 0:
            tensors.append(d.like())
        elif kind == 1:
            tensors.append(x)
        elif kind == 2:
            shape = list(d.shape(x))
            shape[at] = d.pick(1, 2)
            tensors.append(d.table(*shape))
        else:
            tensors.append(d.call(aten.new_zeros.default, x, [0]))
    return d.call(target, list(d.draw(st.permutations(tensors))), at)


@case(aten.stack.default)
def stack(d, target):
    x = d.operand()
    others = [d.like() if d.flag() else d.table(*d.shape(x)) for _ in range(d.draw(st.integers(0, 2)))]
    return d.call(target, [x, *others], d.dim(x, 1))


@case(aten.slice_scatter.default)
def slice_scatter(d, target):
    x = d.operand()
    at = d.dim(x)
    n = d.shape(x)[at]
    start = d.draw(st.integers(0, n - 1))
    stop = d.draw(st.integers(start + 1, n))
    source = d.like() if d.flag() else d.table(*d.shape(x)) if d.flag() else x
    return d.call(target, x, d.call(aten.slice.Tensor, source, at, start, stop), at, start, stop)


@case(aten.select_scatter.default)
def select_scatter(d, target):
    x = d.operand()
    at = d.dim(x)
    source = d.like() if d.flag() else d.table(*d.shape(x)) if d.flag() else x
    i = d.draw(st.integers(0, d.shape(x)[at] - 1))
    return d.call(target, x, d.call(aten.select.int, source, at, d.draw(st.integers(0, d.shape(x)[at] - 1))), at, i)


@case(aten.constant_pad_nd.default)
def pad(d, target):
    x = d.operand()
    pads = [d.draw(st.integers(-1, 2)) for _ in range(2 * d.draw(st.integers(1, len(d.shape(x)))))]
    assume(all(n + pads[2 * i] + pads[2 * i + 1] > 0 for i, n in zip(range(len(pads) // 2), reversed(d.shape(x)), strict=False)))
    return d.call(target, x, pads, 0.5)


def _some_dims(d, x):
    return sorted({d.dim(x) % len(d.shape(x)) for _ in range(d.draw(st.integers(1, 2)))})


@case(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default)
def reduce(d, target):
    x = d.operand()
    return d.call(target, x, _some_dims(d, x), d.flag())


@case(aten.any.dims, aten.all.dims)
def reduce_bool(d, target):
    x = d.operand(torch.bool)
    return d.call(target, x, _some_dims(d, x), d.flag())


@case(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(d, target):
    x = d.operand()
    return d.call(target, x, _some_dims(d, x), correction=0, keepdim=d.flag())


@case(aten.linalg_vector_norm.default)
def vector_norm(d, target):
    x = d.operand()
    return d.call(target, x, 2, _some_dims(d, x), d.flag())


@case(aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.prod.default)
def reduce_all(d, target):
    return d.call(target, d.operand())


@case(aten.any.default, aten.all.default)
def reduce_all_bool(d, target):
    return d.call(target, d.operand(torch.bool))


@case(aten.any.dim, aten.all.dim)
def reduce_bool_dim(d, target):
    x = d.operand(torch.bool)
    return d.call(target, x, d.dim(x), d.flag())


@case(aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def reduce_dim(d, target):
    x = d.operand()
    return d.call(target, x, d.dim(x), d.flag())


@case(aten._softmax.default, aten._log_softmax.default)
def softmax(d, target):
    x = d.operand()
    return d.call(target, x, d.dim(x), False)


@case(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)
def cumulative(d, target):
    x = d.operand()
    return d.call(target, x, d.dim(x))


@case(aten.convolution.default)
def convolution(d, target):
    x = d.operand()
    if d.flag() or len(d.shape(x)) != 3:  # as decoders have it
        x = d.call(aten.permute.default, d.call(aten.sin.default, d.bench.token(4, shared=not d.flag(6))), [0, 2, 1])
    k, dilation, groups = d.pick(1, 2, 3), d.pick(1, 1, 2), d.pick(1, d.shape(x)[1])
    padding = d.pick(0, (k - 1) * dilation, (k - 1) * dilation, 1)
    if d.flag(3):
        x = d.call(aten.constant_pad_nd.default, x, [(k - 1) * dilation, 0], 0.0)
        padding = 0
    assume(d.shape(x)[2] + 2 * padding > (k - 1) * dilation)
    weight = d.table(d.shape(x)[1], d.shape(x)[1] // groups, k)
    bias, stride = d.table(d.shape(x)[1]) if d.flag() else None, d.pick(1, 1, 1, 2)
    y = d.call(target, x, weight, bias, [stride], [padding], [dilation], False, [0], groups)
    if d.flag():
        start = d.pick(0, 0, 1)
        assume(d.shape(y)[2] > start)
        y = d.call(aten.slice.Tensor, y, 2, start, start + d.bench.columns)
        y = d.call(aten.sin.default, y)
    return y


@case(aten.roll.default)
def roll(d, target):
    x = d.bench.token(*([3] if d.flag() else []), dtype=torch.int64, shared=not d.flag(6)) if d.flag() else d.operand()
    dims = [d.dim(x)] if d.flag(3) else [1] if len(d.shape(x)) > 1 else [0]
    y = d.call(target, x, [d.pick(-1, -1, -2, 1)], dims)
    return d.call(aten.mul.Tensor, y, d.like()) if d.views is not None and d.flag() else y


@case(aten.repeat.default)
def repeat(d, target):
    x = d.operand()
    return d.call(target, x, [d.pick(1, 2)] * d.draw(st.integers(0, 1)) + [d.pick(1, 1, 2, 3) for _ in d.shape(x)])


@case(aten.polar.default, aten.complex.default)
def complex_numbers(d, target):
    x = d.operand()
    return d.call(aten.mul.Tensor, d.call(target, x, d.partner(x)), x)


@case(aten.view_as_complex.default, aten.view_as_real.default)
def pairs(d, target):
    x = d.operand()
    if d.shape(x)[-1:] != (2,):
        x = d.call(aten.stack.default, [x, d.call(aten.cos.default, x)], -1)
    z = d.call(aten.view_as_complex.default, x)
    return d.call(aten.view_as_real.default, d.call(aten.mul.Tensor, z, z)) if target is aten.view_as_real.default else z


@case(aten.sort.default)
def sort(d, target):
    x = d.operand()
    return d.call(target, x, d.dim(x), d.flag())


@case(aten.sort.stable)
def sort_stable(d, target):
    x = d.operand()
    return d.call(target, x, stable=True, dim=d.dim(x))


@case(aten.topk.default)
def topk(d, target):
    x = d.operand()
    at = d.dim(x)
    return d.call(target, x, d.draw(st.integers(1, d.shape(x)[at])), at)


@case(aten.flip.default)
def flip(d, target):
    x = d.operand()
    return d.call(target, x, _some_dims(d, x))


@case(aten.native_layer_norm.default)
def layer_norm(d, target):
    x = d.operand()
    shape = list(d.shape(x)[-d.draw(st.integers(1, len(d.shape(x)))) :])
    weights = [d.table(*shape) if d.flag() else None for _ in range(2)]
    return d.call(target, x, shape, *weights, 1e-3)


@case(aten._fused_rms_norm.default)
def rms_norm(d, target):
    x = d.operand()
    shape = list(d.shape(x)[-d.draw(st.integers(1, len(d.shape(x)))) :])
    return d.call(target, x, shape, d.table(*shape) if d.flag() else None, 1e-3)


def _matrix(d, x):
    """x with its leading or its trailing dimensions flattened into two."""
    shape = d.shape(x)
    assume(len(shape) >= 2)
    cut = d.pick(len(shape) - 1, d.draw(st.integers(1, len(shape) - 1)))  # any but the last flattens tokens into what is summed
    sizes = [1, 1]
    for i, n in enumerate(shape):
        sizes[i >= cut] *= n
    return d.call(aten.reshape.default, x, sizes)


@case(aten.mm.default)
def mm(d, target):
    a = _matrix(d, d.operand())
    m, k = d.shape(a)
    if d.flag(4):
        b = d.call(aten.t.default, a)
    elif d.flag(4):
        b = _matrix(d, d.like())
        assume(d.shape(b)[0] == k)
    else:
        b = d.table(k, 3)
    if d.flag(4):
        a, b = d.call(aten.t.default, b), d.call(aten.t.default, a)
    return d.call(target, a, b)


@case(aten.addmm.default)
def addmm(d, target):
    a = _matrix(d, d.operand())
    m, k = d.shape(a)
    shape = d.pick((3,), (3,), (3,), (m, 3), (m, 1), None)
    bias = d.call(aten.mm.default, a, d.table(k, 3)) if shape is None else d.table(*shape)
    return d.call(target, bias, a, d.table(k, 3))


def _three(d, x):
    shape = list(d.shape(x))
    while len(shape) < 3:
        shape = d.pick([1, *shape], [*shape, 1])
    while len(shape) > 3:
        i = d.draw(st.integers(0, len(shape) - 2))
        shape[i : i + 2] = [shape[i] * shape[i + 1]]
    return d.call(aten.reshape.default, x, shape)


def _pair(d):
    a = _three(d, d.operand())
    b, m, k = d.shape(a)
    kind = d.draw(st.integers(0, 4))
    if kind == 0:
        other = d.table(b, k, 3)
    elif kind == 1:
        other = d.call(aten.expand.default, d.table(1, k, 3), [b, k, 3])
    elif kind == 2:
        other = d.call(aten.transpose.int, a, 1, 2)
    elif kind == 3:
        other = d.call(aten.transpose.int, _three(d, d.like()), 1, 2)
        assume(d.shape(other)[:2] == (b, k))
    else:
        other = d.call(aten.expand.default, d.table(b, 1, 3), [b, k, 3])
    if d.flag(4):
        a, other = d.call(aten.transpose.int, other, 1, 2), d.call(aten.transpose.int, a, 1, 2)
    return a, other


@case(aten.bmm.default)
def bmm(d, target):
    return d.call(target, *_pair(d))


@case(aten.baddbmm.default)
def baddbmm(d, target):
    a, b = _pair(d)
    return d.call(target, d.table(1, 1, 1), a, b, beta=d.pick(0, 1), alpha=0.5)


@case(aten.embedding.default)
def embedding(d, target):
    x = d.operand(torch.int64)
    return d.call(target, d.table(4, 2), x)


@case(aten.index.Tensor)
def index(d, target):
    kind = d.draw(st.integers(0, 3))
    if kind == 0:
        at, places = d.draw(st.integers(0, 2)), [None] * 3
        shape = [2, 3, 2]
        shape[at] = 4
        places[at] = d.operand(torch.int64)
        return d.call(target, d.table(*shape), places[: at + 1])
    x = d.operand()
    at = d.dim(x) % len(d.shape(x))
    n = d.shape(x)[at]
    index = d.call(aten.fmod.Scalar, d.bench.plain(*d.pick((2,), (n,), (2, 2)), dtype=torch.int64), n)
    if kind == 1 and at:
        return d.call(target, x, [*[None] * (at - 1), d.call(aten.fmod.Scalar, index, d.shape(x)[at - 1]), index])
    if kind == 2:
        rows = d.call(aten.arange.default, d.shape(x)[0])
        assume(len(d.shape(x)) > 1)
        return d.call(target, x, [rows, d.call(aten.fmod.Scalar, d.bench.plain(d.shape(x)[0], dtype=torch.int64), d.shape(x)[1])])
    return d.call(target, x, [*[None] * at, index])


@case(aten.index_select.default)
def index_select(d, target):
    if d.flag(3):
        index = d.operand(torch.int64)
        return d.call(target, d.table(2, 4, 3), 1, d.call(aten.reshape.default, index, [-1]))
    x = d.operand()
    at = d.dim(x)
    index = d.call(aten.fmod.Scalar, d.bench.plain(d.pick(1, 2, d.shape(x)[at]), dtype=torch.int64), d.shape(x)[at])
    return d.call(target, x, at, index)


@case(aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
def gather(d, target):
    x = d.operand()
    at = d.dim(x)
    shape = list(d.shape(x))
    index = d.like(torch.int64) if d.flag() else d.bench.plain(*(n if d.flag() else 1 for n in shape), dtype=torch.int64)
    if d.flag(3):
        index = d.call(aten.slice.Tensor, index, at, 0, 1)
    index = d.call(aten.fmod.Scalar, index, shape[at])
    if target is aten.gather.default:
        return d.call(target, x, at, index)
    if target is aten.scatter.value:
        return d.call(target, x, at, index, 0.5)
    # positions that are written twice are in no order
    source = d.call(aten.full_like.default, index, 0.5, dtype=torch.float64) if d.flag() or target is aten.scatter.src else d.like()
    return d.call(target, x, at, index, source)


@case(aten.full.default)
def full(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(target, [n if d.flag() else 1 for n in d.shape(x)], 0.5, dtype=torch.float64))


@case(aten.zeros.default, aten.ones.default)
def zeros(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(target, [n if d.flag() else 1 for n in d.shape(x)], dtype=torch.float64))


@case(aten.scalar_tensor.default)
def scalar(d, target):
    return d.call(aten.add.Tensor, d.operand(), d.call(target, 0.5, dtype=torch.float64))


@case(aten.zeros_like.default, aten.ones_like.default)
def like(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(target, x))


@case(aten.full_like.default)
def full_like(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(target, x, 0.5))


@case(aten.empty_like.default)
def empty_like(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(aten.zeros_like.default, d.call(target, x)))


@case(aten.new_zeros.default, aten.new_ones.default)
def new(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(target, x, [n if d.flag() else 1 for n in d.shape(x)]))


@case(aten.new_full.default)
def new_full(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(target, x, [n if d.flag() else 1 for n in d.shape(x)], 0.5))


@case(aten.new_empty.default)
def new_empty(d, target):
    x = d.operand()
    return d.call(aten.add.Tensor, x, d.call(aten.zeros_like.default, d.call(target, x, list(d.shape(x)))))


@case(aten.nll_loss_forward.default)
def nll_loss(d, target):
    b, s = d.bench.rows, d.bench.columns
    logits = d.call(aten.sin.default, d.bench.token(4, shared=not d.flag(6)))
    labels = d.bench.token(dtype=torch.int64, shared=not d.flag(6))
    if d.flag():
        logits, labels = d.call(aten.slice.Tensor, logits, 1, 0, s - 1), d.call(aten.slice.Tensor, labels, 1, 1, s)
        s -= 1
        assume(s > 0)
    if d.flag():
        masked = d.bench.token(dtype=torch.bool)
        masked = d.call(aten.slice.Tensor, masked, 1, 0, s)
        labels = d.call(aten.masked_fill.Scalar, labels, masked, -100)
    if d.flag(4):
        logits, labels = d.call(aten.permute.default, logits, [1, 0, 2]), d.call(aten.t.default, labels)
    logits = d.call(aten._log_softmax.default, d.call(aten.reshape.default, logits, [b * s, 4]), 1, False)
    labels = d.call(aten.reshape.default, labels, [b * s])
    reduction = d.pick(0, 1, 2)
    out = d.call(target, logits, labels, None, reduction, d.pick(-100, 2))
    assume(all(d.bench.real[n].isfinite().all() for n in out))
    return out
