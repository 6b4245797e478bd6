"""What a model must know of an MLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from titan_linear.models.layers import OpDims


class MLPOptions(ABC):
    """The options from which an MLP of one kind is built: a frozen dataclass in the MLP's file."""

    name: ClassVar[str]  # of a layer that has nothing else, in a model's pattern

    @abstractmethod
    def build(self, dim: int, depth: float = 0.0) -> nn.Module:
        """Build the module: forward(x [B, T, dim], plan, cache) -> [B, T, dim] or an `Output`. It may have the
        attributes that a mixer may have (`MixerOptions.build`). depth: the share of the layers that come before it,
        for initial values."""

    @abstractmethod
    def ops(self, dim: int, tp: int) -> OpDims:
        """What each of `tp` ranks calls."""

    @property
    @abstractmethod
    def split_counts(self) -> dict[str, int]:
        """What `split` splits, by its name in messages: each count must be a multiple of the tensor-parallel degree."""
