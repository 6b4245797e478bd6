"""KDA forward kernels: `prepare` (what is inside a chunk, but for solve.py), `scan` (the state through the chunks, o).

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
keys twice: relative to their own half and to the second; without it six levels of blocks of 2B tokens (B = 1 … 32),
each relative to its block's middle, cover any g ≤ 0: no factor exceeds 1.
Tiles have channels as rows, tokens as columns: cumulative gates are then a product with a constant on the right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from titan_linear.ops.triton.chunks import locate
from titan_linear.ops.triton.gates import softplus
from titan_linear.ops.triton.solve import lower_triangle, split

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc), fp32 accumulation; fp32 operands are multiplied as fp32."""
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def split_dot(x, m, CT: tl.constexpr):
    """x @ m for a matrix m of 0, ±1/2 and 1 (sums of columns of x), with x fp32 in two bf16 parts.

    A sum Γ then has an error of 2^-16 |Γ|, and 2^Γ one of |Γ| 2^Γ 2^-16 < 2^-16: fast gates stay exact."""
    if CT == tl.float32:  # noqa: SIM300
        return tl.dot(x, m.to(tl.float32), input_precision="ieee")
    else:
        hi, lo = split(x)
        return tl.dot(hi, m.to(tl.bfloat16), acc=tl.dot(lo, m.to(tl.bfloat16)))


@triton.jit
def halves(first, second):
    """[BK], [BK] → [BK, 64]: one number for each half of the chunk. (A reshape to [BK, 2, 32] would cost a layout.)"""
    return tl.where((tl.arange(0, 64) < 32)[None, :], first[:, None], second[:, None])


@triton.jit
def gate(raw, rate, bias, lower_bound, GATE: tl.constexpr):
    """Natural-log gate [C, BK] from the raw input; rate = exp(A_log)."""
    x = raw + bias[None, :]
    if GATE == 1:
        return -rate * softplus(x)
    else:
        return lower_bound / (1.0 + tl.exp(-rate * x))


@triton.jit
def half_decays(g, BK: tl.constexpr, CT: tl.constexpr):
    """g [BK, 64], log2 gates ≥ −7.3 → what the safe path is made of: x [BK, 64], Γ relative to its half's reference;
    the references of both halves, the whole numbers nearest to the middle of each one's decay; the whole number nearest
    to Γ in the middle of the chunk; and γ, all [BK]. E = 2^x and W = 2^-x then stay within 2^±117, which bf16 holds,
    and moving to another reference is a power of two, which scales bf16 numbers without rounding them again."""
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
def full_decays(g, CT: tl.constexpr):
    """g [BK, 64], any log2 gates ≤ 0 → 2^Γ, 2^(γ−Γ) [BK, 64], gamma [BK]."""
    row = tl.arange(0, 64)
    upto = row[:, None] <= row[None, :]
    return tl.exp2(split_dot(g, upto, CT)), tl.exp2(split_dot(g, row[:, None] > row[None, :], CT)), tl.sum(g, 1)


@triton.jit
def level_decay(g, level, CT: tl.constexpr):
    """g [BK, 64] → 2^(gates between token i and the middle of its block of 2B tokens), B = 2^level, all ≤ 1: the factor
    of a token of the second half as a query, of the first half as a key."""
    row = tl.arange(0, 64)
    same = (row[:, None] >> level) == (row[None, :] >> level)
    second = ((row >> level) % 2 == 1)[None, :]
    return tl.exp2(split_dot(g, same & ((row[:, None] <= row[None, :]) == second), CT))


@triton.jit
def level_mask(level):
    """[64, 64]: row in the second, column in the first half of one block of 2B, B = 2^level."""
    row = tl.arange(0, 64) >> level
    return (row[:, None] % 2 == 1) & (row[None, :] == row[:, None] - 1)


