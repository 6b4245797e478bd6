"""Kernels of the recurrence whose transition is a diagonal matrix plus one of rank one, with bounded decays (RWKV-7).

Letters: C = 64 tokens of a chunk, Γ the inclusive cumulative log decay inside it (log2), γ its last row, Γ' the sum up
to the token before. With q̃ = scale·q·2^Γ, ã = a·2^Γ', k̂ = k·2^(γ−Γ), b̂ = b·2^(γ−Γ), products of pairs such as
A_ab[i,j] = Σ_k a_i b_j 2^(Γ'_i−Γ_j) (j < i for a, j ≤ i for q), and S the incoming state, the reads of a chunk are

    y = T (ã S + A_ak v)        T = (I − A_ab)⁻¹
    o = q̃ S + A_qk v + A_qb y
    S' = 2^γ S + k̂ᵀ v + b̂ᵀ y

All that does not depend on S is made chunk by chunk (w = T ã, u = T A_ak v), and a scan has one product in its chain:

    o = Q S + O        Q = q̃ + A_qb w        O = A_qk v + A_qb u
    S' = 2^γ S + P S + U        P = b̂ᵀ w        U = k̂ᵀ v + b̂ᵀ u
    dS = 2^γ dS' + Pᵀ dS' + Qᵀ do

The gradients are those of the first form, for S and dS' of each chunk, with z that of the reads' right-hand side:

    z = Tᵀ (A_qbᵀ do + b̂ dS')        dv = A_qkᵀ do + A_akᵀ z + k̂ dS'
    dA_qk = do vᵀ    dA_qb = do yᵀ    dA_ak = z vᵀ    dA_ab = z yᵀ
    dq̃ = do Sᵀ    dã = z Sᵀ    dk̂ = v dS'ᵀ    db̂ = y dS'ᵀ        dγ = Σ_v S' ⊙ dS'

A chunk has one reference, the whole number nearest to γ/2: with decays of at least e^-2 a token, factors relative to it
stay within 2^±93, which bf16 holds, and no pair needs another one. T is by forward substitution in fp32 (solve.py),
since powers of A_ab may be large. Other products take operands in the compute dtype and accumulate in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_and_head, chunks_in, entry_at, is_wanted
from titan_linear.ops.triton.solve import lower_triangle, solve, split
from titan_linear.ops.triton.tiles import (
    LOG2E,
    Kernel,
    arange,
    dot,
    indices,
    load_tokens,
    load_wide,
    masked,
    place_in_row,
    read_state,
    sigmoid,
    store_tokens,
    wide,
    write_state,
)


@triton.jit
def sums(x, of, CT, acc=None):
    """Of the rows `of` [64, 64] of x [64, K] in fp32 (+ acc); as a product, x in two bf16 parts (an error of 2^-16 of
    the terms)."""
    ones = tl.where(of, 1.0, 0.0).to(CT)
    if CT == tl.float32:  # noqa: SIM300
        return dot(ones, x, acc)
    else:
        high, low = split(x)
        return dot(ones, high, dot(ones, low, acc))


@triton.jit
def load_gates(w, start, n, column, K, RATE):
    """As `load_tokens`, with a decay of 1 past the end."""
    o_c, o_k = indices(64, K)
    none: constexpr = 0.0 if RATE is None else float("-inf")
    p_w, stride = w
    return tl.load(p_w + start * stride + column + (o_c * stride + o_k), mask=o_c < n, other=none)


@triton.jit
def load_narrow(x, start, n, column, V, WIDTH):
    """As `load_tokens`, of V columns, with zeros up to WIDTH."""
    o_c, o_v = indices(64, WIDTH)
    inside = (o_c < n) & (o_v < V)
    p_x, stride = x
    return masked(p_x + start * stride + column + (o_c * stride + o_v), mask=inside)


@triton.jit
def decays(b_w, CT, RATE):
    """Of a chunk's gates [64, K]: Γ and Γ' relative to its reference [64, K]; 2^reference, 2^(γ − reference) and
    2^γ [K]. Gates are log decays, or with RATE the logits of what it is multiplied by."""
    g = wide(b_w) * LOG2E if RATE is None else sigmoid(wide(b_w)) * (RATE * LOG2E)
    gamma = tl.sum(g, 0)
    reference = tl.floor(0.5 * gamma + 0.5)
    i, j = indices(64, 64)
    # in another layout than g, for which a sigmoid is computed again
    x = sums(g, j <= i, CT) - reference[None, :]
    before = x - g if RATE is None else sums(g, j < i, CT) - reference[None, :]
    return x, before, tl.exp2(reference), tl.exp2(gamma - reference), tl.exp2(gamma)


@triton.jit
def decayed(x, factor, CT):
    return (wide(x) * factor).to(CT)


@triton.jit
def pairs(x, y, STRICT):
    """x yᵀ [64, 64] for tokens of y before those of x, and the same ones unless STRICT; 0 elsewhere, where the product
    may overflow."""
    i, j = indices(64, 64)
    return tl.where((j < i) if STRICT else (j <= i), dot(x, y.T), 0.0).to(x.dtype)


@triton.jit
def pairs_back(y, x, STRICT):
    """The transpose of pairs(x, y), a product of its own: it costs no more, and nothing is held meanwhile."""
    i, j = indices(64, 64)
    return tl.where((i < j) if STRICT else (i <= j), dot(y, x.T), 0.0).to(x.dtype)


@triton.jit
def at(p, tile, ROWS, COLUMNS, WIDTH=None, column=0):
    """Where a tile (64 bits), or WIDTH columns of it from `column` on, lie in p [tiles, ROWS, COLUMNS]."""
    p += tile * (ROWS * COLUMNS) + column
    o_r, o_c = indices(ROWS, COLUMNS if WIDTH is None else WIDTH)
    return p + (o_r * COLUMNS + o_c)


@Kernel
def prepare_kernel(
    q, k, v, a, b, w,  # (x, stride)
    tiles,  # without O, T is given, and is computed otherwise
    chunks, scale, H: constexpr, K: constexpr, V: constexpr, RATE: constexpr,
):  # fmt: skip
    """One (chunk, head). All loads come first: between barriers each would wait for the memory by itself. In 16 bits
    values are at least 64 wide: ptxas 12.8 gets descriptors of narrower ones wrong."""
    CT: constexpr = tiles.U.dtype.element_ty
    VW: constexpr = V if CT == tl.float32 else 64  # noqa: SIM300
    _, o_v = indices(64, VW)
    _, i_h, tile, start, n = chunk_and_head(chunks, H, 1)
    keys = start, n, i_h * K
    b_w = load_gates(w, *keys, K, RATE)
    b_a = load_tokens(a, *keys, K)
    b_b = load_tokens(b, *keys, K)
    b_k = load_tokens(k, *keys, K)
    b_v = load_narrow(v, start, n, i_h * V, V, VW).to(CT)
    b_q = load_tokens(q, *keys, K)
    if tiles.O is None:
        b_T = tl.load(at(tiles.inverse, tile, 64, 64))
    x, before, to_start, to_end, b_decay = decays(b_w, CT, RATE)
    tl.store(tiles.decay + tile * K + arange(K), b_decay)
    b_a = wide(b_a) * tl.exp2(before)
    b_w = (b_a * to_start[None, :]).to(CT)
    b_b = decayed(b_b, tl.exp2(-x), CT)
    b_k = decayed(b_k, tl.exp2(-x), CT)
    b_u = dot(pairs(b_a.to(CT), b_k, True), b_v).to(CT)
    if tiles.O is not None:
        i, j = indices(64, 64)
        p_T = tiles.inverse + tile * (64 * 64)
        tl.store(lower_triangle(p_T, i, j), -dot(b_a.to(CT), b_b.T), mask=j < i)
        tl.debug_barrier()
        solve(None, p_T, False)
        tl.debug_barrier()
        b_T = tl.load(p_T + i * 64 + j)
    b_u = dot(b_T, b_u).to(CT)
    b_w = dot(b_T, b_w).to(CT)
    b_P = dot(b_b.T, b_w) * to_end[:, None]
    tl.store(at(tiles.P, tile, K, K), b_P)
    b_U = dot(b_k.T, b_v, dot(b_b.T, b_u)) * to_end[:, None]
    tl.store(at(tiles.U, tile, K, V, VW), b_U, mask=o_v < V)
    q_tilde = wide(b_q) * (scale * tl.exp2(x))
    b_q = q_tilde.to(CT)
    A_qb = pairs(b_q, b_b, False)
    b_Q = dot(A_qb, b_w, q_tilde * to_start[None, :])
    tl.store(at(tiles.Q, tile, 64, K), b_Q)
    if tiles.O is not None:
        b_O = dot(pairs(b_q, b_k, False), b_v, dot(A_qb, b_u))
        tl.store(at(tiles.O, tile, 64, V, VW), b_O, mask=o_v < V)


@triton.jit
def _scan(S, tiles, o, h, start, length, first, i_h, column, takes_u, H, K, V, BV, STAGES):
    """Carry S [K, BV], columns of V from `column` on, through the chunks of one entry and head; returns the state that
    leaves. Unless takes_u, U counts as zero. Writes o, and each chunk's incoming S (h), where these are given."""
    for i_t in tl.range(0, chunks_in(length), num_stages=STAGES):
        tile = (first + i_t) * H + i_h
        S16 = S.to(tiles.P.dtype.element_ty)
        if h is not None:
            tl.store(at(h, tile, K, V, BV, column), S16)
        if o is not None:
            b_o = load_wide(at(tiles.O, tile, 64, V, BV, column))
            b_o = dot(tl.load(at(tiles.Q, tile, 64, K)), S16, b_o)
            store_tokens((o, H * V), b_o, start + i_t * 64, length - i_t * 64, i_h * V + column, BV)
        S *= tl.load(tiles.decay + tile * K + arange(K))[:, None]
        p_U = at(tiles.U, tile, K, V, BV, column)
        S += load_wide(p_U, takes_u & (arange(K) >= 0)[:, None])
        S = dot(tl.load(at(tiles.P, tile, K, K)), S16, S)
    return S


