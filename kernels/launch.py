"""Launchers of the Triton kernels: which kernel, which block sizes, and what is allocated.

Block sizes are a fixed table by head dim and dtype: nothing is tuned at run time, so no new length ever stalls.
The Hopper kernels run for head dims 64 and 128 in half precision without window, soft cap or hidden keys; the portable
ones otherwise. Every kernel is free of atomics, hence deterministic in every mode.
"""

import contextlib
import functools
import os

import torch
import triton

from dualkv_compile.kernels import triton_portable as portable
from dualkv_compile.kernels.tables import COLUMN, END, KEY_TILES, QUERY_TILES, TILE, has_hidden

_MAX_HEAD_DIM = 256
_STATISTICS_BLOCK = 64

# (largest head dim, bytes an element) -> (BM, BN, warps, stages) of forward, dK/dV and dQ: 99 KB of shared memory do.
_BLOCKS = {
    (64, 2): ((128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    (128, 2): ((128, 64, 8, 2), (64, 64, 8, 1), (64, 64, 8, 1)),
    (256, 2): ((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    (64, 4): ((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    (128, 4): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    (256, 4): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
_INTERPRETED_BLOCKS = ((16, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1))


def unsupported(q, v):
    """Why the kernels cannot run, or None."""
    if not q.is_cuda and not interpreted():
        return f"tensors on {q.device} (a GPU, or TRITON_INTERPRET=1, is needed)"
    if q.dtype == torch.float64:
        return "float64"
    if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
        return f"head dims {q.shape[3]} and {v.shape[3]}, of which one is above {_MAX_HEAD_DIM}"
    return None


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def forward(q, k, v, tables, scale, window, softcap, sinks):
    _, heads, tokens, value_dim = *q.shape[:3], v.shape[3]
    out = q.new_empty((1, tokens, heads, value_dim)).transpose(1, 2)
    lse = q.new_empty((1, heads, tokens), dtype=torch.float32)
    if tokens == 0:
        return out, lse
    with _on(q):
        hopper = _hopper(q, v, tables, window, softcap)
        if hopper is not None:
            hopper.forward(q, k, v, out, lse, tables[QUERY_TILES], scale, sinks)
            return out, lse
        q, k, v = (_unit_stride(x) for x in (q, k, v))
        block_m, block_n, warps, stages = _blocks(q, v)[0]
        tiles = tables[QUERY_TILES]
        portable.forward[(tiles.shape[0] * (TILE // block_m) * heads,)](
            q, k, v, out, lse, lse if sinks is None else sinks.contiguous(), tiles, tables[COLUMN], tables[END],
            scale, window or 0, softcap, tokens, *_strides(q), *_strides(k), *_strides(v),
            **_shape(q, k, v), H=heads, BM=block_m, BN=block_n, SINKS=sinks is not None,
            **_features(q, tables, window, softcap), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse


def backward(dout, dlse, q, k, v, out, lse, tables, scale, window, softcap, sinks):
    """Extra memory: two float32 [H, T] (delta, and lse in units of log2)."""
    _, heads, tokens, _ = q.shape
    kv_heads, value_dim = v.shape[1], v.shape[3]
    dq, dk, dv = (x.new_empty((1, x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    if tokens == 0:
        return dq, dk, dv, q.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
    with _on(q):
        dout = _unit_stride(dout)
        padded = triton.cdiv(tokens, 4) * 4
        statistics = q.new_empty((2, heads, padded), dtype=torch.float32)
        lse2, delta = statistics
        token_major = _token_major(out)
        portable.statistics[(triton.cdiv(padded, _STATISTICS_BLOCK), heads)](
            token_major, dout, lse.contiguous(), lse if dlse is None else dlse.float().contiguous(), delta, lse2,
            tokens, padded, *_strides(dout), H=heads, DV=value_dim, BDV=_power_of_two(value_dim), BM=_STATISTICS_BLOCK,
            DLSE=dlse is not None,
        )  # fmt: skip
        hopper = _hopper(q, v, tables, window, softcap)
        if hopper is not None:
            hopper.backward(q, k, v, dout, statistics, dq, dk, dv, tables[QUERY_TILES], tables[KEY_TILES], scale)
        else:
            q, k, v = (_unit_stride(x) for x in (q, k, v))
            strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(dout))
            shape, features = _shape(q, k, v), _features(q, tables, window, softcap)
            _, for_keys, for_queries = _blocks(q, v)
            block_m, block_n, warps, stages = for_keys
            portable.key_gradients[(tables[KEY_TILES].shape[0] * (TILE // block_n) * kv_heads,)](
                q, k, v, dout, dk, dv, lse2, delta, tables[KEY_TILES], tables[COLUMN], tables[END],
                scale, window or 0, softcap, padded, *strides, **shape, HK=kv_heads, BM=block_m, BN=block_n, **features,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            block_m, block_n, warps, stages = for_queries
            portable.query_gradients[(tables[QUERY_TILES].shape[0] * (TILE // block_m) * heads,)](
                q, k, v, dout, dq, lse2, delta, tables[QUERY_TILES], tables[COLUMN], tables[END],
                scale, window or 0, softcap, padded, *strides, **shape, H=heads, BM=block_m, BN=block_n, **features,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
    if sinks is None:
        return dq, dk, dv, q.new_zeros(0)
    weights = torch.exp(sinks.float().view(-1, 1) - lse[0])
    return dq, dk, dv, -(weights * delta[:, :tokens]).sum(-1).to(sinks.dtype)


def _blocks(q, v):
    if interpreted():
        return _INTERPRETED_BLOCKS
    size = max(q.shape[3], v.shape[3])
    bound = next(bound for bound in (64, 128, 256) if size <= bound)
    return _BLOCKS[bound, q.element_size()]


def _shape(q, k, v):
    dims = {"DQ": q.shape[3], "DV": v.shape[3], "BDQ": _power_of_two(q.shape[3]), "BDV": _power_of_two(v.shape[3])}
    return {"GROUP": q.shape[1] // k.shape[1], "TILE": TILE, **dims}


def _features(q, tables, window, softcap):
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    flags = {"WINDOW": window is not None, "SOFTCAP": softcap != 0, "HIDDEN": has_hidden(tables)}
    return {**flags, "PRECISION": precision}


def _power_of_two(size):
    return max(16, triton.next_power_of_2(size))


def _strides(x):
    return x.stride(1), x.stride(2)


def _unit_stride(x):
    """``x`` itself unless its last dimension is strided (or expanded): then a copy."""
    return x if x.stride(3) == 1 else x.contiguous()


def _token_major(x):
    return x if x.transpose(1, 2).is_contiguous() else x.transpose(1, 2).contiguous().transpose(1, 2)


def _on(x):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _hopper(q, v, tables, window, softcap):
    """The module of Hopper kernels if they compute this, else None."""
    if not q.is_cuda or os.environ.get("DUALKV_PORTABLE") == "1":
        return None
    fits = q.shape[3] == v.shape[3] and q.shape[3] in (64, 128) and q.dtype in (torch.float16, torch.bfloat16)
    if not fits or window is not None or softcap or has_hidden(tables):
        return None
    return _hopper_module(q.device.index)


@functools.cache
def _hopper_module(device):
    if torch.cuda.get_device_capability(device) != (9, 0) or torch.version.hip:
        return None
    try:
        from dualkv_compile.kernels import hopper
    except ImportError:
        return None
    return hopper
