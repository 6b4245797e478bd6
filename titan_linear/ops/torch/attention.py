"""Softmax attention over blocks.

A block is a rectangle without a mask, or has a causal mask aligned to its end. The mask of
packed, causal attention is never built. A packed stream is one causal square per document.
Under context parallelism a *span* consists of some queries of a document and, as keys, the
document up to the last of these queries: causal, aligned to the end, as in decoding
(Tq < Tk). Kernels that take packed sequences compute all spans in one call.

A block gives its output and its log-sum-exp (LSE) over its own keys, and blocks over the
same queries merge exactly (Milakov & Gimelshein 2018; Dao et al. 2022):

    lse = log(exp lse_a + exp lse_b),   o = o_a · exp(lse_a − lse) + o_b · exp(lse_b − lse).

In backward every block takes the *merged* o and lse. p = exp(scores − lse) and
δ = rowsum(o · do) are then right for the whole row, and dq, dk, dv of the blocks simply
add.

Only `block_kernel` decides which kernel computes a block (attention_kernels.py).

Shapes: q [B, Tq, Hq, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv], o like q with Dv, lse
[B, Hq, Tq] in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.spans import CUDNN_MULTIPLE, Spans
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import check_first_derivative, operator
from titan_linear.ops.torch.attention_kernels import (
    ATTENTION,
    TO_THE_END,
    Operator,
    Pair,
    Triple,
    accumulator_dtype,
    block_kernel,
)


class AttentionFunction(torch.autograd.Function):
    """Attention by a pair of operators, of local, ring or all-gather attention.

    (q, k, v, *where, scale, causal) -> o, lse
    (do, q, k, v, o, lse, *where, scale, causal) -> dq, dk, dv
    """

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        operators: tuple[Operator, Operator],
        where: tuple,
        scale: float,
        causal: bool,
    ):
        forward, ctx.gradients = operators
        ctx.how = *where, scale, causal
        o, lse = forward(q, k, v, *ctx.how)
        ctx.save_for_backward(q, k, v, o, lse)
        return o.view_as(o)

    @staticmethod
    def backward(ctx, do: Tensor):
        check_first_derivative()
        return *ctx.gradients(do, *ctx.saved_tensors, *ctx.how), None, None, None, None


# Fakes: empty tensors in the shape of the operators' results.


def empty_output(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Pair:
    """Return empty (o, lse)."""
    B, T, Hq, _D = q.shape
    return q.new_empty(B, T, Hq, v.shape[-1]), q.new_empty(
        B, Hq, T, dtype=accumulator_dtype(q.dtype)
    )


def empty_gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Triple:
    """Return empty (dq, dk, dv)."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class AttentionRows(NamedTuple):
    """Tensors that backward reads of some queries and some keys."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor  # merged
    lse: Tensor  # [B, Hq, Tq], merged

    def block(self, i: slice, j: slice) -> AttentionRows:
        """Return queries i and keys j."""
        return AttentionRows(
            self.do[:, i], self.q[:, i], self.k[:, j], self.v[:, j], self.o[:, i], self.lse[:, :, i]
        )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Pair:
    """Compute (o, lse) of one block.

    `causal` needs Tq <= Tk and is aligned to the end; every length is at least 1.
    """
    assert q.shape[1] and k.shape[1] and (q.shape[1] <= k.shape[1] or not causal)
    past = k.shape[1] - q.shape[1] if causal else 0  # keys that every query sees
    kernel = _kernel_of(q, k, v)
    if not past or kernel in TO_THE_END:
        return ATTENTION.load(kernel).forward(q, k, v, scale, causal)
    # The kernel only masks squares: compute the square at the end, and merge the rectangle
    # before it.
    o, lse = attend(q, k[:, past:], v[:, past:], scale, causal)
    o = o.to(accumulator_dtype(q.dtype))
    merge_(o, lse, *attend(q, k[:, :past], v[:, :past], scale, causal=False))
    return o.to(q.dtype), lse


def attend_backward(x: AttentionRows, scale: float, causal: bool) -> Triple:
    """Compute (dq, dk, dv) of one block."""
    past = x.k.shape[1] - x.q.shape[1] if causal else 0
    kernel = _kernel_of(x.q, x.k, x.v)
    if not past or kernel in TO_THE_END:
        return ATTENTION.load(kernel).backward(*x, scale, causal)
    # As in forward: the square at the end, and the rectangle before it.
    dq, *square = attend_backward(x.block(slice(None), slice(past, None)), scale, causal)
    dq_past, *rectangle = attend_backward(x.block(slice(None), slice(past)), scale, causal=False)
    acc = accumulator_dtype(x.q.dtype)
    dk, dv = (torch.cat(parts, dim=1) for parts in zip(rectangle, square, strict=True))
    return dq.to(acc) + dq_past.to(acc), dk, dv


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    spans: Spans | None,
) -> Pair:
    """Compute (o, lse) of the spans of a packed stream (B = 1); None: of a whole batch."""
    if spans is None or len(spans.q) == 2:
        return attend(q, k, v, scale, causal)
    # All spans in one call, or one span after another.
    kernel = _packed_kernel(q, v, spans)
    if kernel in TO_THE_END:
        o, lse = ATTENTION.load(kernel).forward(q, k, v, scale, causal, spans.varlen())
    else:
        parts = [attend(q[:, i], k[:, j], v[:, j], scale, causal) for i, j in spans.rows()]
        outputs, sums = zip(*parts, strict=True)
        o = torch.cat(outputs, dim=1)
        lse = torch.cat(sums, dim=2)
    # In prefix trees, merge the keys above each span.
    for i, j in spans.rectangles():
        o = o.contiguous()
        merge_(o[:, i], lse[:, :, i], *attend(q[:, i], k[:, j], v[:, j], scale, causal=False))
    return o, lse


def attend_spans_backward(
    x: AttentionRows, scale: float, causal: bool, spans: Spans | None
) -> Triple:
    """Compute (dq, dk, dv) of `attend_spans`."""
    if spans is None or len(spans.q) == 2:
        return attend_backward(x, scale, causal)
    kernel = _packed_kernel(x.q, x.v, spans)
    if kernel in TO_THE_END:
        grads = ATTENTION.load(kernel).backward(*x, scale, causal, spans.varlen())
    else:
        parts = [attend_backward(x.block(i, j), scale, causal) for i, j in spans.rows()]
        grads = tuple(torch.cat(of_each, dim=1) for of_each in zip(*parts, strict=True))
    # In prefix trees, add the gradients of the keys above each span.
    for i, j in spans.rectangles():
        for grad, part, rows in zip(
            grads, attend_backward(x.block(i, j), scale, causal=False), (i, j, j)
        ):
            grad[:, rows] += part
    return grads


def merge_(o: Tensor, lse: Tensor, o_block: Tensor, lse_block: Tensor) -> None:
    """Merge a block into o [B, Tq, Hq, Dv] and lse [B, Hq, Tq], in place.

    On a GPU, o of half precision must be contiguous. Each row must have seen a key in `lse`
    or in `lse_block`. Callers begin with the squares, in which each token sees itself, so
    every row has a key and needs no special case.
    """
    if o.is_cuda and o.dtype != lse.dtype:
        from titan_linear.ops.triton import merge  # Triton is available on Linux only

        return merge.merge_(o, lse, o_block, lse_block)
    weight = torch.sigmoid(lse_block - lse)  # exp(lse_block − merged lse), without overflow
    o.copy_(o.to(lse.dtype).lerp(o_block.to(lse.dtype), weight.transpose(1, 2).unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, lse_block))


def _kernel_of(q: Tensor, k: Tensor, v: Tensor) -> str:
    return block_kernel(q.device, q.dtype, q.shape[-1], v.shape[-1], q.shape[1], k.shape[1])


def _packed_kernel(q: Tensor, v: Tensor, spans: Spans) -> str:
    """Return the kernel for these spans; cuDNN's only if their lengths recur."""
    length = CUDNN_MULTIPLE if spans.recur() else 1
    return block_kernel(q.device, q.dtype, q.shape[-1], v.shape[-1], length, length)


