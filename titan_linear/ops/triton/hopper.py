"""Shared parts of the Gluon kernels for Hopper: tiles moved by the copy engine, their
buffers in shared memory, barriers and products."""

from __future__ import annotations

from functools import cache, partial

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from titan_linear.ops.triton import configs
from titan_linear.ops.triton.solve import split
from titan_linear.ops.triton.tiles import Kernel, chunk_tiles, ragged_tiles

TILE = constexpr(gl.NVMMASharedLayout(128, 16, 2))
SQUARE = constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [64, 64]
HALF = constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))  # [64, 32]
QUARTER = constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # [64, 16]
# [4, 16, 16], one block per warp
ROW_EACH = constexpr(gl.BlockedLayout([1, 1, 16], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
VECTOR = constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
END = constexpr(1 << 30)  # row coordinate of an entry's end in a ragged descriptor
GluonKernel = partial(Kernel, jit=gluon.jit)


def is_hopper(device: torch.device) -> bool:
    return device.type != "cpu" and configs.architecture(device) == (9, 0)


def swizzled(x: Tensor, width: int, rows: int | None = None) -> TensorDescriptor:
    """Return `ragged_tiles`, or `chunk_tiles` if `rows` is given, as a descriptor for
    Gluon."""
    desc = ragged_tiles(x, width) if rows is None else chunk_tiles(x, width, rows)
    layout = _layout(8 * x.element_size(), len(desc.block_shape))
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, layout)


@cache
def _layout(bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the swizzled layout. It is cached, because making it takes longer than making
    a descriptor."""
    return gl.NVMMASharedLayout(128, bits, rank)


@gluon.jit
def each(x):
    """Return the parts of x along its first dimension."""
    n: constexpr = x.shape[0]
    parts = ()
    for i in gl.static_range(n):
        parts = parts + (x.index(i),)  # noqa: RUF005 (Triton joins tuples with +)
    return parts


@gluon.jit
def barriers(n, arrivals=1):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), arrivals)
    return bars


@gluon.jit
def shared(dtype, n, rows, columns):
    return gl.allocate_shared_memory(dtype, [n, rows, columns], TILE)


@gluon.jit
def room(dtype=gl.bfloat16):
    """Allocate a [64, 64] buffer in shared memory."""
    return gl.allocate_shared_memory(
        dtype, [64, 64], gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    )


@gluon.jit
def vector():
    """Allocate a [64] fp32 buffer in shared memory."""
    return gl.allocate_shared_memory(gl.float32, [64], VECTOR)


@gluon.jit
def fetch(desc, place, bar, tile):
    """Start copying a tile of a `swizzled` stream or chunk to shared memory."""
    shape: constexpr = desc.block_type.shape
    if len(shape) > len(tile.shape):
        tile = tile.reshape(shape)
    tma.async_copy_global_to_shared(desc, place, bar, tile)


@gluon.jit
def visible():
    """Make this program's stores to shared memory visible to its products and to the copy
    engine."""
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def send(desc, place, tile):
    """Start copying a tile from shared memory, once all warps have stored their part of it."""
    visible()
    tma.async_copy_shared_to_global(desc, place, tile.reshape(desc.block_type.shape))


@gluon.jit
def turned(tile):
    """Return the transpose of a tile in shared memory."""
    return tile.permute((1, 0))


@gluon.jit
def put(desc, place, tile, x, pending):
    """Write xᵀ through `tile`, which was last used `pending` writes before the last one.
    Those writes may still be under way."""
    tma.store_wait(pending)
    turned(tile).store(x.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, place, tile.reshape(desc.block_type.shape))


@gluon.jit
def release(bar):
    fence_async_shared()
    mbarrier.arrive(bar)


@gluon.jit
def product(a, b):
    """Start a @ b [64, 64]; b is in shared memory."""
    return warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, SQUARE), use_acc=False, is_async=True)


@gluon.jit
def add(a, b, acc):
    """Start acc + a @ b; b is in shared memory."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def left(x):
    """Return x, in registers, in the layout of a product's left operand. No data moves."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, x.type.layout, 2), assert_trivial=True)


@gluon.jit
def sums(x, matrix):
    """Start x @ matrix for fp32 x, as two bf16 parts."""
    high, low = split(x)
    acc = warpgroup_mma(left(low), matrix, gl.zeros_like(x), use_acc=False, is_async=True)
    return add(left(high), matrix, acc)


@gluon.jit
def indices(R, C, layout):
    """Return the row and the column of each place in a tile, like `indices` in `tiles`, for
    `layout`."""
    return gl.arange(0, R, gl.SliceLayout(1, layout))[:, None], gl.arange(
        0, C, gl.SliceLayout(0, layout)
    )[None, :]


@gluon.jit
def diagonal(x):
    """Return the diagonal of x [64, 64], which has the layout of a product."""
    i, j = indices(64, 64, SQUARE)
    return gl.sum(gl.where(i == j, x, 0.0), 1)


@gluon.jit
def rounded(x):
    """Round x to bfloat16, two numbers per register. The compiler would round one by one
    and hold each in its own register."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, True, 2
    )


@gluon.jit
def inverse(x):
    """Compute 1 / x to a unit in the last place. The assembly is recomputed where it is
    used instead of being kept in registers."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, False, 1
    )


@gluon.jit
def halves(x, layout):
    """Split [64, n] into two of [64, n / 2]."""
    first, second = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(
        second, layout, assert_trivial=True
    )


@gluon.jit
def joined(first, second, layout):
    """Join two [64, n / 2] into [64, n], the inverse of `halves`."""
    x = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [64, 2 * first.shape[1]])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _whole(x):
    """Join four [64, 16] into [64, 64]."""
    return joined(joined(x[0], x[1], HALF), joined(x[2], x[3], HALF), SQUARE)


@gluon.jit
def _solve_blocks(x, beta_s):
    """Run `solved` on the blocks of x's diagonal, [64, 16], by forward substitution with
    one row per lane."""
    blocks_s = gl.allocate_shared_memory(
        gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])
    )
    blocks_s.store(gl.reshape(x, [4, 16, 16]))
    # Substitute column by column.
    columns = ()
    scaled = ()
    for i in gl.static_range(16):
        column = blocks_s.slice(i, 1, 2).load(ROW_EACH)
        for m in gl.static_range(i):
            column += scaled[m] * blocks_s.slice(m, 1, 1).slice(i, 1, 2).load(ROW_EACH)
        columns = columns + (column,)  # noqa: RUF005
        if beta_s is not None:
            column *= beta_s.reshape([4, 16, 1]).slice(i, 1, 1).load(ROW_EACH)
        scaled = scaled + (column,)  # noqa: RUF005
    # Join the 16 columns in pairs until one tensor is left.
    for k in gl.static_range(4):
        pairs = ()
        for i in gl.static_range(8 >> k):
            pairs = pairs + (gl.join(columns[i], columns[i + (8 >> k)]),)  # noqa: RUF005
        columns = pairs
    return gl.convert_layout(gl.reshape(columns[0], [64, 16]), QUARTER)


@gluon.jit
def _add_block(x, high_s, low_s, i, j, acc):
    """Start acc + x @ (block i, j of a matrix in two parts) [64, 16], with `dot_fp32`'s
    precision."""
    high, low = split(x)
    high_s, low_s = (
        high_s.slice(16 * i, 16, 0).slice(16 * j, 16, 1),
        low_s.slice(16 * i, 16, 0).slice(16 * j, 16, 1),
    )
    return add(left(high), high_s, add(left(high), low_s, add(left(low), high_s, acc)))


@gluon.jit
def solved(x, beta_s):
    """Solve y = x + y diag(β) x for x [64, 64], strictly upper; β = 1 without beta_s.

    This is `solve` with N = −xᵀ and G = −yᵀ, computed one row of G's 16×16 blocks at a
    time.
    """
    block, _ = indices(64, 16, QUARTER)
    block = block // 16
    first, second = halves(x, HALF)
    # Solve the blocks on the diagonal.
    x0, x1 = halves(first, QUARTER)
    x2, x3 = halves(second, QUARTER)
    y = _solve_blocks(
        gl.where(block < 2, gl.where(block == 0, x0, x1), gl.where(block == 2, x2, x3)), beta_s
    )
    x0, x1 = gl.where(block == 0, y, x0), gl.where(block == 1, y, x1)
    columns = x0, x1, gl.where(block == 2, y, x2), gl.where(block == 3, y, x3)
    # Keep diag(β) x, with the solved diagonal, in two bf16 parts in shared memory.
    scaled = _whole(columns)
    if beta_s is not None:
        scaled *= beta_s.load(gl.SliceLayout(1, SQUARE))[:, None]
    high, low = split(scaled)
    high_s, low_s = each(shared(gl.bfloat16, 1, 64, 64)) + each(shared(gl.bfloat16, 1, 64, 64))
    high_s.store(high)
    low_s.store(low)
    visible()
    # Solve the blocks above the diagonal, one column of blocks at a time.
    ys = ()
    for i in gl.static_range(4):
        y = columns[i]
        for m in gl.static_range(i):
            y = _add_block(ys[m], high_s, low_s, m, i, y)
        if i > 0:
            y = warpgroup_mma_wait(0, (y,))
            y = _add_block(gl.where(block < i, y, 0.0), high_s, low_s, i, i, y)
            y = warpgroup_mma_wait(0, (y,))
        ys = ys + (y,)  # noqa: RUF005
    return _whole(ys)
