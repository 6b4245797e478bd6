"""The one place that knows who owns which tokens under context parallelism.

A packed stream of documents is cut into *fragments*, contiguous ranges of global tokens, and each rank owns
one ("contiguous") or two ("zigzag") of every stream. Everything that crosses a cut reads a `CPContext`: batch
sharding, positions, the convolution's halo, the states of the linear layers, softmax attention. It is computed once per
batch on the CPU, with every table that layers need, forward and backward, and reaches the device in one copy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.layout.boundaries import (
    CHUNK,
    CONV_RUN,
    Boundaries,
    ChunkTable,
    OnHost,
    Segments,
    Tables,
    check_copy,
    checked,
    chunk_arrays,
    distinct,
    segment_arrays,
    segment_length,
    short,
    to_tensors,
)
from titan_linear.ops.layout.chains import Chains, blocks_wanted, chains
from titan_linear.ops.layout.fragments import LAYOUTS, Fragment, Fragments, HaloRoutes, cut, halo_routes, owned
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
        cut_by = self.all_fragments, self.documents, self.rank, self.world_size
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


@torch.inference_mode(False)  # a context built under inference mode must serve training, too
def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    conv1d_kernel_size: int | None = None,
    layout: str = "contiguous",
    cu_seqlens_cpu: Tensor | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_streams: int = 1,
    node_size: int | None = None,
    device: torch.device | None = None,
    programs: Sequence[int] = (),
    stream_programs: Sequence[int] | None = None,
    attention: Collection[str] = SOFTMAX_METHODS,
) -> CPContext:
    """Cut a packed stream among the W ranks of a group, and derive what its layers need.

    Args:
        cu_seqlens: [N+1] int, GLOBAL boundaries of the documents, from 0 to the length of the whole stream.
            Padding is a last document of its own.
        group: the context-parallel process group. With `rank` and `world_size` but no group, the result
            only describes the cut; no operation can communicate with it.
        conv1d_kernel_size: width of the short convolutions; `causal_conv1d` checks that its weight has it.
        layout: "contiguous" (rank r owns [r·T/W, (r+1)·T/W)) or "zigzag" (2W blocks; rank r owns blocks r and
            2W−1−r, in that order, never merged).
        cu_seqlens_cpu: the same values on the CPU; spares a device-to-host copy when cu_seqlens is on a GPU.
        num_streams: number of streams of equal length that `cu_seqlens` describes, one after the other; each is
            cut by itself, and a rank's tokens are its part of the first stream, of the second, and so on.
        node_size: ranks of the group per node, a divisor of W; by default as torchrun started them, else W.
        device: where the tokens will be; that of `cu_seqlens` by default.
        programs: `scan_programs` of the scans to come: for each, long entries are cut into segments.
        stream_programs: likewise for scans over the whole stream with a part of the heads (cp_method "ulysses"), which
            also read a chunk table of the stream; None: there are no such scans.
        attention: the methods of softmax attention to plan for; (): there is none.

    Raises:
        ValueError: boundaries that do not start at 0, that decrease, or that differ from cu_seqlens_cpu; an unknown
            layout or method; neither a group nor a rank below world_size; num_streams or conv1d_kernel_size below 1;
            a stream length that W (2W for zigzag) does not divide; streams whose edges are not document boundaries.
    """
    rank, world_size, node_size = _place(group, rank, world_size, node_size)
    _check_options(layout, num_streams, conv1d_kernel_size, attention)
    if cu_seqlens_cpu is not None:
        check_copy(cu_seqlens, cu_seqlens_cpu)
    documents = _documents(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    fragments = cut(documents, num_streams, world_size, layout)
    mine = owned(fragments, rank)
    local, positions, entries = _local_layout(documents, mine)
    ring = "ring" in attention
    allgather = "allgather" in attention
    slots = _slots_of_entries(mine, entries, len(local) - 1)
    crossing = ((slots["enters_slot"] >= 0) | (slots["leaves_slot"] >= 0))[:-1]
    of_all = {"node_size": np.array([node_size]), "zigzag": np.array([layout == "zigzag"])}
    tables = {
        "tokens": (_OfTokens, {"position_ids": positions, **slots}),
        "forward": (Chains, _chains(fragments, rank, world_size, entries, reverse=False) | of_all),
        "reverse": (Chains, _chains(fragments, rank, world_size, entries, reverse=True) | of_all),
        **(span_tables(fragments, documents, rank, world_size, causal=True) if allgather else {}),
        **_boundary_tables("entries", local, (CHUNK, CONV_RUN), programs, crossing, joined=world_size > 1),
    }
    whole = documents.astype(np.int32)
    alone = world_size == 1 and layout == "contiguous"  # then the entries are the documents
    if not alone:
        sizes = () if stream_programs is None else (CHUNK,)
        apart = np.zeros(len(whole) - 1, dtype=bool)
        tables |= _boundary_tables("stream", whole, sizes, stream_programs or (), apart)
    if conv1d_kernel_size is not None:
        tables["halo"] = HaloRoutes, halo_routes(fragments, rank, world_size, conv1d_kernel_size - 1)
    moved = to_tensors(tables, cu_seqlens.device if device is None else torch.device(device))
    boundaries = _boundaries("entries", moved, programs, joined=world_size > 1)
    for_nodes = None
    if "ulysses+ring" in attention and world_size > 1:
        described = build_cp_context(
            torch.from_numpy(documents),
            layout=layout,
            rank=rank // node_size,
            world_size=world_size // node_size,
            num_streams=num_streams,
            device=boundaries.cu_seqlens.device,
            attention=("ring",),
        )
        for_nodes = replace(described, group=group, group_name="" if group is None else group.group_name)
    return CPContext(
        group=group,
        group_name="" if group is None else group.group_name,
        layout=layout,
        rank=rank,
        world_size=world_size,
        conv1d_kernel_size=conv1d_kernel_size,
        num_streams=num_streams,
        node_size=node_size,
        slots=len(mine),
        tokens=int(local[-1]),
        stream_tokens=int(documents[-1]),
        all_fragments=fragments,
        order=tuple(f.rank * len(mine) + f.slot for f in fragments),
        documents=documents,
        boundaries=boundaries,
        **moved["tokens"]._asdict(),
        stream=boundaries if alone else _boundaries("stream", moved, stream_programs or ()),
        forward_chains=moved["forward"],
        reverse_chains=moved["reverse"],
        halo=moved.get("halo"),
        for_ring=rectangles(fragments, rank, world_size, causal=True) if ring else None,
        for_allgather=gathered(moved) if allgather else None,
        for_nodes=for_nodes,
    )


def _place(
    group: dist.ProcessGroup | None, rank: int | None, world_size: int | None, node_size: int | None
) -> tuple[int, int, int]:
    """This rank's number, the number of ranks, and that of a node. ValueError: they are not given, or do not fit."""
    if group is not None:
        rank, world_size = group.rank(), group.size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}, world_size = {world_size}; give a group, or both with 0 <= rank < world_size")
    node_size = ranks_per_node(group, world_size) if node_size is None else node_size
    if node_size < 1 or world_size % node_size:
        raise ValueError(
            f"node_size = {node_size}; give a divisor of the number of ranks, {world_size}, or leave it out"
        )
    return rank, world_size, node_size


