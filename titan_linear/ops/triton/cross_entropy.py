"""Cross-entropy of one chunk of logits. Each is read for its row's log-sum-exp, and again for its own gradient: in one
program, which finds a row of 128 KB in the cache, unless ranks share the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.triton.launch import Kernel

IGNORE = tl.constexpr(-100)
BLOCK = {"BV": 8192, "num_warps": 16}  # columns of a row, at a time


@triton.jit
def _logsumexp(row, vocab, BV: tl.constexpr):
    """Each column of the block keeps its own maximum and sum until the end: no step waits for a reduction."""
    o_v = tl.arange(0, BV)
    b_m, b_s = tl.full([BV], float("-inf"), tl.float32), tl.zeros([BV], tl.float32)
    for v in range(0, vocab, BV):
        b_x = tl.load(row + v + o_v, mask=v + o_v < vocab, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_m, b_x, propagate_nan=tl.PropagateNan.ALL)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_s = b_s * tl.exp(b_m - b_safe) + tl.exp(b_x - b_safe)
        b_m = b_new
    m = tl.max(b_m, 0)
    return m + tl.log(tl.sum(b_s * tl.exp(b_m - m), 0))


@Kernel
def cross_entropy_kernel(logits, lse, target, d, stride, vocab, GIVEN: tl.constexpr, BV: tl.constexpr):
    """One row: lse, unless it is given, and d, unless that is None."""
    i_t, o_v = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    row = logits + i_t * stride
    if GIVEN:
        m = tl.load(lse + i_t)
    else:
        m = _logsumexp(row, vocab, BV)
        tl.store(lse + i_t, m)
    if d is not None:
        column = tl.load(target + i_t)
        for v in range(0, vocab, BV):  # from the row's end, which was read last
            o_x = (vocab - 1) // BV * BV - v + o_v
            b_x = tl.load(row + o_x, mask=o_x < vocab, other=float("-inf")).to(tl.float32)
            b_d = tl.exp(b_x - m) - tl.where(o_x == column, 1.0, 0.0)
            b_d = tl.where(column == IGNORE, 0.0, b_d)
            tl.store(d + i_t * vocab + o_x, b_d.to(d.dtype.element_ty), mask=o_x < vocab)


def _launch(logits: Tensor, lse: Tensor, target: Tensor | None, d: Tensor | None, given: bool) -> None:
    cross_entropy_kernel[(len(logits),)](
        logits, lse, target, d, logits.stride(0), logits.shape[1], GIVEN=given, **BLOCK
    )


@operator
def row_logsumexp(logits: Tensor) -> Tensor:
    """logits [N, vocab] fp32 -> [N] fp32."""
    lse = logits.new_empty(len(logits))
    _launch(logits, lse, None, None, given=False)
    return lse


@register_fake(row_logsumexp)
def _(logits):
    return logits.new_empty(logits.shape[0])


@operator
def softmax_gradient(logits: Tensor, lse: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(logits − lse) − [column = target], [N, vocab] in `dtype`. lse [N] fp32; target [N] int64: a column, −1 for
    none of these columns, or −100 for a row of zeros."""
    d = logits.new_empty(logits.shape, dtype=dtype)
    _launch(logits, lse, target, d, given=True)
    return d


@register_fake(softmax_gradient)
def _(logits, lse, target, dtype):
    return logits.new_empty(logits.shape, dtype=dtype)


@operator
def logsumexp_and_gradient(logits: Tensor, target: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both of the above."""
    lse, d = logits.new_empty(len(logits)), logits.new_empty(logits.shape, dtype=dtype)
    _launch(logits, lse, target, d, given=False)
    return lse, d


@register_fake(logsumexp_and_gradient)
def _(logits, target, dtype):
    return logits.new_empty(logits.shape[0]), logits.new_empty(logits.shape, dtype=dtype)
