"""Linear attention with a log decay per head, and its state-space form (SSD).

    S ← e^g S + k vᵀ   o = scale·Sᵀ q

In a chunk with G the cumulative log decay (Transformers are SSMs, section 6):

    kg = K⊙e^{G_last−G}   qg = scale·Q⊙e^G   aqk = scale·tril(QKᵀ ⊙ e^{G_i−G_j})   u = V

w is None, because the state only decays.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.ops.runtime.options import DecayInputs, DecayOptions
from titan_linear.ops.torch.chunked import (
    ChunkLayout,
    Prepared,
    TorchRule,
    sums_after,
    sums_between,
)


class TorchLinearAttention(TorchRule):
    @staticmethod
    def prepare(inputs: DecayInputs, options: DecayOptions, chunks: ChunkLayout) -> Prepared:
        q, k, v, g, skip = discretise(inputs, options)
        groups = v.shape[1] // q.shape[1]
        # Scores are computed once per head of q and k, then repeated for the heads of v.
        q, k, v, g = (chunks.split(x) for x in (q * options.scale, k, v, g.unsqueeze(-1)))
        scores = (q @ k.mT).repeat_interleave(groups, dim=1)  # [NC, HV, C, C]
        q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))  # [NC, HV, C, K]
        gamma = g.cumsum(-2).exp()  # [NC, HV, C, 1]
        return Prepared(
            w=None,
            u=v,
            kg=k * sums_after(g).exp(),
            qg=q * gamma,
            aqk=(scores * sums_between(g).squeeze(-1).exp()).tril(),
            decay=gamma[:, :, -1],
            skip=None if skip is None else chunks.split(skip),
        )


def step(inputs: DecayInputs, options: DecayOptions, S: Tensor) -> tuple[Tensor, Tensor]:
    """Process one token of each of N sequences.

    S [N, HV, K, V] -> (o [N, HV, V], the next states).
    """
    q, k, v, g, skip = discretise(inputs, options)
    # [N, HV, K]
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q * options.scale, k))
    S = torch.addcmul(S * g.exp()[..., None, None], k.unsqueeze(-1), v.unsqueeze(-2))
    o = (q.unsqueeze(-2) @ S).squeeze(-2)
    return o if skip is None else o + skip, S


def discretise(
    inputs: DecayInputs, options: DecayOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v, log decays g [T, HV] and D v [T, HV, V] (None without D), in the
    dtype of the computation.
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    wide_inputs: list[Any] = [None if x is None else x.to(wide) for x in inputs]
    q, k, v, g, A, D, dt_bias = wide_inputs
    skip = None if D is None else v * D.view(v.shape[1], -1)
    # State-space form: time steps Δ from g, which scale v and the decay.
    if A is not None:
        dt = g if dt_bias is None else g + dt_bias
        dt = (F.softplus(dt) if options.dt_softplus else dt).clamp(*options.dt_limit)
        v = v * dt.unsqueeze(-1)
        g = dt * A
    return q, k, v, g, skip
