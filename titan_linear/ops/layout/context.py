"""The one place that knows who owns which tokens under context parallelism.

A packed stream of documents is cut into *fragments*, contiguous ranges of global tokens, and each rank owns
one ("contiguous") or two ("zigzag") of every stream. Everything that crosses a cut reads a `CPContext`: batch
sharding, positions, the convolution's halo, the states of the linear layers, softmax attention. It is computed once per
batch on the CPU, with every table that layers need, forward and backward, and reaches the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries, to_tensors
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.fragments import Fragment, Fragments, HaloRoutes, halo_routes, owned
from titan_linear.ops.layout.rectangles import Rectangles, rectangles
from titan_linear.ops.layout.spans import GatheredSpans, gathered, span_tables

SOFTMAX_METHODS = ("ring", "allgather", "ulysses", "ulysses+ring")


@dataclass(eq=False)  # not frozen: torch 2.11 would then compile a guard for every number in it
class CPContext:
    """This rank's part of a packed stream, and what its layers need to know of the rest (see `build_cp_context`)."""

    group: dist.ProcessGroup | None
    group_name: str  # by which operators find it; "" without a group
    layout: str
    rank: int
    world_size: int
    conv1d_kernel_size: int | None
    num_streams: int
    node_size: int  # ranks of the group per node
    slots: int  # number of fragments per rank
    tokens: int  # number of tokens of this rank, T_local
    stream_tokens: int  # and of all ranks, T
    all_fragments: Fragments  # every rank's, in global order
    order: tuple[int, ...]  # index of each of them in rank order, rank · slots + slot
    documents: np.ndarray  # [.] int64 global boundaries, without empty documents
    boundaries: Boundaries  # of this rank's entries
    stream: Boundaries  # of the documents of the whole stream, for a rank that holds all tokens in global order
    position_ids: Tensor  # [T_local] int64, positions within documents
    enters_slot: Tensor  # [N+1] int32: the slot whose incoming state an entry starts from, −1: zeros
    leaves_slot: Tensor  # [N+1] int32: the slot whose outgoing state an entry ends with, −1: none
    forward_chains: Chains
    reverse_chains: Chains
    halo: HaloRoutes | None  # for convolutions of conv1d_kernel_size taps
    for_ring: Rectangles | None  # for causal attention; None: not planned
    for_allgather: GatheredSpans | None  # likewise
    for_nodes: CPContext | None  # of a stream that nodes share as ranks do, for a ring of nodes; None: not planned
    pairs_per_row: int

    @property
    def rectangles(self) -> Rectangles:
        """For causal attention in which keys travel around the ring. ValueError: not planned."""
        return _planned(self.for_ring, "ring")

    @property
    def gathered(self) -> GatheredSpans:
        """For causal attention in which queries and keys travel to the rank that computes. ValueError: not planned."""
        return _planned(self.for_allgather, "allgather")

    @property
    def of_nodes(self) -> CPContext:
        """The context in which a node is a rank, in the same group. ValueError: not planned."""
        return _planned(self.for_nodes, "ulysses+ring")

    @property
    def order_in_node(self) -> tuple[int, ...]:
        """`order` of the fragments of a node's ranks, as `of_nodes` has them: what ranks of a node hold in one slot is
        one fragment of the node."""
        ranks = range(self.node_size)
        mirrored = [self.layout == "zigzag" and slot % 2 for slot in range(self.slots)]
        return tuple(r * self.slots + s for s in range(self.slots) for r in (ranks[::-1] if mirrored[s] else ranks))

    @property
    def cu_seqlens(self) -> Tensor:
        """[N+1] int32, rank-local: a document's start and a fragment's start each begin an entry."""
        return self.boundaries.cu_seqlens

    @property
    def cu_seqlens_cpu(self) -> Tensor:
        """The same on the CPU."""
        assert self.boundaries.cu_seqlens_cpu is not None
        return self.boundaries.cu_seqlens_cpu

    @cached_property
    def own_fragments(self) -> Fragments:
        """This rank's fragments in the order in which its tokens lie in memory."""
        return owned(self.all_fragments, self.rank)

    @property
    def fragments(self) -> tuple[tuple[int, int], ...]:
        """This rank's fragments as global (start, end)."""
        return tuple((f.start, f.end) for f in self.own_fragments)

    @cached_property
    def full_rectangles(self) -> Rectangles:
        """`rectangles` for attention without a causal mask."""
        return rectangles(self.all_fragments, self.rank, self.world_size, causal=False)

    @cached_property
    def full_gathered(self) -> GatheredSpans:
        """`gathered` for attention without a causal mask."""
        cut_by = self.all_fragments, self.documents, self.rank, self.world_size, self.pairs_per_row
        return gathered(to_tensors(span_tables(*cut_by, causal=False), self.cu_seqlens.device))

    def mark_dynamic(self) -> None:
        """Tell torch.compile which sizes differ from batch to batch: those that count documents and chunks."""
        counted = [self.cu_seqlens, self.cu_seqlens_cpu, self.enters_slot, self.leaves_slot]
        if self.for_allgather is not None:
            spans, _, keys, _ = self.for_allgather
            counted += [spans.q, spans.q_cpu, spans.k, spans.k_cpu, keys.pieces, keys.sent]
        counted += [self.stream.cu_seqlens, self.stream.cu_seqlens_cpu]
        tables = [t for b in (self.boundaries, self.stream) for t in (*b.chunks.values(), *b.segments.values())]
        for table in (*counted, *(x for of in filter(None, tables) for x in of)):
            torch._dynamo.mark_dynamic(table, 0)
        if self.for_nodes is not None:
            self.for_nodes.mark_dynamic()

    def halo_of(self, width: int) -> HaloRoutes:
        """Routes of the `width` tokens before each fragment: those planned if the width fits, else made once."""
        if self.halo is not None and self.conv1d_kernel_size == width + 1:
            return self.halo
        return self.boundaries.derived(_routes_at_first_use, self.all_fragments, self.rank, self.world_size, width)

    # flash-linear-attention's names, for one stream in the contiguous layout; None otherwise.

    @property
    def _only(self) -> Fragment | None:
        return self.own_fragments[0] if self.layout == "contiguous" and self.num_streams == 1 else None

    @property
    def is_first_rank(self) -> bool | None:
        """Whether the document of this rank's first token begins on this rank."""
        return None if self._only is None else not self._only.enters

    @property
    def is_last_rank(self) -> bool | None:
        """Whether the document of this rank's last token ends on this rank."""
        return None if self._only is None else not self._only.leaves

    @property
    def pre_num_ranks(self) -> int | None:
        """Number of ranks before this one that hold tokens of the document of its first token."""
        if (f := self._only) is None:
            return None
        return sum(g.end > f.head[0] for g in self.all_fragments[: self.rank])

    @property
    def post_num_ranks(self) -> int | None:
        """Number of ranks after this one that hold tokens of the document of its last token."""
        if (f := self._only) is None:
            return None
        return sum(g.start < f.tail[1] for g in self.all_fragments[self.rank + 1 :])

    @property
    def pre_num_conv_tokens(self) -> int | None:
        """Number of tokens of the first token's document that lie before this rank."""
        return None if (f := self._only) is None else f.start - f.head[0]


Planned = TypeVar("Planned", Rectangles, GatheredSpans, CPContext)


def _planned(tables: Planned | None, method: str) -> Planned:
    if tables is None:
        raise ValueError(
            f"method = {method!r}: the context was not planned for it; name it in build_cp_context(attention=...)"
        )
    return tables


def _routes_at_first_use(
    boundaries: Boundaries, fragments: Fragments, rank: int, world_size: int, width: int
) -> HaloRoutes:
    routes = halo_routes(fragments, rank, world_size, width)
    return to_tensors({"halo": (HaloRoutes, routes)}, boundaries.cu_seqlens.device)["halo"]
