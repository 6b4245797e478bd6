"""silu(factor · gate) · up with gate and up side by side; one pass in backward gives both gradients, and the product
again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.tiles import blocks_of, indices, load_wide

TILE = {"ROWS": 8, "BH": 256, "num_warps": 4}  # rows and channels per program


@triton.jit
def _places(rows, H, ROWS, BH):
    """Rows (64 bits) and channels of a program, and which of them there are."""
    o_r, o_h = indices(ROWS, BH)
    o_r, o_h = tl.program_id(0).to(tl.int64) * ROWS + o_r, tl.program_id(1) * BH + o_h
    return o_r, o_h, (o_r < rows) & (o_h < H)


@Kernel
def swiglu_fwd_kernel(gate_up, y, rows, H, FACTOR: constexpr, ROWS: constexpr, BH: constexpr):
    o_r, o_h, m = _places(rows, H, ROWS, BH)
    b_gate = FACTOR * load_wide(gate_up + o_r * 2 * H + o_h, m)
    b_up = load_wide(gate_up + o_r * 2 * H + H + o_h, m)
    tl.store(y + o_r * H + o_h, b_gate * tl.sigmoid(b_gate) * b_up, mask=m)


@Kernel
def swiglu_bwd_kernel(gate_up, dy, d, y, rows, H, FACTOR: constexpr, ROWS: constexpr, BH: constexpr):
    o_r, o_h, m = _places(rows, H, ROWS, BH)
    b_gate = FACTOR * load_wide(gate_up + o_r * 2 * H + o_h, m)
    b_up = load_wide(gate_up + o_r * 2 * H + H + o_h, m)
    b_dy = load_wide(dy + o_r * H + o_h, m)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    b_dgate = FACTOR * b_dy * b_up * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
    tl.store(d + o_r * 2 * H + o_h, b_dgate, mask=m)
    tl.store(d + o_r * 2 * H + H + o_h, b_dy * b_silu, mask=m)
    tl.store(y + o_r * H + o_h, b_silu * b_up, mask=m)


def _grid(rows: int, H: int) -> tuple[int, int]:
    return blocks_of(rows, TILE["ROWS"]), blocks_of(H, TILE["BH"])


def _product(gate_up: Tensor, factor: float) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@operator(fake=_product)
def swiglu_forward(gate_up: Tensor, factor: float) -> Tensor:
    """gate_up [.., 2 H] contiguous -> [.., H]."""
    y = _product(gate_up, factor)
    H = y.shape[-1]
    rows = y.numel() // H
    swiglu_fwd_kernel[_grid(rows, H)](gate_up, y, rows, H, FACTOR=factor, **TILE)
    return y


@operator(fake=lambda gate_up, dy, factor: (torch.empty_like(gate_up), torch.empty_like(dy)))
def swiglu_backward(gate_up: Tensor, dy: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """gate_up [.., 2 H], dy [.., H], both contiguous -> the gradient of gate_up, and what forward returned."""
    d, y = torch.empty_like(gate_up), torch.empty_like(dy)
    H = dy.shape[-1]
    rows = dy.numel() // H
    swiglu_bwd_kernel[_grid(rows, H)](gate_up, dy, d, y, rows, H, FACTOR=factor, **TILE)
    return d, y
