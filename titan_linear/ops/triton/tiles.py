"""Shared parts of the kernels: how they are launched, and how they read and write tokens,
states and gates.

By default Triton compiles each kernel at its first launch, and the step waits for one
kernel after another. Here kernels can be compiled ahead of their launch, many at once.

Streams are [T, heads, dim] with dense heads and any stride between tokens: the mixer's q, k
and v are views of one projection. States are [rows, HV, K, V] in fp32. Entry n's state is
in row n or, with an index [N] int32, in row index[n]. Where index[n] is -1, the state reads
as zeros and is not written.

A kernel's constants are annotated. Triton infers the constants of the functions that it
calls from the arguments it passes.
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
GRID_LIMITS = 2**31 - 1, 65_535, 65_535  # largest dimensions of a CUDA grid


# --- Launches --------------------------------------------------------------------------------------------------------


class Kernel:
    """Decorator of a kernel, in place of `jit`.

    Arguments may be tuples, but not tuples of descriptors, which Triton does not find
    there. A NamedTuple costs a launch half a microsecond, a plain tuple nothing. A launch
    only compiles the kernel if its first argument, or the first tensor in it, is on the
    meta device.
    """

    def __init__(self, fn: Callable[..., None], jit: Callable[..., Any] = triton.jit):
        self.jitted = jit(fn)
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        # Sizes that grow with tokens, documents or heads belong in the first dimension.
        assert all(map(le, grid, GRID_LIMITS)), f"{self.__name__}: the grid {grid} is too large"
        x, *_ = args
        # The first tensor tells whether to run the kernel or only to compile it.
        while isinstance(x, tuple):
            x = x[0]
        on_meta = getattr(x, "base", x).is_meta  # a descriptor's tensor is its base
        self.jitted.run(*args, grid=grid, warmup=on_meta, **kwargs)


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Compile the kernels that are launched inside on the meta device, in parallel threads.
    The exit waits for all of them.

    device: the GPU that they are compiled for and loaded to.
    """
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        with triton.AsyncCompileMode(pool) as ahead:
            yield
        kernels = [kernel.result() for kernel in ahead.future_kernels.values()]
        # Reading `run` loads a kernel. Triton 3.6 also compiles its launcher, in C.
        list(pool.map(attrgetter("run"), kernels))


# --- What launches pass ----------------------------------------------------------------------------------------------


Pair = tuple[Tensor | None, Tensor | None]
NONE: Pair = (None, None)  # states, and each entry's row among them


def rows(x: Tensor) -> tuple[Tensor, int]:
    """Return a stream as kernels read it: x [T, heads, dim] or [T, heads] with dense heads,
    and the stride between tokens."""
    x = dense_heads(x)
    return x, x.stride(0)


