"""Kernels of the chunked gated delta rule with one gate per head and token.

With G the gate summed inside a chunk (here in base 2), D_ij = 2^(G_i - G_j):

    N = strict_lower(D * k kᵀ)        A = scale * lower(D * q kᵀ)         C = N (I + diag(beta) N)^-1 diag(beta)
    X = v - 2^G k S                   Y = X - C X                         U = beta Y
    o = scale 2^G q S + A U           S' = 2^γ S + kᵀ (2^(γ-G) U)          γ = G of the chunk's last token

I - C = (I + N diag(beta))^-1: the identity stays exact when C is rounded, and Y gives d beta without a division.
Backward, with dS' the gradient of the state that leaves the chunk:

    dU = Aᵀ do + 2^(γ-G) k dS'        Z = beta dU                         dv = dX = Z - Cᵀ Z
    dS = 2^γ dS' + scale qᵀ (2^G do) - kᵀ (2^G dX)

Everything else needs only do, Y, dX, S and dS' of its own chunk: `gradients_kernel`. All sums are fp32; operands of a
dot are rounded to the inputs' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from titan_linear.ops.triton.chunks import locate, locate_entry
from titan_linear.ops.triton.gates import beta_gradient, load_beta, log2_gate, sigmoid, softplus
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.solve import lower_triangle
from titan_linear.ops.triton.tiles import fetch_rows, fetch_tile, load_rows, load_state, store_rows, store_state


@triton.jit
def _store_gates(
    g, beta, A_log, dt_bias, gates, i_p, start, length, stride_g, stride_beta, HV, BT: tl.constexpr,
    BETA_RANGE: tl.constexpr,
):  # fmt: skip
    """Store G in base 2 and beta of one chunk and head; past a document's end, the last G and zero. Returns G [BT]."""
    o_c, i_hv = tl.arange(0, BT), i_p % HV
    m_t = o_c < length
    b_g = tl.load(g + start * stride_g + i_hv + o_c * stride_g, mask=m_t, other=0.0).to(tl.float32)
    if A_log is not None:
        if dt_bias is not None:
            b_g += tl.load(dt_bias + i_hv).to(tl.float32)
        b_g = tl.where(m_t, -tl.exp(tl.load(A_log + i_hv).to(tl.float32)) * softplus(b_g), 0.0)
    b_G = tl.cumsum(log2_gate(b_g), 0)
    tl.store(gates + i_p * 2 * BT + o_c, b_G)
    tl.store(gates + i_p * 2 * BT + BT + o_c, load_beta(beta, start, length, stride_beta, i_hv, BT, BETA_RANGE))
    return b_G


