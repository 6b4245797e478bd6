"""Nemotron-H, and Nemotron 3: Mamba-2, attention, squared-ReLU MLPs and experts, one of them a layer."""

from __future__ import annotations

import sys

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.layout import (
    COMMON,
    HEADS,
    ROUTER,
    Family,
    Json,
    Keys,
    mamba2,
    named,
    options_of,
    outside_layers,
    self_attention,
    shortest,
    spelled,
    time_step_limit,
    time_step_limit_to_hf,
    weights,
)
from titan_linear.models.mixers import Attention, Mamba2
from titan_linear.models.mlps import Dense

# --- Tensors ---------------------------------------------------------------------------------------------------------

MODEL = outside_layers("embeddings", "norm_f")
_NORM = weights("", "", mixer_norm="norm")
_MLP = ("up_proj", "down_proj")
EXPERTS = (
    *weights("mlp.", "mixer.", router="gate", latent_in_proj="fc1_latent_proj", latent_out_proj="fc2_latent_proj"),
    spelled("mlp.router.selection_bias", "mixer.gate.e_score_correction_bias"),
    *(
        (
            *spelled(f"mlp.experts.{name}", f"mixer.experts.{{e}}.{name}.weight"),
            *spelled(f"mlp.experts.{name}", f"mixer.experts.{name}", form="stacked"),
        )
        for name in _MLP
    ),
    *weights("mlp.shared.", "mixer.shared_experts.", *_MLP),
)
LAYERS = {
    (Mamba2,): (*_NORM, *mamba2("mixer.")),
    (Attention,): (*_NORM, *self_attention("mixer.", "mixer.")),
    (): weights("", "", mlp_norm="norm"),
}

# --- config.json -----------------------------------------------------------------------------------------------------

NAMES = COMMON | dict(norm_eps="layer_norm_epsilon")
MAMBA2_SIZES = dict(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state_dim="ssm_state_size",
    groups="n_groups",
    conv_size="conv_kernel",
    conv_bias="use_conv_bias",
)
MOE_SIZES = dict(
    num_experts="n_routed_experts",
    top_k="num_experts_per_tok",
    hidden_dim="moe_intermediate_size",
    shared_hidden_dim="moe_shared_expert_intermediate_size",
    normalise="norm_topk_prob",
    scale="routed_scaling_factor",
    groups="n_group",
    top_groups="topk_group",
)
LETTERS = {"M": "mamba2", "*": "attention", "-": Dense.name, "E": MoEConfig.name}  # of a pattern
WORDS = {  # of a list of layers, in transformers and before
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": Dense.name,
    "moe": MoEConfig.name,
}


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        key.only(name, False)
    key.only("mlp_hidden_act", "relu2")
    key.only("mamba_hidden_act", "silu")
    key.only("sliding_window", None)
    key.only("quantization_config", None)
    kinds = _kinds(key)
    made = {"mamba2": _mamba2_from_hf, "attention": _attention_from_hf}
    mixers = {kind: make(key) for kind, make in made.items() if kind in kinds}
    return ModelConfig(
        **key.options(NAMES, num_layers=len(kinds), norm_eps=1e-5, tie_embeddings=False, init_std=0.02),
        pattern=shortest([mixers.get(kind, kind) for kind in kinds]),
        hidden_dim=key("intermediate_size") if Dense.name in kinds else 0,
        moe=_moe_from_hf(key) if MoEConfig.name in kinds else None,
        one_branch=True,
        activation="relu2",
    )


def _kinds(key: Keys) -> list[str]:
    """What each layer is."""
    name = "layers_block_type" if key("layers_block_type", None) else "hybrid_override_pattern"
    known = WORDS if name == "layers_block_type" else LETTERS
    given = key(name)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"config.json: {name} has {unknown}; known are {list(known)}")
    if len(given) != key("num_hidden_layers", len(given)):
        raise ValueError(
            f"config.json: {name} has {len(given)} layers; num_hidden_layers = {key('num_hidden_layers')} must be the "
            "same number"
        )
    return [known[one] for one in given]


def _mamba2_from_hf(key: Keys) -> Mamba2:
    sizes = key.options(MAMBA2_SIZES, state_dim=128, groups=8, conv_size=4, conv_bias=True)
    return Mamba2(**sizes, **time_step_limit(key))


def _attention_from_hf(key: Keys) -> Attention:
    heads = key("num_attention_heads")
    head_dim = key("head_dim", None) or key("attention_head_dim", 128)
    return Attention(heads=heads, kv_heads=key("num_key_value_heads") or heads, head_dim=head_dim, rope_theta=None)


def _moe_from_hf(key: Keys) -> MoEConfig:
    key.only("n_shared_experts", 1)
    sizes = key.options(MOE_SIZES, normalise=True, scale=1.0, groups=1, top_groups=1)
    sizes["shared_hidden_dim"] = sizes["shared_hidden_dim"] or key("intermediate_size")  # as transformers has it
    return MoEConfig(
        **sizes,
        score="sigmoid",
        selection_bias=True,
        activation="relu2",
        latent_dim=key("moe_latent_size", None) or 0,
    )


def _to_hf(config: ModelConfig) -> Json:
    kinds = [layer.name for layer in config.layers]
    words, letters = ({kind: name for name, kind in reversed(table.items())} for table in (WORDS, LETTERS))
    written = dict(
        model_type="nemotron_h",
        **named(config, NAMES),
        layers_block_type=[words[kind] for kind in kinds],
        hybrid_override_pattern="".join(letters[kind] for kind in kinds),
        intermediate_size=config.hidden_dim or config.dim,
        mlp_hidden_act="relu2",
        attention_bias=False,
    )
    if mamba := options_of(config, Mamba2):
        written |= dict(
            **named(mamba, MAMBA2_SIZES),
            **time_step_limit_to_hf(mamba.dt_min, mamba.dt_max),
            # What transformers takes for the lower limit. Its initial weights need the logarithm.
            time_step_min=mamba.dt_min or sys.float_info.min,
        )
    if attention := options_of(config, Attention):
        written |= dict(head_dim=attention.head_dim, **named(attention, HEADS))
    if (moe := config.moe) is not None:
        written |= dict(**named(moe, MOE_SIZES), n_shared_experts=1, moe_latent_size=moe.latent_dim or None)
    return written


NEMOTRON_H = Family(
    MODEL,
    LAYERS,
    weights("mlp.", "mixer.", *_MLP),
    EXPERTS,
    _from_hf,
    _to_hf,
    prefixes=("backbone.", "model."),
    ignored=(r"mtp\..*",),
    ties=False,
    float32=ROUTER,
)
