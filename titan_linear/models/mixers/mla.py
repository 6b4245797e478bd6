"""Multi-head latent attention (DeepSeek-V2, section 2.1).

It has no positions, as in Kimi Linear, or rotary positions and gated heads, as in Ling 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_linear.models.config import Documents, MixerOptions, ModelConfig
from titan_linear.models.layers import (
    Above0,
    Cache,
    OpDims,
    RMSNorm,
    Size,
    attention_entropy,
    by_head,
    grown,
    heads_split,
    projection,
    rotate,
    widened,
)
from titan_linear.models.plan import BatchPlan, Window
from titan_linear.models.rope import Rotary
from titan_linear.ops import attention

# Epsilon of the latents' norms, whatever the model's norm_eps.
LATENT_EPS = 1e-6


class MLAMixer(nn.Module):
    """Latent attention.

    Keys and values come from one latent of `kv_rank` channels per token, and queries from
    one of `q_rank` if given. All heads share a part of each key. The cache holds `latent`
    [B, tokens, kv_rank], normalized, and `shared` [B, tokens, shared_k_dim], rotated.
    """

    # All except the latent are split by heads.
    split = heads_split("q_proj.weight", "q_proj.2.weight", "kv_b_proj.weight", "g_proj.weight")
    float8 = ("q_proj",), ("kv_a_proj",), ("kv_b_proj",), ("o_proj",)

    def __init__(self, options: MLA, config: ModelConfig, layer: int):
        super().__init__()
        self.cp_method = "auto"  # as in `AttentionMixer`
        self.latent_dims = options.kv_rank, options.shared_k_dim
        self.kv_dims = options.nope_dim, options.v_dim
        self.q_dim = options.head_dim
        self.rotary = options.rotary
        # Queries, directly or through a latent.
        q_proj: nn.Module = projection(options.q_rank or config.dim, options.heads * self.q_dim)
        if options.q_rank:
            q_proj = nn.Sequential(
                projection(config.dim, options.q_rank), RMSNorm(options.q_rank, LATENT_EPS), q_proj
            )
        self.q_proj = q_proj
        # Keys and values through a latent, which has the shared part of the keys next to
        # it.
        self.kv_a_proj = projection(config.dim, sum(self.latent_dims))
        self.kv_norm = RMSNorm(options.kv_rank, LATENT_EPS)
        self.kv_b_proj = projection(options.kv_rank, options.heads * sum(self.kv_dims))
        self.g_proj = projection(config.dim, options.heads) if options.head_gate else None
        self.o_proj = projection(options.heads * options.v_dim, config.dim)

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Tensor:
        """Apply attention: x [B, T, dim] -> [B, T, dim].

        A cache holds the normalized latents and the shared keys of earlier tokens.
        """
        q, latent, shared = self._queries_and_latents(x, plan)
        k, v = self._keys_and_values(*grown(cache, latent=latent, shared=shared))
        documents = {"first_key": plan.first_key, **plan.documents}
        o = attention(q, k, v.contiguous(), method=self.cp_method, **documents)
        o = o if self.g_proj is None else o * self.g_proj(x).sigmoid().unsqueeze(-1)
        return self.o_proj(o.flatten(-2))

    def watch(self, x: Tensor, window: Window) -> dict[str, tuple[Tensor, Tensor]]:
        q, *latents = self._queries_and_latents(x[:, : window.tokens], window.plan)
        k, _ = self._keys_and_values(*latents)
        return {"attention_entropy": attention_entropy(q, k, window.plan.cu_seqlens)}

    def _queries_and_latents(self, x: Tensor, plan: BatchPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, latents [B, T, rank] and shared keys [B, T, shared].

        Queries are [B, T, H, nope + shared]. Queries and shared keys are rotated, latents
        normalized.
        """
        q = by_head(self.q_proj(x), self.q_dim)
        latent, shared = self.kv_a_proj(x).split(self.latent_dims, -1)
        if self.rotary is not None:
            own, rotated = q.split([self.q_dim - shared.shape[-1], shared.shape[-1]], -1)
            q = torch.cat([own, self._rotated(rotated, plan)], -1)
            shared = self._rotated(shared.unsqueeze(2), plan).squeeze(2)
        return q, self.kv_norm(latent), shared

    def _rotated(self, x: Tensor, plan: BatchPlan) -> Tensor:
        """Rotate x [B, T, H, D], in which neighboring channels form pairs.

        In the result, the pairs' first channels come first.
        """
        halves = by_head(x, 2).transpose(-1, -2).flatten(-2)
        return rotate(halves, *plan.angles(self.rotary, widened(x.dtype)))

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents to keys and values.

        Args:
            latent: [B, T, rank], normalized.
            shared: [B, T, shared].

        Returns:
            k [B, T, H, nope + shared] and v [B, T, H, V].
        """
        k, v = by_head(self.kv_b_proj(latent), sum(self.kv_dims)).split(self.kv_dims, -1)
        return torch.cat([k, shared.unsqueeze(2).expand(-1, -1, k.shape[2], -1)], -1), v


@dataclass(frozen=True, kw_only=True)
class MLA(MixerOptions):
    heads: Size
    kv_rank: Size
    # Channels of q and k that belong to each head alone.
    nope_dim: Size
    # Channels of q and k for which all heads share a key (DeepSeek-V2's rotary part).
    shared_k_dim: Size
    v_dim: Size
    # Base of the rotary positions of those channels, rotated in pairs of neighbors; None:
    # no positions.
    rope_theta: Above0 | None = None
    # Channels of the latent that queries come from; None: no latent.
    q_rank: Size | None = None
    # Whether each head's output has a gate.
    head_gate: bool = False

    name = "mla"
    module = MLAMixer
    growing = "latent", "shared"

    @property
    def head_dim(self) -> int:
        """Channels of q and k."""
        return self.nope_dim + self.shared_k_dim

    @property
    def rotary(self) -> Rotary | None:
        return None if self.rope_theta is None else (self.rope_theta, self.shared_k_dim, ())

    @property
    def ops(self) -> OpDims:
        return {"attention": {"D": self.head_dim, "Dv": self.v_dim}}

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of scores and their use, on pairs that the mask leaves."""
        return 2 * (self.head_dim + self.v_dim) * self.heads * documents.pairs

    @property
    def head_counts(self) -> dict[str, int]:
        return {"query heads": self.heads}