@triton.jit
def load_rows(p, start, n, HD, D: tl.constexpr, i_d, BD: tl.constexpr):
    """Rows start … start+63 of a [T, heads, D] tensor at head pointer p, columns i_d·BD … ; rows ≥ n are zero."""
    o_c = tl.arange(0, 64)
    p_x = p + start.to(tl.int64) * HD + i_d * BD + (o_c[:, None] * HD + tl.arange(0, BD)[None, :])
    return tl.load(p_x, mask=(o_c < n)[:, None], other=0.0)


@triton.jit
def inverse_norm(p, start, n, HD, K: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(Σ_k x² + 1e-6) of each row, [64]."""
    square = tl.zeros([64], tl.float32)
    for i_k in tl.static_range(K // BK):
        x = load_rows(p, start, n, HD, K, i_k, BK).to(tl.float32)
        square += tl.sum(x * x, 1)
    return tl.rsqrt(square + 1e-6)


@triton.jit
def log2_gate(raw, A_log, dt_bias, lower_bound, n, i_h, K: tl.constexpr, i_k, BK: tl.constexpr, GATE: tl.constexpr):
    """The log2 gates of a chunk from its rows [64, BK] of g: fp32 [BK, 64], 0 (no decay) beyond the entry's end."""
    raw = raw.to(tl.float32)
    if GATE > 0:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
        bias = tl.load(dt_bias + i_h * K + i_k * BK + tl.arange(0, BK)).to(tl.float32)
        raw = tl.where((tl.arange(0, 64) < n)[:, None], gate(raw, rate, bias, lower_bound, GATE), 0.0)
    return tl.trans(raw) * LOG2E


@triton.jit
def load_chunk(g, q, k, start, n, i_k, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Rows [64, BK] of g, q and k, channels i_k·BK … . In a block of its own, for without it the compiler turns each
    tile before it loads the next: three latencies instead of one."""
    b_g = tl.zeros([64, BK], g.dtype.element_ty)
    b_q = tl.zeros([64, BK], q.dtype.element_ty)
    b_k = tl.zeros([64, BK], k.dtype.element_ty)
    if n > 0:
        b_g = load_rows(g, start, n, HV * K, K, i_k, BK)
        b_q = load_rows(q, start, n, H * K, K, i_k, BK)
        b_k = load_rows(k, start, n, H * K, K, i_k, BK)
    return b_g, b_q, b_k


@triton.jit
def normalised(x, p, start, n, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr):
    """Rows x [64, BK] of the q or k at p → fp32 [BK, 64], divided by their norms if L2NORM."""
    x = tl.trans(x).to(tl.float32)
    if L2NORM:
        x *= inverse_norm(p, start, n, H * K, K, BK)[None, :]
    return x


@triton.jit
def store_keys(p, x, tile, i_k, K: tl.constexpr, BK: tl.constexpr):
    """x [BK, 64], channels i_k·BK … of a chunk's tile in p [NT·HV, K, 64]."""
    o_k = tl.arange(0, BK)[:, None]
    tl.store(p + (tile * K + i_k * BK) * 64 + (o_k * 64 + tl.arange(0, 64)[None, :]), x.to(p.dtype.element_ty))


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, chunks, scale, lower_bound,
    qg, kn, kg, decay, b, Aqk, Gn,
    H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr, GATE: tl.constexpr,
    SAFE: tl.constexpr, L2NORM: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """One (chunk, head), all channels with MATRICES (Aqk, and Kk for solve_kernel), else one block of them."""
    i_h, i_t = tl.program_id(1), tl.program_id(2)
    start, n = locate(chunks, cu_seqlens, i_t, 64)
    tile = i_t.to(tl.int64) * HV + i_h
    row = tl.arange(0, 64)
    q += (i_h // (HV // H)) * K
    k += (i_h // (HV // H)) * K
    if MATRICES or tl.program_id(0) == 0:
        b_b = tl.load(beta + (start.to(tl.int64) + row) * HV + i_h, mask=row < n, other=0.0).to(tl.float32)
        tl.store(b + tile * 64 + row, b_b)
    b_A = tl.zeros([64, 64], tl.float32)  # sums over channels of q_i k_j 2^(Γ_i−Γ_j), near the diagonal
    b_K = tl.zeros([64, 64], tl.float32)  # the same of k_i k_j
    halves_A = tl.zeros([64, 128], tl.float32)  # in turn a column within the halves and one between them
    halves_K = tl.zeros([64, 128], tl.float32)
    diagonal = tl.zeros([64], tl.float32)
    for i in tl.range(0, K // BK if MATRICES else 1):
        i_k = tl.program_id(0) + i
        b_g, b_q, b_k = load_chunk(g + i_h * K, q, k, start, n, i_k, H, HV, K, BK)
        b_g = log2_gate(b_g, A_log, dt_bias, lower_bound, n, i_h, K, i_k, BK, GATE)
        b_q = normalised(b_q, q, start, n, H, K, BK, L2NORM) * scale
        b_k = normalised(b_k, k, start, n, H, K, BK, L2NORM)
        if SAFE:
            x, first, second, middle, gamma = half_decays(b_g, BK, CT)
            to_start = halves(tl.exp2(first), tl.exp2(second)).to(CT)
            W = b_k * tl.exp2(-x)
            b_w = W.to(CT)
            store_keys(kg, W * halves(tl.exp2(gamma - first), tl.exp2(gamma - second)), tile, i_k, K, BK)
            E = tl.exp2(x)
            b_q = (b_q * E).to(CT)
            b_k = (b_k * E).to(CT)
            store_keys(qg, b_q * to_start, tile, i_k, K, BK)
            store_keys(kn, -b_k * to_start, tile, i_k, K, BK)
            if MATRICES:
                # Keys of the first half relative to the second: where that is below 2^-126, E times it is below 2^-9.
                far_w = b_w * tl.exp2(middle - first).to(CT)[:, None] * tl.exp2(second - middle).to(CT)[:, None]
                b_w = tl.reshape(tl.join(b_w, far_w), [BK, 128])
                halves_A = dot(tl.trans(b_q), b_w, halves_A)
                halves_K = dot(tl.trans(b_k), b_w, halves_K)
        else:
            E, W, gamma = full_decays(b_g, CT)
            store_keys(qg, b_q * E, tile, i_k, K, BK)
            store_keys(kn, -b_k * E, tile, i_k, K, BK)
            store_keys(kg, b_k * W, tile, i_k, K, BK)
            if MATRICES:
                diagonal += tl.sum(b_q * b_k, 0)
                for level in range(6):
                    E = level_decay(b_g, level, CT)
                    b_w = (b_k * E).to(CT)
                    b_A += tl.where(level_mask(level), dot(tl.trans((b_q * E).to(CT)), b_w), 0.0)
                    b_K += tl.where(level_mask(level), dot(tl.trans(b_w), b_w), 0.0)
        tl.store(decay + tile * K + i_k * BK + tl.arange(0, BK), tl.exp2(gamma))
    if MATRICES:
        lower = row[:, None] >= row[None, :]
        if SAFE:
            b_A, b_K = tl.where(lower, join_halves(halves_A), 0.0), join_halves(halves_K)
        else:
            b_A += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
        o_c = tile * 64 * 64
        tl.store(Aqk + o_c + row[:, None] * 64 + row[None, :], b_A.to(CT))
        tl.store(lower_triangle(Gn + o_c, row[:, None], row[None, :]), b_K, mask=row[:, None] > row[None, :])


@triton.jit
def join_halves(x):
    """x [64, 128] → [64, 64]: even columns of x, but odd ones between the second and the first half of the chunk."""
    row = tl.arange(0, 64)
    near, far = tl.split(tl.reshape(x, [64, 64, 2]))
    return tl.where((row[:, None] >= 32) & (row[None, :] < 32), far, near)


@triton.jit
def entry_chunks(cu_seqlens, first, i_n):
    """(first token, tokens, first chunk, chunks) of entry i_n."""
    bos = tl.load(cu_seqlens + i_n)
    length = tl.load(cu_seqlens + i_n + 1) - bos
    return bos, length, tl.load(first + i_n), (length + 63) // 64


@triton.jit
def load_columns(p, start, n, HV, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr):
    """A [64, BV] tile of a [T, HV, V] tensor at head and column pointer p; rows ≥ n are zero."""
    o_c = tl.arange(0, 64)
    p_x = p + (start.to(tl.int64) + o_c[:, None]) * (HV * V) + tl.arange(0, BV)[None, :]
    return tl.load(p_x, mask=(o_c < n)[:, None], other=0.0).to(CT)


@triton.jit
def scan_kernel(
    v, cu_seqlens, entries, first, qg, kn, kg, decay, b, Aqk, Gn, h0,
    o, ht, h, r,
    HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
    LISTED: tl.constexpr, HAS_V: tl.constexpr, HAS_H0: tl.constexpr, OUTPUT: tl.constexpr, FINAL: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """One (entry, head, slice of V). OUTPUT writes o; FINAL the last state; KEEP each chunk's incoming Sᵀ and rᵀ.
    Without v and from h0 = I the state is the entry's transition M."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_f, i_h = i_nh // HV, i_nh % HV
    i_n = i_f
    if LISTED:
        i_n = tl.load(entries + i_f).to(tl.int64)
    bos, length, c0, NT = entry_chunks(cu_seqlens, first, i_n)
    row, o_k, o_v = tl.arange(0, 64), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    o_state = i_nh * K * V + o_k[None, :] * V + o_v[:, None]
    S = tl.zeros([BV, K], tl.float32)
    if HAS_H0:
        S += tl.load(h0 + o_state).to(tl.float32)
    eye = (row[:, None] == row[None, :]).to(CT)  # the tensor core transposes v
    next_decay = tl.load(decay + (c0 * HV + i_h) * K + o_k, mask=(o_k >= 0) & (NT > 0), other=0.0)
    for i_t in tl.range(0, NT, num_stages=STAGES):
        tile = (c0 + i_t) * HV + i_h
        if OUTPUT:  # one chunk ahead by hand: its pipelined buffers would be the 512 bytes too many at K = 128
            b_decay = next_decay
            next_decay = tl.load(decay + (tile + HV * (i_t + 1 < NT)) * K + o_k)
        else:
            b_decay = tl.load(decay + tile * K + o_k)
        o_tile = (tile * K + o_k[:, None]) * 64 + row[None, :]
        S16 = S.to(CT)
        x = dot(S16, tl.load(kn + o_tile))  # [BV, C] = (v − k̃ S)ᵀ
        if HAS_V:
            b_v = load_columns(v + i_h * V + i_v * BV, bos + i_t * 64, length - i_t * 64, HV, V, BV, CT)
            x = dot(tl.trans(b_v), eye, x)
        b_b = tl.load(b + tile * 64 + row)[None, :]
        p_c = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
        x = dot((x * b_b).to(CT), tl.trans(tl.load(Gn + p_c)), x)  # rᵀ
        if KEEP:
            tl.store(h + (tile * V + o_v[:, None]) * K + o_k[None, :], S16)
            tl.store(r + (tile * V + o_v[:, None]) * 64 + row[None, :], x.to(CT))
        y = (x * b_b).to(CT)
        if OUTPUT:
            b_o = dot(S16, tl.load(qg + o_tile))
            b_o = dot(y, tl.trans(tl.load(Aqk + p_c)), b_o)
            p_o = o + ((bos + i_t * 64).to(tl.int64) + row[None, :]) * (HV * V) + i_h * V + o_v[:, None]
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(row < length - i_t * 64)[None, :])
        S = dot(y, tl.trans(tl.load(kg + o_tile)), S * b_decay[None, :])
    if FINAL:
        tl.store(ht + o_state, S)
