"""Kernels over tokens and rows of experts: selection of the best experts, copies of tokens
and their sums, and activations. Sums are in float32, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.activations import TILE, activate, activate_backward
from titan_linear.ops.triton.tiles import (
    Kernel,
    arange,
    blocks_of,
    indices,
    load_wide,
    masked,
    program,
    zeros,
)

__all__ = ["activate", "activate_backward", "collect", "spread", "top_k"]

NONE = constexpr(-(1 << 62))  # less than every key


@Kernel
def top_k_kernel(scores, experts, N, E, K: constexpr, BN: constexpr, BE: constexpr):
    """Write each row's K experts with the highest scores.

    A key orders by score first and by index second, so keys are distinct and NaNs have a
    defined order.
    """
    o_n, o_e = indices(BN, BE)
    o_n = program() * BN + o_n
    # Integer keys: the score's bits in an order-preserving form above the reversed index.
    b_bits = masked(scores + o_n * E + o_e, mask=(o_n < N) & (o_e < E)).to(tl.int32, bitcast=True)
    b_key = (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * BE + (BE - 1 - o_e)
    b_key = tl.where(o_e < E, b_key, NONE)
    # Take the largest key K times, and remove it each time.
    for j in tl.static_range(K):
        b_e = BE - 1 - (tl.max(b_key, 1, keep_dims=True) & (BE - 1))
        tl.store(experts + o_n * K + j, b_e, mask=o_n < N)
        b_key = tl.where(o_e == b_e, NONE, b_key)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the indices of each row's k largest scores: [N, E] float32, contiguous ->
    [N, k] int64."""
    N, E = scores.shape
    experts = scores.new_empty(N, k, dtype=torch.int64)
    BE = triton.next_power_of_2(E)
    BN = max(TILE // BE, 1)
    if N:
        top_k_kernel[blocks_of(N, BN),](scores, experts, N, E, K=k, BN=BN, BE=BE, num_warps=4)
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
    b_x = zeros(BD)
    for j in tl.static_range(K):
        slot = tl.load(slots + i_n * K + j)
        b_x += load_wide(y + slot * D + o_d, (slot >= 0) & (o_d < D))
    tl.store(x + i_n * D + o_d, b_x, mask=o_d < D)


@triton.jit
def _channels(BD: constexpr):
    """Return the program's token (64 bits) and its channels [BD]."""
    return program(), tl.program_id(1) * BD + arange(BD)


def _over_tokens(kernel: Kernel, x: Tensor, slots: Tensor, y: Tensor) -> Tensor:
    """Launch `kernel` for all tokens and channels."""
    N, k = slots.shape
    D = x.shape[1]
    BD = min(triton.next_power_of_2(D), 1024)
    if N:
        kernel[N, blocks_of(D, BD)](x, slots, y, D, K=k, BD=BD, num_warps=4)
    return y


@operator(fake=lambda x, slots, rows: x.new_empty(rows, x.shape[1]))
def spread(x: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Copy token n to the rows slots[n]: x [N, D], slots [N, k], contiguous -> [rows, D]."""
    return _over_tokens(spread_kernel, x, slots, x.new_empty(rows, x.shape[1]))


@operator(fake=lambda y, slots: y.new_empty(slots.shape[0], y.shape[1]))
def collect(y: Tensor, slots: Tensor) -> Tensor:
    """Sum the rows of each token: y [rows, D], slots [N, k], contiguous -> [N, D], Σ_j
    y[slots[n, j]]."""
    return _over_tokens(collect_kernel, y, slots, y.new_empty(len(slots), y.shape[1]))
