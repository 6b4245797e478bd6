"""Kernels of the chunked gated delta rule with one gate per head and token.

With G the gate summed inside a chunk (here in base 2), D_ij = 2^(G_i - G_j):

    N = strict_lower(D * k kᵀ)        A = scale * lower(D * q kᵀ)
    C = N (I + diag(beta) N)^-1 diag(beta)
    X = v - 2^G k S                   Y = X - C X                         U = beta Y
    o = scale 2^G q S + A U           S' = 2^γ S + kᵀ (2^(γ-G) U)
    γ = G of the chunk's last token

I - C = (I + N diag(beta))^-1: the identity stays exact when C is rounded, and Y gives d
beta without a division. In backward, with dS' the gradient of the state that leaves the
chunk:

    dU = Aᵀ do + 2^(γ-G) k dS'        Z = beta dU                         dv = dX = Z - Cᵀ Z
    dS = 2^γ dS' + scale qᵀ (2^G do) - kᵀ (2^G dX)

All other gradients need only do, Y, dX, S and dS' of their own chunk: `gradients_kernel`.
All sums are fp32, and operands of a dot are rounded to the inputs' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_at, chunks_in, entry_at, is_wanted, of_one_chunk
from titan_linear.ops.triton.solve import lower_triangle
from titan_linear.ops.triton.tiles import (
    BT,
    Kernel,
    arange,
    beta_gradient,
    dot,
    fetch_rows,
    fetch_tile,
    indices,
    load_beta,
    load_tokens,
    load_wide,
    log2_gate,
    place_in_row,
    program,
    read_state,
    sigmoid,
    softplus,
    store_tokens,
    wide,
    write_state,
    zeros,
)


@triton.jit
def store_gates(o_c, g, beta, A_log, dt_bias, gates, i_p, start, length, HV, BETA_RANGE):
    """Store G in base 2 and beta for the tokens o_c of one chunk and head, and return them.
    Past a document's end these are the last G and zero."""
    i_hv = i_p % HV
    p_g, stride = g
    m_t = o_c < length
    b_g = load_wide(p_g + start * stride + i_hv + o_c * stride, m_t)
    # Compute the gate from its raw input.
    if A_log is not None:
        if dt_bias is not None:
            b_g += load_wide(dt_bias + i_hv)
        b_g = tl.where(m_t, -tl.exp(load_wide(A_log + i_hv)) * softplus(b_g), 0.0)
    b_G = tl.cumsum(log2_gate(b_g), 0)
    tl.store(gates + i_p * 2 * BT + o_c, b_G)
    b_beta = load_beta(beta, o_c, start, length, i_hv, BETA_RANGE)
    tl.store(gates + i_p * 2 * BT + BT + o_c, b_beta)
    return b_G, b_beta


