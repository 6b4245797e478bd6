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

from titan_linear.ops.options import DeltaRuleOptions
from titan_linear.ops.triton.chunks import Chunks, chunk_table, chunks_of, max_chunks
from titan_linear.ops.triton.fold import fold_segments
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
    """cu_seqlens [N+1] int32 -> boundaries [S+1] of segments, surplus ones empty, and segment_offsets [N+1], each
    document's first segment."""
    table, segment_offsets = chunk_table(cu_seqlens, length, max_chunks(tokens, cu_seqlens.shape[0] - 1, length))
    boundaries = cu_seqlens.new_empty(len(table) + 1)
    boundaries_kernel[(triton.cdiv(len(boundaries), 256),)](
        table, cu_seqlens, boundaries, tokens, length, len(table), B=256
    )
    return boundaries, segment_offsets


@register_fake(segment_table)
def _(cu_seqlens, tokens, length):
    segments = max_chunks(tokens, cu_seqlens.shape[0] - 1, length)
    return cu_seqlens.new_empty(segments + 1), torch.empty_like(cu_seqlens)


class SplitDocuments:
    """A rule over segments of `length` tokens that looks like one over documents; nobody asks it for boundaries."""

    def __init__(
        self,
        make: Callable[..., Any],
        inputs: Sequence[torch.Tensor | None],
        options: DeltaRuleOptions,
        cu_seqlens: torch.Tensor,
        kept: Sequence[torch.Tensor],
        length: int,
    ):
        tokens = len(inputs[0])
        if kept:
            self.segment_offsets, self.states, self.M, *segments = kept
            self.segments = Chunks(*segments)
        else:
            boundaries, self.segment_offsets = segment_table(cu_seqlens, tokens, length)
            self.segments = chunks_of(boundaries, tokens)
        self.rule = make(inputs, options, self.segments, ())
        self.all = torch.arange(len(self.segments.cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """States and M of the segments; the rule prepares its chunks again, which with few heads costs 5% and keeps
        nothing per token."""
        return self.segment_offsets, self.states, self.M, *self.segments

    def forward(
        self, initial_state: torch.Tensor | None, output_final_state: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        S_ext, self.M = self.rule.boundaries(self.all)
        self.states = fold_segments(S_ext, self.M, initial_state, self.segment_offsets, False)
        o, last = self.rule.forward(self.states, output_final_state)
        return o, last[self.segment_offsets[1:] - 1] if output_final_state else None

    def backward(
        self,
        do: torch.Tensor,
        initial_state: torch.Tensor | None,
        d_final: torch.Tensor | None,
        need_d_initial: bool = True,
    ) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        dS_ext = self.rule.boundary_gradients(do, self.all)
        d_last = fold_segments(dS_ext, self.M, d_final, self.segment_offsets, True)
        need_d_initial = need_d_initial and initial_state is not None
        grads, d_first = self.rule.backward(do, self.states, d_last, need_d_initial)
        return grads, d_first[self.segment_offsets[:-1]] if need_d_initial else None
