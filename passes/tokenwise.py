"""An autograd.Function that runs packed: its functions, unchanged, on packed operands.

    y = autograd_function_apply(forward, backward, x[B, S, H], weight[H])        becomes
    y' = autograd_function_apply(forward, backward, x'[1, T', H], weight[H])

That is right if both functions compute each token by itself, and if the backward is linear in the gradient that it gets: a shared token's
is the sum of its copies', and a gradient that is clipped, or reduced to its sign, is no sum. Both functions are run on dense and on
packed fake tensors. They must do the same operations, all of a small class that knows nothing of the number of tokens:

 1. element by element, and sums and means over features;
 2. in the backward, of what depends on the gradient: sums of such, products with what does not, sums over features or over all tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.layout import Kind, Layout, same
from dualkv_compile.passes.rules import Result
from dualkv_compile.passes.simplify import is_pointwise
from dualkv_compile.passes.values import Value

aten = torch.ops.aten

_COPIES = {aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default}
_SUMS = {aten.sum.dim_IntList, aten.sum.default}
_REDUCTIONS = _SUMS | {
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
}
_ZEROS = {aten.zeros_like.default}
# linear in their first operand
_BACKWARDS = {
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
}


def autograd_function(engine, op) -> Any:
    """The results of an autograd.Function on packed tokens; Barrier if that is not provably what they are on all."""
    operands = op.args[2:]
    tokens = [v for v in operands if isinstance(v, Value) and v.is_token]
    if not all(v.shared for v in tokens):
        raise Barrier("calls a function on values that differ from row to row")
    if any(v.window != tokens[0].window for v in tokens) or op.kwargs.get("non_differentiable_idx"):
        raise Barrier("calls a function on tokens of different columns, or for results without gradients")
    prefix = _prefix(tokens[0].layout)
    if any(_prefix(v.layout) != prefix for v in tokens):
        raise Barrier("calls a function on tokens that are arranged in different ways")
    window = op.window()
    inputs = [v if not isinstance(v, Value) else op.operand(v, v.layout.dims, window) if v.is_token else v.dense for v in operands]
    are_tokens = [isinstance(v, Value) and v.is_token for v in operands]
    bodies = [getattr(engine.recorded, n.target) for n in op.node.args[:2]]
    dense = _Run(bodies, [_fake(v.fake if isinstance(v, Value) else v) for v in operands], are_tokens, prefix)
    packed = _Run(bodies, [_fake(n) for n in inputs], are_tokens, prefix)
    packed.agrees_with(dense)
    node = engine.emitter.call_with_functions(op.target, (*op.args[:2], *inputs), op.kwargs, packed.results)
    layouts = [Layout(tokens[0].layout.dims[:prefix] + Layout.plain(r.shape[prefix:]).dims) for r in packed.results]
    return engine.wrap(op, Result(layouts), packed=node)


def _prefix(layout: Layout) -> int:
    """How many dimensions the tokens take: [B, S, …] or [B * S, …], features following."""
    kinds = [[a.kind for a in dim] for dim in layout.dims]
    tokens = (Kind.ROW, Kind.COLUMN)
    prefix = 1 if kinds[:1] == [[*tokens]] else 2 if kinds[:2] == [[k] for k in tokens] else 0
    if not prefix:
        raise Barrier("calls a function on tokens that are not its operands' first dimensions")
    return prefix


def _fake(x: Any) -> Any:
    x = x.meta["val"] if isinstance(x, fx.Node) else x
    return x.detach() if isinstance(x, torch.Tensor) else x


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """What is known of a tensor inside of a function: whether its first dimensions are the tokens, whether it is linear in the gradient."""

    is_token: bool
    is_linear: bool = False


class _Run(TorchDispatchMode):
    """One run of a forward and a backward; Barrier where an operation is not of the class."""

    def __init__(self, bodies: Sequence[fx.GraphModule], operands: Sequence[Any], are_tokens: Sequence[bool], prefix: int):
        super().__init__()
        self.prefix = prefix
        self.calls: list[tuple] = []
        self._known: dict[int, _Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        forward, backward = bodies
        for x, is_token in zip(operands, are_tokens, strict=True):
            self._note(x, _Tensor(is_token))
        with torch.no_grad():
            outputs = self._run(forward, operands)
            if not (isinstance(outputs, (tuple, list)) and len(outputs) == 2 and isinstance(outputs[0], (tuple, list))):
                raise Barrier("calls a function whose saved values are not told from its results")
            self.results, saved = tuple(outputs[0]), outputs[1]
            if not all(isinstance(r, torch.Tensor) and self._known[id(r)].is_token for r in self.results):
                raise Barrier("calls a function that gives something else than tokens")
            gradients = [torch.empty_like(r) for r in self.results]
            for g in gradients:
                self._note(g, _Tensor(True, True))
            found = self._run(backward, [*gradients, *saved])
        for x, is_token, gradient in zip(operands, are_tokens, found, strict=True):
            if gradient is None:
                continue
            known = self._known.get(id(gradient))
            if known != _Tensor(is_token, True) or [*map(str, gradient.shape)] != [*map(str, x.shape)]:
                raise Barrier("calls a function whose backward is not a sum over tokens of what is linear in the gradient")

    def _run(self, body: fx.GraphModule, operands: Sequence[Any]) -> Any:
        fake_mode = next(x.fake_mode for x in operands if isinstance(x, torch.Tensor))
        interpreter = fx.Interpreter(body, garbage_collect_values=False)
        interpreter.extra_traceback = False
        try:
            with fake_mode, enable_python_dispatcher(), self:
                return interpreter.run(*operands)
        except Barrier:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise Barrier("calls a function that is written for a number of tokens") from error

    def _note(self, x: Any, known: _Tensor) -> None:
        if isinstance(x, torch.Tensor):
            self._known[id(x)] = known
            self._numbers[id(x)] = len(self._alive)
            self._alive.append(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
                raise self._not_of_the_class(func)
            return result  # a size, say
        if any(isinstance(x, torch.Tensor) and id(x) not in self._known for x in pytree.tree_leaves((args, kwargs))):
            raise Barrier("calls a function that holds tensors of its own")
        self._note(result, self._step(func, args, kwargs, result))
        own = [self._numbers.get(id(x), x) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves((args, kwargs))]
        if func in (aten.expand.default, aten.view.default):
            own = own[:1]  # sizes: those of features were compared with the operand's
        self.calls.append((func, own))
        return result

    def agrees_with(self, other: _Run) -> None:
        ours, theirs = ([(f, *map(_comparable, own)) for f, own in run.calls] for run in (self, other))
        if ours != theirs or len(self.results) != len(other.results):
            raise Barrier("calls a function that does something else for another number of tokens")

    @staticmethod
    def _not_of_the_class(func) -> Barrier:
        return Barrier(f"calls a function of which an operation is not known to work on tokens one by one ({func})")

    # -- operations --------------------------------------------------------------------------------------------------------

    def _step(self, func, args, kwargs, result: torch.Tensor) -> _Tensor:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = [self._known[id(x)] for x in tensors]
        if not tensors:
            raise self._not_of_the_class(func)
        is_token = any(k.is_token for k in known)
        linear = any(k.is_linear for k in known)
        pointwise = is_pointwise(func) and not func._schema.is_mutable
        if func in _ZEROS:
            return _Tensor(is_token, True)
        if func in _COPIES:
            if linear and not result.dtype.is_floating_point:
                raise self._not_of_the_class(func)
            return known[0]
        if func in (aten.expand.default, aten.view.default):
            self._features_alone(func, tensors[0], known[0], result)
            return known[0]
        if func in _REDUCTIONS:
            return self._reduced(func, args, kwargs, tensors[0], known[0])
        if not pointwise or not self._aligned(tensors, known, result):
            raise self._not_of_the_class(func)
        if linear and not self._keeps_linear(func, args, kwargs):
            raise Barrier("calls a function whose backward is not linear in the gradient")
        return _Tensor(is_token, linear)

    def _features_alone(self, func, x: torch.Tensor, known: _Tensor, result: torch.Tensor) -> None:
        """The tokens' dimensions stay; and a view changes nothing, as views are told apart by nothing but their sizes."""
        first = self.prefix if known.is_token else 0
        kept = x.ndim == result.ndim and all(same(a, b) for a, b in zip(x.shape[:first], result.shape[:first], strict=True))
        rest = zip(x.shape[first:], result.shape[first:], strict=True) if kept else ()
        if not kept or any(not isinstance(b, int) or (func is aten.view.default and not same(a, b)) for a, b in rest):
            raise self._not_of_the_class(func)

    def _reduced(self, func, args, kwargs, x: torch.Tensor, known: _Tensor) -> _Tensor:
        names = [a.name for a in func._schema.arguments]
        dims = {**dict(zip(names, args, strict=False)), **kwargs}.get("dim")
        dims = range(x.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        reduced = {d % x.ndim for d in dims} if x.ndim else set()
        if known.is_linear and func not in _SUMS and func is not aten.mean.dim:
            raise Barrier("calls a function whose backward is not linear in the gradient")
        tokens = set(range(self.prefix)) if known.is_token else set()
        if not reduced & tokens:
            return known
        if known.is_linear and func in _SUMS and tokens <= reduced:
            return _Tensor(False, True)
        raise Barrier("calls a function that reduces over tokens")

    def _aligned(self, tensors, known: Sequence[_Tensor], result: torch.Tensor) -> bool:
        """Tokens meet tokens. What belongs to none meets features alone, and is no sum over tokens, of which each copy would get a part."""
        if not any(k.is_token for k in known):
            return True
        if any(k.is_linear and not k.is_token for k in known):
            return False
        features = result.ndim - self.prefix
        return all(x.ndim == result.ndim if k.is_token else x.ndim <= features for x, k in zip(tensors, known, strict=True))

    def _keeps_linear(self, func, args, kwargs) -> bool:
        def is_linear(x: Any) -> bool:
            return isinstance(x, torch.Tensor) and self._known[id(x)].is_linear

        linear = [is_linear(x) for x in args]
        if any(is_linear(x) for x in kwargs.values()):
            return False
        if func in (aten.add.Tensor, aten.sub.Tensor):
            return all(linear)
        if func is aten.mul.Tensor:
            return linear.count(True) == 1
        if func in (aten.div.Tensor, *_BACKWARDS) or func in (aten.mul.Scalar, aten.div.Scalar, aten.neg.default):
            return linear[0] and linear.count(True) == 1 and not kwargs.get("rounding_mode")
        if func is aten.where.self:
            return linear == [False, True, True]
        if func is aten.masked_fill.Scalar:
            return linear == [True, False, False] and args[2] == 0
        if func is aten.where.ScalarOther:
            return linear == [False, True, False] and args[2] == 0
        return False


def _comparable(x: Any) -> Any:
    return str(x) if isinstance(x, (torch.SymInt, torch.SymFloat)) else x
