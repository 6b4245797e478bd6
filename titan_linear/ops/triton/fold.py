"""Folds S ← M S + S_ext: over the segments of one device, and over the chains of KCP.

States [.., HV, K, V] and transitions [.., HV, K, K] are fp32. Products run in three tf32
passes, so errors stay at fp32 level however long a chain is. A diagonal M is given as its
diagonal [.., HV, K], or as one number [.., HV, 1]. This module is independent of the
recurrence's rule.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.tiles import (
    Kernel,
    indices,
    load_index,
    place_in_row,
    read_state,
    zeros,
)


@triton.jit
def _transition(p_m, p_s, r, K, V, BK, BV, NM, REVERSE):
    """Return rows r … r+BK of M S, or of Mᵀ S with REVERSE, for BV columns of S at p_s. M
    has NM numbers: K·K, K or 1."""
    o_r, o_c = indices(BK, BK)
    _, o_v = indices(BK, BV)
    o_s = o_r * V + o_v
    if NM <= K:
        return tl.load(p_m + (r + o_r) % NM) * tl.load(p_s + r * V + o_s)
    else:
        b_s = zeros(BK, BV)
        for c in range(0, K, BK):
            o_m = (c + o_c) * K + r + o_r if REVERSE else (r + o_r) * K + c + o_c
            b_s += tl.dot(tl.load(p_m + o_m), tl.load(p_s + c * V + o_s), input_precision="tf32x3")
        return b_s


def _constants(S_ext: Tensor, M: Tensor, reverse: bool) -> dict[str, int]:
    """Return launch constants: the sizes of a state and of its blocks, and warps. M takes
    one tile per link where it fits."""
    K, V = S_ext.shape[2:]
    BK = 64 if K > 128 else K
    of_matrix = {"NM": M.shape[2:].numel(), "REVERSE": reverse}
    return {"K": K, "V": V, **of_matrix, "BK": BK, "BV": min(V & -V, 16), "num_warps": BK // 16}


@Kernel
def fold_kernel(
    S_ext,  # [links, HV, K, V]
    M,  # [transitions, HV, K, K], or [.., HV, K or 1]
    chain_offsets,  # [slots + 1]
    s_row, m_row,  # [links of all chains]
    # [2, slots, HV, K, V]: the result, and scratch for the states before it; each half has
    # `half` elements
    out,
    half, HV, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr, NM: constexpr, REVERSE: constexpr,
):  # fmt: skip
    """Fold one (slot, head, slice of V) along its chain. The result alternates between the
    halves of `out`, and the last state lands in the first half."""
    i_v, i_sh, i_s, i_h = place_in_row(V // BV, HV)
    o_k, o_v = indices(BK, BV)
    o_s = o_k * V + i_v * BV + o_v
    begin, end = tl.load(chain_offsets + i_s), tl.load(chain_offsets + i_s + 1)
    p_out = out + i_sh * K * V
    # An empty chain gives a zero state.
    if begin == end:
        for r in range(0, K, BK):
            tl.store(p_out + r * V + o_s, zeros(BK, BV))
    # Each link writes the half that the next link reads.
    for i in range(begin, end):
        p_x = S_ext + (load_index(s_row + i) * HV + i_h) * K * V
        i_m = load_index(m_row + i)
        p_to, p_from = p_out + (end - 1 - i) % 2 * half, p_out + (end - i) % 2 * half
        for r in range(0, K, BK):
            b_s = tl.load(p_x + r * V + o_s)
            if (i_m >= 0) & (i > begin):
                b_s += _transition(
                    M + (i_m * HV + i_h) * NM, p_from + i_v * BV, r, K, V, BK, BV, NM, REVERSE
                )
            tl.store(p_to + r * V + o_s, b_s)
        tl.debug_barrier()  # the next link reads all rows


@operator(
    fake=lambda S_ext, M, offsets, *_: S_ext.new_empty(offsets.shape[0] - 1, *S_ext.shape[1:])
)
def fold(
    S_ext: Tensor, M: Tensor, chain_offsets: Tensor, s_row: Tensor, m_row: Tensor, reverse: bool
) -> Tensor:
    """Return the folded states [slots, HV, K, V]. Each slot starts with S = 0. For each of
    its links i, from chain_offsets[slot] up to chain_offsets[slot + 1], S = M[m_row[i]] S +
    S_ext[s_row[i]], or S = S_ext[s_row[i]] where m_row is -1.

    S_ext [.., HV, K, V], M [.., HV, K, K] fp32; chain_offsets [slots + 1], s_row, m_row
    [links] int32. reverse: use the transposes of M.
    """
    _, HV, K, V = S_ext.shape
    slots = chain_offsets.shape[0] - 1
    out = S_ext.new_empty(2, slots, HV, K, V)
    half = slots * HV * K * V
    constants = _constants(S_ext, M, reverse)
    fold_kernel[slots * HV * (V // constants["BV"]),](
        S_ext, M, chain_offsets, s_row, m_row, out, half, HV, **constants
    )
    return out[0]


@Kernel
def fold_segments_kernel(
    S_ext,  # [S, HV, K, V]
    M,  # [S, HV, K, K], or [S, HV, K or 1]
    start,  # states, and each entry's row among them
    segment_offsets,  # [N + 1]
    wanted,  # [S] or None
    out,  # [S, HV, K, V]
    N, S, HV, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr, NM: constexpr, REVERSE: constexpr,
):  # fmt: skip
    """Fold one (document, head, slice of V) along its segments. The program after the last
    document writes zeros for the surplus segments, because the scans read states for their
    empty chunks."""
    i_v, _, i_n, i_h = place_in_row(V // BV, HV)
    begin = load_index(segment_offsets + i_n)
    o_k, o_v = indices(BK, BV)
    o_s = o_k * V + i_v * BV + o_v
    if i_n == N:
        for i in range(begin, S):
            for r in range(0, K, BK):
                tl.store(out + (i * HV + i_h) * K * V + r * V + o_s, zeros(BK, BV))
        return
    # Each segment's state follows from the state of the segment before it.
    end = load_index(segment_offsets + i_n + 1)
    for i in range(begin, end):
        i_s = begin + end - 1 - i if REVERSE else i
        i_before = i_s + 1 if REVERSE else i_s - 1
        p_to, p_from = out + (i_s * HV + i_h) * K * V, out + (i_before * HV + i_h) * K * V
        p_x, p_m = S_ext + (i_before * HV + i_h) * K * V, M + (i_before * HV + i_h) * NM
        # `given` is what the segment before passes on: 0 nothing, 1 S_ext, 2 M too.
        given = 2
        if wanted is not None and i > begin:
            given = tl.load(wanted + i_before)
        for r in range(0, K, BK):
            b_s = zeros(BK, BV)
            if i > begin:
                if given > 0:
                    b_s += tl.load(p_x + r * V + o_s)
                if given > 1:
                    b_s += _transition(p_m, p_from + i_v * BV, r, K, V, BK, BV, NM, REVERSE)
            else:
                b_s = read_state(start, i_n, HV * K * V, i_h * K * V + r * V + o_s)
            tl.store(p_to + r * V + o_s, b_s)
        tl.debug_barrier()  # the next segment reads all rows


def _segments(outputs: costs.Outputs, S_ext: Tensor, **_: Any) -> costs.SegmentsCost:
    return costs.SegmentsCost(len(S_ext))


@operator(
    fake=lambda S_ext, *_: torch.empty_like(S_ext),
    kept_by=("selective",),
    cost=_segments,
    of_driver=True,
)
def fold_segments(
    S_ext: Tensor,
    M: Tensor,
    start: Tensor | None,
    index: Tensor | None,
    segment_offsets: Tensor,
    wanted: Tensor | None,
    reverse: bool,
) -> Tensor:
    """Return [S, HV, K, V], the state that enters each segment, with `start` for the first
    segment of each of N documents; or, in reverse, the gradient of the state that leaves
    each segment, with `start` for the last segment of each document.

    S_ext (dS_ext) [S, HV, K, V], M [S, HV, ...] fp32; segment_offsets [N + 1] int32, each
    document's first segment. start [.., HV, K, V] (None: zeros): row n for document n, or
    row index[n] with index [≥ N]; zeros if index[n] is negative. wanted [S] int32 (None:
    2): what a segment passes on, which is 0 nothing, 1 S_ext, 2 also M times the state that
    enters it. Anything that is not passed on is not read, so NaN in one document never
    reaches another document's state.
    """
    S, HV, _, V = S_ext.shape
    N = segment_offsets.shape[0] - 1
    out = torch.empty_like(S_ext)
    start = None if start is None else start.contiguous()
    states = start, index
    constants = _constants(S_ext, M, reverse)
    fold_segments_kernel[(N + 1) * HV * (V // constants["BV"]),](
        S_ext, M, states, segment_offsets, wanted, out, N, S, HV, **constants
    )
    return out


@triton.jit
def _through_entry(
    x, M, wanted, out, half, begin, end, i_nh, i_h, HV, column, K, V, BK, BV, NM, ADDS, REVERSE
):
    """Fold BV of the V columns of x through an entry's segments, starting from the first
    segment's x. With ADDS the other segments add their x. A segment for which `wanted`
    excludes M restarts from its own x."""
    o_k, o_v = indices(BK, BV)
    o_s = o_k * V + column + o_v
    p_out = out + i_nh * K * V
    for i in range(begin, end):
        i_s = begin + end - 1 - i if REVERSE else i
        i_sh, multiplies = i_s * HV + i_h, i > begin
        if wanted is not None:
            multiplies = multiplies & (tl.load(wanted + i_s) > 1)
        p_to, p_from = p_out + (end - 1 - i) % 2 * half, p_out + (end - i) % 2 * half
        for r in range(0, K, BK):
            b_s = zeros(BK, BV)
            if multiplies:
                b_s = _transition(M + i_sh * NM, p_from + column, r, K, V, BK, BV, NM, REVERSE)
            if ADDS or i == begin:
                b_s += tl.load(x + i_sh * K * V + r * V + o_s)
            tl.store(p_to + r * V + o_s, b_s)
        tl.debug_barrier()  # the next segment reads all rows


@Kernel
def fold_entries_kernel(
    S_ext,  # [S, HV, K, V]
    M,  # [S, HV, K, K], or [S, HV, K or 1]
    entries,  # [n]
    segment_offsets,  # [N + 1]
    wanted,  # [S] or None
    state, transition,  # [2, n, HV, K, V], [2, n, *M's]: results, and room for earlier steps
    n, HV, SLICES: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr, NM: constexpr,
    REVERSE: constexpr,
):  # fmt: skip
    """Fold one (entry, head, slice of columns of the state or of the transition) along its
    segments."""
    i_v, i_nh, i_n, i_h = place_in_row(SLICES, HV)
    entry = tl.load(entries + i_n)
    begin, end = load_index(segment_offsets + entry), load_index(segment_offsets + entry + 1)
    # The first slices fold the state, the others the transition.
    if i_v < V // BV:
        column, half = i_v * BV, tl.cast(n, tl.int64) * HV * K * V
        _through_entry(
            S_ext,
            M,
            wanted,
            state,
            half,
            begin,
            end,
            i_nh,
            i_h,
            HV,
            column,
            K,
            V,
            BK,
            BV,
            NM,
            True,
            REVERSE,
        )
    elif transition is not None:
        # Fold M like a state: a matrix has K columns, a diagonal one column, and a number
        # one row.
        rows: constexpr = K if NM > K else NM
        columns: constexpr = NM // rows
        BR: constexpr = BK if rows > BK else rows
        BC: constexpr = BV if columns > BV else columns
        column, half = i_v * BV - V, tl.cast(n, tl.int64) * HV * NM
        _through_entry(
            M,
            M,
            None,
            transition,
            half,
            begin,
            end,
            i_nh,
            i_h,
            HV,
            column,
            rows,
            columns,
            BR,
            BC,
            NM,
            False,
            False,
        )


def _launch_fold_entries(
    S_ext: Tensor,
    M: Tensor,
    segment_offsets: Tensor,
    entries: Tensor,
    wanted: Tensor | None,
    transition: Tensor | None,
    reverse: bool,
) -> Tensor:
    """Return the folded states [n, HV, K, V]. Fills `transition` [2, n, *M's] if it is not
    None."""
    _, HV, K, V = S_ext.shape
    n = len(entries)
    state = S_ext.new_empty(2, n, HV, K, V)
    constants = _constants(S_ext, M, reverse)
    of_transition = 0 if transition is None else max(constants["NM"] // K // constants["BV"], 1)
    slices = V // constants["BV"] + of_transition
    fold_entries_kernel[n * HV * slices,](
        S_ext, M, entries, segment_offsets, wanted, state, transition, n, HV, slices, **constants
    )
    return state[0]


def _of_entries(x: Tensor, entries: Tensor) -> Tensor:
    return x.new_empty(entries.shape[0], *x.shape[1:])


@operator(
    fake=lambda S_ext, M, offsets, entries, *_: (
        _of_entries(S_ext, entries),
        _of_entries(M, entries),
    ),
    kept_by=("selective",),
    of_driver=True,
)
def fold_entries(
    S_ext: Tensor,
    M: Tensor,
    segment_offsets: Tensor,
    entries: Tensor,
    wanted: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Fold the S_ext and M of all segments to S_ext [n, HV, K, V] and M [n, HV, ...] of
    `entries` [n] int32. S_ext is the fold from a zero state, or in reverse from the end
    with the transposes of M. M is the fold from the identity without S_ext, in reverse too.

    wanted [S] int32 (None: 2): where it is below 2, M is not read for S_ext, and the
    entry's M is meaningless.
    """
    transition = M.new_empty(2, len(entries), *M.shape[1:])
    return _launch_fold_entries(
        S_ext, M, segment_offsets, entries, wanted, transition, reverse
    ), transition[0]


@operator(fake=lambda dS_ext, M, offsets, entries: _of_entries(dS_ext, entries), of_driver=True)
def fold_entries_back(
    dS_ext: Tensor, M: Tensor, segment_offsets: Tensor, entries: Tensor
) -> Tensor:
    """Fold the dS_ext of all segments to dS_ext [n, HV, K, V] of `entries` [n] int32."""
    return _launch_fold_entries(dS_ext, M, segment_offsets, entries, None, None, True)
