"""Kernels of chunked recurrences whose state only decays, by one factor per head and token
(SSD, Simple GLA).

With G the log decay summed inside a chunk (here in base 2), D_ij = 2^(G_i - G_j) for i >=
j, and v weighted by its time step Δ (1 without time steps):

    o = scale 2^G q S + scale (q kᵀ ⊙ D) (Δ v) + skip v        S' = 2^γ S + kᵀ (2^(γ-G) Δ v)
    γ = the last G

Backward, with dS' the gradient of the state that leaves the chunk and Z = 2^(γ-G) k dS':

    dv = Δ (scale (q kᵀ ⊙ D)ᵀ do + Z) + skip do                dS = 2^γ dS' + scale qᵀ (2^G do)
    dq = scale 2^G do Sᵀ + E k                                 dk = (2^(γ-G) Δ v) dS'ᵀ + Eᵀ q
    E = scale do (Δ v)ᵀ ⊙ D

q and k belong to a group of heads. dq, dk and E are therefore sums over the group's heads,
in the registers of programs that pass from head to head, and only E's sum is multiplied by
k and q. All sums are fp32, and operands of a dot are rounded to the inputs' dtype. Every
load of tokens stops at the document's end, so values that are not finite stay in their
document.

The copy engine reads tiles that are passed as descriptors, which are the tiles of a scan in
16 bits; their pointers would take dozens of registers. v and do are pointers where V is not
a multiple of its slices.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from titan_linear.ops.triton.chunks import chunk_at, entry_at, is_wanted
from titan_linear.ops.triton.tiles import (
    BT,
    Kernel,
    arange,
    fetch_rows,
    fetch_tile,
    indices,
    load_tokens,
    load_wide,
    log2_gate,
    masked,
    place_in_row,
    program,
    softplus,
    state_row,
    store_tokens,
    wide,
    zeros,
)
from titan_linear.ops.triton.tiles import dot_ieee as dot

# --- Tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def _tokens(x, start, length, row, column, BD):
    """Load a tile of an entry [length, .] starting at its token `row`, with zeros past its
    end. start: the entry's first token."""
    if isinstance(x, tl.tensor_descriptor):
        return fetch_rows(x, start, length, row, column)
    else:
        return load_tokens(x, start + row, length - row, column, BD)


@triton.jit
def _columns(x, start, length, row, i_h, i_v, V, BV):
    """Load slice i_v of head i_h's V columns like `_tokens`, with zeros beyond them."""
    if V % BV == 0:
        return _tokens(x, start, length, row, i_h * V + i_v * BV, BV)
    else:
        o_c, o_v = indices(BT, BV)
        o_v += i_v * BV
        p_x, stride = x
        p_x += (start + row) * stride + i_h * V + (o_c * stride + o_v)
        return masked(p_x, mask=(o_c < length - row) & (o_v < V))


@triton.jit
def _store_columns(x, b_x, start, n, HV, i_h, i_v, V, BV):
    """Store into x [T, HV, V] at the places that `_columns` reads."""
    if V % BV == 0:
        store_tokens((x, HV * V), b_x, start, n, i_h * V + i_v * BV, BV)
    else:
        o_c, o_v = indices(BT, BV)
        o_v += i_v * BV
        p_x = x + start * (HV * V) + i_h * V + (o_c * (HV * V) + o_v)
        tl.store(p_x, b_x, mask=(o_c < n) & (o_v < V))


@triton.jit
def _state(i_v, K, V, BV):
    """Return the offsets of slice i_v in a state [K, V], and which of its columns exist."""
    o_k, o_v = indices(K, BV)
    o_v += i_v * BV
    return o_k * V + o_v, (o_k >= 0) & (o_v < V)


