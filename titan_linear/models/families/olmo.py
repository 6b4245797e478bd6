"""OLMo-Hybrid: Gated DeltaNet, and attention in post-norm blocks."""

import math

from titan_linear.models.families.keys import (
    COMMON,
    HIDDEN_DIM,
    UNGROUPED,
    Json,
    Keys,
    Part,
    Row,
    beta_range,
    either,
    layer_types,
    plain,
    table,
    write_rope,
)
from titan_linear.models.mixers import GDN, Attention

# Epsilon of linear layers' output norm, whatever the model's norm_eps.
O_NORM_EPS = 1e-5


def _key_dim(key: Keys) -> int:
    heads = key("linear_num_key_heads", None) or key("num_attention_heads")
    return key("linear_key_head_dim", None) or int(0.75 * key("hidden_size") / heads)


GATED_DELTA_NET = Part(
    GDN,
    either("heads", "linear_num_key_heads", lambda key: key("num_attention_heads"), None),
    either("v_heads", "linear_num_value_heads", lambda key: key("num_attention_heads"), None),
    either("head_dim", "linear_key_head_dim", _key_dim, None),
    either("v_head_dim", "linear_value_head_dim", lambda key: 2 * _key_dim(key), None),
    plain(conv_size=("linear_conv_kernel_dim", 4)),
    beta_range("linear_allow_neg_eigval", True),
    o_norm_eps=O_NORM_EPS,
)


def _positions(key: Keys) -> Json:
    positions = key.rope(math.nan)
    theta = positions["rope_theta"]
    # transformers and vLLM differ in how they read a missing theta.
    if theta is not None and math.isnan(theta):
        raise ValueError(
            "config.json: rope_parameters has no 'rope_theta'; set it: null for a model without positions"
        )
    return positions


ATTENTION = Part(Attention, *UNGROUPED, Row(_positions, write_rope), qk_norm="width")
TYPES = layer_types(ATTENTION, GATED_DELTA_NET, lambda key, i: i % 4 == 3)


def _both_types(key: Keys) -> Json:
    pattern = TYPES.read(key)["pattern"]
    # transformers refuses models with one type of layer.
    if len(set(pattern)) < 2:
        raise ValueError(
            f"config.json: every layer is {pattern[0].name}, and this architecture has gdn and attention"
        )
    return {"pattern": pattern}


KEYS = table(
    "olmo_hybrid",
    *COMMON,
    Row(_both_types, TYPES.write),
    HIDDEN_DIM,
    post_norm=(Attention.name,),
)
