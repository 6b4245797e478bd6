"""The optimizer, its schedule, and clipping over sharded and replicated gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_linear.config import LRScheduler, Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices alone: not for norms, biases, A_log and dt_bias."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for p in (p for p in model.parameters() if p.requires_grad):
        decays, mesh = p.dim() > 1, p.device_mesh if isinstance(p, DTensor) else None  # a fused call takes one kind
        groups.setdefault((decays, mesh), []).append(p)
    return torch.optim.AdamW(
        [{"params": ps, "weight_decay": config.weight_decay * decays} for (decays, _), ps in groups.items()],
        lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True,
    )  # fmt: skip


def learning_rate(step: int, peak: float, config: LRScheduler, steps: int) -> float:
    """The rate of step `step` (from 1), a function of nothing else: warmup, constant, decay."""
    total = config.total_steps or steps
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    decay = min(round(total * config.decay_ratio), total - config.warmup_steps)
    progress = (step - (total - decay)) / decay if decay > 0 else 0.0
    if progress <= 0:
        return peak
    curve = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * curve[config.decay_type])


def step_numbers(loss: torch.Tensor, parameters: Iterable[nn.Parameter], signal: int) -> torch.Tensor:
    """[loss, 2-norm of all gradients, signal] float64, on every rank the same, from one collective. Nothing waits.

    Args:
        loss: this rank's part of the sum.
        parameters: those whose gradients, or shards of them, this rank counts (`counted_parameters`).
        signal: this rank's; the highest is taken.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    row = torch.stack([loss.double(), _sum_of_squares(grads, loss.device), torch.full_like(loss, signal).double()])
    rows = row.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_into_tensor(rows, row)
    losses, squares, signals = rows.view(-1, len(row)).unbind(1)
    return torch.stack([losses.sum(), squares.sum().sqrt(), signals.max()])


def _sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A scalar in float64: one number per rank, so that its width costs nothing."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    return torch.stack(norms).double().square().sum()


def update(optimizer: torch.optim.AdamW, numbers: torch.Tensor, lr: float, max_norm: float) -> None:
    """One step with gradients clipped to a 2-norm of max_norm, unless loss or norm is not finite: then neither weights
    nor moments change. The optimizer's own kernels decide that on the device; the host need not know the numbers yet.

    numbers: [loss, norm, ...] (`step_numbers`).
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        scale_gradients(group["params"], numbers[1], max_norm)
    optimizer.found_inf = (~numbers[:2].isfinite().all()).float()  # as torch.amp.GradScaler says it
    optimizer.step()


def scale_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients so that their 2-norm is at most max_norm."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in (p.grad for p in parameters if p.grad is not None):
        by_dtype.setdefault(grad.dtype, []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, coefficient.to(dtype))


class Reading:
    """Numbers on their way from the device to the host, which may go on."""

    def __init__(self, numbers: torch.Tensor):
        self.arrived = torch.cuda.Event() if numbers.is_cuda else None
        self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        self.numbers.copy_(numbers, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.tolist()
