"""Ling 3: Kimi Delta Attention with bounded gates, latent attention, and experts.

Latent attention has positions and gated heads.
"""

from titan_linear.models.families.keys import (
    COMMON,
    Json,
    Keys,
    Part,
    Row,
    layer_types,
    only,
    overruled,
    plain,
    table,
)
from titan_linear.models.families.kimi import LATENT, mlps
from titan_linear.models.mixers import KDA, MLA


def _read_positions(key: Keys) -> Json:
    positions = key.rope(6e6, 1.0)
    # Published folders give the fraction for heads of linear layers.
    of_head = key("qk_rope_head_dim") / key("head_dim", 128)
    if positions.get("rope_scaling") or positions["rotary_fraction"] not in (1, of_head):
        raise ValueError(
            "config.json: rope_parameters scale or leave out channels; only rope_type 'default' is known"
        )
    return {"rope_theta": positions["rope_theta"]}


def _write_positions(mla: MLA) -> Json:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": mla.rope_theta}}


# Only safe gates have a bound.
def _read_bound(key: Keys) -> Json:
    return {"lower_bound": key("kda_lower_bound", -5.0) if key("kda_safe_gate", True) else None}


def _write_bound(kda: KDA) -> Json:
    bound = kda.lower_bound
    return {"kda_safe_gate": bound is not None, "kda_lower_bound": -5.0 if bound is None else bound}


LINEAR = Part(
    KDA,
    overruled(
        heads="linear_num_heads num_attention_heads",
        v_heads="linear_num_heads num_attention_heads",
        head_dim=("linear_head_dim head_dim", 128),
        v_head_dim=("linear_head_dim head_dim", 128),
        conv_size=("linear_conv_kernel_dim short_conv_kernel_size", 4),
    ),
    Row(_read_bound, _write_bound),
    gate_bias=False,
    low_rank_gates=False,
)
ATTENTION = Part(
    MLA,
    Row(_read_positions, _write_positions),
    *LATENT,
    plain(q_rank=("q_lora_rank", None)),
    head_gate=True,
)
KEYS = table(
    "bailing_hybrid",
    *COMMON,
    layer_types(ATTENTION, LINEAR, lambda key, i: (i + 1) % key("layer_group_size", 6) == 0),
    *mlps(first_sparse=2),
    only("no_kda_lora rope_interleave", True),
    only("score_function", "sigmoid"),
    only("expert_swiglu_limit_list share_expert_swiglu_limit_list", None),
)
