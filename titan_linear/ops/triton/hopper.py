"""What kernels for Hopper in Gluon share: tiles by the copy engine, rooms for them in shared memory, and barriers."""

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
# [4, 16, 16], a block each warp
ROW_EACH = constexpr(gl.BlockedLayout([1, 1, 16], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
VECTOR = constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
END = constexpr(1 << 30)  # a ragged descriptor's last row is that of the entry
GluonKernel = partial(Kernel, jit=gluon.jit)


def is_hopper(device: torch.device) -> bool:
    return device.type != "cpu" and configs.architecture(device) == (9, 0)


def swizzled(x: Tensor, width: int, rows: int | None = None) -> TensorDescriptor:
    """`ragged_tiles`, or with rows `chunk_tiles`, in Gluon."""
    desc = ragged_tiles(x, width) if rows is None else chunk_tiles(x, width, rows)
    layout = _layout(8 * x.element_size(), len(desc.block_shape))
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, layout)


@cache
def _layout(bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Made once, which takes longer than a descriptor."""
    return gl.NVMMASharedLayout(128, bits, rank)


@gluon.jit
def each(x):
    """The parts of x, by its first dimension."""
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
    """[64, 64]"""
    return gl.allocate_shared_memory(
        dtype, [64, 64], gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    )


@gluon.jit
def vector():
    """[64] in fp32"""
    return gl.allocate_shared_memory(gl.float32, [64], VECTOR)


@gluon.jit
def fetch(desc, place, bar, tile):
    """A tile, by `swizzled`, of a stream's rows or of a chunk."""
    shape: constexpr = desc.block_type.shape
    if len(shape) > len(tile.shape):
        tile = tile.reshape(shape)
    tma.async_copy_global_to_shared(desc, place, bar, tile)


@gluon.jit
def visible():
    """What this program stored in shared memory, to its products and the copy engine."""
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def send(desc, place, tile):
    """As `fetch`, the other way, once all warps have stored their part of the tile."""
    visible()
    tma.async_copy_shared_to_global(desc, place, tile.reshape(desc.block_type.shape))


@gluon.jit
def turned(tile):
    """The transpose of a tile in shared memory."""
    return tile.permute((1, 0))


@gluon.jit
def put(desc, place, tile, x, pending):
    """Write xᵀ, by a tile that was last used `pending` writes before the last one; these may go on meanwhile."""
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
    """a @ b [64, 64], under way; b in shared memory."""
    return warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, SQUARE), use_acc=False, is_async=True)


@gluon.jit
def add(a, b, acc):
    """acc + a @ b, under way; b in shared memory."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def left(x):
    """x in registers as a product reads it on its left: nothing moves."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, x.type.layout, 2), assert_trivial=True)


@gluon.jit
def sums(x, matrix):
    """x @ matrix, under way, for x in fp32 as two bf16 parts."""
    high, low = split(x)
    acc = warpgroup_mma(left(low), matrix, gl.zeros_like(x), use_acc=False, is_async=True)
    return add(left(high), matrix, acc)


@gluon.jit
def indices(R, C, layout):
    """As those of `tiles`."""
    return gl.arange(0, R, gl.SliceLayout(1, layout))[:, None], gl.arange(
        0, C, gl.SliceLayout(0, layout)
    )[None, :]


@gluon.jit
def diagonal(x):
    """Of x [64, 64] in the layout of a product."""
    i, j = indices(64, 64, SQUARE)
    return gl.sum(gl.where(i == j, x, 0.0), 1)


@gluon.jit
def rounded(x):
    """x in bfloat16, two numbers a register; the compiler rounds one by one, and then holds each in its own."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, True, 2
    )


@gluon.jit
def inverse(x):
    """1 / x to a unit in the last place; computed again where it is used, not kept in registers."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, False, 1
    )


@gluon.jit
def halves(x, layout):
    """[64, n] → two of [64, n / 2]."""
    first, second = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(
        second, layout, assert_trivial=True
    )


@gluon.jit
def joined(first, second, layout):
    """As `halves`, the other way."""
    x = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [64, 2 * first.shape[1]])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _whole(x):
    """Four of [64, 16] → [64, 64]."""
    return joined(joined(x[0], x[1], HALF), joined(x[2], x[3], HALF), SQUARE)


@gluon.jit
def _solve_blocks(x, beta_s):
    """`solved` of the blocks on x's diagonal, [64, 16]: forward substitution with one row per lane."""
    blocks_s = gl.allocate_shared_memory(
        gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])
    )
    blocks_s.store(gl.reshape(x, [4, 16, 16]))
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
    for k in gl.static_range(4):
        pairs = ()
        for i in gl.static_range(8 >> k):
            pairs = pairs + (gl.join(columns[i], columns[i + (8 >> k)]),)  # noqa: RUF005
        columns = pairs
    return gl.convert_layout(gl.reshape(columns[0], [64, 16]), QUARTER)


@gluon.jit
def _add_block(x, high_s, low_s, i, j, acc):
    """acc + x @ (block i, j of a matrix in two parts) [64, 16], under way, as `dot_fp32`."""
    high, low = split(x)
    high_s, low_s = (
        high_s.slice(16 * i, 16, 0).slice(16 * j, 16, 1),
        low_s.slice(16 * i, 16, 0).slice(16 * j, 16, 1),
    )
    return add(left(high), high_s, add(left(high), low_s, add(left(low), high_s, acc)))


@gluon.jit
def solved(x, beta_s):
    """y = x + y diag(β) x for x [64, 64], strictly upper, without beta_s for β = 1; as `solve`, whose N is −xᵀ and
    G −yᵀ, but row by row of 16×16 blocks."""
    block, _ = indices(64, 16, QUARTER)
    block = block // 16
    first, second = halves(x, HALF)
    x0, x1 = halves(first, QUARTER)
    x2, x3 = halves(second, QUARTER)
    y = _solve_blocks(
        gl.where(block < 2, gl.where(block == 0, x0, x1), gl.where(block == 2, x2, x3)), beta_s
    )
    x0, x1 = gl.where(block == 0, y, x0), gl.where(block == 1, y, x1)
    columns = x0, x1, gl.where(block == 2, y, x2), gl.where(block == 3, y, x3)
    scaled = _whole(columns)
    if beta_s is not None:
        scaled *= beta_s.load(gl.SliceLayout(1, SQUARE))[:, None]
    high, low = split(scaled)
    high_s, low_s = each(shared(gl.bfloat16, 1, 64, 64)) + each(shared(gl.bfloat16, 1, 64, 64))
    high_s.store(high)
    low_s.store(low)
    visible()
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
