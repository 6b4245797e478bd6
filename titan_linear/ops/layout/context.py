"""The one place that knows who owns which tokens under context parallelism.

A packed stream of documents is cut into *fragments*, contiguous ranges of global tokens, and each rank owns
one ("contiguous") or two ("zigzag") of every stream. Everything that crosses a cut reads a `CPContext`: batch
sharding, positions, the convolution's halo, the states of the linear layers, softmax attention. It is computed once per
batch on the CPU, with every table that layers need, forward and backward, and reaches the device in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.fragments import (
    Cut,
    Fragment,
    Fragments,
    HaloRoutes,
    RankGroup,
    halo_routes,
    owned,
)
from titan_linear.ops.layout.rectangles import Rectangles, rectangles
from titan_linear.ops.layout.spans import GatheredSpans, gathered_spans
from titan_linear.ops.layout.tables import to_device

SOFTMAX_METHODS = ("ring", "allgather", "ulysses", "ulysses+ring")


@dataclass(eq=False)  # not frozen: torch 2.11 would then compile a guard for every number in it
class TokenTables:
    """What all mixers read of this rank's tokens."""

    position_ids: Tensor  # [T_local] int64, positions within documents
    boundaries: Boundaries  # of this rank's entries
    documents: Boundaries | None  # of the whole stream; None: they are this rank's entries
    forward_chains: Chains
    reverse_chains: Chains
    halo: HaloRoutes | None  # for convolutions of conv1d_kernel_size taps
    conv1d_kernel_size: int | None


@dataclass(eq=False)
class SoftmaxTables:
    """For causal softmax attention, by method; None: not planned."""

    ring: Rectangles | None
    allgather: GatheredSpans | None
    nodes: CPContext | None  # of a stream that nodes share as ranks do, for a ring of nodes


