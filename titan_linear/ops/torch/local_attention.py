"""Softmax attention on one device: over a batch, where a causal mask is aligned to the end, or packed documents."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.spans import Spans, document_spans
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.torch.attention import (
    Attention,
    attend_spans,
    attend_spans_backward,
    empty_gradients,
    empty_output,
)


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, documents: Boundaries | None
) -> Tensor:
    """q [B, Tq, Hq, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv] → o [B, Tq, Hq, Dv]."""
    spans = [] if documents is None else list(document_spans(documents))
    return Attention.apply(q, k, v, (attention_forward, attention_backward), (spans,), scale, causal)


@operator(kept_by=("selective", "attention"), kind="attention")
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, spans: list[Tensor], scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """o like q with Dv, lse [B, Hq, Tq]. spans: the fields of `Spans`, or empty for a whole batch."""
    o, lse = attend_spans(q, k, v, scale, causal, Spans(*spans) if spans else None)
    return o.contiguous(), lse.contiguous()


def _room_in_backward(q: Tensor, **_: Any) -> int:
    """Bytes of dq's accumulator, in float32."""
    return 4 * q.numel()


@operator(kind="attention", temporary=_room_in_backward)
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
    grads = attend_spans_backward(do, q, k, v, o, lse, scale, causal, Spans(*spans) if spans else None)
    dq, dk, dv = (grad.to(x.dtype).contiguous() for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


register_fake(attention_forward)(empty_output)
register_fake(attention_backward)(empty_gradients)
