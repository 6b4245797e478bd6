"""What the chunked Triton ops share: the table that maps a chunk to its tokens, built on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64  # tokens per chunk; an entry (document or fragment) always begins a new one


def max_chunks(tokens: int, entries: int) -> int:
    """The most chunks that `entries` entries of `tokens` tokens in all can need: known without cu_seqlens."""
    return (tokens + entries * (CHUNK - 1)) // CHUNK


@triton.jit
def _chunk_table_kernel(cu_seqlens, chunks, first, N, NT, C: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    entry = tl.zeros([BT], tl.int32)  # how many entries end at or before chunk t
    before = tl.zeros([BT], tl.int32)  # chunks in those entries
    total = 0
    for n0 in range(0, N, BN):
        o_n = n0 + tl.arange(0, BN)
        bos = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0)
        eos = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0)
        count = (eos - bos + C - 1) // C
        end = total + tl.cumsum(count, 0)
        passed = (end[None, :] <= o_t[:, None]) & (o_n < N)[None, :]  # [BT, BN]
        entry += tl.sum(passed.to(tl.int32), 1)
        before += tl.sum(tl.where(passed, count[None, :], 0), 1)
        total += tl.sum(count, 0)
    used = o_t < total
    bos = tl.load(cu_seqlens + entry, mask=used, other=0)
    eos = tl.load(cu_seqlens + entry + 1, mask=used, other=0)
    start = bos + (o_t - before) * C
    tl.store(chunks + 2 * o_t, tl.where(used, start, 0), mask=o_t < NT)
    tl.store(chunks + 2 * o_t + 1, tl.where(used, tl.minimum(eos - start, C), 0), mask=o_t < NT)
    tl.store(first + entry, o_t, mask=used & (o_t == before))


def chunk_table(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens [N+1] int32 → chunks [NT, 2] int32 (first token, number of tokens; 0, 0 where unused) and
    first [N] int32, each entry's first chunk (undefined for an entry without tokens)."""
    entries = cu_seqlens.shape[0] - 1
    chunks = cu_seqlens.new_empty(max_chunks(tokens, entries), 2)
    first = cu_seqlens.new_zeros(entries)
    if chunks.shape[0] > 0:
        BT, BN = 64, 64
        grid = (triton.cdiv(chunks.shape[0], BT),)
        _chunk_table_kernel[grid](cu_seqlens, chunks, first, entries, chunks.shape[0], C=CHUNK, BT=BT, BN=BN)
    return chunks, first


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix operands: fp16's exponent cannot hold the factors of fast gates, so fp16 inputs use bf16."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16
