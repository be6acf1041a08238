"""Writes the rewritten graph: placeholders, symbolic sizes, index requests, ATen calls with their fake results."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from dualkv_compile.passes.layout import Size
from dualkv_compile.passes.trace import Region

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Window:
    """Columns [offset, offset + size) of the batch; the packed tokens that lie in them."""

    offset: Any  # sympy expression or int
    size: Any

    @staticmethod
    def of(offset: Size, size: Size) -> Window:
        return Window(expr(offset), expr(size))


@dataclasses.dataclass(frozen=True)
class Request:
    """An extra input of the rewritten graph: a tensor of the batch's plan, looked up at every call.

    kind: "pack_index", "unpack_index", "window_columns", "valid", "real" of a window's packing; "sequence", "place" of its columns, in a
    row of sequences; "subselect": the positions of `window`'s tokens where those of the windows of `base` stand one after the other;
    "table": one of the attention op's tables (`index`, with padding keys hidden or not); "constant": the recorded graph's tensor
    constant `name`.
    """

    kind: str
    window: Window | None = None
    base: tuple[Window, ...] = ()
    index: int = 0
    hidden: bool = False
    name: str = ""

    @property
    def windows(self) -> list[Window]:
        return [w for w in (self.window, *self.base) if w is not None]


def expr(size: Size) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


class Emitter:
    """The new graph under construction. `region` and `source` are stamped on every node that is emitted."""

    def __init__(self, recorded: fx.GraphModule, fake_request: Callable[[Request], torch.Tensor]):
        self.recorded = recorded
        self.graph = fx.Graph()
        self.region = Region()
        self.source: str | None = None
        self.requests: dict[Request, fx.Node] = {}
        self._fake_request = fake_request
        self._symbols: dict[sympy.Symbol, fx.Node] = {}
        self._sizes: dict[Any, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._prologue: fx.Node | None = None

    # -- inputs ------------------------------------------------------------------------------------------------------------

    def placeholder(self, like: fx.Node) -> fx.Node:
        node = self.graph.placeholder(like.name)
        node.meta.update(like.meta)
        node.meta["region"] = Region()
        self._last_placeholder = node
        value = like.meta["val"]
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            self._symbols.setdefault(value.node.expr, node)
        return node

    def bind_all_sizes(self) -> None:
        for node in self.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta["val"], torch.Tensor):
                self.bind_sizes(node)

    def bind_sizes(self, node: fx.Node) -> None:
        """Makes the symbols among a placeholder's sizes available to `size`. An integer placeholder comes first if it has the symbol."""
        for dim, size in enumerate(node.meta["val"].shape):
            e = expr(size)
            if isinstance(e, sympy.Symbol) and e not in self._symbols:
                self._symbols[e] = self._in_prologue(aten.sym_size.int, (node, dim), size)

    def request(self, request: Request) -> fx.Node:
        node = self.requests.get(request)
        if node is None:
            fake = self._fake_request(request)
            with self.graph.inserting_after(self._last_placeholder):
                node = self.graph.placeholder(f"plan_{request.kind}_{len(self.requests)}")
            node.meta.update(val=fake, region=Region(), request=request)
            self._last_placeholder = node
            self.requests[request] = node
            self.bind_sizes(node)
        return node

    def _in_prologue(self, target, args, value) -> fx.Node:
        """Sizes belong to no region: they stand right after the inputs, so that every region can read them."""
        after = self._prologue if self._prologue is not None else self._last_placeholder
        with self.graph.inserting_after(after):
            node = self.graph.call_function(target, args)
        node.meta.update(val=value, region=Region())
        self._prologue = node
        return node

    # -- operations --------------------------------------------------------------------------------------------------------

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        """Emits target(*args, **kwargs); fx.Nodes stand for their values and symbolic integers become nodes that compute them."""
        with enable_python_dispatcher():  # symbolic sizes want meta functions written in Python
            value = target(*self._values(args), **self._values(kwargs))
        args, kwargs = pytree.tree_map_only(torch.SymInt, self.size, (args, kwargs))
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=value, region=self.region)
        if self.source is not None:  # a None would be taken for a text where backward operations inherit it
            node.meta["stack_trace"] = self.source
        return node

    def call_with_functions(self, target: Callable, args: tuple, kwargs: dict, value: Any) -> fx.Node:
        """Emits the call of an operator on functions, of which it is known what it gives."""
        args, kwargs = pytree.tree_map_only(torch.SymInt, self.size, (args, kwargs))
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=value, region=self.region)
        if self.source is not None:
            node.meta["stack_trace"] = self.source
        return node

    def function(self, name: str) -> fx.Node:
        """A sub-module of the recorded graph. It stands among the inputs and belongs to no region."""
        after = self._prologue if self._prologue is not None else self._last_placeholder
        with self.graph.inserting_after(after):
            node = self.graph.get_attr(name)
        node.meta.update(val=None, region=Region())
        self._prologue = node
        return node

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(dict(self.recorded.named_children()), self.graph, class_name="Packed")

    def after(self, node: fx.Node):
        """Context: what is emitted stands right after `node` and belongs to its region, so that all later readers can share it."""
        return _Placed(self, node)

    @staticmethod
    def _values(tree: Any) -> Any:
        return pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], tree)

    def size(self, size: Size) -> Any:
        """A number, or the node that computes a symbolic size from the graph's inputs."""
        e = expr(size)
        if isinstance(e, (int, sympy.Integer)):
            return int(e)
        if isinstance(e, sympy.Symbol) and e in self._symbols:
            return self._symbols[e]
        if e not in self._sizes:
            self._sizes[e] = self._computed_size(e, size)
        return self._sizes[e]

    def _computed_size(self, e: sympy.Expr, size: torch.SymInt) -> fx.Node:
        missing = e.free_symbols - self._symbols.keys()
        if missing:
            raise KeyError(f"size {e} depends on {missing}, which no input of the graph has as a size")
        place = _Placed(self, self._prologue if self._prologue is not None else self._last_placeholder)
        with place:
            tracer = fx.proxy.GraphAppendingTracer(self.graph)
            env = {s: fx.Proxy(self._symbols[s], tracer) for s in e.free_symbols}
            before = set(self.graph.nodes)
            node = sympy_interp(PythonReferenceAnalysis, env, e).node
            for new in self.graph.nodes:
                if new not in before:
                    new.meta.update(val=size if new is node else None, region=Region())
        self._prologue = node
        return node

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    # -- small vocabulary --------------------------------------------------------------------------------------------------

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        if [expr(a) for a in node.meta["val"].shape] == [expr(b) for b in shape]:
            return node
        return self.call(aten.reshape.default, node, list(shape))

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        return node if list(order) == list(range(len(order))) else self.call(aten.permute.default, node, list(order))


class _Placed:
    def __init__(self, emitter: Emitter, node: fx.Node):
        self.emitter, self.node = emitter, node

    def __enter__(self):
        e, node = self.emitter, self.node
        self.saved = e.region, e.source
        if node.op in ("placeholder", "get_attr") or node is e._prologue:
            # prologue and inputs: stand after everything that stands there already, sizes included
            node = e._prologue if e._prologue is not None else e._last_placeholder
            self.in_prologue = True
        else:
            self.in_prologue = False
        e.region = node.meta["region"]
        e.source = node.meta.get("stack_trace")
        self.following = node.next
        self.insertion = e.graph.inserting_before(self.following)
        self.insertion.__enter__()

    def __exit__(self, *exc):
        self.insertion.__exit__(*exc)
        e = self.emitter
        if self.in_prologue and self.following.prev.op == "call_function":
            e._prologue = self.following.prev
        e.region, e.source = self.saved
