"""``dualkv::shared_prompt_attention``: schema, checks, fakes, autograd, and which implementation runs.

An op and its backward, both functional and of fixed arity, so that AOTAutograd traces them and selective checkpointing
sees them. Under activation checkpointing the forward runs again, bitwise alike, unless the policy saves it:

    lambda ctx, op, *a, **k: MUST_SAVE if op is torch.ops.dualkv.shared_prompt_attention.default else PREFER_RECOMPUTE
"""

import functools

import torch

from dualkv_compile.kernels import reference
from dualkv_compile.kernels.tables import COLUMN, NUM_TABLES

IMPLEMENTATIONS = ("auto", "triton", "reference")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class UnsupportedAttention(NotImplementedError):
    """The arguments are meaningful, but no implementation that was asked for computes them."""


def shared_prompt_attention(q, k, v, plan, *, scale=None, window=None, softcap=None, sinks=None):
    """Causal attention of packed tokens, each prompt's keys seen by all rows of its group.

    Args:
        q: ``[1, H, T, Dqk]``. k: ``[1, HK, T, Dqk]``. v: ``[1, HK, T, Dv]``; HK divides H; any strides.
        plan: what ``plan_of`` returns, or anything with ``attention_tables(keep=False, hidden=False)``.
        scale: ``Dqk ** -0.5`` by default.
        window: a query sees keys less than this many columns back; None: all.
        softcap: scores become ``softcap * tanh(score / softcap)``; None or 0: not.
        sinks: ``[H]``, one more logit per head in the softmax's denominator.

    Returns ``(out, lse)``: ``[1, H, T, Dv]`` in the dtype of q, and ``[1, H, T]``, the natural logarithm of the
    softmax's denominator, float32 (float64 for float64). Both are differentiable. ValueError on arguments that do not
    fit together. A query that sees no key has out = 0 and lse = -inf (with sinks: its head's sink), and no gradient.

    Output, lse, dK, dV and dsinks are bitwise reproducible from run to run. dQ is so under
    ``torch.use_deterministic_algorithms(True)``; by default the Hopper kernels at head dim 128 add it up in an order
    that varies.

    Extra memory of the Triton backward at its peak: two float32 ``[H, T]`` and, where dQ is added up, one float32 of
    the size of q. The Hopper kernels copy q, k, v or dout if its heads do not lie side by side in memory.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tables = plan.attention_tables()
    return torch.ops.dualkv.shared_prompt_attention(q, k, v, tables, scale, window, float(softcap or 0.0), sinks)


# ------------------------------------------------------------------------------------------------------- the op


@torch.library.custom_op(
    "dualkv::shared_prompt_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] tables, float scale, int? window=None, float softcap=0.0, "
    'Tensor? sinks=None, str impl="auto") -> (Tensor, Tensor)',
)
def _attention(q, k, v, tables, scale, window=None, softcap=0.0, sinks=None, impl="auto"):
    _check(q, k, v, tables, window, softcap, sinks, impl)
    return _implementation(q, v, impl).forward(q, k, v, tables, scale, window, softcap, sinks)


@_attention.register_fake
def _(q, k, v, tables, scale, window=None, softcap=0.0, sinks=None, impl="auto"):
    _check(q, k, v, tables, window, softcap, sinks, impl)
    _, heads, tokens, _ = q.shape
    out = q.new_empty((1, tokens, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((1, heads, tokens), dtype=_lse_dtype(q))


@torch.library.custom_op(
    "dualkv::shared_prompt_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] tables, "
    'float scale, int? window=None, float softcap=0.0, Tensor? sinks=None, str impl="auto") '
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    dout, dlse, q, k, v, out, lse, tables, scale, window=None, softcap=0.0, sinks=None, impl="auto"
):
    run = _implementation(q, v, impl).backward
    return run(dout, dlse, q, k, v, out, lse, tables, scale, window, softcap, sinks)


@_attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, tables, scale, window=None, softcap=0.0, sinks=None, impl="auto"):
    dq, dk, dv = (x.new_empty((1, x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _setup_context(ctx, inputs, output):
    q, k, v, tables, ctx.scale, ctx.window, ctx.softcap, sinks, ctx.impl = inputs
    ctx.has_sinks = sinks is not None
    ctx.save_for_backward(q, k, v, *output, *((sinks,) if ctx.has_sinks else ()), *tables)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, *rest = ctx.saved_tensors
    sinks, tables = (rest[0], rest[1:]) if ctx.has_sinks else (None, rest)
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = torch.ops.dualkv.shared_prompt_attention_backward(
        dout, dlse, q, k, v, out, lse, list(tables), ctx.scale, ctx.window, ctx.softcap, sinks, ctx.impl
    )
    grads = (dq, dk, dv, [None] * len(tables), None, None, None, dsinks if ctx.has_sinks else None, None)
    return grads[: len(ctx.needs_input_grad)]  # arguments left at their defaults want none


_attention.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------- choice and checks


def _implementation(q, v, impl):
    """The module whose ``forward`` and ``backward`` run. "auto": Triton on a GPU where it is supported."""
    if impl == "reference" or (impl == "auto" and not q.is_cuda):
        return reference
    module, reason = _triton()
    if reason is None:
        reason = module.unsupported(q, v)
    if reason is None:
        return module
    if impl == "triton":
        raise UnsupportedAttention(
            f'expected attention that the Triton kernels compute, got {reason}. Use impl="auto" or "reference".'
        )
    return reference


@functools.cache
def _triton():
    try:
        from dualkv_compile.kernels import launch
    except ImportError as error:
        return None, f"no usable Triton ({error})"
    return launch, None


def _lse_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check(q, k, v, tables, window, softcap, sinks, impl):
    """Raise ValueError unless the arguments fit together; runs under fake tensors too."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    expected = "expected q [1, H, T, Dqk], k [1, HK, T, Dqk] and v [1, HK, T, Dv] with HK dividing H"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"{expected}, got {shapes}. Pack the batch first.")
    fits = q.shape[0] == k.shape[0] == v.shape[0] == 1 and k.shape[1] == v.shape[1] and q.shape[3] == k.shape[3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1] or q.shape[3] == 0:
        raise ValueError(f"{expected}, got {shapes}. Pack the batch first; heads are not expanded.")
    torch._check(q.shape[2] == k.shape[2], lambda: f"{expected}, got {shapes}: q and k of unequal length")
    torch._check(q.shape[2] == v.shape[2], lambda: f"{expected}, got {shapes}: q and v of unequal length")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        raise ValueError(
            f"expected q, k and v of one dtype of {[str(t) for t in FLOATS]}, got {q.dtype}, {k.dtype}, {v.dtype}. "
            "Cast them to one."
        )
    if not q.device == k.device == v.device == tables[0].device:
        raise ValueError(
            f"expected q, k, v and the tables on one device, got {q.device}, {k.device}, {v.device} and "
            f"{tables[0].device}. Take the tables of plan.on(device)."
        )
    if len(tables) != NUM_TABLES:
        raise ValueError(f"expected the {NUM_TABLES} tables that build_tables returns, got {len(tables)}")
    torch._check(
        tables[COLUMN].shape[0] == q.shape[2],
        lambda: (
            f"expected tables of {q.shape[2]} tokens, as q has, got {tables[COLUMN].shape[0]}: another batch's plan"
        ),
    )
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1 column (a query sees itself), got {window}")
    if not softcap >= 0:
        raise ValueError(f"expected softcap >= 0 (0: none), got {softcap}")
    if sinks is not None and (tuple(sinks.shape) != (q.shape[1],) or not sinks.is_floating_point()):
        raise ValueError(f"expected sinks [{q.shape[1]}] of a float dtype, got {list(sinks.shape)} of {sinks.dtype}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"expected impl to be one of {IMPLEMENTATIONS}, got {impl!r}")