@triton.jit
def _reverse_scan(dS, do, tiles, dh, start, length, first, i_h, column, H, K, V, BV, STAGES):
    """Carry dS [K, BV] from the last chunk to the first; returns the gradient of the state that enters. Writes each
    chunk's dS' (dh) where it is given."""
    NT = chunks_in(length)
    for i in tl.range(0, NT, num_stages=STAGES):
        i_t = NT - 1 - i
        tile = (first + i_t) * H + i_h
        dS16 = dS.to(tiles.P.dtype.element_ty)
        if dh is not None:
            tl.store(at(dh, tile, K, V, BV, column), dS16)
        b_do = load_tokens(do, start + i_t * 64, length - i_t * 64, i_h * V + column, BV).to(
            dS16.dtype
        )
        dS *= tl.load(tiles.decay + tile * K + arange(K))[:, None]
        dS = dot(tl.load(at(tiles.Q, tile, 64, K)).T, b_do, dS)
        dS = dot(tl.load(at(tiles.P, tile, K, K)).T, dS16, dS)
    return dS


@Kernel
def scan_kernel(
    tiles, initial, listed, chunks,
    H: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    o=None,  # [T, H, V]
    final_state=None,  # of each entry or listed one, [., H, K, V] fp32
    M=None,  # [F, H, K, K] fp32
):  # fmt: skip
    """One (entry, head, slice of V or, for M, of K): o, and the last states. M: from the identity with U = 0."""
    i_v, i_nh, i_n, i_h = place_in_row(V // BV if M is None else (V + K) // BV, H)
    is_m = i_v >= V // BV
    if not is_wanted(listed, i_n, tl.where(is_m, 2, 1)):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    column, takes_u = i_v * BV, True
    if M is not None:
        column, takes_u = tl.where(is_m, i_v - V // BV, i_v) * BV, i_v < V // BV
    o_k, o_v = indices(K, BV)
    o_v += column
    if M is None:
        S = read_state(initial, i_n, H * K * V, i_h * K * V + o_k * V + o_v)
    else:
        S = tl.where(is_m & (o_k == o_v), 1.0, 0.0)
    S = _scan(S, tiles, o, None, start, length, first, i_h, column, takes_u, H, K, V, BV, STAGES)
    if M is not None and is_m:
        tl.store(M + i_nh * K * K + o_k * K + o_v, S)
    elif final_state is not None:
        tl.store(final_state + i_nh * K * V + o_k * V + o_v, S)


@Kernel
def states_kernel(
    do, tiles, initial, d_final, d_initial, listed, chunks,
    H: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    # [NT + N, H, K, V], the state that enters each chunk, and behind an entry's chunks its last one
    h=None,
    dh=None,  # [NT, H, K, V], the gradient of the state that leaves each chunk
):  # fmt: skip
    """One (entry, head, slice of V), in reverse for dh and the gradient of the state that enters; or, in programs of
    their own, forward for h."""
    i_p, half = tl.program_id(0), tl.num_programs(0) // 2
    i_v, _, i_n, i_h = place_in_row(V // BV, H, i_p if h is None else i_p % half)
    if not is_wanted(listed, i_n, 1):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_k, o_v = indices(K, BV)
    o_s = i_h * K * V + o_k * V + (i_v * BV + o_v)
    if h is not None and i_p < half:
        S = read_state(initial, i_n, H * K * V, o_s)
        h += i_n * (H * K * V)
        S = _scan(S, tiles, None, h, start, length, first, i_h, i_v * BV, True, H, K, V, BV, STAGES)
        tl.store(at(h, (first + chunks_in(length)) * H + i_h, K, V, BV, i_v * BV), S)
    else:
        S = read_state(d_final, i_n, H * K * V, o_s)
        S = _reverse_scan(
            S, do, tiles, dh, start, length, first, i_h, i_v * BV, H, K, V, BV, STAGES
        )
        write_state(d_initial, i_n, H * K * V, o_s, S)


@triton.jit
def finish(d, x, factor, dx, keys, H, K, CT):
    """Store the gradient of the head's rows x from d, that of x times factor; returns the product of these two."""
    store_tokens((dx, H * K), d * factor, *keys, K)
    return wide(decayed(x, factor, CT)) * d


@Kernel
def gradient_kernel(
    do, q, k, v, a, b, w,  # (x, stride)
    inverse, h, dh,
    dq, dk, dv, da, db, dw,  # as the inputs, dense
    # [NT, H, 65, K] fp32, room for Γ behind that of no token, both relative to the reference
    exponents,
    chunks, scale, H: constexpr, K: constexpr, V: constexpr, RATE: constexpr,
):  # fmt: skip
    """One (chunk, head). What would hold registers meanwhile is read or computed again.

    Of dΓ, each pair of tokens (i, j) gives +x at i and −x at j from the same rounded operands, which cancel in dw. Its
    parts enter dw one by one: a product stays where it is, while additions would be moved to the end of the kernel by
    the compiler, which holds all that they need until then."""
    CT: constexpr = h.dtype.element_ty
    _, i_h, tile, start, n = chunk_and_head(chunks, H, 1)
    keys = start, n, i_h * K
    b_w = load_gates(w, *keys, K, RATE)
    b_q = load_tokens(q, *keys, K)
    b_a = load_tokens(a, *keys, K)
    b_k = load_tokens(k, *keys, K)
    b_b = load_tokens(b, *keys, K)
    values = start, n, i_h * V
    b_v = load_tokens(v, *values, V).to(CT)
    b_do = load_tokens(do, *values, V).to(CT)
    x, before, to_start, to_end, _ = decays(b_w, CT, RATE)
    o_c, o_k = indices(64, K)
    exponents += tile * (65 * K) + o_k
    p_before = exponents + o_c * K
    p_x = p_before + K
    tl.store(p_before, before, mask=o_c == 0)
    tl.store(p_x, x)
    b_q = decayed(b_q, scale * tl.exp2(x), CT)
    b_a = decayed(b_a, tl.exp2(before), CT)
    b_k = decayed(b_k, tl.exp2(-x), CT)
    b_b = decayed(b_b, tl.exp2(-x), CT)
    b_T = tl.load(at(inverse, tile, 64, 64))
    enters = tile + tl.load(chunks[1] + 2 * (tl.program_id(0) // H)) * H
    b_h = tl.load(at(h, enters, K, V))
    leaves = tl.load(at(h, enters + H, K, V))
    b_dh = tl.load(at(dh, tile, K, V))
    dgamma = tl.sum(wide(leaves) * wide(b_dh), 1)
    b_h = (b_h * to_start[:, None]).to(CT)
    b_dh = (b_dh * to_end[:, None]).to(CT)
    b_y = dot(pairs(b_a, b_k, True), b_v, dot(b_a, b_h)).to(CT)
    b_y = dot(b_T, b_y).to(CT)
    b_z = dot(pairs_back(b_b, b_q, False), b_do, dot(b_b, b_dh)).to(CT)
    b_z = dot(b_T.T, b_z).to(CT)
    b_dv = dot(pairs_back(b_k, b_a, True), b_z, dot(b_k, b_dh))
    b_dv = dot(pairs_back(b_k, b_q, False), b_do, b_dv)
    store_tokens((dv, H * V), b_dv, *values, V)

    tl.debug_barrier()
    d = dot(b_do, b_h.T)
    d = dot(pairs(b_do, b_v, False), b_k, d)
    d = dot(pairs(b_do, b_y, False), b_b, d)
    x, factor = load_tokens(q, *keys, K), scale * tl.exp2(tl.load(p_x))
    i, j = indices(64, 64)
    later = j >= i
    b_dw = sums(finish(d, x, factor, dq, keys, H, K, CT), later, CT)
    d = dot(b_v, b_dh.T)
    d = dot(pairs_back(b_v, b_do, False), b_q, d)
    d = dot(pairs_back(b_v, b_z, True), b_a, d)
    x, factor = load_tokens(k, *keys, K), tl.exp2(-tl.load(p_x))
    b_dw = sums(-finish(d, x, factor, dk, keys, H, K, CT), later, CT, b_dw)
    d = dot(b_y, b_dh.T)
    d = dot(pairs_back(b_y, b_do, False), b_q, d)
    d = dot(pairs_back(b_y, b_z, True), b_a, d)
    x, factor = load_tokens(b, *keys, K), tl.exp2(-tl.load(p_x))
    b_dw = sums(-finish(d, x, factor, db, keys, H, K, CT), later, CT, b_dw)
    d = dot(b_z, b_h.T)
    d = dot(pairs(b_z, b_v, True), b_k, d)
    d = dot(pairs(b_z, b_y, True), b_b, d)
    x, factor = load_tokens(a, *keys, K), tl.exp2(tl.load(p_before))
    d = finish(d, x, factor, da, keys, H, K, CT)
    b_dw = sums(d, later, CT, b_dw) - d + dgamma[None, :]
    if RATE is not None:
        rate = sigmoid(wide(load_tokens(w, *keys, K)))
        b_dw *= RATE * rate * (1.0 - rate)
    store_tokens((dw, H * K), b_dw, *keys, K)