def blocks_of(n: int, size: int) -> int:
    """Return ⌈n / size⌉. `triton.cdiv` first checks whether an argument is a kernel's
    constant, which takes 2 µs."""
    return -(-n // size)


def dense_heads(x: Tensor) -> Tensor:
    """Return x, or a copy if its layout does not fit.

    x [T, heads, dim] must have dense heads, and a start and a token stride that are
    multiples of 16 bytes, as the copy engine and vector loads need. x [T, heads] must have
    dense heads.
    """
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    token, head, number = x.stride()
    dense = number == 1 and (head == x.shape[2] or x.shape[1] == 1)
    aligned = token * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if dense and aligned else x.contiguous()


def gradient_like(parameter: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Return the gradient in the shape and dtype of its parameter; None without one."""
    return None if parameter is None else gradient.view(parameter.shape).to(parameter.dtype)


def ragged_tiles(x: Tensor, width: int) -> TensorDescriptor:
    """Return a descriptor of x [T, heads, dim] as the matrix [T, heads·dim], read by the
    copy engine in tiles of a chunk's tokens and `width` columns. Reads past an entry's end
    give zeros (`fetch_rows`)."""
    return create_ragged_descriptor(dense_heads(x).flatten(1), [CHUNK, width])


def chunk_tiles(x: Tensor, width: int = CHUNK, rows: int = CHUNK) -> TensorDescriptor:
    """Return a descriptor of x [.., dim], contiguous, as the matrix [., dim], read by the
    copy engine in tiles of [rows, width]."""
    dim = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // dim, dim], [dim, 1], [rows, width])


def empty_states(like: Tensor, rows: int, K: int) -> Tensor:
    """Allocate states [rows, HV, K, V] fp32 for a stream like v [T, HV, V]."""
    return like.new_empty(rows, like.shape[1], K, like.shape[2], dtype=torch.float32)


# --- In kernels: numbers ---------------------------------------------------------------------------------------------


@triton.jit
def arange(n):
    return tl.arange(0, n)


@triton.jit
def program():
    """Return the program's number, in 64 bits."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def zeros(R, C=None):
    """Return zeros [R] or [R, C] in fp32."""
    return tl.zeros([R] if C is None else [R, C], tl.float32)


@triton.jit
def wide(x):
    return x.to(tl.float32)


@triton.jit
def masked(p, mask):
    """Load numbers; zeros where the mask is 0."""
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def load_index(p):
    """Load an integer in 64 bits."""
    return tl.load(p).to(tl.int64)


@Kernel
def sum_groups_kernel(x, y, n, R: constexpr, K: constexpr, B: constexpr):
    """Write B of y's n numbers, each the sum of R numbers of x."""
    o_y = program() * B + arange(B)
    b_y = zeros(B)
    for r in tl.static_range(R):
        b_y += load_wide(x + o_y // K * (R * K) + (o_y % K + r * K), o_y < n)
    tl.store(y + o_y, b_y, mask=o_y < n)


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Sum x [T, HV, K] over the value heads of each key head, in fp32, to the shape and
    dtype of like [T, H, K]."""
    T, H, K = like.shape
    y = like.new_empty(T, H, K)
    B = 2048
    sum_groups_kernel[blocks_of(T * H * K, B),](x, y, T * H * K, R=x.shape[1] // H, K=K, B=B)
    return y


@triton.jit
def indices(R, C):
    """Return the row and the column of each place in a tile: [R, 1] and [1, C]."""
    return arange(R)[:, None], arange(C)[None, :]


@triton.jit
def place_in_row(slices, HV, i_p=None):
    """Return the place of program i_p (None: this one): its slice of V or M, its entry and
    head as one number (64 bits), its entry, and its head (32 bits)."""
    if i_p is None:
        i_p = tl.program_id(0)
    i_v, i_nh = i_p % slices, (i_p // slices).to(tl.int64)
    return i_v, i_nh, i_nh // HV, (i_nh % HV).to(tl.int32)


@triton.jit
def dot(a, b, acc=None):
    """Compute a @ b (+ acc) with sums in fp32; fp32 operands take three products of tf32
    parts."""
    return tl.dot(a, b, acc=acc, input_precision="tf32x3")


@triton.jit
def dot_ieee(a, b, acc=None):
    """Compute `dot` with fp32 operands multiplied in IEEE fp32."""
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def load_wide(p, mask=None):
    """Load numbers in fp32; zeros where the mask is 0."""
    if mask is None:
        return wide(tl.load(p))
    else:
        return wide(masked(p, mask))


# --- Tokens and states -----------------------------------------------------------------------------------------------


@triton.jit
def load_tokens(x, start, n, column, BD):
    """Load BD columns of a chunk's rows of x (`rows`), starting at token `start` (64 bits):
    n rows, then zeros."""
    o_c, o_d = indices(BT, BD)
    p_x, stride = x
    return masked(p_x + start * stride + column + (o_c * stride + o_d), mask=o_c < n)


@triton.jit
def store_tokens(x, b_x, start, n, column, BD):
    """Store b_x at the places that `load_tokens` reads."""
    o_c, o_d = indices(BT, BD)
    p_x, stride = x
    tl.store(p_x + start * stride + column + (o_c * stride + o_d), b_x, mask=o_c < n)


@triton.jit
def state_row(states, i_n):
    """Return the row of entry i_n's state, or -1 if it has none."""
    if states[1] is None:
        return i_n
    else:
        return load_index(states[1] + i_n)


@triton.jit
def read_state(states, i_n, stride, o_s):
    """Read elements o_s of entry i_n's state in fp32, or zeros if there are no states
    (`NONE`). A row has `stride` elements."""
    values, index = states
    if values is None:
        return wide(0 * o_s)  # zeros with o_s's layout, as Gluon requires
    elif index is None:
        return load_wide(values + i_n * stride + o_s)
    else:
        row = load_index(index + i_n)
        return load_wide(values + row * stride + o_s, (o_s >= 0) & (row >= 0))


@triton.jit
def write_state(states, i_n, stride, o_s, b_s):
    """Write the elements that `read_state` reads; do nothing if there are no states."""
    values, index = states
    if values is not None:
        if index is None:
            tl.store(values + i_n * stride + o_s, b_s)
        else:
            row = load_index(index + i_n)
            tl.store(values + row * stride + o_s, b_s, mask=(o_s >= 0) & (row >= 0))


@triton.jit
def fetch_rows(desc, start, length, row, column):
    """Read a tile of an entry [length, .], starting at its token `row`, by the copy engine.
    Reads past its end give zeros.

    start: the entry's first token in the stream.
    """
    return load_ragged(desc, start.to(tl.int32), length, [row, column])


@triton.jit
def fetch_tile(desc, i_p):
    """Read the BT rows of one chunk and head of a `chunk_tiles` descriptor."""
    return desc.load([(i_p * BT).to(tl.int32), 0])


# --- Gates and β -----------------------------------------------------------------------------------------------------


@triton.jit
def log2_gate(g):
    """Convert g to base 2, clamped to at least -126, a decay that fp32 cannot tell from
    zero.

    Sums then keep the digits of the gates after it, and -inf needs no special case. NaN
    stays NaN.
    """
    g *= LOG2E
    return tl.where(g < -126.0, -126.0, g)


@triton.jit
def softplus(x):
    """Compute log(1 + e^x) to a few units in the last place, as log(1 + z) = 2 artanh(z /
    (2 + z)) with z = e^-|x| <= 1.

    The GPU's fast logarithm is accurate only to 2^-22 in absolute terms. For a slow gate,
    where log(1 + z) ≈ z, that would leave four digits.
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
    """Compute the sigmoid as rsqrt squared: two instructions where a division takes eight,
    within 4 units in the last place."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def load_beta(beta, o_c, start, length, i_h, BETA_RANGE):
    """Load β in fp32 for the tokens o_c of one chunk and head, from beta [T, HV]. With
    BETA_RANGE, beta holds logits, and β is BETA_RANGE times their sigmoid. β is 0 past the
    entry's end."""
    p_beta, stride = beta
    b_beta = load_wide(p_beta + start * stride + i_h + o_c * stride, o_c < length)
    if BETA_RANGE is not None:
        b_beta = tl.where(o_c < length, BETA_RANGE * sigmoid(b_beta), 0.0)
    return b_beta


@triton.jit
def beta_gradient(b_db, b_beta, BETA_RANGE):
    """Return the gradient of `load_beta`'s input from the gradient of β."""
    if BETA_RANGE is not None:
        b_db *= b_beta * (1.0 - b_beta / BETA_RANGE)
    return b_db
