"""KDA forward kernels: `prepare` (everything inside a chunk) and `scan` (the state through the chunks, and the output).

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
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc), fp32 accumulation; fp32 operands are multiplied as fp32."""
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def dot_fp32(a, b, CT: tl.constexpr):
    """fp32 a @ b: IEEE for fp32 inputs, else three bf16 products (relative error of an operand ~2^-17)."""
    if CT == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    a1 = a.to(tl.bfloat16)
    b1 = b.to(tl.bfloat16)
    a2 = (a - a1.to(tl.float32)).to(tl.bfloat16)
    b2 = (b - b1.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a1, b1, acc=tl.dot(a1, b2, acc=tl.dot(a2, b1)))


@triton.jit
def mask_dot(p, x, CT: tl.constexpr):
    """p @ x for a 0/1 matrix p (sums of rows of x) with x fp32 in two bf16 parts.

    A sum Γ then has an error of 2^-17 |Γ|, and 2^Γ one of |Γ| 2^Γ 2^-17 < 2^-17: fast gates stay exact."""
    if CT == tl.float32:
        return tl.dot(p.to(tl.float32), x, input_precision="ieee")
    hi = x.to(tl.bfloat16)
    lo = (x - hi.to(tl.float32)).to(tl.bfloat16)
    p = p.to(tl.bfloat16)
    return tl.dot(p, hi, acc=tl.dot(p, lo))


@triton.jit
def scale_blocks(x, m, BK: tl.constexpr):
    """x [64, BK] times m [4, BK], one row of m for 16 rows of x."""
    return tl.reshape(tl.reshape(x, [4, 16, BK]) * m[:, None, :], [64, BK])


