"""The end of an optimizer step: from the gradients that each rank has to weights on which all agree."""

from __future__ import annotations

import torch

from titan_linear.config import Config
from titan_linear.distributed.experts import move_selection_biases
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.parallelize import counted_parameters, sum_gradients
from titan_linear.models.decoder import Decoder
from titan_linear.optim import AdamW, Reading, learning_rate, step_numbers, update
from titan_linear.telemetry import Telemetry


def rate_at(config: Config, step: int) -> float:
    """The learning rate of a run's step, from 1."""
    return learning_rate(step, config.optimizer.lr, config.lr_scheduler, config.training.steps)


def finish_step(
    config: Config, model: Decoder, dims: ParallelDims, optimizer: AdamW, losses: torch.Tensor, step: int, *,
    signal: int = 0, telemetry: Telemetry | None = None,
) -> Reading:  # fmt: skip
    """Sum gradients, clip, update, move the experts' biases; gradients are gone then. Nothing waits for the device.

    Args:
        losses: [micro-steps], this rank's parts (`Passes.run`).
        step: its number, from 1.
        signal: this rank's; the highest of all is taken.

    Returns: loss, 2-norm of the gradients, signal, and what telemetry saw, on their way to the host.
    """
    sum_gradients(model, dims)
    # The signal goes with the loss, so that all ranks stop at the same step.
    numbers = step_numbers(losses.sum(), counted_parameters(model, dims), signal)
    watching = telemetry is not None and telemetry.on
    if watching:
        telemetry.gradients()
    reading = Reading(numbers)
    update(optimizer, numbers, rate_at(config, step), config.training.max_norm)
    if watching:
        reading = Reading(torch.cat([numbers, telemetry.sums(numbers, optimizer)]))
    move_selection_biases(model, numbers)
    optimizer.zero_grad(set_to_none=True)
    return reading
