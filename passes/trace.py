"""Dynamo's torch-level graph -> one flat, functional ATen graph, recorded before autograd.

Dynamo hands a backend whatever the user wrote: functions, methods, operators, in-place forms, nested regions. Rules about layouts want
one spelling per operation, so the graph is run once on fake tensors and the ATen operations that it performs are recorded:

    hidden.view(4, -1).add_(bias)        ->   view = aten.view(hidden, [4, 96]);  add = aten.add(view, bias)

Recording happens below autograd and autocast, so that casts are explicit, but every recorded operation is one that autograd has a
formula for: differentiating the recorded graph is differentiating the user's. What is not an operation becomes a tag on the nodes
it covers: gradient mode and the enclosing activation-checkpoint regions (`Region`); `dualkv_compile.passes.regions` turns the tags
back into calls.

Operators on functions (an autograd.Function, cond, flex_attention) are recorded as one node each, their functions as sub-modules.
flex_attention also gets what it computes up to the softmax, in ATen operations, for its mask and its scores to be read:

    out = flex_attention(q, k, v, score_mod, block_mask, scale, ..., scores=masked, blocks=(...))

In node.meta: "val" (fake tensor), "stack_trace" (the user's line), "region" (Region).
"""

from __future__ import annotations

import dataclasses
import operator
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from dualkv_compile.passes import functions
from dualkv_compile.passes.errors import CannotDeduplicate

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Region:
    """What surrounds an operation without being one: gradient mode, and the activation-checkpoint calls around it, outermost first."""

    grad_enabled: bool = True
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """One activation-checkpoint call of the user's program: the operator's keyword arguments, and the body's meta, where Dynamo keeps a
    selective policy."""

    kwargs: dict[str, Any]
    meta: dict[str, Any]


