"""Long documents cut into segments where heads and documents are too few to fill a GPU.
This is KCP inside one device.

A scan is sequential within a head, so 16 heads keep only a quarter of an H200's
multiprocessors busy. Here each segment's last state from a zero state and its transition
(S_ext, M) are computed for all segments at once. A short fold then gives the state that
enters each segment, and the scans run over segments as if they were documents. Backward
does the same, with the same M. The exchange between ranks is unchanged: an entry's S_ext
and M follow from its segments' S_ext and M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.layout.boundaries import Boundaries, Segments
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.runtime.options import AnyInputs, AnyOptions, States
from titan_linear.ops.triton.chunks import Chunks, chunks_of, max_chunks
from titan_linear.ops.triton.fold import fold_entries, fold_entries_back, fold_segments
from titan_linear.ops.triton.tiles import Kernel, arange, blocks_of, masked


@Kernel
def boundaries_kernel(table, cu_seqlens, boundaries, tokens, length, S, B: constexpr):
    """Write where each segment of the table begins. Surplus segments, and the boundary
    after the last, begin at the end of the stream."""
    o_s = tl.program_id(0) * B + arange(B)
    i_n = tl.load(table + 2 * o_s, mask=o_s < S, other=-1)
    used = i_n >= 0
    begin = masked(cu_seqlens + i_n, mask=used) + masked(table + 2 * o_s + 1, mask=used) * length
    tl.store(boundaries + o_s, tl.where(used, begin, tokens), mask=o_s <= S)


def _empty_table(cu_seqlens: Tensor, tokens: int, length: int) -> tuple[Tensor, Tensor]:
    segments = max_chunks(tokens, cu_seqlens.shape[0] - 1, length)
    return cu_seqlens.new_empty(segments + 1), torch.empty_like(cu_seqlens)


@operator(fake=_empty_table)
def segment_table(cu_seqlens: Tensor, tokens: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the segments of cu_seqlens [N+1] int32: their boundaries [S+1], in which
    surplus segments are empty, and segment_offsets [N+1], each document's first segment."""
    _, table, segment_offsets = chunks_of(cu_seqlens, tokens, length)
    boundaries = cu_seqlens.new_empty(len(table) + 1)
    boundaries_kernel[blocks_of(len(boundaries), 256),](
        table, cu_seqlens, boundaries, tokens, length, len(table), B=256
    )
    return boundaries, segment_offsets


class SplitDocuments:
    """A rule over the segments that `find` returns, with the interface of a rule over
    entries."""

    def __init__(
        self,
        make: Callable[..., Any],
        inputs: AnyInputs,
        options: AnyOptions,
        find: Callable[[], Segments],
        kept: Sequence[Tensor],
    ):
        # In backward, `kept` has forward's states, transitions, tables and tiles.
        tiles: Sequence[Tensor] = ()
        if kept:
            self.states, self.M, *rest = kept
            tables = len(Segments._fields)
            self.segments = Segments(*rest[:tables])
            tiles = rest[tables:]
        else:
            self.segments = find()
        s = self.segments
        self.rule = make(
            inputs, options, Chunks(s.cu_seqlens, s.chunk_index, s.chunk_offsets), tiles
        )
        self.S_ext: Tensor | None = None  # per segment, [S, HV, K, V]
        self.dS_ext: Tensor | None = None

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Return the segments' states, M and tables, followed by the rule's tiles."""
        _, _, *tiles = self.rule.kept
        return self.states, self.M, *self.segments, *tiles

    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        self.S_ext, self.M = self.rule.boundary(self.segments)
        return fold_entries(self.S_ext, self.M, self.segments.offsets, chains.entries, None, False)

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        if self.S_ext is None:
            self.S_ext, self.M = self.rule.boundary(self.segments)
        self.states = self._fold(self.S_ext, initial, reverse=False)
        o, last = self.rule.forward(States(self.states), need_final)
        return o, last[self.segments.offsets[1:] - 1] if need_final else last

    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        self.dS_ext = self.rule.boundary_backward(do, self.segments)
        return fold_entries_back(self.dS_ext, self.M, self.segments.offsets, chains.entries)

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[AnyInputs, Tensor]:
        if self.dS_ext is None:
            self.dS_ext = self.rule.boundary_backward(do, self.segments)
        d_last = self._fold(self.dS_ext, d_final, reverse=True)
        grads, d_first = self.rule.backward(do, States(self.states), States(d_last), need_d_initial)
        return grads, d_first[self.segments.offsets[:-1]] if need_d_initial else d_first

    def _fold(self, x: Tensor, start: States | None, reverse: bool) -> Tensor:
        values, index = (None, None) if start is None else start
        return fold_segments(
            x, self.M, values, index, self.segments.offsets, wanted=None, reverse=reverse
        )


def segments_of(boundaries: Boundaries, tokens: int, length: int) -> Segments:
    """Build segments of `length` tokens on the device; segments beyond the number needed
    are empty."""
    edges, offsets = segment_table(boundaries.cu_seqlens, tokens, length)
    numbers = torch.arange(len(edges) - 1, dtype=torch.int32, device=edges.device)
    _, chunk_index, chunk_offsets = chunks_of(edges, tokens)
    return Segments(
        edges, chunk_index, chunk_offsets, offsets, numbers, wanted=torch.full_like(numbers, 2)
    )
