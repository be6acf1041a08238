"""The backward for Hopper in Gluon, in two ways.

- ``key_gradients`` with ``ACCUMULATE`` makes all three gradients with five matrix products. dQ is added up in float32
  by ``red``, tile of keys by tile of keys, in an order that varies: its last bits vary from run to run. The sum lies in
  an order of its own, which ``natural_order`` undoes.
- ``key_gradients`` without, then ``query_gradients``: seven products, no sums in memory, every bit reproducible.

As in the forward, two consumer warpgroups of 64 rows each are fed by one warp through TMA. In ``key_gradients`` the
rows are keys and each step takes ``BM`` queries; lse and delta are staged in shared memory too, and the blocks that
need a mask (the diagonal, and the last of the group) are peeled out of the main loop: both keep it free of spills.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dualkv_compile.kernels.hopper_forward import HALF, barriers, first_key, query_tile, visible

# ------------------------------------------------------------------------------------------------------ dK and dV


@gluon.jit
def _load_query_block(d_q, d_do, p_lse2, p_delta, s_q, s_do, s_lse, s_delta, q_full, q_free, do_full, do_free, i, m,
                      end, head, T4, STAGES: gl.constexpr, BM: gl.constexpr, D: gl.constexpr):  # fmt: skip
    # The statistics are read through registers. A one-dimensional TMA faulted where a segment starts off a multiple of
    # 16 bytes, probably because of that.
    i_query = m + gl.arange(0, BM, layout=gl.BlockedLayout([BM // 32], [32], [1], [0]))
    offset = head.to(gl.int64) * T4 + i_query
    b_lse = gl.load(p_lse2 + offset, mask=i_query < end, other=0.0)
    b_delta = gl.load(p_delta + offset, mask=i_query < end, other=0.0)
    stage = i % STAGES
    phase = (i // STAGES) & 1
    mbarrier.wait(q_free.index(stage), phase ^ 1)
    mbarrier.expect(q_full.index(stage), d_q.block_type.nbytes)
    tma.async_copy_global_to_shared(d_q, [m, head * D], q_full.index(stage), s_q.index(stage))
    s_lse.index(stage).store(b_lse)
    mbarrier.arrive(q_full.index(stage), count=1)
    mbarrier.wait(do_free.index(stage), phase ^ 1)
    mbarrier.expect(do_full.index(stage), d_do.block_type.nbytes)
    tma.async_copy_global_to_shared(d_do, [m, head * D], do_full.index(stage), s_do.index(stage))
    s_delta.index(stage).store(b_delta)
    mbarrier.arrive(do_full.index(stage), count=1)


@gluon.jit
def _edge_query(e, k0, blocks, edges, BM: gl.constexpr):
    """First query of the e-th masked block: all of them, or those on the diagonal, then the last."""
    return k0 + gl.where((edges == blocks) | (e < 2 * HALF // BM), e, blocks - 1) * BM


@gluon.jit
def _load_queries(d_q, d_k, d_v, d_do, p_lse2, p_delta, s_k, s_v, s_q, s_do, s_lse, s_delta, kv_full, q_full, q_free,
                  do_full, do_free, k0, end, kv_head, blocks, edges, T4, GROUP: gl.constexpr, STAGES: gl.constexpr,
                  BM: gl.constexpr, D: gl.constexpr):  # fmt: skip
    mbarrier.expect(kv_full.index(0), 2 * (d_k.block_type.nbytes + d_v.block_type.nbytes))
    for j in gl.static_range(2):
        tma.async_copy_global_to_shared(d_k, [k0 + j * HALF, kv_head * D], kv_full.index(0), s_k.index(j))
        tma.async_copy_global_to_shared(d_v, [k0 + j * HALF, kv_head * D], kv_full.index(0), s_v.index(j))
    i = 0
    for e in range(GROUP * edges):
        m = _edge_query(e % edges, k0, blocks, edges, BM)
        _load_query_block(d_q, d_do, p_lse2, p_delta, s_q, s_do, s_lse, s_delta, q_full, q_free, do_full, do_free, i, m,
                          end, kv_head * GROUP + e // edges, T4, STAGES, BM, D)  # fmt: skip
        i += 1
    for member in range(GROUP):
        for b in range(blocks - edges):
            m = k0 + 2 * HALF + b * BM
            _load_query_block(d_q, d_do, p_lse2, p_delta, s_q, s_do, s_lse, s_delta, q_full, q_free, do_full, do_free,
                              i, m, end, kv_head * GROUP + member, T4, STAGES, BM, D)  # fmt: skip
            i += 1


@gluon.jit
def _unhoisted(x):
    """``x``, opaque to LLVM: it would hoist the descriptors that derive from it, and the loop would spill."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _eight_rows(p_dq, head, m, T8, D: gl.constexpr, J: gl.constexpr):
    """Where in the sum [H, T8 / 8, D / 16, 8, 16] the eight rows around query ``m`` have column ``J * D / 2``."""
    return p_dq + (head.to(gl.int64) * T8 + m // 8 * 8) * D + J * (D // 2) * 8


@gluon.jit
def _add_rows(p_eight, shift, b_x, D: gl.constexpr):
    """Add half the columns of some rows, of which the first is ``shift`` below that of ``p_eight``, to the sum.

    A thread holds columns 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c of every 16. In the sum they adjoin, and so do the sixteens
    of eight rows: four floats an instruction, and 512 bytes a warp.
    """
    rows: gl.constexpr = b_x.shape[0]
    sixteens: gl.constexpr = b_x.shape[1] // 16
    b_even, b_odd = gl.split(b_x.reshape(rows, sixteens, 2, 4, 2).permute(0, 1, 3, 2, 4))
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    l_x: gl.constexpr = b_0.type.layout
    i_row = shift + gl.arange(0, rows, layout=gl.SliceLayout(1, gl.SliceLayout(2, l_x)))[:, None, None]
    i_16 = gl.arange(0, sixteens, layout=gl.SliceLayout(0, gl.SliceLayout(2, l_x)))[None, :, None]
    i_4 = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, l_x)))[None, None, :]
    p_x = p_eight + ((i_row >> 3) * (8 * D) + (i_row & 7) * 16 + i_4 * 4 + i_16 * 128)
    gl.inline_asm_elementwise("red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5};\nmov.b32 $0, 0;",
                              "=r,l,f,f,f,f", [p_x.to(gl.int64), b_0, b_1, b_2, b_3], dtype=gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@triton.jit(do_not_specialize=["T", "T8"])
def natural_order(p_sum, p_dq, scale, T, T8, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):
    """dQ [T, H, D] from the sum of ``key_gradients``. Reads up to ``BM`` rows beyond the last head's."""
    m = tl.program_id(0) * BM
    head = tl.program_id(1)
    b_dq = tl.load(p_sum + (head.to(tl.int64) * T8 + m) * D + tl.arange(0, BM * D))
    # By eight rows, sixteen columns, row, column's pair in its eight, column's eight, column in its pair.
    b_dq = b_dq.reshape(BM // 8, D // 16, 8, 4, 2, 2).permute(0, 2, 1, 4, 3, 5).reshape(BM, D)
    i_query = m + tl.arange(0, BM)
    p_rows = p_dq + (i_query.to(tl.int64)[:, None] * H + head) * D + tl.arange(0, D)[None, :]
    tl.store(p_rows, (b_dq * scale).to(p_dq.dtype.element_ty), mask=(i_query < T)[:, None])


@gluon.jit
def _query_step(b_dk, b_dv, p_eight, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds, q_full, q_free, do_full, do_free,
                ds_full, i, m, i_key, end, scale2, MASK: gl.constexpr, J: gl.constexpr, STAGES: gl.constexpr,
                BM: gl.constexpr, D: gl.constexpr, ACCUMULATE: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = s_q.dtype
    l_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    l_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    l_p: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=l_o, k_width=2)
    first = _unhoisted(0) if ACCUMULATE else 0
    stage = i % STAGES
    phase = (i // STAGES) & 1
    zero = gl.zeros((HALF, BM), gl.float32, l_s)
    mbarrier.wait(q_full.index(stage), phase)
    b_s = warpgroup_mma(s_k.index(first + J), s_q.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    b_dp = zero
    if ACCUMULATE:  # the product starts at -delta, which then takes no registers later on
        b_dp = zero - s_delta.index(stage).load(gl.SliceLayout(0, l_s))[None, :]
    b_dp = warpgroup_mma(s_v.index(first + J), s_do.index(stage).permute((1, 0)), b_dp, use_acc=ACCUMULATE,
                         is_async=True)  # fmt: skip
    b_lse = s_lse.index(stage).load(gl.SliceLayout(0, l_s))
    b_s = warpgroup_mma_wait(num_outstanding=1, deps=(b_s,))  # [HALF, BM]
    b_p = gl.exp2(b_s * scale2 - b_lse[None, :])
    if MASK:
        i_query = m + gl.arange(0, BM, layout=gl.SliceLayout(0, l_s))
        b_p = gl.where((i_query < end)[None, :] & (i_key[:, None] <= i_query[None, :]), b_p, 0.0)
    b_weights = gl.convert_layout(b_p.to(dtype), l_p)
    b_dp = warpgroup_mma_wait(num_outstanding=0, deps=(b_dp,))  # [HALF, BM]
    b_dv = warpgroup_mma(b_weights, s_do.index(stage), b_dv, is_async=True)
    if ACCUMULATE:
        b_ds = (b_p * b_dp).to(dtype)
        # Both consumers' dS makes dQ, of which each takes half the columns. Two buffers: whoever is past the wait for
        # the next dS knows that the other has finished with this one.
        buffer = i & 1
        s_ds.index(2 * buffer + J).store(b_ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buffer), count=1)
        mbarrier.wait(ds_full.index(buffer), (i // 2) & 1)
        b_dq = gl.zeros((BM, D // 2), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16]))
        for j in gl.static_range(2):
            b_dq = warpgroup_mma(s_ds.index(2 * buffer + j).permute((1, 0)),
                                 s_k.index(first + j).slice(J * (D // 2), D // 2, dim=1), b_dq, use_acc=j > 0,
                                 is_async=True)  # fmt: skip
        # dS is in shared memory anyway: from there, dK's product runs on while the warps pass dQ on.
        b_dk = warpgroup_mma(s_ds.index(2 * buffer + J), s_q.index(stage), b_dk, is_async=True)
        b_dv, b_dq = warpgroup_mma_wait(num_outstanding=1, deps=(b_dv, b_dq))
        mbarrier.arrive(do_free.index(stage), count=1)
        _add_rows(p_eight, m & 7, b_dq, D)
    else:
        b_delta = s_delta.index(stage).load(gl.SliceLayout(0, l_s))
        b_ds = (b_p * (b_dp - b_delta[None, :])).to(dtype)
        b_dk = warpgroup_mma(gl.convert_layout(b_ds, l_p), s_q.index(stage), b_dk, is_async=True)
        b_dv = warpgroup_mma_wait(num_outstanding=1, deps=(b_dv,))
        mbarrier.arrive(do_free.index(stage), count=1)
    b_dk = warpgroup_mma_wait(num_outstanding=0, deps=(b_dk,))
    mbarrier.arrive(q_free.index(stage), count=1)
    return b_dk, b_dv


@gluon.jit
def _consume_queries(p_dq, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds, kv_full, q_full, q_free, do_full, do_free,
                     ds_full, p_dk, p_dv, scale2, scale, T8, k0, k1, end, kv_head, blocks, edges, J: gl.constexpr,
                     HK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr, D: gl.constexpr,
                     ACCUMULATE: gl.constexpr):  # fmt: skip
    l_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    l_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    i_key = k0 + J * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, l_s))
    i_key = gl.where(i_key < k1, i_key, 2147483647)  # another segment's keys: seen by no query
    b_dk = gl.zeros((HALF, D), gl.float32, l_o)
    b_dv = gl.zeros((HALF, D), gl.float32, l_o)
    mbarrier.wait(kv_full.index(0), 0)
    for e in range(GROUP * edges):
        m = _edge_query(e % edges, k0, blocks, edges, BM)
        p_eight = _eight_rows(p_dq, kv_head * GROUP + e // edges, m, T8, D, J)
        b_dk, b_dv = _query_step(b_dk, b_dv, p_eight, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds, q_full, q_free,
                                 do_full, do_free, ds_full, e, m, i_key, end, scale2, True, J, STAGES, BM, D,
                                 ACCUMULATE)  # fmt: skip
    i = GROUP * edges
    for member in range(GROUP):
        m = k0 + 2 * HALF
        p_eight = _eight_rows(p_dq, kv_head * GROUP + member, m, T8, D, J)
        for _ in range(blocks - edges):
            b_dk, b_dv = _query_step(b_dk, b_dv, p_eight, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds, q_full, q_free,
                                     do_full, do_free, ds_full, i, m, i_key, end, scale2, False, J, STAGES, BM, D,
                                     ACCUMULATE)  # fmt: skip
            i += 1
            m += BM
            p_eight += BM * D
    i_out = k0 + J * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, l_o))
    i_dim = gl.arange(0, D, layout=gl.SliceLayout(0, l_o))
    offset = i_out.to(gl.int64)[:, None] * (HK * D) + kv_head * D + i_dim[None, :]
    gl.store(p_dk + offset, (b_dk * scale).to(s_q.dtype), mask=(i_out < k1)[:, None])
    gl.store(p_dv + offset, b_dv.to(s_q.dtype), mask=(i_out < k1)[:, None])


@gluon.jit(do_not_specialize=["T4", "T8"])
def key_gradients(d_q, d_k, d_v, d_do, p_dq, p_lse2, p_delta, p_dk, p_dv, p_tiles, scale2, scale, T4, T8,
                  HK: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
                  ACCUMULATE: gl.constexpr):  # fmt: skip
    """dK and dV of a tile of keys; with ``ACCUMULATE``, these keys' part of dQ / scale is added to ``p_dq`` too.

    Zeros are added to up to ``BM`` rows beyond a segment's end, and so beyond the last head's rows.
    """
    pid = gl.program_id(0)
    kv_head = pid % HK
    tile = p_tiles + pid // HK * 4
    k0 = gl.load(tile)
    k1 = gl.load(tile + 1)
    end = gl.load(tile + 2)
    blocks = (end - k0 + BM - 1) // BM
    diagonal: gl.constexpr = 2 * HALF // BM
    edges = gl.minimum(blocks, diagonal + gl.where((end - k0) % BM > 0, 1, 0))
    if ACCUMULATE:
        # Rows of dK and dV beyond the segment are not stored, but in dQ they would be summed: mask every block.
        edges = gl.where(k1 < k0 + 2 * HALF, blocks, edges)
    s_k = gl.allocate_shared_memory(d_k.dtype, [2] + d_k.block_type.shape, d_k.layout)
    s_v = gl.allocate_shared_memory(d_v.dtype, [2] + d_v.block_type.shape, d_v.layout)
    s_q = gl.allocate_shared_memory(d_q.dtype, [STAGES] + d_q.block_type.shape, d_q.layout)
    s_do = gl.allocate_shared_memory(d_do.dtype, [STAGES] + d_do.block_type.shape, d_do.layout)
    l_stat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BM], l_stat)
    s_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BM], l_stat)
    kv_full = barriers(1, 1)
    # Without ACCUMULATE, other memory stands for what is not there. A barrier that is initialised and then used by nobody
    # made the kernel hang once another process computed on the GPU: its memory is taken for what the partitions are passed.
    s_ds, ds_full = s_k, kv_full
    if ACCUMULATE:
        l_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BM], d_q.dtype)
        s_ds = gl.allocate_shared_memory(d_q.dtype, [4, HALF, BM], l_ds)
        ds_full = barriers(2, 2)
    q_full = barriers(STAGES, 2)
    do_full = barriers(STAGES, 2)
    q_free = barriers(STAGES, 2)
    do_free = barriers(STAGES, 2)
    gl.warp_specialize([
        (_consume_queries, (p_dq, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds, kv_full, q_full, q_free, do_full,
                            do_free, ds_full, p_dk, p_dv, scale2, scale, T8, k0, k1, end, kv_head, blocks, edges,
                            gl.constexpr(0), HK, GROUP, STAGES, BM, D, ACCUMULATE)),
        (_consume_queries, (p_dq, s_k, s_v, s_q, s_do, s_lse, s_delta, s_ds, kv_full, q_full, q_free, do_full,
                            do_free, ds_full, p_dk, p_dv, scale2, scale, T8, k0, k1, end, kv_head, blocks, edges,
                            gl.constexpr(1), HK, GROUP, STAGES, BM, D, ACCUMULATE)),
        (_load_queries, (d_q, d_k, d_v, d_do, p_lse2, p_delta, s_k, s_v, s_q, s_do, s_lse, s_delta, kv_full, q_full,
                         q_free, do_full, do_free, k0, end, kv_head, blocks, edges, T4, GROUP, STAGES, BM, D)),
    ], [4, 1], [240, 24])  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- dQ