@torch.library.custom_op("dualkv::attention_site", mutates_args=())
def attention_site(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Stands for one scaled_dot_product_attention call in a recorded graph, which would otherwise decompose. Never executed."""
    raise RuntimeError("dualkv::attention_site is a marker inside recorded graphs and is replaced before a graph runs")


@attention_site.register_fake
def _(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def trace(gm: fx.GraphModule, fake_mode: FakeTensorMode, fake_args: Sequence[Any]) -> fx.GraphModule:
    """Records `gm` run on `fake_args` (fake tensors and ints, one per placeholder).

    The result has the same placeholders in the same order (integer ones keep their place) and the same output structure. Integer
    arguments that are not constants stay `torch.SymInt` objects inside node args: the recorded graph is to be read, not to be run.

    Raises CannotDeduplicate where the program holds something that cannot be recorded faithfully.
    """
    for node in (n for module in gm.modules() if isinstance(module, fx.GraphModule) for n in module.graph.nodes):
        if node.op == "call_function" and _differentiates(node.target):
            raise CannotDeduplicate(f"{node.target.__name__} differentiates inside of the graph, which cannot be recorded")
    recorder = _Recorder(fake_mode)
    # gradient mode is off while recording, and functionalisation wants inputs that need none
    run_on = [a.detach() if isinstance(a, torch.Tensor) else a for a in fake_args]
    for node, value, detached in zip(gm.graph.find_nodes(op="placeholder"), fake_args, run_on, strict=True):
        recorder.add_placeholder(node, value, detached)
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        with fake_mode, enable_python_dispatcher(), torch.no_grad(), recorder, warnings.catch_warnings():
            # sizes stay symbolic integers in the recorded graph, which is read and never run
            warnings.filterwarnings("ignore", message="Raw SymInt value")
            outputs = _run_functionalised(gm, recorder, run_on, fake_args)
    finally:  # after an error, leave each vmap that was entered
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch._vmap_decrement_nesting()
    return recorder.finish(gm, outputs)


def _run_functionalised(gm: fx.GraphModule, recorder: _Recorder, fake_args: Sequence[Any], original: Sequence[Any]) -> Any:
    """Runs the graph so that the recorder sees no in-place operation, but for one copy_ into each input that the program writes to."""
    with _Functionalisation(recorder) as mode:
        wrapped = [FunctionalTensor.to_functional(a) if isinstance(a, torch.Tensor) else a for a in fake_args]
        outputs = _Interpreter(gm, recorder).run(*wrapped)
        mode.check_read(outputs)
    if any(torch._functionalize_has_data_mutation(t.elem) for t in recorder.unwritten):
        raise CannotDeduplicate("a view that a function returns, or what it is a view of, is written to: it cannot be recorded")
    outputs = pytree.tree_map_only(FunctionalTensor, functions.unwrapped, outputs)
    for before, after, given in zip(fake_args, wrapped, original, strict=True):
        if isinstance(after, FunctionalTensor) and torch._functionalize_has_data_mutation(after.elem):
            if given.requires_grad:
                raise CannotDeduplicate("the program writes into an input that requires gradients")
            before.copy_(functions.unwrapped(after))
    return outputs


class _Functionalisation(FunctionalTensorMode):
    """Refuses what cannot be recorded as operations without writes: a write that autograd does not see, under no_grad or into what was
    detached, if what was written to is read later. In eager code it keeps its gradient; recorded, it would be the result of operations that
    have none."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder
        recorder.functionalisation = self
        # no tensor is kept alive: of one that is referred to, a function that makes it returns a detached alias
        self._with_gradient: set[StorageWeakRef] = set()
        self._written_unseen: set[StorageWeakRef] = set()
        self._detached = WeakIdKeyDictionary()  # tensors
        self._seen = WeakIdKeyDictionary()  # tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        grad_enabled = self.recorder.region.grad_enabled
        if func is not aten.detach.default:
            self.check_read((args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
                    written = _functional(value)
                    unseen = {_storage(t) for t in written if not grad_enabled or t in self._detached}
                    self._written_unseen |= unseen & self._with_gradient
                    self._with_gradient |= {_storage(t) for t in written} - unseen
        fresh = func in _FRESH or not _functional((args, kwargs))
        self.note_results(result, args, func is aten.detach.default, fresh)
        return result

    def note_results(self, results: Any, operands: Any, detached: bool = False, fresh: bool = False) -> None:
        """`fresh`: made of nothing that may have a gradient."""
        given = {_storage(a): a for a in _functional(operands)}
        for tensor in _functional(results):
            if tensor.is_floating_point() or tensor.is_complex():
                self._seen[tensor] = None
                viewed = given.get(_storage(tensor))
                if self.recorder.region.grad_enabled and viewed is None and not fresh:
                    self._with_gradient.add(_storage(tensor))
                if (detached and _storage(tensor) in self._with_gradient) or (viewed is not None and viewed in self._detached):
                    self._detached[tensor] = None

    def catch_up(self) -> None:
        """Records what writes so far mean, which functionalisation puts off until somebody reads what was written to."""
        for tensor in list(self._seen):
            torch._sync(tensor)

    def check_read(self, tree: Any) -> None:
        """Before an operation reads tensors. Without gradients there are none to be lost."""
        if not self._written_unseen or not self.recorder.region.grad_enabled:
            return
        if any(_storage(t) in self._written_unseen and t not in self._detached for t in _functional(tree)):
            raise CannotDeduplicate("the program writes into a tensor without autograd's knowledge (under no_grad, or detached)")


_FRESH = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
}


def _functional(tree: Any) -> list[FunctionalTensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, FunctionalTensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


class _Recorder(TorchDispatchMode):
    """Writes each ATen call on fake tensors into a graph. Tensors are kept alive, so that an id names one tensor for good."""

    # the dispatcher's place for modes that record: below functionalisation, above fake tensors
    _mode_key = torch._C._TorchDispatchModeKey.PROXY

    def __init__(self, fake_mode: FakeTensorMode):
        super().__init__()
        # functionalisation asks the mode in this place for the node of a tensor, to annotate the views that it replays
        self.tracer = types.SimpleNamespace(tensor_tracker=_NodesByTensor(self))
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.fake_mode = fake_mode
        self.region = Region()
        self.source: str | None = None
        self.describes = False  # what is recorded says what an operator on functions computes, and is not computed itself
        self.functionalisation: _Functionalisation  # above, while a graph is run
        self.unwritten: list[FunctionalTensor] = []  # what may be a view, or have one, of which nothing recorded tells
        self.block_masks: list[tuple] = []  # (mask, block size, what create_block_mask makes of it)
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []

    def __sym_dispatch__(self, func, types, args=(), kwargs=None):
        """Arithmetic of symbolic sizes is not recorded: a size is an expression of the inputs' sizes."""
        return func(*args, **(kwargs or {}))

    def add_placeholder(self, like: fx.Node, value: Any, run_on: Any) -> None:
        node = self.graph.placeholder(like.name)
        node.meta.update({k: like.meta[k] for k in ("tensor_dict", "grapharg", "stack_trace") if k in like.meta})
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._remember(run_on, node)

    def _remember(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            if isinstance(tensor, FakeTensor):
                raise CannotDeduplicate("a tensor in the graph comes from outside of it")
            name = f"constant_{len(self._alive)}"
            self.root.register_buffer(name, tensor)
            node = self.graph.get_attr(name)
            node.meta["val"] = self.fake_mode.from_tensor(tensor)
            node.meta["region"] = self.region
            self._remember(tensor, node)
        return node

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.copy.default:
            return self._copied(*args[:2])
        if func is aten._native_batch_norm_legit_functional.default:
            # the kernel writes its running statistics behind autograd's back; written by copy_, they must not be what it saved
            copies = [self.__torch_dispatch__(aten.clone.default, (), (a,)) for a in args[3:5]]
            args = (*args[:3], *copies, *args[5:])
        result = func(*args, **kwargs)
        if func in _METADATA_ONLY:
            return result
        self.write(func, args, kwargs, result)
        return result

    def write(self, func, args, kwargs, result) -> None:
        """A node for func(*args, **kwargs), and for each tensor among several results."""
        args, kwargs = pytree.tree_map_only(torch.nn.Module, self._module, (args, kwargs))
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        meta = {"stack_trace": self.source, "region": self.region, "describes": self.describes}
        node = self.graph.call_function(func, node_args, node_kwargs)
        node.meta.update(meta, val=result)
        if isinstance(result, torch.Tensor):
            self._remember_result(func, args, result, node)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    get = self.graph.call_function(operator.getitem, (node, i))
                    get.meta.update(meta, val=item)
                    self._remember(item, get)

    def _module(self, module: torch.nn.Module) -> fx.Node:
        name = next((n for n, m in self.root.named_children() if m is module), None)
        if name is None:
            name = f"function_{len(list(self.root.children()))}"
            self.root.add_module(name, module)
        node = self.graph.get_attr(name)
        node.meta["val"] = None
        return node

    def _copied(self, into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """What functionalisation makes of a write; autograd has no formula for it, but for what it does."""
        if source.dtype != into.dtype:
            source = self.__torch_dispatch__(aten._to_copy.default, (), (source,), {"dtype": into.dtype})
        source = self.__torch_dispatch__(aten.expand.default, (), (source, list(into.shape)))
        return self.__torch_dispatch__(aten.clone.default, (), (source,))

    def _remember_result(self, func, args, result: torch.Tensor, node: fx.Node) -> None:
        # copy_ into an input returns that very input; later readers of the input were recorded before it (functionalisation puts
        # these copies last), so the name may move on to the new node
        self._remember(result, node)

    def finish(self, gm: fx.GraphModule, outputs: Any) -> fx.GraphModule:
        def name(value):
            return self.node_of(value) if isinstance(value, torch.Tensor) else value

        self.graph.output(pytree.tree_map(name, outputs))
        return fx.GraphModule(self.root, self.graph, class_name="Recorded")


class _NodesByTensor:
    """The recorder's nodes as proxy tensors keep theirs: tracker[tensor].proxy.node."""

    def __init__(self, recorder: _Recorder):
        self.recorder = recorder

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return True

    def __getitem__(self, tensor: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(proxy=types.SimpleNamespace(node=self.recorder.node_of(tensor)))


class _Interpreter(fx.Interpreter):
    """Runs Dynamo's graph, telling the recorder where it is."""

    def __init__(self, gm: fx.GraphModule, recorder: _Recorder):
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False  # a reason is one line of a report
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.meta.get("stack_trace"):
            self.recorder.source = n.meta["stack_trace"]
        return super().run_node(n)

    def call_function(self, target, args, kwargs) -> Any:
        if target is torch._C._set_grad_enabled:
            self.recorder.functionalisation.catch_up()
            self.recorder.region = dataclasses.replace(self.recorder.region, grad_enabled=args[0])
            return None
        if target is torch.nn.functional.scaled_dot_product_attention:
            return _attention_site(*args, **kwargs)
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return self._checkpoint(args, kwargs)
        if isinstance(target, torch._ops.HigherOrderOperator):
            return functions.record(self.recorder, self._body, target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target, args, kwargs) -> Any:
        if target == "detach_":
            raise CannotDeduplicate("the program detaches a tensor in place, of which autograd alone knows")
        return super().call_method(target, args, kwargs)

    def _body(self, body: fx.GraphModule, *operands: Any) -> Any:
        return _Interpreter(body, self.recorder).run(*operands)

    def _checkpoint(self, args, kwargs) -> Any:
        body, *operands = args
        outside = self.recorder.region
        inside = (*outside.checkpoints, Checkpoint(dict(kwargs), dict(body.meta)))
        self.recorder.region = dataclasses.replace(outside, checkpoints=inside)
        try:
            return self._body(body, *operands)
        finally:
            self.recorder.region = outside


def _differentiates(target) -> bool:
    """Whether a function asks for derivatives: recorded below autograd, it would get zeros. Of torch.func, vmap's alone are none, and the
    switch that Dynamo puts around `requires_grad_()`."""
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if "functorch" in module:
        return not any(word in name for word in ("vmap", "batch_dim", "lazy_load", "set_inplace_requires_grad_allowed"))
    return module.startswith("torch.autograd")


def _attention_site(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The call's own autocast rule, which a custom operator does not get, then the marker."""
    query, key, value = map(functions.autocast, (query, key, value))
    if attn_mask is not None and attn_mask.is_floating_point() and torch.is_autocast_enabled(query.device.type):
        attn_mask = attn_mask.to(torch.get_autocast_dtype(query.device.type))
    return torch.ops.dualkv.attention_site(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


_METADATA_ONLY = {
    aten.sym_size.int,
    aten.sym_size.default,
    aten.sym_stride.int,
    aten.sym_stride.default,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
    aten.is_contiguous.default,
    aten.is_contiguous.memory_format,
    aten.is_strides_like_format.default,
    aten.is_non_overlapping_and_dense.default,
    aten.size.default,
    aten.stride.default,
    aten.storage_offset.default,
    aten.dim.default,
    aten.numel.default,
    torch.ops.prim.device.default,
    torch.ops.prim.layout.default,
}
