"""Launchers of the Triton kernels: which kernel, which block sizes, and what is allocated.

Block sizes are a fixed table by device, head dim and dtype (here and in ``hopper``), chosen by measurement
(docs/kernel-log.md): nothing is tuned at run time and kernels are not specialised on lengths, so a kernel is compiled
once, Triton keeps it on disk, and no new length ever stalls. The Hopper kernels run for head dims 64, 128 and 256 in
half precision without window, soft cap or hidden keys (at 256 all but dK and dV); the portable ones otherwise. All are
deterministic but ``hopper.gradients``, which ``torch.use_deterministic_algorithms`` turns off.
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
# The same where a block may have 227 KB.
_HOPPER_BLOCKS = {(256, 2): ((128, 64, 8, 2), (32, 64, 8, 2), (128, 32, 8, 2))}
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
    """Extra memory: two float32 [H, T] (delta, and lse in units of log2); float32 dQ in ``hopper.gradients``."""
    heads, tokens, value_dim = q.shape[1], q.shape[2], v.shape[3]
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
        dim, query_tiles, key_tiles = q.shape[3], tables[QUERY_TILES], tables[KEY_TILES]
        hopper = _hopper(q, v, tables, window, softcap)
        if hopper and dim in hopper.GRADIENTS and not torch.are_deterministic_algorithms_enabled():
            hopper.gradients(q, k, v, dout, statistics, dq, dk, dv, key_tiles, scale)
        else:
            args = (q, k, v, dout, statistics)
            if hopper and dim in hopper.KEY_GRADIENTS:
                hopper.key_gradients(*args, dk, dv, key_tiles, scale)
            else:
                _key_gradients(*args, dk, dv, tables, scale, window, softcap)
            if hopper and dim in hopper.QUERY_GRADIENTS:
                hopper.query_gradients(*args, dq, query_tiles, scale)
            else:
                _query_gradients(*args, dq, tables, scale, window, softcap)
    if sinks is None:
        return dq, dk, dv, q.new_zeros(0)
    weights = torch.exp(sinks.float().view(-1, 1) - lse[0])
    return dq, dk, dv, -(weights * delta[:, :tokens]).sum(-1).to(sinks.dtype)


def _key_gradients(q, k, v, dout, statistics, dk, dv, tables, scale, window, softcap):
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    block_m, block_n, warps, stages = _blocks(q, v)[1]
    tiles, kv_heads = tables[KEY_TILES], k.shape[1]
    portable.key_gradients[(tiles.shape[0] * (TILE // block_n) * kv_heads,)](
        q, k, v, dout, dk, dv, *statistics, tiles, tables[COLUMN], tables[END], scale, window or 0, softcap,
        statistics.shape[2], *_strides(q), *_strides(k), *_strides(v), *_strides(dout), **_shape(q, k, v), HK=kv_heads,
        BM=block_m, BN=block_n, **_features(q, tables, window, softcap), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _query_gradients(q, k, v, dout, statistics, dq, tables, scale, window, softcap):
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    block_m, block_n, warps, stages = _blocks(q, v)[2]
    tiles, heads = tables[QUERY_TILES], q.shape[1]
    portable.query_gradients[(tiles.shape[0] * (TILE // block_m) * heads,)](
        q, k, v, dout, dq, *statistics, tiles, tables[COLUMN], tables[END], scale, window or 0, softcap,
        statistics.shape[2], *_strides(q), *_strides(k), *_strides(v), *_strides(dout), **_shape(q, k, v), H=heads,
        BM=block_m, BN=block_n, **_features(q, tables, window, softcap), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _blocks(q, v):
    if interpreted():
        return _INTERPRETED_BLOCKS
    size = max(q.shape[3], v.shape[3])
    key = next(bound for bound in (64, 128, 256) if size <= bound), q.element_size()
    return _HOPPER_BLOCKS.get(key, _BLOCKS[key]) if _is_hopper(q.device.index) else _BLOCKS[key]


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
    if not q.is_cuda or os.environ.get("DUALKV_PORTABLE") == "1" or not _is_hopper(q.device.index):
        return None
    hopper = _hopper_module()
    fits = hopper and q.shape[3] == v.shape[3] and q.shape[3] in hopper.FORWARD and q.element_size() == 2
    return hopper if fits and window is None and not softcap and not has_hidden(tables) else None


@functools.cache
def _is_hopper(device):
    return torch.cuda.get_device_capability(device) == (9, 0) and not torch.version.hip


@functools.cache
def _hopper_module():
    try:
        from dualkv_compile.kernels import hopper
    except ImportError:
        return None
    return hopper
