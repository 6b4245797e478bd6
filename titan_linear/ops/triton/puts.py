"""Ranks write rows into each other's memory: one launch per exchange, whichever rows go to whichever ranks.

`ops/cp/mapped.py` has the memory, and says why no rank overwrites what another still reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_linear.ops.triton.launch import Launcher, blocks_of

BLOCK, PROGRAMS = 2048, 128  # words that a program copies at a time, and the largest number of programs


@triton.jit
def _copy(source, target, b, words, BLOCK: tl.constexpr):
    """Copy block b of a row of `words` 4-byte words."""
    o = b * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + o, tl.load(source + o, mask=o < words), mask=o < words)


@triton.jit
def _raise(addresses, number):
    """Write a number to addresses [.] int64 in other GPUs' memory, ordered after all that this rank wrote before."""
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [addresses, number],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _look(addresses):
    """The numbers that other ranks wrote. Whoever sees a rank's number sees all that the rank wrote before it."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def _meet(counters, raise_at, raised_at, tries, RANKS: tl.constexpr, PADDED: tl.constexpr):
    """Tell every rank that this one has written, and wait until all have."""
    exchange = tl.load(counters + 1) + 1
    tl.debug_barrier()  # all threads have read it
    tl.store(counters, 0)
    tl.store(counters + 1, exchange)
    ranks = tl.arange(0, PADDED) % RANKS
    _raise(tl.load(raise_at + ranks), exchange + tl.zeros([PADDED], tl.int32))
    addresses, late, tried = tl.load(raised_at + ranks), 1, tl.cast(0, tl.int64)
    while (late > 0) & (tried != tries):
        late = tl.sum((_look(addresses) - exchange < 0).to(tl.int32))  # by difference: the numbers may wrap around
        tried += 1


@Launcher
@triton.jit(do_not_specialize=["count", "tries"])
def put_kernel(
    puts,  # [., 4] int32: source, row, rank, place
    count,  # number of puts
    x, y,  # the sources, rows of words; y is None if there is one source
    addresses,  # [RANKS] int64: where each rank's memory for this exchange begins
    x_stride, y_stride, x_words, y_words, places,
    counters,  # [2] int32: programs that have written, exchanges so far
    raise_at, raised_at,  # [RANKS] int64: addresses of this rank's number on each rank, and of each rank's number here
    tries,  # how often to look at most; below 0: without limit
    RANKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(tl.maximum(x_words, y_words), BLOCK)
    for t in range(program, count * blocks, programs):
        p_put, b = puts + t // blocks * 4, t % blocks
        row, place = tl.load(p_put + 1).to(tl.int64), tl.load(p_put + 3).to(tl.int64)
        target = tl.load(addresses + tl.load(p_put + 2)).to(tl.pointer_type(tl.int32))
        target = tl.multiple_of(target, 16)
        if tl.load(p_put) == 0:
            _copy(x.to(tl.pointer_type(tl.int32)) + row * x_stride, target + place * x_words, b, x_words, BLOCK)
        elif y is not None:
            target += places * tl.cast(x_words, tl.int64) + place * y_words
            _copy(y.to(tl.pointer_type(tl.int32)) + row * y_stride, target, b, y_words, BLOCK)
    tl.debug_barrier()  # all threads have written
    if tl.atomic_add(counters, 1, sem="acq_rel", scope="sys") == programs - 1:
        tl.debug_barrier()
        _meet(counters, raise_at, raised_at, tries, RANKS, PADDED)


def put(
    puts: Tensor, count: int, sources: tuple[Tensor, ...], addresses: Tensor, places: int, counters: Tensor,
    raise_at: Tensor, raised_at: Tensor, tries: int,
) -> None:  # fmt: skip
    """One exchange. sources: one or two [n, ...], whose rows are contiguous and a multiple of 16 bytes long."""
    x, y = sources if len(sources) == 2 else (sources[0], None)
    ranks, x_words, y_words = addresses.shape[0], words(x), 0 if y is None else words(y)
    blocks = blocks_of(max(x_words, y_words), BLOCK)
    strides = [0 if s is None else s.stride(0) * s.element_size() // 4 for s in (x, y)]
    put_kernel[(max(1, min(PROGRAMS, count * blocks)),)](
        puts, count, x, y, addresses, *strides, x_words, y_words, places, counters, raise_at, raised_at, tries,
        RANKS=ranks, PADDED=1 << (ranks - 1).bit_length(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def words(x: Tensor) -> int:
    """Number of 4-byte words in a row of x."""
    return x.nbytes // x.shape[0] // 4


@Launcher
@triton.jit
def filled_rows_kernel(x, filled, out, row_words, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < row_words
    there = inside & (tl.load(filled + row) != 0)
    begin = row.to(tl.int64) * row_words
    found = tl.load(x.to(tl.pointer_type(tl.int32)) + begin + o, mask=there, other=0)
    tl.store(out.to(tl.pointer_type(tl.int32)) + begin + o, found, mask=inside)


def filled_rows(x: Tensor, filled: Tensor) -> Tensor:
    """A copy of x [n, ...], contiguous, with zeros for the rows where filled [n] int32 is 0: these are not read."""
    out, row_words = torch.empty_like(x), words(x)
    filled_rows_kernel[len(x), blocks_of(row_words, BLOCK)](x, filled, out, row_words, BLOCK=BLOCK, num_warps=4)
    return out


@Launcher
@triton.jit(do_not_specialize=["count"])
def add_rows_kernel(x, y, rows, places, count, x_stride, D, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < D
    for i in range(count):  # one after the other: a row may appear twice
        at = x + tl.load(rows + i) * x_stride + o
        place = tl.cast(i, tl.int64) if places is None else tl.load(places + i).to(tl.int64)
        own, more = tl.load(at, mask=inside), tl.load(y + place * D + o, mask=inside)
        if x.dtype.element_ty.primitive_bitwidth < 32:
            own, more = own.to(tl.float32), more.to(tl.float32)
        tl.store(at, own + more, mask=inside)


def add_rows(x: Tensor, y: Tensor, rows: Tensor, places: Tensor | None, count: int) -> None:
    """x[rows[i]] += y[places[i]] for i < count, in this order; x [T, D] with contiguous rows, y [., D], rows int64,
    places int32 (None: i itself)."""
    D = x.shape[1]
    block = 512
    add_rows_kernel[(blocks_of(D, block),)](x, y, rows, places, count, x.stride(0), D, BLOCK=block, num_warps=4)
