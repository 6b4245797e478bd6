"""Softmax attention as in its definition: fp64 scores, a mask, a softmax. An oracle of the
tests.
"""

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute o = softmax(scale · q kᵀ + mask) v in fp64, with memory of order Tq·Tk.

    Differentiable by autograd. Arguments and result match `titan_linear.ops.attention`: q
    [B, Tq, Hq, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv], o [B, Tq, Hq, Dv] (fp64).
    """
    q = q.double()
    k = k.double()
    v = v.double()
    groups = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(groups, dim=2)
    v = v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    visible = _visible(q.shape[1], k.shape[1], causal, cu_seqlens).to(q.device)  # [Tq, Tk]
    p = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def _visible(Tq: int, Tk: int, causal: bool, cu_seqlens: Tensor | None) -> Tensor:
    """Return which keys a query sees, [Tq, Tk] bool. Queries are the last Tq of the Tk
    positions.
    """
    i = torch.arange(Tk - Tq, Tk)[:, None]
    j = torch.arange(Tk)[None, :]
    visible = (j <= i) if causal else torch.ones(Tq, Tk, dtype=torch.bool)
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(Tk), cu_seqlens[1:].cpu(), right=True)
        visible = visible & (document[Tk - Tq :, None] == document[None, :])
    return visible