def _check_options(layout: str, num_streams: int, conv1d_kernel_size: int | None, attention: Collection[str]) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r} is unknown; use one of {', '.join(map(repr, LAYOUTS))}")
    if num_streams < 1:
        raise ValueError(f"num_streams = {num_streams}; give the number of streams in cu_seqlens, 1 or more")
    if conv1d_kernel_size is not None and conv1d_kernel_size < 1:
        raise ValueError(f"conv1d_kernel_size = {conv1d_kernel_size}; give the convolutions' width, or leave it out")
    if unknown := [method for method in attention if method not in SOFTMAX_METHODS]:
        raise ValueError(f"attention has {unknown}; give methods of {', '.join(map(repr, SOFTMAX_METHODS))}, or none")


Planned = TypeVar("Planned", Rectangles, GatheredSpans, CPContext)


class _OfTokens(NamedTuple):
    """Fields of `CPContext`."""

    position_ids: Tensor
    enters_slot: Tensor
    leaves_slot: Tensor


class _Edges(NamedTuple):
    """Fields of `Boundaries`."""

    cu_seqlens: Tensor
    cu_seqlens_cpu: OnHost
    longest: OnHost


def _boundary_tables(
    name: str,
    cu_seqlens: np.ndarray,
    chunks: Sequence[int],
    programs: Sequence[int],
    crossing: np.ndarray,
    joined: bool = False,
) -> Tables:
    """The tables of `Boundaries`. chunks: the tokens per chunk of each chunk table that is read; crossing: [N] bool, as
    in `segment_arrays`."""
    longest = np.diff(cu_seqlens).max(keepdims=True).astype(np.int64)
    edges = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens, "longest": longest}
    tables: Tables = {name: (_Edges, edges)}
    for n in chunks:
        index, offsets = chunk_arrays(cu_seqlens, n)
        tables[f"{name}, chunks of {n}"] = ChunkTable, {"index": index, "offsets": offsets}
    for n in programs:
        if length := _segment_length(cu_seqlens, n, joined):
            tables[f"{name}, segments {n}"] = Segments, segment_arrays(cu_seqlens, length, crossing)
    return tables


