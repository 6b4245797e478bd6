"""LFM2: gated short convolutions and attention, each followed by a SwiGLU."""

from functools import partial

from titan_linear.models.families.keys import (
    HEADS,
    USUAL,
    Keys,
    Part,
    Row,
    always,
    derived,
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


write_types = partial(write_layer_types, linear="conv")
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
KEYS = table(
    "lfm2",
    *COMMON,
    layer_types(ATTENTION, CONVOLUTION, _is_full, write_types, conv="linear_attention"),
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