@Kernel
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, tiles, chunks, scale, HV, R: constexpr, K: constexpr, BETA_RANGE: constexpr,
):  # fmt: skip
    """Compute the gates, A and N (in C's tile, for solve_kernel) of one chunk and value
    head."""
    i_p = program()
    i_t, i_hv = i_p // HV, i_p % HV
    start, length = chunk_at(chunks, i_t)
    b_q = load_tokens(q, start, length, i_hv // R * K, K)
    b_k = load_tokens(k, start, length, i_hv // R * K, K)
    o_c = arange(BT)
    b_G, _ = store_gates(
        o_c, g, beta, A_log, dt_bias, tiles.gates, i_p, start, length, HV, BETA_RANGE
    )
    o_i, o_j = indices(BT, BT)
    # A and N from products of pairs of tokens and their decays D.
    b_d = tl.exp2(tl.where(o_i >= o_j, b_G[:, None] - b_G[None, :], -float("inf")))
    b_a = dot(b_q, b_k.T) * scale * b_d
    tl.store(tiles.A + i_p * BT * BT + (o_i * BT + o_j), b_a)
    b_n = dot(b_k, b_k.T) * b_d
    tl.store(lower_triangle(tiles.C + i_p * BT * BT, o_i, o_j), b_n, mask=o_i > o_j)


@triton.jit
def _load_gates(gates, i_p):
    """Load G and beta of a chunk and head, each [BT], and its last G."""
    o_c = arange(BT)
    p_g = gates + i_p * 2 * BT
    return tl.load(p_g + o_c), tl.load(p_g + BT + o_c), tl.load(p_g + BT - 1)


@Kernel
def scan_kernel(
    k_desc, v_desc, C_desc, gates, initial, listed, chunks, scale, HV,
    R: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    q_desc=None, A_desc=None, o=None,  # [T, HV, V]
    h=None, y=None,  # [NT, HV, K, V], the state that enters each chunk, and [T, HV, V]
    final_state=None,  # of all or of the listed entries, [., HV, K, V] fp32
    M=None,  # [F, HV, K, K] fp32
):  # fmt: skip
    """Scan one entry's chunks in order, for one head and BV columns of final_state or of M.
    M is the scan from the identity with v = 0."""
    i_v, i_nh, i_n, i_hv = place_in_row(V // BV if M is None else (V + K) // BV, HV)
    is_m = i_v >= V // BV
    if not is_wanted(listed, i_n, tl.where(is_m, 2, 1)):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    # Start from the initial state or, for M, from the identity.
    o_k, o_v = indices(K, BV)
    i_m, v_length = i_v - V // BV, length
    if M is None:
        b_s = read_state(initial, i_n, HV * K * V, i_nh % HV * (K * V) + o_k * V + i_v * BV + o_v)
    else:
        b_s = tl.where(is_m & (o_k == i_m * BV + o_v), 1.0, 0.0)
        v_length = tl.where(is_m, 0, length)
    column = i_hv * V + (i_v if M is None else tl.where(is_m, 0, i_v)) * BV
    for i in tl.range(0, chunks_in(length), num_stages=STAGES):
        i_p, n, token = (first + i) * HV + i_hv, length - i * BT, start + i * BT
        keys = start, length, i * BT, i_hv // R * K
        b_k = fetch_rows(k_desc, *keys)  # [BT, K]
        b_v = wide(fetch_rows(v_desc, start, v_length, i * BT, column))  # [BT, BV]
        b_c = fetch_tile(C_desc, i_p)  # [BT, BT]
        b_G, b_beta, b_last = _load_gates(gates, i_p)
        b_e = tl.exp2(b_G)
        b_sd = b_s.to(C_desc.dtype)
        if h is not None:
            tl.store(h + i_p * K * V + i_v * BV + (o_k * V + o_v), b_sd)
        # X and Y of the chunk, from the state that enters it.
        b_x = b_v - b_e[:, None] * dot(b_k, b_sd)
        b_y = b_x - dot(b_c, b_x.to(b_sd.dtype))  # [BT, BV]
        if h is not None:
            store_tokens((y, HV * V), b_y, token, n, column, BV)
        if o is not None:
            b_q = fetch_rows(q_desc, *keys)  # [BT, K]
            b_a = fetch_tile(A_desc, i_p)  # [BT, BT]
            b_o = (scale * b_e)[:, None] * dot(b_q, b_sd)
            b_o += dot(b_a, (b_beta[:, None] * b_y).to(b_sd.dtype))
            store_tokens((o, HV * V), b_o, token, n, column, BV)
        # The state that leaves the chunk.
        b_w = (tl.exp2(b_last - b_G) * b_beta)[:, None] * b_y
        b_s = b_s * tl.exp2(b_last) + dot(b_k.T, b_w.to(b_sd.dtype))
    if M is not None and is_m:
        tl.store(M + i_nh * K * K + o_k * K + i_m * BV + o_v, b_s)
    elif final_state is not None:
        tl.store(final_state + i_nh * K * V + o_k * V + i_v * BV + o_v, b_s)


@Kernel
def reverse_kernel(
    q_desc, k_desc, do_desc, C_desc, A_desc, gates, d_final, d_initial, listed, chunks, scale, HV,
    R: constexpr, K: constexpr, V: constexpr, BV: constexpr, STAGES: constexpr,
    # [NT, HV, K, V], the gradient of the state that leaves each chunk, and [T, HV, V]
    dh=None, dv=None,
):  # fmt: skip
    """Scan one entry's chunks from the last to the first, for one head and BV columns of a
    state's gradient."""
    i_v, i_nh, i_n, i_hv = place_in_row(V // BV, HV)
    if not is_wanted(listed, i_n, 1):
        return
    start, length, first = entry_at(chunks, listed, i_n)
    o_k, o_v = indices(K, BV)
    o_s = o_k * V + (i_v * BV + o_v)
    column = i_hv * V + i_v * BV
    b_ds = read_state(d_final, i_n, HV * K * V, i_nh % HV * (K * V) + o_s)
    NT = chunks_in(length)
    for j in tl.range(0, NT, num_stages=STAGES):
        i = NT - 1 - j
        i_p = (first + i) * HV + i_hv
        keys = start, length, i * BT, i_hv // R * K
        b_k = fetch_rows(k_desc, *keys)  # [BT, K]
        b_q = fetch_rows(q_desc, *keys)  # [BT, K]
        b_do = fetch_rows(do_desc, start, length, i * BT, column)  # [BT, BV]
        b_c = fetch_tile(C_desc, i_p)  # [BT, BT]
        b_a = fetch_tile(A_desc, i_p)  # [BT, BT]
        b_G, b_beta, b_last = _load_gates(gates, i_p)
        b_dsd = b_ds.to(C_desc.dtype)
        if dh is not None:
            tl.store(dh + i_p * K * V + o_s, b_dsd)
        # dU, Z and dX of the chunk, from the gradient of the state that leaves it.
        b_du = tl.exp2(b_last - b_G)[:, None] * dot(b_k, b_dsd)
        b_du += dot(b_a.T, b_do)  # [BT, BV]
        b_z = b_beta[:, None] * b_du
        b_dx = b_z - dot(b_c.T, b_z.to(b_dsd.dtype))
        if dh is not None:
            store_tokens((dv, HV * V), b_dx, start + i * BT, length - i * BT, column, BV)
        # The gradient of the state that enters the chunk.
        b_e = tl.exp2(b_G)
        b_ds *= tl.exp2(b_last)
        b_ds += dot(b_q.T, ((scale * b_e)[:, None] * b_do).to(b_dsd.dtype))
        b_ds += dot(b_k.T, (-b_e[:, None] * b_dx).to(b_dsd.dtype))
    write_state(d_initial, i_n, HV * K * V, i_nh % HV * (K * V) + o_s, b_ds)


@triton.jit
def _pair_gradients(b_w, b_beta):
    """Return the contributions of products of pairs of tokens to the gradients of G and
    beta. w [BT, BT] is the gradient of o_i or X_i times U_j / beta_j.

    A token's product with itself does not decay, so it is left out of G's gradient: its
    rounding error would exceed the gradient of a fast gate.
    """
    o_i, o_j = indices(BT, BT)
    b_own = tl.sum(tl.where(o_i == o_j, b_w, 0.0), 1)
    b_w = tl.where(o_i == o_j, 0.0, b_w)
    b_db = tl.sum(b_w, 0)
    return tl.sum(b_w * b_beta[None, :], 1) - b_beta * b_db, b_db + b_own


@triton.jit
def store_gate_gradients(
    o_c, b_dg, b_later, b_db, b_beta, b_entering, g, A_log, dt_bias, dg, dbeta, d_gate, i_p, start, length, i_hv, HV,
    NT, BETA_RANGE,
):  # fmt: skip
    """Store dg and dbeta for the tokens o_c of one chunk and head, from the gradients of G
    (b_dg), of later writes to the state (b_later), of the entering state (b_entering) and
    of β (b_db)."""
    m_t = o_c < length
    # The gate of token t decays the state that enters, updates before t, and all reads from
    # token t on.
    b_dg = tl.cumsum(b_dg, 0, reverse=True) + tl.cumsum(b_later, 0) - b_later
    b_dg += b_entering
    p_g = start * HV + i_hv + o_c * HV
    # Through the gate's function to its raw input, A_log and dt_bias.
    if A_log is not None:
        p_x, stride = g
        b_x = load_wide(p_x + start * stride + i_hv + o_c * stride, m_t)
        if dt_bias is not None:
            b_x += load_wide(dt_bias + i_hv)
        b_a = -tl.exp(load_wide(A_log + i_hv))
        tl.store(d_gate + i_p, tl.sum(tl.where(m_t, b_dg * b_a * softplus(b_x), 0.0), 0))
        b_dg *= b_a * sigmoid(b_x)
        tl.store(d_gate + NT * HV + i_p, tl.sum(tl.where(m_t, b_dg, 0.0), 0))
    tl.store(dg + p_g, b_dg, mask=m_t)
    b_db = beta_gradient(b_db, b_beta, BETA_RANGE)
    tl.store(dbeta + p_g, b_db, mask=m_t)


@Kernel
def gradients_kernel(
    q, k,  # (x, stride)
    k_desc, do_desc, y_desc, dv_desc, h_desc, dh_desc, gates,
    g,  # (x, stride), read only with A_log
    A_log, dt_bias, initial, d_final,
    dq, dk,  # [T, HV, K]
    dg, dbeta,  # [T, HV]
    d_gate,  # [2, NT, HV] fp32 partials of d A_log and d dt_bias, only with A_log
    chunks, scale, HV, NT, R: constexpr, K: constexpr, V: constexpr, BV: constexpr, BETA_RANGE: constexpr,
    STAGES: constexpr,
):  # fmt: skip
    """Compute dq, dk, dg and dbeta of one chunk and value head. Queries come first, so that
    few tiles are live at a time."""
    i_p = program()
    i_t, i_hv = i_p // HV, (i_p % HV).to(tl.int32)
    start, length = chunk_at(chunks, i_t)
    if length <= 0:
        if A_log is not None:
            tl.store(d_gate + i_p, 0.0)
            tl.store(d_gate + NT * HV + i_p, 0.0)
        return
    dtype = k_desc.dtype
    o_c = arange(BT)
    i_s = (i_p * K).to(tl.int32)

    # Load q and k without the copy engine, before the loop: both at once, and into shared
    # memory before the loop's sums take the registers.
    keys = start, length, i_hv // R * K
    b_q = load_tokens(q, *keys, K)
    b_k = load_tokens(k, *keys, K)
    b_dq = zeros(BT, K)  # do Sᵀ
    b_p = zeros(BT, BT)  # do Yᵀ
    b_n = zeros(BT, BT)  # dX Yᵀ
    for i_v in tl.range(0, V // BV, num_stages=STAGES):
        values = start, length, 0, i_hv * V + i_v * BV
        b_do = fetch_rows(do_desc, *values)
        b_y = fetch_rows(y_desc, *values)
        b_dx = fetch_rows(dv_desc, *values)
        b_dq = dot(b_do, h_desc.load([i_s, i_v * BV]).T, b_dq)
        b_p = dot(b_do, b_y.T, b_p)
        b_n = dot(b_dx, b_y.T, b_n)
    b_G, b_beta, b_last = _load_gates(gates, i_t * HV + i_hv)
    b_e = tl.exp2(b_G)
    o_i, o_j = indices(BT, BT)
    b_d = tl.exp2(tl.where(o_i >= o_j, b_G[:, None] - b_G[None, :], -float("inf")))
    # dq, and the share of pairs of tokens in the gradients of G and beta.
    b_p *= scale * b_d
    b_n = tl.where(o_i > o_j, -b_n * b_d, 0.0)
    b_dgs = (scale * b_e) * tl.sum(b_dq * wide(b_q), 1)
    b_dq = dot((b_p * b_beta[None, :]).to(dtype), b_k, (scale * b_e)[:, None] * b_dq)
    store_tokens((dq, HV * K), b_dq, start, length, i_hv * K, K)
    b_w = b_p * dot(b_q, b_k.T)
    b_w += b_n * dot(b_k, b_k.T)
    b_dg, b_db = _pair_gradients(b_w, b_beta)
    b_dg += b_dgs
    b_pq = (b_p * b_beta[None, :]).to(dtype)
    b_n *= b_beta[None, :]
    b_nk = (b_n + b_n.T).to(dtype)

    # Load q, k and gates again instead of holding them in registers across a loop.
    b_q = load_tokens(q, *keys, K)
    b_dk = zeros(BT, K)  # dX Sᵀ
    for i_v in tl.range(0, V // BV, num_stages=STAGES + 1):  # this loop has fewer tiles
        b_dx = fetch_rows(dv_desc, start, length, 0, i_hv * V + i_v * BV)
        b_dk = dot(b_dx, h_desc.load([i_s, i_v * BV]).T, b_dk)
    b_k = fetch_rows(k_desc, start, length, 0, i_hv // R * K)
    b_G, b_beta, b_last = _load_gates(gates, i_t * HV + i_hv)
    b_e = tl.exp2(b_G)
    # dk without the share of dS'.
    b_dg -= b_e * tl.sum(b_dk * wide(b_k), 1)
    b_dk = dot(b_nk, b_k, -b_e[:, None] * b_dk)
    b_dk = dot(b_pq.T, b_q, b_dk)

    # The share of dS' in dk, dbeta and dg.
    b_ydh = zeros(BT, K)  # Y dS'ᵀ
    b_sds = 0.0  # <S, dS'>
    for i_v in tl.range(0, V // BV, num_stages=STAGES):
        b_y = fetch_rows(y_desc, start, length, 0, i_hv * V + i_v * BV)
        b_h = h_desc.load([i_s, i_v * BV])  # [K, BV]
        b_dh = dh_desc.load([i_s, i_v * BV])
        b_ydh = dot(b_y, b_dh.T, b_ydh)
        b_sds += tl.sum(wide(b_h) * wide(b_dh))
    b_k = fetch_rows(k_desc, start, length, 0, i_hv // R * K)
    b_G, b_beta, b_last = _load_gates(gates, i_t * HV + i_hv)
    b_w = tl.exp2(b_last - b_G)
    b_dbs = b_w * tl.sum(b_ydh * wide(b_k), 1)
    # U_j's update of the state decays with the gates after token j. The last token has
    # none.
    b_later = tl.where(o_c < length - 1, b_beta * b_dbs, 0.0)
    b_dk += (b_w * b_beta)[:, None] * b_ydh
    store_tokens((dk, HV * K), b_dk, start, length, i_hv * K, K)

    # For a document within one chunk, read the fp32 states: <S, dS'> may be most of its dg.
    if initial[0] is not None and d_final[0] is not None:
        i_n, alone = of_one_chunk(chunks, i_t, length)
        if alone:
            o_k, o_v = indices(K, BV)
            o_s = i_p % HV * (K * V) + o_k * V + o_v
            b_sds = 0.0
            for i_v in range(V // BV):
                b_h = read_state(initial, i_n, HV * K * V, o_s + i_v * BV)
                b_sds += tl.sum(b_h * read_state(d_final, i_n, HV * K * V, o_s + i_v * BV))
    store_gate_gradients(
        o_c, b_dg, b_later, b_db + b_dbs, b_beta, tl.exp2(b_last) * b_sds, g, A_log, dt_bias, dg, dbeta, d_gate, i_p,
        start, length, i_hv, HV, NT, BETA_RANGE,
    )  # fmt: skip
