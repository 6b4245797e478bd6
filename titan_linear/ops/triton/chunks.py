"""Which program works on which chunk of which packed document, decided on the device.

The host knows only T and N, so a grid is an upper bound; the table maps each program to (entry, chunk within the
entry), and the surplus to entry -1. An empty entry has one chunk without tokens, so that its final state and the
gradient of its initial state are written like any other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64  # tokens of a chunk of the delta rule


def max_chunks(tokens: int, entries: int, chunk_size: int) -> int:
    """The most chunks that `entries` documents of `tokens` tokens in all can have: all but one of them empty or of one
    token. Exact for one document."""
    return max(tokens - 1, 0) // chunk_size + entries


@triton.jit
def locate(table, cu_seqlens, i_t, BT: tl.constexpr):
    """First token of chunk i_t (64 bits) and how many it has; none for a surplus row."""
    i_n, i_c = tl.load(table + 2 * i_t), tl.load(table + 2 * i_t + 1)
    used = i_n >= 0
    start = tl.load(cu_seqlens + i_n, mask=used, other=0) + tl.where(used, i_c * BT, 0)
    end = tl.load(cu_seqlens + i_n + 1, mask=used, other=0)
    return start.to(tl.int64), tl.minimum(end - start, BT)


@triton.jit
def chunk_table_kernel(cu_seqlens, table, offsets, N, NT, BT, BN: tl.constexpr):
    i_n = tl.program_id(0)
    first = 0
    for j in range(0, i_n, BN):
        o_n = j + tl.arange(0, BN)
        m_n = o_n < i_n
        lengths = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0) - tl.load(cu_seqlens + o_n, mask=m_n, other=0)
        first += tl.sum(tl.where(m_n, tl.maximum(tl.cdiv(lengths, BT), 1), 0))
    tl.store(offsets + i_n, first)
    if i_n < N:
        length = tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n)
        chunks = tl.maximum(tl.cdiv(length, BT), 1)
    else:  # the program after the last entry marks the surplus
        chunks = NT - first
    for j in range(0, chunks, BN):
        o_c = j + tl.arange(0, BN)
        m_c = o_c < chunks
        tl.store(table + 2 * (first + o_c), tl.where(i_n < N, i_n, -1), mask=m_c)
        tl.store(table + 2 * (first + o_c) + 1, o_c, mask=m_c)


def chunk_table(cu_seqlens: torch.Tensor, chunk_size: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlens [N+1] int32 -> table [rows, 2] (entry or -1, chunk in it), offsets [N+1] (an entry's first row).

    rows: `max_chunks`, or more.
    """
    entries = cu_seqlens.numel() - 1
    table = cu_seqlens.new_empty(rows, 2)
    offsets = torch.empty_like(cu_seqlens)
    chunk_table_kernel[(entries + 1,)](cu_seqlens, table, offsets, entries, rows, chunk_size, BN=256)
    return table, offsets
