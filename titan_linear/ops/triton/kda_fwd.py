"""KDA forward kernels: `prepare` (work inside a chunk, but for solve.py), `scan` (the state through the chunks, and o).

Letters: C = 64 tokens of a chunk, Γ the inclusive cumulative gate inside a chunk (log2), γ its last row.
With q̃ = scale·q·2^Γ, k̃ = k·2^Γ, k̂ = k·2^(γ−Γ), Kk[i,j] = Σ_k k_i k_j 2^(Γ_i−Γ_j) for j < i, and S the incoming state

    r = (I + Kk diag β)⁻¹ (v − k̃ S)        "what each token writes", before its β
    o = q̃ S + Aqk (β r)                     Aqk[i,j] = scale Σ_k q_i k_j 2^(Γ_i−Γ_j) for j ≤ i
    S' = 2^γ S + k̂ᵀ (β r)

(I + Kk β)⁻¹ = I − G β with G strictly lower: keeping −G makes the identity exact, needs no division by β, and its
transpose serves the backward pass. The scan keeps Sᵀ [BV, K] in registers: every product then has a register operand on
its left and a tile of the chunk on its right, and nothing of the state passes through shared memory.

Precision: states, Γ, Kk and the solve are fp32 (solve products in bf16x3); the other products take operands in the
compute dtype (bf16; for fp32 inputs IEEE fp32) and accumulate in fp32.

Gates: with safe_gate a chunk has two halves, each relative to the middle of its own decay, and one product takes the
keys twice, relative to their own half and to the second one. Without it, six levels of blocks of 2B tokens
(B = 1 … 32), each relative to its block's middle, cover any g ≤ 0: no factor exceeds 1.
Tiles have channels as rows and tokens as columns: cumulative gates are then a product with a constant on the right.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_at, entry_at, is_wanted
from titan_linear.ops.triton.gates import LOG2E, load_beta, log2_gate, sigmoid, softplus
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.solve import lower_triangle, split
from titan_linear.ops.triton.tiles import load_tokens, read_state


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc), fp32 accumulation; fp32 operands are multiplied as fp32."""
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def split_dot(x, m, CT: constexpr):
    """x @ m for a matrix m of 0, ±1/2 and 1 (sums of columns of x), with x fp32 in two bf16 parts.

    A sum Γ then has an error of 2^-16 |Γ|, and 2^Γ one of |Γ| 2^Γ 2^-16 < 2^-16: fast gates stay exact."""
    if CT == tl.float32:  # noqa: SIM300
        return tl.dot(x, m.to(tl.float32), input_precision="ieee")
    else:
        hi, lo = split(x)
        return tl.dot(hi, m.to(tl.bfloat16), acc=tl.dot(lo, m.to(tl.bfloat16)))


@triton.jit
def halves(first, second):
    """[BK], [BK] → [BK, 64]: one number for each half of the chunk. (A reshape to [BK, 2, 32] forks the layouts.)"""
    return tl.where((tl.arange(0, 64) < 32)[None, :], first[:, None], second[:, None])


@triton.jit
def gate_rate(A_log, i_h):
    """exp(A_log), or 1 without it."""
    if A_log is None:
        return 1.0
    else:
        return tl.exp(tl.load(A_log + i_h).to(tl.float32))


@triton.jit
def gate_bias(dt_bias, i_h, K: constexpr, i_k, BK: constexpr):
    """A block of dt_bias [HV·K], or zeros without it: [BK, 1]."""
    if dt_bias is None:
        return tl.zeros([BK, 1], tl.float32)
    else:
        return tl.load(dt_bias + i_h * K + i_k * BK + tl.arange(0, BK)).to(tl.float32)[:, None]


