"""Whether a marked input that requires gradients may be packed.

Packed, a shared prompt position of a group gets the sum of the rows' gradients, at one row; the others get zero. That is right only
where nothing can tell: where the input is a look-up by equal indices, whose backward adds the rows up anyway.
"""

import torch

from dualkv_compile.facts import Entry, compare_with_plan
from dualkv_compile.marks import BLANK_OUTPUT, OUTPUT


def rows_share_gradient(tensor, mark):
    """Whether the gradients of a group's rows are added up before anyone sees them. One synchronisation a mark, at most."""
    if not tensor.requires_grad:
        return True
    if _is_watched(tensor):
        return False
    if mark.origin is not None and (mark.origin() is None or _is_watched(mark.origin())):
        return False
    if mark.role in (OUTPUT, BLANK_OUTPUT):
        return True  # of a packed value: the backward of its unpacking adds the copies up
    if mark.gradient is None or mark.gradient[0] is not tensor.grad_fn:
        mark.gradient = tensor.grad_fn, _is_lookup(tensor.grad_fn, mark.plan)
    return mark.gradient[1]


def _is_watched(tensor):
    """Whether somebody is shown the gradient of the tensor itself. FSDP2's hook on what a layer returns does not look at it."""
    if tensor.is_leaf or tensor.retains_grad:
        return True
    return any(not _is_of_fsdp(hook) for hook in (tensor._backward_hooks or {}).values())


def _is_of_fsdp(hook):
    owner = type(getattr(hook, "__self__", None))
    return owner.__module__.startswith("torch.distributed.fsdp.") and getattr(hook, "__name__", "") == "_pre_backward"


def _is_lookup(node, plan):
    found = embeddings_behind(node, (plan.num_rows, plan.num_columns))
    return bool(found) and all(has_equal_indices(f, plan) for f in found)


def has_equal_indices(embedding, plan):
    """Whether an embedding's backward node looks up, in all rows of a group, the same prompt. One synchronisation."""
    indices = embedding._saved_indices
    return compare_with_plan(Entry("the indices of an embedding", indices), plan.on(indices.device)).reason is None


def embeddings_behind(node, rows_and_columns):
    """The embeddings ``[B, S] -> [B, S, H]`` that an autograd node is made of: nodes, by token-wise operations with a linear backward; None
    where it is made of something else. Besides them it may be made of what has no rows (positions, biases): its gradient is the sum over
    all rows, wherever in a group the rows' gradients stand."""
    found, stack = [], [node]
    while stack:
        node = stack.pop()
        name = node.name()
        leaf = getattr(node, "variable", None)
        shape = tuple(node._input_metadata[0].shape if leaf is None else leaf.shape)
        if len(shape) < 3 or (len(shape) == 3 and shape[0] == 1):
            continue  # has no rows
        if len(shape) > 3 or shape[:2] != rows_and_columns:
            return None
        following = [n for n, _ in node.next_functions if n is not None]
        factors = [f for f in (getattr(node, n, None) for n in ("_saved_self", "_saved_other")) if isinstance(f, torch.Tensor)]
        if name == "EmbeddingBackward0" and not node._saved_scale_grad_by_freq and tuple(node._saved_indices.shape) == rows_and_columns:
            found.append(node)
        elif (
            name in ("ToCopyBackward0", "AliasBackward0", "CloneBackward0", "AddBackward0", "SubBackward0")
            or (name in ("MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1") and all(f.numel() == 1 for f in factors))
            or (name == "NativeLayerNormBackward0" and len(node._saved_normalized_shape) == 1)
        ):
            stack += following
        else:
            return None
    return found
