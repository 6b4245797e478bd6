"""Models by name and flavor. The real ones follow FLA's configurations of about 340M and 1.3B parameters."""

from __future__ import annotations

from dataclasses import replace

from titan_linear.models.config import ModelConfig

PATTERNS = {"kda": ("kda",), "gdn": ("gdn",), "hybrid": ("kda", "kda", "kda", "attention")}

# Trains on two CPU cores in a minute; every mixer, grouped value heads, QK-norm and output gate are in it.
_DEBUG = ModelConfig(
    vocab_size=320, dim=128, pattern=("kda", "gdn", "attention"), num_layers=3, hidden_dim=256,
    linear_heads=2, linear_v_heads=4, linear_head_dim=32, linear_v_head_dim=32,
    heads=4, kv_heads=2, head_dim=32, qk_norm="head", output_gate=True,
)  # fmt: skip

_340M = ModelConfig(
    vocab_size=32000, dim=1024, pattern=(), num_layers=24, hidden_dim=2816,
    linear_heads=8, linear_v_heads=8, linear_head_dim=128, linear_v_head_dim=128,
    heads=16, kv_heads=8, head_dim=64, qk_norm="head", rope_theta=None, tie_embeddings=True,
)  # fmt: skip

_1_3B = replace(
    _340M, dim=2048, hidden_dim=5632, num_layers=24, linear_heads=16, linear_v_heads=16, heads=16, kv_heads=8,
    head_dim=128,
)  # fmt: skip

_BASE = {"debug": _DEBUG, "340M": _340M, "1.3B": _1_3B}


def preset(name: str, flavor: str, vocab_size: int | None = None) -> ModelConfig:
    """The model of `model.name` and `model.flavor`; vocab_size replaces the preset's. ValueError for unknown names."""
    for key, value, known in (("model.name", name, PATTERNS), ("model.flavor", flavor, _BASE)):
        if value not in known:
            raise ValueError(f"{key} = {value!r} is unknown; use one of {', '.join(known)}")
    config = _BASE[flavor]
    if flavor != "debug" or name != "hybrid":
        config = replace(config, pattern=PATTERNS[name])
    return config if vocab_size is None else replace(config, vocab_size=vocab_size)
