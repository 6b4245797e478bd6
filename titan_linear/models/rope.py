"""Rotary frequencies, and their scaling to contexts beyond pretraining.

Types and fields have the names of transformers.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

# theta, rotated channels per head, fields of the scaling.
Rotary = tuple[float, int, tuple[tuple[str, object], ...]]
_LINEAR = "rope_type", "factor"
_RAMP = *_LINEAR, "original_max_position_embeddings"
_ON_SCORES = "attention_factor", "mscale", "mscale_all_dim"
# Smallest values; 0 for other fields.
_LEAST = {"factor": 1, "original_max_position_embeddings": 1, "beta_slow": 1e-6}
# Fields that each type reads.
USES = {
    "linear": _LINEAR,
    "llama3": (*_RAMP, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_RAMP, "beta_fast", "beta_slow", "truncate", *_ON_SCORES),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies.

    Frequencies that turn seldom in the pretraining's context are divided by a factor.

    "linear" divides all frequencies (position interpolation, Chen et al. 2023). The others
    divide frequencies below some number of turns (Llama 3.1; YaRN, Peng et al. 2023, eqs.
    17 to 22).
    """

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    # Context length of pretraining.
    original_max_position_embeddings: int | None = None
    # Numbers of turns in that context; frequencies between the two are divided in part.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Factor on cos and sin; None: 0.1 ln factor + 1, or by mscale and mscale_all_dim.
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    # Whether YaRN begins and ends at whole channels.
    truncate: bool = True

    name = "rope_scaling"

    @property
    def contradiction(self) -> str | None:
        """A contradiction of the values, worded for a message, as in `MixerOptions`."""
        # Smallest values, unused fields, then required and ordered fields.
        for name, value in vars(self).items():
            least = _LEAST.get(name, 0)
            if isinstance(value, int | float) and not value >= least:
                return f"rope_scaling {name} = {value!r}, which must be at least {least}"
        used = USES[self.rope_type]
        unused = [
            f.name
            for f in fields(self)
            if f.name not in used and getattr(self, f.name) != f.default
        ]
        if unused:
            return f"rope_scaling {', '.join(unused)}, which {self.rope_type!r} does not use"
        if (
            "original_max_position_embeddings" in used
            and self.original_max_position_embeddings is None
        ):
            return f"rope_scaling {self.rope_type!r} without original_max_position_embeddings"
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                return f"rope_scaling {low} = {getattr(self, low)}, which must be below {high} = {getattr(self, high)}"
        return None

    @property
    def reached(self) -> float | None:
        """Length of the longest text that the scaling is for; None if unknown."""
        return (
            self.original_max_position_embeddings
            and self.factor * self.original_max_position_embeddings
        )

    def on_cos_and_sin(self) -> float:
        """Return the factor by which YaRN lets scores grow, once each for query and key."""
        if self.rope_type != "yarn" or self.attention_factor is not None:
            return 1.0 if self.attention_factor is None else self.attention_factor
        up, down = (
            (self.mscale, self.mscale_all_dim)
            if self.mscale and self.mscale_all_dim
            else (1.0, 0.0)
        )
        return (0.1 * up * math.log(self.factor) + 1) / (0.1 * down * math.log(self.factor) + 1)

    def kept(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return the share of each frequency [half] that is not divided by the factor."""
        half = len(frequencies)
        context = self.original_max_position_embeddings
        if self.rope_type == "linear":
            return torch.zeros_like(frequencies)
        if self.rope_type == "llama3":
            turns = context / (2 * math.pi) * frequencies
            return (
                (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            ).clamp(0, 1)
        # YaRN: channels that turn beta_fast and beta_slow times.
        ends = self.beta_fast, self.beta_slow
        first, last = (
            half * math.log(context / (2 * math.pi * turns)) / math.log(theta) for turns in ends
        )
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, 2 * half - 1)
        # A linear ramp between the two.
        channels = torch.arange(half, device=frequencies.device, dtype=frequencies.dtype)
        return 1 - ((channels - first) / (last - first or 1e-3)).clamp(0, 1)


def inverse_frequencies(
    theta: float,
    dim: int,
    scaling: Iterable[tuple[str, object]] = (),
    device: torch.device | None = None,
) -> tuple[Tensor, float]:
    """Return the angles per position [dim / 2] in float64, and the factor on cos and sin.

    The angles are theta^(−2i / dim) unless scaled.
    """
    half = dim // 2
    frequencies = theta ** -(torch.arange(half, device=device, dtype=torch.float64) / half)
    if not scaling:
        return frequencies, 1.0
    rope = RopeScaling(**dict(scaling))
    kept = rope.kept(frequencies, theta)
    return frequencies * (kept + (1 - kept) / rope.factor), rope.on_cos_and_sin()