class _OnPaths(torch.autograd.Function):
    """Compute x[rows].

    Backward adds up gradients in the order of rows, in a fifth of the time of an index's
    backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(order, first)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        check_first_derivative()
        order, first = ctx.saved_tensors
        dx = F.embedding_bag(order, dy.flatten(1), first, mode="sum")
        return dx.unflatten(1, dy.shape[1:]), None, None, None


# --- On one device ------------------------------------------------------------------------


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    documents: Boundaries | None,
) -> Tensor:
    """Compute o [B, Tq, Hq, Dv] from q [B, Tq, Hq, D], k [B, Tk, Hkv, D] and v
    [B, Tk, Hkv, Dv].
    """
    spans = [] if documents is None else documents.spans.tensors()
    # In prefix trees with many branches, keys are copied from each span's path.
    if documents is not None and (paths := documents.paths) and paths.rows is not None:
        k, v = (_OnPaths.apply(x[0], *paths[1:]).unsqueeze(0) for x in (k, v))
    return AttentionFunction.apply(
        q, k, v, (attention_forward, attention_backward), (spans,), scale, causal
    )


@operator(fake=empty_output, kept_by=("selective", "attention"), cost=costs.attention)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: list[Tensor],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return o, shaped like q with Dv, and lse [B, Hq, Tq].

    spans: the fields of `Spans`, or empty for a whole batch.
    """
    where = Spans(*spans) if spans else None
    o, lse = attend_spans(q, k, v, scale, causal, where)
    return o.contiguous(), lse.contiguous()


def _room_in_backward(q: Tensor, **_: Any) -> int:
    """Return the bytes of dq's accumulator, in float32."""
    return 4 * q.numel()


@operator(fake=empty_gradients, cost=costs.attention, temporary=_room_in_backward)
def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spans: list[Tensor],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    where = Spans(*spans) if spans else None
    grads = attend_spans_backward(AttentionRows(do, q, k, v, o, lse), scale, causal, where)
    dq, dk, dv = (grad.to(x.dtype).contiguous() for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv
