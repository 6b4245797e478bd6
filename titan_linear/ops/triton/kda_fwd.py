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

Gates: with safe_gate two halves of a chunk, each relative to the middle of its own decay, need two products; without
it six levels of blocks of 2B tokens (B = 1 … 32), each relative to its block's middle, cover any g ≤ 0: no factor
exceeds 1.
Tiles have channels as rows, tokens as columns: cumulative gates are then a product with a constant on the right.
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
def split(x):
    """fp32 x → two bf16 parts whose sum is x to 2^-16 of |x|. (Cutting bits is cheaper than rounding twice.)"""
    hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return hi.to(tl.bfloat16), (x - hi).to(tl.bfloat16)


@triton.jit
def dot_fp32(a, b, CT: tl.constexpr):
    """fp32 a @ b: IEEE for fp32 inputs, else three bf16 products (relative error of an operand 2^-16)."""
    if CT == tl.float32:  # noqa: SIM300
        return tl.dot(a, b, input_precision="ieee")
    else:
        a1, a2 = split(a)
        b1, b2 = split(b)
        return tl.dot(a1, b1, acc=tl.dot(a1, b2, acc=tl.dot(a2, b1)))


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
def scale_halves(x, m, BK: tl.constexpr):
    """x [BK, 64] times m [BK, 2], one column of m for 32 columns of x; in x's dtype."""
    return tl.reshape(tl.reshape(x, [BK, 2, 32]) * m.to(x.dtype)[:, :, None], [BK, 64])


