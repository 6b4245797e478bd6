"""Softmax attention with grouped heads; optional QK-norm, rotary positions and output gate."""

from __future__ import annotations

import torch
from torch import nn

from titan_linear.models.config import ModelConfig
from titan_linear.models.layers import RMSNorm, rotate
from titan_linear.models.packed import Packed
from titan_linear.ops import attention


class AttentionMixer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.theta, self.rotary_fraction, self.qk_norm = config.rope_theta, config.rotary_fraction, config.qk_norm
        self.q_proj = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        if self.qk_norm is not None:
            q_heads, k_heads = (1, 1) if self.qk_norm == "head" else (self.heads, self.kv_heads)  # under one norm
            self.q_norm = RMSNorm(q_heads * self.head_dim, config.norm_eps, config.zero_centred_norm)
            self.k_norm = RMSNorm(k_heads * self.head_dim, config.norm_eps, config.zero_centred_norm)
        self.g_proj = nn.Linear(config.dim, self.heads * self.head_dim, bias=False) if config.output_gate else None
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, packed: Packed, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """x [B, T, dim] -> [B, T, dim]. A cache holds the keys and values of earlier tokens, and grows."""
        q, k = self._normed(self.q_proj(x), self.k_proj(x))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.theta is not None:
            q, k = (rotate(t, packed.position_ids, self.theta, self.rotary_fraction) for t in (q, k))
        if cache is not None:
            k, v = (torch.cat([cache[n], t], 1) if n in cache else t for n, t in (("k", k), ("v", v)))
            cache.update(k=k, v=v)
        o = attention(q, k, v, method=packed.softmax_method, first_key=packed.first_key, **packed.documents).flatten(-2)
        return self.o_proj(o if self.g_proj is None else o * self.g_proj(x).sigmoid())

    def _normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, T, H·D], k [B, T, Hkv·D] -> by heads, normed over the whole width before or over each head after."""
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.unflatten(-1, (self.heads, self.head_dim)), k.unflatten(-1, (self.kv_heads, self.head_dim))
        return (self.q_norm(q), self.k_norm(k)) if self.qk_norm == "head" else (q, k)
