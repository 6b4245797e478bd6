"""OLMo-Hybrid: Gated DeltaNet, and attention in post-norm blocks."""

from __future__ import annotations

import math

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.layout import (
    GDN_SIZES,
    MLP,
    MODEL,
    Family,
    Json,
    Keys,
    attention_to_hf,
    common_from_hf,
    common_to_hf,
    convolutions,
    gates,
    named,
    options_of,
    self_attention,
    spelled,
    weights,
)
from titan_linear.models.mixers import GDN, Attention

O_NORM_EPS = 1e-5  # eps of linear layers' output norm, whatever the model's norm_eps

# --- Tensors ---------------------------------------------------------------------------------------------------------


# `transformers` writes names of its own for both norms of a linear layer and, by the same rule, one of a softmax layer.
OLMO_GDN = (
    spelled("mixer_norm.weight", "attention_layer_norm.weight", "input_layernorm.weight"),
    spelled("mlp_norm.weight", "feedforward_layer_norm.weight", "post_attention_layernorm.weight"),
    *weights("mixer.", "linear_attn.", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"),
    convolutions("linear_attn.", thirds=True),
    *gates("linear_attn."),
)
OLMO_ATTENTION = (
    spelled("mixer_norm.weight", "feedforward_layer_norm.weight", "post_attention_layernorm.weight"),
    spelled("mlp_norm.weight", "post_feedforward_layernorm.weight"),
    *self_attention("mixer.", "self_attn.", "q_norm", "k_norm"),
)

# --- config.json -----------------------------------------------------------------------------------------------------


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    pattern = key.pattern(_attention_from_hf, _gdn_from_hf, lambda i: i % 4 == 3)
    if len(set(pattern)) < 2:  # transformers refuses it
        raise ValueError(f"config.json: every layer is {pattern[0].name}, and this architecture has gdn and attention")
    return ModelConfig(
        **common_from_hf(key),
        pattern=pattern,
        hidden_dim=key("intermediate_size"),
        post_norm=(Attention.name,),
    )


def _gdn_from_hf(key: Keys) -> GDN:
    heads = key("linear_num_key_heads", None) or key("num_attention_heads")
    head_dim = key("linear_key_head_dim", None) or int(0.75 * key("hidden_size") / heads)
    return GDN(
        heads=heads,
        v_heads=key("linear_num_value_heads", None) or key("num_attention_heads"),
        head_dim=head_dim,
        v_head_dim=key("linear_value_head_dim", None) or 2 * head_dim,
        conv_size=key("linear_conv_kernel_dim", 4),
        beta_range=2.0 if key("linear_allow_neg_eigval", True) else 1.0,
        o_norm_eps=O_NORM_EPS,
    )


def _attention_from_hf(key: Keys) -> Attention:
    heads = key("num_attention_heads")
    rope = key.rope(math.nan)
    if rope["rope_theta"] is not None and math.isnan(rope["rope_theta"]):  # transformers and vLLM read this differently
        raise ValueError("config.json: rope_parameters has no 'rope_theta'; set it: null for a model without positions")
    return Attention(
        heads=heads,
        kv_heads=key("num_key_value_heads", None) or heads,
        head_dim=key("hidden_size") // heads,
        qk_norm="width",
        **rope,
    )


def _to_hf(config: ModelConfig) -> Json:
    written = dict(model_type="olmo_hybrid", **common_to_hf(config), intermediate_size=config.hidden_dim)
    if attention := options_of(config, Attention):
        written |= attention_to_hf(attention)
    if gdn := options_of(config, GDN):
        written |= named(gdn, GDN_SIZES)
        written["linear_allow_neg_eigval"] = gdn.beta_range == 2.0
    return written


LAYERS = {(GDN,): OLMO_GDN, (Attention,): OLMO_ATTENTION}
OLMO_HYBRID = Family(MODEL, LAYERS, MLP, (), _from_hf, _to_hf, float32=("A_log",))
