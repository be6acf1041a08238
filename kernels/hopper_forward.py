"""The forward for Hopper in Gluon: two consumer warpgroups of 64 queries each, and one warp that feeds them by TMA.

``b_`` block, ``s_`` shared memory, ``i_`` index. The scores of block i + 1 are issued before the values of block i are
multiplied, so that the tensor cores work while the softmax is computed. Only blocks at the end of the prefix and on the
diagonal are masked. Scores are in units of log2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HALF = gl.constexpr(64)  # queries of one consumer
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def first_key(i, n_prefix, p0, s0, BN: gl.constexpr):
    """Blocks run over the prefix, then over the segment itself."""
    return gl.where(i < n_prefix, p0 + i * BN, s0 + (i - n_prefix) * BN)


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    s_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(s_bar.index(i), count=COUNT)
    return s_bar


@gluon.jit
def query_tile(p_tiles, H: gl.constexpr, BN: gl.constexpr):
    """(head, first query, segment's end, prefix start, its end, its blocks, segment start, blocks, full own blocks)."""
    pid = gl.program_id(0)
    tile = p_tiles + pid // H * 8
    q0 = gl.load(tile)
    q1 = gl.load(tile + 1)
    p0 = gl.load(tile + 2)
    p1 = gl.load(tile + 3)
    s0 = gl.load(tile + 4)
    n_prefix = (p1 - p0 + BN - 1) // BN
    blocks = n_prefix + (gl.minimum(q0 + 2 * HALF, q1) - s0 + BN - 1) // BN
    return pid % H, q0, q1, p0, p1, n_prefix, s0, blocks, (q0 - s0) // BN


@gluon.jit
def visible(i, n_prefix, p0, p1, s0, i_row, i_col, BN: gl.constexpr):
    i_key = first_key(i, n_prefix, p0, s0, BN) + i_col
    limit = gl.where(i < n_prefix, p1 - 1, 2147483647)
    return (i_key[None, :] <= i_row[:, None]) & (i_key <= limit)[None, :]


@gluon.jit
def _load(d_q, d_k, d_v, s_q, s_k, s_v, q_full, k_full, k_free, v_full, v_free, q0, head, kv_head, p0, n_prefix, s0,
          blocks, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):  # fmt: skip
    for j in gl.static_range(2):
        mbarrier.expect(q_full.index(j), d_q.block_type.nbytes)
        tma.async_copy_global_to_shared(d_q, [q0 + j * HALF, head * D], q_full.index(j), s_q.index(j))
    for i in range(blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        key = first_key(i, n_prefix, p0, s0, BN)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), d_k.block_type.nbytes)
        tma.async_copy_global_to_shared(d_k, [key, kv_head * D], k_full.index(stage), s_k.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), d_v.block_type.nbytes)
        tma.async_copy_global_to_shared(d_v, [key, kv_head * D], v_full.index(stage), s_v.index(stage))