@dataclass(eq=False)
class CPContext:
    """This rank's part of a packed stream, and what its layers need to know of the rest (see `build_cp_context`)."""

    ranks: RankGroup
    cut: Cut
    tables: TokenTables
    softmax: SoftmaxTables

    @property
    def rectangles(self) -> Rectangles:
        """For causal attention in which keys travel around the ring. ValueError: not planned."""
        return _planned(self.softmax.ring, "ring")

    @property
    def gathered(self) -> GatheredSpans:
        """For causal attention in which keys travel to the ranks that need them. ValueError: not planned."""
        return _planned(self.softmax.allgather, "allgather")

    @property
    def of_nodes(self) -> CPContext:
        """The context in which a node is a rank, in the same group. ValueError: not planned."""
        return _planned(self.softmax.nodes, "ulysses+ring")

    @property
    def order_in_node(self) -> tuple[int, ...]:
        """`Cut.order` of the fragments of a node's ranks, as `of_nodes` has them: what ranks of a node hold in one slot
        is one fragment of the node."""
        slots, ranks = self.cut.slots, range(self.ranks.node_size)
        mirrored = [self.layout == "zigzag" and slot % 2 for slot in range(slots)]
        return tuple(
            r * slots + s for s in range(slots) for r in (ranks[::-1] if mirrored[s] else ranks)
        )

    @property
    def stream(self) -> Boundaries:
        """Of the documents of the whole stream, for a rank that holds all tokens in global order."""
        return self.tables.boundaries if self.tables.documents is None else self.tables.documents

    @cached_property
    def own_fragments(self) -> Fragments:
        """This rank's fragments in the order in which its tokens lie in memory."""
        return owned(self.cut.fragments, self.ranks.rank)

    @cached_property
    def full_rectangles(self) -> Rectangles:
        """`rectangles` for attention without a causal mask."""
        return rectangles(self.cut.fragments, self.ranks.rank, self.ranks.world_size, causal=False)

    @cached_property
    def full_gathered(self) -> GatheredSpans:
        """`gathered` for attention without a causal mask."""
        place = self.ranks.rank, self.ranks.world_size
        spans = gathered_spans(self.cut, *place, causal=False)
        return to_device(spans, self.cu_seqlens.device)

    def mark_dynamic(self) -> None:
        """Tell torch.compile which sizes differ from batch to batch: those that count documents and chunks."""
        chains = self.tables.forward_chains, self.tables.reverse_chains
        counted: list[Tensor | None] = [
            self.cu_seqlens,
            self.cu_seqlens_cpu,
            *(c.entry_slots for c in chains),
        ]
        if self.softmax.allgather is not None:
            spans, keys, _ = self.softmax.allgather
            counted += [spans.q, spans.q_cpu, spans.k, spans.k_cpu, keys.pieces, keys.sent]
        counted += [self.stream.cu_seqlens, self.stream.cu_seqlens_cpu]
        for boundaries in (self.tables.boundaries, self.stream):
            tables = (*boundaries.chunks.values(), *filter(None, boundaries.segments.values()))
            counted += [tensor for table in tables for tensor in table]
        # Any table of prefix trees may be short, and each entry has a halo of its own, so that one alone is special.
        mark = torch._dynamo.maybe_mark_dynamic if self.cut.joined else torch._dynamo.mark_dynamic
        for tensor in (*counted, *self._of_trees()):
            mark(tensor, 0)
        if self.softmax.nodes is not None:
            self.softmax.nodes.mark_dynamic()

    def _of_trees(self) -> Iterator[Tensor]:
        """All tables of prefix trees."""
        for boundaries in (self.tables.boundaries, self.stream):
            if paths := boundaries.paths:
                yield from (table for table in (*paths.spans, *paths[1:]) if table is not None)
            if tree := boundaries.tree:
                yield from (*tree.points, *tree.children, *tree.fold, tree.starts, tree.ends)

    def halo_of(self, width: int) -> HaloRoutes:
        """Routes of the `width` tokens before each fragment: those planned if the width fits, else made once."""
        tables = self.tables
        if tables.halo is not None and tables.conv1d_kernel_size == width + 1:
            return tables.halo
        return tables.boundaries.derived(
            _routes_at_first_use, self.cut, self.ranks.rank, self.ranks.world_size, width
        )

    # flash-linear-attention's names.

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.ranks.group

    @property
    def layout(self) -> str:
        return self.cut.layout

    @property
    def cu_seqlens(self) -> Tensor:
        """[N+1] int32, rank-local: a document's start and a fragment's start each begin an entry."""
        return self.tables.boundaries.cu_seqlens

    @property
    def cu_seqlens_cpu(self) -> Tensor:
        """The same on the CPU."""
        assert self.tables.boundaries.cu_seqlens_cpu is not None
        return self.tables.boundaries.cu_seqlens_cpu

    @property
    def position_ids(self) -> Tensor:
        return self.tables.position_ids

    @property
    def fragments(self) -> tuple[tuple[int, int], ...]:
        """This rank's fragments as global (start, end)."""
        return tuple((f.start, f.end) for f in self.own_fragments)

    # For one stream in the contiguous layout; None otherwise.

    @property
    def _only(self) -> Fragment | None:
        return (
            self.own_fragments[0]
            if self.layout == "contiguous" and self.cut.num_streams == 1
            else None
        )

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
        return sum(g.end > f.head[0] for g in self.cut.fragments[: self.ranks.rank])

    @property
    def post_num_ranks(self) -> int | None:
        """Number of ranks after this one that hold tokens of the document of its last token."""
        if (f := self._only) is None:
            return None
        return sum(g.start < f.tail[1] for g in self.cut.fragments[self.ranks.rank + 1 :])

    @property
    def pre_num_conv_tokens(self) -> int | None:
        """Number of tokens of the first token's document that lie before this rank."""
        return None if (f := self._only) is None else f.start - f.head[0]


Planned = TypeVar("Planned", Rectangles, GatheredSpans, CPContext)


def _planned(tables: Planned | None, method: str) -> Planned:
    if tables is None:
        raise ValueError(
            f"method = {method!r}: the context was not planned for it; name it in build_cp_context(attention=...), or "
            "with parents, which no ring knows, use 'allgather' or 'ulysses'"
        )
    return tables


def _routes_at_first_use(
    boundaries: Boundaries, cut: Cut, rank: int, world_size: int, width: int
) -> HaloRoutes:
    return to_device(halo_routes(cut, rank, world_size, width), boundaries.cu_seqlens.device)
