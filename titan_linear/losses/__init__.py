"""Losses: the training objective of a step's tokens. Each loss is one file.

A loss is called with a micro-batch and its chunked logits. The micro-batch has labels and
columns: one or several numbers per token, which were cut with the tokens. The loss returns
the sum of its terms on this rank. The sum over all ranks and micro-steps is divided by the
step's weight (`loss.normalise`), a single number that does not depend on how the batch is
split.
"""

from titan_linear.config import Section
from titan_linear.config.registry import TABLES
from titan_linear.losses.cross_entropy import CrossEntropyLoss
from titan_linear.losses.distillation import DistillationLoss
from titan_linear.losses.dpo import DPOLoss
from titan_linear.losses.loss import LossFunction
from titan_linear.losses.policy import PolicyLoss

LOSSES: dict[str, type[LossFunction]] = TABLES[LossFunction.chosen_by]
LOSSES.update(
    cross_entropy=CrossEntropyLoss,
    distillation=DistillationLoss,
    dpo=DPOLoss,
    policy=PolicyLoss,
)


def build_loss(name: str, keys: Section | None = None) -> LossFunction:
    """Build a loss from its section of the configuration, or from that section's defaults."""
    kind = LOSSES[name]
    return kind(keys or kind.section())
