"""LFM2-MoE: LFM2's layers, with experts in all but the first ones."""

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.keys import (
    HIDDEN_DIM,
    Json,
    Keys,
    Row,
    always,
    experts,
    layer_types,
    plain,
    table,
)
from titan_linear.models.families.lfm2 import ATTENTION, COMMON, CONVOLUTION, NORM_EPS, write_types


def _is_full(key: Keys, layer: int) -> bool:
    """Read the type of a layer, without which transformers has no model."""
    return key("layer_types")[layer] == "full_attention"


def _has_experts(key: Keys) -> bool:
    return key("num_dense_layers", 2) < key("num_hidden_layers")


def _read_dense_layers(key: Keys) -> Json:
    return {"dense_layers": tuple(range(key("num_dense_layers", 2)))} if _has_experts(key) else {}


def _write_dense_layers(model: ModelConfig) -> Json:
    """Write the number of layers without experts, which come first."""
    return {"num_dense_layers": len(model.dense_layers) if model.moe else model.num_layers}


KEYS = table(
    "lfm2_moe",
    *COMMON,
    NORM_EPS,
    always("conv_bias", False),
    layer_types(ATTENTION, CONVOLUTION, _is_full, write_types, conv="linear_attention"),
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
