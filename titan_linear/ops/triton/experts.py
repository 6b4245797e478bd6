"""Passes over tokens and rows of experts: the best experts, copies of tokens and their sums, activations. Sums are in
float32, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.tiles import blocks_of, indices, load_wide

TILE = 2048  # hidden channels of rows that a program holds at once


NONE = constexpr(-(1 << 62))  # below all keys


@Kernel
def top_k_kernel(scores, experts, N, E, K: constexpr, BN: constexpr, BE: constexpr):
    """A key has a score's order, and below it that of the indices: so no two are equal, and NaNs have a place."""
    o_n, o_e = indices(BN, BE)
    o_n = tl.program_id(0).to(tl.int64) * BN + o_n
    b_bits = tl.load(scores + o_n * E + o_e, mask=(o_n < N) & (o_e < E), other=0.0).to(tl.int32, bitcast=True)
    b_key = (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * BE + (BE - 1 - o_e)
    b_key = tl.where(o_e < E, b_key, NONE)
    for j in tl.static_range(K):
        b_e = BE - 1 - (tl.max(b_key, 1, keep_dims=True) & (BE - 1))
        tl.store(experts + o_n * K + j, b_e, mask=o_n < N)
        b_key = tl.where(o_e == b_e, NONE, b_key)


def top_k(scores: Tensor, k: int) -> Tensor:
    """scores [N, E] float32, contiguous -> [N, k] int64."""
    N, E = scores.shape
    experts = scores.new_empty(N, k, dtype=torch.int64)
    BE = triton.next_power_of_2(E)
    BN = max(TILE // BE, 1)
    if N:
        top_k_kernel[(blocks_of(N, BN),)](scores, experts, N, E, K=k, BN=BN, BE=BE, num_warps=4)
    return experts


@Kernel
def spread_kernel(x, slots, y, D, K: constexpr, BD: constexpr):
    i_n, o_d = _channels(BD)
    b_x = tl.load(x + i_n * D + o_d, mask=o_d < D)
    for j in tl.static_range(K):
        slot = tl.load(slots + i_n * K + j)
        tl.store(y + slot * D + o_d, b_x, mask=(slot >= 0) & (o_d < D))


@Kernel
def collect_kernel(y, slots, x, D, K: constexpr, BD: constexpr):
    i_n, o_d = _channels(BD)
    b_x = tl.zeros([BD], tl.float32)
    for j in tl.static_range(K):
        slot = tl.load(slots + i_n * K + j)
        b_x += load_wide(y + slot * D + o_d, (slot >= 0) & (o_d < D))
    tl.store(x + i_n * D + o_d, b_x, mask=o_d < D)


@triton.jit
def _channels(BD: constexpr):
    """A program's token (64 bits), and its channels [BD]."""
    return tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)


def _over_tokens(N: int, D: int) -> tuple[tuple[int, int], int]:
    """The grid, and channels of a program."""
    BD = min(triton.next_power_of_2(D), 1024)
    return (N, blocks_of(D, BD)), BD


@operator(fake=lambda x, slots, rows: x.new_empty(rows, x.shape[1]))
def spread(x: Tensor, slots: Tensor, rows: int) -> Tensor:
    """x [N, D], slots [N, k], contiguous -> [rows, D]: row slots[n, j] is x[n]."""
    (N, k), D = slots.shape, x.shape[1]
    y = x.new_empty(rows, D)
    grid, BD = _over_tokens(N, D)
    if N:
        spread_kernel[grid](x, slots, y, D, K=k, BD=BD, num_warps=4)
    return y


@operator(fake=lambda y, slots: y.new_empty(slots.shape[0], y.shape[1]))
def collect(y: Tensor, slots: Tensor) -> Tensor:
    """y [rows, D], slots [N, k], contiguous -> [N, D]: Σ_j y[slots[n, j]]."""
    (N, k), D = slots.shape, y.shape[1]
    x = y.new_empty(N, D)
    grid, BD = _over_tokens(N, D)
    if N:
        collect_kernel[grid](y, slots, x, D, K=k, BD=BD, num_warps=4)
    return x


@triton.jit
def _row(weights, rows, BR: constexpr):
    """Rows of a program (64 bits) [BR, 1], which of them there are, and their weights."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    return o_r, o_r < rows, load_wide(weights + o_r, o_r < rows)


@Kernel
def activate_kernel(y, weights, x, rows, H, GATED: constexpr, BR: constexpr, BH: constexpr):
    o_r, m_r, b_w = _row(weights, rows, BR)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    m = m_r & (o_h < H)
    if GATED:
        b_gate = load_wide(y + o_r * 2 * H + o_h, m)
        b_x = b_gate * tl.sigmoid(b_gate) * load_wide(y + o_r * 2 * H + H + o_h, m)
    else:
        b_x = tl.maximum(load_wide(y + o_r * H + o_h, m), 0)
        b_x *= b_x
    tl.store(x + o_r * H + o_h, b_w * b_x, mask=m)


@Kernel
def activate_bwd_kernel(y, weights, dx, dy, dweights, rows, H, GATED: constexpr, BR: constexpr, BH: constexpr):
    o_r, m_r, b_w = _row(weights, rows, BR)
    b_dw = tl.zeros([BR, 1], tl.float32)
    for h in range(0, H, BH):
        o_h = h + tl.arange(0, BH)[None, :]
        m = m_r & (o_h < H)
        b_dx = load_wide(dx + o_r * H + o_h, m)
        if GATED:
            b_gate = load_wide(y + o_r * 2 * H + o_h, m)
            b_up = load_wide(y + o_r * 2 * H + H + o_h, m)
            b_sigmoid = tl.sigmoid(b_gate)
            b_silu = b_gate * b_sigmoid
            b_x = b_silu * b_up
            b_dgate = b_w * b_dx * b_up * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
            tl.store(dy + o_r * 2 * H + o_h, b_dgate, mask=m)
            tl.store(dy + o_r * 2 * H + H + o_h, b_w * b_dx * b_silu, mask=m)
        else:
            b_y = tl.maximum(load_wide(y + o_r * H + o_h, m), 0)
            b_x = b_y * b_y
            tl.store(dy + o_r * H + o_h, 2 * b_w * b_dx * b_y, mask=m)
        b_dw += tl.sum(b_dx * b_x, 1, keep_dims=True)
    tl.store(dweights + o_r, b_dw, mask=m_r)


def _tile(H: int) -> dict[str, int]:
    BH = min(triton.next_power_of_2(H), 512)
    return {"BR": max(TILE // BH, 1), "BH": BH, "num_warps": 4}


def _hidden(y: Tensor, weights: Tensor, gated: bool) -> Tensor:
    return y.new_empty(y.shape[0], y.shape[1] // (1 + gated))


@operator(fake=_hidden)
def activate(y: Tensor, weights: Tensor, gated: bool) -> Tensor:
    """y [rows, 2 H] if gated, else [rows, H], weights [rows], contiguous -> [rows, H]."""
    x = _hidden(y, weights, gated)
    (rows, H), tile = x.shape, _tile(x.shape[1])
    if rows:
        grid = blocks_of(rows, tile["BR"]), blocks_of(H, tile["BH"])
        activate_kernel[grid](y, weights, x, rows, H, GATED=gated, **tile)
    return x


@operator(fake=lambda y, weights, dx, gated: (torch.empty_like(y), torch.empty_like(weights)))
def activate_backward(y: Tensor, weights: Tensor, dx: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """dx [rows, H] -> the gradients of y and weights."""
    dy, dweights = torch.empty_like(y), torch.empty_like(weights)
    (rows, H), tile = dx.shape, _tile(dx.shape[1])
    if rows:
        grid = (blocks_of(rows, tile["BR"]),)
        activate_bwd_kernel[grid](y, weights, dx, dy, dweights, rows, H, GATED=gated, **tile)
    return dy, dweights
