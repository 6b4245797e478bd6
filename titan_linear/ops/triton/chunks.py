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

from titan_linear.ops.layout.boundaries import CHUNK
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.triton.launch import Kernel


class Chunks(NamedTuple):
    """The chunks of N packed entries, as every operator of the recurrences takes them; NT bounds their number."""

    cu_seqlens: Tensor  # [N+1] int32
    chunk_index: Tensor  # [NT, 2] int32 (entry or -1, chunk in it)
    chunk_offsets: Tensor  # [N+1] int32, each entry's first row in chunk_index


def max_chunks(tokens: int, entries: int, chunk_size: int) -> int:
    """The largest number of chunks that `entries` entries with `tokens` tokens in total can have: all but one entry are
    then empty or one token long. Exact for one entry."""
    return max(tokens - 1, 0) // chunk_size + entries


def chunks_of(cu_seqlens: Tensor, tokens: int) -> Chunks:
    """The chunks of a stream of `tokens` tokens with boundaries cu_seqlens [N+1] int32, on the device."""
    rows = max_chunks(tokens, cu_seqlens.shape[0] - 1, CHUNK)
    return Chunks(cu_seqlens, *chunk_table(cu_seqlens, CHUNK, rows))


@triton.jit
def locate(chunk_index, cu_seqlens, i_t, BT: tl.constexpr):
    """First token (64 bits) of chunk i_t and its number of tokens, 0 for a surplus row."""
    i_n, i_c = tl.load(chunk_index + 2 * i_t), tl.load(chunk_index + 2 * i_t + 1)
    used = i_n >= 0
    start = tl.load(cu_seqlens + i_n, mask=used, other=0) + tl.where(used, i_c * BT, 0)
    end = tl.load(cu_seqlens + i_n + 1, mask=used, other=0)
    return start.to(tl.int64), tl.minimum(end - start, BT)


@triton.jit
def locate_entry(cu_seqlens, chunk_offsets, i_n):
    """First token (64 bits), length, and first chunk (64 bits) of entry i_n."""
    start = tl.load(cu_seqlens + i_n).to(tl.int64)
    return start, (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32), tl.load(chunk_offsets + i_n).to(tl.int64)


@Kernel
def chunk_table_kernel(cu_seqlens, chunk_index, chunk_offsets, N, NT, BT, BN: tl.constexpr):
    i_n = tl.program_id(0)
    first = 0
    for j in range(0, i_n, BN):
        o_n = j + tl.arange(0, BN)
        m_n = o_n < i_n
        lengths = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0) - tl.load(cu_seqlens + o_n, mask=m_n, other=0)
        first += tl.sum(tl.where(m_n, tl.maximum(tl.cdiv(lengths, BT), 1), 0))
    tl.store(chunk_offsets + i_n, first)
    if i_n < N:
        length = tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n)
        chunks = tl.maximum(tl.cdiv(length, BT), 1)
    else:  # the program after the last entry marks the surplus
        chunks = NT - first
    for j in range(0, chunks, BN):
        o_c = j + tl.arange(0, BN)
        m_c = o_c < chunks
        tl.store(chunk_index + 2 * (first + o_c), tl.where(i_n < N, i_n, -1), mask=m_c)
        tl.store(chunk_index + 2 * (first + o_c) + 1, o_c, mask=m_c)


@operator
def chunk_table(cu_seqlens: Tensor, chunk_size: int, rows: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens [N+1] int32 -> chunk_index [rows, 2], chunk_offsets [N+1], both int32; rows: `max_chunks`, or more."""
    chunk_index, chunk_offsets = cu_seqlens.new_empty(rows, 2), cu_seqlens.new_empty(cu_seqlens.shape)
    chunk_table_kernel[(cu_seqlens.shape[0],)](
        cu_seqlens, chunk_index, chunk_offsets, cu_seqlens.shape[0] - 1, rows, chunk_size, BN=256
    )
    return chunk_index, chunk_offsets


@register_fake(chunk_table)
def _(cu_seqlens, chunk_size, rows):
    return cu_seqlens.new_empty(rows, 2), cu_seqlens.new_empty(cu_seqlens.shape)
