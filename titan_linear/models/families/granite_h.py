"""Granite 4 hybrids and Bamba: Mamba-2 or attention, then experts and a shared MLP.

Bamba and some Granite models have the MLP alone. In Granite models, constant factors scale
embedding, branches and logits. In Bamba, half of each head has positions.
"""

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.keys import (
    COMMON,
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
    MAMBA2_DIMS,
    TIME_STEP_LIMIT,
    UNGROUPED,
    Json,
    Keys,
    Part,
    Row,
    derived,
    experts,
    layer_types,
    only,
    plain,
    rope,
    share_of_width,
    table,
    written,
)
from titan_linear.models.mixers import Attention, Mamba2

POSITIONS = rope(1e4)
MAMBA2 = Part(
    Mamba2,
    MAMBA2_DIMS,
    derived(
        head_dim=lambda key: key("mamba_expand", 2) * key("hidden_size") // key("mamba_n_heads")
    ),
    TIME_STEP_LIMIT,
)


def _write_expand(model: ModelConfig) -> Json:
    """Write Mamba-2's width divided by the model's, an integer in transformers."""
    widths = [mixer.heads * mixer.head_dim for mixer in model.mixers if isinstance(mixer, Mamba2)]
    return {"mamba_expand": widths[0] // model.dim} if widths else {}


EXPAND = Row(write=_write_expand)


# The usual scale is None in our options.
def _read_scale(key: Keys) -> Json:
    scale = float(key("attention_multiplier", 1.0))
    return {"scale": None if scale == share_of_width(key) ** -0.5 else scale}


def _write_scale(attention: Attention) -> Json:
    usual = attention.head_dim**-0.5
    return {"attention_multiplier": usual if attention.scale is None else attention.scale}


# Positions exist only if `position_embedding_type` is "rope".
def _read_positions(key: Keys) -> Json:
    return (
        POSITIONS.read(key)
        if key("position_embedding_type", None) == "rope"
        else {"rope_theta": None}
    )


def _write_positions(attention: Attention) -> Json:
    return (
        {"position_embedding_type": "rope", **POSITIONS.write(attention)}
        if attention.rotary
        else {}
    )


ATTENTION = Part(
    Attention, *UNGROUPED, Row(_read_scale, _write_scale), Row(_read_positions, _write_positions)
)
GRANITE = table(
    "granitemoehybrid",
    *COMMON,
    written(position_embedding_type="nope"),
    layer_types(
        ATTENTION,
        MAMBA2,
        lambda key, i: False,
        mamba="linear_attention",
        attention="full_attention",
    ),
    only("mamba_proj_bias", False),
    plain(hidden_dim="shared_intermediate_size"),
    experts(
        lambda key: key("num_local_experts"),
        plain(
            num_experts="num_local_experts",
            top_k="num_experts_per_tok",
            hidden_dim="intermediate_size",
        ),
        derived(shared_hidden_dim=lambda key: key("shared_intermediate_size")),
        otherwise=lambda model: {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "intermediate_size": model.hidden_dim,
        },
    ),
    plain(
        embedding_factor=("embedding_multiplier", 1.0),
        residual_factor=("residual_multiplier", 1.0),
        logits_divisor=("logits_scaling", 1.0),
    ),
    only("position_embedding_type", None, "nope", "rope"),
    EXPAND,
)


# --- Bamba ------------------------------------------------------------------------------


def _write_indices(model: ModelConfig) -> Json:
    """Write the indices of softmax layers: transformers derives the layer types from them."""
    indices = [i for i, layer in enumerate(model.layers) if not layer.mixers[0].linear]
    return {"attn_layer_indices": indices}


BAMBA = table(
    "bamba",
    *COMMON,
    only("mlp_bias mamba_proj_bias", False),
    HIDDEN_DIM,
    layer_types(
        Part(Attention, HEADS, rope(1e4, 0.5), HEAD_DIM),
        MAMBA2,
        lambda key, i: i in (key("attn_layer_indices", None) or []),
        _write_indices,
    ),
    EXPAND,
)
