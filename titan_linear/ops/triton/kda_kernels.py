"""Kernels of Kimi Delta Attention. Forward: `prepare` (work inside a chunk, except for
solve.py) and `scan` (the state through the chunks, and o). Backward: `backward_scans` (the
states, and their gradients through the chunks), `matrix` (dv, dβ and the gradients of the
chunk's two matrices) and `gradient` (dq, dk, dg).

Letters: C = 64 tokens of a chunk, Γ the inclusive cumulative gate inside a chunk (log2), γ
its last row. With q̃ = scale·q·2^Γ, k̃ = k·2^Γ, k̂ = k·2^(γ−Γ), Kk[i,j] = Σ_k k_i k_j
2^(Γ_i−Γ_j) for j < i, and S the incoming state

    r = (I + Kk diag β)⁻¹ (v − k̃ S)        "what each token writes", before its β
    o = q̃ S + Aqk (β r)                     Aqk[i,j] = scale Σ_k q_i k_j 2^(Γ_i−Γ_j) for j ≤ i
    S' = 2^γ S + k̂ᵀ (β r)

(I + Kk β)⁻¹ = I − G β with G strictly lower. Keeping −G makes the identity exact and needs
no division by β, and its transpose serves the backward pass. The scan keeps Sᵀ [BV, K] in
registers. Every product then has a register operand on its left and a tile of the chunk on
its right, and no part of the state passes through shared memory.

Backward, with N = β r (what the chunk writes) and dS' the gradient of the outgoing state:

    dN = Aqkᵀ do + k̂ dS'
    y  = (I + β Kk)⁻ᵀ dN = dN − Gᵀ (β dN)      the gradient of N, later writes included
    dv = β y ;  dβ = y · r (by rows) ;  dKk = −dv Nᵀ ;  dAqk = do Nᵀ
    dS = 2^γ dS' + q̃ᵀ do − k̃ᵀ dv
    dq̃ = do Sᵀ ;  dk̃ = −dv Sᵀ ;  dk̂ = N dS'ᵀ ;  dγ = Σ_i k̂ ⊙ dk̂ + 2^γ Σ_v S ⊙ dS'

Nothing divides by β, and the WY form's w and u and their gradients are not needed. Γ's
gradient needs no extra products: each part of dq and dk carries 2^(+Γ_i) or 2^(−Γ_i), hence
dΓ = q ⊙ dq + k ⊙ (dk₊ − dk₋).

The state that enters each chunk is recomputed by `scan` (its h and r), independently of the
reverse scan.

Precision: states, Γ, Kk and the solve are fp32 (with the solve's products in bf16x3). The
other products take operands in the compute dtype (bf16; IEEE fp32 for fp32 inputs) and
accumulate in fp32.

Gates: with safe_gate a chunk has two halves, each relative to the middle of its decay. One
product takes the keys twice, relative to their own half and to the second one. Without
safe_gate, six levels of blocks of 2B tokens (B = 1 … 32), each relative to its block's
middle, cover any g ≤ 0, and no factor exceeds 1. Tiles have channels as rows and tokens as
columns, so that cumulative gates are a product with a constant on the right.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_and_head, chunks_in, entry_at, is_wanted
from titan_linear.ops.triton.solve import lower_triangle, split
from titan_linear.ops.triton.tiles import (
    LOG2E,
    Kernel,
    arange,
    beta_gradient,
    fetch_rows,
    indices,
    load_beta,
    load_tokens,
    load_wide,
    log2_gate,
    masked,
    place_in_row,
    read_state,
    sigmoid,
    softplus,
    wide,
    write_state,
    zeros,
)
from titan_linear.ops.triton.tiles import dot_ieee as dot


@triton.jit
def split_dot(x, m, CT):
    """Compute x @ m for a matrix m of 0, ±1/2 and 1 (sums of columns of x), with fp32 x in
    two bf16 parts.

    A sum Γ then has an error of 2^-16 |Γ|, and 2^Γ an error of |Γ| 2^Γ 2^-16 < 2^-16, so
    fast gates stay exact."""
    if CT == tl.float32:  # noqa: SIM300
        return tl.dot(x, wide(m), input_precision="ieee")
    else:
        hi, lo = split(x)
        return tl.dot(hi, m.to(tl.bfloat16), acc=tl.dot(lo, m.to(tl.bfloat16)))


@triton.jit
def halves(first, second):
    """Spread [BK], [BK] to [BK, 64]: one number for each half of the chunk. (A reshape to
    [BK, 2, 32] would make the layouts diverge.)"""
    _, o_c = indices(64, 64)
    return tl.where(o_c < 32, first[:, None], second[:, None])


@triton.jit
def gate_rate(A_log, i_h):
    """Return exp(A_log), or 1 without A_log."""
    if A_log is None:
        return 1.0
    else:
        return tl.exp(load_wide(A_log + i_h))


@triton.jit
def gate_bias(dt_bias, i_h, K, i_k, BK):
    """Load a block of dt_bias [HV·K] as [BK, 1], or zeros without dt_bias."""
    if dt_bias is None:
        return zeros(BK, 1)
    else:
        return load_wide(dt_bias + i_h * K + i_k * BK + arange(BK))[:, None]


@triton.jit
def half_decays(g, CT):
    """Return the decays of the safe path from g [BK, 64], log2 gates ≥ −7.3.

    The results are x [BK, 64], which is Γ relative to its half's reference, and four [BK]:
    the reference of each half, which is the whole number nearest to the middle of the
    half's decay; the whole number nearest to Γ in the middle of the chunk; and γ. E = 2^x
    and W = 2^-x then stay within 2^±117, which bf16 holds. Moving to another reference
    multiplies by a power of two, which scales bf16 numbers without rounding them again.
    """
    o_i, o_j = indices(64, 64)
    x = split_dot(g, tl.where(o_i // 32 == o_j // 32, tl.where(o_i <= o_j, 0.5, -0.5), 0.0), CT)
    in_first = o_j < 32
    first = tl.min(tl.where(in_first, x, 0.0), 1)  # x falls from −s/2 to s/2, s the half's sum
    second = tl.min(tl.where(in_first, 0.0, x), 1)
    gamma = 2.0 * (first + second)
    second += 2.0 * first
    # Whole-number references, and Γ relative to them.
    reference1 = tl.floor(first + 0.5)
    reference2 = tl.floor(second + 0.5)
    x += halves(first - reference1, second - reference2)
    return x, reference1, reference2, tl.floor(2.0 * first + 0.5), gamma


@triton.jit
def is_fast(first, second, middle):
    """Return 1 if a chunk's gates, judged by its references, decay too fast for
    `half_decays`, else 0. Where gates are unbounded, kernels with SAFE compute every chunk
    and flag the wrong ones, and kernels without SAFE recompute these."""
    return (tl.min(tl.minimum(first, second - middle)) < -118.0).to(tl.int32)


@triton.jit
def full_decays(g, CT):
    """Return 2^Γ, 2^(γ−Γ) [BK, 64] and gamma [BK] from g [BK, 64], any log2 gates ≤ 0."""
    o_i, o_j = indices(64, 64)
    return tl.exp2(split_dot(g, o_i <= o_j, CT)), tl.exp2(split_dot(g, o_i > o_j, CT)), tl.sum(g, 1)


@triton.jit
def level_decay(g, level, CT):
    """Return 2^(gates between token i and the middle of its block of 2B tokens) from g
    [BK, 64], B = 2^level. All are ≤ 1. This is the factor of a query in the second half of
    the block, and of a key in the first."""
    o_i, o_j = indices(64, 64)
    same = (o_i >> level) == (o_j >> level)
    second = (o_j >> level) % 2 == 1
    return tl.exp2(split_dot(g, same & ((o_i <= o_j) == second), CT))


@triton.jit
def level_mask(level):
    """Return a mask [64, 64] of pairs with the row in the second and the column in the
    first half of one block of 2B, B = 2^level."""
    o_i, o_j = indices(64, 64)
    return ((o_i >> level) % 2 == 1) & (o_j >> level == (o_i >> level) - 1)


@triton.jit
def log2_gates(raw, rate, bias, lower_bound, n, GATE):
    """Return the log2 gates of a chunk from its rows [64, BK] of g: fp32 [BK, 64], and 0
    (no decay) past the entry's end."""
    raw = wide(raw.T)
    if GATE > 0:
        x = raw + bias
        raw = -rate * softplus(x) if GATE == 1 else lower_bound * sigmoid(rate * x)
        _, o_c = indices(64, 64)
        raw = tl.where(o_c < n, raw, 0.0)
    # A bounded gate is far above log2_gate's minimum.
    return raw * LOG2E if GATE == 2 else log2_gate(raw)


