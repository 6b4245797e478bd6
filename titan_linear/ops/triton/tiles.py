"""What kernels share: how they are launched, and how they read and write tokens, states and gates.

By itself Triton compiles a kernel at its first launch, which a step then waits for: for one kernel after the other.
Here kernels can be compiled before they are launched, many at once.

Streams are [T, heads, dim] with dense heads and any stride between tokens: the mixer's q, k and v are views of one
projection. States are [rows, HV, K, V] in fp32. Entry n's state is in row n or, with an index [N] int32, in row
index[n]; where that is -1 it reads as zeros and is not written.

A kernel's constants are annotated; Triton finds those of the functions that it calls from what it passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, le
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_linear.ops.layout.boundaries import CHUNK

BT = constexpr(CHUNK)
LOG2E = constexpr(1.4426950408889634)
GRID_LIMITS = 2**31 - 1, 65_535, 65_535  # programs in each dimension of CUDA's grids


# --- Launches --------------------------------------------------------------------------------------------------------


class Kernel:
    """Decorates a kernel, instead of `jit`. Arguments may be tuples, but not of descriptors, which Triton does not
    find in them; a named one costs a launch half a microsecond, a plain one nothing. A launch whose first argument is
    on the meta device, or begins with a tensor that is, only compiles the kernel."""

    def __init__(self, fn: Callable[..., None], jit: Callable[..., Any] = triton.jit):
        self.jitted = jit(fn)
        self.__name__, self.__doc__ = fn.__name__, fn.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        # What grows with tokens, documents or heads belongs in the first dimension.
        assert all(map(le, grid, GRID_LIMITS)), f"{self.__name__}: the grid {grid} is too large"
        x, *_ = args
        while isinstance(x, tuple):
            x = x[0]
        on_meta = getattr(x, "base", x).is_meta  # base: of a descriptor
        self.jitted.run(*args, grid=grid, warmup=on_meta, **kwargs)


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Compile kernels that are launched inside, on the meta device, side by side in threads; the end waits for them.
    device: the GPU that they are compiled for, and loaded to."""
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        with triton.AsyncCompileMode(pool) as ahead:
            yield
        kernels = [kernel.result() for kernel in ahead.future_kernels.values()]
        # loads a kernel; Triton 3.6 also compiles its launcher, in C
        list(pool.map(attrgetter("run"), kernels))


# --- What launches pass ----------------------------------------------------------------------------------------------


Pair = tuple[Tensor | None, Tensor | None]
NONE: Pair = (None, None)  # states, and the row of each entry's among them


def rows(x: Tensor) -> tuple[Tensor, int]:
    """A stream, as kernels read it: x [T, heads, dim] or [T, heads], heads dense, and the stride between tokens."""
    x = dense_heads(x)
    return x, x.stride(0)


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


def ragged_tiles(x: Tensor, width: int) -> TensorDescriptor:
    """x [T, heads, dim] as the matrix [T, heads·dim], read in tiles of a chunk's tokens and `width` columns by the copy
    engine, which reads zeros past an entry's end (`fetch_rows`)."""
    return create_ragged_descriptor(dense_heads(x).flatten(1), [CHUNK, width])


def chunk_tiles(x: Tensor, width: int = CHUNK, rows: int = CHUNK) -> TensorDescriptor:
    """x [.., dim], contiguous, as the matrix [., dim], read in tiles of [rows, width] by the copy engine."""
    dim = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // dim, dim], [dim, 1], [rows, width])


def empty_states(like: Tensor, rows: int, K: int) -> Tensor:
    """[rows, HV, K, V] fp32 for a stream like v [T, HV, V]."""
    return like.new_empty(rows, like.shape[1], K, like.shape[2], dtype=torch.float32)


# --- In kernels: numbers ---------------------------------------------------------------------------------------------


@triton.jit
def arange(n):
    return tl.arange(0, n)


@triton.jit
def program():
    """A program's number, in 64 bits."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def zeros(R, C=None):
    """[R] or [R, C] in fp32."""
    return tl.zeros([R] if C is None else [R, C], tl.float32)


@triton.jit
def wide(x):
    return x.to(tl.float32)


@triton.jit
def masked(p, mask):
    """Numbers; zeros where the mask is 0."""
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def load_index(p):
    """In 64 bits."""
    return tl.load(p).to(tl.int64)


@Kernel
def sum_groups_kernel(x, y, n, R: constexpr, K: constexpr, B: constexpr):
    """B of y's n numbers, each the sum of R of x's."""
    o_y = program() * B + arange(B)
    b_y = zeros(B)
    for r in tl.static_range(R):
        b_y += load_wide(x + o_y // K * (R * K) + (o_y % K + r * K), o_y < n)
    tl.store(y + o_y, b_y, mask=o_y < n)


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """x [T, HV, K] summed over the value heads of each key head, in fp32, as like [T, H, K]."""
    T, H, K = like.shape
    y, B = like.new_empty(T, H, K), 2048
    sum_groups_kernel[(blocks_of(T * H * K, B),)](x, y, T * H * K, R=x.shape[1] // H, K=K, B=B)
    return y


@triton.jit
def indices(R, C):
    """The row and the column of each place in a tile: [R, 1] and [1, C]."""
    return arange(R)[:, None], arange(C)[None, :]


@triton.jit
def place_in_row(slices, HV, i_p=None):
    """The place of program i_p (None: this one): its slice of V or M, its entry and head together (64 bits), its
    entry, and its head (32 bits)."""
    if i_p is None:
        i_p = tl.program_id(0)
    i_v, i_nh = i_p % slices, (i_p // slices).to(tl.int64)
    return i_v, i_nh, i_nh // HV, (i_nh % HV).to(tl.int32)


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc), summed in fp32; fp32 operands as three products of tf32 parts."""
    return tl.dot(a, b, acc=acc, input_precision="tf32x3")