@triton.jit
def _block(states, i_th, i_k, i_v, K, BK, V, BV):
    """Load rows i_k BK to (i_k + 1) BK of slice i_v of a chunk's state, from `states`
    [NT, HV, K, V]."""
    if isinstance(states, tl.tensor_descriptor):
        return states.load([(i_th * K).to(tl.int32) + i_k * BK, i_v * BV])
    else:
        o_s, m_s = _state(i_v, BK, V, BV)
        return masked(states + (i_th * K + i_k * BK) * V + o_s, mask=m_s)


@triton.jit
def _load_state(states, i_n, HV, i_hv, i_v, K, V, BV):
    """Load a slice of entry i_n's state [K, BV] in fp32, or zeros if there are no states."""
    if states[0] is None:
        return zeros(K, BV)
    else:
        o_s, m_s = _state(i_v, K, V, BV)
        row = state_row(states, i_n)
        p_s = states[0] + (row * HV + i_hv) * (K * V) + o_s
        return load_wide(p_s, m_s & (row >= 0))


@triton.jit
def _store_state(states, b_s, i_row, HV, i_hv, i_v, K, V, BV):
    o_s, m_s = _state(i_v, K, V, BV)
    p_s = states + (i_row * HV + i_hv) * (K * V) + o_s
    tl.store(p_s, b_s, mask=m_s & (i_row >= 0))


@triton.jit
def _load_gates(gates, i_p, PARTS):
    """Load the gates of one chunk and head: G and its second part (with PARTS = 2), Δ, and
    the decay after each token, each [BT], and the last G."""
    p_g = gates + i_p * (1 + PARTS) * BT + arange(BT)
    b_G, b_last = tl.load(p_g), tl.load(gates + i_p * (1 + PARTS) * BT + BT - 1)
    b_low, b_after = b_G, b_last - b_G
    if PARTS == 2:
        b_low, b_end = tl.load(p_g + 2 * BT), tl.load(gates + i_p * (1 + PARTS) * BT + 3 * BT - 1)
        b_after += b_end - b_low
        b_last += b_end
    return b_G, b_low, tl.load(p_g + BT), b_after, b_last


@triton.jit
def _decays(b_G, b_low, PARTS, BY_LATER):
    """Return D [BT, BT], with later tokens as rows or, without BY_LATER, as columns.
    Differences of the first parts are exact, so a slow decay after a fast token keeps its
    digits."""
    o_i, o_j = indices(BT, BT)
    if BY_LATER:
        b_d, b_l, m_d = b_G[:, None] - b_G[None, :], b_low[:, None] - b_low[None, :], o_i >= o_j
    else:
        b_d, b_l, m_d = b_G[None, :] - b_G[:, None], b_low[None, :] - b_low[:, None], o_j >= o_i
    if PARTS == 2:
        b_d += b_l
    return tl.exp2(tl.where(m_d, b_d, -float("inf")))


@triton.jit
def _skip(D, i_hv, i_v, V, BV, WIDE):
    """Load head i_hv's factor of v in o: one number, or with WIDE a row [1, BV]."""
    if WIDE:
        o_v = i_v * BV + arange(BV)
        return load_wide(D + i_hv * V + o_v, o_v < V)[None, :]
    else:
        return load_wide(D + i_hv)


# --- Decays -----------------------------------------------------------------------------------------------------------


@triton.jit
def _steps(b_g, dt_bias, o_h, m_h, low, high, SOFTPLUS):
    """Return the stages of time steps from raw ones [BT, BH]: raw with its bias, and the
    time steps before and after clamping."""
    if dt_bias is not None:
        b_g += load_wide(dt_bias + o_h, m_h)[None, :]
    b_dt = softplus(b_g) if SOFTPLUS else b_g
    b_clamped = tl.where(b_dt < low, low, b_dt)  # NaN stays NaN
    return b_g, b_dt, tl.where(b_clamped > high, high, b_clamped)