@triton.jit
def half_decays(g, BK: constexpr, CT: constexpr):
    """g [BK, 64], log2 gates ≥ −7.3 → what the safe path needs: x [BK, 64], Γ relative to its half's reference; and,
    all [BK], the reference of each half, the whole number nearest to the middle of its decay; the whole number nearest
    to Γ in the middle of the chunk; and γ. E = 2^x and W = 2^-x then stay within 2^±117, which bf16 holds, and moving
    to another reference multiplies by a power of two, which scales bf16 numbers without rounding them again."""
    row = tl.arange(0, 64)
    same = (row[:, None] // 32) == (row[None, :] // 32)
    x = split_dot(g, tl.where(same, tl.where(row[:, None] <= row[None, :], 0.5, -0.5), 0.0), CT)
    in_first = (row < 32)[None, :]
    first = tl.min(tl.where(in_first, x, 0.0), 1)  # x falls from −s/2 to s/2, s the sum of the half
    second = tl.min(tl.where(in_first, 0.0, x), 1)
    gamma = 2.0 * (first + second)
    second += 2.0 * first
    reference1 = tl.floor(first + 0.5)
    reference2 = tl.floor(second + 0.5)
    x += halves(first - reference1, second - reference2)
    return x, reference1, reference2, tl.floor(2.0 * first + 0.5), gamma


@triton.jit
def is_fast(first, second, middle):
    """1 if the gates of a chunk decay too fast for `half_decays`, by its references, else 0. Where gates have no bound,
    kernels with SAFE compute every chunk and say which are wrong; those without SAFE compute these again."""
    return (tl.min(tl.minimum(first, second - middle)) < -118.0).to(tl.int32)


@triton.jit
def full_decays(g, CT: constexpr):
    """g [BK, 64], any log2 gates ≤ 0 → 2^Γ, 2^(γ−Γ) [BK, 64], gamma [BK]."""
    row = tl.arange(0, 64)
    upto = row[:, None] <= row[None, :]
    return tl.exp2(split_dot(g, upto, CT)), tl.exp2(split_dot(g, row[:, None] > row[None, :], CT)), tl.sum(g, 1)


@triton.jit
def level_decay(g, level, CT: constexpr):
    """g [BK, 64] → 2^(gates between token i and the middle of its block of 2B tokens), B = 2^level, all ≤ 1: the factor
    of a query in the second half, and of a key in the first."""
    row = tl.arange(0, 64)
    same = (row[:, None] >> level) == (row[None, :] >> level)
    second = ((row >> level) % 2 == 1)[None, :]
    return tl.exp2(split_dot(g, same & ((row[:, None] <= row[None, :]) == second), CT))


@triton.jit
def level_mask(level):
    """[64, 64]: whether the row is in the second and the column in the first half of one block of 2B, B = 2^level."""
    row = tl.arange(0, 64) >> level
    return (row[:, None] % 2 == 1) & (row[None, :] == row[:, None] - 1)


@triton.jit
def log2_gates(raw, rate, bias, lower_bound, n, GATE: constexpr):
    """The log2 gates of a chunk from its rows [64, BK] of g: fp32 [BK, 64], 0 (no decay) beyond the entry's end."""
    raw = tl.trans(raw).to(tl.float32)
    if GATE > 0:
        x = raw + bias
        raw = -rate * softplus(x) if GATE == 1 else lower_bound * sigmoid(rate * x)
        raw = tl.where((tl.arange(0, 64) < n)[None, :], raw, 0.0)
    return raw * LOG2E if GATE == 2 else log2_gate(raw)  # a bounded gate is far above log2_gate's least


@triton.jit
def load_chunk(g, q, k, start, n, i_h, i_k, R: constexpr, K: constexpr, BK: constexpr):
    """A chunk's rows [64, BK] of one head of g, q and k. The loads have a block of their own: otherwise the compiler
    converts each tile before it loads the next, and waits three times instead of once."""
    b_g = tl.zeros([64, BK], g[0].dtype.element_ty)
    b_q = tl.zeros([64, BK], q[0].dtype.element_ty)
    b_k = tl.zeros([64, BK], k[0].dtype.element_ty)
    if n > 0:
        b_g = load_tokens(g, start, n, i_h * K + i_k * BK, BK)
        b_q = load_tokens(q, start, n, i_h // R * K + i_k * BK, BK)
        b_k = load_tokens(k, start, n, i_h // R * K + i_k * BK, BK)
    return b_g, b_q, b_k


@triton.jit
def store_keys(p, x, tile, i_k, K: constexpr, BK: constexpr):
    """Store x [BK, 64], channels from i_k·BK on, in a chunk's tile of p [NT·HV, K, 64]."""
    o_k = tl.arange(0, BK)[:, None]
    tl.store(p + (tile * K + i_k * BK) * 64 + (o_k * 64 + tl.arange(0, 64)[None, :]), x.to(p.dtype.element_ty))


@Kernel
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias,
    tiles,  # Aqk and Gn only with MATRICES
    fast,  # [NT, HV] int32 or None: as in `is_fast`
    chunks, scale, lower_bound,
    H: constexpr, HV: constexpr, K: constexpr, BK: constexpr, CT: constexpr, GATE: constexpr,
    SAFE: constexpr, BETA_RANGE: constexpr, MATRICES: constexpr,
):  # fmt: skip
    """One (chunk, head): all channels with MATRICES (Aqk, and Kk for solve_kernel), else one block of channels."""
    i_h, i_t = tl.program_id(1), tl.program_id(2)
    start, n = chunk_at(chunks, i_t)
    tile = i_t.to(tl.int64) * HV + i_h
    if not SAFE and fast is not None and tl.load(fast + tile) == 0:
        return
    row = tl.arange(0, 64)
    too_fast = 0
    if MATRICES or tl.program_id(0) == 0:
        tl.store(tiles.b + tile * 64 + row, load_beta(beta, start, n, i_h, BETA_RANGE))
    b_A = tl.zeros([64, 64], tl.float32)  # without SAFE, sums over channels of q_i k_j 2^(Γ_i−Γ_j)
    b_K = tl.zeros([64, 64], tl.float32)  # the same for k_i k_j
    halves_A = tl.zeros([64, 128], tl.float32)  # with SAFE, columns alternate: within the halves, between them
    halves_K = tl.zeros([64, 128], tl.float32)
    diagonal = tl.zeros([64], tl.float32)
    for i in tl.range(0, K // BK if MATRICES else 1):
        i_k = tl.program_id(0) + i
        rate, bias = gate_rate(A_log, i_h), gate_bias(dt_bias, i_h, K, i_k, BK)
        b_g, b_q, b_k = load_chunk(g, q, k, start, n, i_h, i_k, HV // H, K, BK)
        b_g = log2_gates(b_g, rate, bias, lower_bound, n, GATE)
        b_q = tl.trans(b_q).to(tl.float32) * scale
        b_k = tl.trans(b_k).to(tl.float32)
        if SAFE:
            x, first, second, middle, gamma = half_decays(b_g, BK, CT)
            if fast is not None:
                too_fast |= is_fast(first, second, middle)
            to_start = halves(tl.exp2(first), tl.exp2(second)).to(CT)
            W = b_k * tl.exp2(-x)
            b_w = W.to(CT)
            store_keys(tiles.kg, W * halves(tl.exp2(gamma - first), tl.exp2(gamma - second)), tile, i_k, K, BK)
            E = tl.exp2(x)
            b_q = (b_q * E).to(CT)
            b_k = (b_k * E).to(CT)
            store_keys(tiles.qg, b_q * to_start, tile, i_k, K, BK)
            store_keys(tiles.kn, -b_k * to_start, tile, i_k, K, BK)
            if MATRICES:
                # The first half's keys relative to the second: where one is below 2^-126, E times it is below 2^-9.
                far_w = b_w * tl.exp2(middle - first).to(CT)[:, None] * tl.exp2(second - middle).to(CT)[:, None]
                b_w = tl.reshape(tl.join(b_w, far_w), [BK, 128])
                halves_A = dot(tl.trans(b_q), b_w, halves_A)
                halves_K = dot(tl.trans(b_k), b_w, halves_K)
        else:
            E, W, gamma = full_decays(b_g, CT)
            store_keys(tiles.qg, b_q * E, tile, i_k, K, BK)
            store_keys(tiles.kn, -b_k * E, tile, i_k, K, BK)
            store_keys(tiles.kg, b_k * W, tile, i_k, K, BK)
            if MATRICES:
                diagonal += tl.sum(b_q * b_k, 0)
                for level in range(6):
                    E = level_decay(b_g, level, CT)
                    b_w = (b_k * E).to(CT)
                    b_A += tl.where(level_mask(level), dot(tl.trans((b_q * E).to(CT)), b_w), 0.0)
                    b_K += tl.where(level_mask(level), dot(tl.trans(b_w), b_w), 0.0)
        tl.store(tiles.decay + tile * K + i_k * BK + tl.arange(0, BK), tl.exp2(gamma))
    if SAFE and fast is not None:
        tl.store(fast + tile, too_fast)
    if MATRICES:
        lower = row[:, None] >= row[None, :]
        if SAFE:
            b_A, b_K = tl.where(lower, join_halves(halves_A), 0.0), join_halves(halves_K)
        else:
            b_A += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
        o_c = tile * 64 * 64
        tl.store(tiles.Aqk + o_c + row[:, None] * 64 + row[None, :], b_A.to(CT))
        tl.store(lower_triangle(tiles.Gn + o_c, row[:, None], row[None, :]), b_K, mask=row[:, None] > row[None, :])


@triton.jit
def join_halves(x):
    """x [64, 128] → [64, 64]: even columns of x, but odd ones for rows of the second and columns of the first half."""
    row = tl.arange(0, 64)
    near, far = tl.split(tl.reshape(x, [64, 64, 2]))
    return tl.where((row[:, None] >= 32) & (row[None, :] < 32), far, near)


@triton.jit
def scan(
    S, v, tiles, o, h, r, start, length, v_length, first, i_h, column,
    HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, CT: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Carry Sᵀ [BV, K], columns of V from `column` on, through the chunks of one entry and head; returns the state that
    leaves. From token v_length on, v is taken as zero. Writes o, and each chunk's incoming Sᵀ (h) and rᵀ (r), where
    these are given."""
    NT = (length + 63) // 64
    row, o_k, o_v = tl.arange(0, 64), tl.arange(0, K), column + tl.arange(0, BV)
    eye = (row[:, None] == row[None, :]).to(CT)  # a product with it transposes v on the tensor cores
    next_decay = tl.load(tiles.decay + (first * HV + i_h) * K + o_k, mask=(o_k >= 0) & (NT > 0), other=0.0)
    for i_t in tl.range(0, NT, num_stages=STAGES):
        tile = (first + i_t) * HV + i_h
        if o is not None:  # one chunk ahead by hand: pipelined, its buffers would be 512 bytes too many at K = 128
            b_decay = next_decay
            next_decay = tl.load(tiles.decay + (tile + HV * (i_t + 1 < NT)) * K + o_k)
        else:
            b_decay = tl.load(tiles.decay + tile * K + o_k)
        o_tile = (tile * K + o_k[:, None]) * 64 + row[None, :]
        S16 = S.to(CT)
        x = dot(S16, tl.load(tiles.kn + o_tile))  # [BV, C] = (v − k̃ S)ᵀ
        b_v = load_tokens(v, start + i_t * 64, v_length - i_t * 64, i_h * V + column, BV).to(CT)
        x = dot(tl.trans(b_v), eye, x)
        b_b = tl.load(tiles.b + tile * 64 + row)[None, :]
        p_c = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
        x = dot((x * b_b).to(CT), tl.trans(tl.load(tiles.Gn + p_c)), x)  # rᵀ
        if h is not None:
            tl.store(h + (tile * V + o_v[:, None]) * K + o_k[None, :], S16)
            tl.store(r + (tile * V + o_v[:, None]) * 64 + row[None, :], x.to(CT))
        y = (x * b_b).to(CT)
        if o is not None:
            b_o = dot(S16, tl.load(tiles.qg + o_tile))
            b_o = dot(y, tl.trans(tl.load(tiles.Aqk + p_c)), b_o)
            p_o = o + (start + i_t * 64 + row[None, :]) * (HV * V) + i_h * V + o_v[:, None]
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(row < length - i_t * 64)[None, :])
        S = dot(y, tl.trans(tl.load(tiles.kg + o_tile)), S * b_decay[None, :])
    return S


@Kernel
def scan_kernel(
    v, tiles, initial, listed, chunks,
    HV: constexpr, K: constexpr, V: constexpr, BV: constexpr, CT: constexpr, STAGES: constexpr,
    o=None,  # [T, HV, V]
    final_state=None,  # of each entry or listed one, [., HV, K, V] fp32
    M=None,  # [F, HV, K, K] fp32
):  # fmt: skip
    """One (entry, head, slice of V or, for M, of K): o, and the last states. M: from the identity with v = 0."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // HV, i_nh % HV
    is_m = i_v >= V // BV
    if not is_wanted(listed, i_n, tl.where(is_m, 2, 1)):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_k, o_v = tl.arange(0, K)[None, :], tl.arange(0, BV)[:, None]
    i_m, v_length, column = i_v - V // BV, length, i_v * BV
    if M is None:
        S = read_state(initial, i_n, HV * K * V, i_h * K * V + o_k * V + column + o_v)
    else:
        S = tl.where(is_m & (o_k == i_m * BV + o_v), 1.0, 0.0)
        v_length, column = tl.where(is_m, 0, length), tl.where(is_m, 0, column)
    S = scan(S, v, tiles, o, None, None, start, length, v_length, first, i_h, column, HV, K, V, BV, CT, STAGES)
    if M is not None and is_m:
        tl.store(M + i_nh * K * K + o_k * K + i_m * BV + o_v, S)
    elif final_state is not None:
        tl.store(final_state + i_nh * K * V + o_k * V + i_v * BV + o_v, S)
