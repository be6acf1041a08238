"""Inputs that eager code made of a marked batch.

A model that is compiled layer by layer embeds its tokens, and makes its mask and its rotary tables, outside of what is compiled: no mark
rides on them. What a layer is called with belongs to a marked batch where

1. autograd shows that it is made of embeddings of marked ids, token by token (`mark_by_autograd`), or
2. a batch is marked and alive (the active plan), and it agrees with that plan (`verified`): its values are equal in all rows of each
   group, over the prompt. Equal values are what sharing needs, wherever they come from; that padding stands where the plan has it is
   believed where an attention mask shows it, else every column is a token.

What is handed from one compiled layer to the next is marked, so both are done once or a few times a step.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.detect import DetectedMark, is_about_positions
from dualkv_compile.facts import INTEGERS, Entry, Sharing, compare_with_plan
from dualkv_compile.gradients import embeddings_behind, has_equal_indices
from dualkv_compile.marks import BLANK_OUTPUT, OUTPUT, Mark, active_plan, attach, is_marked, mark_of
from dualkv_compile.plan import Plan

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------- 1. by autograd


def mark_by_autograd(tensor: torch.Tensor) -> Mark | None:
    """The mark of an unmarked tensor that autograd knows to be made of marked ones: FSDP2 hands a layer's inputs on as new tensors, through
    an autograd function of its own; embeddings look up ids that are marked. None otherwise, or where it was written to since."""
    if tensor.grad_fn is None or tensor._version:
        return None
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    handed_on = getattr(fsdp, "RegisterPostBackwardFunction", None)
    node, number = tensor.grad_fn, tensor.output_nr
    while handed_on is not None and getattr(type(node), "_forward_cls", None) is handed_on:
        node, number = node.next_functions[number]
    if node is None:
        return None
    original = tensor if node is tensor.grad_fn else _tensor_of(node, number)
    if original is None or not _same_memory(original, tensor):
        return None
    known = _embedded(original, node) if not is_marked(original) else mark_of(original)
    if known is None or known.role not in (OUTPUT, BLANK_OUTPUT) or not known.shared:
        return None
    mark = Mark(known.plan, known.role, Sharing(None, known.reach), known.row_dim, False, tensor, known.column_dim)
    mark.origin = weakref.ref(original)
    mark.gradient = tensor.grad_fn, known.gradient is not None and known.gradient[0] is original.grad_fn and known.gradient[1]
    attach(tensor, mark)
    return mark


def _embedded(tensor: torch.Tensor, node: Any) -> Mark | None:
    """The mark of what embeddings of marked ids, and values without rows, are added up to."""
    shape = tuple(tensor.shape[:2])
    embeddings = (embeddings_behind(node, shape) if tensor.ndim == 3 else None) or []
    ids = [_whole(e._saved_indices) for e in embeddings]
    marks = [mark_of(i) for i in ids if is_marked(i)]
    if not marks or not all(m.shared and m.plan == marks[0].plan for m in marks):
        return None
    plan = marks[0].plan
    if not all(is_marked(i) or has_equal_indices(e, plan) for i, e in zip(ids, embeddings, strict=True)):
        return None
    if node in embeddings:
        sharing = Sharing(None, marks[0].reach)
    else:  # autograd does not tell whether what lies between was written to
        sharing = _compared(tensor, plan, "hidden states")
    if sharing.reason:
        return None
    mark = Mark(plan, OUTPUT, sharing, 0, False, tensor)
    mark.gradient = node, True
    return mark


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, if it views all of it as it is (`ids.view(-1, S)`)."""
    return tensor._base if tensor._base is not None and _same_memory(tensor, tensor._base) else tensor


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(get(one) == get(other) for get in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, lambda t: t._version))


def _tensor_of(node: Any, number: int) -> torch.Tensor | None:
    """The tensor that an autograd node made, which the frame that called FSDP2's hook still holds. Hooks may hang on it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.modules.module.__file__:
            values = frame.f_locals
            for value in (*values.get("args", ()), *values.get("kwargs", {}).values()):
                if isinstance(value, torch.Tensor) and value.grad_fn is node and value.output_nr == number:
                    return value
        frame = frame.f_back
    return None


# ----------------------------------------------------------------------------------------------- 2. by the active plan


def may_verify(gm: fx.GraphModule, names: Sequence[str], fakes: Sequence[Any]) -> bool:
    """Whether a graph is a part of a decoder that gets hidden states: it attends, and embeds no tokens."""

    def is_ids(name, fake):
        return isinstance(fake, torch.Tensor) and fake.ndim == 2 and fake.dtype == torch.int64 and not is_about_positions(name)

    if any(is_ids(name, fake) for name, fake in zip(names, fakes, strict=True)):
        return False
    nodes = (n for module in gm.modules() if isinstance(module, fx.GraphModule) for n in module.graph.nodes)
    attends = ("scaled_dot_product_attention", "softmax", "flex_attention")
    return any((n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")) in attends for n in nodes)


def verified(marks: dict[int, Mark], candidates: Sequence[int], args: Sequence[Any]) -> dict[int, Mark]:
    """`marks` of a call's arguments, and those of unmarked ones that agree with their plan, or else with the active plan."""
    plan = next(iter(marks.values())).plan if marks else active_plan()
    if plan is None or plan.is_row:
        return marks
    shape = (plan.num_rows, plan.num_columns)
    unknown = [i for i in candidates if i not in marks and tuple(args[i].shape[:2]) == shape and not args[i].requires_grad]
    hidden = [i for i in unknown if args[i].ndim == 3 and args[i].is_floating_point()]
    if not hidden and not marks:
        return marks
    plan = plan.on(args[unknown[0] if unknown else next(iter(marks))].device)
    if not marks and plan.padding != "none" and not any(_shows_padding(args[i], plan) for i in candidates):
        plan = plan.unpadded()
    found = dict(marks)
    for i in unknown:
        if args[i].ndim != 3 and not (args[i].ndim == 2 and args[i].dtype in INTEGERS):
            continue
        sharing = _compared(args[i], plan, "hidden states")
        if sharing.reason is None:
            found[i] = DetectedMark(plan, "verified", sharing, 0, False, args[i])
            attach(args[i], found[i])
    return found if marks or any(i in found for i in hidden) else marks


def _shows_padding(mask: torch.Tensor, plan: Plan) -> bool:
    """Whether the last query of a mask ``[B, 1, S, S]`` sees just what the plan holds for tokens. One synchronisation."""
    if mask.ndim != 4 or tuple(mask.shape) != (plan.num_rows, 1, plan.num_columns, plan.num_columns):
        return False
    last = mask[:, 0, -1]
    seen = last if last.dtype == torch.bool else last == 0
    return bool((seen == plan.packing().real).all())


def _compared(tensor: torch.Tensor, plan: Plan, role: str) -> Sharing:
    start = time.perf_counter()
    with torch.inference_mode(False), torch.no_grad():
        sharing = compare_with_plan(Entry(role, tensor), plan.on(tensor.device))
    log.info(
        "%s %s that eager code made, compared with the active plan in %.2f ms: %s",
        role, list(tensor.shape), 1e3 * (time.perf_counter() - start), sharing.reason or "equal over the prompts",
    )  # fmt: skip
    return sharing

