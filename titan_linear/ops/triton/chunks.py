"""Assignment of programs to chunks of packed entries. No chunk spans two entries, so no
state leaks between them.

In training the tables come with the batch's plan (layout/segments.py). Otherwise
`chunk_table` builds them on the device. The host knows only T and N there, so a grid is
sized by an upper bound. `chunk_index` maps each program to (entry, chunk within the entry),
and surplus programs to entry -1. `chunk_offsets` has each entry's first row in
`chunk_index`. An entry without tokens has one chunk, so its final state and the gradient of
its initial state are written like any other's. Both tables depend on the boundaries alone
and serve all layers of a batch, forward and backward.
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
    """Chunks of N packed entries, as every operator of the recurrences takes them. NT
    bounds their number."""

    cu_seqlens: Tensor  # [N+1] int32
    chunk_index: Tensor  # [NT, 2] int32 (entry or -1, chunk in it)
    chunk_offsets: Tensor  # [N+1] int32, each entry's first row in chunk_index


# The entries whose boundary states are written, [F] int32 (None: all, in order), and what
# is written for each, [F] int32: 0 nothing, 1 S_ext (dS_ext), 2 M too (None: all).
ALL: Pair = (None, None)


def max_chunks(tokens: int, entries: int, chunk_size: int) -> int:
    """Return the largest number of chunks that `entries` entries with `tokens` tokens in
    total can have, which is reached when all but one entry are empty or one token long. It
    is exact for one entry."""
    return max(tokens - 1, 0) // chunk_size + entries


def chunks_of(cu_seqlens: Tensor, tokens: int, size: int = CHUNK) -> Chunks:
    """Build the chunks of a stream of `tokens` tokens with boundaries cu_seqlens [N+1]
    int32, on the device."""
    rows = max_chunks(tokens, cu_seqlens.shape[0] - 1, size)
    return Chunks(cu_seqlens, *chunk_table(cu_seqlens, size, rows))


@triton.jit
def chunk_at(chunks, i_t):
    """Return the first token (64 bits) of chunk i_t and its number of tokens, which is 0
    for a surplus row."""
    cu_seqlens, chunk_index, _ = chunks
    i_n, i_c = tl.load(chunk_index + 2 * i_t), tl.load(chunk_index + 2 * i_t + 1)
    used = i_n >= 0
    start = masked(cu_seqlens + i_n, mask=used) + tl.where(used, i_c * BT, 0)
    end = masked(cu_seqlens + i_n + 1, mask=used)
    return start.to(tl.int64), tl.minimum(end - start, BT)


@triton.jit
def chunk_and_head(chunks, HV, slices):
    """Return the program's slice, its head, the index of its (chunk, head) pair among all
    (64 bits), and the results of `chunk_at`."""
    i_s, tile = tl.program_id(0) % slices, tl.program_id(0) // slices
    start, n = chunk_at(chunks, tile // HV)
    return i_s, tile % HV, tile.to(tl.int64), start, n


@triton.jit
def entry_at(chunks, listed, i_f):
    """Return the first token (64 bits), length and first chunk (64 bits) of the listed
    entry i_f."""
    cu_seqlens, _, chunk_offsets = chunks
    i_n = i_f if listed[0] is None else load_index(listed[0] + i_f)
    start = load_index(cu_seqlens + i_n)
    length = (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32)
    return start, length, load_index(chunk_offsets + i_n)


@triton.jit
def chunks_in(length):
    """Return the number of chunks of `length` tokens."""
    return (length + (BT - 1)) // BT


@triton.jit
def of_one_chunk(chunks, i_t, n):
    """Return the entry of chunk i_t (64 bits), and whether the chunk's n tokens are the
    whole entry."""
    cu_seqlens, chunk_index, _ = chunks
    i_n = load_index(chunk_index + 2 * i_t)
    return i_n, tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n) == n


@triton.jit
def is_wanted(listed, i_f, what):
    """Return whether `what` is to be written for the listed entry i_f."""
    if listed[1] is None:
        return True
    else:
        return tl.load(listed[1] + i_f) >= what


@Kernel
def chunk_table_kernel(cu_seqlens, chunk_index, chunk_offsets, N, NT, BT, BN: constexpr):
    i_n = tl.program_id(0)
    # Count the chunks of all earlier entries; an empty entry has one.
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
    # Write the entry, or -1, and the chunk's number within it.
    for j in range(0, chunks, BN):
        o_c = j + arange(BN)
        m_c = o_c < chunks
        tl.store(chunk_index + 2 * (first + o_c), tl.where(i_n < N, i_n, -1), mask=m_c)
        tl.store(chunk_index + 2 * (first + o_c) + 1, o_c, mask=m_c)


def _empty_table(cu_seqlens: Tensor, chunk_size: int, rows: int) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty(rows, 2), cu_seqlens.new_empty(cu_seqlens.shape)


@operator(fake=_empty_table)
def chunk_table(cu_seqlens: Tensor, chunk_size: int, rows: int) -> tuple[Tensor, Tensor]:
    """Build chunk_index [rows, 2] and chunk_offsets [N+1], both int32, from cu_seqlens
    [N+1] int32. rows is at least `max_chunks`."""
    chunk_index, chunk_offsets = _empty_table(cu_seqlens, chunk_size, rows)
    chunk_table_kernel[(cu_seqlens.shape[0],)](
        cu_seqlens, chunk_index, chunk_offsets, cu_seqlens.shape[0] - 1, rows, chunk_size, BN=256
    )
    return chunk_index, chunk_offsets