@gluon.jit
def _load_keys(d_q, d_do, d_k, d_v, s_q, s_do, s_k, s_v, q_full, k_full, k_free, v_full, v_free, q0, head, kv_head, p0,
               n_prefix, s0, blocks, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):  # fmt: skip
    for j in gl.static_range(2):
        mbarrier.expect(q_full.index(j), d_q.block_type.nbytes + d_do.block_type.nbytes)
        tma.async_copy_global_to_shared(d_q, [q0 + j * HALF, head * D], q_full.index(j), s_q.index(j))
        tma.async_copy_global_to_shared(d_do, [q0 + j * HALF, head * D], q_full.index(j), s_do.index(j))
    for i in range(blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        key = first_key(i, n_prefix, p0, s0, BN)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), d_v.block_type.nbytes)
        tma.async_copy_global_to_shared(d_v, [key, kv_head * D], v_full.index(stage), s_v.index(stage))
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), d_k.block_type.nbytes)
        tma.async_copy_global_to_shared(d_k, [key, kv_head * D], k_full.index(stage), s_k.index(stage))


@gluon.jit
def _consume_keys(s_q, s_do, s_k, s_v, q_full, k_full, k_free, v_full, v_free, p_dq, p_lse2, p_delta, scale2, scale, T4,
                  q0, q1, head, p0, p1, n_prefix, s0, blocks, own_full, J: gl.constexpr, H: gl.constexpr,
                  STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = s_k.dtype
    l_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    l_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    l_p: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=l_o, k_width=2)
    i_row = q0 + J * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, l_s))
    i_col = gl.arange(0, BN, layout=gl.SliceLayout(0, l_s))
    zero = gl.zeros((HALF, BN), gl.float32, l_s)
    b_dq = gl.zeros((HALF, D), gl.float32, l_o)
    b_lse = gl.load(p_lse2 + head.to(gl.int64) * T4 + i_row, mask=i_row < q1, other=float("inf"))
    b_delta = gl.load(p_delta + head.to(gl.int64) * T4 + i_row, mask=i_row < q1, other=0.0)
    mbarrier.wait(q_full.index(J), 0)
    b_q = s_q.index(J)
    b_do = s_do.index(J)
    for i in range(blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(v_full.index(stage), phase)
        b_dp = warpgroup_mma(b_do, s_v.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(k_full.index(stage), phase)
        b_s = warpgroup_mma(b_q, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_dp = warpgroup_mma_wait(num_outstanding=1, deps=(b_dp,))
        mbarrier.arrive(v_free.index(stage), count=1)
        b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))
        b_p = gl.exp2(b_s * scale2 - b_lse[:, None])
        if (i == n_prefix - 1) | (i >= n_prefix + own_full):
            b_p = gl.where(visible(i, n_prefix, p0, p1, s0, i_row, i_col, BN), b_p, 0.0)
        b_ds = gl.convert_layout((b_p * (b_dp - b_delta[:, None])).to(dtype), l_p)
        b_dq = warpgroup_mma(b_ds, s_k.index(stage), b_dq, is_async=True)
        b_dq = warpgroup_mma_wait(num_outstanding=0, deps=(b_dq,))
        mbarrier.arrive(k_free.index(stage), count=1)
    i_out = q0 + J * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, l_o))
    i_dim = gl.arange(0, D, layout=gl.SliceLayout(0, l_o))
    p_rows = p_dq + i_out.to(gl.int64)[:, None] * (H * D) + head * D + i_dim[None, :]
    gl.store(p_rows, (b_dq * scale).to(dtype), mask=(i_out < q1)[:, None])


