"""Granite 4 hybrids: Mamba-2 or attention, then experts beside a shared MLP, or that MLP alone; constant factors."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.layout import (
    HEADS,
    MAMBA2_SIZES,
    MODEL,
    NORMS,
    Family,
    Json,
    Keys,
    Layout,
    common_from_hf,
    common_to_hf,
    mamba2,
    named,
    options_of,
    rope_to_hf,
    self_attention,
    spelled,
    time_step_limit,
    time_step_limit_to_hf,
    weights,
)
from titan_linear.models.mixers import Attention, Mamba2

# --- Tensors ---------------------------------------------------------------------------------------------------------


def _mlp(ours: str) -> tuple[tuple[Layout, ...], ...]:
    gate_up = (f"{ours}gate_proj.weight", f"{ours}up_proj.weight")
    return (
        (Layout(gate_up, ("shared_mlp.input_linear.weight",)),),
        *weights(ours, "shared_mlp.", down_proj="output_linear"),
    )


def _experts(ours: str, disk: str, live: str) -> tuple[Layout, ...]:
    names = (f"block_sparse_moe.{disk}.weight", f"block_sparse_moe.experts.{live}")
    return spelled(f"mlp.experts.{ours}", *names, form="stacked")


EXPERTS = (
    spelled("mlp.router.weight", "block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    _experts("gate_up_proj", "input_linear", "gate_up_proj"),
    _experts("down_proj", "output_linear", "down_proj"),
    *_mlp("mlp.shared."),
)
LAYERS = {
    (Mamba2,): (*NORMS, *mamba2("mamba.")),
    (Attention,): (*NORMS, *self_attention()),
}

# --- config.json -----------------------------------------------------------------------------------------------------

FACTORS = dict(
    embedding_factor="embedding_multiplier", residual_factor="residual_multiplier", logits_divisor="logits_scaling"
)
MOE_SIZES = dict(num_experts="num_local_experts", top_k="num_experts_per_tok", hidden_dim="intermediate_size")


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    key.only("mamba_proj_bias", False)
    key.only("position_embedding_type", None, "nope", "rope")
    older = dict(mamba="linear_attention", attention="full_attention")
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(_attention_from_hf, mamba2_from_hf, lambda i: False, **older),
        hidden_dim=key("shared_intermediate_size"),
        moe=_moe_from_hf(key) if key("num_local_experts") else None,
        **key.options(FACTORS, **dict.fromkeys(FACTORS, 1.0)),
    )


def mamba2_from_hf(key: Keys) -> Mamba2:
    sizes = key.options(MAMBA2_SIZES, head_dim="auto", groups=1, conv_size=4, conv_bias=True)
    sizes["head_dim"] = key("mamba_expand", 2) * key("hidden_size") // sizes["heads"]  # as transformers wants it
    return Mamba2(**sizes, **time_step_limit(key))


def mamba2_to_hf(mamba: Mamba2, dim: int) -> Json:
    return dict(
        **named(mamba, MAMBA2_SIZES),
        mamba_expand=mamba.heads * mamba.head_dim // dim,  # a whole number in transformers
        **time_step_limit_to_hf(mamba.dt_min, mamba.dt_max),
    )


def _attention_from_hf(key: Keys) -> Attention:
    heads = key("num_attention_heads")
    positions = key("position_embedding_type", None) == "rope"
    head_dim = key("hidden_size") // heads
    scale = float(key("attention_multiplier", 1.0))
    return Attention(
        heads=heads,
        kv_heads=key("num_key_value_heads", None) or heads,
        head_dim=head_dim,
        scale=None if scale == head_dim**-0.5 else scale,
        **(key.rope(10000.0) if positions else dict(rope_theta=None)),
    )


def _moe_from_hf(key: Keys) -> MoEConfig:
    return MoEConfig(**key.options(MOE_SIZES), shared_hidden_dim=key("shared_intermediate_size"))


def _to_hf(config: ModelConfig) -> Json:
    written = dict(
        model_type="granitemoehybrid",
        **common_to_hf(config),
        shared_intermediate_size=config.hidden_dim,
        **named(config.moe or MoEConfig(0, 0, config.hidden_dim), MOE_SIZES),
        **named(config, FACTORS),
        position_embedding_type="nope",
    )
    if mamba := options_of(config, Mamba2):
        written |= mamba2_to_hf(mamba, config.dim)
    if attention := options_of(config, Attention):
        written |= dict(
            **named(attention, HEADS),
            attention_multiplier=attention.head_dim**-0.5 if attention.scale is None else attention.scale,
        )
        if attention.rope_theta is not None:
            written |= dict(position_embedding_type="rope", **rope_to_hf(attention))
    return written


GRANITE_H = Family(MODEL, LAYERS, _mlp("mlp."), EXPERTS, _from_hf, _to_hf)
