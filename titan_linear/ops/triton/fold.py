"""Folding recurrences that act on a state as S ← M S + S_ext: the segments of one device, and the chains of KCP.

States [.., HV, K, V] and transitions [.., HV, K, K] are fp32; products run in three tf32 passes, so that errors stay
those of fp32 however long a chain is. Nothing here knows KDA or GDN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_linear.ops.operators import operator, register_fake
from titan_linear.ops.triton.launch import Launcher


@triton.jit
def _transition(
    p_m, p_s, r, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr
):
    """Rows r … r+BK of M S, or with REVERSE of Mᵀ S, for BV columns of S at p_s."""
    o_r, o_c = tl.arange(0, BK)[:, None], tl.arange(0, BK)[None, :]
    o_s = o_r * V + tl.arange(0, BV)[None, :]
    b_s = tl.zeros([BK, BV], tl.float32)
    for c in range(0, K, BK):
        o_m = (c + o_c) * K + r + o_r if REVERSE else (r + o_r) * K + c + o_c
        b_s += tl.dot(tl.load(p_m + o_m), tl.load(p_s + c * V + o_s), input_precision="tf32x3")
    return b_s


@Launcher
@triton.jit
def fold_kernel(
    S_ext,  # [links, HV, K, V]
    M,  # [transitions, HV, K, K]
    chain_offsets,  # [slots + 1]
    s_row, m_row,  # [links of all chains]
    out,  # [2, slots, HV, K, V]: the result, and room for the states before it; a half has `half` elements
    half, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One (slot, head, slice of V) through its chain, from one half of `out` to the other; the last state is in the
    first half."""
    i_v, i_sh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_s, i_h = i_sh // HV, i_sh % HV
    o_s = tl.arange(0, BK)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    begin, end = tl.load(chain_offsets + i_s), tl.load(chain_offsets + i_s + 1)
    p_out = out + i_sh * K * V
    if begin == end:
        for r in range(0, K, BK):
            tl.store(p_out + r * V + o_s, tl.zeros([BK, BV], tl.float32))
    for i in range(begin, end):
        p_x = S_ext + (tl.load(s_row + i).to(tl.int64) * HV + i_h) * K * V
        i_m = tl.load(m_row + i).to(tl.int64)
        p_to, p_from = p_out + (end - 1 - i) % 2 * half, p_out + (end - i) % 2 * half
        for r in range(0, K, BK):
            b_s = tl.load(p_x + r * V + o_s)
            if (i_m >= 0) & (i > begin):
                b_s += _transition(M + (i_m * HV + i_h) * K * K, p_from + i_v * BV, r, K, V, BK, BV, REVERSE)
            tl.store(p_to + r * V + o_s, b_s)
        tl.debug_barrier()  # the next link reads all rows


@operator
def fold(S_ext: Tensor, M: Tensor, chain_offsets: Tensor, s_row: Tensor, m_row: Tensor, reverse: bool) -> Tensor:
    """-> [slots, HV, K, V]: for each slot S = 0, and then for its links i, from chain_offsets[slot] to
    chain_offsets[slot + 1], S = M[m_row[i]] S + S_ext[s_row[i]]; where m_row is -1, S = S_ext[s_row[i]].

    S_ext [.., HV, K, V], M [.., HV, K, K] fp32; chain_offsets [slots + 1], s_row, m_row [links] int32. reverse: with
    the transposes of M.
    """
    (_, HV, K, V), slots = S_ext.shape, chain_offsets.shape[0] - 1
    out = S_ext.new_empty(2, slots, HV, K, V)
    BV = min(V, 32)
    fold_kernel[V // BV, slots * HV](
        S_ext, M, chain_offsets, s_row, m_row, out, out[0].numel(), HV, K=K, V=V, BK=min(K, 64), BV=BV, REVERSE=reverse,
        num_warps=4,
    )  # fmt: skip
    return out[0]


@register_fake(fold)
def _(S_ext, M, chain_offsets, s_row, m_row, reverse):
    return S_ext.new_empty(chain_offsets.shape[0] - 1, *S_ext.shape[1:])


@Launcher
@triton.jit
def fold_segments_kernel(
    S_ext,  # [S, HV, K, V]
    M,  # [S, HV, K, K]
    start,  # [N, HV, K, V] or None
    segment_offsets,  # [N + 1]
    out,  # [S, HV, K, V]
    HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One (document, head, slice of V) through its segments."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // HV, i_nh % HV
    begin, end = tl.load(segment_offsets + i_n).to(tl.int64), tl.load(segment_offsets + i_n + 1).to(tl.int64)
    o_s = tl.arange(0, BK)[:, None] * V + i_v * BV + tl.arange(0, BV)[None, :]
    for i in range(begin, end):
        i_s = begin + end - 1 - i if REVERSE else i
        i_before = i_s + 1 if REVERSE else i_s - 1
        p_to, p_from = out + (i_s * HV + i_h) * K * V, out + (i_before * HV + i_h) * K * V
        p_x, p_m = S_ext + (i_before * HV + i_h) * K * V, M + (i_before * HV + i_h) * K * K
        for r in range(0, K, BK):
            b_s = tl.zeros([BK, BV], tl.float32)
            if i > begin:
                b_s = tl.load(p_x + r * V + o_s) + _transition(p_m, p_from + i_v * BV, r, K, V, BK, BV, REVERSE)
            elif start is not None:
                b_s = tl.load(start + i_nh * K * V + r * V + o_s)
            tl.store(p_to + r * V + o_s, b_s)
        tl.debug_barrier()  # the next segment reads all rows


@operator
def fold_segments(
    S_ext: Tensor, M: Tensor, start: Tensor | None, index: Tensor | None, segment_offsets: Tensor, reverse: bool
) -> Tensor:
    """-> [S, HV, K, V], the state that enters each segment, from `start` for the first ones of N documents; or, in
    reverse, the gradient of the state that leaves each, from `start` for the last ones.

    S_ext (dS_ext) [S, HV, K, V], M [S, HV, K, K] fp32; segment_offsets [N + 1] int32, each document's first segment.
    start [≥ N, HV, K, V] (None: zeros): of each document its own, or that of index [N], zeros where that is negative.
    """
    (_, HV, K, V), out = S_ext.shape, torch.zeros_like(S_ext)  # zeros for the surplus segments
    if start is not None:
        start = start.contiguous()
        if index is not None:
            start = start[index.clamp(min=0)].where((index >= 0).view(-1, 1, 1, 1), 0.0)
    BV = min(V, 32)
    fold_segments_kernel[V // BV, (segment_offsets.shape[0] - 1) * HV](
        S_ext, M, start, segment_offsets, out, HV, K=K, V=V, BK=min(K, 64), BV=BV, REVERSE=reverse, num_warps=4
    )
    return out


@register_fake(fold_segments)
def _(S_ext, *_):
    return torch.empty_like(S_ext)
