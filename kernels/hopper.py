"""Launchers of the Hopper kernels: descriptors, block sizes, grids."""

import functools

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dualkv_compile.kernels import hopper_backward, hopper_forward

_HALF = 64
_LOG2E = 1.4426950408889634
_NATURAL_BLOCK = 32  # rows of dQ that a program of ``natural_order`` converts; the sum is padded by more

# Head dim -> (block, stages): keys a step in the forward and dQ, queries a step in the others. ``GRADIENTS`` makes dQ
# along with dK and dV, five matrix products instead of seven, and adds it up in an order that varies from run to run.
FORWARD = {64: (128, 2), 128: (128, 2), 256: (64, 2)}
GRADIENTS = {128: (64, 2)}
KEY_GRADIENTS = {64: (64, 2), 128: (64, 3)}
QUERY_GRADIENTS = {64: (128, 2), 128: (64, 2), 256: (32, 2)}


def forward(q, k, v, out, lse, tiles, scale, sinks):
    heads, tokens, dim = q.shape[1:]
    block, stages = FORWARD[dim]
    hopper_forward.forward[(tiles.shape[0] * heads,)](
        _rows(q, _HALF), _rows(k, block), _rows(v, block), out, lse, lse if sinks is None else sinks.contiguous(),
        tiles, scale * _LOG2E, tokens, heads, heads // k.shape[1], dim, block, stages, sinks is not None, num_warps=4,
    )  # fmt: skip


def gradients(q, k, v, dout, statistics, dq, dk, dv, tiles, scale):
    """``statistics`` [2, H, T4] float32: lse in units of log2, and delta; ``T4`` is a multiple of 4."""
    _, heads, tokens, dim = q.shape
    block, stages = GRADIENTS[dim]
    padded = triton.cdiv(tokens, 8) * 8
    total = q.new_zeros((heads * padded + block) * dim, dtype=torch.float32)
    _key_gradients(q, k, v, dout, total, padded, statistics, dk, dv, tiles, scale, block, stages)
    hopper_backward.natural_order[(triton.cdiv(tokens, _NATURAL_BLOCK), heads)](
        total, dq, scale, tokens, padded, heads, dim, _NATURAL_BLOCK, num_warps=4
    )


def key_gradients(q, k, v, dout, statistics, dk, dv, tiles, scale):
    block, stages = KEY_GRADIENTS[q.shape[3]]
    _key_gradients(q, k, v, dout, None, 0, statistics, dk, dv, tiles, scale, block, stages)


def query_gradients(q, k, v, dout, statistics, dq, tiles, scale):
    heads, dim = q.shape[1], q.shape[3]
    block, stages = QUERY_GRADIENTS[dim]
    hopper_backward.query_gradients[(tiles.shape[0] * heads,)](
        _rows(q, _HALF), _rows(dout, _HALF), _rows(k, block), _rows(v, block), dq, *statistics, tiles, scale * _LOG2E,
        scale, statistics.shape[2], heads, heads // k.shape[1], dim, block, stages, num_warps=4,
    )  # fmt: skip


def _key_gradients(q, k, v, dout, total, padded, statistics, dk, dv, tiles, scale, block, stages):
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
    hopper_backward.key_gradients[(tiles.shape[0] * kv_heads,)](
        _rows(q, block), _rows(k, _HALF), _rows(v, _HALF), _rows(dout, block), statistics if total is None else total,
        *statistics, dk, dv, tiles, scale * _LOG2E, scale, statistics.shape[2], padded, kv_heads, heads // kv_heads,
        dim, block, stages, total is not None, num_warps=4,
    )  # fmt: skip


def _rows(x, block):
    """A descriptor over [T, heads * D] of ``x`` [1, heads, T, D]; a copy if its heads do not lie side by side."""
    _, heads, tokens, dim = x.shape
    stride = x.stride(2)
    aligned = stride * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 and stride >= heads * dim
    if x.stride(3) != 1 or (heads > 1 and x.stride(1) != dim) or not aligned:
        x = x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        stride = heads * dim
    matrix = x.as_strided((tokens, heads * dim), (stride, 1))
    shape = [block, dim]
    return TensorDescriptor(matrix, [tokens, heads * dim], [stride, 1], shape, _layout(block, dim))


@functools.cache
def _layout(block, dim):
    return gl.NVMMASharedLayout.get_default_for([block, dim], gl.bfloat16)  # float16 has the same width
