"""RWKV-7 ("Goose") in folders of flash-linear-attention: time mixing, then channel mixing."""

from titan_linear.models.families.keys import (
    Json,
    Keys,
    Part,
    Row,
    always,
    derived,
    either,
    mixer,
    names_of_model,
    only,
    plain,
    table,
    written,
)
from titan_linear.models.mixers import RWKV7

# --- config.json -----------------------------------------------------------------------


# Heads cover the width exactly, and values are as wide as the model.
def _read_heads(key: Keys) -> Json:
    dim = key("hidden_size")
    if key("value_dim", None) not in (None, dim, [dim] * key("num_hidden_layers")):
        raise ValueError(
            f"config.json: value_dim = {key('value_dim')}; only hidden_size = {dim} is known"
        )
    head_dim = key("head_dim", 64) or dim // key("num_heads")
    if dim % head_dim:
        raise ValueError(
            f"config.json: hidden_size = {dim} is not a multiple of head_dim = {head_dim}; fetch it again"
        )
    return {"heads": dim // head_dim, "head_dim": head_dim}


def _hidden_dim(key: Keys) -> int:
    return 32 * -(-int(key("hidden_size") * (key("hidden_ratio", None) or 4)) // 32)


MIXER = Part(
    RWKV7,
    Row(_read_heads, lambda mixer: {"head_dim": mixer.head_dim}),
    plain(
        w_rank=("decay_low_rank_dim", 64),
        a_rank=("a_low_rank_dim", 64),
        v_rank=("v_low_rank_dim", 16),
        g_rank=("gate_low_rank_dim", 128),
    ),
)
KEYS = table(
    "rwkv7",
    names_of_model(("norm_eps", 1e-5)),
    either("hidden_dim", "intermediate_size", _hidden_dim, None),
    always("hidden_act", "sqrelu"),
    derived(pattern=lambda key: (MIXER.read(key),)),
    mixer(MIXER),
    always("norm_first", True),
    always("norm_bias", True),
    only("attn", None),
    # FLA's fused norms add 1e-6 to the squares of keys.
    written(fuse_norm=False),
    layer_norm=True,
    activation="shifted_relu2",
)
