"""LFM2: gated short convolutions and attention, each followed by a SwiGLU."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.layout import (
    HEADS,
    Family,
    Json,
    Keys,
    attention_to_hf,
    common_from_hf,
    common_to_hf,
    fused,
    options_of,
    outside_layers,
    weights,
)
from titan_linear.models.mixers import Attention, ShortConv

# --- Tensors ---------------------------------------------------------------------------------------------------------

MODEL = outside_layers("embed_tokens", "embedding_norm")
_NORMS = weights("", "", mixer_norm="operator_norm", mlp_norm="ffn_norm")
LAYERS = {
    (ShortConv,): (
        *_NORMS,
        fused(("b_proj", "c_proj", "x_proj"), "conv.in_proj.weight"),
        fused(("conv1d",), "conv.conv.weight", form="conv"),
        *weights("mixer.", "conv.", o_proj="out_proj"),
    ),
    (Attention,): (
        *_NORMS,
        *weights(
            "mixer.",
            "self_attn.",
            "q_proj",
            "k_proj",
            "v_proj",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            o_proj="out_proj",
        ),
    ),
}
MLP = weights("mlp.", "feed_forward.", gate_proj="w1", up_proj="w3", down_proj="w2")

# --- config.json -----------------------------------------------------------------------------------------------------


def _from_hf(config: Json) -> ModelConfig:
    key = Keys({"rms_norm_eps": config.get("norm_eps", 1e-5), "tie_word_embeddings": True, **config})
    key.only("conv_bias", False)
    if "tie_embedding" in config:  # an older name
        key = Keys({**key.config, "tie_word_embeddings": config["tie_embedding"]})
    attention = key("full_attn_idxs", None)
    attention = range(key("num_hidden_layers")) if attention is None else attention
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(_attention_from_hf, _conv_from_hf, lambda i: i in attention, conv="linear_attention"),
        hidden_dim=_hidden_dim(key),
    )


def _conv_from_hf(key: Keys) -> ShortConv:
    return ShortConv(channels=key("hidden_size"), conv_size=key("conv_L_cache", 3))


def _attention_from_hf(key: Keys) -> Attention:
    head_dim = key("hidden_size") // key("num_attention_heads")
    return Attention(**key.options(HEADS), head_dim=head_dim, qk_norm="head", **key.rope(1e6))


def _hidden_dim(key: Keys) -> int:
    """What their key says, or two thirds of it times a factor, rounded up."""
    given = key("block_ff_dim", None) or key("intermediate_size")
    if not key("block_auto_adjust_ff_dim", True):
        return given
    multiple = key("block_multiple_of", 256)
    return -(-int(key("block_ffn_dim_multiplier", 1.0) * int(2 * given / 3)) // multiple) * multiple


def _to_hf(config: ModelConfig) -> Json:
    written = common_to_hf(config)
    written |= dict(
        model_type="lfm2",
        norm_eps=written.pop("rms_norm_eps"),
        layer_types=["conv" if layer.mixers[0].linear else "full_attention" for layer in config.layers],
        intermediate_size=config.hidden_dim,
        block_auto_adjust_ff_dim=False,
        conv_bias=False,
    )
    if conv := options_of(config, ShortConv):
        written["conv_L_cache"] = conv.conv_size
    if attention := options_of(config, Attention):
        written |= attention_to_hf(attention)
    return written


LFM2 = Family(MODEL, LAYERS, MLP, (), _from_hf, _to_hf)
