"""Token-by-token delta rules in float64: the oracle of every other implementation. Slow,
and obviously right.

S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ          (Kimi Linear, eq. 1; GDN has a scalar g)
o_t = scale · S_tᵀ q_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_linear.ops.reference.token_by_token import token_by_token


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **sequences: Any
) -> tuple[Tensor, Tensor]:
    """Compute KDA (g [B,T,HV,K]) or GDN (g [B,T,HV]) in float64, differentiable by
    autograd.

    q, k [B,T,H,K]; v [B,T,HV,V]; beta [B,T,HV]; N is B, or the number of packed documents.
    Returns o [B,T,HV,V] and the final states [N,HV,K,V], both float64.
    """
    # [B, T, HV, K]
    q, k = (x.double().repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    k, v, g, beta = (x.double().flatten(0, 1) for x in (k, v, g, beta))  # [B·T, ...]
    decay = g.exp() if g.dim() == 3 else g.exp()[..., None]  # [B·T, HV, K or 1]

    def step(t: int, S: Tensor) -> Tensor:
        S = decay[t].unsqueeze(-1) * S
        # [HV, V]: v_t minus the state's answer to k_t
        error = v[t] - (S * k[t].unsqueeze(-1)).sum(1)
        return S + (beta[t, :, None] * k[t]).unsqueeze(-1) * error.unsqueeze(1)

    return token_by_token(step, q, v.shape[-1], **sequences)


def l2norm(x: Tensor) -> Tensor:
    """Compute x / sqrt(Σ x² + 1e-6) over the last dimension, in float64."""
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Return KDA's log decay [B,T,HV,K] from the raw gate x: −exp(A_log)·softplus(x), or
    lower_bound·sigmoid(exp(A_log)·x).
    """
    x = g.double() if dt_bias is None else g.double() + dt_bias.double().view(g.shape[-2:])
    A = A_log.double().exp()[:, None]
    if lower_bound is None:
        # softplus(x) = max(x, 0) + log(1 + e^−|x|)
        return -A * torch.log1p(torch.exp(-x.abs())) - A * x.clamp(min=0)
    return lower_bound / (1 + torch.exp(-A * x))


def gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Return GDN's log decay [B,T,HV] from the raw gate: −exp(A_log)·softplus(g + dt_bias)."""
    x = g.double() if dt_bias is None else g.double() + dt_bias.double()
    return -A_log.double().exp() * (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))