@triton.jit
def dot_ieee(a, b, acc=None):
    """As `dot`; fp32 operands are multiplied as fp32."""
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def load_wide(p, mask=None):
    """Numbers in fp32; zeros where the mask is 0."""
    if mask is None:
        return wide(tl.load(p))
    else:
        return wide(masked(p, mask))


# --- Tokens and states -----------------------------------------------------------------------------------------------


@triton.jit
def load_tokens(x, start, n, column, BD):
    """BD columns of a chunk's rows of x (`rows`), from token `start` (64 bits) on: n rows, then zeros."""
    o_c, o_d = indices(BT, BD)
    p_x, stride = x
    return masked(p_x + start * stride + column + (o_c * stride + o_d), mask=o_c < n)


@triton.jit
def store_tokens(x, b_x, start, n, column, BD):
    """As `load_tokens`."""
    o_c, o_d = indices(BT, BD)
    p_x, stride = x
    tl.store(p_x + start * stride + column + (o_c * stride + o_d), b_x, mask=o_c < n)


@triton.jit
def state_row(states, i_n):
    """The row of entry i_n's state, -1: none."""
    if states[1] is None:
        return i_n
    else:
        return load_index(states[1] + i_n)


@triton.jit
def read_state(states, i_n, stride, o_s):
    """Elements o_s of entry i_n's state in fp32, zeros if there are none (`NONE`); a row has `stride` elements."""
    values, index = states
    if values is None:
        return wide(0 * o_s)  # laid out as o_s: Gluon asks for it
    elif index is None:
        return load_wide(values + i_n * stride + o_s)
    else:
        row = load_index(index + i_n)
        return load_wide(values + row * stride + o_s, (o_s >= 0) & (row >= 0))


@triton.jit
def write_state(states, i_n, stride, o_s, b_s):
    """As `read_state`; nothing, if there are none."""
    values, index = states
    if values is not None:
        if index is None:
            tl.store(values + i_n * stride + o_s, b_s)
        else:
            row = load_index(index + i_n)
            tl.store(values + row * stride + o_s, b_s, mask=(o_s >= 0) & (row >= 0))


@triton.jit
def fetch_rows(desc, start, length, row, column):
    """A tile of an entry [length, .] from its token `row` on, by the copy engine, which reads zeros past its end.
    start: the entry's first token in the stream."""
    return load_ragged(desc, start.to(tl.int32), length, [row, column])


@triton.jit
def fetch_tile(desc, i_p):
    """The BT rows of one chunk and head, of `chunk_tiles`."""
    return desc.load([(i_p * BT).to(tl.int32), 0])


# --- Gates and β -----------------------------------------------------------------------------------------------------


@triton.jit
def log2_gate(g):
    """g in base 2, at least -126, a decay that leaves nothing that fp32 can tell from zero: sums then keep the digits
    of the gates after it, and -inf is a gate like any other. NaN stays NaN."""
    g *= LOG2E
    return tl.where(g < -126.0, -126.0, g)


@triton.jit
def softplus(x):
    """log(1 + e^x) to a few units in the last place, by log(1 + z) = 2 artanh(z / (2 + z)) with z = e^-|x| <= 1.

    The GPU's fast logarithm is accurate to 2^-22 in absolute terms only: for a slow gate, log(1 + z) ≈ z, that would
    leave four digits.
    """
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    t = s * s  # <= 1 / 9: the first term left out is 2e-8 of the leading one
    series = 1.0 + t * (
        1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13)))))
    )
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(x):
    """Computed as rsqrt squared: two instructions where a division takes eight. Within 4 units in the last place."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def load_beta(beta, o_c, start, length, i_h, BETA_RANGE):
    """β fp32 of the tokens o_c of one chunk and head, from beta [T, HV]. With BETA_RANGE, beta holds logits, and β is
    BETA_RANGE times their sigmoid. Past the end of the entry, 0."""
    p_beta, stride = beta
    b_beta = load_wide(p_beta + start * stride + i_h + o_c * stride, o_c < length)
    if BETA_RANGE is not None:
        b_beta = tl.where(o_c < length, BETA_RANGE * sigmoid(b_beta), 0.0)
    return b_beta


@triton.jit
def beta_gradient(b_db, b_beta, BETA_RANGE):
    """The gradient of `load_beta`'s input from that of β."""
    if BETA_RANGE is not None:
        b_db *= b_beta * (1.0 - b_beta / BETA_RANGE)
    return b_db
