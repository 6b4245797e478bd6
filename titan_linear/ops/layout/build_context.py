"""Construction of a `CPContext` from the documents of a packed stream.

It cuts the stream among ranks, and computes all tables that layers need.
"""

import math
import os
from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.layout.chains import chains
from titan_linear.ops.layout.context import SOFTMAX_METHODS, CPContext, SoftmaxTables, TokenTables
from titan_linear.ops.layout.documents import check_copy, checked, distinct, short
from titan_linear.ops.layout.fragments import (
    LAYOUTS,
    Cut,
    Fragments,
    RankGroup,
    cut_streams,
    halo_routes,
    owned,
)
from titan_linear.ops.layout.rectangles import rectangles
from titan_linear.ops.layout.segments import CONV_RUN, with_tables
from titan_linear.ops.layout.spans import gathered_spans
from titan_linear.ops.layout.tables import to_device
from titan_linear.ops.layout.tree_tables import PathTables, Tree, paths_of, tree_of


# A context built under inference mode must also serve training.
@torch.inference_mode(False)
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
    parents: Tensor | Sequence[int] | None = None,
    node_size: int | None = None,
    device: torch.device | None = None,
    programs: Sequence[int] = (),
    stream_programs: Sequence[int] | None = None,
    attention: Collection[str] = SOFTMAX_METHODS,
) -> CPContext:
    """Cut a packed stream among the W ranks of a group, and derive its layers' tables.

    Args:
        cu_seqlens: [N+1] int, GLOBAL boundaries of the documents, from 0 to the length of
            the whole stream. Padding is a separate document at the end.
        group: the context-parallel process group. With `rank` and `world_size` but no
            group, the result only describes the cut; no operation can communicate with it.
        conv1d_kernel_size: width of the short convolutions; `causal_conv1d` checks that its
            weight has this width.
        layout: "contiguous" (rank r owns [r·T/W, (r+1)·T/W)) or "zigzag" (2W blocks; rank r
            owns blocks r and 2W−1−r, in that order, never merged).
        cu_seqlens_cpu: the same values on the CPU; avoids a device-to-host copy if
            cu_seqlens is on a GPU.
        rank, world_size: this rank and the number of ranks, W; by default those in `group`.
        num_streams: number of streams of equal length that `cu_seqlens` describes, one
            after the other. Each is cut separately, and a rank's tokens are its part of the
            first stream, then of the second, and so on.
        parents: [N] int, a tensor or a list, for prefix trees (prefix_trees.py): the segment of
            `cu_seqlens` that each segment continues, which must come before it, or −1.
            Several segments may continue the same one; a document is a path. Ring methods
            do not support trees.
        node_size: ranks of the group per node, a divisor of W. Default: as torchrun started
            them, else W.
        device: device of the tokens; default: the device of `cu_seqlens`.
        programs: `scan_programs` of the scans to come; long entries are cut into segments
            for each of them.
        stream_programs: the same for scans over the whole stream with a part of the heads
            (cp_method "ulysses"), which also read a chunk table of the stream; None: there
            are no such scans.
        attention: methods of softmax attention to plan for; (): none.

    Raises:
        ValueError: boundaries that do not start at 0, that decrease, or that differ from
            cu_seqlens_cpu; an unknown layout or method; neither a group nor a rank below
            world_size; num_streams or conv1d_kernel_size below 1; a stream length that is
            not divisible by W (2W for zigzag); streams whose edges are not document
            boundaries; parents that do not form trees of segments with tokens.
    """
    # Check the arguments.
    ranks = _rank_group(group, rank, world_size, node_size)
    _check_options(layout, num_streams, conv1d_kernel_size, attention)
    if cu_seqlens_cpu is not None:
        check_copy(cu_seqlens, cu_seqlens_cpu)
    documents = _documents(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    if parents is not None and len(documents) != len(cu_seqlens):
        raise ValueError(
            "cu_seqlens has segments without tokens, which cannot have or be parents; leave them out"
        )
    # Cut the streams, derive the tables on the CPU, and move them to the device in one
    # copy.
    cut = cut_streams(documents, num_streams, ranks.world_size, layout, parents)
    tables = _token_tables(cut, ranks, conv1d_kernel_size, programs, stream_programs)
    context = CPContext(ranks, cut, tables, _softmax_tables(cut, ranks, attention))
    return to_device(context, torch.device(device or cu_seqlens.device))


def tree_context(
    parents: Tensor | Sequence[int] | None,
    cu_seqlens: Tensor | None,
    cp_context: CPContext | None,
    device: torch.device,
) -> tuple[Tensor | None, CPContext | None]:
    """Return the `cu_seqlens` and `cp_context` of a call on one device.

    With `parents`, the context is the one of its prefix trees and replaces `cu_seqlens`.
    """
    if parents is None:
        return cu_seqlens, cp_context
    if cu_seqlens is None or cp_context is not None:
        raise ValueError(
            "parents comes with cu_seqlens alone; a cp_context has its own, from build_cp_context"
        )
    return None, build_cp_context(cu_seqlens, parents=parents, rank=0, world_size=1, device=device)


def _rank_group(
    group: dist.ProcessGroup | None, rank: int | None, world_size: int | None, node_size: int | None
) -> RankGroup:
    """Return the group and this rank's place in it.

    Raises ValueError if rank, world size or node size are missing or do not fit.
    """
    if group is not None:
        rank = group.rank()
        world_size = group.size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(
            f"rank = {rank}, world_size = {world_size}; give a group, or both with 0 <= rank < world_size"
        )
    node_size = ranks_per_node(group, world_size) if node_size is None else node_size
    if node_size < 1 or world_size % node_size:
        raise ValueError(
            f"node_size = {node_size}; give a divisor of the number of ranks, {world_size}, or leave it out"
        )
    return RankGroup(group, "" if group is None else group.group_name, rank, world_size, node_size)


def _check_options(
    layout: str, num_streams: int, conv1d_kernel_size: int | None, attention: Collection[str]
) -> None:
    # Each option by itself; the stream's length is checked when it is cut.
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout = {layout!r} is unknown; use one of {', '.join(map(repr, LAYOUTS))}"
        )
    if num_streams < 1:
        raise ValueError(
            f"num_streams = {num_streams}; give the number of streams in cu_seqlens, 1 or more"
        )
    if conv1d_kernel_size is not None and conv1d_kernel_size < 1:
        raise ValueError(
            f"conv1d_kernel_size = {conv1d_kernel_size}; give the convolutions' width, or leave it out"
        )
    if unknown := [method for method in attention if method not in SOFTMAX_METHODS]:
        raise ValueError(
            f"attention has {unknown}; give methods of {', '.join(map(repr, SOFTMAX_METHODS))}, or none"
        )


