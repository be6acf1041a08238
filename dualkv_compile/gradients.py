"""Whether a marked input that requires gradients may be packed.

Packed, a shared prompt position of a group gets the sum of the rows' gradients, at one row; the others get zero. That is right only
where nothing can tell: where the input is a look-up by equal indices, whose backward adds the rows up anyway.
"""

from dualkv_compile.facts import Entry, compare_with_plan
from dualkv_compile.marks import BLANK_OUTPUT, OUTPUT

# token-wise with one differentiable operand: what arrives is passed on, row by row
_PASS_ON = {"ToCopyBackward0", "AliasBackward0", "CloneBackward0", "MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1"}


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
    while node.name() in _PASS_ON:
        following = [n for n, _ in node.next_functions if n is not None]
        factors = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
        if len(following) != 1 or any(f is not None and f.numel() != 1 for f in factors):
            return False
        (node,) = following
    if node.name() != "EmbeddingBackward0" or node._saved_scale_grad_by_freq:
        return False
    indices = node._saved_indices
    if tuple(indices.shape) != (plan.num_rows, plan.num_columns):
        return False
    return compare_with_plan(Entry("the indices of an embedding", indices), plan.on(indices.device)).reason is None
