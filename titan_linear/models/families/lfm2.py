"""LFM2: gated short convolutions and attention, each followed by a SwiGLU.

In LFM2-MoE, experts follow in all but the first layers.
"""

from collections.abc import Callable
from functools import partial

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.keys import (
    HEADS,
    HIDDEN_DIM,
    USUAL,
    Json,
    Keys,
    Part,
    Row,
    always,
    derived,
    experts,
    layer_types,
    overruled,
    plain,
    rope,
    share_of_width,
    table,
    write_layer_types,
)
from titan_linear.models.mixers import Attention, ShortConv


# Without indices, all layers have attention.
def _is_full(key: Keys, layer: int) -> bool:
    full = key("full_attn_idxs", None)
    return full is None or layer in full


def _hidden_dim(key: Keys) -> int:
    """Return their key's value, or two thirds of it times a factor, rounded up."""
    given = key("block_ff_dim", None) or key("intermediate_size")
    if not key("block_auto_adjust_ff_dim", True):
        return given
    multiple = key("block_multiple_of", 256)
    return -(-int(key("block_ffn_dim_multiplier", 1.0) * int(2 * given / 3)) // multiple) * multiple


CONVOLUTION = Part(
    ShortConv,
    derived(channels=lambda key: key("hidden_size")),
    plain(conv_size=("conv_L_cache", 3)),
)
ATTENTION = Part(Attention, HEADS, derived(head_dim=share_of_width), rope(1e6), qk_norm="head")
COMMON = (
    plain(vocab_size="vocab_size", dim="hidden_size", num_layers="num_hidden_layers"),
    overruled(tie_embeddings=("tie_embedding tie_word_embeddings", True)),
    plain(init_std=("initializer_range", 0.02)),
    *USUAL,
)
NORM_EPS = plain(norm_eps=("norm_eps", 1e-5))


def _layer_types(is_full: Callable[[Keys, int], bool]) -> Row:
    write = partial(write_layer_types, linear="conv")
    return layer_types(ATTENTION, CONVOLUTION, is_full, write, conv="linear_attention")


LFM2 = table(
    "lfm2",
    *COMMON,
    _layer_types(_is_full),
    NORM_EPS,
    derived(hidden_dim=_hidden_dim),
    Row(
        write=lambda model: {
            "intermediate_size": model.hidden_dim,
            "block_auto_adjust_ff_dim": False,
        }
    ),
    always("conv_bias", False),
)

# --- With experts -----------------------------------------------------------------------


def _has_experts(key: Keys) -> bool:
    return key("num_dense_layers", 2) < key("num_hidden_layers")


def _read_dense_layers(key: Keys) -> Json:
    return {"dense_layers": tuple(range(key("num_dense_layers", 2)))} if _has_experts(key) else {}


def _write_dense_layers(model: ModelConfig) -> Json:
    """Write the number of layers without experts, which come first."""
    return {"num_dense_layers": len(model.dense_layers) if model.moe else model.num_layers}


LFM2_MOE = table(
    "lfm2_moe",
    *COMMON,
    NORM_EPS,
    always("conv_bias", False),
    # transformers has no model without layer_types.
    _layer_types(lambda key, layer: key("layer_types")[layer] == "full_attention"),
    HIDDEN_DIM,
    Row(_read_dense_layers, _write_dense_layers),
    experts(
        _has_experts,
        plain(
            num_experts="num_experts",
            top_k="num_experts_per_tok",
            hidden_dim="moe_intermediate_size",
            normalise=("norm_topk_prob", True),
            scale=("routed_scaling_factor", 1.0),
            selection_bias=("use_expert_bias", True),
        ),
        score="sigmoid",
        normalise_eps=1e-6,
    ),
)
