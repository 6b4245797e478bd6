"""Falcon-H1: parallel Mamba-2 and attention, then a SwiGLU; muP factors.

Constant factors scale most projections.
"""

from titan_linear.models.families.keys import (
    COMMON,
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
    MAMBA2_DIMS,
    TIME_STEP_LIMIT,
    Json,
    Keys,
    Part,
    Row,
    changed,
    derived,
    mixer,
    only,
    plain,
    rope,
    table,
    written,
)
from titan_linear.models.mixers import Attention, Mamba2


def _factors(theirs: str, *ours: str) -> Row:
    """Map one key, a list of numbers, to several of our options."""

    def read(key: Keys) -> Json:
        given = key(theirs, None) or [1.0] * len(ours)
        if len(given) != len(ours):
            raise ValueError(f"config.json: {theirs} = {given}; give {len(ours)} numbers")
        return dict(zip(ours, given))

    return Row(read, lambda part: {theirs: [getattr(part, name) for name in ours]})


# The factors of the inputs of Mamba-2, in the order of the list.
INPUTS = _factors("ssm_multipliers", "z_factor", "x_factor", "b_factor", "c_factor", "dt_factor")


def _head_dim(key: Keys) -> int:
    if (given := key("mamba_d_head", "auto")) != "auto":
        return given
    width = key("mamba_d_ssm") or key("mamba_expand", 2) * key("hidden_size")
    return width // key("mamba_n_heads")


def _read_norm(key: Keys) -> Json:
    """Read whether the output has a norm.

    The norm must follow the gate, which is not the default of transformers.
    """
    if normed := key("mamba_rms_norm", False):
        only("mamba_norm_before_gate", False).read(
            Keys({"mamba_norm_before_gate": True, **key.config})
        )
    return {"output_norm": normed}


def _read_attention_factors(key: Keys) -> Json:
    """Read factors of attention. A factor on its input acts on queries, keys and values."""
    factor = key("attention_in_multiplier", 1.0)
    return {
        "key_factor": factor**2 * key("key_multiplier", 1.0),
        "out_factor": factor * key("attention_out_multiplier", 1.0),
    }


# A factor on the input of Mamba-2 multiplies the factors of all its inputs.
def _read_inputs(key: Keys) -> Json:
    return {name: key("ssm_in_multiplier", 1.0) * x for name, x in INPUTS.read(key).items()}


MAMBA2 = Part(
    Mamba2,
    MAMBA2_DIMS,
    derived(head_dim=_head_dim),
    TIME_STEP_LIMIT,
    Row(write=lambda mamba: {"mamba_d_ssm": mamba.heads * mamba.head_dim}),
    Row(
        _read_norm,
        lambda mamba: {"mamba_rms_norm": mamba.output_norm, "mamba_norm_before_gate": False},
    ),
    written(ssm_in_multiplier=1.0),
    Row(_read_inputs, INPUTS.write),
    plain(out_factor=("ssm_out_multiplier", 1.0)),
)
ATTENTION = Part(
    Attention,
    HEADS,
    rope(1e4),
    HEAD_DIM,
    Row(_read_attention_factors, lambda attention: {"key_multiplier": attention.key_factor}),
    Row(
        write=lambda attention: {
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": attention.out_factor,
        }
    ),
)
KEYS = table(
    "falcon_h1",
    *COMMON,
    only("mlp_bias mamba_proj_bias projectors_bias", False),
    HIDDEN_DIM,
    plain(embedding_factor=("embedding_multiplier", 1.0)),
    _factors("mlp_multipliers", "gate_factor", "mlp_factor"),
    changed("logits_divisor", "lm_head_multiplier", lambda x: 1 / x, lambda x: 1 / x, 1.0),
    derived(pattern=lambda key: ((MAMBA2.read(key), ATTENTION.read(key)),)),
    mixer(MAMBA2),
    mixer(ATTENTION),
)
