"""Merging of one block of attention into another over the same queries, in place and in one
pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.triton.tiles import Kernel, arange, blocks_of, load_wide, program


@Kernel
def merge_kernel(o, lse, part, part_lse, S, T, H, D, BR: constexpr, BD: constexpr):
    """Merge BR rows of `part` into o, and their log-sum-exps.

    o, part [T, H, D]; lse [H, T] with S numbers between heads; part_lse [H, T].
    """
    o_r = program() * BR + arange(BR)
    o_d = arange(BD)[None, :]
    m_r = o_r < T * H
    m = m_r[:, None] & (o_d < D)
    o_x = o_r[:, None] * D + o_d
    p_lse = lse + o_r % H * S + o_r // H
    b_lse, b_part_lse = load_wide(p_lse, m_r), load_wide(part_lse + o_r % H * T + o_r // H, m_r)
    # The weight of `part` is its share of the two exponential sums.
    b_w = tl.sigmoid(b_part_lse - b_lse)[:, None]
    tl.store(o + o_x, (1 - b_w) * load_wide(o + o_x, m) + b_w * load_wide(part + o_x, m), mask=m)
    tl.store(
        p_lse,
        tl.maximum(b_lse, b_part_lse) - tl.log(tl.sigmoid(tl.abs(b_lse - b_part_lse))),
        mask=m_r,
    )


def merge_(o: Tensor, lse: Tensor, *block: Tensor) -> None:
    """Merge `block` into o and lse, as in ops/torch/attention.py, with B = 1, o contiguous
    and lse in fp32."""
    _, T, H, D = o.shape
    block = [x.contiguous() for x in block]
    grid = (blocks_of(T * H, 32),)
    merge_kernel[grid](o, lse, *block, lse.stride(1), T, H, D, BR=32, BD=triton.next_power_of_2(D))
