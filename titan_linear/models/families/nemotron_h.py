"""Nemotron-H and Nemotron 3, whose layers have one branch each.

A layer is Mamba-2, attention, a squared-ReLU MLP or experts.
"""

import sys

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.keys import (
    TIME_STEP_LIMIT,
    Json,
    Keys,
    Part,
    Row,
    always,
    as_many_as_layers,
    changed,
    either,
    experts,
    mixer,
    names_of_model,
    only,
    plain,
    shortest,
    table,
)
from titan_linear.models.mixers import Attention, Mamba2
from titan_linear.models.mlps import Dense

# Letters of `hybrid_override_pattern`.
LETTERS = {"M": "mamba2", "*": "attention", "-": Dense.name, "E": MoEConfig.name}
# Words of `layers_block_type`, in transformers and in earlier folders.
WORDS = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": Dense.name,
    "moe": MoEConfig.name,
}
MAMBA2 = Part(
    Mamba2,
    plain(
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        state_dim=("ssm_state_size", 128),
        groups=("n_groups", 8),
        conv_size=("conv_kernel", 4),
        conv_bias=("use_conv_bias", True),
    ),
    TIME_STEP_LIMIT,
    # Transformers reads this key as the lower limit. Its initial weights take the
    # logarithm, so it is not 0.
    Row(write=lambda mamba: {"time_step_min": mamba.dt_min or sys.float_info.min}),
)
ATTENTION = Part(
    Attention,
    either("head_dim", "head_dim", lambda key: key("attention_head_dim", 128), None),
    plain(heads="num_attention_heads"),
    either("kv_heads", "num_key_value_heads", lambda key: key("num_attention_heads")),
    rope_theta=None,
)
EXPERTS = experts(
    lambda key: MoEConfig.name in _kinds(key),
    plain(
        num_experts="n_routed_experts",
        top_k="num_experts_per_tok",
        hidden_dim="moe_intermediate_size",
    ),
    either(
        "shared_hidden_dim",
        "moe_shared_expert_intermediate_size",
        lambda key: key("intermediate_size"),
    ),
    plain(
        normalise=("norm_topk_prob", True),
        scale=("routed_scaling_factor", 1.0),
        groups=("n_group", 1),
        top_groups=("topk_group", 1),
    ),
    always("n_shared_experts", 1),
    changed(
        "latent_dim", "moe_latent_size", lambda size: size or 0, lambda size: size or None, None
    ),
    score="sigmoid",
    selection_bias=True,
    activation="relu2",
)


def _kinds(key: Keys) -> list[str]:
    """Return the kind of each layer, from a list of words or a string of letters."""
    name = "layers_block_type" if key("layers_block_type", None) else "hybrid_override_pattern"
    known = WORDS if name == "layers_block_type" else LETTERS
    given = key(name)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"config.json: {name} has {unknown}; known are {list(known)}")
    as_many_as_layers(name, given, key("num_hidden_layers", len(given)))
    return [known[one] for one in given]


def _pattern(key: Keys) -> Json:
    kinds = _kinds(key)
    parts = {"mamba2": MAMBA2, "attention": ATTENTION}
    mixers = {kind: parts[kind].read(key) for kind in parts if kind in kinds}
    return {
        "num_layers": len(kinds),
        "pattern": shortest([mixers.get(kind, kind) for kind in kinds]),
    }


# Write both spellings.
def _write_pattern(model: ModelConfig) -> Json:
    words = {kind: word for word, kind in reversed(WORDS.items())}
    letters = {kind: letter for letter, kind in LETTERS.items()}
    return {
        "layers_block_type": [words[layer.name] for layer in model.layers],
        "hybrid_override_pattern": "".join(letters[layer.name] for layer in model.layers),
    }


KEYS = table(
    "nemotron_h",
    names_of_model(("layer_norm_epsilon", 1e-5), ("num_hidden_layers", None)),
    Row(_pattern, _write_pattern),
    Row(
        lambda key: {"hidden_dim": key("intermediate_size") if Dense.name in _kinds(key) else 0},
        lambda model: {"intermediate_size": model.hidden_dim or model.dim},
    ),
    always("mlp_hidden_act", "relu2"),
    always("attention_bias", False),
    only("mlp_bias use_bias mamba_proj_bias residual_in_fp32", False),
    only("mamba_hidden_act", "silu"),
    only("sliding_window quantization_config", None),
    mixer(MAMBA2),
    mixer(ATTENTION),
    EXPERTS,
    one_branch=True,
    activation="relu2",
)
