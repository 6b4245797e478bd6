"""What tests do to a trainer's steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan_linear.hooks import Hook, StepResult
from titan_linear.step.feed import FeedStats
from titan_linear.train import Trainer


class FedTotals(Hook):
    """What all steps had, together."""

    def __init__(self) -> None:
        self.total = FeedStats()

    def after_step(self, done: StepResult) -> None:
        self.total += done.fed


def after_backward(trainer: Trainer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From here on the loss of a micro-batch is what `change`, called after its backward, makes of it."""
    forward = trainer.passes.forward

    def changed(begun):
        backward = begun.backward
        begun.backward = lambda: change(backward())
        return begun

    trainer.passes.forward = lambda *arguments: changed(forward(*arguments))
    if trainer.passes.begun:
        changed(trainer.passes.begun.first)
