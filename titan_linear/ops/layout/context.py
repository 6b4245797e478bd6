"""Ownership of tokens under context parallelism.

This is the only place that knows which rank owns which tokens. A packed stream of documents
is cut into *fragments*, contiguous ranges of global tokens. Each rank owns one fragment
("contiguous") or two ("zigzag") of every stream. Everything that crosses a cut reads a
`CPContext`: batch sharding, positions, the convolution's halo, the states of the linear
layers, and softmax attention. The context is computed once per batch on the CPU, with all
tables that layers need in forward and backward, and reaches the device in one copy.
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

SOFTMAX_METHODS = "ring", "allgather", "ulysses", "ulysses+ring"


# Not frozen: torch 2.11 would compile a guard for every number in a frozen dataclass.
@dataclass(eq=False)
class TokenTables:
    """Tables about this rank's tokens that all mixers read."""

    position_ids: Tensor  # [T_local] int64, positions within documents
    boundaries: Boundaries  # boundaries of this rank's entries
    # Boundaries of the whole stream's documents; None: these are this rank's entries.
    documents: Boundaries | None
    forward_chains: Chains
    reverse_chains: Chains
    halo: HaloRoutes | None  # for convolutions of conv1d_kernel_size taps
    conv1d_kernel_size: int | None


@dataclass(eq=False)
class SoftmaxTables:
    """Tables of causal softmax attention, by method; None: the method was not planned."""

    ring: Rectangles | None
    allgather: GatheredSpans | None
    # Context in which each node counts as one rank, for a ring of nodes.
    nodes: CPContext | None


@dataclass(eq=False)
class CPContext:
    """This rank's part of a packed stream, and what its layers need to know about the rest.

    `build_cp_context` builds it.
    """

    ranks: RankGroup
    cut: Cut
    tables: TokenTables
    softmax: SoftmaxTables

    @property
    def rectangles(self) -> Rectangles:
        """Tables for causal ring attention, where keys travel.

        Raises ValueError if it was not planned.
        """
        return _planned(self.softmax.ring, "ring")

    @property
    def gathered(self) -> GatheredSpans:
        """Tables for causal all-gather attention, where keys travel to the ranks that need them.

        Raises ValueError if it was not planned.
        """
        return _planned(self.softmax.allgather, "allgather")

    @property
    def of_nodes(self) -> CPContext:
        """Context in which each node counts as one rank, in the same group.

        Raises ValueError if it was not planned.
        """
        return _planned(self.softmax.nodes, "ulysses+ring")

    @property
    def order_in_node(self) -> tuple[int, ...]:
        """`Cut.order` for the fragments of a node's ranks, in the order of `of_nodes`.

        The fragments that a node's ranks hold in one slot form one fragment of the node.
        """
        slots = self.cut.slots
        ranks = range(self.ranks.node_size)
        mirrored = [self.layout == "zigzag" and slot % 2 for slot in range(slots)]
        return tuple(
            r * slots + s for s in range(slots) for r in (ranks[::-1] if mirrored[s] else ranks)
        )

    @property
    def stream(self) -> Boundaries:
        """Boundaries of the whole stream's documents, for a rank that holds all tokens.

        The tokens are in global order.
        """
        return self.tables.boundaries if self.tables.documents is None else self.tables.documents

    @cached_property
    def own_fragments(self) -> Fragments:
        """This rank's fragments, in the order in which its tokens lie in memory."""
        return owned(self.cut.fragments, self.ranks.rank)

    @cached_property
    def full_rectangles(self) -> Rectangles:
        """Tables of ring attention without a causal mask."""
        return rectangles(self.cut.fragments, self.ranks.rank, self.ranks.world_size, causal=False)

    @cached_property
    def full_gathered(self) -> GatheredSpans:
        """Tables of all-gather attention without a causal mask."""
        place = self.ranks.rank, self.ranks.world_size
        spans = gathered_spans(self.cut, *place, causal=False)
        return to_device(spans, self.cu_seqlens.device)

    def mark_dynamic(self) -> None:
        """Tell torch.compile that the numbers of documents and of chunks differ between
        batches.
        """
        # Collect the tables whose length depends on the documents.
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
        # In prefix trees any table may have a single row, a size that torch.compile
        # specializes on. `maybe_mark_dynamic` allows that.
        mark = torch._dynamo.maybe_mark_dynamic if self.cut.joined else torch._dynamo.mark_dynamic
        for tensor in (*counted, *self._of_trees()):
            mark(tensor, 0)
        if self.softmax.nodes is not None:
            self.softmax.nodes.mark_dynamic()

    def _of_trees(self) -> Iterator[Tensor]:
        """Yield all tables of prefix trees."""
        for boundaries in (self.tables.boundaries, self.stream):
            if paths := boundaries.paths:
                yield from (table for table in (*paths.spans, *paths[1:]) if table is not None)
            if tree := boundaries.tree:
                yield from (*tree.points, *tree.children, *tree.fold, tree.starts, tree.ends)

    def halo_of(self, width: int) -> HaloRoutes:
        """Return routes of the `width` tokens before each fragment.

        These are the planned routes if the width matches, or routes made once and kept.
        """
        tables = self.tables
        if tables.halo is not None and tables.conv1d_kernel_size == width + 1:
            return tables.halo
        return tables.boundaries.derived(
            _routes_at_first_use, self.cut, self.ranks.rank, self.ranks.world_size, width
        )

    # Names that flash-linear-attention's contexts have.

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.ranks.group

    @property
    def layout(self) -> str:
        return self.cut.layout

    @property
    def cu_seqlens(self) -> Tensor:
        """Rank-local boundaries [N+1] int32.

        An entry begins at each document's and at each fragment's start.
        """
        return self.tables.boundaries.cu_seqlens

    @property
    def cu_seqlens_cpu(self) -> Tensor:
        """The same as `cu_seqlens`, on the CPU."""
        assert self.tables.boundaries.cu_seqlens_cpu is not None
        return self.tables.boundaries.cu_seqlens_cpu

    @property
    def position_ids(self) -> Tensor:
        return self.tables.position_ids

    @property
    def fragments(self) -> tuple[tuple[int, int], ...]:
        """This rank's fragments as global (start, end) pairs."""
        return tuple((f.start, f.end) for f in self.own_fragments)

    # The following properties exist for one stream in the contiguous layout; None
    # otherwise.

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
        """Number of ranks before this one that hold tokens of its first token's document."""
        if (f := self._only) is None:
            return None
        return sum(g.end > f.head[0] for g in self.cut.fragments[: self.ranks.rank])

    @property
    def post_num_ranks(self) -> int | None:
        """Number of ranks after this one that hold tokens of its last token's document."""
        if (f := self._only) is None:
            return None
        return sum(g.start < f.tail[1] for g in self.cut.fragments[self.ranks.rank + 1 :])

    @property
    def pre_num_conv_tokens(self) -> int | None:
        """Number of tokens of the first token's document that are on earlier ranks."""
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
