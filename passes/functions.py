"""Operators on functions (an autograd.Function, cond, flex_attention): recorded as one node each, their functions as sub-modules.

What such a function does is not looked into: it gets what the user's program gives it. Of flex_attention it is also recorded what it
means, in the ATen operations of attention written by hand, and how `create_block_mask` makes a block mask of its mask:

    out, lse, top = flex_attention(q, k, v, score_mod, (..., mask_mod), scale, ..., scores=masked, blocks=(kv_num_blocks, ...))

Nothing of this is ever computed: `dualkv_compile.passes.flex` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from dualkv_compile.passes.errors import CannotDeduplicate
from dualkv_compile.passes.layout import same
from dualkv_compile.passes.simplify import draws

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
AUTOGRAD_FUNCTION = torch.ops.higher_order.autograd_function_apply
RECORDED = ("flex_attention", "autograd_function_apply", "cond", "while_loop", "scan", "associative_scan", "map_impl")
DESCRIPTION = ("scores", "blocks")  # keyword arguments that only a recorded flex_attention has

Run = Callable[..., Any]


def record(recorder, run: Run, target: torch._ops.HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
    """Records target(*args, **kwargs), met while a graph is run; `run(body, *operands)` runs a function of it. Not under vmap: the
    recorder does not know its batched tensors."""
    if target.name() not in RECORDED or torch._C._functorch.get_dynamic_layer_stack_depth():
        raise CannotDeduplicate(f"the higher-order operator {target} cannot be recorded")
    description = {}
    if target is FLEX_ATTENTION:
        args = _positional(*args, **kwargs)
        args, kwargs = (*map(autocast, args[:3]), *args[3:]), {}
        description = _describe(recorder, run, *args)
    elif any(torch.is_autocast_enabled(t.device.type) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
        raise CannotDeduplicate(f"{target} under autocast cannot be recorded")
    recorder.functionalisation.check_read((args, kwargs))
    plain_args, plain_kwargs = pytree.tree_map_only(FunctionalTensor, unwrapped, (args, kwargs))
    versions = [t._version for t in _tensors((plain_args, plain_kwargs))]
    with _disable_current_modes(), recorder.fake_mode, torch.no_grad():  # a function may switch gradients on
        results = target(*plain_args, **plain_kwargs)
        # objects of their own, as a function may return what it was given
        results = pytree.tree_map_only(torch.Tensor, lambda t: t.view_as(t), results)
    if versions != [t._version for t in _tensors((plain_args, plain_kwargs))]:
        raise CannotDeduplicate(f"{target} writes into what it is given: it cannot be recorded")
    recorder.write(target, plain_args, {**plain_kwargs, **description}, results)
    wrapped = pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, results)
    recorder.functionalisation.note_results(wrapped, ())
    _note_views(recorder, _tensors((args, kwargs)), _tensors((plain_args, plain_kwargs)), _tensors(wrapped), _tensors(results))
    return wrapped


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """An operand of attention as autocast, where it is on, casts it."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def unwrapped(tensor: FunctionalTensor) -> torch.Tensor:
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def same_computation(a: Any, b: Any, known: dict | None = None) -> bool:
    """Whether two arguments of a recorded graph are computed by the same operations from the same inputs."""
    known = {} if known is None else known
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(same_computation(x, y, known) for x, y in zip(a, b, strict=True))
        return not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and same(a, b)
    if a is not b and (a, b) not in known:
        known[a, b] = (
            a.op == b.op == "call_function"
            and a.target is b.target
            and not draws(a.target)
            and a.kwargs.keys() == b.kwargs.keys()
            and same_computation(a.args, b.args, known)
            and all(same_computation(a.kwargs[k], b.kwargs[k], known) for k in a.kwargs)
        )
    return a is b or known[a, b]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _note_views(recorder, operands, plain_operands, results, plain_results) -> None:
    """A result may be a view of an operand, which nothing recorded says: neither may then be written to."""
    for operand, plain in zip(operands, plain_operands, strict=True):
        for result, plain_result in zip(results, plain_results, strict=True):
            if StorageWeakRef(plain.untyped_storage()) == StorageWeakRef(plain_result.untyped_storage()):
                recorder.unwritten += [operand, result]


# -- flex_attention ---------------------------------------------------------------------------------------------------------


def _positional(query, key, value, score_mod, block_mask, scale, kernel_options, score_mod_other_buffers=(), mask_mod_other_buffers=()):
    return query, key, value, score_mod, block_mask, scale, kernel_options, score_mod_other_buffers, mask_mod_other_buffers


def _describe(recorder, run: Run, query, key, value, score_mod, block_mask, scale, _options, score_buffers, mask_buffers) -> dict:
    """The masked scores, and the tensors of the block mask that create_block_mask makes of the mask, if the graph computes some at all."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    (batch, heads, queries, _), (_, key_heads, keys, _) = query.shape, key.shape
    places = [torch.arange(n, device=query.device) for n in (batch, heads, queries, keys)]

    def mask_of(b, h, q, kv):  # create_block_mask counts the arguments
        return run(block_mask[-1], b, h, q, kv, *mask_buffers)

    def score_of(score, *places):
        return run(score_mod, score, *places, *score_buffers)

    source, recorder.describes = recorder.source, True
    try:
        with TransformGetItemToIndex():
            mask = _over_places(mask_of)(*places)
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            if key_heads != heads:
                repeats = [batch, key_heads, heads // key_heads, keys, key.shape[3]]
                key = key[:, :, None].expand(repeats).reshape(batch, heads, keys, key.shape[3])
            scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
            if not _returns_its_argument(score_mod):
                scores = _over_places(score_of, 0)(scores, *places)
            scores = scores.masked_fill(~mask, -math.inf)
            scores = unwrapped(scores)
            blocks = _blocks_of(recorder, unwrapped(mask), mask_of, block_mask, queries, keys)
    finally:
        recorder.source, recorder.describes = source, False
    return {"scores": scores, "blocks": blocks}


def _over_places(function: Callable, *first: int) -> Callable:
    """A function of one (b, h, q, kv) as a function of all of them."""
    for axis in reversed(range(4)):
        function = torch.vmap(function, in_dims=(*first, *(0 if i == axis else None for i in range(4))))
    return function


def _returns_its_argument(body: fx.GraphModule) -> bool:
    first, *_ = body.graph.find_nodes(op="placeholder")
    return body.graph.output_node().args[0] is first


def _blocks_of(recorder, mask: torch.Tensor, mask_of: Callable, block_mask: tuple, queries, keys) -> tuple | None:
    """What create_block_mask computes for this mask; None where the block mask is an input of the graph."""
    from torch.nn.attention.flex_attention import create_block_mask

    num_blocks, block_size = block_mask[2], tuple(block_mask[-3:-1])
    if recorder.node_of(unwrapped(num_blocks)).op == "placeholder":
        return None
    for known, size, blocks in recorder.block_masks:
        if size == block_size and same_computation(recorder.node_of(mask), known):
            return blocks
    made = create_block_mask(mask_of, *num_blocks.shape[:2], queries, keys, num_blocks.device, block_size)
    blocks = pytree.tree_map_only(FunctionalTensor, unwrapped, made.as_tuple()[2:10])
    recorder.block_masks.append((recorder.node_of(mask), block_size, blocks))
    return blocks
