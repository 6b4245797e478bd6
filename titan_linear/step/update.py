"""The end of an optimizer step: from each rank's gradients to weights that all share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.distributed.parts import by_kind, local_tensor
from titan_linear.models.decoder import Decoder
from titan_linear.models.mlps.moe import MoE
from titan_linear.step.optimizer import (
    AdamW,
    ComputeCopies,
    HostCopy,
    StepNumbers,
    exchange_device,
    gradients,
    step_numbers,
    update,
)


class Watcher(Protocol):
    """An observer between the gradients of some steps and the next step (`Telemetry`)."""

    # Whether it observes this step.
    on: bool

    def gradients(self, parameters: list[nn.Parameter]) -> None: ...

    def sums(self, numbers: StepNumbers, optimizer: AdamW) -> Tensor: ...


class GradientSum(NamedTuple):
    """Parameters whose gradients are summed over the ranks of a group."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup


class Update:
    """Ends every step of a model on this rank.

    It decides once which parameters this rank counts and which gradients it sums.
    """

    def __init__(
        self,
        model: Decoder,
        dims: ParallelDims,
        optimizer: AdamW,
        precision: AbstractContextManager[object],
        max_norm: float,
    ):
        """Determine what this rank counts and sums.

        Args:
            precision: the context of the passes; the update also writes its weight copies.
            max_norm: gradients are clipped to this 2-norm.
        """
        self.model = model
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.copies = precision if isinstance(precision, ComputeCopies) else None
        self.telemetry: Watcher | None = None
        self.gradient_sums = gradient_sums(self.model, dims)
        self.counted = counted_parameters(self.model, dims)

    def run(self, losses: Tensor, lr: float, signal: int = 0) -> HostCopy:
        """Sum gradients, clip and update, move the experts' biases, and free the gradients.

        The host does not wait for the device, except with offload or Muon (see
        `optimizer.update`).

        Args:
            losses: this rank's parts, [micro-steps] or [micro-steps, 1 + reports]
                (`Passes.run`).
            lr: the learning rate of this step.
            signal: this rank's signal; the highest of all ranks is taken.

        Returns:
            Loss, 2-norm of the gradients, signal and the numbers of telemetry, in transit
            to the host.
        """
        sum_gradients(self.gradient_sums)
        # The signal goes with the loss, so that all ranks stop at the same step.
        numbers = step_numbers(losses.sum(0), self.counted, signal)
        # Telemetry reads the gradients before the update scales them.
        watching = self.telemetry is not None and self.telemetry.on
        if watching:
            self.telemetry.gradients(self.counted)
        reading = HostCopy(numbers)
        update(self.optimizer, numbers, lr, self.max_norm, self.copies)
        if watching:
            reading = HostCopy(numbers, self.telemetry.sums(numbers, self.optimizer))
        # Move the experts' biases and free the gradients.
        move_selection_biases(self.model, numbers)
        self.optimizer.zero_grad(set_to_none=True)
        return reading


def gradient_sums(model: nn.Module, dims: ParallelDims) -> list[GradientSum]:
    """Return the sums of gradients that FSDP does not take.

    The first is of parameters left out of FSDP, over the ranks that FSDP would have used.
    The second is of parameters that every tp rank has whole, over tp.
    """
    sums = [GradientSum(replicated_parameters(model), dims.data_group)]
    if dims.tp > 1:
        splits = model.parts.splits
        unsplit = [p for name, p in model.named_parameters() if name not in splits]
        sums.append(GradientSum(unsplit, dims.tp_group))
    return sums


def sum_gradients(sums: list[GradientSum]) -> None:
    """Sum the gradients listed by `gradient_sums`.

    Each group takes one collective; with offload, tp takes two. Gradients in host memory
    are summed on the device of their mesh.
    """
    for parameters, group in sums:
        for alike in by_kind(gradients(parameters)):
            # Flatten the gradients of one dtype and device, sum them, and copy the sums
            # back.
            grads = list(map(local_tensor, alike))
            flat = torch.cat([g.flatten() for g in grads]).to(exchange_device(alike[0]))
            dist.all_reduce(flat, group=group)
            parts = flat.to(alike[0].device).split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [x.view_as(g) for x, g in zip(parts, grads)])


def counted_parameters(model: nn.Module, dims: ParallelDims) -> list[nn.Parameter]:
    """Return the parameters of whose shard this rank has the first copy.

    All ranks together thus count each parameter once.
    """
    splits = model.parts.splits if dims.tp > 1 else {}
    data_rank = dims.data_group.rank()
    tp_rank = dims.mesh.get_local_rank("tp")

    def counts(name: str, p: nn.Parameter) -> bool:
        copy = dims.replica if isinstance(p, DTensor) else data_rank
        return copy == 0 and (name in splits or tp_rank == 0)

    return [p for name, p in model.named_parameters() if counts(name, p)]


@torch.no_grad()
def move_selection_biases(model: nn.Module, numbers: StepNumbers) -> None:
    """Adjust the experts' selection biases by `bias_update_rate`, then reset the counters.

    Experts that received less than their share of the step's tokens get a higher bias, the
    others a lower one (DeepSeek-V3, section 2.1.2). This takes one collective. As with
    weights (`update`), biases do not change if loss or norm is not finite; the device
    decides this, and the host need not know.

    Every rank counts the tokens that it computes. Sums over all ranks therefore count the
    whole batch, or a multiple of it: tp ranks compute the same tokens.
    """
    counted = [m for m in model.modules() if isinstance(m, MoE)]
    layers = [m for m in counted if m.config.bias_update_rate]
    if layers:
        loads = torch.cat([m.loads for m in layers])
        finite = numbers.finite()
        dist.all_reduce(loads)
        for m, load in zip(
            layers, loads.split([m.config.num_experts for m in layers]), strict=True
        ):
            # Proportional to the missing share, and exact.
            missing = load.sum() - len(load) * load
            m.router.selection_bias.add_(missing.sign() * finite, alpha=m.config.bias_update_rate)
    for m in counted:
        m.loads.zero_()
