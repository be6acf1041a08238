"""Portable Triton kernels: every head dim, dtype, window, soft cap, sink and hidden key, on any GPU; interpretable.

Names: ``b_`` block, ``p_`` pointer, ``i_`` index, ``m_`` mask. ``BM`` queries and ``BN`` keys a block; ``DQ``, ``DV``
head dims, ``BDQ``, ``BDV`` the powers of two that hold them. Tiles of ``TILE`` tokens come from the tables; a program
takes ``BM`` (or ``BN``) tokens of one. Scores are in units of log2. Offsets are 64-bit. No atomics: every output
element has one writer, and sums run in a fixed order. What varies with the batch is not specialised on: a new length
compiles nothing.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(p_x, i_token, stride_token, D: tl.constexpr, BD: tl.constexpr, m_token):
    """Rows of a [T, D] matrix whose last stride is 1; zeros where masked."""
    i_dim = tl.arange(0, BD)
    mask = m_token[:, None] & (i_dim < D)[None, :]
    return tl.load(p_x + i_token.to(tl.int64)[:, None] * stride_token + i_dim[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(p_x, i_token, stride_token, b_x, D: tl.constexpr, BD: tl.constexpr, m_token):
    i_dim = tl.arange(0, BD)
    mask = m_token[:, None] & (i_dim < D)[None, :]
    p_x += i_token.to(tl.int64)[:, None] * stride_token + i_dim[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _scores(b_qk, scale, softcap, SOFTCAP: tl.constexpr):
    """(scores in log2 units, d score / d (scaled product))."""
    if SOFTCAP:
        b_tanh = 2 * tl.sigmoid(2 * b_qk * (scale / softcap)) - 1
        return b_tanh * (softcap * LOG2E), 1 - b_tanh * b_tanh
    else:
        return b_qk * (scale * LOG2E), 1.0


@triton.jit
def _key_range(part, q0, q1, p0, p1, s0, p_column, window, BM: tl.constexpr, WINDOW: tl.constexpr):
    """Keys [lo, hi) of the prefix (part 0) or the own segment (part 1), and column[q] - q - (column[j] - j)."""
    if part == 0:
        shift = 0
        lo = p0
        hi = p1
        if WINDOW:
            if p1 > p0:
                shift = tl.load(p_column + s0) - s0 - tl.load(p_column + p0) + p0
            lo = tl.maximum(p0, tl.minimum(p1, q0 + shift - window + 1))
    else:
        shift = 0
        lo = s0
        hi = tl.minimum(q0 + BM, q1)
        if WINDOW:
            lo = tl.maximum(s0, q0 - window + 1)
    return lo, hi, shift


@triton.jit
def _query_tile(p_tiles, H: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0)
    SUB: tl.constexpr = TILE // BM
    tile = p_tiles + pid // (H * SUB) * 8
    q0 = tl.load(tile)
    q1 = tl.minimum(tl.load(tile + 1), q0 + TILE)
    q0 += pid // H % SUB * BM
    return pid % H, q0, q1, tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@triton.jit(do_not_specialize=["window", "T"])
def forward(
    p_q, p_k, p_v, p_out, p_lse, p_sinks, p_tiles, p_column, p_end,
    scale, window, softcap, T, s_qh, s_qt, s_kh, s_kt, s_vh, s_vt,
    H: tl.constexpr, GROUP: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, BDQ: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(TILE % BM == 0)
    head, q0, q1, p0, p1, s0 = _query_tile(p_tiles, H, BM, TILE)
    if q0 < q1:
        i_q = q0 + tl.arange(0, BM)
        m_q = i_q < q1
        p_k += (head // GROUP).to(tl.int64) * s_kh
        p_v += (head // GROUP).to(tl.int64) * s_vh
        b_q = _rows(p_q + head.to(tl.int64) * s_qh, i_q, s_qt, DQ, BDQ, m_q)  # [BM, BDQ]
        b_max = tl.full([BM], -float("inf"), tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        if SINKS:
            b_max = tl.full([BM], 0.0, tl.float32) + tl.load(p_sinks + head).to(tl.float32) * LOG2E
            b_sum += 1.0
        b_acc = tl.zeros([BM, BDV], tl.float32)
        for part in tl.static_range(2):
            lo, hi, shift = _key_range(part, q0, q1, p0, p1, s0, p_column, window, BM, WINDOW)
            for n in range(lo, hi, BN):
                i_k = n + tl.arange(0, BN)
                m_k = i_k < hi
                b_k = _rows(p_k, i_k, s_kt, DQ, BDQ, m_k)  # [BN, BDQ]
                b_s, _ = _scores(_dot(b_q, tl.trans(b_k), PRECISION), scale, softcap, SOFTCAP)  # [BM, BN]
                see = m_k[None, :] & (i_k[None, :] <= i_q[:, None])
                if WINDOW:
                    see = see & (i_q[:, None] + shift - i_k[None, :] < window)
                if HIDDEN:
                    b_end = tl.load(p_end + i_k, mask=m_k, other=0)
                    see = see & (i_q[:, None] < b_end[None, :])
                b_s = tl.where(see, b_s, -float("inf"))
                b_new = tl.maximum(b_max, tl.max(b_s, 1))
                b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
                b_p = tl.exp2(b_s - b_safe[:, None])
                b_scale = tl.exp2(b_max - b_safe)
                b_sum = b_sum * b_scale + tl.sum(b_p, 1)
                b_v = _rows(p_v, i_k, s_vt, DV, BDV, m_k)  # [BN, BDV]
                b_acc = b_acc * b_scale[:, None] + _dot(b_p.to(b_v.dtype), b_v, PRECISION)
                b_max = b_new
        b_acc = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
        b_lse = tl.where(b_sum == 0, -float("inf"), (b_max + tl.log2(b_sum)) / LOG2E)
        tl.store(p_lse + head.to(tl.int64) * T + i_q, b_lse, mask=m_q)
        _store_rows(p_out + head * DV, i_q, H * DV, b_acc, DV, BDV, m_q)


@triton.jit(do_not_specialize=["T", "T4"])
def statistics(
    p_out, p_dout, p_lse, p_dlse, p_delta, p_lse2, T, T4, s_doh, s_dot,
    H: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * dout) - dlse, and lse in units of log2; in rows of ``T4`` elements."""
    head = tl.program_id(1)
    i_q = tl.program_id(0) * BM + tl.arange(0, BM)
    m_q = i_q < T
    b_out = _rows(p_out + head * DV, i_q, H * DV, DV, BDV, m_q).to(tl.float32)
    b_dout = _rows(p_dout + head.to(tl.int64) * s_doh, i_q, s_dot, DV, BDV, m_q).to(tl.float32)
    b_delta = tl.sum(b_out * b_dout, 1)
    i_from = head.to(tl.int64) * T + i_q
    i_to = head.to(tl.int64) * T4 + i_q
    if DLSE:
        b_delta -= tl.load(p_dlse + i_from, mask=m_q, other=0.0)
    tl.store(p_delta + i_to, b_delta, mask=i_q < T4)
    tl.store(p_lse2 + i_to, tl.load(p_lse + i_from, mask=m_q, other=0.0) * LOG2E, mask=i_q < T4)


