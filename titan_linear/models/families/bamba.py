"""Bamba: Mamba-2 or attention with positions on half of each head, then a SwiGLU."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.granite_h import mamba2_from_hf, mamba2_to_hf
from titan_linear.models.families.layout import (
    HEADS,
    Family,
    Json,
    Keys,
    attention_to_hf,
    common_from_hf,
    common_to_hf,
    layer_types,
    mamba2,
    options_of,
    outside_layers,
    self_attention,
    swiglu,
    weights,
)
from titan_linear.models.mixers import Attention, Mamba2

_NORMS = weights("", "", mixer_norm="input_layernorm", mlp_norm="pre_ff_layernorm")
LAYERS = {
    (Mamba2,): (*_NORMS, *mamba2("mamba.")),
    (Attention,): (*_NORMS, *self_attention()),
}


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    for name in ("mlp_bias", "mamba_proj_bias"):
        key.only(name, False)
    of_attention = key("attn_layer_indices", None) or []
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(_attention_from_hf, mamba2_from_hf, lambda i: i in of_attention),
        hidden_dim=key("intermediate_size"),
    )


def _attention_from_hf(key: Keys) -> Attention:
    return Attention(**key.options(HEADS), head_dim=key.head_dim(), **key.rope(1e4, 0.5))


def _to_hf(config: ModelConfig) -> Json:
    written = dict(**common_to_hf(config), model_type="bamba", intermediate_size=config.hidden_dim)
    del written["layer_types"]  # transformers derives them
    written["attn_layer_indices"] = [i for i, kind in enumerate(layer_types(config)) if kind == "full_attention"]
    if mamba := options_of(config, Mamba2):
        written |= mamba2_to_hf(mamba, config.dim)
    if attention := options_of(config, Attention):
        written |= dict(**attention_to_hf(attention), head_dim=attention.head_dim)
    return written


BAMBA = Family(
    outside_layers("embed_tokens", "final_layernorm"), LAYERS, swiglu("mlp.", "feed_forward."), (), _from_hf, _to_hf
)