@gluon.jit
def _consume(s_q, s_k, s_v, q_full, k_full, k_free, v_full, v_free, p_out, p_lse, p_sinks, scale2, T, q0, q1, head, p0,
             p1, n_prefix, s0, blocks, own_full, J: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr,
             BN: gl.constexpr, D: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = s_v.dtype
    l_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    l_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    l_p: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=l_o, k_width=2)
    i_row = q0 + J * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, l_s))
    i_col = gl.arange(0, BN, layout=gl.SliceLayout(0, l_s))
    zero = gl.zeros((HALF, BN), gl.float32, l_s)
    b_acc = gl.zeros((HALF, D), gl.float32, l_o)
    mbarrier.wait(q_full.index(J), 0)
    b_q = s_q.index(J)

    mbarrier.wait(k_full.index(0), 0)
    b_s = warpgroup_mma(b_q, s_k.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))
    mbarrier.arrive(k_free.index(0), count=1)
    b_s = gl.where(visible(0, n_prefix, p0, p1, s0, i_row, i_col, BN), b_s, -float("inf"))
    b_max = gl.max(b_s, 1) * scale2
    if SINKS:
        sink = gl.load(p_sinks + head).to(gl.float32) * LOG2E
        b_max = gl.maximum(b_max, sink)
    b_p = gl.exp2(b_s * scale2 - b_max[:, None])
    b_sum = gl.sum(b_p, 1)
    if SINKS:
        b_sum += gl.exp2(sink - b_max)
    b_p = gl.convert_layout(b_p.to(dtype), l_p)
    for i in range(1, blocks):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        b_s = warpgroup_mma(b_q, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        b_acc = warpgroup_mma(b_p, s_v.index(before), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(num_outstanding=1, deps=(b_s,))
        mbarrier.arrive(k_free.index(stage), count=1)
        if (i == n_prefix - 1) | (i >= n_prefix + own_full):
            b_s = gl.where(visible(i, n_prefix, p0, p1, s0, i_row, i_col, BN), b_s, -float("inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale2)
        b_weights = gl.exp2(b_s * scale2 - b_new[:, None])
        b_scale = gl.exp2(b_max - b_new)
        b_sum = b_sum * b_scale + gl.sum(b_weights, 1)
        b_max = b_new
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
        mbarrier.arrive(v_free.index(before), count=1)
        b_acc = b_acc * gl.convert_layout(b_scale, gl.SliceLayout(1, l_o))[:, None]
        b_p = gl.convert_layout(b_weights.to(dtype), l_p)
    last = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((blocks - 1) // STAGES) & 1)
    b_acc = warpgroup_mma(b_p, s_v.index(last), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
    b_acc = b_acc / gl.convert_layout(b_sum, gl.SliceLayout(1, l_o))[:, None]
    gl.store(p_lse + head.to(gl.int64) * T + i_row, (b_max + gl.log2(b_sum)) * LN2, mask=i_row < q1)
    i_out = q0 + J * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, l_o))
    i_dim = gl.arange(0, D, layout=gl.SliceLayout(0, l_o))
    p_rows = p_out + i_out.to(gl.int64)[:, None] * (H * D) + head * D + i_dim[None, :]
    gl.store(p_rows, b_acc.to(dtype), mask=(i_out < q1)[:, None])


@gluon.jit(do_not_specialize=["T"])
def forward(d_q, d_k, d_v, p_out, p_lse, p_sinks, p_tiles, scale2, T, H: gl.constexpr, GROUP: gl.constexpr,
            D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip
    head, q0, q1, p0, p1, n_prefix, s0, blocks, own_full = query_tile(p_tiles, H, BN)
    s_q = gl.allocate_shared_memory(d_q.dtype, [2] + d_q.block_type.shape, d_q.layout)
    s_k = gl.allocate_shared_memory(d_k.dtype, [STAGES] + d_k.block_type.shape, d_k.layout)
    s_v = gl.allocate_shared_memory(d_v.dtype, [STAGES] + d_v.block_type.shape, d_v.layout)
    q_full = barriers(2, 1)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    gl.warp_specialize([
        (_consume, (s_q, s_k, s_v, q_full, k_full, k_free, v_full, v_free, p_out, p_lse, p_sinks, scale2, T, q0, q1,
                    head, p0, p1, n_prefix, s0, blocks, own_full, gl.constexpr(0), H, STAGES, BN, D, SINKS)),
        (_consume, (s_q, s_k, s_v, q_full, k_full, k_free, v_full, v_free, p_out, p_lse, p_sinks, scale2, T, q0, q1,
                    head, p0, p1, n_prefix, s0, blocks, own_full, gl.constexpr(1), H, STAGES, BN, D, SINKS)),
        (_load, (d_q, d_k, d_v, s_q, s_k, s_v, q_full, k_full, k_free, v_full, v_free, q0, head, head // GROUP, p0,
                 n_prefix, s0, blocks, STAGES, BN, D)),
    ], [4, 1], [240, 24])  # fmt: skip
