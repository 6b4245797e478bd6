"""Cross-entropy of one chunk of logits: each is read once for its row's log-sum-exp, and once for its own gradient."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.triton.launch import Kernel
from titan_linear.ops.triton.tiles import blocks_of

IGNORE = constexpr(-100)
BLOCK = {"BV": 8192, "num_warps": 16}  # columns of a row, at a time


@Kernel
def logsumexp_kernel(logits, lse, stride, vocab, BV: constexpr):
    """One row. Each column of the block keeps its own maximum and sum until the end: no step waits for a reduction."""
    row = logits + tl.program_id(0).to(tl.int64) * stride
    o_v = tl.arange(0, BV)
    b_m, b_s = tl.full([BV], float("-inf"), tl.float32), tl.zeros([BV], tl.float32)
    for v in range(0, vocab, BV):
        b_x = tl.load(row + v + o_v, mask=v + o_v < vocab, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_m, b_x, propagate_nan=tl.PropagateNan.ALL)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_s = b_s * tl.exp(b_m - b_safe) + tl.exp(b_x - b_safe)
        b_m = b_new
    m = tl.max(b_m, 0)
    tl.store(lse + tl.program_id(0), m + tl.log(tl.sum(b_s * tl.exp(b_m - m), 0)))


@Kernel
def softmax_gradient_kernel(logits, lse, target, d, stride, vocab, BV: constexpr):
    """One row and block of columns."""
    i_t = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    m_v = o_v < vocab
    b_x = tl.load(logits + i_t * stride + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    column = tl.load(target + i_t)
    b_d = tl.exp(b_x - tl.load(lse + i_t)) - tl.where(o_v == column, 1.0, 0.0)
    b_d = tl.where(column == IGNORE, 0.0, b_d)
    tl.store(d + i_t * vocab + o_v, b_d.to(d.dtype.element_ty), mask=m_v)


@operator
def row_logsumexp(logits: Tensor) -> Tensor:
    """logits [N, vocab] fp32 -> [N] fp32."""
    lse = logits.new_empty(len(logits))
    logsumexp_kernel[(len(logits),)](logits, lse, logits.stride(0), logits.shape[1], **BLOCK)
    return lse


@register_fake(row_logsumexp)
def _(logits):
    return logits.new_empty(logits.shape[0])


@operator
def softmax_gradient(logits: Tensor, lse: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(logits − lse) − [column = target], [N, vocab] in `dtype`. lse [N] fp32; target [N] int64: a column, −1 for
    none of these columns, or −100 for a row of zeros."""
    d = logits.new_empty(logits.shape, dtype=dtype)
    softmax_gradient_kernel[len(logits), blocks_of(logits.shape[1], BLOCK["BV"])](
        logits, lse, target, d, logits.stride(0), logits.shape[1], **BLOCK
    )
    return d


@register_fake(softmax_gradient)
def _(logits, lse, target, dtype):
    return logits.new_empty(logits.shape, dtype=dtype)
