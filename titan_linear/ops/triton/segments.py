"""Long documents in segments, where heads and documents are too few to fill a GPU: KCP inside one device.

A scan is sequential in a head; 16 heads keep a quarter of an H200's multiprocessors busy. Each segment's last state
from a zero state and its transition (S_ext, M) are found for all segments at once, a short fold gives the state that
enters each segment, and the scans then run over segments as if they were documents. Backward likewise, with the same M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from titan_linear.ops.options import DeltaRuleOptions, Entries
from titan_linear.ops.triton.chunks import chunk_table, max_chunks
from titan_linear.ops.triton.library import operator, register_fake

PROGRAMS = 132  # of a scan, that fill an H100 or H200: its multiprocessors
SHORTEST = 512  # tokens of a segment: below, the fold costs what the scan saves


def segment_length(tokens: int, entries: int, heads: int, V: int) -> int | None:
    """Tokens of a segment, a multiple of 64, or None where splitting does not pay: below three segments a document."""
    segments = PROGRAMS // max(entries * heads * max(V // 64, 1), 1)
    if segments < 3 or tokens < 3 * SHORTEST * entries:
        return None
    return max(triton.cdiv(triton.cdiv(tokens, entries * segments), 64) * 64, SHORTEST)


@triton.jit
def boundaries_kernel(table, cu_seqlens, boundaries, tokens, length, S, B: tl.constexpr):
    """Where each segment of the table begins; surplus ones, and the one after the last, at the end."""
    o_s = tl.program_id(0) * B + tl.arange(0, B)
    i_n = tl.load(table + 2 * o_s, mask=o_s < S, other=-1)
    used = i_n >= 0
    begin = tl.load(cu_seqlens + i_n, mask=used, other=0) + tl.load(table + 2 * o_s + 1, mask=used, other=0) * length
    tl.store(boundaries + o_s, tl.where(used, begin, tokens), mask=o_s <= S)


@operator
def segment_table(cu_seqlens: torch.Tensor, tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlens [N+1] int32 -> boundaries [S+1] of segments, surplus ones empty, and each document's first [N+1]."""
    table, first = chunk_table(cu_seqlens, length, max_chunks(tokens, cu_seqlens.shape[0] - 1, length))
    boundaries = cu_seqlens.new_empty(len(table) + 1)
    boundaries_kernel[(triton.cdiv(len(boundaries), 256),)](
        table, cu_seqlens, boundaries, tokens, length, len(table), B=256
    )
    return boundaries, first


@register_fake(segment_table)
def _(cu_seqlens, tokens, length):
    segments = max_chunks(tokens, cu_seqlens.shape[0] - 1, length)
    return cu_seqlens.new_empty(segments + 1), torch.empty_like(cu_seqlens)


@triton.jit
def fold_kernel(
    x,  # [S, HV, K, V] fp32: S_ext or dS_ext of each segment
    M,  # [S, HV, K, K] fp32
    start,  # [N, HV, K, V] fp32 or None
    out,  # [S, HV, K, V] fp32
    first, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One (document, head, slice of V). out: the state that enters each segment, S ← M S + S_ext; or, in REVERSE, the
    gradient of the state that leaves it, dS ← Mᵀ dS + dS_ext."""
    i_v, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // HV, i_nh % HV
    begin, end = tl.load(first + i_n).to(tl.int64), tl.load(first + i_n + 1).to(tl.int64)
    o_r, o_v = tl.arange(0, BK)[:, None], tl.arange(0, BV)[None, :]
    o_s = o_r * V + i_v * BV + o_v
    for i in range(begin, end):
        i_s = begin + end - 1 - i if REVERSE else i
        i_before = i_s + 1 if REVERSE else i_s - 1
        p_to, p_from = out + (i_s * HV + i_h) * K * V, out + (i_before * HV + i_h) * K * V
        p_x, p_m = x + (i_before * HV + i_h) * K * V, M + (i_before * HV + i_h) * K * K
        for r in range(0, K, BK):
            b_s = tl.zeros([BK, BV], tl.float32)
            if i > begin:
                b_s = tl.load(p_x + r * V + o_s)
                for c in range(0, K, BK):
                    o_m = (c + tl.trans(o_r)) * K + r + o_r if REVERSE else (r + o_r) * K + c + tl.trans(o_r)
                    b_s += tl.dot(tl.load(p_m + o_m), tl.load(p_from + c * V + o_s), input_precision="tf32x3")
            elif START:
                b_s = tl.load(start + i_nh * K * V + r * V + o_s)
            tl.store(p_to + r * V + o_s, b_s)
        tl.debug_barrier()  # the next segment reads all rows


@operator
def fold_segments(
    x: torch.Tensor, M: torch.Tensor, start: torch.Tensor | None, first: torch.Tensor, reverse: bool
) -> torch.Tensor:
    """`fold_kernel`: x [S, HV, K, V], M [S, HV, K, K], start [N, HV, K, V] or zeros, all fp32 -> [S, HV, K, V]."""
    (_, HV, K, V), out = x.shape, torch.zeros_like(x)  # zeros for the surplus segments
    BK, BV = min(K, 64), min(V, 32)
    fold_kernel[(V // BV, (first.shape[0] - 1) * HV)](
        x, M, None if start is None else start.contiguous(), out, first, HV, K=K, V=V, BK=BK, BV=BV,
        START=start is not None, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return out


@register_fake(fold_segments)
def _(x, M, start, first, reverse):
    return torch.empty_like(x)


class Segmented:
    """A rule over segments of `length` tokens that looks like one over documents; nobody asks it for boundaries."""

    def __init__(
        self,
        make: Callable[..., Any],
        inputs: Sequence[torch.Tensor | None],
        options: DeltaRuleOptions,
        entries: Entries,
        kept: Sequence[torch.Tensor],
        length: int,
    ):
        if kept:
            self.boundaries, self.first, self.states, self.M = kept
        else:
            self.boundaries, self.first = segment_table(entries.on(inputs[0].device), len(inputs[0]), length)
        self.rule = make(inputs, options, Entries(self.boundaries), ())
        self.segments = torch.arange(len(self.boundaries) - 1, dtype=torch.int32, device=self.boundaries.device)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """States and M of the segments; the rule prepares its chunks again, which with few heads costs 5% and keeps
        nothing per token."""
        return self.boundaries, self.first, self.states, self.M

    def forward(self, initial_state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        S_ext, self.M = self.rule.boundary_of(self.segments, need_m=True)
        self.states = fold_segments(S_ext, self.M, initial_state, self.first, False)
        o, last = self.rule.forward(self.states)
        return o, last[self.first[1:] - 1]

    def backward(
        self, do: torch.Tensor, initial_state: torch.Tensor | None, d_final: torch.Tensor | None
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        dS_ext = self.rule.boundary_backward_of(do, self.segments)
        d_last = fold_segments(dS_ext, self.M, d_final, self.first, True)
        grads, d_initial = self.rule.backward(do, self.states, d_last)
        return grads, d_initial[self.first[:-1]]