@triton.jit
def softplus(x):
    """log(1 + e^x), with log1p's relative accuracy where e^x is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


@triton.jit
def gate(raw, rate, bias, lower_bound, GATE: tl.constexpr):
    """Natural-log gate [C, BK] from the raw input; rate = exp(A_log)."""
    if GATE == 0:
        return raw
    x = raw + bias[None, :]
    if GATE == 1:
        return -rate * softplus(x)
    return lower_bound / (1.0 + tl.exp(-rate * x))


@triton.jit
def block_decays(g, BK: tl.constexpr, CT: tl.constexpr):
    """g [64, BK], log2 gates → for blocks of 16 rows the factors that everything else is made of, all ≤ 1:
    L = 2^(sum from the block's start to row i, inclusive), R = 2^(sum from row i, exclusive, to the block's end),
    t [4, BK] = the block's sum, start [4, BK] = the sum before it, gamma [BK] = the sum of the chunk."""
    row = tl.arange(0, 64)
    same = (row[:, None] // 16) == (row[None, :] // 16)
    L = tl.exp2(mask_dot(same & (row[None, :] <= row[:, None]), g, CT))
    R = tl.exp2(mask_dot(same & (row[None, :] > row[:, None]), g, CT))
    t = tl.sum(tl.reshape(g, [4, 16, BK]), 1)
    start = tl.cumsum(t, 0) - t
    gamma = tl.sum(t, 0)
    return L, R, t, start, gamma


@triton.jit
def pair_decays(t, BK: tl.constexpr):
    """t [4, BK] → what takes 16-row factors to 32-row ones: (factor of L, factor of R), each [4, BK]."""
    pair = tl.reshape(t, [2, 2, BK])
    inclusive = tl.cumsum(pair, 1)
    before = tl.exp2(inclusive - pair)
    after = tl.exp2(tl.sum(pair, 1)[:, None, :] - inclusive)
    return tl.reshape(before, [4, BK]), tl.reshape(after, [4, BK])


@triton.jit
def level_decay(g, B: tl.constexpr, CT: tl.constexpr):
    """g [64, BK] → 2^(gates between row i and the middle of its block of 2B rows), all ≤ 1: the factor of a row of the
    second half as a query, of the first half as a key."""
    row = tl.arange(0, 64)
    same = (row[:, None] // B) == (row[None, :] // B)
    second = ((row // B) % 2 == 1)[:, None]
    upto = row[None, :] <= row[:, None]
    return tl.exp2(mask_dot(same & (upto == second), g, CT))


@triton.jit
def level_mask(B: tl.constexpr):
    """[64, 64]: row in the second, column in the first half of one block of 2B."""
    row = tl.arange(0, 64) // B
    return (row[:, None] % 2 == 1) & (row[None, :] == row[:, None] - 1)


@triton.jit
def solve(Kk, b, CT: tl.constexpr):
    """G [64, 64] with (I + Kk diag b) G = Kk: forward substitution in fp32 on 16×16 blocks, then merged to 32 and 64."""
    row = tl.arange(0, 64)
    same = (row[:, None] // 16) == (row[None, :] // 16)
    D = tl.sum(tl.reshape(tl.where(same, Kk, 0.0), [4, 16, 4, 16]), 2)  # [4, 16, 16], the diagonal blocks
    L = D * tl.reshape(b, [4, 16])[:, None, :]
    i = tl.arange(0, 16)
    for j in tl.static_range(15):
        column = tl.sum(tl.where(i[None, None, :] == j, L, 0.0), 2)
        solved = tl.sum(tl.where(i[None, :, None] == j, D, 0.0), 1)
        D -= column[:, :, None] * solved[:, None, :]
    G = tl.where(same, tl.reshape(tl.broadcast_to(D[:, :, None, :], [4, 16, 4, 16]), [64, 64]), 0.0)
    for level in tl.static_range(2):
        K21 = tl.where(level_mask(16 if level == 0 else 32), Kk, 0.0)
        K21 -= dot_fp32(K21, b[:, None] * G, CT)
        G += K21 - dot_fp32(G * b[None, :], K21, CT)
    return G


@triton.jit
def load_rows(p, start, n, HD, D: tl.constexpr, i_d, BD: tl.constexpr):
    """Rows start … start+63 of a [T, heads, D] tensor at head pointer p, columns i_d·BD … ; rows ≥ n are zero."""
    o_c = tl.arange(0, 64)
    p_x = p + (start.to(tl.int64) + o_c[:, None]) * HD + i_d * BD + tl.arange(0, BD)[None, :]
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
def load_gate(g, A_log, dt_bias, lower_bound, start, n, i_h, HV, K: tl.constexpr, i_k, BK: tl.constexpr, GATE: tl.constexpr):
    """The natural-log gates of a chunk, fp32 [64, BK]; 0 (no decay) beyond the entry's end."""
    raw = load_rows(g + i_h * K, start, n, HV * K, K, i_k, BK).to(tl.float32)
    if GATE == 0:
        return raw
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    bias = tl.load(dt_bias + i_h * K + i_k * BK + tl.arange(0, BK)).to(tl.float32)
    return tl.where((tl.arange(0, 64) < n)[:, None], gate(raw, rate, bias, lower_bound, GATE), 0.0)


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, chunks, scale, lower_bound,
    qg, kn, kg, decay, b, Aqk, Gn,
    H, HV,
    K: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr, GATE: tl.constexpr,
    SAFE: tl.constexpr, L2NORM: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    start = tl.load(chunks + 2 * i_t)
    n = tl.load(chunks + 2 * i_t + 1)
    tile = i_t.to(tl.int64) * HV + i_h
    row = tl.arange(0, 64)
    q += (i_h // (HV // H)) * K
    k += (i_h // (HV // H)) * K
    if L2NORM:
        q_norm = inverse_norm(q, start, n, H * K, K, BK)
        k_norm = inverse_norm(k, start, n, H * K, K, BK)
    b_b = tl.load(beta + (start.to(tl.int64) + row) * HV + i_h, mask=row < n, other=0.0).to(tl.float32)
    tl.store(b + tile * 64 + row, b_b)

    b_A = tl.zeros([64, 64], tl.float32)
    b_K = tl.zeros([64, 64], tl.float32)
    diagonal = tl.zeros([64], tl.float32)
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_g = load_gate(g, A_log, dt_bias, lower_bound, start, n, i_h, HV, K, i_k, BK, GATE) * LOG2E
        b_q = load_rows(q, start, n, H * K, K, i_k, BK).to(tl.float32) * scale
        b_k = load_rows(k, start, n, H * K, K, i_k, BK).to(tl.float32)
        if L2NORM:
            b_q *= q_norm[:, None]
            b_k *= k_norm[:, None]
        L, R, t, before, gamma = block_decays(b_g, BK, CT)
        qL = b_q * L
        kL = b_k * L
        kR = b_k * R
        tl.store(decay + tile * K + o_k, tl.exp2(gamma))
        o_tile = tile * 64 * K + row[:, None] * K + o_k[None, :]
        to_block = tl.exp2(before)
        tl.store(qg + o_tile, scale_blocks(qL, to_block, BK).to(CT))
        tl.store(kn + o_tile, (-scale_blocks(kL, to_block, BK)).to(CT))
        tl.store(kg + o_tile, scale_blocks(kR, tl.exp2(gamma[None, :] - before - t), BK).to(CT))
        if SOLVE:
            b_R = tl.trans(kR.to(CT))  # [BK, 64]
            cross = level_mask(16)
            b_A += tl.where(cross, dot(qL.to(CT), b_R), 0.0)
            b_K += tl.where(cross, dot(kL.to(CT), b_R), 0.0)
            pair_L, pair_R = pair_decays(t, BK)
            b_R = tl.trans(scale_blocks(kR, pair_R, BK).to(CT))
            cross = level_mask(32)
            b_A += tl.where(cross, dot(scale_blocks(qL, pair_L, BK).to(CT), b_R), 0.0)
            b_K += tl.where(cross, dot(scale_blocks(kL, pair_L, BK).to(CT), b_R), 0.0)
            if SAFE:  # the middle of a block's decay as the reference: 2^±58 at most
                middle = tl.exp2(-0.5 * t)
                same = (row[:, None] // 16) == (row[None, :] // 16)
                b_R = tl.trans(scale_blocks(kR, middle, BK).to(CT))
                b_A += tl.where(same & (row[:, None] >= row[None, :]), dot(scale_blocks(qL, middle, BK).to(CT), b_R), 0.0)
                b_K += tl.where(same & (row[:, None] > row[None, :]), dot(scale_blocks(kL, middle, BK).to(CT), b_R), 0.0)
            else:
                diagonal += tl.sum(b_q * b_k, 1)
                for level in tl.static_range(4):
                    E = level_decay(b_g, 8 >> level, CT)
                    cross = level_mask(8 >> level)
                    kE = (b_k * E).to(CT)
                    b_A += tl.where(cross, dot((b_q * E).to(CT), tl.trans(kE)), 0.0)
                    b_K += tl.where(cross, dot(kE, tl.trans(kE)), 0.0)
    if SOLVE:
        if not SAFE:
            b_A += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
        o_tile = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
        tl.store(Aqk + o_tile, b_A.to(CT))
        tl.store(Gn + o_tile, (-solve(b_K, b_b, CT)).to(CT))


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
    HV,
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
    eye = (row[:, None] == row[None, :]).to(CT)
    for i_t in tl.range(0, NT, num_stages=STAGES):
        tile = (c0 + i_t) * HV + i_h
        p_kn = kn + tile * 64 * K + row[:, None] * K + o_k[None, :]
        S16 = S.to(CT)
        x = dot(S16, tl.trans(tl.load(p_kn)))  # [BV, C] = (v − k̃ S)ᵀ
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
            p_qg = qg + tile * 64 * K + row[:, None] * K + o_k[None, :]
            b_o = dot(S16, tl.trans(tl.load(p_qg)))
            b_o = dot(y, tl.trans(tl.load(Aqk + p_c)), b_o)
            p_o = o + ((bos + i_t * 64).to(tl.int64) + row[:, None]) * (HV * V) + i_h * V + o_v[None, :]
            tl.store(p_o, tl.trans(b_o).to(o.dtype.element_ty), mask=(row < length - i_t * 64)[:, None])
        p_kg = kg + tile * 64 * K + row[:, None] * K + o_k[None, :]
        S = dot(y, tl.load(p_kg), S * tl.load(decay + tile * K + o_k)[None, :])
    if FINAL:
        tl.store(ht + o_state, S)
