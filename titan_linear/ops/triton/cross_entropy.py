"""Losses of one chunk of logits. Each logit is read once for its row's statistics and once
for its gradient."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.triton.tiles import Kernel, arange, blocks_of, program, wide, zeros

IGNORE = constexpr(-100)
BLOCK = {"BV": 8192, "num_warps": 16}  # BV columns of a row at a time


@Kernel
def statistics_kernel(logits, out, stride, vocab, rows, MORE: constexpr, BV: constexpr):
    """Compute the statistics of one row. Each column of the block keeps its own maximum and
    sums until the end, so no step waits for a reduction."""
    row = logits + program() * stride
    o_v = arange(BV)
    b_m, b_s = tl.full([BV], float("-inf"), tl.float32), zeros(BV)
    b_x_sum, b_px = zeros(BV), zeros(BV)  # Σ x, Σ exp(x − m) x
    for v in range(0, vocab, BV):
        b_x = wide(tl.load(row + v + o_v, mask=v + o_v < vocab, other=float("-inf")))
        # Online softmax: rescale earlier sums to the new maximum. NaN propagates.
        b_new = tl.maximum(b_m, b_x, propagate_nan=tl.PropagateNan.ALL)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay, b_p = tl.exp(b_m - b_safe), tl.exp(b_x - b_safe)
        b_s = b_s * b_decay + b_p
        if MORE:
            b_finite = tl.where(v + o_v < vocab, b_x, 0.0)
            b_x_sum += b_finite
            b_px = b_px * b_decay + b_p * b_finite
        b_m = b_new
    # Reduce the columns' maxima and sums to one of each.
    m = tl.max(b_m, 0)
    b_share = tl.exp(b_m - m)
    s = tl.sum(b_s * b_share, 0)
    tl.store(out + tl.program_id(0), m + tl.log(s))
    if MORE:
        tl.store(out + rows + tl.program_id(0), tl.sum(b_x_sum, 0) / vocab)
        tl.store(out + 2 * rows + tl.program_id(0), tl.sum(b_px * b_share, 0) / s)


@Kernel
def gradient_kernel(
    logits, lse, target, a, b, c, d, stride, vocab, UNIFORM: constexpr, BV: constexpr
):
    """Compute the gradient of one block of columns of one row."""
    i_t = program()
    o_v = tl.program_id(1) * BV + arange(BV)
    m_v = o_v < vocab
    b_x = wide(tl.load(logits + i_t * stride + o_v, mask=m_v, other=float("-inf")))
    column = tl.load(target + i_t)
    b_d = tl.load(a + i_t) * tl.exp(b_x - tl.load(lse + i_t)) + tl.where(
        o_v == column, tl.load(c + i_t), 0.0
    )
    if UNIFORM:
        b_d += tl.load(b + i_t)
    # Rows without a target get zeros, even where a logit is not finite.
    b_d = tl.where(column == IGNORE, 0.0, b_d)
    tl.store(d + i_t * vocab + o_v, b_d, mask=m_v)


@operator(fake=lambda logits, more: logits.new_empty(3 if more else 1, logits.shape[0]))
def row_statistics(logits: Tensor, more: bool) -> Tensor:
    """Return the log-sum-exp of logits [N, vocab] fp32; with `more` also their mean and
    their mean under softmax: [1 or 3, N] fp32."""
    out = logits.new_empty(3 if more else 1, len(logits))
    statistics_kernel[len(logits),](
        logits, out, logits.stride(0), logits.shape[1], len(logits), MORE=more, **BLOCK
    )
    return out


@operator(fake=lambda *_: None, mutates=("d",))
def logits_gradient(
    d: Tensor, logits: Tensor, lse: Tensor, target: Tensor, a: Tensor, b: Tensor | None, c: Tensor
) -> None:
    """Write d [N, vocab] = a exp(logits − lse) + b + c [column = target]. d may be the
    logits.

    lse, a, b, c [N] fp32. target [N] int64 is a column, −1 if the target is in none of
    these columns, or −100 for a row of zeros.
    """
    target, c = target.contiguous(), c.contiguous()  # columns of a matrix if there are several ids
    gradient_kernel[len(logits), blocks_of(logits.shape[1], BLOCK["BV"])](
        logits, lse, target, a, a if b is None else b, c, d, logits.stride(0), logits.shape[1],
        UNIFORM=b is not None, **BLOCK,
    )  # fmt: skip
