"""The end of an optimizer step: from the gradients that each rank has to weights on which all agree."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from titan_linear.config import Config
from titan_linear.distributed.experts import move_selection_biases
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.parallelize import counted_parameters, gradient_sums, sum_gradients
from titan_linear.models.decoder import Decoder
from titan_linear.step.optimizer import AdamW, Reading, learning_rate, step_numbers, update


def rate_at(config: Config, step: int) -> float:
    """The learning rate of a run's step, counted from 1."""
    return learning_rate(step, config.optimizer.lr, config.lr_scheduler, config.training.steps)


class Watcher(Protocol):
    """What looks into some steps between their gradients and the next step (`Telemetry`)."""

    on: bool  # in this step

    def gradients(self, parameters: list[nn.Parameter]) -> None: ...

    def sums(self, numbers: torch.Tensor, optimizer: AdamW) -> torch.Tensor: ...


class StepEnd:
    """Ends every step of a model on this rank. Which parameters are counted and summed is determined once."""

    def __init__(
        self, config: Config, model: Decoder, dims: ParallelDims, optimizer: AdamW, telemetry: Watcher | None = None
    ):
        self.config, self.model, self.optimizer, self.telemetry = config, model, optimizer, telemetry
        self.sums, self.counted = gradient_sums(model, dims), counted_parameters(model, dims)

    def run(self, losses: torch.Tensor, step: int, signal: int = 0) -> Reading:
        """Sum gradients, clip, update, move the experts' biases, and free the gradients. The host does not wait for the
        device, except with offload (`update`).

        Args:
            losses: [micro-steps], this rank's parts (`Passes.run`).
            step: the step's number, from 1.
            signal: this rank's; the highest of all ranks is taken.

        Returns: loss, 2-norm of the gradients, signal, and what telemetry saw, on their way to the host.
        """
        sum_gradients(self.sums)
        # The signal goes with the loss, so that all ranks stop at the same step.
        numbers = step_numbers(losses.sum(), self.counted, signal)
        watching = self.telemetry is not None and self.telemetry.on
        if watching:
            self.telemetry.gradients(self.counted)
        reading = Reading(numbers)
        update(self.optimizer, numbers, rate_at(self.config, step), self.config.training.max_norm)
        if watching:
            reading = Reading(torch.cat([numbers, self.telemetry.sums(numbers, self.optimizer)]))
        move_selection_biases(self.model, numbers)
        self.optimizer.zero_grad(set_to_none=True)
        return reading
