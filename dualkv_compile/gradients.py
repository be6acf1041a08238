"""Whether a marked input that requires gradients may be packed.

Packed, a shared prompt position of a group gets the sum of the rows' gradients, at one row; the others get zero. That is right only
where nothing can tell: where the input is a look-up by equal indices, whose backward adds the rows up anyway.
"""

import sys
import weakref

import torch
from torch.utils.weak import TensorWeakRef

from dualkv_compile.errors import SharedGradient
from dualkv_compile.facts import Entry, compare_with_plan


def rows_share_gradient(tensor, mark):
    """Whether the gradients of a group's rows are added up before anyone sees them. One synchronisation a mark, at most."""
    if not tensor.requires_grad:
        return True
    if _is_watched(tensor):
        return False
    if mark.origin is not None and (mark.origin() is None or _is_watched(mark.origin())):
        return False
    if mark.gradient is None or mark.gradient[0] is not tensor.grad_fn:
        mark.gradient = tensor.grad_fn, _is_lookup(tensor.grad_fn, mark.plan)
    return mark.gradient[1]


def _is_watched(tensor):
    """Whether somebody is shown the gradient of the tensor itself."""
    return tensor.is_leaf or tensor.retains_grad or _has_watchers(tensor._backward_hooks)


def _has_watchers(hooks):
    """FSDP2's hook on what a layer returns does not look at the gradient."""
    return any(not isinstance(hook, _Guard) and not _is_of_fsdp(hook) for hook in (hooks or {}).values())


def _is_of_fsdp(hook):
    owner = type(getattr(hook, "__self__", None))
    return owner.__module__.startswith("torch.distributed.fsdp.") and getattr(hook, "__name__", "") == "_pre_backward"


# ------------------------------------------------------------------------------------------------- asked for after the call


def guard(tensor, mark, name):
    """Called before a packed variant is: lets the backward raise SharedGradient if the gradient of its input is asked for after all."""
    original = None if mark.origin is None else mark.origin()
    for shown in (tensor, original):
        if shown is not None and not any(isinstance(hook, _Guard) for hook in (shown._backward_hooks or {}).values()):
            hook = _Guard(shown, name)
            shown.register_hook(hook)
            hook.hooks = weakref.ref(shown._backward_hooks)


class _Guard:
    """A hook on a packed input. It runs before those that were registered later, and where nobody else's is, it does nothing.

    It holds neither the tensor nor what made it: both hold the hook.
    """

    __torch_unserializable__ = True  # for torch.save, which warns of hooks that it leaves out

    def __init__(self, tensor, name):
        self.tensor, self.name, self.output_nr = TensorWeakRef(tensor), name, tensor.output_nr

    def __call__(self, gradient):
        asked = self._asked()
        if asked is not None:
            raise SharedGradient(
                f"expected nobody to ask for the gradient of {self.name} {list(gradient.shape)}, in which rows that share a prompt have "
                f"one gradient, their sum, got {asked} after a compiled piece was called with it packed. Call retain_grad() or "
                "register_hook on it before that call (the piece then runs dense), or dualkv_compile.unmark it there"
            )

    def _asked(self):
        tensor, node = self.tensor(), torch._C._current_autograd_node()
        if node is None and tensor is not None:
            node = tensor.grad_fn
        if _has_watchers(self.hooks()):
            return "a hook that was registered"
        if tensor is not None and tensor.retains_grad and tensor.grad_fn is node:  # else it has been written to since
            return "retain_grad() called (or backward(inputs=[it]))"
        edges = [(t.grad_fn, t.output_nr) if isinstance(t, torch.Tensor) else (t.node, t.output_nr) for t in _inputs_of_backward()]
        if any(n is node and number == self.output_nr for n, number in edges):
            return "torch.autograd.grad of it"
        if edges and any(n is made_of for made_of in _made_token_by_token(node) if made_of is not node for n, _ in edges):
            return "torch.autograd.grad of what it is made of"
        return None


def _inputs_of_backward():
    """The `inputs` that torch.autograd.grad or backward was given, all over the calls that are under way: on this thread, or, on one of the
    engine's own, on those that wait for it."""
    here = _inputs_in_frames(sys._getframe(1))
    return here if here is not None else [t for f in sys._current_frames().values() for t in _inputs_in_frames(f) or ()]


def _inputs_in_frames(frame):
    found = None
    while frame is not None:
        if frame.f_code is torch.autograd.graph._engine_run_backward.__code__:
            inputs = frame.f_locals["args"][3]  # after the gradients of outputs, retain_graph and create_graph
            found = [*(found or ()), *inputs]
        frame = frame.f_back
    return found


# ------------------------------------------------------------------------------------------------------------ look-ups


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
    found = []
    for made_of in _made_token_by_token(node):
        shape = _shape(made_of)
        if len(shape) > 3 or shape[:2] != rows_and_columns:
            return None
        if made_of.name() == "EmbeddingBackward0":
            if made_of._saved_scale_grad_by_freq or tuple(made_of._saved_indices.shape) != rows_and_columns:
                return None
            found.append(made_of)
        elif not _is_linear_by_token(made_of):
            return None
    return found


_BY_NUMBER = ("MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1")
_BY_TOKEN = ("ToCopyBackward0", "AliasBackward0", "CloneBackward0", "AddBackward0", "SubBackward0", "NativeLayerNormBackward0", *_BY_NUMBER)


def _made_token_by_token(node):
    """A node and those that it is made of by operations like `_BY_TOKEN`, as far as they have rows."""
    stack = [node]
    while stack:
        node = stack.pop()
        shape = _shape(node)
        if len(shape) < 3 or (len(shape) == 3 and shape[0] == 1):
            continue  # has no rows
        yield node
        if node.name() in _BY_TOKEN:
            stack += [n for n, _ in node.next_functions if n is not None]


def _is_linear_by_token(node):
    saved = [t for t in (getattr(node, f"_saved_{n}", None) for n in ("self", "other", "input")) if isinstance(t, torch.Tensor)]
    if any(not t.is_leaf and _is_watched(t) for t in saved):
        return False
    if node.name() in _BY_NUMBER:
        return all(t.numel() == 1 for t in saved)
    return node.name() in _BY_TOKEN and (node.name() != "NativeLayerNormBackward0" or len(node._saved_normalized_shape) == 1)


def _shape(node):
    leaf = getattr(node, "variable", None)
    return tuple(node._input_metadata[0].shape if leaf is None else leaf.shape)
