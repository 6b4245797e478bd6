"""Losses: the training objective of a step's tokens. Each loss is one file.

A loss is called with a micro-batch and its chunked logits. The micro-batch has labels and
columns: one or several numbers per token, which were cut with the tokens. The loss returns
the sum of its terms on this rank. The sum over all ranks and micro-steps is divided by the
step's weight (`loss.normalise`), a single number that does not depend on how the batch is
split. reference.py defines each loss again, for whole logits in one process.
"""

from titan_linear.config.schema import SECTIONS, Section
from titan_linear.losses.cross_entropy import CrossEntropy
from titan_linear.losses.distillation import Distillation
from titan_linear.losses.dpo import DPO
from titan_linear.losses.loss import Loss
from titan_linear.losses.policy import Policy

LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "distillation": Distillation,
    "dpo": DPO,
    "policy": Policy,
}


def build_loss(name: str, keys: Section | None = None) -> Loss:
    """Build the loss of this name, with the keys of its section or their defaults."""
    return LOSSES[name](keys or SECTIONS[name]())
