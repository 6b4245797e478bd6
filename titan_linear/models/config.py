"""What a model is: the numbers from which `Decoder` builds its layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the SwiGLU (see `models/moe.py`)."""

    num_experts: int
    top_k: int  # experts of a token
    hidden_dim: int  # of each expert's SwiGLU
    shared_hidden_dim: int = 0  # of the SwiGLU that every token goes through; 0: none
    shared_gate: bool = False  # the shared expert's output is × sigmoid(a linear of x)
    score: str = "softmax"  # or "sigmoid": how router logits become scores
    normalise: bool = True  # a token's weights are divided by their sum
    scale: float = 1.0  # on the weights
    selection_bias: bool = False  # added to scores to choose experts, not to weigh them (DeepSeek-V3, section 2.1.2)
    groups: int = 1  # experts are chosen from the best `top_groups` of that many groups
    top_groups: int = 1
    balance_coefficient: float = 0.0  # of the load-balance loss
    bias_update_rate: float = 0.0  # per step, towards equal loads; 0: the bias stays as it is


# Options that only these mixers read.
OPTIONS = {
    ("kda",): ("kda_lower_bound", "kda_gate_bias"),
    ("kda", "gdn"): ("conv_size", "beta_range", "o_norm_eps"),
    ("attention", "mla"): ("heads",),
    ("attention",): ("kv_heads", "head_dim", "qk_norm", "rope_theta", "rotary_fraction", "output_gate"),
    ("mla",): ("kv_rank", "nope_dim", "shared_k_dim", "mla_v_dim"),
}


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    dim: int
    pattern: tuple[str, ...]  # mixers of the first layers, repeated: "kda", "gdn", "attention", "mla"
    num_layers: int
    hidden_dim: int  # of SwiGLU
    # linear layers (KDA and GDN)
    linear_heads: int
    linear_v_heads: int  # a multiple of linear_heads
    linear_head_dim: int
    linear_v_head_dim: int
    conv_size: int = 4
    kda_lower_bound: float | None = -5.0  # the bounded gate, whose kernels are faster; None: −exp(A_log)·softplus(…)
    kda_gate_bias: bool = True  # a bias in KDA's output gate
    beta_range: float = 1.0  # β in (0, this); 2 allows negative eigenvalues
    o_norm_eps: float | None = None  # of linear layers' output norm; None: norm_eps
    # softmax layers
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    qk_norm: str | None = None  # "head": of each head; "width": over all heads together
    rope_theta: float | None = 10000.0  # None: no positions
    rotary_fraction: float = 1.0  # of head_dim, its first part
    output_gate: bool = False
    # latent attention (MLA), with `heads`; no positions
    kv_rank: int = 0
    nope_dim: int = 0  # of q and k, a head's own
    shared_k_dim: int = 0  # of q and k, one for all heads (where DeepSeek-V2 has its rotary part)
    mla_v_dim: int = 0
    # all
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()  # layers with a SwiGLU all the same
    zero_centred_norm: bool = False  # norms × (1 + weight), but for linear layers' output norm
    post_norm: tuple[str, ...] = ()  # mixers whose blocks norm what mixer and MLP give, not what they take
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02

    @property
    def layers(self) -> tuple[str, ...]:
        """The mixer of every layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers

    @property
    def canonical(self) -> ModelConfig:
        """The same model, with options that none of its mixers reads at their defaults, and none of its training."""
        defaults = {field.name: field.default for field in fields(self)}
        idle = [names for mixers, names in OPTIONS.items() if not set(mixers) & set(self.layers)]
        moe = self.moe and replace(self.moe, balance_coefficient=0.0, bias_update_rate=0.0)
        return replace(self, moe=moe, **{name: defaults[name] for names in idle for name in names})