@Kernel
def prepare_kernel(
    g, A, dt_bias,
    # [NT, HV, 1 + PARTS, BT] fp32: G in base 2, Δ; past a document's end, the last G and 0
    gates,
    chunks, low, high, HV, BH: constexpr, PARTS: constexpr, SOFTPLUS: constexpr,
):  # fmt: skip
    """Compute the decays of one chunk and BH heads. With two parts, the first parts are
    sums of multiples of 2^-8, which are exact."""
    blocks = (HV + BH - 1) // BH
    i_t, i_b = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    start, length = chunk_at(chunks, i_t)
    o_c, o_b = indices(BT, BH)
    o_h = i_b * BH + arange(BH)
    o_b += i_b * BH
    m_h = o_h < HV
    m_t = (o_c < length) & (o_b < HV)
    p_g, stride = g
    b_g = load_wide(p_g + start * stride + (o_c * stride + o_b), m_t)
    # Time steps, and log decays in base 2.
    b_dt = tl.where(m_t, 1.0, 0.0)
    if A is not None:
        _, _, b_steps = _steps(b_g, dt_bias, o_h, m_h, low, high, SOFTPLUS)
        b_dt = tl.where(m_t, b_steps, 0.0)
        b_g = b_dt * load_wide(A + o_h, m_h)[None, :]
    b_g = log2_gate(b_g)
    # Write the cumulative decays and the time steps.
    p_g = gates + i_t * HV * (1 + PARTS) * BT + (o_b * (1 + PARTS) * BT + o_c)
    m_g = (o_b < HV) & (o_c >= 0)
    if PARTS == 2:
        b_high = tl.floor(b_g * 256.0) * (1 / 256)
        tl.store(p_g + 2 * BT, tl.cumsum(b_g - b_high, 0), mask=m_g)
        b_g = b_high
    tl.store(p_g, tl.cumsum(b_g, 0), mask=m_g)
    tl.store(p_g + BT, b_dt, mask=m_g)


# --- Products of queries and keys -------------------------------------------------------------------------------------


@triton.jit
def _chunk_and_group(chunks, H, splits):
    """Return the program's part of a group's heads, its chunk and group, the chunk's first
    token and its number of tokens."""
    i_p = program()
    i_split, i_t, i_h = i_p % splits, i_p // splits // H, (i_p // splits % H).to(tl.int32)
    start, length = chunk_at(chunks, i_t)
    return i_split, i_t, i_h, start, length


@Kernel
def scores_kernel(q, k, scores, chunks, H, K: constexpr):
    """Compute q kᵀ of one chunk and group, [NT, H, BT, BT]."""
    _, i_t, i_h, start, length = _chunk_and_group(chunks, H, 1)
    b_q = load_tokens(q, start, length, i_h * K, K)
    b_k = load_tokens(k, start, length, i_h * K, K)
    b_qk = dot(b_q, b_k.T)
    store_tokens((scores, BT), b_qk, (i_t * H + i_h) * BT, BT, 0, BT)


# --- Passes from chunk to chunk ---------------------------------------------------------------------------------------


@triton.jit
def _piece(length, i_p, pieces):
    """Return the first chunk of piece i_p of an entry that is cut into `pieces`."""
    return i_p * tl.cdiv(length, BT) // pieces


