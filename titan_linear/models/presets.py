"""Models by name and flavor: our own, in the sizes of FLA's 340M and 1.3B configurations, and published ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from titan_linear.models.config import MixerOptions, ModelConfig
from titan_linear.models.families import PUBLISHED
from titan_linear.models.mixers import GDN, KDA, Attention


def _debug(*pattern: MixerOptions) -> ModelConfig:
    """A model that trains on two CPU cores in a minute."""
    return ModelConfig(vocab_size=320, dim=128, pattern=pattern, num_layers=3, hidden_dim=256)


def _340M(*pattern: MixerOptions) -> ModelConfig:
    return ModelConfig(vocab_size=32000, dim=1024, pattern=pattern, num_layers=24, hidden_dim=2816, tie_embeddings=True)


def _1_3B(*pattern: MixerOptions) -> ModelConfig:
    return replace(_340M(*pattern), dim=2048, hidden_dim=5632)


# The smallest models have grouped value heads, QK-norm and an output gate.
_SMALL = dict(heads=2, v_heads=4, head_dim=32, v_head_dim=32)
_SMALL_ATTENTION = Attention(heads=4, kv_heads=2, head_dim=32, qk_norm="head", output_gate=True)
_MEDIUM = dict(heads=8, v_heads=8, head_dim=128, v_head_dim=128)
_MEDIUM_ATTENTION = Attention(heads=16, kv_heads=8, head_dim=64, qk_norm="head", rope_theta=None)
_LARGE = dict(heads=16, v_heads=16, head_dim=128, v_head_dim=128)
_LARGE_ATTENTION = replace(_MEDIUM_ATTENTION, head_dim=128)

OWN: dict[str, dict[str, ModelConfig]] = {
    "kda": {"debug": _debug(KDA(**_SMALL)), "340M": _340M(KDA(**_MEDIUM)), "1.3B": _1_3B(KDA(**_LARGE))},
    "gdn": {"debug": _debug(GDN(**_SMALL)), "340M": _340M(GDN(**_MEDIUM)), "1.3B": _1_3B(GDN(**_LARGE))},
    "hybrid": {
        "debug": _debug(KDA(**_SMALL), GDN(**_SMALL), _SMALL_ATTENTION),
        "340M": _340M(*[KDA(**_MEDIUM)] * 3, _MEDIUM_ATTENTION),
        "1.3B": _1_3B(*[KDA(**_LARGE)] * 3, _LARGE_ATTENTION),
    },
}
MODELS = {**OWN, **PUBLISHED}


def preset(name: str, flavor: str, vocab_size: int | None = None) -> ModelConfig:
    """The model of `model.name` and `model.flavor`; vocab_size replaces the preset's. ValueError for unknown names."""
    if name not in MODELS:
        raise ValueError(f"model.name = {name!r} is unknown; use one of {', '.join(MODELS)}")
    if flavor not in MODELS[name]:
        raise ValueError(f"model.flavor = {flavor!r} is unknown for {name!r}; use one of {', '.join(MODELS[name])}")
    config = MODELS[name][flavor]
    return config if vocab_size is None else replace(config, vocab_size=vocab_size)


def flavors() -> str:
    """A table of all models, for people to read."""
    lines = [f"{'model.name':<14}{'model.flavor':<20}{'layers':>6}{'dim':>7}{'vocabulary':>12}  mixers"]
    for name, sizes in MODELS.items():
        for flavor, config in sizes.items():
            mixers = Counter(type(mixer).__name__ for mixer in config.layers)
            shown = ", ".join(f"{number} {mixer}" for mixer, number in mixers.items())
            experts = f"; {config.moe.num_experts} experts" if config.moe else ""
            row = f"{name:<14}{flavor:<20}{config.num_layers:>6}{config.dim:>7}{config.vocab_size:>12}"
            lines.append(f"{row}  {shown}{experts}")
    return "\n".join(lines)
