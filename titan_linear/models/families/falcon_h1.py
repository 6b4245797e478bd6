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

# --- Presets ---------------------------------------------------------------------------------------------------------


def _falcon(
    sizes: tuple[int, int, int, int], mamba: Mamba2, softmax: Attention, factors: tuple[float, float, float]
) -> ModelConfig:
    vocab_size, dim, num_layers, hidden_dim = sizes
    gate, down, divisor = factors
    return ModelConfig(
        vocab_size,
        dim,
        ((mamba, softmax),),
        num_layers,
        hidden_dim,
        embedding_factor=5.656854249492381,
        gate_factor=gate,
        mlp_factor=down,
        logits_divisor=divisor,
    )


def _mamba2(heads: int, head_dim: int, state_dim: int, factor: float, out_factor: float, **rest: float) -> Mamba2:
    """factor: on the input."""
    b = 0.3535533905932738 if state_dim <= 128 else 0.1767766952966369
    factors = [factor * x for x in (0.3535533905932738, 0.25, b, 0.5, 0.3535533905932738)]
    of = dict(zip(OF_MAMBA2, factors, strict=True))
    return Mamba2(heads=heads, head_dim=head_dim, state_dim=state_dim, out_factor=out_factor, **of, **rest)


def _attention(heads: int, head_dim: int, key_factor: float, out_factor: float) -> Attention:
    of = dict(key_factor=key_factor, out_factor=out_factor)
    return Attention(heads=heads, kv_heads=2, head_dim=head_dim, rope_theta=1e11, **of)


FALCON_H1_MODELS = {
    "debug": _falcon(
        (320, 128, 2, 192), _mamba2(8, 16, 16, 1.25, 0.25, groups=2), _attention(4, 32, 0.4, 0.9), (0.9, 0.6, 25.6)
    ),
    "0.5B": _falcon(
        (32784, 1024, 36, 2048),
        _mamba2(24, 64, 128, 1.25, 0.23570226039551587, output_norm=False),
        _attention(8, 64, 0.39062499999999994, 0.9375),
        (0.8838834764831844, 0.5859375, 25.6),
    ),
    "1.5B-deep": _falcon(
        (65536, 1280, 66, 3072),
        _mamba2(24, 64, 256, 1.0, 0.23570226039551587),
        _attention(6, 128, 0.17677669529663687, 0.5),
        (0.7071067811865476, 0.3125, 32.0),
    ),
    "7B": _falcon(
        (130048, 3072, 44, 12288),
        _mamba2(24, 128, 256, 0.4166666666666667, 0.11785113019775793),
        _attention(12, 128, 0.030690398488999456, 0.10416666666666667),
        (0.2946278254943948, 0.032552083333333336, 76.8),
    ),
}
