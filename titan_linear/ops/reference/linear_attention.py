"""Token-by-token linear attention, state-space and DPLR recurrences in float64: oracles.
Slow, and obviously right.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.reference.token_by_token import token_by_token


def recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **sequences: Any
) -> tuple[Tensor, Tensor]:
    """Run linear attention with one log decay per head, token by token.

        S_t = exp(g_t) S_{t−1} + k_t v_tᵀ
        o_t = scale · S_tᵀ q_t

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV]; N is B, or the number of packed documents.
    Returns o [B,T,HV,V] and the final states [N,HV,K,V], both float64.
    """
    # [B, T, HV, K]
    q, k = (x.double().repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    k, v, g = (x.double().flatten(0, 1) for x in (k, v, g))  # [B·T, ...]

    def step(t: int, S: Tensor) -> Tensor:
        return g[t].exp()[:, None, None] * S + k[t].unsqueeze(-1) * v[t].unsqueeze(1)

    return token_by_token(step, q, v.shape[-1], **sequences)


def recurrent_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    **sequences: Any,
) -> tuple[Tensor, Tensor]:
    """Run the state-space recurrence token by token (Transformers are SSMs, eq. 2 and
    section 7).

        h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ,   Δ = clamp(softplus(dt + dt_bias))
        y_t = h_t C_t + D x_t

    x [b,T,heads,P]; dt [b,T,heads]; A, dt_bias [heads]; D [heads] or [heads,P]; B, C
    [b,T,G,N]; initial_states [n,heads,P,N]. Returns y [b,T,heads,P] and the final states
    [n,heads,P,N], both float64.
    """
    # Time steps Δ, whose decay and inputs make it a simple gated linear attention.
    x = x.double()
    dt = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    start = None if initial_states is None else initial_states.mT
    x_dt = x * dt.unsqueeze(-1)
    g = dt * A.double()
    y, h = recurrent_simple_gla(C, B, x_dt, g, scale=1.0, initial_state=start, **sequences)
    return y if D is None else y + x * D.double().view(x.shape[2], -1), h.mT


def recurrent_dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    **sequences: Any,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence with a transition that is diagonal plus low rank, token by token
    (RWKV-7, eq. 17).

        S_t = Diag(exp gk_t) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ
        o_t = scale · S_tᵀ q_t

    q, k, a, b, gk [B,T,H,K]; v [B,T,H,V]. Returns o [B,T,H,V] and the final states, both
    float64.
    """
    # [B·T, H, ., 1]
    k, v, a, b, gk = (x.double().flatten(0, 1).unsqueeze(-1) for x in (k, v, a, b, gk))

    def step(t: int, S: Tensor) -> Tensor:
        read = (a[t] * S).sum(1, keepdim=True)  # [H, 1, V]
        return gk[t].exp() * S + b[t] * read + k[t] * v[t].mT

    return token_by_token(step, q.double(), v.shape[2], **sequences)
