"""What a model is: the numbers from which `Decoder` builds its layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    dim: int
    pattern: tuple[str, ...]  # mixers of the first layers, repeated: "kda", "gdn", "attention"
    num_layers: int
    hidden_dim: int  # of SwiGLU
    # linear layers (KDA and GDN)
    linear_heads: int
    linear_v_heads: int  # a multiple of linear_heads
    linear_head_dim: int
    linear_v_head_dim: int
    conv_size: int = 4
    kda_lower_bound: float | None = -5.0  # the bounded gate, whose kernels are faster; None: −exp(A_log)·softplus(…)
    # softmax layers
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    qk_norm: bool = False
    rope_theta: float | None = 10000.0  # None: no positions
    output_gate: bool = False
    # all
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02

    @property
    def layers(self) -> tuple[str, ...]:
        """The mixer of every layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))
