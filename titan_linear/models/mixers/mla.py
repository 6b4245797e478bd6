"""Multi-head latent attention (DeepSeek-V2, section 2.1) without positions, as in Kimi Linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from titan_linear.models.cases import Draws, OpCase, attention_case
from titan_linear.models.config import Documents, MixerOptions, ModelConfig
from titan_linear.models.layers import Cache, OpDims, RMSNorm, attention_entropy, grown, projection
from titan_linear.models.plan import BatchPlan, Window
from titan_linear.ops import attention

LATENT_EPS = 1e-6  # eps of the latent's norm, whatever the model's norm_eps


@dataclass(frozen=True, kw_only=True)
class MLA(MixerOptions):
    heads: int
    kv_rank: int
    nope_dim: int  # channels of q and k that are each head's own
    shared_k_dim: int  # channels of q and k for which all heads share a key (DeepSeek-V2's rotary part)
    v_dim: int

    name: ClassVar[str] = "mla"
    growing: ClassVar[tuple[str, ...]] = ("latent", "shared")

    @property
    def ops(self) -> OpDims:
        return {"attention": {"D": self.nope_dim + self.shared_k_dim, "Dv": self.v_dim}}

    def flops(self, dim: int, documents: Documents) -> int:
        """Projections to q, the latent, k and v from it, and o; scores and their use, on pairs that the mask leaves."""
        q_dim = self.nope_dim + self.shared_k_dim
        widths = self.heads * (q_dim + self.v_dim) + self.kv_rank + self.shared_k_dim
        per_token = 2 * dim * widths + 2 * self.kv_rank * self.heads * (self.nope_dim + self.v_dim)
        return per_token * documents.tokens + 2 * (q_dim + self.v_dim) * self.heads * documents.pairs

    @property
    def head_counts(self) -> dict[str, int]:
        return {"query heads": self.heads}

    def cases(self, draw: Draws) -> Iterator[OpCase]:
        yield attention_case(self.heads, self.heads, self.nope_dim + self.shared_k_dim, self.v_dim)

    def build(self, config: ModelConfig, layer: int) -> MLAMixer:
        return MLAMixer(self, config)


class MLAMixer(nn.Module):
    """Keys and values come from one latent of `kv_rank` per token; a part of each key is shared by all heads.

    The cache holds `latent` [B, tokens, kv_rank], normed, and `shared` [B, tokens, shared_k_dim].
    """

    split: ClassVar[dict[str, int]] = {"q_proj.weight": 0, "kv_b_proj.weight": 0, "o_proj.weight": 1}  # not the latent
    float8: ClassVar = (("q_proj",), ("kv_a_proj",), ("kv_b_proj",), ("o_proj",))

    def __init__(self, options: MLA, config: ModelConfig):
        super().__init__()
        self.cp_method = "auto"  # as in `AttentionMixer`
        self.latent_dims = (options.kv_rank, options.shared_k_dim)
        self.kv_dims = (options.nope_dim, options.v_dim)
        self.q_dim = options.nope_dim + options.shared_k_dim
        self.q_proj = projection(config.dim, options.heads * self.q_dim)
        self.kv_a_proj = projection(config.dim, sum(self.latent_dims))
        self.kv_norm = RMSNorm(options.kv_rank, LATENT_EPS)
        self.kv_b_proj = projection(options.kv_rank, options.heads * sum(self.kv_dims))
        self.o_proj = projection(options.heads * options.v_dim, config.dim)

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]. A cache holds the normed latents and shared keys of earlier tokens."""
        q = self.q_proj(x).unflatten(-1, (-1, self.q_dim))
        latent, shared = self.kv_a_proj(x).split(self.latent_dims, -1)  # [B, T, rank], [B, T, shared]
        latent, shared = grown(cache, latent=self.kv_norm(latent), shared=shared)
        k, v = self._keys_and_values(latent, shared)
        documents = {"first_key": plan.first_key, **plan.documents}
        o = attention(q, k, v.contiguous(), method=self.cp_method, **documents)
        return self.o_proj(o.flatten(-2))

    def watch(self, x: Tensor, window: Window) -> dict[str, tuple[Tensor, Tensor]]:
        x = x[:, : window.tokens]
        latent, shared = self.kv_a_proj(x).split(self.latent_dims, -1)
        k, _ = self._keys_and_values(self.kv_norm(latent), shared)
        q = self.q_proj(x).unflatten(-1, (-1, self.q_dim))
        return {"attention_entropy": attention_entropy(q, k, window.plan.cu_seqlens)}

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """latent [B, T, rank], normed, shared [B, T, shared] -> k [B, T, H, nope + shared], v [B, T, H, V]."""
        k, v = self.kv_b_proj(latent).unflatten(-1, (-1, sum(self.kv_dims))).split(self.kv_dims, -1)
        return torch.cat([k, shared.unsqueeze(2).expand(-1, -1, k.shape[2], -1)], -1), v
