"""MiniMax-01: Lightning and softmax attention, each followed by experts; a branch adds to its normed input."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.layout import (
    HEADS,
    MODEL,
    NORMS,
    Family,
    Json,
    Keys,
    attention_to_hf,
    common_from_hf,
    common_to_hf,
    experts,
    fused,
    named,
    options_of,
    self_attention,
    spelled,
    weights,
)
from titan_linear.models.mixers import Attention, Lightning

# --- Tensors ---------------------------------------------------------------------------------------------------------

LAYERS = {
    (Lightning,): (
        *NORMS,
        fused(("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj.weight", groups="heads"),
        *weights("mixer.", "self_attn.", g_proj="output_gate", o_norm="norm", o_proj="out_proj"),
    ),
    (Attention,): (*NORMS, *self_attention()),
}
PLACES = ("block_sparse_moe.", "mlp.")  # on disk, and in the module of `transformers`
EXPERTS = (
    spelled("mlp.router.weight", *(f"{place}gate.weight" for place in PLACES)),
    *experts(PLACES, "w1", "w3", "w2"),
)

# --- config.json -----------------------------------------------------------------------------------------------------

MOE_SIZES = dict(num_experts="num_local_experts", top_k="num_experts_per_tok", hidden_dim="intermediate_size")
BRANCHES = ("full_attn", "linear_attn", "mlp")


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    key.only("sliding_window", None)
    key.only("router_jitter_noise", 0.0)
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(_attention_from_hf, _lightning_from_hf, lambda i: i % 2 == 0),
        hidden_dim=0,
        moe=MoEConfig(**key.options(MOE_SIZES)),
        normed_residual=True,
        kept_factor=_of_all(key, "alpha"),
        residual_factor=_of_all(key, "beta"),
    )


def _of_all(key: Keys, name: str) -> float:
    """A factor that is the same for all kinds of branches."""
    factors = {f"{branch}_{name}_factor": float(key(f"{branch}_{name}_factor", 1)) for branch in BRANCHES}
    if len(set(factors.values())) > 1:
        raise ValueError(f"config.json: {factors} must be one number; fetch it again")
    return factors.popitem()[1]


def _lightning_from_hf(key: Keys) -> Lightning:
    return Lightning(heads=key("num_attention_heads"), head_dim=key.head_dim())


def _attention_from_hf(key: Keys) -> Attention:
    return Attention(
        **key.options(HEADS),
        head_dim=key.head_dim(),
        **key.rope(1e6, key("rotary_dim", key.head_dim()) / key.head_dim()),
    )


def _to_hf(config: ModelConfig) -> Json:
    written = dict(
        model_type="minimax",
        **common_to_hf(config),
        **named(config.moe, MOE_SIZES),
        **{f"{branch}_alpha_factor": config.kept_factor for branch in BRANCHES},
        **{f"{branch}_beta_factor": config.residual_factor for branch in BRANCHES},
    )
    if lightning := options_of(config, Lightning):
        written |= dict(num_attention_heads=lightning.heads, head_dim=lightning.head_dim)
    if attention := options_of(config, Attention):
        written |= dict(
            head_dim=attention.head_dim,
            rotary_dim=int(attention.head_dim * attention.rotary_fraction),
            **attention_to_hf(attention),
        )
    return written


MINIMAX = Family(
    MODEL,
    LAYERS,
    (),
    EXPERTS,
    _from_hf,
    _to_hf,
    ignored=(r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",),  # constants
)
