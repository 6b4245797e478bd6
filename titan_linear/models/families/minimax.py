"""MiniMax-01: Lightning and softmax attention, each followed by experts.

A branch adds to its normalized input.
"""

from titan_linear.models.families.keys import (
    COMMON,
    HEAD_DIM,
    HEADS,
    Json,
    Keys,
    Part,
    Row,
    experts,
    layer_types,
    only,
    plain,
    table,
    write_rope,
)
from titan_linear.models.mixers import Attention, Lightning


def _of_all(ours: str, factor: str) -> Row:
    """Map a factor that must be the same for all kinds of branches."""
    names = [f"{branch}_{factor}_factor" for branch in ("full_attn", "linear_attn", "mlp")]

    def read(key: Keys) -> Json:
        factors = {name: float(key(name, 1)) for name in names}
        if len(set(factors.values())) > 1:
            raise ValueError(f"config.json: {factors} must be one number; fetch it again")
        return {ours: factors[names[0]]}

    return Row(read, lambda model: dict.fromkeys(names, getattr(model, ours)))


# The number of rotated channels, in place of a share.
def _read_rotary_dim(key: Keys) -> Json:
    head_dim = HEAD_DIM.read(key)["head_dim"]
    return key.rope(1e6, key("rotary_dim", head_dim) / head_dim)


ROTARY_DIM = Row(
    _read_rotary_dim,
    lambda attention: {"rotary_dim": int(attention.head_dim * attention.rotary_fraction)},
)
LIGHTNING = Part(Lightning, plain(heads="num_attention_heads"), HEAD_DIM)
ATTENTION = Part(Attention, HEAD_DIM, ROTARY_DIM, HEADS, Row(write=write_rope))
KEYS = table(
    "minimax",
    *COMMON,
    layer_types(ATTENTION, LIGHTNING, lambda key, i: i % 2 == 0),
    only("sliding_window", None),
    only("router_jitter_noise", 0.0),
    experts(
        lambda key: True,
        plain(
            num_experts="num_local_experts",
            top_k="num_experts_per_tok",
            hidden_dim="intermediate_size",
        ),
    ),
    _of_all("kept_factor", "alpha"),
    _of_all("residual_factor", "beta"),
    hidden_dim=0,
    normed_residual=True,
)