@Kernel
def scan_kernel(
    q, k, v,  # descriptors, else (x, stride)
    scores,  # [NT, H, BT, BT], or its descriptor
    o,  # [T, HV, V]
    gates, D, initial,
    S_ext,  # [N, parts before the last piece, HV, K, V] fp32, or None for one piece
    M,  # [N, parts before the last piece, HV] fp32
    final_state,  # [N, HV, K, V] fp32 or None
    chunks, listed, scale, HV, R: constexpr, pieces,
    parts,  # parts per entry, a multiple of `pieces`
    K: constexpr, V: constexpr, BV: constexpr, PARTS: constexpr, STAGES: constexpr,
    WIDE: constexpr,
):  # fmt: skip
    """Scan one (entry, head, piece, slice of V): o, and the last states if they are wanted.
    The state stays in registers. The state before a piece follows from the earlier parts'
    states."""
    blocks: constexpr = (V + BV - 1) // BV
    i_v, i_nhp = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_p, i_nh = (i_nhp % pieces).to(tl.int32), i_nhp // pieces
    i_n, i_hv = i_nh // HV, (i_nh % HV).to(tl.int32)
    start, length, first = entry_at(chunks, listed, i_n)
    b_s = _load_state(initial, i_n, HV, i_hv, i_v, K, V, BV)
    # Fold the states of all parts before this piece.
    if S_ext is not None:
        in_piece = parts // pieces
        for i in range(0, i_p * in_piece):
            i_s = i_n * (parts - in_piece) + i
            b_s = b_s * tl.load(M + i_s * HV + i_hv) + _load_state(
                (S_ext, None), i_s, HV, i_hv, i_v, K, V, BV
            )
    for i in tl.range(
        _piece(length, i_p, pieces), _piece(length, i_p + 1, pieces), num_stages=STAGES
    ):
        i_t = first + i
        b_q = _tokens(q, start, length, i * BT, i_hv // R * K, K)
        b_k = _tokens(k, start, length, i * BT, i_hv // R * K, K)
        b_v = _columns(v, start, length, i * BT, i_hv, i_v, V, BV)
        b_G, b_low, b_dt, b_after, b_last = _load_gates(gates, i_t * HV + i_hv, PARTS)
        i_m = i_t * (HV // R) + i_hv // R
        # q kᵀ of the chunk, decayed and weighted by time steps.
        b_m = (
            fetch_tile(scores, i_m)
            if isinstance(scores, tl.tensor_descriptor)
            else load_tokens((scores, BT), i_m * BT, BT, 0, BT)
        )
        b_m = b_m * _decays(b_G, b_low, PARTS, True) * (scale * b_dt)[None, :]
        # The output: from the chunk's tokens, from the state, and the skip.
        b_o = dot(b_m.to(b_q.dtype), b_v)
        b_y = dot(b_q, b_s.to(b_q.dtype))
        b_o += b_y * (scale * tl.exp2(b_last - b_after))[:, None]
        if D is not None:
            b_o += _skip(D, i_hv, i_v, V, BV, WIDE) * b_v
        _store_columns(o, b_o, start + i * BT, length - i * BT, HV, i_hv, i_v, V, BV)
        # The state comes last, so that the next chunk's products that do not need it can
        # run meanwhile.
        b_w = (tl.exp2(b_after) * b_dt)[:, None] * b_v
        b_s = dot(b_k.T, b_w.to(b_q.dtype), b_s * tl.exp2(b_last))
    if final_state is not None:
        row = tl.where(i_p == pieces - 1, i_n, -1)
        _store_state(final_state, b_s, row, HV, i_hv, i_v, K, V, BV)


@triton.jit
def _pass(
    b_s, x, y, gates, h, start, length, first, begin, end, i_hv, i_v, scale, HV, R, K, V, BV, PARTS, STAGES,
    REVERSE,
):  # fmt: skip
    """Carry a state through an entry's chunks from `begin` to before `end`, with x = k and
    y = v; or, with REVERSE, its gradient through these chunks from the last, with x = q and
    y = do.

    Writes the carried value before each chunk to h [NT, HV, K, V] if h is given. Returns
    the last value and the sum of G over the chunks.
    """
    b_sum = 0.0
    for n in tl.range(begin, end, num_stages=STAGES):
        i = begin + end - 1 - n if REVERSE else n
        b_x = _tokens(x, start, length, i * BT, i_hv // R * K, K)
        b_y = _columns(y, start, length, i * BT, i_hv, i_v, V, BV)
        _, _, b_dt, b_after, b_last = _load_gates(gates, (first + i) * HV + i_hv, PARTS)
        if h is not None:
            _store_state(h, b_s, first + i, HV, i_hv, i_v, K, V, BV)
        b_w = scale * tl.exp2(b_last - b_after) if REVERSE else tl.exp2(b_after) * b_dt
        b_y = (b_w[:, None] * b_y).to(b_x.dtype)
        b_s = dot(b_x.T, b_y, b_s * tl.exp2(b_last))
        b_sum += b_last
    return b_s, b_sum


@Kernel
def boundary_kernel(
    x, y, gates, S_ext,
    M,  # [F, HV, 1] fp32 or None
    chunks,
    listed,  # see `ALL`; or all entries, with the first `rows` of an entry's `parts`
    scale, HV, rows, parts, R: constexpr, K: constexpr, V: constexpr, BV: constexpr, PARTS: constexpr,
    STAGES: constexpr, REVERSE: constexpr,
):  # fmt: skip
    """Run `_pass` from a zero state for one (listed entry or part, head, slice of V), and
    compute the factor of an initial state."""
    i_v, i_fh, i_f, i_hv = place_in_row((V + BV - 1) // BV, HV)
    if not is_wanted(listed, i_f, 1):
        return
    i_p = (i_f % rows).to(tl.int32)
    start, length, first = entry_at(chunks, listed, i_f // rows)
    b_s, b_sum = _pass(
        zeros(K, BV), x, y, gates, None, start, length, first, _piece(length, i_p, parts),
        _piece(length, i_p + 1, parts), i_hv, i_v, scale, HV, R, K, V, BV, PARTS, STAGES, REVERSE,
    )  # fmt: skip
    _store_state(S_ext, b_s, i_f, HV, i_hv, i_v, K, V, BV)
    if M is not None:
        tl.store(M + i_fh, tl.exp2(b_sum), mask=is_wanted(listed, i_f, 2) & (i_v == 0))


@Kernel
def states_kernel(
    q, k, v, do, gates, initial, d_final,
    h,  # [NT, HV, K, V] the state that enters each chunk
    dh,  # [NT, HV, K, V] the gradient of the state that leaves it
    d_initial, chunks, listed, scale, HV, R: constexpr, K: constexpr, V: constexpr, BV: constexpr, PARTS: constexpr,
    STAGES: constexpr,
):  # fmt: skip
    """Scan one (entry, head, slice of V) in one direction: all states, or all their
    gradients."""
    blocks: constexpr = (V + BV - 1) // BV
    i_p = tl.program_id(0) // 2
    i_v, i_nh = i_p % blocks, (i_p // blocks).to(tl.int64)
    i_n, i_hv = i_nh // HV, (i_nh % HV).to(tl.int32)
    start, length, first = entry_at(chunks, listed, i_n)
    # Even programs scan states forward, odd ones gradients in reverse.
    if tl.program_id(0) % 2 == 0:
        b_s = _load_state(initial, i_n, HV, i_hv, i_v, K, V, BV)
        _pass(
            b_s, k, v, gates, h, start, length, first, 0, tl.cdiv(length, BT), i_hv, i_v, scale, HV, R, K, V, BV, PARTS,
            STAGES, False,
        )  # fmt: skip
    else:
        b_ds = _load_state(d_final, i_n, HV, i_hv, i_v, K, V, BV)
        b_ds, _ = _pass(
            b_ds, q, do, gates, dh, start, length, first, 0, tl.cdiv(length, BT), i_hv, i_v, scale, HV, R, K, V, BV,
            PARTS, STAGES, True,
        )  # fmt: skip
        if d_initial is not None:
            _store_state(d_initial, b_ds, state_row(initial, i_n), HV, i_hv, i_v, K, V, BV)


# --- Gradients, chunk by chunk ----------------------------------------------------------------------------------------


@Kernel
def pairs_kernel(
    q, k,  # (x, stride)
    v, do, dh,  # descriptors, else (x, stride), and states
    gates, D,
    dv, dE, own, sums, dD,  # fields of `ChunkGradients`
    chunks, scale, HV, heads, R: constexpr, K: constexpr, V: constexpr, BV: constexpr, PARTS: constexpr,
    STAGES: constexpr, WIDE: constexpr,
):  # fmt: skip
    """Compute dv of a chunk, the heads' contributions to E, and sums over pairs of the
    chunk's tokens. A program takes `heads` heads of a group, one after another, slice by
    slice of V. A token's pair with itself does not decay, so it is kept apart."""
    slices: constexpr = (V + BV - 1) // BV
    H, o_c = HV // R, arange(BT)
    o_j, o_i = indices(BT, BT)
    i_split, i_t, i_h, start, length = _chunk_and_group(chunks, H, R // heads)
    if length <= 0:
        return
    b_q = load_tokens(q, start, length, i_h * K, K)
    b_k = load_tokens(k, start, length, i_h * K, K)
    # k qᵀ without its diagonal, shared by the group's heads.
    b_kq = scale * dot(b_k, b_q.T)
    b_own = tl.sum(tl.where(o_i == o_j, b_kq, 0.0), 1)
    tl.store(own + (i_t * H + i_h) * BT + o_c, b_own)
    b_kq = tl.where(o_i == o_j, 0.0, b_kq)
    b_e = zeros(BT, BT)
    for n in tl.range(0, heads * slices, num_stages=STAGES):
        i_hv, i_v = i_h * R + i_split.to(tl.int32) * heads + n // slices, n % slices
        i_th = i_t * HV + i_hv
        b_v = _columns(v, start, length, 0, i_hv, i_v, V, BV)
        b_do = _columns(do, start, length, 0, i_hv, i_v, V, BV)
        b_ds = _block(dh, i_th, 0, i_v, K, K, V, BV)
        b_G, b_low, b_dt, b_after, _ = _load_gates(gates, i_th, PARTS)
        p_s = sums + (i_th * slices + i_v) * 3 * BT + o_c
        tl.store(p_s + 2 * BT, tl.sum(wide(b_v) * b_do, 1))
        # E of this head, and its sums over earlier and later tokens.
        b_a = dot(b_v, b_do.T)  # [j, i]
        b_p = _decays(b_G, b_low, PARTS, False)
        b_e += b_a * b_p * b_dt[:, None]
        b_m = b_kq * b_p
        b_a *= b_m
        tl.store(p_s, tl.sum(b_a * b_dt[:, None], 0))
        tl.store(p_s + BT, tl.sum(b_a, 1))
        # dv from the state's gradient, from later tokens, and from the token itself.
        b_z = dot(b_k, b_ds) * tl.exp2(b_after)[:, None]  # [BT, BV]
        b_dv = dot(b_m.to(b_k.dtype), b_do, b_z) * b_dt[:, None]
        b_skip = (b_own * b_dt)[:, None]
        if D is not None:
            b_skip += _skip(D, i_hv, i_v, V, BV, WIDE)
            if WIDE:
                o_v = i_v * BV + arange(BV)
                tl.store(dD + i_th * V + o_v, tl.sum(wide(b_v) * b_do, 0), mask=o_v < V)
        b_dv += b_skip * b_do
        _store_columns(dv, b_dv, start, length, HV, i_hv, i_v, V, BV)
    store_tokens((dE, BT), scale * b_e, program() * BT, BT, 0, BT)


@Kernel
def carried_kernel(
    q, k,  # (x, stride)
    v, do, h, dh,  # as in `pairs_kernel`
    gates, dE,
    dq, dk, passed, products,  # fields of `ChunkGradients`
    chunks, scale, T, HV, heads, R: constexpr, K: constexpr, BK: constexpr, V: constexpr, BV: constexpr,
    PARTS: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Compute BK columns of dq and dk of a chunk, from E and from the states, head by head
    like `pairs_kernel`. Also write these columns' sums of reads from and writes to the
    state per token, and <S, dS'>."""
    slices: constexpr = (V + BV - 1) // BV
    blocks: constexpr = K // BK
    H, o_c, o_v = HV // R, arange(BT), arange(BV)
    i_split, i_t, i_h, start, length = _chunk_and_group(chunks, H, R // heads * blocks)
    if length <= 0:
        return
    i_k, i_split = (i_split % blocks).to(tl.int32), i_split // blocks
    column = i_h * K + i_k * BK
    b_q = load_tokens(q, start, length, column, BK)
    b_k = load_tokens(k, start, length, column, BK)
    b_e = load_tokens((dE, BT), program() // blocks * BT, BT, 0, BT)  # Eᵀ
    # The share of pairs of tokens, once for all heads.
    b_dq = dot(b_e.T, b_k)
    b_dk = dot(b_e, b_q)
    for n in tl.range(0, heads * slices, num_stages=STAGES):
        i_hv, i_v = i_h * R + i_split.to(tl.int32) * heads + n // slices, n % slices
        i_th = i_t * HV + i_hv
        b_do = _columns(do, start, length, 0, i_hv, i_v, V, BV)
        b_s = _block(h, i_th, i_k, i_v, K, BK, V, BV)
        b_ds = _block(dh, i_th, i_k, i_v, K, BK, V, BV)
        b_v = _columns(v, start, length, 0, i_hv, i_v, V, BV)
        _, _, b_dt, b_after, b_last = _load_gates(gates, i_th, PARTS)
        i_s = (i_th * slices + i_v) * blocks + i_k
        # Reads from the state: dq, and their sums.
        b_x = dot(b_do, b_s.T) * (scale * tl.exp2(b_last - b_after))[:, None]
        b_dq += b_x
        tl.store(passed + i_s * 2 * BT + o_c, tl.sum(b_x * b_q, 1))
        # <S, dS'> by columns: the diagonal of Sᵀ dS'.
        b_p = dot(b_s.T, b_ds)
        tl.store(products + i_s * BV + o_v, tl.sum(tl.where(o_v[:, None] == o_v, b_p, 0.0), 1))
        # Writes to the state: dk, and their sums.
        b_x = dot(b_v, b_ds.T) * tl.exp2(b_after)[:, None]
        b_dk += b_x * b_dt[:, None]
        tl.store(passed + i_s * 2 * BT + BT + o_c, tl.sum(b_x * b_k, 1))
    store_tokens((dq, H * K), b_dq, i_split * T + start, length, column, BK)
    store_tokens((dk, H * K), b_dk, i_split * T + start, length, column, BK)


@triton.jit
def _given_product(initial, d_final, i_n, i_hv, used, HV, KV, B):
    """Compute <S, dS'> from the initial and final fp32 states, or 0 unless `used`."""
    row, final_row = state_row(initial, i_n), state_row(d_final, i_n)
    p_s, p_ds = initial[0] + (row * HV + i_hv) * KV, d_final[0] + (final_row * HV + i_hv) * KV
    b_sum = zeros(B)
    for i in range(0, KV, B):
        o_s = i + arange(B)
        m_s = (o_s < KV) & used & (row >= 0) & (final_row >= 0)
        b_sum += load_wide(p_s + o_s, m_s) * load_wide(p_ds + o_s, m_s)
    return tl.sum(b_sum)


@Kernel
def gates_kernel(
    g, A, dt_bias, gates, passed, products, sums, own, initial, d_final,
    dg,  # [T, HV]
    d_heads,  # [3, NT, HV] fp32, partials of dA, d dt_bias and dD
    chunks, low, high, HV, NT, R: constexpr, K: constexpr, V: constexpr, BV: constexpr, BH: constexpr, PARTS: constexpr,
    PASSED: constexpr, SLICES: constexpr, SOFTPLUS: constexpr,
):  # fmt: skip
    """Compute dg of one chunk and BH heads.

    The terms are the sums of a token's reads from and writes to the state (`passed`), and
    `sums` [3, BT]: reads from earlier tokens, writes to later ones, and <v, do>. Sums of
    writes are without Δ.
    """
    blocks = (HV + BH - 1) // BH
    i_t, i_b = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    start, length = chunk_at(chunks, i_t)
    o_c, o_b = indices(BT, BH)
    o_h = i_b * BH + arange(BH)
    o_b += i_b * BH
    m_h = o_h < HV
    m_t = (o_c < length) & (o_b < HV)
    # Add up the slices of each sum.
    b_dt = load_wide(gates + i_t * HV * (1 + PARTS) * BT + BT + (o_b * (1 + PARTS) * BT + o_c), m_t)
    b_dg = zeros(BT, BH)
    b_earlier, b_skip, b_state = b_dg, b_dg, b_dg
    b_product = zeros(BH)
    for i_v in tl.static_range(SLICES):
        p_s = sums + i_t * HV * SLICES * 3 * BT + ((o_b * SLICES + i_v) * 3 * BT + o_c)
        b_dg += load_wide(p_s, m_t)
        b_earlier += load_wide(p_s + BT, m_t)
        b_skip += load_wide(p_s + 2 * BT, m_t)
    for i_s in tl.static_range(PASSED):
        o_s = i_t * HV * PASSED + o_b * PASSED + i_s
        b_dg += load_wide(passed + o_s * 2 * BT + o_c, m_t)
        b_state += load_wide(passed + o_s * 2 * BT + BT + o_c, m_t)
        p_p = products + o_s * BV + arange(BV)[:, None]
        b_product += tl.sum(load_wide(p_p, (o_b < HV) & (length > 0)), 0)
    b_dg -= b_dt * b_earlier
    # For an entry within one chunk, read the fp32 states: <S, dS'> may be most of its dg.
    if initial[0] is not None and d_final[0] is not None:
        cu_seqlens, chunk_index, _ = chunks
        i_n = tl.maximum(tl.load(chunk_index + 2 * i_t), 0).to(tl.int64)
        tokens = tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n)
        alone = (length > 0) & (tokens == length)
        if alone:
            for n in range(BH):
                i_hv = i_b * BH + n
                b_given = _given_product(initial, d_final, i_n, i_hv, i_hv < HV, HV, K * V, 1024)
                b_product = tl.where(o_h == i_hv, b_given, b_product)
    # The decay of token t acts on the state that enters, updates before t, and all reads
    # from token t on.
    p_last = gates + (i_t * HV + o_h) * (1 + PARTS) * BT + BT - 1
    b_last = load_wide(p_last, m_h)
    if PARTS == 2:
        b_last += load_wide(p_last + 2 * BT, m_h)
    b_product *= tl.exp2(b_last)
    b_later = b_dt * b_state
    b_dg = tl.cumsum(b_dg, 0, reverse=True) + tl.cumsum(b_later, 0) - b_later + b_product[None, :]
    b_dg = tl.where(m_t, b_dg, 0.0)
    # Through clamp, softplus and bias to the raw time steps, and partial sums for A and
    # dt_bias.
    if A is not None:
        p_g, stride = g
        p_g += start * stride + (o_c * stride + o_b)
        b_g = load_wide(p_g, m_t)
        b_raw, b_steps, _ = _steps(b_g, dt_bias, o_h, m_h, low, high, SOFTPLUS)
        tl.store(d_heads + i_t * HV + o_h, tl.sum(b_dt * b_dg, 0), mask=m_h)
        b_dg *= load_wide(A + o_h, m_h)[None, :]
        p_own = own + (i_t * (HV // R) + o_b // R) * BT + o_c
        b_dg += b_earlier + b_skip * load_wide(p_own, m_t) + b_state
        b_dg = tl.where(m_t & (b_steps >= low) & (b_steps <= high), b_dg, 0.0)
        if SOFTPLUS:
            b_dg *= tl.sigmoid(b_raw)
        tl.store(d_heads + (NT + i_t) * HV + o_h, tl.sum(b_dg, 0), mask=m_h)
    tl.store(d_heads + (2 * NT + i_t) * HV + o_h, tl.sum(b_skip, 0), mask=m_h)
    p_g = start * HV + (o_c * HV + o_b)
    tl.store(dg + p_g, b_dg, mask=m_t)