@Kernel
def prepare_kernel(
    q,  # [T, H, K]
    k,  # [T, H, K]
    g,  # [T, HV]
    beta,  # [T, HV]
    A_log,  # [HV], or None: g is the log gate
    dt_bias,  # [HV] or None
    C,  # [NT, HV, BT, BT]
    A,  # [NT, HV, BT, BT]
    gates,  # [NT, HV, 2, BT] fp32: G in base 2, beta; past a document's end, the last G and zero
    cu_seqlens,
    chunk_index,
    scale,
    stride_q,
    stride_k,
    stride_g,
    stride_beta,
    HV,
    R: tl.constexpr,  # value heads per key head
    K: tl.constexpr,
    BT: tl.constexpr,
    BETA_RANGE: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gates, A and N (in C's tile, for solve_kernel) of one chunk and value head."""
    i_p = tl.program_id(0).to(tl.int64)
    i_t, i_hv = i_p // HV, i_p % HV
    start, length = locate(chunk_index, cu_seqlens, i_t, BT)
    b_q = load_rows(q, start, length, stride_q, i_hv // R * K, BT, K)
    b_k = load_rows(k, start, length, stride_k, i_hv // R * K, BT, K)
    b_G = _store_gates(g, beta, A_log, dt_bias, gates, i_p, start, length, stride_g, stride_beta, HV, BT, BETA_RANGE)
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_d = tl.exp2(tl.where(o_i >= o_j, b_G[:, None] - b_G[None, :], -float("inf")))
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * scale * b_d
    tl.store(A + i_p * BT * BT + (o_i * BT + o_j), b_a.to(A.dtype.element_ty))
    b_n = tl.dot(b_k, tl.trans(b_k), input_precision=PREC) * b_d
    tl.store(lower_triangle(C + i_p * BT * BT, o_i, o_j), b_n, mask=o_i > o_j)


@triton.jit
def _load_gates(gates, i_t, i_hv, HV, BT: tl.constexpr):
    """G and beta of chunk i_t, each [BT], and its last G."""
    o_c = tl.arange(0, BT)
    p_g = gates + (i_t * HV + i_hv) * 2 * BT
    return tl.load(p_g + o_c), tl.load(p_g + BT + o_c), tl.load(p_g + BT - 1)


@triton.jit
def _step(
    b_s, i, q_desc, k_desc, v_desc, C_desc, A_desc, gates, o, h, y, start, length, v_length, first, i_hv, i_v,
    scale, HV, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One chunk forward: from the state b_s [K, BV] that enters to the state that leaves."""
    dtype = C_desc.dtype
    i_p, rows = (first + i) * HV + i_hv, length - i * BT
    b_k = fetch_rows(k_desc, start, length, i * BT, i_hv // R * K)  # [BT, K]
    b_v = fetch_rows(v_desc, start, v_length, i * BT, i_hv * V + i_v * BV).to(tl.float32)  # [BT, BV]
    b_c = fetch_tile(C_desc, i_p, BT)  # [BT, BT]
    b_G, b_beta, b_last = _load_gates(gates, first + i, i_hv, HV, BT)
    b_e = tl.exp2(b_G)
    b_sd = b_s.to(dtype)
    if h is not None:
        tl.store(h + i_p * K * V + i_v * BV + (tl.arange(0, K)[:, None] * V + tl.arange(0, BV)[None, :]), b_sd)
    b_x = b_v - b_e[:, None] * tl.dot(b_k, b_sd, input_precision=PREC)
    b_y = b_x - tl.dot(b_c, b_x.to(dtype), input_precision=PREC)  # [BT, BV]
    if h is not None:
        store_rows(y, b_y, start + i * BT, rows, HV * V, i_hv * V + i_v * BV, BT, BV)
    if o is not None:
        b_q = fetch_rows(q_desc, start, length, i * BT, i_hv // R * K)  # [BT, K]
        b_a = fetch_tile(A_desc, i_p, BT)  # [BT, BT]
        b_o = (scale * b_e)[:, None] * tl.dot(b_q, b_sd, input_precision=PREC)
        b_o += tl.dot(b_a, (b_beta[:, None] * b_y).to(dtype), input_precision=PREC)
        store_rows(o, b_o, start + i * BT, rows, HV * V, i_hv * V + i_v * BV, BT, BV)
    b_w = (tl.exp2(b_last - b_G) * b_beta)[:, None] * b_y
    return b_s * tl.exp2(b_last) + tl.dot(tl.trans(b_k), b_w.to(dtype), input_precision=PREC)


@triton.jit
def _scan(
    b_s, q_desc, k_desc, v_desc, C_desc, A_desc, gates, o, h, y, start, length, v_length, first, i_hv, i_v,
    scale, HV, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scan one entry's chunks in order for one head and BV columns of the state; returns the state that leaves.

    start, first: its first token and chunk. Writes o, and h with y, where they are given. v_length: 0 takes v as zero.
    """
    for i in tl.range(0, (length + BT - 1) // BT, num_stages=STAGES):
        b_s = _step(
            b_s, i, q_desc, k_desc, v_desc, C_desc, A_desc, gates, o, h, y, start, length, v_length, first,
            i_hv, i_v, scale, HV, R, K, V, BT, BV, PREC,
        )  # fmt: skip
    return b_s


@triton.jit
def _reverse_step(
    b_ds, i, q_desc, k_desc, do_desc, C_desc, A_desc, gates, dv, dh, start, length, first, i_hv, i_v, scale,
    HV, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One chunk backward: from the gradient b_ds [K, BV] of the state that leaves to that of the state that enters."""
    dtype = C_desc.dtype
    i_p = (first + i) * HV + i_hv
    b_k = fetch_rows(k_desc, start, length, i * BT, i_hv // R * K)  # [BT, K]
    b_q = fetch_rows(q_desc, start, length, i * BT, i_hv // R * K)  # [BT, K]
    b_do = fetch_rows(do_desc, start, length, i * BT, i_hv * V + i_v * BV)  # [BT, BV]
    b_c = fetch_tile(C_desc, i_p, BT)  # [BT, BT]
    b_a = fetch_tile(A_desc, i_p, BT)  # [BT, BT]
    b_G, b_beta, b_last = _load_gates(gates, first + i, i_hv, HV, BT)
    b_dsd = b_ds.to(dtype)
    if dh is not None:
        tl.store(dh + i_p * K * V + i_v * BV + (tl.arange(0, K)[:, None] * V + tl.arange(0, BV)[None, :]), b_dsd)
    b_du = tl.exp2(b_last - b_G)[:, None] * tl.dot(b_k, b_dsd, input_precision=PREC)
    b_du += tl.dot(tl.trans(b_a), b_do, input_precision=PREC)  # [BT, BV]
    b_z = b_beta[:, None] * b_du
    b_dx = b_z - tl.dot(tl.trans(b_c), b_z.to(dtype), input_precision=PREC)
    if dh is not None:
        store_rows(dv, b_dx, start + i * BT, length - i * BT, HV * V, i_hv * V + i_v * BV, BT, BV)
    b_e = tl.exp2(b_G)
    b_ds *= tl.exp2(b_last)
    b_ds += tl.dot(tl.trans(b_q), ((scale * b_e)[:, None] * b_do).to(dtype), input_precision=PREC)
    return b_ds + tl.dot(tl.trans(b_k), (-b_e[:, None] * b_dx).to(dtype), input_precision=PREC)


@triton.jit
def _reverse_scan(
    b_ds, q_desc, k_desc, do_desc, C_desc, A_desc, gates, dv, dh, start, length, first, i_hv, i_v, scale,
    HV, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scan one entry's chunks from the last to the first; returns the gradient of the state that enters."""
    chunks = (length + BT - 1) // BT
    for j in tl.range(0, chunks, num_stages=STAGES):
        b_ds = _reverse_step(
            b_ds, chunks - 1 - j, q_desc, k_desc, do_desc, C_desc, A_desc, gates, dv, dh, start, length, first,
            i_hv, i_v, scale, HV, R, K, V, BT, BV, PREC,
        )  # fmt: skip
    return b_ds


@Kernel
def scan_kernel(
    q_desc, k_desc, v_desc, C_desc, A_desc, gates,
    initial_state, state_index,
    o,  # [T, HV, V]
    final_state,
    cu_seqlens, chunk_offsets, scale, HV,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One (entry, head, slice of V): o, and the last states where they are asked for."""
    blocks: tl.constexpr = V // BV
    i_v, i_nh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_hv = i_nh // HV, (i_nh % HV).to(tl.int32)
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, i_n)
    o_s = i_nh % HV * (K * V) + tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    b_s = tl.zeros([K, BV], tl.float32)
    if initial_state is not None:
        b_s += load_state(initial_state, state_index, i_n, HV * K * V, o_s)
    b_s = _scan(
        b_s, q_desc, k_desc, v_desc, C_desc, A_desc, gates, o, None, None, start, length, length, first,
        i_hv, i_v, scale, HV, R, K, V, BT, BV, STAGES, PREC,
    )  # fmt: skip
    if final_state is not None:
        store_state(final_state, None, i_n, HV * K * V, o_s, b_s)


@Kernel
def boundary_kernel(
    k_desc, v_desc, C_desc, gates,
    entries,  # [F]
    wanted,  # [F] what is written for an entry, 0: nothing, 1: S_ext, 2: M too; None: 2 for all
    S_ext,  # [F, HV, K, V] fp32
    M,  # [F, HV, K, K] fp32
    cu_seqlens, chunk_offsets, HV,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One (listed entry, head, slice of V for S_ext or of K for M). S_ext: the scan from a zero state. M: the scan with
    v = 0 from the identity."""
    blocks: tl.constexpr = (V + K) // BV
    i_v, i_fh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_f, i_hv = i_fh // HV, (i_fh % HV).to(tl.int32)
    is_m = i_v >= V // BV
    if wanted is not None and tl.load(wanted + i_f) < tl.where(is_m, 2, 1):
        return
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, tl.load(entries + i_f).to(tl.int64))
    o_k, o_v = tl.arange(0, K)[:, None], tl.arange(0, BV)[None, :]
    i_m = i_v - V // BV
    b_s = tl.where(is_m & (o_k == i_m * BV + o_v), 1.0, 0.0)
    b_s = _scan(
        b_s, k_desc, k_desc, v_desc, C_desc, C_desc, gates, None, None, None, start, length,
        tl.where(is_m, 0, length), first, i_hv, tl.where(is_m, 0, i_v), 1.0, HV, R, K, V, BT, BV, STAGES, PREC,
    )  # fmt: skip
    if is_m:
        tl.store(M + i_fh * K * K + o_k * K + i_m * BV + o_v, b_s)
    else:
        tl.store(S_ext + i_fh * K * V + o_k * V + i_v * BV + o_v, b_s)


@Kernel
def boundary_bwd_kernel(
    q_desc, k_desc, do_desc, C_desc, A_desc, gates,
    entries,  # [F]
    wanted,  # [F] 0: nothing is written for an entry; None: all are
    dS_ext,  # [F, HV, K, V] fp32
    cu_seqlens, chunk_offsets, scale, HV,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One (listed entry, head, slice of V): the reverse scan from a zero gradient."""
    blocks: tl.constexpr = V // BV
    i_v, i_fh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_f, i_hv = i_fh // HV, (i_fh % HV).to(tl.int32)
    if wanted is not None and tl.load(wanted + i_f) == 0:
        return
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, tl.load(entries + i_f).to(tl.int64))
    b_ds = _reverse_scan(
        tl.zeros([K, BV], tl.float32), q_desc, k_desc, do_desc, C_desc, A_desc, gates, None, None, start,
        length, first, i_hv, i_v, scale, HV, R, K, V, BT, BV, STAGES, PREC,
    )  # fmt: skip
    o_s = tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    tl.store(dS_ext + i_fh * K * V + o_s, b_ds)


@Kernel
def states_kernel(
    k_desc, v_desc, C_desc, gates,
    initial_state, state_index,
    h,  # [NT, HV, K, V] the state that enters each chunk
    y,  # [T, HV, V]
    cu_seqlens, chunk_offsets, HV,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The scan again, for h and y, which backward needs."""
    blocks: tl.constexpr = V // BV
    i_v, i_nh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_hv = i_nh // HV, (i_nh % HV).to(tl.int32)
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, i_n)
    b_s = tl.zeros([K, BV], tl.float32)
    if initial_state is not None:
        o_s = i_nh % HV * (K * V) + tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
        b_s += load_state(initial_state, state_index, i_n, HV * K * V, o_s)
    _scan(
        b_s, k_desc, k_desc, v_desc, C_desc, C_desc, gates, None, h, y, start, length, length, first,
        i_hv, i_v, 1.0, HV, R, K, V, BT, BV, STAGES, PREC,
    )  # fmt: skip


@Kernel
def reverse_kernel(
    q_desc, k_desc, do_desc, C_desc, A_desc, gates,
    d_final_state, final_index,
    dh,  # [NT, HV, K, V] the gradient of the state that leaves each chunk
    dv,  # [T, HV, V]
    d_initial_state, state_index,
    cu_seqlens, chunk_offsets, scale, HV,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One (entry, head, slice of V): dv, and the gradients of all states."""
    blocks: tl.constexpr = V // BV
    i_v, i_nh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_n, i_hv = i_nh // HV, (i_nh % HV).to(tl.int32)
    start, length, first = locate_entry(cu_seqlens, chunk_offsets, i_n)
    o_s = i_nh % HV * (K * V) + tl.arange(0, K)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    b_ds = tl.zeros([K, BV], tl.float32)
    if d_final_state is not None:
        b_ds += load_state(d_final_state, final_index, i_n, HV * K * V, o_s)
    b_ds = _reverse_scan(
        b_ds, q_desc, k_desc, do_desc, C_desc, A_desc, gates, dv, dh, start, length, first, i_hv, i_v, scale,
        HV, R, K, V, BT, BV, STAGES, PREC,
    )  # fmt: skip
    if d_initial_state is not None:
        store_state(d_initial_state, state_index, i_n, HV * K * V, o_s, b_ds)


@triton.jit
def _pair_gradients(b_w, b_beta, BT: tl.constexpr):
    """What the products of pairs of tokens add to the gradients of G and beta, from w [BT, BT]: the gradient of o_i or
    X_i times U_j / beta_j.

    A token's product with itself does not decay and is left out of G's gradient: its rounding would exceed the gradient
    of a fast gate.
    """
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_own = tl.sum(tl.where(o_i == o_j, b_w, 0.0), 1)
    b_w = tl.where(o_i == o_j, 0.0, b_w)
    b_db = tl.sum(b_w, 0)
    return tl.sum(b_w * b_beta[None, :], 1) - b_beta * b_db, b_db + b_own


@Kernel
def gradients_kernel(
    q, k,  # [T, H, K]
    k_desc,  # [T, H·K]
    do_desc, y_desc, dv_desc,  # [T, HV·V]
    h_desc, dh_desc,  # [NT·HV·K, V]
    gates,
    g,  # [T, HV], read only with A_log
    A_log, dt_bias,
    initial_state, state_index, d_final_state, final_index,
    dq,  # [T, HV, K]
    dk,  # [T, HV, K]
    dg,  # [T, HV]
    dbeta,  # [T, HV]
    d_gate,  # [2, NT, HV] fp32 partials of d A_log and d dt_bias, only with A_log
    cu_seqlens, chunk_index, scale, stride_q, stride_k, stride_g, HV, NT,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    BETA_RANGE: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg, dbeta of one chunk and value head; queries come first, so that few tiles are live at a time."""
    i_p = tl.program_id(0).to(tl.int64)
    i_t, i_hv = i_p // HV, (i_p % HV).to(tl.int32)
    start, length = locate(chunk_index, cu_seqlens, i_t, BT)
    if length <= 0:
        if A_log is not None:
            tl.store(d_gate + i_p, 0.0)
            tl.store(d_gate + NT * HV + i_p, 0.0)
        return
    dtype = k_desc.dtype
    o_c = tl.arange(0, BT)
    i_s = (i_p * K).to(tl.int32)

    # by ordinary loads, before a loop: both at once, and into shared memory before the loop's sums take the registers
    b_q = load_rows(q, start, length, stride_q, i_hv // R * K, BT, K)
    b_k = load_rows(k, start, length, stride_k, i_hv // R * K, BT, K)
    b_dq = tl.zeros([BT, K], tl.float32)  # do Sᵀ
    b_p = tl.zeros([BT, BT], tl.float32)  # do Yᵀ
    b_n = tl.zeros([BT, BT], tl.float32)  # dX Yᵀ
    for i_v in tl.range(0, V // BV, num_stages=STAGES):
        b_do = fetch_rows(do_desc, start, length, 0, i_hv * V + i_v * BV)
        b_y = fetch_rows(y_desc, start, length, 0, i_hv * V + i_v * BV)
        b_dx = fetch_rows(dv_desc, start, length, 0, i_hv * V + i_v * BV)
        b_dq = tl.dot(b_do, tl.trans(h_desc.load([i_s, i_v * BV])), b_dq, input_precision=PREC)
        b_p = tl.dot(b_do, tl.trans(b_y), b_p, input_precision=PREC)
        b_n = tl.dot(b_dx, tl.trans(b_y), b_n, input_precision=PREC)
    b_G, b_beta, b_last = _load_gates(gates, i_t, i_hv, HV, BT)
    b_e = tl.exp2(b_G)
    b_d = tl.exp2(tl.where(o_c[:, None] >= o_c[None, :], b_G[:, None] - b_G[None, :], -float("inf")))
    b_p *= scale * b_d
    b_n = tl.where(o_c[:, None] > o_c[None, :], -b_n * b_d, 0.0)
    b_dgs = (scale * b_e) * tl.sum(b_dq * b_q.to(tl.float32), 1)
    b_dq = tl.dot((b_p * b_beta[None, :]).to(dtype), b_k, (scale * b_e)[:, None] * b_dq, input_precision=PREC)
    store_rows(dq, b_dq, start, length, HV * K, i_hv * K, BT, K)
    b_w = b_p * tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
    b_w += b_n * tl.dot(b_k, tl.trans(b_k), input_precision=PREC)
    b_dg, b_db = _pair_gradients(b_w, b_beta, BT)
    b_dg += b_dgs
    b_pq = (b_p * b_beta[None, :]).to(dtype)
    b_n *= b_beta[None, :]
    b_nk = (b_n + tl.trans(b_n)).to(dtype)

    # q, k and gates are loaded again rather than held in registers across a loop
    b_q = load_rows(q, start, length, stride_q, i_hv // R * K, BT, K)
    b_dk = tl.zeros([BT, K], tl.float32)  # dX Sᵀ
    for i_v in tl.range(0, V // BV, num_stages=STAGES + 1):  # its tiles are fewer
        b_dx = fetch_rows(dv_desc, start, length, 0, i_hv * V + i_v * BV)
        b_dk = tl.dot(b_dx, tl.trans(h_desc.load([i_s, i_v * BV])), b_dk, input_precision=PREC)
    b_k = fetch_rows(k_desc, start, length, 0, i_hv // R * K)
    b_G, b_beta, b_last = _load_gates(gates, i_t, i_hv, HV, BT)
    b_e = tl.exp2(b_G)
    b_dg -= b_e * tl.sum(b_dk * b_k.to(tl.float32), 1)
    b_dk = tl.dot(b_nk, b_k, -b_e[:, None] * b_dk, input_precision=PREC)
    b_dk = tl.dot(tl.trans(b_pq), b_q, b_dk, input_precision=PREC)

    b_ydh = tl.zeros([BT, K], tl.float32)  # Y dS'ᵀ
    b_sds = 0.0  # <S, dS'>
    for i_v in tl.range(0, V // BV, num_stages=STAGES):
        b_y = fetch_rows(y_desc, start, length, 0, i_hv * V + i_v * BV)
        b_h = h_desc.load([i_s, i_v * BV])  # [K, BV]
        b_dh = dh_desc.load([i_s, i_v * BV])
        b_ydh = tl.dot(b_y, tl.trans(b_dh), b_ydh, input_precision=PREC)
        b_sds += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32))
    b_k = fetch_rows(k_desc, start, length, 0, i_hv // R * K)
    b_G, b_beta, b_last = _load_gates(gates, i_t, i_hv, HV, BT)
    b_w = tl.exp2(b_last - b_G)
    b_dbs = b_w * tl.sum(b_ydh * b_k.to(tl.float32), 1)
    # what U_j adds to the state decays with the gates of the tokens after j: the last token has none
    b_later = tl.where(o_c < length - 1, b_beta * b_dbs, 0.0)
    b_dk += (b_w * b_beta)[:, None] * b_ydh
    store_rows(dk, b_dk, start, length, HV * K, i_hv * K, BT, K)

    # for a document within one chunk the given fp32 states are read: <S, dS'> may be most of its dg
    if initial_state is not None and d_final_state is not None:
        i_n = tl.load(chunk_index + 2 * i_t)
        if tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n) == length:
            o_s = i_p % HV * (K * V) + tl.arange(0, K)[:, None] * V + tl.arange(0, BV)[None, :]
            b_sds = 0.0
            for i_v in range(V // BV):
                b_h = load_state(initial_state, state_index, i_n.to(tl.int64), HV * K * V, o_s + i_v * BV)
                b_dh = load_state(d_final_state, final_index, i_n.to(tl.int64), HV * K * V, o_s + i_v * BV)
                b_sds += tl.sum(b_h * b_dh)
    m_t = o_c < length
    # the gate of token t decays the state that enters, updates before t, and what tokens from t on read
    b_dg = tl.cumsum(b_dg, 0, reverse=True) + tl.cumsum(b_later, 0) - b_later
    b_dg += tl.exp2(b_last) * b_sds
    p_g = start * HV + i_hv + o_c * HV
    if A_log is not None:
        b_x = tl.load(g + start * stride_g + i_hv + o_c * stride_g, mask=m_t, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_x += tl.load(dt_bias + i_hv).to(tl.float32)
        b_a = -tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        tl.store(d_gate + i_p, tl.sum(tl.where(m_t, b_dg * b_a * softplus(b_x), 0.0), 0))
        b_dg *= b_a * sigmoid(b_x)
        tl.store(d_gate + NT * HV + i_p, tl.sum(tl.where(m_t, b_dg, 0.0), 0))
    tl.store(dg + p_g, b_dg.to(dg.dtype.element_ty), mask=m_t)
    b_db = beta_gradient(b_db + b_dbs, b_beta, BETA_RANGE)
    tl.store(dbeta + p_g, b_db.to(dbeta.dtype.element_ty), mask=m_t)
