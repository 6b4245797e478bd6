"""Softmax attention on one device: squares (of a batch or of documents) beside a rectangle where Tq < Tk."""

from __future__ import annotations

import torch

from titan_linear.ops.boundaries import Boundaries
from titan_linear.ops.operators import operator, register_fake
from titan_linear.ops.torch.attention import (
    Packing,
    accumulator_dtype,
    attend,
    attend_backward,
    attend_documents,
    attend_documents_backward,
    merge_,
)


def local_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, documents: Boundaries | None
) -> torch.Tensor:
    """q [B, Tq, Hq, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv] → o [B, Tq, Hq, Dv]."""
    return _Attention.apply(q, k, v, scale, causal, documents)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, documents: Boundaries | None
    ) -> torch.Tensor:
        ctx.packing = (None, None, None)
        if documents is not None:
            ctx.packing = documents.cu_seqlens, documents.cu_seqlens_cpu, documents.longest
        o, lse = attention_forward(q, k, v, *ctx.packing, scale, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal = scale, causal
        return o.view_as(o)

    @staticmethod
    def backward(ctx, do: torch.Tensor):
        return *attention_backward(do, *ctx.saved_tensors, *ctx.packing, ctx.scale, ctx.causal), None, None, None


@operator
def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None, longest: torch.Tensor | None, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o like q with Dv, lse [B, Hq, Tq]."""
    past = k.shape[1] - q.shape[1] if causal else 0  # keys that every query sees
    packing = None if cu_seqlens is None else Packing(cu_seqlens, cu_seqlens_cpu, longest)
    o, lse = attend_documents(q, k[:, past:], v[:, past:], scale, causal, packing)
    if past:
        o = o.to(accumulator_dtype(q.dtype))
        merge_(o, lse, *attend(q, k[:, :past], v[:, :past], scale, causal=False))
        o = o.to(q.dtype)
    return o.contiguous(), lse.contiguous()


@operator
def attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None, longest: torch.Tensor | None, scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    past = k.shape[1] - q.shape[1] if causal else 0
    packing = None if cu_seqlens is None else Packing(cu_seqlens, cu_seqlens_cpu, longest)
    dq, dk, dv = attend_documents_backward(do, q, k[:, past:], v[:, past:], o, lse, scale, causal, packing)
    if past:
        dq_past, dk_past, dv_past = attend_backward(do, q, k[:, :past], v[:, :past], o, lse, scale, causal=False)
        acc = accumulator_dtype(q.dtype)
        dq = dq.to(acc) + dq_past.to(acc)
        dk, dv = torch.cat([dk_past, dk], dim=1), torch.cat([dv_past, dv], dim=1)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


@register_fake(attention_forward)
def _(q, k, v, cu_seqlens, cu_seqlens_cpu, longest, scale, causal):
    B, T, Hq, _ = q.shape
    return q.new_empty(B, T, Hq, v.shape[-1]), q.new_empty(B, Hq, T, dtype=accumulator_dtype(q.dtype))


@register_fake(attention_backward)
def _(do, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
