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

from titan_linear.ops.triton.chunks import locate, locate_entry
from titan_linear.ops.triton.gates import LOG2E, sigmoid
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.solve import lower_triangle, solve, split
from titan_linear.ops.triton.tiles import load_rows, load_state, store_rows, store_state


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc), fp32 accumulation; fp32 operands as three products of tf32 parts."""
    return tl.dot(a, b, acc=acc, input_precision="tf32x3")


@triton.jit
def sums(x, of, CT: tl.constexpr, acc=None):
    """Of the rows `of` [64, 64] of x [64, K] in fp32 (+ acc); as a product, x in two bf16 parts (an error of 2^-16 of
    the terms)."""
    ones = tl.where(of, 1.0, 0.0).to(CT)
    if CT == tl.float32:  # noqa: SIM300
        return dot(ones, x, acc)
    else:
        high, low = split(x)
        return dot(ones, high, dot(ones, low, acc))


@triton.jit
def load_gates(w, start, rows, stride, column, K: tl.constexpr, LOWER_BOUND: tl.constexpr):
    """As `load_rows`, with a decay of 1 past the end."""
    o_c, o_k = tl.arange(0, 64)[:, None], tl.arange(0, K)[None, :]
    none: tl.constexpr = 0.0 if LOWER_BOUND is None else float("-inf")
    return tl.load(w + start * stride + column + (o_c * stride + o_k), mask=o_c < rows, other=none)


@triton.jit
def load_narrow(x, start, rows, stride, column, V: tl.constexpr, WIDTH: tl.constexpr):
    """As `load_rows`, of V columns, with zeros up to WIDTH."""
    o_c, o_v = tl.arange(0, 64)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (o_c < rows) & (o_v < V)
    return tl.load(x + start * stride + column + (o_c * stride + o_v), mask=inside, other=0.0)


@triton.jit
def decays(b_w, CT: tl.constexpr, LOWER_BOUND: tl.constexpr):
    """Of a chunk's gates [64, K]: Γ and Γ' relative to its reference [64, K]; 2^reference, 2^(γ − reference) and
    2^γ [K]. Gates are log decays, or with LOWER_BOUND the logits of what it is multiplied by."""
    g = b_w.to(tl.float32) * LOG2E if LOWER_BOUND is None else sigmoid(b_w.to(tl.float32)) * (LOWER_BOUND * LOG2E)
    gamma = tl.sum(g, 0)
    reference = tl.floor(0.5 * gamma + 0.5)
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    x = sums(g, j <= i, CT) - reference[None, :]  # in another layout than g, for which a sigmoid is computed again
    before = x - g if LOWER_BOUND is None else sums(g, j < i, CT) - reference[None, :]
    return x, before, tl.exp2(reference), tl.exp2(gamma - reference), tl.exp2(gamma)


@triton.jit
def decayed(x, factor, CT: tl.constexpr):
    return (x.to(tl.float32) * factor).to(CT)


@triton.jit
def pairs(x, y, CT: tl.constexpr, STRICT: tl.constexpr):
    """x yᵀ [64, 64] for tokens of y before those of x, and the same ones unless STRICT; 0 elsewhere, where the product
    may overflow."""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    return tl.where((j < i) if STRICT else (j <= i), dot(x, tl.trans(y)), 0.0).to(CT)


@triton.jit
def pairs_back(y, x, CT: tl.constexpr, STRICT: tl.constexpr):
    """The transpose of pairs(x, y), a product of its own: it costs no more, and nothing is held meanwhile."""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    return tl.where((i < j) if STRICT else (i <= j), dot(y, tl.trans(x)), 0.0).to(CT)


@triton.jit
def at(p, tile, ROWS: tl.constexpr, column, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Where WIDTH columns of a tile (64 bits), from `column` on, lie in p [tiles, ROWS, COLUMNS]."""
    p += tile * (ROWS * COLUMNS) + column
    return p + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, WIDTH)[None, :])


@Kernel
def prepare_kernel(
    q, k,  # [T, H, K]
    v,  # [T, H, V]
    a, b, w,  # [T, H, K]
    P,  # [NT, H, K, K]
    U,  # [NT, H, K, V]
    Q,  # [NT, H, 64, K]
    decay,  # [NT, H, K] fp32
    inverse,  # [NT, H, 64, 64], T
    O,  # [NT, H, 64, V], or None: T is given, and is computed otherwise
    cu_seqlens, chunk_index, scale, stride_q, stride_k, stride_v, stride_a, stride_b, stride_w,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CT: tl.constexpr, LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """One (chunk, head). All loads come first: between barriers each would wait for the memory by itself. In 16 bits
    values are at least 64 wide: ptxas 12.8 gets descriptors of narrower ones wrong."""
    VW: tl.constexpr = V if CT == tl.float32 else 64  # noqa: SIM300
    o_v = tl.arange(0, VW)[None, :]
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    start, n = locate(chunk_index, cu_seqlens, i_t, 64)
    tile = i_t.to(tl.int64) * H + i_h
    o_k = i_h * K
    b_w = load_gates(w, start, n, stride_w, o_k, K, LOWER_BOUND)
    b_a = load_rows(a, start, n, stride_a, o_k, 64, K)
    b_b = load_rows(b, start, n, stride_b, o_k, 64, K)
    b_k = load_rows(k, start, n, stride_k, o_k, 64, K)
    b_v = load_narrow(v, start, n, stride_v, i_h * V, V, VW).to(CT)
    b_q = load_rows(q, start, n, stride_q, o_k, 64, K)
    if O is None:
        b_T = tl.load(at(inverse, tile, 64, 0, 64, 64))
    x, before, to_start, to_end, b_decay = decays(b_w, CT, LOWER_BOUND)
    tl.store(decay + tile * K + tl.arange(0, K), b_decay)
    b_a = b_a.to(tl.float32) * tl.exp2(before)
    b_w = (b_a * to_start[None, :]).to(CT)
    b_b = decayed(b_b, tl.exp2(-x), CT)
    b_k = decayed(b_k, tl.exp2(-x), CT)
    b_u = dot(pairs(b_a.to(CT), b_k, CT, True), b_v).to(CT)
    if O is not None:
        i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
        p_T = inverse + tile * (64 * 64)
        tl.store(lower_triangle(p_T, i, j), -dot(b_a.to(CT), tl.trans(b_b)), mask=j < i)
        tl.debug_barrier()
        solve(None, p_T, False)
        tl.debug_barrier()
        b_T = tl.load(p_T + i * 64 + j)
    b_u = dot(b_T, b_u).to(CT)
    b_w = dot(b_T, b_w).to(CT)
    b_P = dot(tl.trans(b_b), b_w) * to_end[:, None]
    tl.store(at(P, tile, K, 0, K, K), b_P.to(CT))
    b_U = dot(tl.trans(b_k), b_v, dot(tl.trans(b_b), b_u)) * to_end[:, None]
    tl.store(at(U, tile, K, 0, V, VW), b_U.to(CT), mask=o_v < V)
    q_tilde = b_q.to(tl.float32) * (scale * tl.exp2(x))
    b_q = q_tilde.to(CT)
    A_qb = pairs(b_q, b_b, CT, False)
    b_Q = dot(A_qb, b_w, q_tilde * to_start[None, :])
    tl.store(at(Q, tile, 64, 0, K, K), b_Q.to(CT))
    if O is not None:
        b_O = dot(pairs(b_q, b_k, CT, False), b_v, dot(A_qb, b_u))
        tl.store(at(O, tile, 64, 0, V, VW), b_O.to(CT), mask=o_v < V)


@triton.jit
def _scan(
    S, P, U, Q, decay, O, o, h, start, length, first, i_h, column, takes_u,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carry S [K, BV], columns of V from `column` on, through the chunks of one entry and head; returns the state that
    leaves. Unless takes_u, U counts as zero. Writes o, and each chunk's incoming S (h), where these are given."""
    for i_t in tl.range(0, (length + 63) // 64, num_stages=STAGES):
        tile = (first + i_t) * H + i_h
        S16 = S.to(CT)
        if h is not None:
            tl.store(at(h, tile, K, column, V, BV), S16)
        if o is not None:
            b_o = tl.load(at(O, tile, 64, column, V, BV)).to(tl.float32)
            b_o = dot(tl.load(at(Q, tile, 64, 0, K, K)), S16, b_o)
            store_rows(o, b_o, start + i_t * 64, length - i_t * 64, H * V, i_h * V + column, 64, BV)
        S *= tl.load(decay + tile * K + tl.arange(0, K))[:, None]
        p_U = at(U, tile, K, column, V, BV)
        S += tl.load(p_U, mask=takes_u & (tl.arange(0, K) >= 0)[:, None], other=0.0).to(tl.float32)
        S = dot(tl.load(at(P, tile, K, 0, K, K)), S16, S)
    return S


@triton.jit
def _reverse_scan(
    dS, do, P, Q, decay, dh, start, length, first, i_h, column, stride_do,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carry dS [K, BV] from the last chunk to the first; returns the gradient of the state that enters. Writes each
    chunk's dS' (dh) where it is given."""
    NT = (length + 63) // 64
    for i in tl.range(0, NT, num_stages=STAGES):
        i_t = NT - 1 - i
        tile = (first + i_t) * H + i_h
        dS16 = dS.to(CT)
        if dh is not None:
            tl.store(at(dh, tile, K, column, V, BV), dS16)
        b_do = load_rows(do, start + i_t * 64, length - i_t * 64, stride_do, i_h * V + column, 64, BV).to(CT)
        dS *= tl.load(decay + tile * K + tl.arange(0, K))[:, None]
        dS = dot(tl.trans(tl.load(at(Q, tile, 64, 0, K, K))), b_do, dS)
        dS = dot(tl.trans(tl.load(at(P, tile, K, 0, K, K))), dS16, dS)
    return dS


@Kernel
def scan_kernel(
    P, U, Q, decay, O, initial_state, state_index,
    o,  # [T, H, V]
    final_state, cu_seqlens, chunk_offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (entry, head, slice of V): o, and the last states where they are given."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, i_n)
    o_s = i_h * K * V + tl.arange(0, K)[:, None] * V + (i_v * BV + tl.arange(0, BV))[None, :]
    S = tl.zeros([K, BV], tl.float32)
    if initial_state is not None:
        S += load_state(initial_state, state_index, i_n, H * K * V, o_s)
    S = _scan(
        S, P, U, Q, decay, O, o, None, start, length, first, i_h, i_v * BV, True, H, K, V, BV, CT, STAGES
    )  # fmt: skip
    if final_state is not None:
        store_state(final_state, None, i_n, H * K * V, o_s, S)


@Kernel
def states_kernel(
    do,  # [T, H, V]
    P, U, Q, decay, initial_state, state_index, d_final_state, final_index,
    h,  # [NT + N, H, K, V], the state that enters each chunk, and behind an entry's chunks its last one
    dh,  # [NT, H, K, V], the gradient of the state that leaves each chunk
    d_initial_state, cu_seqlens, chunk_offsets, stride_do,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (direction, entry, head, slice of V), for backward."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, i_n)
    o_s = i_h * K * V + tl.arange(0, K)[:, None] * V + (i_v * BV + tl.arange(0, BV))[None, :]
    S = tl.zeros([K, BV], tl.float32)
    if tl.program_id(2) == 0:
        if initial_state is not None:
            S += load_state(initial_state, state_index, i_n, H * K * V, o_s)
        h += i_n * (H * K * V)
        S = _scan(
            S, P, U, Q, decay, None, None, h, start, length, first, i_h, i_v * BV, True, H, K, V, BV, CT, STAGES
        )  # fmt: skip
        tl.store(at(h, (first + (length + 63) // 64) * H + i_h, K, i_v * BV, V, BV), S.to(CT))
    else:
        if d_final_state is not None:
            S += load_state(d_final_state, final_index, i_n, H * K * V, o_s)
        S = _reverse_scan(
            S, do, P, Q, decay, dh, start, length, first, i_h, i_v * BV, stride_do, H, K, V, BV, CT, STAGES
        )  # fmt: skip
        if d_initial_state is not None:
            store_state(d_initial_state, state_index, i_n, H * K * V, o_s, S)


@Kernel
def boundary_kernel(
    P, U, decay,
    entries,  # [F]
    wanted,  # [F] what is written for an entry, 0: nothing, 1: S_ext, 2: M too; None: 2 for all
    S_ext,  # [F, H, K, V] fp32
    M,  # [F, H, K, K] fp32
    cu_seqlens, chunk_offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (listed entry, head, slice of V for S_ext or of K for M). S_ext: the scan from a zero state. M: the scan with
    U = 0 from the identity."""
    i_v, i_fh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_f, i_h = i_fh // H, i_fh % H
    is_m = i_v >= V // BV
    if wanted is not None and tl.load(wanted + i_f) < tl.where(is_m, 2, 1):
        return
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, tl.load(entries + i_f).to(tl.int64))
    column = tl.where(is_m, i_v - V // BV, i_v) * BV
    o_k, o_v = tl.arange(0, K)[:, None], column + tl.arange(0, BV)[None, :]
    S = tl.where(is_m & (o_k == o_v), 1.0, 0.0)
    S = _scan(
        S, P, U, None, decay, None, None, None, start, length, first, i_h, column, i_v < V // BV,
        H, K, V, BV, CT, STAGES,
    )  # fmt: skip
    if is_m:
        tl.store(M + i_fh * K * K + o_k * K + o_v, S)
    else:
        tl.store(S_ext + i_fh * K * V + o_k * V + o_v, S)


@Kernel
def boundary_bwd_kernel(
    do,  # [T, H, V]
    P, Q, decay,
    entries,  # [F]
    wanted,  # [F] 0: nothing is written for an entry; None: all are
    dS_ext,  # [F, H, K, V] fp32
    cu_seqlens, chunk_offsets, stride_do,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (listed entry, head, slice of V): the reverse scan from a zero gradient."""
    i_v, i_fh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_f, i_h = i_fh // H, i_fh % H
    if wanted is not None and tl.load(wanted + i_f) == 0:
        return
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, tl.load(entries + i_f).to(tl.int64))
    dS = _reverse_scan(
        tl.zeros([K, BV], tl.float32), do, P, Q, decay, None, start, length, first, i_h, i_v * BV, stride_do,
        H, K, V, BV, CT, STAGES,
    )  # fmt: skip
    tl.store(at(dS_ext, i_fh, K, i_v * BV, V, BV), dS)


@triton.jit
def finish(d, x, factor, dx, start, n, i_h, H: tl.constexpr, K: tl.constexpr, CT: tl.constexpr):
    """Store the gradient of the head's rows x from d, that of x times factor; returns the product of these two."""
    store_rows(dx, d * factor, start, n, H * K, i_h * K, 64, K)
    return decayed(x, factor, CT).to(tl.float32) * d


@Kernel
def gradient_kernel(
    do, q, k, v, a, b, w, inverse, h, dh,
    dq, dk, dv, da, db, dw,  # as the inputs, dense
    exponents,  # [NT, H, 65, K] fp32, room for Γ behind that of no token, both relative to the reference
    cu_seqlens, chunk_index, scale, stride_do, stride_q, stride_k, stride_v, stride_a, stride_b, stride_w,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CT: tl.constexpr, LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """One (chunk, head). What would hold registers meanwhile is read or computed again.

    Of dΓ, each pair of tokens (i, j) gives +x at i and −x at j from the same rounded operands, which cancel in dw. Its
    parts enter dw one by one: a product stays where it is, while additions would be moved to the end of the kernel by
    the compiler, which holds all that they need until then."""
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    start, n = locate(chunk_index, cu_seqlens, i_t, 64)
    tile = i_t.to(tl.int64) * H + i_h
    q += i_h * K
    k += i_h * K
    a += i_h * K
    b += i_h * K
    w += i_h * K
    b_w = load_gates(w, start, n, stride_w, 0, K, LOWER_BOUND)
    b_q = load_rows(q, start, n, stride_q, 0, 64, K)
    b_a = load_rows(a, start, n, stride_a, 0, 64, K)
    b_k = load_rows(k, start, n, stride_k, 0, 64, K)
    b_b = load_rows(b, start, n, stride_b, 0, 64, K)
    b_v = load_rows(v, start, n, stride_v, i_h * V, 64, V).to(CT)
    b_do = load_rows(do, start, n, stride_do, i_h * V, 64, V).to(CT)
    x, before, to_start, to_end, _ = decays(b_w, CT, LOWER_BOUND)
    exponents += tile * (65 * K) + tl.arange(0, K)[None, :]
    p_before = exponents + tl.arange(0, 64)[:, None] * K
    p_x = p_before + K
    tl.store(p_before, before, mask=tl.arange(0, 64)[:, None] == 0)
    tl.store(p_x, x)
    b_q = decayed(b_q, scale * tl.exp2(x), CT)
    b_a = decayed(b_a, tl.exp2(before), CT)
    b_k = decayed(b_k, tl.exp2(-x), CT)
    b_b = decayed(b_b, tl.exp2(-x), CT)
    b_T = tl.load(at(inverse, tile, 64, 0, 64, 64))
    enters = tile + tl.load(chunk_index + 2 * i_t) * H
    b_h = tl.load(at(h, enters, K, 0, V, V))
    leaves = tl.load(at(h, enters + H, K, 0, V, V))
    b_dh = tl.load(at(dh, tile, K, 0, V, V))
    dgamma = tl.sum(leaves.to(tl.float32) * b_dh.to(tl.float32), 1)
    b_h = (b_h * to_start[:, None]).to(CT)
    b_dh = (b_dh * to_end[:, None]).to(CT)
    b_y = dot(pairs(b_a, b_k, CT, True), b_v, dot(b_a, b_h)).to(CT)
    b_y = dot(b_T, b_y).to(CT)
    b_z = dot(pairs_back(b_b, b_q, CT, False), b_do, dot(b_b, b_dh)).to(CT)
    b_z = dot(tl.trans(b_T), b_z).to(CT)
    b_dv = dot(pairs_back(b_k, b_a, CT, True), b_z, dot(b_k, b_dh))
    b_dv = dot(pairs_back(b_k, b_q, CT, False), b_do, b_dv)
    store_rows(dv, b_dv, start, n, H * V, i_h * V, 64, V)

    tl.debug_barrier()
    d = dot(b_do, tl.trans(b_h))
    d = dot(pairs(b_do, b_v, CT, False), b_k, d)
    d = dot(pairs(b_do, b_y, CT, False), b_b, d)
    x, factor = load_rows(q, start, n, stride_q, 0, 64, K), scale * tl.exp2(tl.load(p_x))
    later = tl.arange(0, 64)[None, :] >= tl.arange(0, 64)[:, None]
    b_dw = sums(finish(d, x, factor, dq, start, n, i_h, H, K, CT), later, CT)
    d = dot(b_v, tl.trans(b_dh))
    d = dot(pairs_back(b_v, b_do, CT, False), b_q, d)
    d = dot(pairs_back(b_v, b_z, CT, True), b_a, d)
    x, factor = load_rows(k, start, n, stride_k, 0, 64, K), tl.exp2(-tl.load(p_x))
    b_dw = sums(-finish(d, x, factor, dk, start, n, i_h, H, K, CT), later, CT, b_dw)
    d = dot(b_y, tl.trans(b_dh))
    d = dot(pairs_back(b_y, b_do, CT, False), b_q, d)
    d = dot(pairs_back(b_y, b_z, CT, True), b_a, d)
    x, factor = load_rows(b, start, n, stride_b, 0, 64, K), tl.exp2(-tl.load(p_x))
    b_dw = sums(-finish(d, x, factor, db, start, n, i_h, H, K, CT), later, CT, b_dw)
    d = dot(b_z, tl.trans(b_h))
    d = dot(pairs(b_z, b_v, CT, True), b_k, d)
    d = dot(pairs(b_z, b_y, CT, True), b_b, d)
    x, factor = load_rows(a, start, n, stride_a, 0, 64, K), tl.exp2(tl.load(p_before))
    d = finish(d, x, factor, da, start, n, i_h, H, K, CT)
    b_dw = sums(d, later, CT, b_dw) - d + dgamma[None, :]
    if LOWER_BOUND is not None:
        rate = sigmoid(load_rows(w, start, n, stride_w, 0, 64, K).to(tl.float32))
        b_dw *= LOWER_BOUND * rate * (1.0 - rate)
    store_rows(dw, b_dw, start, n, H * K, i_h * K, 64, K)
