"""KDA backward kernels: `backward_scans` (the states, and their gradients through the chunks), `matrix` (dv, dβ and the
gradients of the chunk's two matrices) and `gradient` (dq, dk, dg).

In the notation of kda_fwd, with N = β r (what the chunk writes) and dS' the gradient of the outgoing state:

    dN = Aqkᵀ do + k̂ dS'
    y  = (I + β Kk)⁻ᵀ dN = dN − Gᵀ (β dN)      the gradient of N with the writes of later tokens counted in
    dv = β y ;  dβ = y · r (by rows) ;  dKk = −dv Nᵀ ;  dAqk = do Nᵀ
    dS = 2^γ dS' + q̃ᵀ do − k̃ᵀ dv
    dq̃ = do Sᵀ ;  dk̃ = −dv Sᵀ ;  dk̂ = N dS'ᵀ ;  dγ = Σ_i k̂ ⊙ dk̂ + 2^γ Σ_v S ⊙ dS'

so nothing divides by β, and neither the WY form's w and u nor their gradients exist. Γ's gradient needs no products of
its own: each part of dq and dk carries 2^(+Γ_i) or 2^(−Γ_i), hence dΓ = q ⊙ dq + k ⊙ (dk₊ − dk₋).

The state that enters each chunk is recomputed by `scan` (its h and r), which does not depend on the reverse scan.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_at, entry_at, is_wanted
from titan_linear.ops.triton.gates import beta_gradient, sigmoid, softplus
from titan_linear.ops.triton.kda_fwd import (
    dot,
    full_decays,
    gate_bias,
    gate_rate,
    half_decays,
    halves,
    is_fast,
    level_decay,
    level_mask,
    load_chunk,
    log2_gates,
    scan,
    split_dot,
)
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.tiles import fetch_rows, load_tokens, read_state, write_state


@triton.jit
def _reverse_scan(
    dS, do, tiles, dh, y, start, length, first, i_h, column,
    HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, CT: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Carry dSᵀ [BV, K], columns of V from `column` on, through the chunks of one entry and head from the last to the
    first; returns the gradient of the state that enters. Writes each chunk's dS'ᵀ (dh) and yᵀ (y) where these are
    given."""
    NT = (length + 63) // 64
    row, o_k, o_v = tl.arange(0, 64), tl.arange(0, K), column + tl.arange(0, BV)
    for i in tl.range(0, NT, num_stages=STAGES):
        i_t = NT - 1 - i
        tile = (first + i_t) * HV + i_h
        o_c = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
        o_tile = (tile * K + o_k[:, None]) * 64 + row[None, :]
        dS16 = dS.to(CT)
        if dh is not None:
            tl.store(dh + (tile * V + o_v[:, None]) * K + o_k[None, :], dS16)
        b_do = load_tokens(do, start + i_t * 64, length - i_t * 64, i_h * V + column, BV).to(CT)
        b_do = tl.trans(b_do)
        b_b = tl.load(tiles.b + tile * 64 + row)[None, :]
        dN = dot(dS16, tl.load(tiles.kg + o_tile))  # [BV, C]
        dN = dot(b_do, tl.load(tiles.Aqk + o_c), dN)
        dN = dot((dN * b_b).to(CT), tl.load(tiles.Gn + o_c), dN)  # yᵀ
        if dh is not None:
            tl.store(y + (tile * V + o_v[:, None]) * 64 + row[None, :], dN.to(CT))
        dS *= tl.load(tiles.decay + tile * K + o_k)[None, :]
        dS = dot(b_do, tl.trans(tl.load(tiles.qg + o_tile)), dS)
        dS = dot((dN * b_b).to(CT), tl.trans(tl.load(tiles.kn + o_tile)), dS)
    return dS


