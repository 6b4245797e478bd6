"""How the kernels of the delta rules read and write tokens and states, and what launches pass to them for that.

Streams are [T, heads, dim] with dense heads and any stride between tokens: the mixer's q, k and v are views of one
projection. States are [rows, HV, K, V] in fp32. Entry n's state is in row n or, with an index [N] int32, in row
index[n]; where that is -1 it reads as zeros and is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_linear.ops.runtime.options import States
from titan_linear.ops.triton.launch import Kernel


def blocks_of(n: int, size: int) -> int:
    """⌈n / size⌉. `triton.cdiv` first checks whether either is a kernel's constant, which takes 2 µs."""
    return -(-n // size)


def dense_heads(x: Tensor) -> Tensor:
    """x [T, heads, dim] itself if its heads are dense and its start and token stride are multiples of 16 bytes, as the
    copy engine and vector loads need; x [T, heads] itself if its heads are dense; else a copy."""
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    token, head, number = x.stride()
    dense = number == 1 and (head == x.shape[2] or x.shape[1] == 1)
    aligned = token * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if dense and aligned else x.contiguous()


def ragged_tiles(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """x [T, heads, dim] as the matrix [T, heads·dim], read in tiles of [rows, width] by the copy engine, which reads
    zeros past an entry's end (`fetch_rows`)."""
    return create_ragged_descriptor(x.flatten(1), [rows, width])


def chunk_tiles(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """x [.., dim], contiguous, as the matrix [., dim], read in tiles of [rows, width] by the copy engine."""
    dim = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // dim, dim], [dim, 1], [rows, width])


def empty_states(like: Tensor, rows: int, K: int) -> Tensor:
    """[rows, HV, K, V] fp32 for a stream like v [T, HV, V]."""
    return like.new_empty(rows, like.shape[1], K, like.shape[2], dtype=torch.float32)


def empty_gradients(do, inputs, tiles, chunks, initial, d_final, need_d_initial, *_) -> tuple[Tensor, ...]:
    """What the rules' backward operators return, without computing it."""
    grads = (do.new_empty(0) if given is None else given.new_empty(given.shape) for given in inputs)
    return *grads, do.new_empty(States(*initial).values.shape if need_d_initial else 0, dtype=torch.float32)


def empty_boundary_gradients(do, tiles, chunks, entries, wanted) -> Tensor:
    """dS_ext of `entries`, not yet computed; the first of the tiles is [NT, HV, K, .]."""
    return empty_states(do, entries.shape[0], tiles[0].shape[2])


@Kernel
def sum_groups_kernel(x, y, n, R: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    """B of y's n numbers, each the sum of R of x's."""
    o_y = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    b_y = tl.zeros([B], tl.float32)
    for r in tl.static_range(R):
        b_y += tl.load(x + o_y // K * (R * K) + (o_y % K + r * K), mask=o_y < n, other=0.0).to(tl.float32)
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=o_y < n)


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """x [T, HV, K] summed over the value heads of each key head, in fp32, as like [T, H, K]."""
    T, H, K = like.shape
    y, B = like.new_empty(T, H, K), 2048
    sum_groups_kernel[(blocks_of(T * H * K, B),)](x, y, T * H * K, R=x.shape[1] // H, K=K, B=B)
    return y


@triton.jit
def load_rows(x, start, rows, stride, column, BT: tl.constexpr, BD: tl.constexpr):
    """A [BT, BD] tile of a matrix from token `start` (64 bits) on: its first `rows` rows, then zeros."""
    o_c, o_d = tl.arange(0, BT)[:, None], tl.arange(0, BD)[None, :]
    return tl.load(x + start * stride + column + (o_c * stride + o_d), mask=o_c < rows, other=0.0)


@triton.jit
def fetch_rows(desc, start, length, row, column):
    """A tile of an entry [length, .] from its token `row` on, by the copy engine, which reads zeros past its end.
    start: the entry's first token in the stream."""
    return load_ragged(desc, start.to(tl.int32), length, [row, column])


@triton.jit
def fetch_tile(desc, i_p, BT: tl.constexpr):
    """The BT rows of one chunk and head, of `chunk_tiles`."""
    return desc.load([(i_p * BT).to(tl.int32), 0])


@triton.jit
def store_rows(x, b_x, start, rows, stride, column, BT: tl.constexpr, BD: tl.constexpr):
    o_c, o_d = tl.arange(0, BT)[:, None], tl.arange(0, BD)[None, :]
    tl.store(x + start * stride + column + (o_c * stride + o_d), b_x.to(x.dtype.element_ty), mask=o_c < rows)


@triton.jit
def load_state(states, index, i_n, stride, o_s):
    """Elements o_s of entry i_n's state in fp32; a row of states has `stride` elements."""
    if index is None:
        return tl.load(states + i_n * stride + o_s).to(tl.float32)
    else:
        row = tl.load(index + i_n).to(tl.int64)
        return tl.load(states + row * stride + o_s, mask=(o_s >= 0) & (row >= 0), other=0.0).to(tl.float32)


@triton.jit
def store_state(states, index, i_n, stride, o_s, b_s):
    if index is None:
        tl.store(states + i_n * stride + o_s, b_s)
    else:
        row = tl.load(index + i_n).to(tl.int64)
        tl.store(states + row * stride + o_s, b_s, mask=(o_s >= 0) & (row >= 0))