@triton.jit(do_not_specialize=["window", "T4"])
def key_gradients(
    p_q, p_k, p_v, p_dout, p_dk, p_dv, p_lse2, p_delta, p_tiles, p_column, p_end,
    scale, window, softcap, T4, s_qh, s_qt, s_kh, s_kt, s_vh, s_vt, s_doh, s_dot,
    HK: tl.constexpr, GROUP: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, BDQ: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of ``BN`` keys of one KV head: all queries of all its heads that see them."""
    tl.static_assert(TILE % BN == 0)
    pid = tl.program_id(0)
    SUB: tl.constexpr = TILE // BN
    tile = p_tiles + pid // (HK * SUB) * 4
    k0 = tl.load(tile)
    k1 = tl.minimum(tl.load(tile + 1), k0 + TILE)
    end = tl.load(tile + 2)
    k0 += pid // HK % SUB * BN
    kv_head = pid % HK
    if k0 < k1:
        i_k = k0 + tl.arange(0, BN)
        m_k = i_k < k1
        b_k = _rows(p_k + kv_head.to(tl.int64) * s_kh, i_k, s_kt, DQ, BDQ, m_k)  # [BN, BDQ]
        b_v = _rows(p_v + kv_head.to(tl.int64) * s_vh, i_k, s_vt, DV, BDV, m_k)  # [BN, BDV]
        b_dk = tl.zeros([BN, BDQ], tl.float32)
        b_dv = tl.zeros([BN, BDV], tl.float32)
        b_end = tl.zeros([BN], tl.int32) + end
        if HIDDEN:
            b_end = tl.load(p_end + i_k, mask=m_k, other=0)
        column = 0
        if WINDOW:
            column = tl.load(p_column + k0) - k0
        for member in range(GROUP):
            head = (kv_head * GROUP + member).to(tl.int64)
            for m in range(k0, end, BM):
                i_q = m + tl.arange(0, BM)
                m_q = i_q < end
                see = m_q[None, :] & (i_k[:, None] <= i_q[None, :]) & m_k[:, None]
                if HIDDEN:
                    see = see & (i_q[None, :] < b_end[:, None])
                some = True
                if WINDOW:
                    b_column = tl.load(p_column + i_q, mask=m_q, other=2147483647)
                    some = tl.min(b_column) - column - k1 < window
                    see = see & (b_column[None, :] - column - i_k[:, None] < window)
                if some:
                    b_q = _rows(p_q + head * s_qh, i_q, s_qt, DQ, BDQ, m_q)  # [BM, BDQ]
                    b_do = _rows(p_dout + head * s_doh, i_q, s_dot, DV, BDV, m_q)  # [BM, BDV]
                    b_lse = tl.load(p_lse2 + head * T4 + i_q, mask=m_q, other=0.0)
                    b_delta = tl.load(p_delta + head * T4 + i_q, mask=m_q, other=0.0)
                    b_s, b_slope = _scores(_dot(b_k, tl.trans(b_q), PRECISION), scale, softcap, SOFTCAP)  # [BN, BM]
                    b_p = tl.where(see, tl.exp2(b_s - b_lse[None, :]), 0.0)
                    b_dv += _dot(b_p.to(b_do.dtype), b_do, PRECISION)
                    b_dp = _dot(b_v, tl.trans(b_do), PRECISION)  # [BN, BM]
                    b_ds = b_p * (b_dp - b_delta[None, :]) * b_slope
                    b_dk += _dot(b_ds.to(b_q.dtype), b_q, PRECISION)
        _store_rows(p_dk + kv_head * DQ, i_k, HK * DQ, b_dk * scale, DQ, BDQ, m_k)
        _store_rows(p_dv + kv_head * DV, i_k, HK * DV, b_dv, DV, BDV, m_k)


@triton.jit(do_not_specialize=["window", "T4"])
def query_gradients(
    p_q, p_k, p_v, p_dout, p_dq, p_lse2, p_delta, p_tiles, p_column, p_end,
    scale, window, softcap, T4, s_qh, s_qt, s_kh, s_kt, s_vh, s_vt, s_doh, s_dot,
    H: tl.constexpr, GROUP: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr, BDQ: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(TILE % BM == 0)
    head, q0, q1, p0, p1, s0 = _query_tile(p_tiles, H, BM, TILE)
    if q0 < q1:
        i_q = q0 + tl.arange(0, BM)
        m_q = i_q < q1
        p_k += (head // GROUP).to(tl.int64) * s_kh
        p_v += (head // GROUP).to(tl.int64) * s_vh
        b_q = _rows(p_q + head.to(tl.int64) * s_qh, i_q, s_qt, DQ, BDQ, m_q)  # [BM, BDQ]
        b_do = _rows(p_dout + head.to(tl.int64) * s_doh, i_q, s_dot, DV, BDV, m_q)  # [BM, BDV]
        b_lse = tl.load(p_lse2 + head.to(tl.int64) * T4 + i_q, mask=m_q, other=0.0)
        b_delta = tl.load(p_delta + head.to(tl.int64) * T4 + i_q, mask=m_q, other=0.0)
        b_dq = tl.zeros([BM, BDQ], tl.float32)
        for part in tl.static_range(2):
            lo, hi, shift = _key_range(part, q0, q1, p0, p1, s0, p_column, window, BM, WINDOW)
            for n in range(lo, hi, BN):
                i_k = n + tl.arange(0, BN)
                m_k = i_k < hi
                b_k = _rows(p_k, i_k, s_kt, DQ, BDQ, m_k)  # [BN, BDQ]
                b_v = _rows(p_v, i_k, s_vt, DV, BDV, m_k)  # [BN, BDV]
                b_s, b_slope = _scores(_dot(b_q, tl.trans(b_k), PRECISION), scale, softcap, SOFTCAP)  # [BM, BN]
                see = m_k[None, :] & (i_k[None, :] <= i_q[:, None])
                if WINDOW:
                    see = see & (i_q[:, None] + shift - i_k[None, :] < window)
                if HIDDEN:
                    b_end = tl.load(p_end + i_k, mask=m_k, other=0)
                    see = see & (i_q[:, None] < b_end[None, :])
                b_p = tl.where(see, tl.exp2(b_s - b_lse[:, None]), 0.0)
                b_dp = _dot(b_do, tl.trans(b_v), PRECISION)  # [BM, BN]
                b_ds = b_p * (b_dp - b_delta[:, None]) * b_slope
                b_dq += _dot(b_ds.to(b_k.dtype), b_k, PRECISION)
        _store_rows(p_dq + head * DQ, i_q, H * DQ, b_dq * scale, DQ, BDQ, m_q)