@Kernel
def backward_scans_kernel(
    do, v, tiles, initial, d_final, d_initial, listed, chunks,
    HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, CT: constexpr, STAGES: constexpr,
    h=None, dh=None,  # [NT, HV, V, K], the state that enters each chunk, and the gradient of the one that leaves it
    r=None, y=None,  # [NT, HV, V, 64]
):  # fmt: skip
    """One (entry, head, slice of V), in reverse for dh and y and the gradient of the state that enters; or, in programs
    of their own, forward again for h and r. Neither needs the other."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // HV, i_nh % HV
    if not is_wanted(listed, i_n, 1):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_s = i_h * K * V + tl.arange(0, K)[None, :] * V + (i_v * BV + tl.arange(0, BV))[:, None]
    if h is not None and tl.program_id(2) == 0:
        S = read_state(initial, i_n, HV * K * V, o_s)
        scan(S, v, tiles, None, h, r, start, length, length, first, i_h, i_v * BV, HV, K, V, BV, CT, STAGES)
    else:
        S = read_state(d_final, i_n, HV * K * V, o_s)
        S = _reverse_scan(S, do, tiles, dh, y, start, length, first, i_h, i_v * BV, HV, K, V, BV, CT, STAGES)
        write_state(d_initial, i_n, HV * K * V, o_s, S)


@triton.jit
def transposed(x):
    """Rows [64, BK] → fp32 [BK, 64]. The tensor cores do it for 16-bit rows, by a product with the identity, which is
    exact: the result has the layout of other products, so that nothing made of it is computed in two layouts."""
    if x.dtype == tl.float32:
        return tl.trans(x)
    else:
        row = tl.arange(0, 64)
        return tl.dot(tl.trans(x), (row[:, None] == row[None, :]).to(x.dtype))


@triton.jit
def gate_gradient(dg, x, rate, lower_bound, GATE: constexpr):
    """dg of the natural-log gate → gradients of the biased input x and, before its sum, of A_log, both [BK, 64]."""
    if GATE == 1:
        return -dg * rate * sigmoid(x), -dg * rate * softplus(x)
    else:
        s = sigmoid(rate * x)
        d_raw = dg * lower_bound * s * (1.0 - s) * rate
        return d_raw, d_raw * x


@Kernel
def matrix_kernel(
    do, b, r, y,
    dA, dK,  # [NT, HV, 64, 64]
    dv,  # [T, HV, V]
    dbeta,  # [T, HV]
    chunks, scale,
    HV: constexpr, V: constexpr, BV: constexpr, CT: constexpr, BETA_RANGE: constexpr,
):  # fmt: skip
    """One (chunk, head): dv, dβ, and the gradients of Aqk and Kk, 0 above their diagonals."""
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    token, n = chunk_at(chunks, i_t)
    tile = i_t.to(tl.int64) * HV + i_h
    row = tl.arange(0, 64)
    b_b = tl.load(b + tile * 64 + row)
    b_dA = tl.zeros([64, 64], tl.float32)
    b_dK = tl.zeros([64, 64], tl.float32)
    db = tl.zeros([64], tl.float32)
    for i_v in range(V // BV):
        o_r = (tile * V + i_v * BV + tl.arange(0, BV)[:, None]) * 64 + row[None, :]
        b_r = tl.load(r + o_r)  # [BV, C]
        b_y = tl.load(y + o_r)
        b_do = load_tokens(do, token, n, i_h * V + i_v * BV, BV).to(CT)  # [C, BV]
        b_dA = dot(b_do, b_r, b_dA)
        b_dK = dot(tl.trans(b_y), b_r, b_dK)
        db += tl.sum(b_y.to(tl.float32) * b_r.to(tl.float32), 0)
        o_dv = (token + row[:, None]) * (HV * V) + i_h * V + i_v * BV + tl.arange(0, BV)[None, :]
        b_dv = tl.trans((b_y.to(tl.float32) * b_b[None, :]).to(dv.dtype.element_ty))
        tl.store(dv + o_dv, b_dv, mask=(row < n)[:, None])
    db = beta_gradient(db, b_b, BETA_RANGE)
    tl.store(dbeta + (token + row) * HV + i_h, db.to(dbeta.dtype.element_ty), mask=row < n)
    o_c = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
    tl.store(dA + o_c, tl.where(row[:, None] >= row[None, :], b_dA * (scale * b_b)[None, :], 0.0).to(CT))
    b_dK *= -b_b[:, None] * b_b[None, :]
    tl.store(dK + o_c, tl.where(row[:, None] > row[None, :], b_dK, 0.0).to(CT))


@triton.jit
def read_state_gradients(
    do, y, h, start, n, tile, i_o, i_k, V: constexpr, BK: constexpr, BV: constexpr, CT: constexpr,
    STAGES: constexpr,
):  # fmt: skip
    """(do Sᵀ)ᵀ and (y Sᵀ)ᵀ [BK, 64], 0 past an entry's end."""
    dq = tl.zeros([BK, 64], tl.float32)
    dk = tl.zeros([BK, 64], tl.float32)
    for i_v in tl.range(V // BV, num_stages=STAGES):
        b_h = tl.trans(h.load([tile * V + i_v * BV, i_k * BK]))  # [BK, BV]
        dq = dot(b_h, tl.trans(fetch_rows(do, start, n, 0, i_o + i_v * BV).to(CT)), dq)
        dk = dot(b_h, y.load([tile * V + i_v * BV, 0]), dk)
    return dq, dk


@triton.jit
def write_state_gradient(r, h, dh, tile, i_k, V: constexpr, BK: constexpr, BV: constexpr, STAGES: constexpr):
    """(r dS'ᵀ)ᵀ [BK, 64] and Σ_v S ⊙ dS' [BK]."""
    dk = tl.zeros([BK, 64], tl.float32)
    ds = tl.zeros([BK], tl.float32)
    for i_v in tl.range(V // BV, num_stages=STAGES):
        b_h, b_dh = h.load([tile * V + i_v * BV, i_k * BK]), dh.load([tile * V + i_v * BV, i_k * BK])  # [BV, BK]
        dk = dot(tl.trans(b_dh), r.load([tile * V + i_v * BV, 0]), dk)
        ds += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 0)
    return dk, ds


@triton.jit
def _by_levels(
    b_g, b_q, b_k, b_b, b_dA, b_dK, scale, do, r, y, h, dh, start, n, i_tile, i_o, i_k, V: constexpr,
    BK: constexpr, BV: constexpr, CT: constexpr, STAGES: constexpr,
):  # fmt: skip
    """dq, dk and dΓ [BK, 64], and dγ [BK], for gates of any decay."""
    row = tl.arange(0, 64)
    b_diagonal = tl.sum(tl.where(row[:, None] == row[None, :], b_dA.to(tl.float32), 0.0), 0)[None, :]
    b_dq, b_dkp = read_state_gradients(do, y, h, start, n, i_tile, i_o, i_k, V, BK, BV, CT, STAGES)
    b_dq *= scale
    b_dkm, ds = write_state_gradient(r, h, dh, i_tile, i_k, V, BK, BV, STAGES)
    E, W, gamma = full_decays(b_g, CT)
    b_dq *= E
    b_dkp *= -b_b[None, :] * E
    b_dkm *= b_b[None, :] * W
    dgamma = tl.sum(b_dkm * b_k, 1) + tl.exp2(gamma) * ds
    d_sum = b_q * b_dq + b_k * (b_dkp - b_dkm)
    for level in range(6):
        E = level_decay(b_g, level, CT)
        cross = level_mask(level)
        l_dA = tl.where(cross, b_dA, 0.0)
        l_dK = tl.where(cross, b_dK, 0.0)
        qE = (b_q * E).to(CT)
        kE = (b_k * E).to(CT)
        l_dq = dot(kE, tl.trans(l_dA))
        l_dkp = dot(kE, tl.trans(l_dK))
        l_dkm = dot(kE, l_dK, dot(qE, l_dA))
        d_sum += qE.to(tl.float32) * l_dq + kE.to(tl.float32) * (l_dkp - l_dkm)
        b_dq += l_dq * E
        b_dkp += l_dkp * E
        b_dkm += l_dkm * E
    b_dq += b_diagonal * b_k
    b_dk = b_dkp + b_dkm + b_diagonal * b_q
    return b_dq, b_dk, d_sum, dgamma


@Kernel
def gradient_kernel(
    q, k, g,  # (x, stride)
    do, r, y, h, dh,  # descriptors
    A_log, dt_bias, b, dA, dK,
    dq, dk, dg,  # [T, HV, K]
    dA_part, dbias_part,  # [NT, HV·K] fp32, or None; zeros for a chunk without a token
    fast,  # [NT, HV, K / BF] int32 or None: as in `is_fast`
    chunks, scale, lower_bound,
    H: constexpr, HV: constexpr, K: constexpr, V: constexpr, BF: constexpr, BK: constexpr,
    BV: constexpr, STAGES: constexpr, CT: constexpr, GATE: constexpr, SAFE: constexpr,
):  # fmt: skip
    """One (chunk, head, block of K): dq, dk and dg, each written once in its own dtype."""
    i_k, i_h, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, n = chunk_at(chunks, i_t)
    tile = i_t.to(tl.int64) * HV + i_h
    o_k = i_k * BK + tl.arange(0, BK)
    if fast is not None:
        fast += tile * (K // BF) + i_k * BK // BF
        if not SAFE and tl.load(fast) == 0:
            return
    if n == 0:
        if fast is not None:
            tl.store(fast, 0)
        if dA_part is not None:
            tl.store(dA_part + tile * K + o_k, tl.zeros([BK], tl.float32))
        if dbias_part is not None:
            tl.store(dbias_part + tile * K + o_k, tl.zeros([BK], tl.float32))
        return
    i_tile = tile.to(tl.int32)  # where the copy engine reads the chunks' matrices
    row = tl.arange(0, 64)
    inside = (row < n)[:, None]
    o_g = start * (HV * K) + i_h * K + (row[:, None] * (HV * K) + o_k[None, :])
    o_c = tile * 64 * 64 + (row[:, None] * 64 + row[None, :])
    rate, bias = gate_rate(A_log, i_h), gate_bias(dt_bias, i_h, K, i_k, BK)
    b_g, b_q, b_k = load_chunk(g, q, k, start, n, i_h, i_k, HV // H, K, BK)
    p_b = b + tile * 64 + row  # loaded at use: held, it would take registers
    b_g = log2_gates(b_g, rate, bias, lower_bound, n, GATE)
    b_q = tl.trans(b_q).to(tl.float32)
    b_k = tl.trans(b_k).to(tl.float32)
    b_dA, b_dK = tl.load(dA + o_c), tl.load(dK + o_c)
    if SAFE:  # each gradient is relative to the references of half_decays until it is multiplied by E or W
        far = (row[:, None] >= 32) & (row[None, :] < 32)
        near = (row[:, None] // 32) == (row[None, :] // 32)
        far_dA, near_dA = tl.where(far, b_dA, 0.0), tl.where(near, b_dA, 0.0)
        far_dK, near_dK = tl.where(far, b_dK, 0.0), tl.where(near, b_dK, 0.0)
        x, first, second, middle, gamma = half_decays(b_g, BK, CT)
        if fast is not None:
            tl.store(fast, is_fast(first, second, middle))
        to_start = halves(tl.exp2(first), tl.exp2(second))
        # Between the halves the factor is 2^(second − first), as two numbers, since one alone could be 0. A product
        # whose sum is scaled before the next product starts from zero: else every wgmma waits for the one before.
        down1, down2 = tl.exp2(middle - first)[:, None], tl.exp2(second - middle)[:, None]
        E, W = tl.exp2(x), tl.exp2(-x)
        kE = (b_k * E).to(CT)
        kW = (b_k * W).to(CT)
        b_dq, b_dk = read_state_gradients(do, y, h, start, n, i_tile, i_h * V, i_k, V, BK, BV, CT, STAGES)
        b_dq *= scale * to_start
        b_dq += dot(kW, tl.trans(far_dA)) * down1 * down2
        b_dq = dot(kW, tl.trans(near_dA), b_dq)
        # Here and below, dΓ takes the rounded operands: a pair (i, j) then gives +x at i, −x at j, which cancel in dg.
        qE = (b_q * E).to(CT)
        d_sum = qE.to(tl.float32) * b_dq
        tl.store(dq + o_g, tl.trans((b_dq * E).to(dq.dtype.element_ty)), mask=inside)

        b_dk *= -tl.load(p_b)[None, :] * to_start
        b_dk += dot(kW, tl.trans(far_dK)) * down1 * down2
        b_dk = dot(kW, tl.trans(near_dK), b_dk)
        d_sum += kE.to(tl.float32) * b_dk
        b_dk *= E

        b_dkm, ds = write_state_gradient(r, h, dh, i_tile, i_k, V, BK, BV, STAGES)
        b_dkm *= tl.load(p_b)[None, :] * halves(tl.exp2(gamma - first), tl.exp2(gamma - second))
        dgamma = tl.sum(b_dkm * kW.to(tl.float32), 1) + tl.exp2(gamma) * ds
        b_dkm += dot(kE, far_dK, dot(qE, far_dA)) * down1 * down2
        b_dkm = dot(kE, near_dK, dot(qE, near_dA, b_dkm))
        d_sum -= kW.to(tl.float32) * b_dkm
        root = tl.rsqrt(E)  # its square is 1 / E, by two instructions where a division takes eight
        b_dk += b_dkm * (root * root)
    else:
        b_dq, b_dk, d_sum, dgamma = _by_levels(
            b_g, b_q, b_k, tl.load(p_b), b_dA, b_dK, scale, do, r, y, h, dh, start, n, i_tile, i_h * V, i_k, V, BK, BV,
            CT, STAGES,
        )  # fmt: skip
        tl.store(dq + o_g, tl.trans(b_dq.to(dq.dtype.element_ty)), mask=inside)
    tl.store(dk + o_g, tl.trans(b_dk.to(dk.dtype.element_ty)), mask=inside)
    raw = load_tokens(g, start, n, i_h * K + i_k * BK, BK) if GATE > 0 else b_g  # before what waits
    b_dg = split_dot(d_sum, row[:, None] >= row[None, :], CT) + dgamma[:, None]
    if GATE > 0:
        x = transposed(raw) + bias
        b_dg = tl.where((row < n)[None, :], b_dg, 0.0)
        b_dg, d_rate = gate_gradient(b_dg, x, rate, lower_bound, GATE)
        if A_log is not None:
            tl.store(dA_part + tile * K + o_k, tl.sum(d_rate, 1))
        if dt_bias is not None:
            tl.store(dbias_part + tile * K + o_k, tl.sum(b_dg, 1))
    tl.store(dg + o_g, tl.trans(b_dg.to(dg.dtype.element_ty)), mask=inside)
