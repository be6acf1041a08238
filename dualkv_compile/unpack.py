"""``dualkv::unpack``: from packed tokens back to the dense positions that read them.

    out[i] = packed[unpack_index[i]]    where unpack_index[i] < T, and 0 where it is T (padding)

A prompt token is read by every row of its group, so the backward sums over the copies: in a fixed order, in float32 at
least, without atomics. (Its forward alone is a gather; Inductor's backward of a gather is an atomic scatter.)
"""

import torch

# Elements of a float32 temporary in the backward of half-precision values: 512 MB.
_CHUNK_ELEMENTS = 1 << 27


@torch.library.custom_op("dualkv::unpack", mutates_args=(), schema="(Tensor packed, Tensor unpack_index) -> Tensor")
def unpack(packed, unpack_index):
    """``packed`` [T, F] of any dtype, ``unpack_index`` [M] int64 in [0, T] -> [M, F]; index T reads zeros."""
    num_tokens = packed.shape[0]
    if num_tokens == 0:
        return packed.new_zeros((unpack_index.shape[0], packed.shape[1]))
    out = packed.index_select(0, unpack_index.clamp(max=num_tokens - 1))
    return out.masked_fill_((unpack_index == num_tokens).unsqueeze(1), 0)


@unpack.register_fake
def _(packed, unpack_index):
    return packed.new_empty((unpack_index.shape[0], packed.shape[1]))


@torch.library.custom_op(
    "dualkv::unpack_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor unpack_index, SymInt num_tokens) -> Tensor",
)
def unpack_backward(grad, unpack_index, num_tokens):
    """``grad`` [M, F], ``unpack_index`` [M] -> [num_tokens, F]: the sum of the gradients of each token's copies."""
    sum_dtype = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    if sum_dtype == grad.dtype:
        return _sum_copies(grad, unpack_index, num_tokens)
    out = grad.new_empty((num_tokens, grad.shape[1]))
    step = max(1, _CHUNK_ELEMENTS // max(1, grad.shape[0]))
    for first in range(0, grad.shape[1], step):
        some = grad[:, first : first + step].to(sum_dtype)
        out[:, first : first + step] = _sum_copies(some, unpack_index, num_tokens)
    return out


def _sum_copies(grad, unpack_index, num_tokens):
    # One row more than there are tokens takes what arrives at padding.
    out = grad.new_zeros((num_tokens + 1, grad.shape[1]))
    if grad.is_cuda:
        out.index_put_((unpack_index,), grad, accumulate=True)  # sorts; index_add_ would use atomics
    else:
        out.index_add_(0, unpack_index, grad)  # sequential
    return out[:num_tokens]


@unpack_backward.register_fake
def _(grad, unpack_index, num_tokens):
    return grad.new_empty((num_tokens, grad.shape[1]))


def _setup_context(ctx, inputs, output):
    packed, unpack_index = inputs
    ctx.save_for_backward(unpack_index)
    ctx.num_tokens = packed.shape[0]


def _backward(ctx, grad):
    (unpack_index,) = ctx.saved_tensors
    return torch.ops.dualkv.unpack_backward(grad, unpack_index, ctx.num_tokens), None


unpack.register_autograd(_backward, setup_context=_setup_context)