@gluon.jit(do_not_specialize=["T4"])
def query_gradients(d_q, d_do, d_k, d_v, p_dq, p_lse2, p_delta, p_tiles, scale2, scale, T4, H: gl.constexpr,
                    GROUP: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    head, q0, q1, p0, p1, n_prefix, s0, blocks, own_full = query_tile(p_tiles, H, BN)
    s_q = gl.allocate_shared_memory(d_q.dtype, [2] + d_q.block_type.shape, d_q.layout)
    s_do = gl.allocate_shared_memory(d_do.dtype, [2] + d_do.block_type.shape, d_do.layout)
    s_k = gl.allocate_shared_memory(d_k.dtype, [STAGES] + d_k.block_type.shape, d_k.layout)
    s_v = gl.allocate_shared_memory(d_v.dtype, [STAGES] + d_v.block_type.shape, d_v.layout)
    q_full = barriers(2, 1)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    gl.warp_specialize([
        (_consume_keys, (s_q, s_do, s_k, s_v, q_full, k_full, k_free, v_full, v_free, p_dq, p_lse2, p_delta, scale2,
                         scale, T4, q0, q1, head, p0, p1, n_prefix, s0, blocks, own_full, gl.constexpr(0), H, STAGES,
                         BN, D)),
        (_consume_keys, (s_q, s_do, s_k, s_v, q_full, k_full, k_free, v_full, v_free, p_dq, p_lse2, p_delta, scale2,
                         scale, T4, q0, q1, head, p0, p1, n_prefix, s0, blocks, own_full, gl.constexpr(1), H, STAGES,
                         BN, D)),
        (_load_keys, (d_q, d_do, d_k, d_v, s_q, s_do, s_k, s_v, q_full, k_full, k_free, v_full, v_free, q0, head,
                      head // GROUP, p0, n_prefix, s0, blocks, STAGES, BN, D)),
    ], [4, 1], [240, 24])  # fmt: skip