@triton.jit
def load_chunk(g, q, k, start, n, i_h, i_k, R, K, BK):
    """Load a chunk's rows [64, BK] of one head of g, q and k. The loads are in a separate
    block; otherwise the compiler converts each tile before it loads the next, and waits
    three times instead of once."""
    b_g = tl.zeros([64, BK], g[0].dtype.element_ty)
    b_q = tl.zeros([64, BK], q[0].dtype.element_ty)
    b_k = tl.zeros([64, BK], k[0].dtype.element_ty)
    if n > 0:
        b_g = load_tokens(g, start, n, i_h * K + i_k * BK, BK)
        b_q = load_tokens(q, start, n, i_h // R * K + i_k * BK, BK)
        b_k = load_tokens(k, start, n, i_h // R * K + i_k * BK, BK)
    return b_g, b_q, b_k


@triton.jit
def store_keys(p, x, tile, i_k, K, BK):
    """Store x [BK, 64], channels starting at i_k·BK, in a chunk's tile of p [NT·HV, K, 64]."""
    o_k, o_c = indices(BK, 64)
    tl.store(p + (tile * K + i_k * BK) * 64 + (o_k * 64 + o_c), x)


@Kernel
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias,
    tiles,  # Aqk and Gn only with MATRICES
    fast,  # [NT, HV] int32 or None: results of `is_fast`
    chunks, scale, lower_bound, H: constexpr, HV: constexpr, K: constexpr, BK: constexpr, GATE: constexpr,
    SAFE: constexpr, BETA_RANGE: constexpr, MATRICES: constexpr,
):  # fmt: skip
    """Compute the tiles of one (chunk, head): all channels with MATRICES (Aqk, and Kk for
    solve_kernel), else one block of channels."""
    CT: constexpr = tiles.qg.dtype.element_ty
    begin, i_h, tile, start, n = chunk_and_head(chunks, HV, 1 if MATRICES else K // BK)
    # Chunks that are not flagged need no second computation.
    if not SAFE and fast is not None and tl.load(fast + tile) == 0:
        return
    row = arange(64)
    too_fast = 0
    if MATRICES or begin == 0:
        tl.store(tiles.b + tile * 64 + row, load_beta(beta, row, start, n, i_h, BETA_RANGE))
    b_A = zeros(64, 64)  # without SAFE, sums over channels of q_i k_j 2^(Γ_i−Γ_j)
    b_K = zeros(64, 64)  # the same for k_i k_j
    halves_A = zeros(64, 128)  # with SAFE, columns alternate: within the halves, between them
    halves_K = zeros(64, 128)
    diagonal = zeros(64)
    for i in tl.range(0, K // BK if MATRICES else 1):
        i_k = begin + i
        rate, bias = gate_rate(A_log, i_h), gate_bias(dt_bias, i_h, K, i_k, BK)
        b_g, b_q, b_k = load_chunk(g, q, k, start, n, i_h, i_k, HV // H, K, BK)
        b_g = log2_gates(b_g, rate, bias, lower_bound, n, GATE)
        b_q = wide(b_q.T) * scale
        b_k = wide(b_k.T)
        if SAFE:
            x, first, second, middle, gamma = half_decays(b_g, CT)
            if fast is not None:
                too_fast |= is_fast(first, second, middle)
            # Keys and queries relative to the references of their halves.
            to_start = halves(tl.exp2(first), tl.exp2(second)).to(CT)
            W = b_k * tl.exp2(-x)
            b_w = W.to(CT)
            store_keys(
                tiles.kg,
                W * halves(tl.exp2(gamma - first), tl.exp2(gamma - second)),
                tile,
                i_k,
                K,
                BK,
            )
            E = tl.exp2(x)
            b_q = (b_q * E).to(CT)
            b_k = (b_k * E).to(CT)
            store_keys(tiles.qg, b_q * to_start, tile, i_k, K, BK)
            store_keys(tiles.kn, -b_k * to_start, tile, i_k, K, BK)
            if MATRICES:
                # The first half's keys relative to the second half. Where such a key is
                # below 2^-126, its product with E is below 2^-9.
                far_w = (
                    b_w
                    * tl.exp2(middle - first).to(CT)[:, None]
                    * tl.exp2(second - middle).to(CT)[:, None]
                )
                b_w = tl.reshape(tl.join(b_w, far_w), [BK, 128])
                halves_A = dot(b_q.T, b_w, halves_A)
                halves_K = dot(b_k.T, b_w, halves_K)
        else:
            # Any gates: products of pairs level by level, and the diagonal separately.
            E, W, gamma = full_decays(b_g, CT)
            store_keys(tiles.qg, b_q * E, tile, i_k, K, BK)
            store_keys(tiles.kn, -b_k * E, tile, i_k, K, BK)
            store_keys(tiles.kg, b_k * W, tile, i_k, K, BK)
            if MATRICES:
                diagonal += tl.sum(b_q * b_k, 0)
                for level in range(6):
                    E = level_decay(b_g, level, CT)
                    b_w = (b_k * E).to(CT)
                    b_A += tl.where(level_mask(level), dot((b_q * E).to(CT).T, b_w), 0.0)
                    b_K += tl.where(level_mask(level), dot(b_w.T, b_w), 0.0)
        tl.store(tiles.decay + tile * K + i_k * BK + arange(BK), tl.exp2(gamma))
    if SAFE and fast is not None:
        tl.store(fast + tile, too_fast)
    if MATRICES:
        # Store Aqk, and Kk as the strictly lower matrix that solve_kernel reads.
        o_i, o_j = indices(64, 64)
        if SAFE:
            b_A, b_K = tl.where(o_i >= o_j, join_halves(halves_A), 0.0), join_halves(halves_K)
        else:
            b_A += tl.where(o_i == o_j, diagonal[:, None], 0.0)
        o_c = tile * 64 * 64
        tl.store(tiles.Aqk + o_c + o_i * 64 + o_j, b_A)
        tl.store(lower_triangle(tiles.Gn + o_c, o_i, o_j), b_K, mask=o_i > o_j)


@triton.jit
def join_halves(x):
    """Return [64, 64] from x [64, 128]: even columns of x, but odd columns for rows of the
    second and columns of the first half."""
    o_i, o_j = indices(64, 64)
    near, far = tl.split(tl.reshape(x, [64, 64, 2]))
    return tl.where((o_i >= 32) & (o_j < 32), far, near)


@triton.jit
def scan(S, v, tiles, o, h, r, start, length, v_length, first, i_h, column, HV, K, V, BV, STAGES):
    """Carry Sᵀ [BV, K], BV columns of V starting at `column`, through the chunks of one
    entry and head, and return the state that leaves.

    v is taken as zero from token v_length on. Writes o, and each chunk's incoming Sᵀ (h)
    and rᵀ (r), where these are given.
    """
    CT: constexpr = tiles.qg.dtype.element_ty
    NT = chunks_in(length)
    row, o_k = arange(64), arange(K)
    o_i, o_j = indices(64, 64)
    o_v, o_s = indices(BV, K)
    o_d, _ = indices(K, 64)
    o_v += column
    eye = (o_i == o_j).to(CT)  # a product with eye transposes v on the tensor cores
    next_decay = masked(tiles.decay + (first * HV + i_h) * K + o_k, mask=(o_k >= 0) & (NT > 0))
    for i_t in tl.range(0, NT, num_stages=STAGES):
        tile = (first + i_t) * HV + i_h
        # Load the decay one chunk ahead by hand; pipelined, its buffers would be 512 bytes
        # too many at K = 128.
        if o is not None:
            b_decay = next_decay
            next_decay = tl.load(tiles.decay + (tile + HV * (i_t + 1 < NT)) * K + o_k)
        else:
            b_decay = tl.load(tiles.decay + tile * K + o_k)
        o_tile = (tile * K + o_d) * 64 + o_j
        S16 = S.to(CT)
        x = dot(S16, tl.load(tiles.kn + o_tile))  # [BV, C] = (v − k̃ S)ᵀ
        b_v = load_tokens(v, start + i_t * 64, v_length - i_t * 64, i_h * V + column, BV).to(CT)
        x = dot(b_v.T, eye, x)
        b_b = tl.load(tiles.b + tile * 64 + row)[None, :]
        p_c = tile * 64 * 64 + o_i * 64 + o_j
        x = dot((x * b_b).to(CT), tl.load(tiles.Gn + p_c).T, x)  # rᵀ
        if h is not None:
            tl.store(h + (tile * V + o_v) * K + o_s, S16)
            tl.store(r + (tile * V + o_v) * 64 + o_j, x)
        y = (x * b_b).to(CT)
        if o is not None:
            b_o = dot(S16, tl.load(tiles.qg + o_tile))
            b_o = dot(y, tl.load(tiles.Aqk + p_c).T, b_o)
            p_o = o + (start + i_t * 64 + o_j) * (HV * V) + i_h * V + o_v
            tl.store(p_o, b_o, mask=o_j < length - i_t * 64)
        S = dot(y, tl.load(tiles.kg + o_tile).T, S * b_decay[None, :])
    return S


@Kernel
def scan_kernel(
    v, tiles, initial, listed, chunks,
    HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    o=None,  # [T, HV, V]
    final_state=None,  # of all or of the listed entries, [., HV, K, V] fp32
    M=None,  # [F, HV, K, K] fp32
):  # fmt: skip
    """Scan one (entry, head, slice of V or, for M, of K): o, and the last states. M is the
    scan from the identity with v = 0."""
    i_v, i_nh, i_n, i_h = place_in_row(V // BV if M is None else (V + K) // BV, HV)
    is_m = i_v >= V // BV
    if not is_wanted(listed, i_n, tl.where(is_m, 2, 1)):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_v, o_k = indices(BV, K)
    # The slices of M follow the slices of V.
    i_m, v_length, column = i_v - V // BV, length, i_v * BV
    if M is None:
        S = read_state(initial, i_n, HV * K * V, i_h * K * V + o_k * V + column + o_v)
    else:
        S = tl.where(is_m & (o_k == i_m * BV + o_v), 1.0, 0.0)
        v_length, column = tl.where(is_m, 0, length), tl.where(is_m, 0, column)
    S = scan(
        S,
        v,
        tiles,
        o,
        None,
        None,
        start,
        length,
        v_length,
        first,
        i_h,
        column,
        HV,
        K,
        V,
        BV,
        STAGES,
    )
    if M is not None and is_m:
        tl.store(M + i_nh * K * K + o_k * K + i_m * BV + o_v, S)
    elif final_state is not None:
        tl.store(final_state + i_nh * K * V + o_k * V + i_v * BV + o_v, S)


# --- Backward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _reverse_scan(dS, do, tiles, dh, y, start, length, first, i_h, column, HV, K, V, BV, STAGES):
    """Carry dSᵀ [BV, K], BV columns of V starting at `column`, through the chunks of one
    entry and head from the last to the first, and return the gradient of the state that
    enters. Writes each chunk's dS'ᵀ (dh) and yᵀ (y) where these are given."""
    CT: constexpr = tiles.qg.dtype.element_ty
    NT = chunks_in(length)
    row, o_k = arange(64), arange(K)
    o_i, o_j = indices(64, 64)
    o_v, o_s = indices(BV, K)
    o_d, _ = indices(K, 64)
    o_v += column
    for i in tl.range(0, NT, num_stages=STAGES):
        i_t = NT - 1 - i
        tile = (first + i_t) * HV + i_h
        o_c = tile * 64 * 64 + o_i * 64 + o_j
        o_tile = (tile * K + o_d) * 64 + o_j
        dS16 = dS.to(CT)
        if dh is not None:
            tl.store(dh + (tile * V + o_v) * K + o_s, dS16)
        b_do = load_tokens(do, start + i_t * 64, length - i_t * 64, i_h * V + column, BV).to(CT)
        b_do = b_do.T
        b_b = tl.load(tiles.b + tile * 64 + row)[None, :]
        # dN, then yᵀ.
        dN = dot(dS16, tl.load(tiles.kg + o_tile))  # [BV, C]
        dN = dot(b_do, tl.load(tiles.Aqk + o_c), dN)
        dN = dot((dN * b_b).to(CT), tl.load(tiles.Gn + o_c), dN)  # yᵀ
        if dh is not None:
            tl.store(y + (tile * V + o_v) * 64 + o_j, dN)
        # dS = 2^γ dS' + q̃ᵀ do − k̃ᵀ dv.
        dS *= tl.load(tiles.decay + tile * K + o_k)[None, :]
        dS = dot(b_do, tl.load(tiles.qg + o_tile).T, dS)
        dS = dot((dN * b_b).to(CT), tl.load(tiles.kn + o_tile).T, dS)
    return dS


@Kernel
def backward_scans_kernel(
    do, v, tiles, initial, d_final, d_initial, listed, chunks,
    HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    # [NT, HV, V, K], the state that enters each chunk, and the gradient of the state that leaves it
    h=None, dh=None,
    r=None, y=None,  # [NT, HV, V, 64]
):  # fmt: skip
    """Scan one (entry, head, slice of V) in reverse, for dh, y and the gradient of the
    state that enters. Other programs scan forward again for h and r. The two directions are
    independent."""
    i_p, half = tl.program_id(0), tl.num_programs(0) // 2
    i_v, _, i_n, i_h = place_in_row(V // BV, HV, i_p if h is None else i_p % half)
    if not is_wanted(listed, i_n, 1):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_v, o_k = indices(BV, K)
    o_s = i_h * K * V + o_k * V + (i_v * BV + o_v)
    # The first half of the programs scans forward if h is wanted.
    if h is not None and i_p < half:
        S = read_state(initial, i_n, HV * K * V, o_s)
        scan(
            S,
            v,
            tiles,
            None,
            h,
            r,
            start,
            length,
            length,
            first,
            i_h,
            i_v * BV,
            HV,
            K,
            V,
            BV,
            STAGES,
        )
    else:
        S = read_state(d_final, i_n, HV * K * V, o_s)
        S = _reverse_scan(
            S, do, tiles, dh, y, start, length, first, i_h, i_v * BV, HV, K, V, BV, STAGES
        )
        write_state(d_initial, i_n, HV * K * V, o_s, S)


@triton.jit
def transposed(x):
    """Transpose rows [64, BK] to fp32 [BK, 64].

    The tensor cores transpose 16-bit rows by a product with the identity, which is exact.
    The result has the layout of other products, so nothing computed from it needs two
    layouts.
    """
    if x.dtype == tl.float32:
        return x.T
    else:
        o_i, o_j = indices(64, 64)
        return tl.dot(x.T, (o_i == o_j).to(x.dtype))


@triton.jit
def gate_gradient(dg, x, rate, lower_bound, GATE):
    """Return the gradients of the biased input x and, before its sum, of A_log, both
    [BK, 64], from dg of the natural-log gate."""
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
    chunks, scale, HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, BETA_RANGE: constexpr,
):  # fmt: skip
    """Compute dv, dβ, and the gradients of Aqk and Kk of one (chunk, head). The matrices'
    gradients are 0 above their diagonals."""
    _, i_h, tile, token, n = chunk_and_head(chunks, HV, 1)
    row = arange(64)
    o_i, o_j = indices(64, 64)
    o_r, _ = indices(BV, 64)
    _, o_v = indices(64, BV)
    b_b = tl.load(b + tile * 64 + row)
    b_dA = zeros(64, 64)
    b_dK = zeros(64, 64)
    db = zeros(64)
    # Sum over slices of V, writing dv of each.
    for i_v in range(V // BV):
        p_r = (tile * V + i_v * BV + o_r) * 64 + o_j
        b_r = tl.load(r + p_r)  # [BV, C]
        b_y = tl.load(y + p_r)
        b_do = load_tokens(do, token, n, i_h * V + i_v * BV, BV).to(b_r.dtype)  # [C, BV]
        b_dA = dot(b_do, b_r, b_dA)
        b_dK = dot(b_y.T, b_r, b_dK)
        db += tl.sum(wide(b_y) * wide(b_r), 0)
        o_dv = (token + o_i) * (HV * V) + i_h * V + i_v * BV + o_v
        b_dv = (wide(b_y) * b_b[None, :]).to(dv.dtype.element_ty).T
        tl.store(dv + o_dv, b_dv, mask=o_i < n)
    db = beta_gradient(db, b_b, BETA_RANGE)
    tl.store(dbeta + (token + row) * HV + i_h, db, mask=row < n)
    # Through scale and β to the gradients of Aqk and Kk.
    o_c = tile * 64 * 64 + o_i * 64 + o_j
    tl.store(dA + o_c, tl.where(o_i >= o_j, b_dA * (scale * b_b)[None, :], 0.0))
    b_dK *= -b_b[:, None] * b_b[None, :]
    tl.store(dK + o_c, tl.where(o_i > o_j, b_dK, 0.0))


@triton.jit
def read_state_gradients(do, y, h, start, n, tile, i_o, i_k, V, BK, BV, STAGES):
    """Return (do Sᵀ)ᵀ and (y Sᵀ)ᵀ [BK, 64], 0 past an entry's end."""
    dq = zeros(BK, 64)
    dk = zeros(BK, 64)
    for i_v in tl.range(V // BV, num_stages=STAGES):
        b_h = h.load([tile * V + i_v * BV, i_k * BK]).T  # [BK, BV]
        dq = dot(b_h, fetch_rows(do, start, n, 0, i_o + i_v * BV).to(b_h.dtype).T, dq)
        dk = dot(b_h, y.load([tile * V + i_v * BV, 0]), dk)
    return dq, dk


@triton.jit
def write_state_gradient(r, h, dh, tile, i_k, V, BK, BV, STAGES):
    """Return (r dS'ᵀ)ᵀ [BK, 64] and Σ_v S ⊙ dS' [BK]."""
    dk = zeros(BK, 64)
    ds = zeros(BK)
    for i_v in tl.range(V // BV, num_stages=STAGES):
        # [BV, BK]
        b_h, b_dh = (
            h.load([tile * V + i_v * BV, i_k * BK]),
            dh.load([tile * V + i_v * BV, i_k * BK]),
        )
        dk = dot(b_dh.T, r.load([tile * V + i_v * BV, 0]), dk)
        ds += tl.sum(wide(b_h) * wide(b_dh), 0)
    return dk, ds


@triton.jit
def _by_levels(
    b_g, b_q, b_k, b_b, b_dA, b_dK, scale, do, r, y, h, dh, start, n, i_tile, i_o, i_k, V, BK, BV, STAGES,
):  # fmt: skip
    """Return dq, dk and dΓ [BK, 64], and dγ [BK], for gates of any decay."""
    CT: constexpr = b_dA.dtype
    o_i, o_j = indices(64, 64)
    b_diagonal = tl.sum(tl.where(o_i == o_j, wide(b_dA), 0.0), 0)[None, :]
    # The share of the states.
    b_dq, b_dkp = read_state_gradients(do, y, h, start, n, i_tile, i_o, i_k, V, BK, BV, STAGES)
    b_dq *= scale
    b_dkm, ds = write_state_gradient(r, h, dh, i_tile, i_k, V, BK, BV, STAGES)
    E, W, gamma = full_decays(b_g, CT)
    b_dq *= E
    b_dkp *= -b_b[None, :] * E
    b_dkm *= b_b[None, :] * W
    dgamma = tl.sum(b_dkm * b_k, 1) + tl.exp2(gamma) * ds
    d_sum = b_q * b_dq + b_k * (b_dkp - b_dkm)
    # The share of pairs of tokens, level by level.
    for level in range(6):
        E = level_decay(b_g, level, CT)
        cross = level_mask(level)
        l_dA = tl.where(cross, b_dA, 0.0)
        l_dK = tl.where(cross, b_dK, 0.0)
        qE = (b_q * E).to(CT)
        kE = (b_k * E).to(CT)
        l_dq = dot(kE, l_dA.T)
        l_dkp = dot(kE, l_dK.T)
        l_dkm = dot(kE, l_dK, dot(qE, l_dA))
        d_sum += wide(qE) * l_dq + wide(kE) * (l_dkp - l_dkm)
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
    fast,  # [NT, HV, K / BF] int32 or None: results of `is_fast`
    chunks, scale, lower_bound, H: constexpr, HV: constexpr, K: constexpr, V: constexpr, BF: constexpr, BK: constexpr,
    BV: constexpr, STAGES: constexpr, GATE: constexpr, SAFE: constexpr,
):  # fmt: skip
    """Compute dq, dk and dg of one (chunk, head, block of K), each written once in its own
    dtype."""
    CT: constexpr = dA.dtype.element_ty
    i_k, i_h, tile, start, n = chunk_and_head(chunks, HV, K // BK)
    o_k = i_k * BK + arange(BK)
    if fast is not None:
        fast += tile * (K // BF) + i_k * BK // BF
        if not SAFE and tl.load(fast) == 0:
            return
    # A surplus program writes zeros to its partial sums.
    if n == 0:
        if fast is not None:
            tl.store(fast, 0)
        if dA_part is not None:
            tl.store(dA_part + tile * K + o_k, zeros(BK))
        if dbias_part is not None:
            tl.store(dbias_part + tile * K + o_k, zeros(BK))
        return
    i_tile = tile.to(tl.int32)  # where the copy engine reads the chunks' matrices
    # Load the chunk's gates, queries, keys and matrices.
    row = arange(64)
    o_i, o_j = indices(64, 64)
    inside = o_i < n
    o_g = start * (HV * K) + i_h * K + (o_i * (HV * K) + o_k[None, :])
    o_c = tile * 64 * 64 + (o_i * 64 + o_j)
    rate, bias = gate_rate(A_log, i_h), gate_bias(dt_bias, i_h, K, i_k, BK)
    b_g, b_q, b_k = load_chunk(g, q, k, start, n, i_h, i_k, HV // H, K, BK)
    p_b = b + tile * 64 + row  # loaded at use, to save registers
    b_g = log2_gates(b_g, rate, bias, lower_bound, n, GATE)
    b_q = wide(b_q.T)
    b_k = wide(b_k.T)
    b_dA, b_dK = tl.load(dA + o_c), tl.load(dK + o_c)
    # Each gradient is relative to the references of half_decays until it is multiplied by E
    # or W.
    if SAFE:
        far, near = (o_i >= 32) & (o_j < 32), o_i // 32 == o_j // 32
        far_dA, near_dA = tl.where(far, b_dA, 0.0), tl.where(near, b_dA, 0.0)
        far_dK, near_dK = tl.where(far, b_dK, 0.0), tl.where(near, b_dK, 0.0)
        x, first, second, middle, gamma = half_decays(b_g, CT)
        if fast is not None:
            tl.store(fast, is_fast(first, second, middle))
        to_start = halves(tl.exp2(first), tl.exp2(second))
        # Between the halves the factor is 2^(second − first), as two numbers, since one
        # alone could be 0. Each scaled product starts from zero, because otherwise every
        # wgmma would wait for the previous one.
        down1, down2 = tl.exp2(middle - first)[:, None], tl.exp2(second - middle)[:, None]
        E, W = tl.exp2(x), tl.exp2(-x)
        kE = (b_k * E).to(CT)
        kW = (b_k * W).to(CT)
        b_dq, b_dk = read_state_gradients(
            do, y, h, start, n, i_tile, i_h * V, i_k, V, BK, BV, STAGES
        )
        b_dq *= scale * to_start
        b_dq += dot(kW, far_dA.T) * down1 * down2
        b_dq = dot(kW, near_dA.T, b_dq)
        # Here and below, dΓ takes the rounded operands. A pair (i, j) then gives +x at i
        # and −x at j, which cancel in dg.
        qE = (b_q * E).to(CT)
        d_sum = wide(qE) * b_dq
        tl.store(dq + o_g, (b_dq * E).to(dq.dtype.element_ty).T, mask=inside)

        # dk, first from k̃ and then from k̂.
        b_dk *= -tl.load(p_b)[None, :] * to_start
        b_dk += dot(kW, far_dK.T) * down1 * down2
        b_dk = dot(kW, near_dK.T, b_dk)
        d_sum += wide(kE) * b_dk
        b_dk *= E

        b_dkm, ds = write_state_gradient(r, h, dh, i_tile, i_k, V, BK, BV, STAGES)
        b_dkm *= tl.load(p_b)[None, :] * halves(tl.exp2(gamma - first), tl.exp2(gamma - second))
        dgamma = tl.sum(b_dkm * wide(kW), 1) + tl.exp2(gamma) * ds
        b_dkm += dot(kE, far_dK, dot(qE, far_dA)) * down1 * down2
        b_dkm = dot(kE, near_dK, dot(qE, near_dA, b_dkm))
        d_sum -= wide(kW) * b_dkm
        root = tl.rsqrt(E)  # root² = 1 / E, in two instructions where a division takes eight
        b_dk += b_dkm * (root * root)
    else:
        b_dq, b_dk, d_sum, dgamma = _by_levels(
            b_g, b_q, b_k, tl.load(p_b), b_dA, b_dK, scale, do, r, y, h, dh, start, n, i_tile, i_h * V, i_k, V, BK, BV,
            STAGES,
        )  # fmt: skip
        tl.store(dq + o_g, b_dq.to(dq.dtype.element_ty).T, mask=inside)
    tl.store(dk + o_g, b_dk.to(dk.dtype.element_ty).T, mask=inside)
    raw = (
        load_tokens(g, start, n, i_h * K + i_k * BK, BK) if GATE > 0 else b_g
    )  # loaded early, before the products
    # dg sums dΓ over later tokens; then the gate's function.
    b_dg = split_dot(d_sum, o_i >= o_j, CT) + dgamma[:, None]
    if GATE > 0:
        x = transposed(raw) + bias
        b_dg = tl.where(o_j < n, b_dg, 0.0)
        b_dg, d_rate = gate_gradient(b_dg, x, rate, lower_bound, GATE)
        if A_log is not None:
            tl.store(dA_part + tile * K + o_k, tl.sum(d_rate, 1))
        if dt_bias is not None:
            tl.store(dbias_part + tile * K + o_k, tl.sum(b_dg, 1))
    tl.store(dg + o_g, b_dg.to(dg.dtype.element_ty).T, mask=inside)
