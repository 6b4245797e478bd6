"""Kernels of the chunked gated delta rule with one gate per head and token.

With G the gate summed inside a chunk (here in base 2), D_ij = 2^(G_i - G_j) and normalised q, k:

    N = strict_lower(D * k kᵀ)        A = scale * lower(D * q kᵀ)         C = N (I + diag(beta) N)^-1
    X = v - 2^G k S                   Y = X - C (beta X)                  U = beta Y
    o = scale 2^G q S + A U           S' = 2^γ S + kᵀ (2^(γ-G) U)          γ = G of the chunk's last token

C instead of the usual T = (I + diag(beta) N)^-1 = I - diag(beta) C keeps the identity exact when C is rounded, and
gives d beta without a division. Backward, with dS' the gradient of the state that leaves the chunk:

    dU = Aᵀ do + 2^(γ-G) k dS'        dP = dU - Cᵀ (beta dU)              dv = dX = beta dP
    dS = 2^γ dS' + scale qᵀ (2^G do) - kᵀ (2^G dX)

Everything else needs only do, Y, dX, S and dS' of its own chunk: `gradients_kernel`. Q·K-normalisation is a factor per
row, so normalised q and k are never stored. All sums are fp32; operands of a dot are rounded to the inputs' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)  # of the l2 norm
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _merge(b_c, b_n, b_beta, PREC: tl.constexpr):
    """One level of the blocked inverse: b_c [., M, M] block diagonal, b_n the blocks of N that join its pairs."""
    b_t = b_n - tl.dot(b_n * b_beta, b_c, input_precision=PREC)
    return b_c + b_t - tl.dot(b_c * b_beta, b_t, input_precision=PREC)


@triton.jit
def _solve(b_n, b_beta, PREC: tl.constexpr):
    """C = N (I + diag(beta) N)^-1 for strictly lower N [64, 64], by block forward substitution in fp32.

    Returns the blocks C11, C21, C22 [32, 32]; C12 is zero. Blocks double from 1 to 32 rows; each level is
    C21 = (I - C22 diag(beta2)) N21 (I - diag(beta1) C11), which no power of N enters.
    """
    o_2 = tl.arange(0, 2)
    o_16 = tl.arange(0, 16)
    b_n4 = tl.reshape(b_n, [2, 32, 2, 32])
    same = (o_2[:, None] == o_2[None, :])[:, None, :, None]
    b_n2 = tl.sum(tl.where(same, b_n4, 0.0), 2)  # [2, 32, 32] diagonal blocks
    b_n21 = tl.sum(tl.sum(tl.where((o_2 == 0)[None, None, :, None], b_n4, 0.0), 2) * o_2[:, None, None], 0)
    b_n5 = tl.reshape(b_n2, [2, 2, 16, 2, 16])
    same = (o_2[:, None] == o_2[None, :])[None, :, None, :, None]
    b_n16 = tl.reshape(tl.sum(tl.where(same, b_n5, 0.0), 3), [4, 16, 16])

    b_beta16 = tl.reshape(b_beta, [4, 16])[:, None, :]
    b_c = tl.where(((o_16[:, None] % 2 == 1) & (o_16[None, :] == o_16[:, None] - 1))[None, :, :], b_n16, 0.0)
    for level in tl.static_range(1, 4):
        size: tl.constexpr = 2**level
        o_b = o_16 // size
        joins = (o_b[:, None] % 2 == 1) & (o_b[None, :] == o_b[:, None] - 1)
        b_c = _merge(b_c, tl.where(joins[None, :, :], b_n16, 0.0), b_beta16, PREC)

    b_c5 = tl.where(same, tl.reshape(b_c, [2, 2, 16, 16])[:, :, :, None, :], 0.0)
    joins = ((o_2[:, None] == 1) & (o_2[None, :] == 0))[None, :, None, :, None]
    b_off = tl.reshape(tl.where(joins, b_n5, 0.0), [2, 32, 32])
    b_c2 = _merge(tl.reshape(b_c5, [2, 32, 32]), b_off, tl.reshape(b_beta, [2, 32])[:, None, :], PREC)

    b_c11, b_c22 = tl.split(tl.permute(b_c2, (1, 2, 0)))
    b_beta1, b_beta2 = tl.split(tl.permute(tl.reshape(b_beta, [2, 32]), (1, 0)))
    b_t = b_n21 - tl.dot(b_n21 * b_beta1[None, :], b_c11, input_precision=PREC)
    b_c21 = b_t - tl.dot(b_c22 * b_beta2[None, :], b_t, input_precision=PREC)
    return b_c11, b_c21, b_c22


@triton.jit
def prepare_kernel(
    q,  # [T, H, K]
    k,  # [T, H, K]
    g,  # [T, HV]
    beta,  # [T, HV]
    A_log,  # [HV]
    dt_bias,  # [HV]
    C,  # [NT, HV, BT, BT]
    A,  # [NT, HV, BT, BT]
    gates,  # [NT, HV, 2, BT] fp32: G in base 2, beta; past the end of a document the last G, and zero
    norms,  # [NT, H, 2, BT] fp32: 1 / |q|, 1 / |k|
    cu_seqlens,
    table,
    scale,
    stride_q,
    stride_k,
    HV,
    R: tl.constexpr,  # value heads per key head
    K: tl.constexpr,
    BT: tl.constexpr,
    GATE: tl.constexpr,
    DT_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    PREC: tl.constexpr,
):
    i_hv = tl.program_id(0) % HV
    i_t = tl.program_id(0) // HV
    i_n, i_c = tl.load(table + 2 * i_t), tl.load(table + 2 * i_t + 1)
    if i_n < 0:
        return
    i_h = i_hv // R
    bos, eos = tl.load(cu_seqlens + i_n), tl.load(cu_seqlens + i_n + 1)
    o_c = tl.arange(0, BT)
    o_t = (bos + i_c * BT + o_c).to(tl.int64)
    m_t = o_t < eos
    o_k = tl.arange(0, K)

    b_g = tl.load(g + o_t * HV + i_hv, mask=m_t, other=0.0).to(tl.float32)
    if GATE:
        if DT_BIAS:
            b_g += tl.load(dt_bias + i_hv).to(tl.float32)
        b_g = tl.where(m_t, -tl.exp(tl.load(A_log + i_hv).to(tl.float32)) * _softplus(b_g), 0.0)
    b_G = tl.cumsum(b_g * LOG2E, 0)
    b_beta = tl.load(beta + o_t * HV + i_hv, mask=m_t, other=0.0).to(tl.float32)
    p_g = gates + (i_t.to(tl.int64) * HV + i_hv) * 2 * BT + o_c
    tl.store(p_g, b_G)
    tl.store(p_g + BT, b_beta)

    b_q = tl.load(q + o_t[:, None] * stride_q + i_h * K + o_k[None, :], mask=m_t[:, None], other=0.0)  # [BT, K]
    b_k = tl.load(k + o_t[:, None] * stride_k + i_h * K + o_k[None, :], mask=m_t[:, None], other=0.0)  # [BT, K]
    b_rk = tl.full([BT], 1.0, tl.float32)
    b_rq = b_rk
    if NORM:
        b_rq = tl.rsqrt(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) + EPS)
        b_rk = tl.rsqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1) + EPS)
        if i_hv % R == 0:
            p_n = norms + (i_t.to(tl.int64) * (HV // R) + i_h) * 2 * BT + o_c
            tl.store(p_n, b_rq)
            tl.store(p_n + BT, b_rk)

    m_l = o_c[:, None] >= o_c[None, :]
    b_d = tl.where(m_l, tl.exp2(tl.where(m_l, b_G[:, None] - b_G[None, :], 0.0)), 0.0) * b_rk[None, :]  # [BT, BT]
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * b_d * (scale * b_rq)[:, None]
    p_a = (i_t.to(tl.int64) * HV + i_hv) * BT * BT + o_c[:, None] * BT + o_c[None, :]
    tl.store(A + p_a, b_a.to(A.dtype.element_ty))
    b_n = tl.dot(b_k, tl.trans(b_k), input_precision=PREC) * b_d * b_rk[:, None]
    b_n = tl.where(o_c[:, None] > o_c[None, :], b_n, 0.0)

    b_c11, b_c21, b_c22 = _solve(b_n, b_beta, "tf32x3")
    o_32 = tl.arange(0, 32)
    p_c = C + (i_t.to(tl.int64) * HV + i_hv) * BT * BT + o_32[:, None] * BT + o_32[None, :]
    tl.store(p_c, b_c11.to(C.dtype.element_ty))
    tl.store(p_c + 32, tl.zeros([32, 32], C.dtype.element_ty))
    tl.store(p_c + 32 * BT, b_c21.to(C.dtype.element_ty))
    tl.store(p_c + 32 * BT + 32, b_c22.to(C.dtype.element_ty))


@triton.jit
def _load_gates(gates, norms, i_t, i_hv, HV, R: tl.constexpr, BT: tl.constexpr, NORM: tl.constexpr):
    """G, beta, 1 / |q|, 1 / |k| of chunk i_t, each [BT], and its last G."""
    o_c = tl.arange(0, BT)
    p_g = gates + (i_t * HV + i_hv) * 2 * BT
    b_G, b_beta = tl.load(p_g + o_c), tl.load(p_g + BT + o_c)
    b_last = tl.load(p_g + BT - 1)
    b_rq = tl.full([BT], 1.0, tl.float32)
    b_rk = b_rq
    if NORM:
        p_n = norms + (i_t * (HV // R) + i_hv // R) * 2 * BT + o_c
        b_rq, b_rk = tl.load(p_n), tl.load(p_n + BT)
    return b_G, b_beta, b_rq, b_rk, b_last


@triton.jit
def _scan(
    b_s,  # [K, BV] fp32, the state that enters
    q,
    k,
    v,
    C,
    A,
    gates,
    norms,
    o,
    h,
    y,
    bos,
    length,
    first,  # row of the entry's first chunk in the chunk tables
    i_hv,
    i_v,
    has_v,  # false: v counts as zero (the transition matrix)
    scale,
    stride_q,
    stride_k,
    stride_v,
    HV,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    OUTPUT: tl.constexpr,
    STORE: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """Scan one entry's chunks in order for one head and BV columns of the state; returns the state that leaves."""
    o_c, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    dtype = k.dtype.element_ty
    for i in tl.range(0, tl.cdiv(length, BT), num_stages=STAGES):
        o_t = bos + i * BT + o_c
        m_t = (i * BT + o_c < length)[:, None]
        i_t = first + i
        b_k = tl.load(k + o_t[:, None] * stride_k + (i_hv // R) * K + o_k[None, :], mask=m_t, other=0.0)  # [BT, K]
        b_v = tl.load(v + o_t[:, None] * stride_v + i_hv * V + o_v[None, :], mask=m_t & has_v, other=0.0)  # [BT, BV]
        p_c = (i_t * HV + i_hv) * BT * BT + o_c[:, None] * BT + o_c[None, :]
        b_c = tl.load(C + p_c)  # [BT, BT]
        b_G, b_beta, b_rq, b_rk, b_last = _load_gates(gates, norms, i_t, i_hv, HV, R, BT, NORM)
        b_e = tl.exp2(b_G)

        b_sd = b_s.to(dtype)
        if STORE:
            p_h = h + (i_t * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
            tl.store(p_h, b_sd)
        b_x = b_v.to(tl.float32) - (b_e * b_rk)[:, None] * tl.dot(b_k, b_sd, input_precision=PREC)
        b_y = b_x - tl.dot(b_c, (b_beta[:, None] * b_x).to(dtype), input_precision=PREC)  # [BT, BV]
        if STORE:
            tl.store(y + (o_t[:, None] * HV + i_hv) * V + o_v[None, :], b_y.to(dtype), mask=m_t)
        b_u = b_beta[:, None] * b_y
        if OUTPUT:
            b_q = tl.load(q + o_t[:, None] * stride_q + (i_hv // R) * K + o_k[None, :], mask=m_t, other=0.0)
            b_a = tl.load(A + p_c)
            b_o = (scale * b_e * b_rq)[:, None] * tl.dot(b_q, b_sd, input_precision=PREC)
            b_o += tl.dot(b_a, b_u.to(dtype), input_precision=PREC)
            tl.store(o + (o_t[:, None] * HV + i_hv) * V + o_v[None, :], b_o.to(dtype), mask=m_t)
        b_w = (tl.exp2(b_last - b_G) * b_rk)[:, None] * b_u
        b_s = b_s * tl.exp2(b_last) + tl.dot(tl.trans(b_k), b_w.to(dtype), input_precision=PREC)
    return b_s


@triton.jit
def _reverse_scan(
    b_ds,  # [K, BV] fp32, the gradient of the state that leaves
    q,
    k,
    do,
    C,
    gates,
    norms,
    dv,
    dh,
    bos,
    length,
    first,
    i_hv,
    i_v,
    scale,
    stride_q,
    stride_k,
    stride_do,
    HV,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """Scan one entry's chunks from the last to the first; returns the gradient of the state that enters."""
    o_c, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    m_u = o_c[:, None] <= o_c[None, :]
    dtype = k.dtype.element_ty
    chunks = tl.cdiv(length, BT)
    for j in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - j
        o_t = bos + i * BT + o_c
        m_t = (i * BT + o_c < length)[:, None]
        i_t = first + i
        b_k = tl.load(k + o_t[:, None] * stride_k + (i_hv // R) * K + o_k[None, :], mask=m_t, other=0.0)  # [BT, K]
        b_q = tl.load(q + o_t[:, None] * stride_q + (i_hv // R) * K + o_k[None, :], mask=m_t, other=0.0)  # [BT, K]
        b_do = tl.load(do + o_t[:, None] * stride_do + i_hv * V + o_v[None, :], mask=m_t, other=0.0)  # [BT, BV]
        b_c = tl.load(C + (i_t * HV + i_hv) * BT * BT + o_c[:, None] * BT + o_c[None, :])  # [BT, BT]
        b_G, b_beta, b_rq, b_rk, b_last = _load_gates(gates, norms, i_t, i_hv, HV, R, BT, NORM)

        b_dsd = b_ds.to(dtype)
        if STORE:
            tl.store(dh + (i_t * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :], b_dsd)
        b_at = tl.dot(b_k, tl.trans(b_q), input_precision=PREC) * b_rk[:, None] * (scale * b_rq)[None, :]
        b_at = tl.where(m_u, b_at * tl.exp2(tl.where(m_u, b_G[None, :] - b_G[:, None], 0.0)), 0.0)
        b_du = (tl.exp2(b_last - b_G) * b_rk)[:, None] * tl.dot(b_k, b_dsd, input_precision=PREC)
        b_du += tl.dot(b_at.to(dtype), b_do, input_precision=PREC)  # [BT, BV]
        b_dp = b_du - tl.dot(tl.trans(b_c), (b_beta[:, None] * b_du).to(dtype), input_precision=PREC)
        b_dx = b_beta[:, None] * b_dp
        if STORE:
            tl.store(dv + (o_t[:, None] * HV + i_hv) * V + o_v[None, :], b_dx.to(dtype), mask=m_t)
        b_e = tl.exp2(b_G)
        b_ds *= tl.exp2(b_last)
        b_ds += tl.dot(tl.trans(b_q), ((scale * b_e * b_rq)[:, None] * b_do).to(dtype), input_precision=PREC)
        b_ds -= tl.dot(tl.trans(b_k), ((b_e * b_rk)[:, None] * b_dx).to(dtype), input_precision=PREC)
    return b_ds


@triton.jit
def scan_kernel(
    q,
    k,
    v,
    C,
    A,
    gates,
    norms,
    initial_state,  # [N, HV, K, V] fp32 or None
    o,
    final_state,  # [N, HV, K, V] fp32 or None
    cu_seqlens,
    offsets,
    scale,
    stride_q,
    stride_k,
    stride_v,
    HV,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """o and the final states."""
    blocks: tl.constexpr = V // BV
    i_v, i_nh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_hv = i_nh // HV, i_nh % HV
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
    first = tl.load(offsets + i_n).to(tl.int64)
    o_s = i_nh * K * V + tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    b_s = tl.zeros([K, BV], tl.float32)
    if INITIAL:
        b_s += tl.load(initial_state + o_s).to(tl.float32)
    b_s = _scan(
        b_s, q, k, v, C, A, gates, norms, o, None, None, bos, length, first, i_hv, i_v, True, scale,
        stride_q, stride_k, stride_v, HV, R, K, V, BT, BV, NORM, True, False, STAGES, PREC,
    )  # fmt: skip
    if FINAL:
        tl.store(final_state + o_s, b_s)


@triton.jit
def boundary_kernel(
    k,
    v,
    C,
    gates,
    norms,
    entries,  # [F]
    S_ext,  # [F, HV, K, V] fp32
    M,  # [F, HV, K, K] fp32 or None
    cu_seqlens,
    offsets,
    stride_k,
    stride_v,
    HV,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    NEED_M: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """S_ext: the scan from a zero state. M: the same scan with v = 0 from the identity, column block by column block."""
    blocks: tl.constexpr = (V + (K if NEED_M else 0)) // BV
    i_v, i_fh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_hv = tl.load(entries + i_fh // HV), i_fh % HV
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
    first = tl.load(offsets + i_n).to(tl.int64)
    o_k, o_v = tl.arange(0, K)[:, None], tl.arange(0, BV)[None, :]
    is_m = i_v >= V // BV
    i_m = i_v - V // BV
    b_s = tl.where(is_m & (o_k == i_m * BV + o_v), 1.0, 0.0)
    b_s = _scan(
        b_s, k, k, v, C, None, gates, norms, None, None, None, bos, length, first, i_hv, i_v, i_v < V // BV, 1.0,
        stride_k, stride_k, stride_v, HV, R, K, V, BT, BV, NORM, False, False, STAGES, PREC,
    )  # fmt: skip
    if is_m:
        if NEED_M:
            tl.store(M + i_fh * K * K + o_k * K + i_m * BV + o_v, b_s)
    else:
        tl.store(S_ext + i_fh * K * V + o_k * V + i_v * BV + o_v, b_s)


@triton.jit
def boundary_bwd_kernel(
    q,
    k,
    do,
    C,
    gates,
    norms,
    entries,  # [F]
    dS_ext,  # [F, HV, K, V] fp32
    cu_seqlens,
    offsets,
    scale,
    stride_q,
    stride_k,
    stride_do,
    HV,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    blocks: tl.constexpr = V // BV
    i_v, i_fh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_hv = tl.load(entries + i_fh // HV), i_fh % HV
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
    first = tl.load(offsets + i_n).to(tl.int64)
    b_ds = _reverse_scan(
        tl.zeros([K, BV], tl.float32), q, k, do, C, gates, norms, None, None, bos, length, first, i_hv, i_v, scale,
        stride_q, stride_k, stride_do, HV, R, K, V, BT, BV, NORM, False, STAGES, PREC,
    )  # fmt: skip
    o_s = tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    tl.store(dS_ext + i_fh * K * V + o_s, b_ds)


@triton.jit
def backward_scans_kernel(
    q,
    k,
    v,
    do,
    C,
    gates,
    norms,
    initial_state,  # [N, HV, K, V] fp32 or None
    d_final_state,  # [N, HV, K, V] fp32 or None
    h,  # [NT, HV, K, V] the state that enters each chunk
    y,  # [T, HV, V]
    dh,  # [NT, HV, K, V] the gradient of the state that leaves each chunk
    dv,  # [T, HV, V]
    d_initial_state,  # [N, HV, K, V] fp32
    cu_seqlens,
    offsets,
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_do,
    HV,
    scans,  # 2: both; 1: the states are kept from forward
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    INITIAL: tl.constexpr,
    D_FINAL: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """The states (forward) and their gradients (backward) do not depend on each other: they share the machine."""
    blocks: tl.constexpr = V // BV
    i_p = tl.program_id(0) // scans
    i_v, i_nh = i_p % blocks, (i_p // blocks).to(tl.int64)
    i_n, i_hv = i_nh // HV, i_nh % HV
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
    first = tl.load(offsets + i_n).to(tl.int64)
    o_s = i_nh * K * V + tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    b_s = tl.zeros([K, BV], tl.float32)
    if tl.program_id(0) % scans == 0:
        if D_FINAL:
            b_s += tl.load(d_final_state + o_s).to(tl.float32)
        b_s = _reverse_scan(
            b_s, q, k, do, C, gates, norms, dv, dh, bos, length, first, i_hv, i_v, scale,
            stride_q, stride_k, stride_do, HV, R, K, V, BT, BV, NORM, True, STAGES, PREC,
        )  # fmt: skip
        tl.store(d_initial_state + o_s, b_s)
    else:
        if INITIAL:
            b_s += tl.load(initial_state + o_s).to(tl.float32)
        _scan(
            b_s, k, k, v, C, None, gates, norms, None, h, y, bos, length, first, i_hv, i_v, True, scale,
            stride_k, stride_k, stride_v, HV, R, K, V, BT, BV, NORM, False, True, STAGES, PREC,
        )  # fmt: skip


@triton.jit
def gradients_kernel(
    q,
    k,
    do,
    h,
    y,
    dh,
    dv,
    gates,
    norms,
    g,  # [T, HV] the raw gate, with GATE
    A_log,
    dt_bias,
    dq,  # [T, H, K]
    dk,  # [T, H, K]
    dg,  # [T, HV]
    dbeta,  # [T, HV]
    d_gate,  # [2, NT, HV] fp32 partials of d A_log and d dt_bias
    cu_seqlens,
    table,
    scale,
    stride_q,
    stride_k,
    stride_do,
    HV,
    NT,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    DT_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """dq, dk, dg, dbeta of one chunk and key head, summed over its value heads in order."""
    H = HV // R
    i_h = tl.program_id(0) % H
    i_t = (tl.program_id(0) // H).to(tl.int64)
    i_n, i_c = tl.load(table + 2 * i_t), tl.load(table + 2 * i_t + 1)
    if i_n < 0:
        if GATE:
            for i_hv in range(i_h * R, i_h * R + R):
                tl.store(d_gate + i_t * HV + i_hv, 0.0)
                tl.store(d_gate + (NT + i_t) * HV + i_hv, 0.0)
        return
    bos, eos = tl.load(cu_seqlens + i_n), tl.load(cu_seqlens + i_n + 1)
    dtype = k.dtype.element_ty
    o_c, o_k = tl.arange(0, BT), tl.arange(0, K)
    o_t = (bos + i_c * BT + o_c).to(tl.int64)
    m_t = o_t < eos
    m_l = o_c[:, None] >= o_c[None, :]
    b_q = tl.load(q + o_t[:, None] * stride_q + i_h * K + o_k[None, :], mask=m_t[:, None], other=0.0)  # [BT, K]
    b_k = tl.load(k + o_t[:, None] * stride_k + i_h * K + o_k[None, :], mask=m_t[:, None], other=0.0)  # [BT, K]
    b_dq = tl.zeros([BT, K], tl.float32)
    b_dk = tl.zeros([BT, K], tl.float32)
    for i_hv in range(i_h * R, i_h * R + R):
        b_dqs = tl.zeros([BT, K], tl.float32)  # do Sᵀ
        b_ydh = tl.zeros([BT, K], tl.float32)  # Y dS'ᵀ
        b_dxs = tl.zeros([BT, K], tl.float32)  # dX Sᵀ
        b_doy = tl.zeros([BT, BT], tl.float32)  # do Yᵀ
        b_dxy = tl.zeros([BT, BT], tl.float32)  # dX Yᵀ
        b_sds = tl.zeros([K], tl.float32)  # <S, dS'>, row by row
        for i_v in tl.range(0, V // BV, num_stages=STAGES):
            o_v = i_v * BV + tl.arange(0, BV)
            o_x = (o_t[:, None] * HV + i_hv) * V + o_v[None, :]
            o_s = (i_t * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
            p_do = do + o_t[:, None] * stride_do + i_hv * V + o_v[None, :]
            b_do = tl.load(p_do, mask=m_t[:, None], other=0.0)  # [BT, BV]
            b_y = tl.load(y + o_x, mask=m_t[:, None], other=0.0)
            b_dx = tl.load(dv + o_x, mask=m_t[:, None], other=0.0)
            b_h = tl.load(h + o_s)  # [K, BV]
            b_dh = tl.load(dh + o_s)
            b_dqs += tl.dot(b_do, tl.trans(b_h), input_precision=PREC)
            b_dxs += tl.dot(b_dx, tl.trans(b_h), input_precision=PREC)
            b_ydh += tl.dot(b_y, tl.trans(b_dh), input_precision=PREC)
            b_doy += tl.dot(b_do, tl.trans(b_y), input_precision=PREC)
            b_dxy += tl.dot(b_dx, tl.trans(b_y), input_precision=PREC)
            b_sds += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)

        b_G, b_beta, b_rq, b_rk, b_last = _load_gates(gates, norms, i_t, i_hv, HV, R, BT, NORM)
        b_e = tl.exp2(b_G)
        b_r = tl.exp2(b_last - b_G) * b_rk
        b_kf = b_k.to(tl.float32)
        b_dg = (scale * b_e * b_rq) * tl.sum(b_dqs * b_q.to(tl.float32), 1)
        b_dg -= b_e * b_rk * tl.sum(b_dxs * b_kf, 1)
        b_db = b_r * tl.sum(b_ydh * b_kf, 1)
        b_dlast = tl.sum(b_beta * b_db, 0) + tl.exp2(b_last) * tl.sum(b_sds, 0)
        b_dq += (scale * b_e)[:, None] * b_dqs
        b_dk += (tl.exp2(b_last - b_G) * b_beta)[:, None] * b_ydh - b_e[:, None] * b_dxs

        b_d = tl.where(m_l, tl.exp2(tl.where(m_l, b_G[:, None] - b_G[None, :], 0.0)), 0.0)
        b_doy *= b_d * scale
        b_dxy = tl.where(o_c[:, None] > o_c[None, :], b_dxy * b_d, 0.0)
        b_w = b_doy * tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * b_rq[:, None] * b_rk[None, :]
        b_w -= b_dxy * tl.dot(b_k, tl.trans(b_k), input_precision=PREC) * b_rk[:, None] * b_rk[None, :]
        b_db += tl.sum(b_w, 0)
        b_dg += tl.sum(b_w * b_beta[None, :], 1) - b_beta * b_db
        b_doy *= b_beta[None, :]
        b_dxy *= b_beta[None, :]
        b_dq += tl.dot((b_doy * b_rk[None, :]).to(dtype), b_k, input_precision=PREC)
        b_dk += tl.dot(tl.trans(b_doy * b_rq[:, None]).to(dtype), b_q, input_precision=PREC)
        b_dk -= tl.dot(((b_dxy + tl.trans(b_dxy)) * b_rk[None, :]).to(dtype), b_k, input_precision=PREC)

        # every token of the chunk decays what comes after it, and the state that leaves
        b_dg = b_dlast + tl.cumsum(b_dg, 0, reverse=True)
        p_g = o_t * HV + i_hv
        if GATE:
            b_x = tl.load(g + p_g, mask=m_t, other=0.0).to(tl.float32)
            if DT_BIAS:
                b_x += tl.load(dt_bias + i_hv).to(tl.float32)
            b_a = -tl.exp(tl.load(A_log + i_hv).to(tl.float32))
            tl.store(d_gate + i_t * HV + i_hv, tl.sum(tl.where(m_t, b_dg * b_a * _softplus(b_x), 0.0), 0))
            b_dg *= b_a * tl.sigmoid(b_x)
            tl.store(d_gate + (NT + i_t) * HV + i_hv, tl.sum(tl.where(m_t, b_dg, 0.0), 0))
        tl.store(dg + p_g, b_dg.to(dg.dtype.element_ty), mask=m_t)
        tl.store(dbeta + p_g, b_db.to(dbeta.dtype.element_ty), mask=m_t)

    if NORM:
        p_n = norms + (i_t * H + i_h) * 2 * BT + o_c
        b_rq, b_rk = tl.load(p_n)[:, None], tl.load(p_n + BT)[:, None]
        b_qn, b_kn = b_q.to(tl.float32) * b_rq, b_k.to(tl.float32) * b_rk
        b_dq = b_rq * (b_dq - b_qn * tl.sum(b_dq * b_qn, 1)[:, None])
        b_dk = b_rk * (b_dk - b_kn * tl.sum(b_dk * b_kn, 1)[:, None])
    o_x = (o_t[:, None] * H + i_h) * K + o_k[None, :]
    tl.store(dq + o_x, b_dq.to(dtype), mask=m_t[:, None])
    tl.store(dk + o_x, b_dk.to(dtype), mask=m_t[:, None])
