"""Kernels of the recurrence whose transition is a diagonal matrix plus a rank-one matrix,
with bounded decays (RWKV-7).

Letters: C = 64 tokens of a chunk, Γ the inclusive cumulative log decay inside it (log2), γ
its last row, Γ' the sum up to the previous token. With q̃ = scale·q·2^Γ, ã = a·2^Γ', k̂ =
k·2^(γ−Γ), b̂ = b·2^(γ−Γ), products of pairs such as A_ab[i,j] = Σ_k a_i b_j 2^(Γ'_i−Γ_j) (j
< i for a, j ≤ i for q), and S the incoming state, the reads of a chunk are

    y = T (ã S + A_ak v)        T = (I − A_ab)⁻¹
    o = q̃ S + A_qk v + A_qb y
    S' = 2^γ S + k̂ᵀ v + b̂ᵀ y

Everything that does not depend on S is computed chunk by chunk (w = T ã, u = T A_ak v), so
that a scan has one product in its chain:

    o = Q S + O        Q = q̃ + A_qb w        O = A_qk v + A_qb u
    S' = 2^γ S + P S + U        P = b̂ᵀ w        U = k̂ᵀ v + b̂ᵀ u
    dS = 2^γ dS' + Pᵀ dS' + Qᵀ do

The gradients follow from the first form, for S and dS' of each chunk. z is the gradient of
the right-hand side of the reads' system:

    z = Tᵀ (A_qbᵀ do + b̂ dS')        dv = A_qkᵀ do + A_akᵀ z + k̂ dS'
    dA_qk = do vᵀ    dA_qb = do yᵀ    dA_ak = z vᵀ    dA_ab = z yᵀ
    dq̃ = do Sᵀ    dã = z Sᵀ    dk̂ = v dS'ᵀ    db̂ = y dS'ᵀ        dγ = Σ_v S' ⊙ dS'

A chunk has one reference, the whole number nearest to γ/2. With decays of at least e^-2 per
token, factors relative to it stay within 2^±93, which bf16 holds, so no pair needs another
reference. T is computed by forward substitution in fp32 (solve.py), since powers of A_ab
may be large. Other products take operands in the compute dtype and accumulate in fp32.
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
    """Sum rows of x [64, K] in fp32 (+ acc): row i of the result sums the rows j with
    of[i, j], of [64, 64]. The sums are a product with x in two bf16 parts, with an error of
    2^-16 of the terms."""
    ones = tl.where(of, 1.0, 0.0).to(CT)
    if CT == tl.float32:  # noqa: SIM300
        return dot(ones, x, acc)
    else:
        high, low = split(x)
        return dot(ones, high, dot(ones, low, acc))


@triton.jit
def load_gates(w, start, n, column, K, RATE):
    """Load gates like `load_tokens`, with a decay of 1 past the end."""
    o_c, o_k = indices(64, K)
    none: constexpr = 0.0 if RATE is None else float("-inf")
    p_w, stride = w
    return tl.load(p_w + start * stride + column + (o_c * stride + o_k), mask=o_c < n, other=none)


@triton.jit
def load_narrow(x, start, n, column, V, WIDTH):
    """Load V columns like `load_tokens`, padded with zeros to WIDTH columns."""
    o_c, o_v = indices(64, WIDTH)
    inside = (o_c < n) & (o_v < V)
    p_x, stride = x
    return masked(p_x + start * stride + column + (o_c * stride + o_v), mask=inside)


@triton.jit
def decays(b_w, CT, RATE):
    """Return a chunk's decays from its gates [64, K]: Γ and Γ' relative to its reference,
    both [64, K]; and 2^reference, 2^(γ − reference) and 2^γ, all [K].

    Gates are log decays, or with RATE logits whose sigmoids are multiplied by RATE.
    """
    g = wide(b_w) * LOG2E if RATE is None else sigmoid(wide(b_w)) * (RATE * LOG2E)
    gamma = tl.sum(g, 0)
    reference = tl.floor(0.5 * gamma + 0.5)
    i, j = indices(64, 64)
    # The products have another layout than g, and a sigmoid would be computed again for it.
    x = sums(g, j <= i, CT) - reference[None, :]
    before = x - g if RATE is None else sums(g, j < i, CT) - reference[None, :]
    return x, before, tl.exp2(reference), tl.exp2(gamma - reference), tl.exp2(gamma)


@triton.jit
def decayed(x, factor, CT):
    return (wide(x) * factor).to(CT)


@triton.jit
def pairs(x, y, STRICT):
    """Return x yᵀ [64, 64] for tokens of y before tokens of x, and for equal tokens unless
    STRICT. The rest is 0, because the product may overflow there."""
    i, j = indices(64, 64)
    return tl.where((j < i) if STRICT else (j <= i), dot(x, y.T), 0.0).to(x.dtype)


@triton.jit
def pairs_back(y, x, STRICT):
    """Return the transpose of pairs(x, y), computed as a separate product. It costs the
    same, and no result is held in the meantime."""
    i, j = indices(64, 64)
    return tl.where((i < j) if STRICT else (i <= j), dot(y, x.T), 0.0).to(x.dtype)


@triton.jit
def at(p, tile, ROWS, COLUMNS, WIDTH=None, column=0):
    """Return the addresses of a tile (64 bits), or of WIDTH columns of it starting at
    `column`, in p [tiles, ROWS, COLUMNS]."""
    p += tile * (ROWS * COLUMNS) + column
    o_r, o_c = indices(ROWS, COLUMNS if WIDTH is None else WIDTH)
    return p + (o_r * COLUMNS + o_c)


@Kernel
def prepare_kernel(
    q, k, v, a, b, w,  # (x, stride)
    tiles,  # without O, T is read instead of computed
    chunks, scale, H: constexpr, K: constexpr, V: constexpr, RATE: constexpr,
):  # fmt: skip
    """Compute the tiles of one (chunk, head).

    All loads come first: between barriers each would wait for memory by itself. In 16 bits
    values are at least 64 wide, because ptxas 12.8 miscompiles descriptors of narrower
    ones.
    """
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
    # Decay a, b and k relative to the chunk's reference.
    b_a = wide(b_a) * tl.exp2(before)
    b_w = (b_a * to_start[None, :]).to(CT)
    b_b = decayed(b_b, tl.exp2(-x), CT)
    b_k = decayed(b_k, tl.exp2(-x), CT)
    b_u = dot(pairs(b_a.to(CT), b_k, True), b_v).to(CT)
    # Forward solves for T; backward has kept it.
    if tiles.O is not None:
        i, j = indices(64, 64)
        p_T = tiles.inverse + tile * (64 * 64)
        tl.store(lower_triangle(p_T, i, j), -dot(b_a.to(CT), b_b.T), mask=j < i)
        tl.debug_barrier()
        solve(None, p_T, False)
        tl.debug_barrier()
        b_T = tl.load(p_T + i * 64 + j)
    # u, w, and from these the tiles P and U of the state's update.
    b_u = dot(b_T, b_u).to(CT)
    b_w = dot(b_T, b_w).to(CT)
    b_P = dot(b_b.T, b_w) * to_end[:, None]
    tl.store(at(tiles.P, tile, K, K), b_P)
    b_U = dot(b_k.T, b_v, dot(b_b.T, b_u)) * to_end[:, None]
    tl.store(at(tiles.U, tile, K, V, VW), b_U, mask=o_v < V)
    # The tiles Q and O of the output.
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
    """Carry S [K, BV], BV columns of V starting at `column`, through the chunks of one
    entry and head, and return the state that leaves.

    Unless takes_u, U counts as zero. Writes o and each chunk's incoming S (h) where these
    are given.
    """
    for i_t in tl.range(0, chunks_in(length), num_stages=STAGES):
        tile = (first + i_t) * H + i_h
        S16 = S.to(tiles.P.dtype.element_ty)
        if h is not None:
            tl.store(at(h, tile, K, V, BV, column), S16)
        if o is not None:
            b_o = load_wide(at(tiles.O, tile, 64, V, BV, column))
            b_o = dot(tl.load(at(tiles.Q, tile, 64, K)), S16, b_o)
            store_tokens((o, H * V), b_o, start + i_t * 64, length - i_t * 64, i_h * V + column, BV)
        # S' = 2^γ S + U + P S.
        S *= tl.load(tiles.decay + tile * K + arange(K))[:, None]
        p_U = at(tiles.U, tile, K, V, BV, column)
        S += load_wide(p_U, takes_u & (arange(K) >= 0)[:, None])
        S = dot(tl.load(at(tiles.P, tile, K, K)), S16, S)
    return S


@triton.jit
def _reverse_scan(dS, do, tiles, dh, start, length, first, i_h, column, H, K, V, BV, STAGES):
    """Carry dS [K, BV] from the last chunk to the first, and return the gradient of the
    state that enters. Writes each chunk's dS' (dh) where it is given."""
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
        # dS = 2^γ dS' + Qᵀ do + Pᵀ dS'.
        dS *= tl.load(tiles.decay + tile * K + arange(K))[:, None]
        dS = dot(tl.load(at(tiles.Q, tile, 64, K)).T, b_do, dS)
        dS = dot(tl.load(at(tiles.P, tile, K, K)).T, dS16, dS)
    return dS


@Kernel
def scan_kernel(
    tiles, initial, listed, chunks,
    H: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    o=None,  # [T, H, V]
    final_state=None,  # of all or of the listed entries, [., H, K, V] fp32
    M=None,  # [F, H, K, K] fp32
):  # fmt: skip
    """Scan one (entry, head, slice of V or, for M, of K): o, and the last states. M is the
    scan from the identity with U = 0."""
    i_v, i_nh, i_n, i_h = place_in_row(V // BV if M is None else (V + K) // BV, H)
    is_m = i_v >= V // BV
    if not is_wanted(listed, i_n, tl.where(is_m, 2, 1)):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    # The slices of M follow the slices of V.
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
    # [NT + N, H, K, V], the state that enters each chunk, and after an entry's chunks its
    # last state
    h=None,
    dh=None,  # [NT, H, K, V], the gradient of the state that leaves each chunk
):  # fmt: skip
    """Scan one (entry, head, slice of V) in reverse, for dh and the gradient of the state
    that enters. Other programs scan forward for h."""
    i_p, half = tl.program_id(0), tl.num_programs(0) // 2
    i_v, _, i_n, i_h = place_in_row(V // BV, H, i_p if h is None else i_p % half)
    if not is_wanted(listed, i_n, 1):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_k, o_v = indices(K, BV)
    o_s = i_h * K * V + o_k * V + (i_v * BV + o_v)
    # The first half of the programs scans forward if h is wanted.
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
    """Store the gradient of the head's rows x, which is d · factor for d the gradient of x
    · factor. Returns x · factor · d."""
    store_tokens((dx, H * K), d * factor, *keys, K)
    return wide(decayed(x, factor, CT)) * d


@Kernel
def gradient_kernel(
    do, q, k, v, a, b, w,  # (x, stride)
    inverse, h, dh,
    dq, dk, dv, da, db, dw,  # shaped like the inputs, dense
    # [NT, H, 65, K] fp32 scratch for Γ' and Γ relative to the reference: row 0 precedes the
    # first token, and row i + 1 belongs to token i
    exponents,
    chunks, scale, H: constexpr, K: constexpr, V: constexpr, RATE: constexpr,
):  # fmt: skip
    """Compute the gradients of one (chunk, head). Values that would hold registers in the
    meantime are read or computed again.

    In dΓ, each pair of tokens (i, j) gives +x at i and −x at j from the same rounded
    operands, which cancel in dw. The parts of dΓ enter dw one by one, each by a product.
    The compiler leaves products in place, but would move additions to the end of the kernel
    and hold their operands until then."""
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
    # Store the exponents, so that factors can be computed again below.
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
    # States at the chunk's boundaries, and dγ.
    b_T = tl.load(at(inverse, tile, 64, 64))
    enters = tile + tl.load(chunks[1] + 2 * (tl.program_id(0) // H)) * H
    b_h = tl.load(at(h, enters, K, V))
    leaves = tl.load(at(h, enters + H, K, V))
    b_dh = tl.load(at(dh, tile, K, V))
    dgamma = tl.sum(wide(leaves) * wide(b_dh), 1)
    b_h = (b_h * to_start[:, None]).to(CT)
    b_dh = (b_dh * to_end[:, None]).to(CT)
    # y, z and dv.
    b_y = dot(pairs(b_a, b_k, True), b_v, dot(b_a, b_h)).to(CT)
    b_y = dot(b_T, b_y).to(CT)
    b_z = dot(pairs_back(b_b, b_q, False), b_do, dot(b_b, b_dh)).to(CT)
    b_z = dot(b_T.T, b_z).to(CT)
    b_dv = dot(pairs_back(b_k, b_a, True), b_z, dot(b_k, b_dh))
    b_dv = dot(pairs_back(b_k, b_q, False), b_do, b_dv)
    store_tokens((dv, H * V), b_dv, *values, V)

    tl.debug_barrier()
    # dq.
    d = dot(b_do, b_h.T)
    d = dot(pairs(b_do, b_v, False), b_k, d)
    d = dot(pairs(b_do, b_y, False), b_b, d)
    x, factor = load_tokens(q, *keys, K), scale * tl.exp2(tl.load(p_x))
    i, j = indices(64, 64)
    later = j >= i
    b_dw = sums(finish(d, x, factor, dq, keys, H, K, CT), later, CT)
    # dk.
    d = dot(b_v, b_dh.T)
    d = dot(pairs_back(b_v, b_do, False), b_q, d)
    d = dot(pairs_back(b_v, b_z, True), b_a, d)
    x, factor = load_tokens(k, *keys, K), tl.exp2(-tl.load(p_x))
    b_dw = sums(-finish(d, x, factor, dk, keys, H, K, CT), later, CT, b_dw)
    # db.
    d = dot(b_y, b_dh.T)
    d = dot(pairs_back(b_y, b_do, False), b_q, d)
    d = dot(pairs_back(b_y, b_z, True), b_a, d)
    x, factor = load_tokens(b, *keys, K), tl.exp2(-tl.load(p_x))
    b_dw = sums(-finish(d, x, factor, db, keys, H, K, CT), later, CT, b_dw)
    # da, and the last part of dw.
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
