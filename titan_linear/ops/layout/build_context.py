"""From the documents of a packed stream to a `CPContext`: the cut among ranks, and all tables that layers need."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

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
from titan_linear.ops.layout.context import SOFTMAX_METHODS, CPContext
from titan_linear.ops.layout.fragments import LAYOUTS, Fragments, HaloRoutes, cut, halo_routes, owned
from titan_linear.ops.layout.rectangles import rectangles
from titan_linear.ops.layout.spans import PAIRS_PER_ROW, gathered, span_tables


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
    pairs_per_row: int = PAIRS_PER_ROW,
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
        pairs_per_row: query-key pairs that a rank computes in the time in which a row of K|V or of queries travels:
            what all-gather attention evens out for. 0: ranks have equal work, whatever travels for it.

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
    allgather = "allgather" in attention
    slots = _slots_of_entries(mine, entries, len(local) - 1)
    crossing = ((slots["enters_slot"] >= 0) | (slots["leaves_slot"] >= 0))[:-1]
    of_all = {"node_size": np.array([node_size]), "zigzag": np.array([layout == "zigzag"])}
    tables = {
        "tokens": (_OfTokens, {"position_ids": positions, **slots}),
        "forward": (Chains, _chains(fragments, rank, world_size, entries, reverse=False) | of_all),
        "reverse": (Chains, _chains(fragments, rank, world_size, entries, reverse=True) | of_all),
        **(span_tables(fragments, documents, rank, world_size, pairs_per_row, causal=True) if allgather else {}),
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
    named = {"group": group, "group_name": "" if group is None else group.group_name}
    for_nodes = None
    if "ulysses+ring" in attention and world_size > 1:
        node, nodes = rank // node_size, world_size // node_size
        streams = {"num_streams": num_streams, "layout": layout, "device": boundaries.cu_seqlens.device}
        as_ranks = build_cp_context(
            torch.from_numpy(documents), rank=node, world_size=nodes, attention=("ring",), **streams
        )
        for_nodes = replace(as_ranks, **named)
    return CPContext(
        **named,
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
        for_ring=rectangles(fragments, rank, world_size, causal=True) if "ring" in attention else None,
        for_allgather=gathered(moved) if allgather else None,
        for_nodes=for_nodes,
        pairs_per_row=pairs_per_row,
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