@triton.jit
def softplus(x):
    """log(1 + e^x), with log1p's relative accuracy where e^x is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


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
    """g [BK, 64], log2 gates ≥ −7.3 → the factors of the safe path. The reference of each half of the chunk is the
    whole number nearest to the middle of its decay, so that E = 2^(Γ − reference) and W = 1/E stay within 2^±117, which
    bf16 holds, and all other factors of q and k are powers of two, which scale bf16 numbers without rounding again:
    to_start [BK, 2]: 2^Γ = E·to_start;  left, right [BK, 2]: 2^(Γ − m) = E·left in the second half and
    2^(m − Γ) = W·right in the first, m the middle of the chunk (rounded).
    Also to_end [BK, 2] with 2^(γ−Γ) = W·to_end (no power of two), and gamma [BK], the chunk's sum."""
    row = tl.arange(0, 64)
    same = (row[:, None] // 32) == (row[None, :] // 32)
    x = split_dot(g, tl.where(same, tl.where(row[:, None] <= row[None, :], 0.5, -0.5), 0.0), CT)
    half = tl.min(tl.reshape(x, [BK, 2, 32]), 2)  # x falls from −s/2 to s/2, s the sum of the half
    second = (tl.arange(0, 2) == 1)[None, :]
    gamma = 2.0 * tl.sum(half, 1)
    first = 2.0 * tl.sum(tl.where(second, 0.0, half), 1)[:, None]  # [BK, 1], Γ in the middle of the chunk
    middle = tl.where(second, first + half, half)
    reference = tl.floor(middle + 0.5)
    x = tl.reshape(tl.reshape(x, [BK, 2, 32]) + (middle - reference)[:, :, None], [BK, 64])
    to_middle = tl.floor(first + 0.5)
    left = tl.exp2(tl.where(second, reference - to_middle, 0.0))
    right = tl.exp2(tl.where(second, 0.0, to_middle - reference))
    return tl.exp2(x), tl.exp2(-x), tl.exp2(reference), left, right, tl.exp2(gamma[:, None] - reference), gamma


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
def solve(Kk, b, CT: tl.constexpr):
    """G [64, 64] with (I + Kk diag b) G = Kk: forward substitution in fp32 on 16×16 blocks, merged to 32 and 64."""
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
        K21 = tl.where(level_mask(4 + level), Kk, 0.0)
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
def load_gate(
    g, A_log, dt_bias, lower_bound, start, n, i_h, HV, K: tl.constexpr, i_k, BK: tl.constexpr, GATE: tl.constexpr
):
    """The log2 gates of a chunk, fp32 [BK, 64]; 0 (no decay) beyond the entry's end."""
    raw = load_rows(g + i_h * K, start, n, HV * K, K, i_k, BK).to(tl.float32)
    if GATE > 0:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
        bias = tl.load(dt_bias + i_h * K + i_k * BK + tl.arange(0, BK)).to(tl.float32)
        raw = tl.where((tl.arange(0, 64) < n)[:, None], gate(raw, rate, bias, lower_bound, GATE), 0.0)
    return tl.trans(raw) * LOG2E


@triton.jit
def load_keys(p, norm, start, n, HD, K: tl.constexpr, i_k, BK: tl.constexpr):
    """q or k of a chunk, fp32 [BK, 64], times norm [64]."""
    return tl.trans(load_rows(p, start, n, HD, K, i_k, BK)).to(tl.float32) * norm[None, :]


@triton.jit
def products(
    x, k, g, A_log, dt_bias, x_norm, k_norm, lower_bound, start, n, i_h, tile, xg, kg, decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr, GATE: tl.constexpr,
    SAFE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Σ_k x_i k_j 2^(Γ_i−Γ_j) for j ≤ i (with KEYS, x = k and j < i), fp32 [64, 64], 0 elsewhere. Writes xg = x·2^Γ
    (with KEYS −x·2^Γ, and kg, decay)."""
    row = tl.arange(0, 64)
    lower = row[:, None] > row[None, :] if KEYS else row[:, None] >= row[None, :]
    near = tl.zeros([64, 64], tl.float32)
    far = tl.zeros([64, 64], tl.float32)
    diagonal = tl.zeros([64], tl.float32)
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_tile = (tile * K + o_k[:, None]) * 64 + row[None, :]
        b_g = load_gate(g, A_log, dt_bias, lower_bound, start, n, i_h, HV, K, i_k, BK, GATE)
        b_x = load_keys(x, x_norm, start, n, H * K, K, i_k, BK)
        b_k = b_x if KEYS else load_keys(k, k_norm, start, n, H * K, K, i_k, BK)
        if SAFE:
            E, W, to_start, to_middle, from_middle, to_end, gamma = half_decays(b_g, BK, CT)
            left = (b_x * E).to(CT)
            b_k *= W
            right = b_k.to(CT)
            near = dot(tl.trans(left), right, near)
            far = dot(tl.trans(scale_halves(left, to_middle, BK)), scale_halves(right, from_middle, BK), far)
            left = scale_halves(left, to_start, BK)
            right = scale_halves(b_k, to_end, BK).to(CT)
        else:
            E, W, gamma = full_decays(b_g, CT)
            left = (b_x * E).to(CT)
            right = (b_k * W).to(CT)
            diagonal += tl.sum(b_x * b_k, 0)
            for level in range(6):
                E = level_decay(b_g, level, CT)
                near += tl.where(level_mask(level), dot(tl.trans((b_x * E).to(CT)), (b_k * E).to(CT)), 0.0)
        if KEYS:
            left = -left
        tl.store(xg + o_tile, left)
        if KEYS:
            tl.store(kg + o_tile, right)
            tl.store(decay + tile * K + o_k, tl.exp2(gamma))
    if SAFE:
        near = tl.where((row[:, None] >= 32) & (row[None, :] < 32), far, tl.where(lower, near, 0.0))
    elif not KEYS:
        near += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
    return near


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, chunks, scale, lower_bound,
    qg, kn, kg, decay, b, Aqk, Gn,
    H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr, GATE: tl.constexpr,
    SAFE: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """One (chunk, head) and one of two halves of the work, which share their inputs in L2: queries or keys."""
    i_q, i_h, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(chunks + 2 * i_t)
    n = tl.load(chunks + 2 * i_t + 1)
    tile = i_t.to(tl.int64) * HV + i_h
    row = tl.arange(0, 64)
    q += (i_h // (HV // H)) * K
    k += (i_h // (HV // H)) * K
    o_c = tile * 64 * 64 + row[:, None] * 64 + row[None, :]
    k_norm = tl.full([64], 1.0, tl.float32)
    if L2NORM:
        k_norm = inverse_norm(k, start, n, H * K, K, BK)
    if i_q == 0:
        q_norm = tl.full([64], scale, tl.float32)
        if L2NORM:
            q_norm *= inverse_norm(q, start, n, H * K, K, BK)
        b_A = products(
            q, k, g, A_log, dt_bias, q_norm, k_norm, lower_bound, start, n, i_h, tile, qg, kg, decay,
            H, HV, K, BK, CT, GATE, SAFE, False,
        )  # fmt: skip
        tl.store(Aqk + o_c, b_A.to(CT))
    else:
        b_b = tl.load(beta + (start.to(tl.int64) + row) * HV + i_h, mask=row < n, other=0.0).to(tl.float32)
        tl.store(b + tile * 64 + row, b_b)
        b_K = products(
            k, k, g, A_log, dt_bias, k_norm, k_norm, lower_bound, start, n, i_h, tile, kn, kg, decay,
            H, HV, K, BK, CT, GATE, SAFE, True,
        )  # fmt: skip
        tl.store(Gn + o_c, (-solve(b_K, b_b, CT)).to(CT))


@triton.jit
def recompute_kernel(
    q, k, g, beta, A_log, dt_bias, chunks, scale, lower_bound,
    qg, kn, kg, decay, b,
    H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr, GATE: tl.constexpr,
    SAFE: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """prepare_kernel without the products; one (chunk, head, block of K)."""
    i_k, i_h, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(chunks + 2 * i_t)
    n = tl.load(chunks + 2 * i_t + 1)
    tile = i_t.to(tl.int64) * HV + i_h
    row = tl.arange(0, 64)
    q += (i_h // (HV // H)) * K
    k += (i_h // (HV // H)) * K
    q_norm = tl.full([64], scale, tl.float32)
    k_norm = tl.full([64], 1.0, tl.float32)
    if L2NORM:
        q_norm *= inverse_norm(q, start, n, H * K, K, BK)
        k_norm = inverse_norm(k, start, n, H * K, K, BK)
    if i_k == 0:
        b_b = tl.load(beta + (start.to(tl.int64) + row) * HV + i_h, mask=row < n, other=0.0).to(tl.float32)
        tl.store(b + tile * 64 + row, b_b)
    o_k = i_k * BK + tl.arange(0, BK)
    o_tile = (tile * K + o_k[:, None]) * 64 + row[None, :]
    b_g = load_gate(g, A_log, dt_bias, lower_bound, start, n, i_h, HV, K, i_k, BK, GATE)
    b_q = load_keys(q, q_norm, start, n, H * K, K, i_k, BK)
    b_k = load_keys(k, k_norm, start, n, H * K, K, i_k, BK)
    if SAFE:  # the same arithmetic as prepare_kernel's
        E, W, to_start, _to_middle, _from_middle, to_end, gamma = half_decays(b_g, BK, CT)
        b_q = scale_halves((b_q * E).to(CT), to_start, BK)
        b_n = scale_halves((-b_k * E).to(CT), to_start, BK)
        b_k = scale_halves(b_k * W, to_end, BK).to(CT)
    else:
        E, W, gamma = full_decays(b_g, CT)
        b_q = (b_q * E).to(CT)
        b_n = (-b_k * E).to(CT)
        b_k = (b_k * W).to(CT)
    tl.store(decay + tile * K + o_k, tl.exp2(gamma))
    tl.store(qg + o_tile, b_q)
    tl.store(kn + o_tile, b_n)
    tl.store(kg + o_tile, b_k)


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