def _token_tables(
    cut: Cut,
    ranks: RankGroup,
    conv1d_kernel_size: int | None,
    programs: Sequence[int],
    stream_programs: Sequence[int] | None,
) -> TokenTables:
    # Boundaries and positions of this rank's tokens, and its part in the exchange of
    # states.
    local, positions, entries = _local_layout(cut, owned(cut.fragments, ranks.rank))
    forward, reverse = (
        chains(cut.fragments, ranks, entries, reverse=reverse) for reverse in (False, True)
    )
    crossing = (torch.maximum(forward.entry_slots, reverse.entry_slots) >= 0)[:-1].numpy()
    tree, whole = _trees(cut, ranks.rank)
    # Boundaries of the whole stream, for methods that exchange heads.
    documents = halo = None
    # Otherwise this rank's entries are the documents.
    if ranks.world_size > 1 or cut.layout != "contiguous":
        sizes = () if stream_programs is None else (CHUNK,)
        boundaries = cut.documents.astype(np.int32)
        documents = with_tables(boundaries, sizes, stream_programs or (), **whole)
    else:
        tree = whole
    if conv1d_kernel_size is not None:
        halo = halo_routes(cut, ranks.rank, ranks.world_size, conv1d_kernel_size - 1)
    # Collect the tables; entries that cross a cut are marked for the segments.
    return TokenTables(
        torch.from_numpy(positions),
        with_tables(
            local, (CHUNK, CONV_RUN), programs, crossing, joined=ranks.world_size > 1, **tree
        ),
        documents,
        forward,
        reverse,
        halo,
        conv1d_kernel_size,
    )


