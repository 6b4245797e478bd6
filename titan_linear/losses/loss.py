"""What every loss is, and is given."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from titan_linear.ops.cross_entropy import ChunkedLogits


class Targets(Protocol):
    """The part of a micro-batch that one rank computes."""

    labels: Tensor  # [1, T] int64, −100 where there is nothing to predict
    columns: dict[str, Tensor]  # [1, T] or [1, T, n] each


class Loss(Protocol):
    def __call__(self, logits: ChunkedLogits, batch: Targets) -> Tensor:
        """The sum of its terms on this rank."""
