"""KDA backward kernels: `reverse_scan` (the state's gradient through the chunks) and `gradient` (all the rest).

In the notation of kda_fwd, with N = β r (what the chunk writes) and dS' the gradient of the outgoing state:

    dN = Aqkᵀ do + k̂ dS'
    y  = (I + β Kk)⁻ᵀ dN = dN − Gᵀ (β dN)      the gradient of N with the writes of later tokens counted in
    dv = β y ;  dβ = y · r (by rows) ;  dKk = −dv Nᵀ ;  dAqk = do Nᵀ
    dS = 2^γ dS' + q̃ᵀ do − k̃ᵀ dv
    dq̃ = do Sᵀ ;  dk̃ = −dv Sᵀ ;  dk̂ = N dS'ᵀ ;  dγ = Σ_i k̂ ⊙ dk̂ + 2^γ Σ_v S ⊙ dS'

so nothing divides by β, and neither w, u nor their gradients exist. Γ's gradient needs no products of its own: each
part of dq and dk carries 2^(+Γ_i) or 2^(−Γ_i), hence dΓ = q ⊙ dq + k ⊙ (dk₊ − dk₋).

The state that enters each chunk is recomputed by `scan` (KEEP), which does not depend on the reverse scan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from titan_linear.ops.triton.kda_fwd import (
    LOG2E,
    block_decays,
    dot,
    entry_chunks,
    inverse_norm,
    level_decay,
    level_mask,
    load_columns,
    load_gate,
    load_rows,
    mask_dot,
    pair_decays,
    scale_blocks,
    softplus,
)


@triton.jit
def reverse_scan_kernel(
    do, cu_seqlens, entries, first, qg, kn, kg, decay, b, Aqk, Gn, dht,
    dh0, dh, y,
    HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
    LISTED: tl.constexpr, HAS_DHT: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One (entry, head, slice of V). KEEP writes each chunk's dS'ᵀ and yᵀ; FINAL the gradient of the incoming state."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_f, i_h = i_nh // HV, i_nh % HV
    i_n = i_f
    if LISTED:
        i_n = tl.load(entries + i_f).to(tl.int64)
    bos, length, c0, NT = entry_chunks(cu_seqlens, first, i_n)
    row, o_k, o_v = tl.arange(0, 64), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    o_state = i_nh * K * V + o_k[None, :] * V + o_v[:, None]
    dS = tl.zeros([BV, K], tl.float32)
    if HAS_DHT:
        dS += tl.load(dht + o_state).to(tl.float32)
    for i in tl.range(0, NT, num_stages=STAGES):
        i_t = NT - 1 - i
        tile = (c0 + i_t) * HV + i_h
        o_c = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
        o_tile = tile * 64 * K + row[:, None] * K + o_k[None, :]
        dS16 = dS.to(CT)
        if KEEP:
            tl.store(dh + (tile * V + o_v[:, None]) * K + o_k[None, :], dS16)
        b_do = tl.trans(load_columns(do + i_h * V + i_v * BV, bos + i_t * 64, length - i_t * 64, HV, V, BV, CT))
        b_b = tl.load(b + tile * 64 + row)[None, :]
        dN = dot(dS16, tl.trans(tl.load(kg + o_tile)))  # [BV, C]
        dN = dot(b_do, tl.load(Aqk + o_c), dN)
        dN = dot((dN * b_b).to(CT), tl.load(Gn + o_c), dN)  # yᵀ
        if KEEP:
            tl.store(y + (tile * V + o_v[:, None]) * 64 + row[None, :], dN.to(CT))
        dS *= tl.load(decay + tile * K + o_k)[None, :]
        dS = dot(b_do, tl.load(qg + o_tile), dS)
        dS = dot((dN * b_b).to(CT), tl.load(kn + o_tile), dS)
    if FINAL:
        tl.store(dh0 + o_state, dS)


@triton.jit
def gate_gradient(dg, raw, rate, bias, lower_bound, GATE: tl.constexpr):
    """dg of the natural-log gate → (gradient of the raw input, gradient of A_log before its sum), both [C, BK]."""
    x = raw + bias[None, :]
    s = 1.0 / (1.0 + tl.exp(-x)) if GATE == 1 else 1.0 / (1.0 + tl.exp(-rate * x))
    if GATE == 1:
        return -dg * rate * s, -dg * rate * softplus(x)
    d_raw = dg * lower_bound * s * (1.0 - s) * rate
    return d_raw, d_raw * x


@triton.jit
def matrix_gradients(do, r, y, b_b, tile, start, n, i_h, HV, scale, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr):
    """dAqk and dKk [64, 64] fp32 (not yet masked), dβ [64]."""
    row = tl.arange(0, 64)
    dA = tl.zeros([64, 64], tl.float32)
    dK = tl.zeros([64, 64], tl.float32)
    db = tl.zeros([64], tl.float32)
    for i_v in tl.static_range(V // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        o_r = (tile * V + o_v[:, None]) * 64 + row[None, :]
        b_r = tl.load(r + o_r)  # [BV, C]
        b_y = tl.load(y + o_r)
        b_do = load_columns(do + i_h * V + i_v * BV, start, n, HV, V, BV, CT)  # [C, BV]
        dA = dot(b_do, b_r, dA)
        dK = dot(tl.trans(b_y), b_r, dK)
        db += tl.sum(b_y.to(tl.float32) * b_r.to(tl.float32), 0)
    return dA * (scale * b_b[None, :]), dK * (-b_b[:, None] * b_b[None, :]), db


@triton.jit
def state_gradients(do, r, y, h, dh, tile, start, n, i_h, HV, o_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr):  # fmt: skip
    """do Sᵀ, y Sᵀ, r dS'ᵀ [64, BK] and Σ_v S ⊙ dS' [BK]."""
    row = tl.arange(0, 64)
    dq = tl.zeros([64, BK], tl.float32)
    dkn = tl.zeros([64, BK], tl.float32)
    dkg = tl.zeros([64, BK], tl.float32)
    ds = tl.zeros([BK], tl.float32)
    for i_v in tl.static_range(V // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        o_h = (tile * V + o_v[:, None]) * K + o_k[None, :]
        o_r = (tile * V + o_v[:, None]) * 64 + row[None, :]
        b_h = tl.load(h + o_h)  # [BV, BK]
        b_dh = tl.load(dh + o_h)
        dq = dot(load_columns(do + i_h * V + i_v * BV, start, n, HV, V, BV, CT), b_h, dq)
        dkn = dot(tl.trans(tl.load(y + o_r)), b_h, dkn)
        dkg = dot(tl.trans(tl.load(r + o_r)), b_dh, dkg)
        ds += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 0)
    return dq, dkn, dkg, ds


@triton.jit
def level_gradients(dA, dK, qL, kL, kR, cross, CT: tl.constexpr):
    """Gradients of one level's products with respect to (qL, kL, kR) [64, BK]; dA, dK [64, 64] masked to `cross`."""
    dA = tl.where(cross, dA, 0.0).to(CT)
    dK = tl.where(cross, dK, 0.0).to(CT)
    kR = kR.to(CT)
    d_kR = dot(tl.trans(dA), qL.to(CT))
    return dot(dA, kR), dot(dK, kR), dot(tl.trans(dK), kL.to(CT), d_kR)


