"""Losses: what a step's tokens are worth. A loss is one file.

It is called with the chunked logits of a micro-batch and the micro-batch: labels, and columns of numbers beside them,
one or several for each token, which were cut with the tokens. It gives the sum of its terms on this rank; over all
ranks and micro-steps that is divided by the step's weight (`loss.normalise`), one number that no split changes.
reference.py defines each again, for whole logits in one process.
"""

from titan_linear.config import Config
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


def build_loss(config: Config) -> Loss:
    name = config.loss.name
    return LOSSES[name](getattr(config, name))