def _segment_length(cu_seqlens: np.ndarray, programs: int, joined: bool) -> int | None:
    """`segment_length`, or None if no documents of so many tokens are cut. If others are, but cutting these does not
    pay, each entry is one segment: compiled code has one form for all batches."""
    tokens = int(cu_seqlens[-1])
    if segment_length(tokens, 1, programs, joined) is None:
        return None
    return segment_length(tokens, len(cu_seqlens) - 1, programs, joined) or tokens


def _boundaries(name: str, moved: Mapping[str, Any], programs: Sequence[int], joined: bool = False) -> Boundaries:
    """`Boundaries` from the tables of `_boundary_tables` as tensors."""
    chunks = {n: moved[key] for n in (CHUNK, CONV_RUN) if (key := f"{name}, chunks of {n}") in moved}
    segments = {n: moved.get(f"{name}, segments {n}") for n in programs}
    return Boundaries(**moved[name]._asdict(), joined=joined, chunks=chunks, segments=segments)


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


def ranks_per_node(group: dist.ProcessGroup | None, world_size: int) -> int:
    """How many neighbouring ranks of a group share a node, according to torchrun's environment; all, if there is none.
    Where a node has more of them than another, the largest number that divides all."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if hasattr(group, "node_size"):  # a group in one process
        return group.node_size
    if not size or group is None:
        return world_size
    return shared_by_nodes(dist.get_process_group_ranks(group), size)


def shared_by_nodes(ranks: Sequence[int], size: int) -> int:
    """The largest number that divides the number of these ranks on each node of `size` processes."""
    nodes = groupby(rank // size for rank in ranks)
    return math.gcd(*(len(list(of_node)) for _, of_node in nodes))


def _chains(
    fragments: Fragments, rank: int, world_size: int, entries: np.ndarray, *, reverse: bool
) -> dict[str, np.ndarray]:
    blocks = blocks_wanted(fragments, world_size, reverse=reverse)
    return chains(fragments, rank, world_size, entries, reverse=reverse) | {"blocks": blocks, "blocks_on_host": blocks}


def _documents(cu_seqlens: Tensor) -> np.ndarray:
    """[N+1] int64 boundaries without empty documents."""
    documents = distinct(checked("cu_seqlens", cu_seqlens).astype(np.int64))
    if len(documents) < 2:
        raise ValueError(f"cu_seqlens = {short(cu_seqlens.tolist())}: no document has a token; give one that has")
    return documents


def _local_layout(documents: np.ndarray, fragments: Fragments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank-local boundaries [N+1] int32, positions within documents [T_local] int64, and each fragment's first and last
    entry [slots, 2]."""
    lengths, firsts, entries, count = [], [], [], 0
    for f in fragments:
        low, high = np.searchsorted(documents, [f.start, f.end - 1], side="right") - 1
        edges = np.clip(documents[low : high + 2], f.start, f.end)
        lengths.append(np.diff(edges))
        firsts.append(edges[:-1] - documents[low : high + 1])  # the position of an entry's first token
        entries.append((count, count + high - low))
        count += high - low + 1
    length = np.concatenate(lengths)
    first = np.concatenate(firsts)
    local = np.concatenate([[0], np.cumsum(length)])
    positions = np.arange(local[-1]) + np.repeat(first - local[:-1], length)
    return local.astype(np.int32), positions, np.array(entries)


def _slots_of_entries(fragments: Fragments, entries: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """For each entry, the slot if its document comes in from another fragment, or goes on into one, else −1; one row
    more than there are entries, so that a table never has a single row."""
    enters = np.full(count + 1, -1, dtype=np.int32)
    leaves = np.full(count + 1, -1, dtype=np.int32)
    for slot, (f, (first, last)) in enumerate(zip(fragments, entries, strict=True)):
        if f.enters:
            enters[first] = slot
        if f.leaves:
            leaves[last] = slot
    return {"enters_slot": enters, "leaves_slot": leaves}
