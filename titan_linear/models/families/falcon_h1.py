"""Falcon-H1: Mamba-2 and attention side by side, then a SwiGLU; constant factors on most projections (muP)."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.layout import (
    HEADS,
    MAMBA2_SIZES,
    Family,
    Json,
    Keys,
    attention_to_hf,
    common_from_hf,
    common_to_hf,
    mamba2,
    named,
    options_of,
    outside_layers,
    self_attention,
    swiglu,
    time_step_limit,
    time_step_limit_to_hf,
    weights,
)
from titan_linear.models.mixers import Attention, Mamba2

# --- Tensors ---------------------------------------------------------------------------------------------------------

LAYERS = {
    (Mamba2, Attention): (
        *weights("", "", mixer_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        *mamba2("mamba."),
        *self_attention("mixer1."),
    ),
}

# --- config.json -----------------------------------------------------------------------------------------------------

OF_MAMBA2 = ("z_factor", "x_factor", "b_factor", "c_factor", "dt_factor")  # in the order of ssm_multipliers


def _from_hf(config: Json) -> ModelConfig:
    key = Keys({"mamba_norm_before_gate": True, **config})  # transformers' default, which we do not have
    for name in ("mlp_bias", "mamba_proj_bias", "projectors_bias"):
        key.only(name, False)
    gate, down = _factors(key, "mlp_multipliers", 2)
    return ModelConfig(
        **common_from_hf(key),
        pattern=((_mamba2_from_hf(key), _attention_from_hf(key)),),
        hidden_dim=key("intermediate_size"),
        embedding_factor=key("embedding_multiplier", 1.0),
        gate_factor=gate,
        mlp_factor=down,
        logits_divisor=1 / key("lm_head_multiplier", 1.0),
    )


def _factors(key: Keys, name: str, count: int) -> list[float]:
    given = key(name, None) or [1.0] * count
    if len(given) != count:
        raise ValueError(f"config.json: {name} = {given}; give {count} numbers")
    return given


def _mamba2_from_hf(key: Keys) -> Mamba2:
    sizes = key.options(MAMBA2_SIZES, head_dim="auto", groups=1, conv_size=4, conv_bias=True)
    if sizes["head_dim"] == "auto":
        width = key("mamba_d_ssm") or key("mamba_expand", 2) * key("hidden_size")
        sizes["head_dim"] = width // sizes["heads"]
    if normed := key("mamba_rms_norm", False):
        key.only("mamba_norm_before_gate", False)
    factors = [key("ssm_in_multiplier", 1.0) * x for x in _factors(key, "ssm_multipliers", 5)]
    return Mamba2(
        **sizes,
        **time_step_limit(key),
        **dict(zip(OF_MAMBA2, factors, strict=True)),
        out_factor=key("ssm_out_multiplier", 1.0),
        output_norm=normed,
    )


def _attention_from_hf(key: Keys) -> Attention:
    """A factor on its input is one on queries, on keys and on values."""
    factor = key("attention_in_multiplier", 1.0)
    return Attention(
        **key.options(HEADS),
        head_dim=key.head_dim(),
        key_factor=factor**2 * key("key_multiplier", 1.0),
        out_factor=factor * key("attention_out_multiplier", 1.0),
        **key.rope(1e4),
    )


def _to_hf(config: ModelConfig) -> Json:
    mamba, attention = options_of(config, Mamba2), options_of(config, Attention)
    written = dict(
        **common_to_hf(config),
        model_type="falcon_h1",
        intermediate_size=config.hidden_dim,
        embedding_multiplier=config.embedding_factor,
        mlp_multipliers=[config.gate_factor, config.mlp_factor],
        lm_head_multiplier=1 / config.logits_divisor,
        **named(mamba, MAMBA2_SIZES),
        **time_step_limit_to_hf(mamba.dt_min, mamba.dt_max),
        mamba_d_ssm=mamba.heads * mamba.head_dim,
        mamba_rms_norm=mamba.output_norm,
        mamba_norm_before_gate=False,
        ssm_in_multiplier=1.0,
        ssm_multipliers=[getattr(mamba, name) for name in OF_MAMBA2],
        ssm_out_multiplier=mamba.out_factor,
        **attention_to_hf(attention),
        head_dim=attention.head_dim,
        key_multiplier=attention.key_factor,
        attention_in_multiplier=1.0,
        attention_out_multiplier=attention.out_factor,
    )
    del written["layer_types"]  # all are alike
    return written


FALCON_H1 = Family(
    outside_layers("embed_tokens", "final_layernorm"), LAYERS, swiglu("mlp.", "feed_forward."), (), _from_hf, _to_hf
)
