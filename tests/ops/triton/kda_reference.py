"""KDA token by token in fp64, with autograd: what every kernel is measured against."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def kda_recurrence(q, k, v, g, beta, cu_seqlens: list[int], scale: float, h0: Tensor | None = None):
    """q, k [T, H, K], v [T, HV, V], g [T, HV, K] natural log, beta [T, HV] → o [T, HV, V], states [N, HV, K, V]."""
    HV, V = v.shape[1:]
    r = HV // q.shape[1]
    q, k = (x.repeat_interleave(r, 1) for x in (q, k))
    outputs, states = [], []
    for n, (bos, eos) in enumerate(pairwise(cu_seqlens)):
        S = h0[n] if h0 is not None else v.new_zeros(HV, k.shape[-1], V)
        for t in range(bos, eos):
            S = S * g[t].exp()[..., None]
            write = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
            S = S + k[t][..., None] * write[:, None, :]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], S))
        states.append(S)
    return torch.stack(outputs), torch.stack(states)


def activate(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """g raw, A_log, dt_bias, all [T, HV, K] → natural-log gate."""
    x, rate = g + dt_bias, A_log.exp()
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


def l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def error(x: Tensor, ref: Tensor, size: Tensor | None = None) -> float:
    """‖x − ref‖ / ‖size‖, size the reference unless given; NaN fails every bound."""
    x, ref = x.double().cpu(), ref.double().cpu()
    return ((x - ref).norm() / (ref if size is None else size.cpu()).norm().clamp_min(1e-30)).item()
