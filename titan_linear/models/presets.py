"""Models by name and flavor: FLA's configurations of about 340M and 1.3B parameters, and published hybrids."""

from __future__ import annotations

from dataclasses import replace

from titan_linear.models.config import ModelConfig, MoEConfig

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


def _fla(name: str) -> dict[str, ModelConfig]:
    flavors = {f: replace(c, pattern=PATTERNS[name]) for f, c in (("340M", _340M), ("1.3B", _1_3B))}
    return {"debug": _DEBUG if name == "hybrid" else replace(_DEBUG, pattern=PATTERNS[name]), **flavors}


# --- Published models, after their config.json -----------------------------------------------------------------------

_QWEN = ModelConfig(
    vocab_size=248320, dim=0, pattern=("gdn", "gdn", "gdn", "attention"), num_layers=0, hidden_dim=0,
    linear_heads=16, linear_v_heads=16, linear_head_dim=128, linear_v_head_dim=128,
    head_dim=256, qk_norm="head", rope_theta=1e7, rotary_fraction=0.25, output_gate=True,
    zero_centred_norm=True, norm_eps=1e-6,
)  # fmt: skip


def _qwen(dim: int, layers: int, hidden: int, heads: int, kv_heads: int, v_heads: int, **more: object) -> ModelConfig:
    return replace(
        _QWEN, dim=dim, num_layers=layers, hidden_dim=hidden, heads=heads, kv_heads=kv_heads, linear_v_heads=v_heads,
        **more,
    )  # fmt: skip


def _qwen_moe(num_experts: int, top_k: int, hidden: int, **more: object) -> MoEConfig:
    return MoEConfig(num_experts, top_k, hidden, shared_hidden_dim=hidden, shared_gate=True, **more)


_QWEN3_5 = {
    "debug": replace(  # grouped value heads, partial rotary, experts with a load-balance loss
        _DEBUG, pattern=("gdn", "attention"), num_layers=2, rotary_fraction=0.25, zero_centred_norm=True, norm_eps=1e-6,
        moe=_qwen_moe(8, 2, 64, balance_coefficient=1e-2),
    ),
    "0.8B": _qwen(1024, 24, 3584, 8, 2, 16, tie_embeddings=True),
    "2B": _qwen(2048, 24, 6144, 8, 2, 16, tie_embeddings=True),
    "4B": _qwen(2560, 32, 9216, 16, 4, 32, tie_embeddings=True),
    "9B": _qwen(4096, 32, 12288, 16, 4, 32),
    "27B": _qwen(5120, 64, 17408, 24, 4, 48),
    "35B-A3B": _qwen(2048, 40, 0, 16, 2, 32, moe=_qwen_moe(256, 8, 512)),
    "397B-A17B": _qwen(4096, 60, 0, 32, 2, 64, moe=_qwen_moe(512, 10, 1024)),
}  # fmt: skip

_QWEN3_NEXT = {"80B-A3B": _qwen(2048, 48, 5120, 16, 2, 32, vocab_size=151936, moe=_qwen_moe(512, 10, 512))}

_OLMO_HYBRID = {
    "7B": ModelConfig(
        vocab_size=100352, dim=3840, pattern=("gdn", "gdn", "gdn", "attention"), num_layers=32, hidden_dim=11008,
        linear_heads=30, linear_v_heads=30, linear_head_dim=96, linear_v_head_dim=192, beta_range=2.0, o_norm_eps=1e-5,
        heads=30, kv_heads=30, head_dim=128, qk_norm="width", rope_theta=None, post_norm=("attention",), norm_eps=1e-6,
    )
}  # fmt: skip

_KIMI_LAYERS = ("kda", "kda", "kda", "mla") * 6 + ("kda", "kda", "mla")
_KIMI_LINEAR = {
    "debug": ModelConfig(  # latent attention, groups of experts, a selection bias that moves
        vocab_size=320, dim=128, pattern=("kda", "mla"), num_layers=2, hidden_dim=256,
        linear_heads=2, linear_v_heads=2, linear_head_dim=32, linear_v_head_dim=32,
        kda_lower_bound=None, kda_gate_bias=False,
        heads=4, kv_heads=4, kv_rank=32, nope_dim=32, shared_k_dim=16, mla_v_dim=32, rope_theta=None, dense_layers=(0,),
        moe=MoEConfig(8, 2, 64, shared_hidden_dim=64, score="sigmoid", scale=2.446, selection_bias=True, groups=4,
                      top_groups=2, bias_update_rate=1e-3),
    ),
    "48B-A3B": ModelConfig(
        vocab_size=163840, dim=2304, pattern=_KIMI_LAYERS, num_layers=27, hidden_dim=9216,
        linear_heads=32, linear_v_heads=32, linear_head_dim=128, linear_v_head_dim=128,
        kda_lower_bound=None, kda_gate_bias=False,
        heads=32, kv_heads=32, kv_rank=512, nope_dim=128, shared_k_dim=64, mla_v_dim=128, rope_theta=None,
        dense_layers=(0,),
        moe=MoEConfig(256, 8, 1024, shared_hidden_dim=1024, score="sigmoid", scale=2.446, selection_bias=True),
    ),
}  # fmt: skip

MODELS = {
    **{name: _fla(name) for name in PATTERNS},
    "qwen3.5": _QWEN3_5,
    "qwen3-next": _QWEN3_NEXT,
    "olmo-hybrid": _OLMO_HYBRID,
    "kimi-linear": _KIMI_LINEAR,
}


def preset(name: str, flavor: str, vocab_size: int | None = None) -> ModelConfig:
    """The model of `model.name` and `model.flavor`; vocab_size replaces the preset's. ValueError for unknown names."""
    if name not in MODELS:
        raise ValueError(f"model.name = {name!r} is unknown; use one of {', '.join(MODELS)}")
    if flavor not in MODELS[name]:
        raise ValueError(f"model.flavor = {flavor!r} is unknown for {name!r}; use one of {', '.join(MODELS[name])}")
    config = MODELS[name][flavor]
    return config if vocab_size is None else replace(config, vocab_size=vocab_size)
