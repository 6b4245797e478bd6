"""Which program works on which chunk of which packed entry. No chunk spans two entries, so that no state leaks.

In training the tables come with the batch's plan (layout/segments.py); `chunk_table` makes them on
the device where there is none: the host knows only T and N there, so a grid is sized by an upper bound.
`chunk_index` maps each program to (entry, chunk within the entry), and surplus programs to entry -1; `chunk_offsets`
has each entry's first row in it. An entry without tokens has one chunk, so that its final state and the gradient of its
initial state are written like any other's. Both tables depend on the boundaries alone, and serve all layers of a batch,
forward and backward.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.tiles import BT, Kernel, Pair, arange, load_index, masked


class Chunks(NamedTuple):
    """The chunks of N packed entries, as every operator of the recurrences takes them; NT bounds their number."""

    cu_seqlens: Tensor  # [N+1] int32
    chunk_index: Tensor  # [NT, 2] int32 (entry or -1, chunk in it)
    chunk_offsets: Tensor  # [N+1] int32, each entry's first row in chunk_index


# The entries at whose boundaries kernels write states, [F] int32 (None: all, in order), and what is written for each,
# [F] int32: 0 nothing, 1 S_ext (dS_ext), 2 M too (None: all).
ALL: Pair = (None, None)


def listed_entries(listed: Pair, chunks: tuple[Tensor, ...]) -> int:
    entries, _ = listed
    cu_seqlens, *_ = chunks
    return len(cu_seqlens) - 1 if entries is None else len(entries)


def max_chunks(tokens: int, entries: int, chunk_size: int) -> int:
    """The largest number of chunks that `entries` entries with `tokens` tokens in total can have: all but one entry are
    then empty or one token long. Exact for one entry."""
    return max(tokens - 1, 0) // chunk_size + entries


def chunks_of(cu_seqlens: Tensor, tokens: int, size: int = CHUNK) -> Chunks:
    """The chunks of a stream of `tokens` tokens with boundaries cu_seqlens [N+1] int32, on the device."""
    rows = max_chunks(tokens, cu_seqlens.shape[0] - 1, size)
    return Chunks(cu_seqlens, *chunk_table(cu_seqlens, size, rows))


@triton.jit
def chunk_at(chunks, i_t):
    """First token (64 bits) of chunk i_t of `Chunks` and its number of tokens, 0 for a surplus row."""
    cu_seqlens, chunk_index, _ = chunks
    i_n, i_c = tl.load(chunk_index + 2 * i_t), tl.load(chunk_index + 2 * i_t + 1)
    used = i_n >= 0
    start = masked(cu_seqlens + i_n, mask=used) + tl.where(used, i_c * BT, 0)
    end = masked(cu_seqlens + i_n + 1, mask=used)
    return start.to(tl.int64), tl.minimum(end - start, BT)


@triton.jit
def chunk_and_head(chunks, HV, slices):
    """A program's slice of a chunk and head, the head, where chunk and head stand among all (64 bits), and as
    `chunk_at`."""
    i_s, tile = tl.program_id(0) % slices, tl.program_id(0) // slices
    start, n = chunk_at(chunks, tile // HV)
    return i_s, tile % HV, tile.to(tl.int64), start, n


@triton.jit
def entry_at(chunks, listed, i_f):
    """First token (64 bits), length, and first chunk (64 bits) of the listed entry i_f."""
    cu_seqlens, _, chunk_offsets = chunks
    i_n = i_f if listed[0] is None else load_index(listed[0] + i_f)
    start = load_index(cu_seqlens + i_n)
    length = (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32)
    return start, length, load_index(chunk_offsets + i_n)


@triton.jit
def chunks_in(length):
    """The chunks of so many tokens."""
    return (length + (BT - 1)) // BT


@triton.jit
def of_one_chunk(chunks, i_t, n):
    """The entry of chunk i_t (64 bits), and whether its tokens are the chunk's n."""
    cu_seqlens, chunk_index, _ = chunks
    i_n = load_index(chunk_index + 2 * i_t)
    return i_n, tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n) == n


@triton.jit
def is_wanted(listed, i_f, what):
    """Whether `what` is to be written for the listed entry i_f."""
    if listed[1] is None:
        return True
    else:
        return tl.load(listed[1] + i_f) >= what


@Kernel
def chunk_table_kernel(cu_seqlens, chunk_index, chunk_offsets, N, NT, BT, BN: constexpr):
    i_n = tl.program_id(0)
    first = 0
    for j in range(0, i_n, BN):
        o_n = j + arange(BN)
        m_n = o_n < i_n
        lengths = masked(cu_seqlens + o_n + 1, mask=m_n) - masked(cu_seqlens + o_n, mask=m_n)
        first += tl.sum(tl.where(m_n, tl.maximum(tl.cdiv(lengths, BT), 1), 0))
    tl.store(chunk_offsets + i_n, first)
    if i_n < N:
        length = tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n)
        chunks = tl.maximum(tl.cdiv(length, BT), 1)
    else:  # the program after the last entry marks the surplus
        chunks = NT - first
    for j in range(0, chunks, BN):
        o_c = j + arange(BN)
        m_c = o_c < chunks
        tl.store(chunk_index + 2 * (first + o_c), tl.where(i_n < N, i_n, -1), mask=m_c)
        tl.store(chunk_index + 2 * (first + o_c) + 1, o_c, mask=m_c)


def _empty_table(cu_seqlens: Tensor, chunk_size: int, rows: int) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty(rows, 2), cu_seqlens.new_empty(cu_seqlens.shape)


@operator(fake=_empty_table)
def chunk_table(cu_seqlens: Tensor, chunk_size: int, rows: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens [N+1] int32 -> chunk_index [rows, 2], chunk_offsets [N+1], both int32; rows: `max_chunks`, or more."""
    chunk_index, chunk_offsets = _empty_table(cu_seqlens, chunk_size, rows)
    chunk_table_kernel[(cu_seqlens.shape[0],)](
        cu_seqlens, chunk_index, chunk_offsets, cu_seqlens.shape[0] - 1, rows, chunk_size, BN=256
    )
    return chunk_index, chunk_offsets