def _trees(cut: Cut, rank: int) -> tuple[dict[str, Tree], dict[str, Tree | PathTables]]:
    """Return the tables of prefix trees in `Boundaries`.

    The first dictionary is for this rank's entries, the second for a whole stream on one
    rank.
    """
    trees = cut.trees
    size = cut.fragment_length
    if not trees.joined:
        return {}, {}
    own = {"tree": tree_of(trees, cut.owners, size, rank)}
    whole = tree_of(trees, np.zeros_like(cut.owners), size, 0)
    return own, {"tree": whole, "paths": paths_of(trees)}


def _softmax_tables(cut: Cut, ranks: RankGroup, methods: Collection[str]) -> SoftmaxTables:
    place = ranks.rank, ranks.world_size
    ring = spans = nodes = None
    if cut.trees.joined:
        methods = [method for method in methods if "ring" not in method]
    if "ring" in methods:
        ring = rectangles(cut.fragments, *place, causal=True)
    if "allgather" in methods:
        spans = gathered_spans(cut, *place, causal=True)
    if "ulysses+ring" in methods and ranks.world_size > 1:
        nodes = _node_context(cut, ranks)
    return SoftmaxTables(ring, spans, nodes)


def _node_context(cut: Cut, ranks: RankGroup) -> CPContext:
    """Return the context in which each node counts as one rank."""
    node = ranks.rank // ranks.node_size
    count = ranks.world_size // ranks.node_size
    nodes = RankGroup(ranks.group, ranks.group_name, node, count, node_size=count)
    cut = cut_streams(cut.documents, cut.num_streams, count, cut.layout)
    tables = _token_tables(cut, nodes, conv1d_kernel_size=None, programs=(), stream_programs=None)
    return CPContext(nodes, cut, tables, _softmax_tables(cut, nodes, ("ring",)))


def ranks_per_node(group: dist.ProcessGroup | None, world_size: int) -> int:
    """Return how many neighboring ranks of a group share a node.

    torchrun's environment decides; without it, return the number of all ranks. If nodes
    hold different numbers of the group's ranks, return the largest number that divides all
    of them.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    # Groups simulated in one process have their own node size.
    if hasattr(group, "node_size"):
        return group.node_size
    if not size or group is None:
        return world_size
    return shared_by_nodes(dist.get_process_group_ranks(group), size)


def shared_by_nodes(ranks: Sequence[int], size: int) -> int:
    """Return the largest number that divides the number of these ranks on each node.

    A node has `size` processes.
    """
    nodes = groupby(rank // size for rank in ranks)
    return math.gcd(*(len(list(of_node)) for _, of_node in nodes))


def _documents(cu_seqlens: Tensor) -> np.ndarray:
    """Return boundaries [N+1] int64 without empty documents."""
    documents = distinct(checked("cu_seqlens", cu_seqlens).astype(np.int64))
    if len(documents) < 2:
        raise ValueError(
            f"cu_seqlens = {short(cu_seqlens.tolist())}: no document has a token; give one that has"
        )
    return documents


def _local_layout(cut: Cut, fragments: Fragments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return this rank's boundaries, positions and entries.

    Returns:
        rank-local boundaries [N+1] int32, positions within documents [T_local] int64, and
            each fragment's first and last entry [slots, 2].
    """
    documents = cut.documents
    all_positions = cut.trees.positions
    lengths = []
    positions = []
    entries = []
    count = 0
    for f in fragments:
        # The fragment's first and last document; each one's part in the fragment is an
        # entry.
        low, high = np.searchsorted(documents, [f.start, f.end - 1], side="right") - 1
        lengths.append(np.diff(np.clip(documents[low : high + 2], f.start, f.end)))
        positions.append(all_positions[f.start : f.end])
        entries.append((count, count + high - low))
        count += high - low + 1
    local = np.cumsum([0, *np.concatenate(lengths)], dtype=np.int32)
    return local, np.concatenate(positions), np.array(entries)
