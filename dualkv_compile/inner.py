"""Compiles a graph with fake tensors and a shape environment of its own, outside of Dynamo's compilation.

A variant is made at the first call that needs it, when Dynamo's guards are long fixed. So it gets fresh symbols, one for each symbolic
size that Dynamo gave the graph and one for each length of the plan, never merged because their values happen to agree; what tracing and
compiling assume of them is read from the shape environment and checked at every later call (`SizeGuards`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from dualkv_compile.passes.graph import expr


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One placeholder of Dynamo's graph: sizes and strides as expressions of Dynamo's symbols."""

    shape: tuple[Any, ...] | None  # None: an integer, `value` its expression
    stride: tuple[Any, ...] = ()
    value: Any = None
    is_parameter: bool = False

    @staticmethod
    def of(fake: Any) -> InputSpec:
        if not isinstance(fake, torch.Tensor):
            return InputSpec(None, value=expr(fake) if isinstance(fake, torch.SymInt) else fake)
        return InputSpec(
            tuple(map(expr, fake.shape)), tuple(map(expr, fake.stride())), is_parameter=isinstance(fake, torch.nn.Parameter)
        )


class FreshInputs:
    """Fake inputs of one variant, and where at a call the value of each symbol is found."""

    def __init__(self, specs: Sequence[InputSpec], args: Sequence[Any]):
        self.shape_env = ShapeEnv(duck_shape=False)
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        self._fixed: list[tuple[tuple[int, int | None], int]] = []
        self._of_dynamo: dict[sympy.Symbol, Any] = {}
        for i, (spec, arg) in enumerate(zip(specs, args, strict=True)):
            for dim, e in enumerate(spec.shape or ()):
                self._meet(e, int(arg.shape[dim]), (i, dim))
            if spec.shape is None and isinstance(spec.value, sympy.Expr):
                self._meet(spec.value, int(arg), (i, None))
        self.fakes = [self._fake(spec, arg) for spec, arg in zip(specs, args, strict=True)]

    def _meet(self, e: Any, value: int, place: tuple[int, int | None]) -> None:
        if isinstance(e, sympy.Symbol) and e not in self._of_dynamo:
            self._of_dynamo[e] = sympy.sympify(expr(self.new_size(value, place)))

    def new_size(self, value: int, place: tuple[int, int | None]) -> int | torch.SymInt:
        """A symbol for a size that is `value` in this batch. 0 and 1 are constants, as in Dynamo, and so are negative integer arguments;
        another value compiles anew."""
        if value < 2:
            self._fixed.append((place, value))
            return value
        source = LocalSource(f"size_{len(self.places)}")
        symbol = self.shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.places[symbol] = place
        return self.shape_env.create_symintnode(symbol, hint=value, source=source)

    def _size(self, e: Any, value: int) -> Any:
        if not isinstance(e, sympy.Expr) or e.is_Integer:
            return int(e)
        missing = e.free_symbols - self._of_dynamo.keys()
        if missing:
            raise KeyError(f"size {e} depends on {missing}, which is no size of an input")
        new = e.xreplace(self._of_dynamo)
        return int(new) if new.is_Integer else self.shape_env.create_symintnode(new, hint=value)

    def _fake(self, spec: InputSpec, arg: Any) -> Any:
        if spec.shape is None:
            return self._size(spec.value, int(arg)) if isinstance(spec.value, sympy.Expr) else arg
        if not any(isinstance(e, sympy.Expr) and not e.is_Integer for e in spec.shape + spec.stride):
            return self.fake_mode.from_tensor(arg, static_shapes=True)
        shape = [self._size(e, n) for e, n in zip(spec.shape, arg.shape, strict=True)]
        stride = [self._size(e, n) for e, n in zip(spec.stride, arg.stride(), strict=True)]
        with self.fake_mode:
            fake = torch.empty_strided(shape, stride, dtype=arg.dtype, device=arg.device)
        return fake.requires_grad_(arg.requires_grad)

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with self.fake_mode:
            return torch.empty(list(shape), dtype=dtype, device=device)

    def guards(self) -> SizeGuards:
        return SizeGuards(list(self.places.items()), self._fixed, [g.expr for g in self.shape_env.guards])


class SizeGuards:
    """What a variant takes for granted about sizes: symbols are at least 2, constants are what they were, guards hold."""

    def __init__(self, places, fixed, conditions):
        self.places = places
        self.fixed = fixed
        self._holds = function_of([s for s, _ in places], sympy.And(*conditions) if conditions else sympy.true)

    def sizes(self, args: Sequence[Any]) -> list[int] | None:
        """The values of the symbols in `args`; None if the variant is not for them."""
        for (i, dim), value in self.fixed:
            if (args[i] if dim is None else args[i].shape[dim]) != value:
                return None
        values = [args[i] if dim is None else args[i].shape[dim] for _, (i, dim) in self.places]
        return values if min(values, default=2) >= 2 and self._holds(*values) else None

    def function(self, e: Any) -> Callable[..., Any]:
        """An expression of the symbols as a function of their values, in the order of `sizes`."""
        return function_of([s for s, _ in self.places], e)


def function_of(symbols: Sequence[sympy.Symbol], e: Any) -> Callable[..., Any]:
    if isinstance(e, int):
        return lambda *values: e
    import math

    body = PythonPrinter().doprint(e)
    names = ", ".join(map(str, symbols))
    return eval(f"lambda {names}: {body}", {"math": math, "torch": torch, "max": max, "min": min})


@contextlib.contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """What runs here saves tensors as if no saved-tensor hooks were set, as in Dynamo's own compilation: a variant is made in the midst of
    the program, perhaps under a checkpoint. That counts what is saved, and nothing is made when it recomputes."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def compile_graph(gm: fx.GraphModule, fake_inputs: Sequence[Any], fake_mode: FakeTensorMode, backend: str, config: dict) -> Callable:
    """`gm` compiled for inputs like the fake ones; gradient mode is the caller's."""
    if backend == "eager":
        return gm
    with tracing(TracingContext(fake_mode)), torch._dynamo.utils.preserve_rng_state():
        return in_context(gm, fake_inputs, backend, config)


def in_context(gm: fx.GraphModule, inputs: Sequence[Any], backend: str, config: dict) -> Callable:
    """Compiles inside a compilation that is under way (Dynamo's, or the one that `compile_graph` sets up)."""
    if backend == "eager":
        return gm.forward
    if backend == "aot_eager":
        return torch._dynamo.lookup_backend("aot_eager")(gm, list(inputs))
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(inputs), config_patches=config or None)
