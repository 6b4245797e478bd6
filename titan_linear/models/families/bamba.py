"""Bamba: Mamba-2 or attention with positions on half of each head, then a SwiGLU."""

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.granite_h import EXPAND, MAMBA2
from titan_linear.models.families.keys import (
    COMMON,
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
    Json,
    Part,
    layer_types,
    only,
    rope,
    table,
)
from titan_linear.models.mixers import Attention


def _softmax_layers(model: ModelConfig) -> Json:
    """Write the indices of softmax layers: transformers derives the layer types from them."""
    return {
        "attn_layer_indices": [
            i for i, layer in enumerate(model.layers) if not layer.mixers[0].linear
        ]
    }


ATTENTION = Part(Attention, HEADS, rope(1e4, 0.5), HEAD_DIM)
KEYS = table(
    "bamba",
    *COMMON,
    only("mlp_bias mamba_proj_bias", False),
    HIDDEN_DIM,
    layer_types(
        ATTENTION,
        MAMBA2,
        lambda key, i: i in (key("attn_layer_indices", None) or []),
        _softmax_layers,
    ),
    EXPAND,
)
