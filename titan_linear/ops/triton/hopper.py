"""What kernels for Hopper in Gluon share: tiles by the copy engine, rooms for them in shared memory, and barriers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from titan_linear.ops.triton import configs
from titan_linear.ops.triton.tiles import chunk_tiles, ragged_tiles

TILE = constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
END = constexpr(1 << 30)  # a ragged descriptor's last row is that of the entry


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
def barriers(n: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), 1)
    return bars


@gluon.jit
def shared(dtype: gl.constexpr, n: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    return gl.allocate_shared_memory(dtype, [n, rows, columns], TILE)
