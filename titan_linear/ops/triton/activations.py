"""Activations silu(factor · gate) · up, with gate and up side by side, or relu(y)²,
multiplied by each row's weight if there are weights.

Backward takes one pass. With weights it returns the gradients of y and of the weights.
Without weights it returns the gradient of y and recomputes the activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.tiles import Kernel, arange, blocks_of, load_wide, program, zeros

TILE = 2048  # elements that a program holds at once (rows × hidden channels)


@Kernel
def activation_kernel(
    y,
    weights,
    x,
    rows,
    H,
    FACTOR: constexpr,
    GATED: constexpr,
    WEIGHTED: constexpr,
    BR: constexpr,
    BH: constexpr,
):
    o_r = program() * BR + arange(BR)[:, None]
    o_h = tl.program_id(1) * BH + arange(BH)[None, :]
    m = (o_r < rows) & (o_h < H)
    if GATED:
        b_gate = FACTOR * load_wide(y + o_r * 2 * H + o_h, m)
        b_x = b_gate * tl.sigmoid(b_gate) * load_wide(y + o_r * 2 * H + H + o_h, m)
    else:
        b_x = tl.maximum(load_wide(y + o_r * H + o_h, m), 0)
        b_x *= b_x
    if WEIGHTED:
        b_x *= load_wide(weights + o_r, o_r < rows)
    tl.store(x + o_r * H + o_h, b_x, mask=m)


@Kernel
def activation_bwd_kernel(
    y, weights, dx, dy, out, rows, H, FACTOR: constexpr, GATED: constexpr, WEIGHTED: constexpr, BR: constexpr,
    BH: constexpr,
):  # fmt: skip
    """Write dy, and to `out` the gradient of the weights or, without weights, the
    activation x."""
    o_r = program() * BR + arange(BR)[:, None]
    b_w = load_wide(weights + o_r, o_r < rows) if WEIGHTED else 1.0
    b_dw = zeros(BR, 1)
    for h in range(0, H, BH):
        o_h = h + arange(BH)[None, :]
        m = (o_r < rows) & (o_h < H)
        b_dx = load_wide(dx + o_r * H + o_h, m)
        # The gradient of y, and the activation before its weight.
        if GATED:
            b_gate = FACTOR * load_wide(y + o_r * 2 * H + o_h, m)
            b_up = load_wide(y + o_r * 2 * H + H + o_h, m)
            b_sigmoid = tl.sigmoid(b_gate)
            b_silu = b_gate * b_sigmoid
            b_x = b_silu * b_up
            b_dgate = FACTOR * b_w * b_dx * b_up * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
            tl.store(dy + o_r * 2 * H + o_h, b_dgate, mask=m)
            tl.store(dy + o_r * 2 * H + H + o_h, b_w * b_dx * b_silu, mask=m)
        else:
            b_y = tl.maximum(load_wide(y + o_r * H + o_h, m), 0)
            b_x = b_y * b_y
            tl.store(dy + o_r * H + o_h, 2 * b_w * b_dx * b_y, mask=m)
        # A weight's gradient is summed over all blocks of the row.
        if WEIGHTED:
            b_dw += tl.sum(b_dx * b_x, 1, keep_dims=True)
        else:
            tl.store(out + o_r * H + o_h, b_x, mask=m)
    if WEIGHTED:
        tl.store(out + o_r, b_dw, mask=o_r < rows)


def _tile(H: int) -> dict[str, int]:
    BH = min(triton.next_power_of_2(H), 512)
    return {"BR": max(TILE // BH, 1), "BH": BH, "num_warps": 4}


def _activated(y: Tensor, weights: Tensor | None, gated: bool, factor: float = 1.0) -> Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] // (1 + gated))


@operator(fake=_activated)
def activate(y: Tensor, weights: Tensor | None, gated: bool, factor: float = 1.0) -> Tensor:
    """Apply the activation: y [.., 2 H] if gated, else [.., H], and weights [..],
    contiguous -> [.., H]."""
    x = _activated(y, weights, gated)
    H = x.shape[-1]
    rows = x.numel() // H
    tile = _tile(H)
    if rows:
        grid = blocks_of(rows, tile["BR"]), blocks_of(H, tile["BH"])
        w, weighted = (y, False) if weights is None else (weights, True)
        activation_kernel[grid](
            y, w, x, rows, H, FACTOR=factor, GATED=gated, WEIGHTED=weighted, **tile
        )
    return x


def _gradients(
    y: Tensor, weights: Tensor | None, dx: Tensor, gated: bool, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(dx if weights is None else weights)


@operator(fake=_gradients)
def activate_backward(
    y: Tensor, weights: Tensor | None, dx: Tensor, gated: bool, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the gradient of y and the gradient of the weights or, without weights,
    forward's output, from dx [.., H]."""
    dy, out = _gradients(y, weights, dx, gated)
    H = dx.shape[-1]
    rows = dx.numel() // H
    tile = _tile(H)
    if rows:
        grid = (blocks_of(rows, tile["BR"]),)
        w, weighted = (y, False) if weights is None else (weights, True)
        activation_bwd_kernel[grid](
            y, w, dx, dy, out, rows, H, FACTOR=factor, GATED=gated, WEIGHTED=weighted, **tile
        )
    return dy, out
