"""Softmax attention with grouped heads; optional QK-norm, rotary positions and output gate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from torch import Tensor, nn

from titan_linear.models.config import Documents, MixerOptions, ModelConfig
from titan_linear.models.layers import (
    Above0,
    AtLeast0,
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
    scaled,
    widened,
)
from titan_linear.models.plan import BatchPlan, Window
from titan_linear.models.rope import RopeScaling, Rotary
from titan_linear.ops import attention
from titan_linear.ops.exchange.ulysses import key_head_copies


class AttentionMixer(nn.Module):
    """Softmax attention. The cache holds `k` and `v` [B, tokens, Hkv, D]."""

    # All are split by heads.
    split = heads_split(*(f"{x}_proj.weight" for x in "qkvg"))
    float8 = ("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",)

    def __init__(self, options: Attention, config: ModelConfig, layer: int):
        super().__init__()
        self.head_dim = options.head_dim
        self.rotary = options.rotary
        self.qk_norm = options.qk_norm
        self.scale = options.scale
        self.key_factor = options.key_factor
        self.out_factor = options.out_factor
        q_dim = options.heads * self.head_dim
        k_dim = options.kv_heads * self.head_dim
        self.cp_method = "auto"  # "auto" or one of SOFTMAX_METHODS, under context parallelism
        self.q_proj = projection(config.dim, q_dim)
        self.k_proj = projection(config.dim, k_dim)
        self.v_proj = projection(config.dim, k_dim)
        # A norm over all heads together has one weight per channel, which is split by heads
        # too.
        if self.qk_norm is not None:
            widths = (self.head_dim, self.head_dim) if self.qk_norm == "head" else (q_dim, k_dim)
            self.q_norm, self.k_norm = (
                RMSNorm(w, config.norm_eps, config.zero_centred_norm) for w in widths
            )
        if self.qk_norm == "width":
            self.split = {**self.split, "q_norm.weight": 0, "k_norm.weight": 0}
        self.g_proj = projection(config.dim, q_dim) if options.output_gate else None
        self.o_proj = projection(q_dim, config.dim)

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Tensor:
        """Apply attention: x [B, T, dim] -> [B, T, dim].

        A cache holds the keys and values of earlier tokens, and grows.
        """
        q, k = self._queries_and_keys(x, plan)
        v = by_head(self.v_proj(x), self.head_dim)
        k, v = grown(cache, k=k, v=v)
        documents = {"first_key": plan.first_key, **plan.documents}
        o = attention(q, k, v, scale=self.scale, method=self.cp_method, **documents).flatten(-2)
        o = o if self.g_proj is None else o * self.g_proj(x).sigmoid()
        return scaled(self.o_proj(o), self.out_factor)

    def watch(self, x: Tensor, window: Window) -> dict[str, tuple[Tensor, Tensor]]:
        q, k = self._queries_and_keys(x[:, : window.tokens], window.plan)
        return {"attention_entropy": attention_entropy(q, k, window.plan.cu_seqlens, self.scale)}

    def _queries_and_keys(self, x: Tensor, plan: BatchPlan) -> tuple[Tensor, Tensor]:
        """Return q [B, T, H, D] and k [B, T, Hkv, D], normalized, scaled and rotated."""
        q = self.q_proj(x)
        k = self.k_proj(x)
        # "width" normalizes before the split by heads, "head" after it.
        if self.qk_norm == "width":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = by_head(q, self.head_dim)
        k = by_head(k, self.head_dim)
        if self.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        k = scaled(k, self.key_factor)
        if self.rotary is None:
            return q, k
        cos, sin = plan.angles(self.rotary, widened(q.dtype))
        return rotate(q, cos, sin), rotate(k, cos, sin)


@dataclass(frozen=True, kw_only=True)
class Attention(MixerOptions):
    heads: Size
    kv_heads: Size  # divides heads
    head_dim: Size
    # Norm of queries and keys: "head" over each head, "width" over all heads together.
    qk_norm: Literal["head", "width"] | None = None
    rope_theta: Above0 | None = 10000.0  # None: no positions
    # Share of head_dim that is rotated: its first channels.
    rotary_fraction: AtLeast0 = 1.0
    rope_scaling: RopeScaling | None = None
    output_gate: bool = False
    # Factor on the scores; None: head_dim^−½.
    scale: Above0 | None = None
    key_factor: AtLeast0 = 1.0
    out_factor: AtLeast0 = 1.0

    name = "attention"
    module = AttentionMixer
    growing = "k", "v"

    @property
    def ops(self) -> OpDims:
        return {"attention": {"D": self.head_dim, "Dv": self.head_dim}}

    @property
    def rotary(self) -> Rotary | None:
        if self.rope_theta is None:
            return None
        scaling = asdict(self.rope_scaling) if self.rope_scaling else {}
        return self.rope_theta, int(self.head_dim * self.rotary_fraction), tuple(scaling.items())

    @property
    def contradiction(self) -> str | None:
        if self.heads % self.kv_heads:
            return f"{self.name} heads = {self.heads}, which must be a multiple of kv_heads = {self.kv_heads}"
        if self.rope_scaling and (self.rope_theta or 0) <= 1:
            return f"{self.name} rope_theta = {self.rope_theta}, which rope_scaling needs above 1"
        return None

    def flops(self, documents: Documents) -> int:
        """Return the FLOPs of scores and their use, on pairs that the mask leaves."""
        return 4 * self.head_dim * self.heads * documents.pairs

    @property
    def head_counts(self) -> dict[str, int]:
        return {"query heads": self.heads, "key heads": self.kv_heads}

    def indivisible_heads(self, ranks: int) -> str | None:
        return (
            None
            if key_head_copies(self.heads, self.kv_heads, ranks)
            else super().indivisible_heads(ranks)
        )