@triton.jit
def gradient_kernel(
    q, k, g, beta, A_log, dt_bias, chunks, do, r, y, h, dh, scale, lower_bound,
    dq, dk, dv, dg, dbeta, dA_part, dbias_part,
    H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr,
    GATE: tl.constexpr, SAFE: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """One (chunk, head): every gradient that is not a state's, each written once in its own dtype. (With the l2norm and
    K > BK, dq and dk are written twice: the norm's gradient needs whole rows.)"""
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    start = tl.load(chunks + 2 * i_t)
    n = tl.load(chunks + 2 * i_t + 1)
    if n == 0:
        return
    tile = i_t.to(tl.int64) * HV + i_h
    token = start.to(tl.int64)
    row = tl.arange(0, 64)
    q += (i_h // (HV // H)) * K
    k += (i_h // (HV // H)) * K
    q_norm = tl.full([64], 1.0, tl.float32)
    k_norm = tl.full([64], 1.0, tl.float32)
    if L2NORM:
        q_norm = inverse_norm(q, start, n, H * K, K, BK)
        k_norm = inverse_norm(k, start, n, H * K, K, BK)
    b_b = tl.load(beta + (token + row) * HV + i_h, mask=row < n, other=0.0).to(tl.float32)
    b_dA, b_dK, db = matrix_gradients(do, r, y, b_b, tile, start, n, i_h, HV, scale, V, BV, CT)
    tl.store(dbeta + (token + row) * HV + i_h, db.to(dbeta.dtype.element_ty), mask=row < n)
    for i_v in tl.static_range(V // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_y = tl.load(y + (tile * V + o_v[None, :]) * 64 + row[:, None]).to(tl.float32)  # [C, BV]
        p_dv = dv + (token + row[:, None]) * (HV * V) + i_h * V + o_v[None, :]
        tl.store(p_dv, (b_y * b_b[:, None]).to(dv.dtype.element_ty), mask=(row < n)[:, None])

    same = (row[:, None] // 16) == (row[None, :] // 16)
    lower = row[:, None] >= row[None, :]
    strict = row[:, None] > row[None, :]
    diagonal = tl.sum(tl.where(row[:, None] == row[None, :], b_dA, 0.0), 1) if not SAFE else 0.0
    q_dot = tl.zeros([64], tl.float32)
    k_dot = tl.zeros([64], tl.float32)
    dA_log = 0.0
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_dq, b_dkn, b_dkg, ds = state_gradients(do, r, y, h, dh, tile, start, n, i_h, HV, o_k, K, V, BK, BV, CT)
        b_g = load_gate(g, A_log, dt_bias, lower_bound, start, n, i_h, HV, K, i_k, BK, GATE) * LOG2E
        b_q = load_rows(q, start, n, H * K, K, i_k, BK).to(tl.float32) * q_norm[:, None]
        b_k = load_rows(k, start, n, H * K, K, i_k, BK).to(tl.float32) * k_norm[:, None]
        L, R, t, before, gamma = block_decays(b_g, BK, CT)
        qL = b_q * L
        kL = b_k * L
        kR = b_k * R

        # Each gradient is kept without its factor L or R: those are multiplied in at the end.
        to_block = tl.exp2(before)
        b_dq = scale_blocks(b_dq * scale, to_block, BK)
        b_dkp = scale_blocks(b_dkn * -b_b[:, None], to_block, BK)
        b_dkm = scale_blocks(b_dkg * b_b[:, None], tl.exp2(gamma[None, :] - before - t), BK)
        dgamma = tl.sum(b_dkm * kR, 0) + tl.exp2(gamma) * ds

        d_qL, d_kL, d_kR = level_gradients(b_dA, b_dK, qL, kL, kR, level_mask(16), CT)
        b_dq += d_qL
        b_dkp += d_kL
        b_dkm += d_kR
        pair_L, pair_R = pair_decays(t, BK)
        d_qL, d_kL, d_kR = level_gradients(
            b_dA, b_dK, scale_blocks(qL, pair_L, BK), scale_blocks(kL, pair_L, BK), scale_blocks(kR, pair_R, BK),
            level_mask(32), CT,
        )  # fmt: skip
        b_dq += scale_blocks(d_qL, pair_L, BK)
        b_dkp += scale_blocks(d_kL, pair_L, BK)
        b_dkm += scale_blocks(d_kR, pair_R, BK)
        if SAFE:
            middle = tl.exp2(-0.5 * t)
            m_qL = scale_blocks(qL, middle, BK)
            m_kL = scale_blocks(kL, middle, BK)
            m_kR = scale_blocks(kR, middle, BK).to(CT)
            m_dA = tl.where(same & lower, b_dA, 0.0).to(CT)
            m_dK = tl.where(same & strict, b_dK, 0.0).to(CT)
            b_dq += scale_blocks(dot(m_dA, m_kR), middle, BK)
            b_dkp += scale_blocks(dot(m_dK, m_kR), middle, BK)
            b_dkm += scale_blocks(dot(tl.trans(m_dK), m_kL.to(CT), dot(tl.trans(m_dA), m_qL.to(CT))), middle, BK)
        b_dq *= L
        b_dkp *= L
        b_dkm *= R
        if not SAFE:
            for level in tl.static_range(4):
                E = level_decay(b_g, 8 >> level, CT)
                d_qL, d_kL, d_kR = level_gradients(b_dA, b_dK, b_q * E, b_k * E, b_k * E, level_mask(8 >> level), CT)
                b_dq += d_qL * E
                b_dkp += d_kL * E
                b_dkm += d_kR * E
            b_dq += diagonal[:, None] * b_k
            b_dkm += diagonal[:, None] * b_q

        d_sum = b_q * b_dq + b_k * (b_dkp - b_dkm)  # dΓ
        b_dg = mask_dot(row[:, None] <= row[None, :], d_sum, CT) + dgamma[None, :]
        o_g = (token + row[:, None]) * (HV * K) + i_h * K + o_k[None, :]
        inside = (row < n)[:, None]
        if GATE > 0:
            raw = tl.load(g + o_g, mask=inside, other=0.0).to(tl.float32)
            rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
            bias = tl.load(dt_bias + i_h * K + o_k).to(tl.float32)
            b_dg, d_rate = gate_gradient(tl.where(inside, b_dg, 0.0), raw, rate, bias, lower_bound, GATE)
            dA_log += tl.sum(d_rate)
            tl.store(dbias_part + tile * K + o_k, tl.sum(b_dg, 0))
        tl.store(dg + o_g, b_dg.to(dg.dtype.element_ty), mask=inside)
        b_dk = b_dkp + b_dkm
        if L2NORM:
            q_dot += tl.sum(b_dq * b_q, 1)
            k_dot += tl.sum(b_dk * b_k, 1)
            if K == BK:
                b_dq = (b_dq - b_q * q_dot[:, None]) * q_norm[:, None]
                b_dk = (b_dk - b_k * k_dot[:, None]) * k_norm[:, None]
        tl.store(dq + o_g, b_dq.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + o_g, b_dk.to(dk.dtype.element_ty), mask=inside)
    if GATE > 0:
        tl.store(dA_part + tile, dA_log)
    if L2NORM and K > BK:
        tl.debug_barrier()
        for i_k in range(K // BK):
            o_g = (token + row[:, None]) * (HV * K) + i_h * K + i_k * BK + tl.arange(0, BK)[None, :]
            inside = (row < n)[:, None]
            b_q = load_rows(q, start, n, H * K, K, i_k, BK).to(tl.float32) * q_norm[:, None]
            b_k = load_rows(k, start, n, H * K, K, i_k, BK).to(tl.float32) * k_norm[:, None]
            b_dq = tl.load(dq + o_g, mask=inside, other=0.0).to(tl.float32)
            b_dk = tl.load(dk + o_g, mask=inside, other=0.0).to(tl.float32)
            b_dq = (b_dq - b_q * q_dot[:, None]) * q_norm[:, None]
            b_dk = (b_dk - b_k * k_dot[:, None]) * k_norm[:, None]
            tl.store(dq + o_g, b_dq.to(dq.dtype.element_ty), mask=inside)
            tl.store(dk + o_g, b_dk.to(dk.dtype.element_ty), mask=inside)
