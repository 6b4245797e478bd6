"""Interface of MLPs."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from titan_linear.models.layers import OpDims


class MLPOptions(ABC):
    """Options from which an MLP of one kind is built: a frozen dataclass in the MLP's file."""

    # Name, in a model's pattern, of a layer that has nothing else.
    name: ClassVar[str]

    @abstractmethod
    def build(self, dim: int, depth: float = 0.0) -> nn.Module:
        """Build the module.

        It computes forward(x [B, T, dim], plan, cache) -> [B, T, dim] or an `Output`.

        The module may have the same attributes as a mixer (`MixerOptions.build`).

        Args:
            depth: share of the layers that precede it, for initial values.
        """

    @abstractmethod
    def ops(self, dim: int, tp: int) -> OpDims:
        """Return the ops that each of `tp` ranks calls, with their sizes."""

    @property
    @abstractmethod
    def split_counts(self) -> dict[str, int]:
        """Counts of what `split` splits, by name for messages.

        Each count must be a multiple of the tensor-parallel degree.
        """
