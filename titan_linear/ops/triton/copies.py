"""Sums of what experts gave for the copies of tokens: one program per token, in float32, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.tiles import load_wide

TILE = 4096  # numbers of all copies of a token that a program holds at once


@Kernel
def collect_kernel(y, slots, weights, x, k, D, WEIGHTED: constexpr, BK: constexpr, BD: constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_slot = tl.load(slots + i_n * k + o_k, mask=o_k < k, other=-1)[:, None]
    if WEIGHTED:
        b_w = load_wide(weights + i_n * k + o_k, o_k < k)[:, None]
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)
        m = (b_slot >= 0) & (o_d < D)[None, :]
        b_y = load_wide(y + b_slot * D + o_d[None, :], m)
        if WEIGHTED:
            b_y = tl.where(m, b_y * b_w, 0)
        tl.store(x + i_n * D + o_d, tl.sum(b_y, 0), mask=o_d < D)


@Kernel
def collect_bwd_kernel(dx, slots, weights, y, dy, dweights, k, D, BK: constexpr, BD: constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_slot = tl.load(slots + i_n * k + o_k, mask=o_k < k, other=-1)[:, None]
    b_w = load_wide(weights + i_n * k + o_k, o_k < k)[:, None]
    b_dw = tl.zeros([BK], dtype=tl.float32)
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)[None, :]
        m = (b_slot >= 0) & (o_d < D)
        b_dx = load_wide(dx + i_n * D + o_d, o_d < D)
        b_y = load_wide(y + b_slot * D + o_d, m)
        b_dw += tl.sum(tl.where(m, b_y * b_dx, 0), 1)
        tl.store(dy + b_slot * D + o_d, b_dx * b_w, mask=m)
    tl.store(dweights + i_n * k + o_k, b_dw, mask=o_k < k)


def _tile(k: int, D: int) -> dict[str, int]:
    BK = triton.next_power_of_2(k)
    return {"BK": BK, "BD": min(max(TILE // BK, 16), triton.next_power_of_2(D)), "num_warps": 4}


@operator(fake=lambda y, slots, weights: y.new_empty(len(slots), y.shape[1]))
def collect_copies(y: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """y [rows, D], slots and weights [N, k], contiguous -> [N, D]: Σ_j weights[n, j] · y[slots[n, j]]."""
    (N, k), D = slots.shape, y.shape[1]
    x = y.new_empty(N, D)
    if N:
        w = y if weights is None else weights
        collect_kernel[(N,)](y, slots, w, x, k, D, WEIGHTED=weights is not None, **_tile(k, D))
    return x


@operator(fake=lambda dx, slots, weights, y: (torch.empty_like(y), torch.empty_like(weights)))
def collect_copies_backward(dx: Tensor, slots: Tensor, weights: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dx [N, D] -> dy [rows, D], dweights [N, k]."""
    dy, dweights = torch.empty_like(y), torch.empty_like(weights)
    (N, k), D = slots.shape, y.shape[1]
    if N:
        collect_bwd_kernel[(N,)](dx, slots, weights, y, dy, dweights, k, D, **_tile(k, D))
    return dy, dweights
