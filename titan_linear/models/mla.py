"""Multi-head latent attention (DeepSeek-V2, section 2.1) without positions, as in Kimi Linear."""

from __future__ import annotations

import torch
from torch import nn

from titan_linear.models.config import ModelConfig
from titan_linear.models.layers import RMSNorm
from titan_linear.models.packed import Packed
from titan_linear.ops import attention

LATENT_EPS = 1e-6  # of the latent's norm, whatever the model's own


class MLAMixer(nn.Module):
    """Keys and values come from one latent of `kv_rank` per token; a part of each key is shared by all heads."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.latent_dims = (config.kv_rank, config.shared_k_dim)
        self.kv_dims = (config.nope_dim, config.mla_v_dim)
        self.q_proj = nn.Linear(config.dim, self.heads * (config.nope_dim + config.shared_k_dim), bias=False)
        self.kv_a_proj = nn.Linear(config.dim, sum(self.latent_dims), bias=False)
        self.kv_norm = RMSNorm(config.kv_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(config.kv_rank, self.heads * sum(self.kv_dims), bias=False)
        self.o_proj = nn.Linear(self.heads * config.mla_v_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, packed: Packed, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """x [B, T, dim] -> [B, T, dim]. A cache holds the normed latents and shared keys of earlier tokens."""
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        latent, shared = self.kv_a_proj(x).split(self.latent_dims, -1)  # [B, T, rank], [B, T, shared]
        latent = self.kv_norm(latent)
        if cache is not None:
            earlier = cache.get("latent"), cache.get("shared")
            latent, shared = (t if e is None else torch.cat([e, t], 1) for e, t in zip(earlier, (latent, shared)))
            cache.update(latent=latent, shared=shared)
        k, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split(self.kv_dims, -1)
        k = torch.cat([k, shared.unsqueeze(2).expand(-1, -1, self.heads, -1)], -1)
        documents = {"first_key": packed.first_key, **packed.documents}
        o = attention(q, k, v.contiguous(), method=packed.softmax_method, **documents)
        return self.o_proj(o.flatten(-2))
