"""Entries cut into chunks, and into segments, which a scan with few heads runs in parallel."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy import ndarray

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries, ChunkTable, Segments
from titan_linear.ops.layout.tables import table
from titan_linear.ops.layout.tree_tables import PathTables, Tree

CONV_RUN = 256  # tokens per program of the convolution

PROGRAMS = 132  # programs of a scan that fill an H100 or H200: one per multiprocessor
# Tokens of the shortest segment: with shorter ones the fold costs as much as the scan
# saves.
SHORTEST = 512


def with_tables(
    cu_seqlens: ndarray,
    chunks: Iterable[int],
    programs: Iterable[int],
    crossing: ndarray | None = None,
    joined: bool = False,
    tree: Tree | None = None,
    paths: PathTables | None = None,
) -> Boundaries:
    """Build `Boundaries` on the host.

    Args:
        chunks: tokens per chunk of each chunk table that is read.
        programs: number of programs of each scan over one entry.
        crossing: as in `segments_of_length`.
    """
    if tree is not None:
        crossing = (torch.maximum(tree.starts, tree.ends) >= 0)[:-1].numpy()
        joined = True
    return Boundaries(
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(np.diff(cu_seqlens).max(keepdims=True).astype(np.int64)),
        joined=joined,
        chunks={size: chunk_table(cu_seqlens, size) for size in chunks},
        segments={n: _segments(cu_seqlens, n, crossing, joined) for n in programs},
        tree=tree,
        paths=paths,
    )


def chunk_table(cu_seqlens: ndarray, size: int) -> ChunkTable:
    """Cut entries into chunks of `size` tokens.

    An entry without tokens has one chunk, so that its states are written like any other
    entry's. A table has at least two rows, because torch.compile treats a size of 1 as a
    constant.
    """
    counts = np.maximum(-(-np.diff(cu_seqlens) // size), 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    entry = np.repeat(np.arange(len(counts)), counts)
    index = np.stack([entry, np.arange(offsets[-1]) - offsets[entry]], 1)
    if len(index) == 1:
        index = np.append(index, [[-1, 0]], 0)
    return table(ChunkTable, index=index.astype(np.int32), offsets=offsets.astype(np.int32))


def scan_programs(HV: int, V: int) -> int:
    """Return the number of programs of a scan over one entry.

    There is one per head and block of 64 columns of V.
    """
    return HV * max(V // 64, 1)


def segment_length(tokens: int, entries: int, programs: int, joined: bool = False) -> int | None:
    """Return the number of tokens per segment, a multiple of 64; None: cutting does not
    pay.

    Cutting pays from three segments per entry. With two, the shorter scans save only the
    time that it takes to compute the segments' states and transitions. Entries that
    continue on other ranks need these anyway, so two segments pay there.

    Args:
        programs: number of programs of a scan over one entry, HV · V / 64.
    """
    segments = PROGRAMS // max(entries * programs, 1)
    least = 2 if joined else 3
    if segments < least or tokens < least * SHORTEST * entries:
        return None
    share = -(-tokens // (entries * segments))
    return max(-(-share // CHUNK) * CHUNK, SHORTEST)


def _segments(
    cu_seqlens: ndarray, programs: int, crossing: ndarray | None, joined: bool
) -> Segments | None:
    """Return segments, or None if documents of this many tokens are never cut.

    If other documents of this length are cut, but cutting these does not pay, each entry is
    one segment: compiled code then has the same form for all batches.
    """
    tokens = int(cu_seqlens[-1])
    if segment_length(tokens, 1, programs, joined) is None:
        return None
    length = segment_length(tokens, len(cu_seqlens) - 1, programs, joined) or tokens
    return segments_of_length(cu_seqlens, length, crossing)


def segments_of_length(
    cu_seqlens: ndarray, length: int, crossing: ndarray | None = None
) -> Segments:
    """Return segments of `length` tokens; the last segment of an entry may be shorter.

    Args:
        crossing: [N] bool, entries whose state comes from another rank or goes to one;
            default: none.
    """
    # Segments are the chunks of a table with `length` tokens per chunk.
    index, offsets = (t.numpy() for t in chunk_table(cu_seqlens, length))
    entry, number = index[index[:, 0] >= 0].T
    edges = np.append(cu_seqlens[entry] + number * length, cu_seqlens[-1]).astype(np.int32)
    chunks = chunk_table(edges, CHUNK)
    # S_ext and M are read where an entry has several segments, or crosses ranks.
    read = np.diff(offsets) > 1
    if crossing is not None:
        read |= crossing
    return Segments(
        torch.from_numpy(edges),
        *chunks,
        torch.from_numpy(offsets),
        entries=torch.arange(len(entry), dtype=torch.int32),
        wanted=torch.from_numpy(2 * read[entry].astype(np.int32)),
    )
