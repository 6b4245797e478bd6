"""The optimizer, its schedule, and clipping over sharded and replicated gradients.

`AdamW` and `Muon` are plain torch optimizers. `step` receives all that it needs as
arguments: the factor that clips the gradients, and whether the step's loss and norm are
finite. Both are tensors on the device, so the host does not wait. `optimizer.step()`
without arguments is an unclipped step. Torch's distributed checkpointing calls it with zero
gradients and a rate of 0, to create the state that it loads into. Nothing is set on the
optimizer from outside.

AdamW updates this rank's part of each parameter in one of two ways, with the same state:

    small   torch's fused AdamW, many tensors per launch. Gradients are first multiplied by
            the factor.
    large   (`is_large`, on a GPU) a Triton kernel, one tensor per launch. It reads the
            gradient once, as backward left it, clips it there, and also writes the
            parameter's copy in the compute dtype.

`ComputeCopies` holds a model's copies in the compute dtype, if FSDP2 does not provide them.
The optimizer stores no copies: `step` takes them as an argument, asks for the current ones,
and reports which of them it has written. Every updated parameter then has a new version,
and a copy of an older version is refreshed before it is used. A copy that `step` did not
receive or did not write is therefore never stale.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from titan_linear.config import LRScheduler, Optimizer
from titan_linear.distributed.matrices import WholeMatrices
from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.distributed.parts import by_kind, local_tensor, whole

# A group of parameters with its options.
Group = dict[str, Any]
# In elements; smaller tensors share launches.
LARGE = 1 << 20
# In elements: a host core adds the squares of one block in the tensor's own dtype.
HOST_BLOCK = 1 << 16


class ComputeCopies:
    """Copies of a model's parameters in the compute dtype.

    Parameters that are kept in float32 or wider have no copies. Inside `with`, the modules
    hold the copies. Copies of parameters that have changed are
    refreshed on entry; AdamW writes the copies of large tensors itself. On exit, the
    gradients that backward left on the copies move to the parameters. A second gradient is
    added in the parameters' dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        kept = set(replicated_parameters(model))
        self.copy_of: dict[nn.Parameter, nn.Parameter] = {}
        for p in model.parameters():
            if p not in kept and p.dtype != dtype:
                # Accept gradients of any dtype.
                p.grad_dtype = None
                self.copy_of[p] = nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad)
        # The version of each parameter when its copy was made.
        self.versions: dict[nn.Parameter, int] = {}
        # Module slots that hold the parameters; a tied parameter has two.
        self.slots = [
            (module._parameters, name, p)
            for module in model.modules()
            for name, p in module._parameters.items()
            if p in self.copy_of
        ]

    def current(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the parameter's copy if it has one and has not changed since, else None."""
        made = self.versions.get(parameter) == parameter._version
        return self.copy_of[parameter] if made else None

    def written(self, parameters: list[nn.Parameter]) -> None:
        """Record that the copies of these parameters match their current values."""
        self.versions.update((p, p._version) for p in parameters)

    def to(self, device: torch.device) -> None:
        """Move the copies to another device."""
        for copy in self.copy_of.values():
            copy.data = copy.data.to(device)

    def __enter__(self) -> None:
        # Refresh stale copies, then put the copies into the modules.
        stale = [p for p in self.copy_of if self.versions.get(p) != p._version]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([self.copy_of[p] for p in stale], stale)
            self.written(stale)
        for owner, name, p in self.slots:
            owner[name] = self.copy_of[p]

    def __exit__(self, *_: object) -> None:
        # Put the parameters back, then move the gradients to them.
        for owner, name, p in self.slots:
            owner[name] = p
        given = {p: copy.grad for p, copy in self.copy_of.items() if copy.grad is not None}
        again = [p for p in given if p.grad is not None]
        if again:
            torch._foreach_add_(gradients(again), [given[p] for p in again])
        for p, grad in given.items():
            p.grad = grad if p.grad is None else p.grad
            self.copy_of[p].grad = None


class AdamW(torch.optim.Optimizer):
    """AdamW on this rank's part of each parameter.

    The update is elementwise, so the local part suffices. On DTensors the dispatcher would
    derive the sharding again in every step that changes the learning rate, which takes
    longer than the update.
    """

    @torch.no_grad()
    def step(
        self,
        closure: None = None,
        *,
        clip: Tensor | float = 1.0,
        finite: Tensor | bool = True,
        copies: ComputeCopies | None = None,
    ) -> None:
        """Update all parameters that have a gradient.

        Args:
            clip: factor of all gradients.
            finite: if false, neither parameters nor state change.
            copies: copies of the parameters; the kernel for large tensors writes the
                current ones.
        """
        clip = torch.as_tensor(clip)
        skipped = (~torch.as_tensor(finite)).float()
        for group in self.param_groups:
            self._step_group(group, clip, skipped, copies)

    def _step_group(
        self, group: Group, clip: Tensor, skipped: Tensor, copies: ComputeCopies | None
    ) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if small := [p for p in parameters if not is_large(p)]:
            self._update_small(group, small, clip, skipped)
        if large := [p for p in parameters if is_large(p)]:
            self._update_large(group, large, clip, skipped, copies)

    def _update_small(
        self, group: Group, parameters: list[nn.Parameter], clip: Tensor, skipped: Tensor
    ) -> None:
        scale_gradients(parameters, clip)
        p, g, steps, m, v = self._tensors(parameters, "step", "exp_avg", "exp_avg_sq")
        beta1, beta2 = group["betas"]
        adamw(
            p,
            g,
            m,
            v,
            # max_exp_avg_sqs, for AMSGrad only
            [],
            steps,
            fused=True,
            found_inf=skipped,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        # The fused kernel does not mark the parameters as changed.
        torch.autograd.graph.increment_version(p)

    def _update_large(
        self,
        group: Group,
        parameters: list[nn.Parameter],
        clip: Tensor,
        skipped: Tensor,
        copies: ComputeCopies | None,
    ) -> None:
        # Triton is available on Linux only.
        from titan_linear.ops.triton import adamw as kernels

        p, g, steps, m, v = self._tensors(parameters, "step", "exp_avg", "exp_avg_sq")
        clip = clip.float().to(p[0].device)
        skipped = skipped.to(p[0].device)
        # A skipped step does not count.
        torch._foreach_add_(steps, [1 - skipped] * len(steps))
        # A copy that is not current stays so, even if the step is skipped.
        current = [copies.current(x) if copies else None for x in parameters]
        for i, copy in enumerate(current):
            kernels.adamw(p[i], copy, g[i], m[i], v[i], steps[i], clip, skipped, group)
        torch.autograd.graph.increment_version(p)
        if copies:
            copies.written([x for x, copy in zip(parameters, current) if copy is not None])

    def _tensors(self, parameters: list[nn.Parameter], *names: str) -> list[list[Tensor]]:
        """Return this rank's parts of parameters, gradients and the named states.

        States begin at 0.
        """
        lists: list[list[Any]] = [parameters, [p.grad for p in parameters]]
        for name in names:
            for p in parameters:
                if name not in self.state[p]:
                    scalar = name == "step"
                    self.state[p][name] = (
                        torch.zeros((), device=p.device) if scalar else torch.zeros_like(p)
                    )
            lists.append([self.state[p][name] for p in parameters])
        return [list(map(local_tensor, tensors)) for tensors in lists]


def is_large(p: Tensor) -> bool:
    """Whether AdamW launches a kernel for this tensor alone.

    The gradient of a large tensor may have another dtype; it is clipped when it is read.
    """
    return p.is_cuda and p.dtype == torch.float32 and local_tensor(p).numel() >= LARGE


class Muon(AdamW):
    """Muon for groups that have a "momentum", AdamW for the others.

    Groups with a "momentum" contain matrices and stacks of matrices.

    Each rank applies momentum to its part of the gradient. The result is orthogonalized as
    whole matrices by torch's Muon, in bfloat16 as there. Updates are scaled to the size of
    AdamW's updates, and share AdamW's rate and weight decay (Liu et al., "Muon is scalable
    for LLM training", section 2.2). The host waits for the norm of the gradients.
    """

    def __init__(self, groups: list[Group], defaults: Group, matrices: WholeMatrices):
        super().__init__(groups, defaults)
        self.matrices = matrices

    def _step_group(
        self, group: Group, clip: Tensor, skipped: Tensor, copies: ComputeCopies | None
    ) -> None:
        if "momentum" not in group:
            return super()._step_group(group, clip, skipped, copies)
        # Clip. A step that is not finite changes nothing.
        scale_gradients(group["params"], clip)
        weights, grads, momenta = self._tensors(group["params"], "momentum_buffer")
        if skipped.item():
            return
        # Update the momentum, decay the weights, then add the scaled directions.
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for weight, shape, direction in zip(
            weights, self.matrices.shapes, self.directions(group), strict=True
        ):
            weight.add_(direction.to(weight.device), alpha=-group["lr"] * update_scale(shape))

    def directions(self, group: Group) -> list[Tensor]:
        """Return this rank's parts of the orthogonal matrices, after updating momentum.

        All ranks must call this.
        """
        _, grads, momenta = self._tensors(group["params"], "momentum_buffer")
        # Nesterov momentum.
        mixed = [
            g.lerp(m, group["momentum"]).bfloat16() for g, m in zip(grads, momenta, strict=True)
        ]
        return self.matrices.apply(orthogonalised, mixed)

    def scaled_directions(self, group: Group) -> dict[nn.Parameter, Tensor]:
        """Return the directions as they are added to the weights at a rate of 1.

        They are scaled, and in the weights' dtype.
        """
        directions = zip(group["params"], self.matrices.shapes, self.directions(group), strict=True)
        return {p: x.to(local_tensor(p)) * update_scale(shape) for p, shape, x in directions}


def orthogonalised(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices by Newton-Schulz iterations in bfloat16.

    This is one step of torch's Muon from zeros, with a rate of 1 and without momentum.
    Torch scales updates of matrices with more rows than columns, so these are transposed.
    """
    weights = []
    for x in matrices:
        given = x if x.shape[0] <= x.shape[1] else x.T
        weights.append(nn.Parameter(torch.zeros_like(given)))
        weights[-1].grad = given
    if weights:
        torch.optim.Muon(weights, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return [-w if w.shape == x.shape else -w.T for w, x in zip(weights, matrices, strict=True)]


def update_scale(shape: torch.Size) -> float:
    """Return the scale that makes an orthogonal [R, C] as large as AdamW's updates.

    The root mean square of its elements is then 0.2.
    """
    return 0.2 * math.sqrt(max(shape))


def build_optimizer(model: nn.Module, config: Optimizer) -> AdamW:
    """Build the run's optimizer.

    Weight decay is for matrices only, not for norms, biases, A_log and dt_bias.
    """
    matrices = hidden_matrices(model) if config.name == "muon" else {}
    # Group the other parameters by weight decay and mesh.
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad and name not in matrices:
            # With offload, only parameters that FSDP manages are on the host.
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            groups.setdefault((p.dim() > 1, mesh), []).append(p)
    decays = [
        {"params": ps, "weight_decay": config.weight_decay if many else 0.0}
        for (many, _), ps in groups.items()
    ]
    options = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        # Makes torch's `load_state_dict` leave the step counts on the device.
        "fused": True,
    }
    if not matrices:
        return AdamW(decays, options)
    # The matrices form one group of their own.
    group = {
        "params": list(matrices.values()),
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
    }
    wholes = {name: whole(model, name, p) for name, p in matrices.items()}
    device = exchange_device(next(iter(wholes.values())))
    return Muon([*decays, group], options, WholeMatrices(wholes, device))


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the trainable matrices (or stacks) between embedding and head.

    These are the weights of linear layers, and the parameters that modules list in
    `hidden_matrices`.
    """
    matrices: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        names = (
            ("weight",) if isinstance(module, nn.Linear) else getattr(module, "hidden_matrices", ())
        )
        matrices |= {f"{path}.{name}": getattr(module, name) for name in names}
    return {name: p for name, p in matrices.items() if p.requires_grad}


def exchange_device(tensor: Tensor) -> torch.device:
    """Return the ranks' compute device, even if the tensor itself lies in host memory."""
    return (
        torch.device(tensor.device_mesh.device_type)
        if isinstance(tensor, DTensor)
        else tensor.device
    )


def learning_rate(step: int, peak: float, config: LRScheduler, steps: int) -> float:
    """Return the learning rate of step `step` (from 1): warmup, constant, decay.

    It depends on nothing else.
    """
    total = config.total_steps or steps
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    # The decay takes up the last steps, but never overlaps the warmup.
    decay = min(round(total * config.decay_ratio), total - config.warmup_steps)
    progress = (step - (total - decay)) / decay if decay > 0 else 0.0
    if progress <= 0:
        return peak
    curve = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * curve[config.decay_type])


class StepNumbers(NamedTuple):
    """Results of one step, the same on every rank: float64 scalars on the device."""

    loss: Tensor
    # 2-norm of all gradients
    grad_norm: Tensor
    signal: Tensor
    # Reports of the loss.
    reports: tuple[Tensor, ...] = ()

    def finite(self) -> Tensor:
        """Whether loss and norm are finite."""
        return self.loss.isfinite() & self.grad_norm.isfinite()


def step_numbers(loss: Tensor, parameters: Iterable[nn.Parameter], signal: int) -> StepNumbers:
    """Combine the step's numbers over all ranks in one collective. The host does not wait.

    Args:
        loss: this rank's part of the sum; [1 + reports] if the loss has reports.
        parameters: parameters whose gradients, or shards of them, this rank counts
            (`counted_parameters`).
        signal: this rank's signal; the highest of all ranks is taken.
    """
    # One row per rank: loss, reports, sum of squares, signal.
    grads = [p.grad for p in parameters if p.grad is not None]
    sums = loss.double().flatten()
    row = torch.stack([*sums, sum_of_squares(grads, loss.device), torch.full_like(sums[0], signal)])
    rows = row.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_into_tensor(rows, row)
    # Reduce the columns: sums, except for the signal, whose maximum counts.
    *sums, squares, signals = rows.view(-1, len(row)).unbind(1)
    loss, *reports = (x.sum() for x in sums)
    return StepNumbers(loss, squares.sum().sqrt(), signals.max(), tuple(reports))


@torch.no_grad()
def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's parts of the tensors, a float64 scalar.

    For a single number, the wide dtype costs nothing.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [norms_of(list(map(local_tensor, own))).to(device) for own in by_kind(tensors)]
    return torch.cat(norms).double().square().sum()


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norms [.] of tensors on the same device, or of parts of them."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    rows = [part for tensor in tensors for part in _rows(tensor.flatten())]
    return torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in rows])


def _rows(flat: Tensor) -> list[Tensor]:
    """Split [n] into matrices whose rows the host's cores share.

    A core adds squares one by one: in float32, the norm of 64M numbers would be off by
    0.4%.
    """
    whole = len(flat) // HOST_BLOCK * HOST_BLOCK
    rows = []
    if whole:
        rows.append(flat[:whole].view(-1, HOST_BLOCK))
    if whole < len(flat) or not whole:
        rows.append(flat[whole:].unsqueeze(0))
    return rows


def update(
    optimizer: AdamW,
    numbers: StepNumbers,
    lr: float,
    max_norm: float,
    copies: ComputeCopies | None = None,
) -> None:
    """Do one step with gradients clipped to a 2-norm of max_norm.

    If loss or norm is not finite, neither weights nor moments change. The optimizer's
    kernels decide this on the device, so the host need not know the numbers yet. With
    offload or Muon, the host waits for the numbers; with offload, it thereby also waits for
    every copy of a parameter that the device has yet to read.
    """
    # With offload, some parameters are on the host, and so must the numbers be.
    if any(
        group["params"][0].device.type != numbers.loss.device.type
        for group in optimizer.param_groups
    ):
        numbers = StepNumbers(*torch.stack(numbers[:3]).cpu())
    for group in optimizer.param_groups:
        group["lr"] = lr
    clip = (max_norm / (numbers.grad_norm + 1e-6)).clamp(max=1.0)
    optimizer.step(clip=clip, finite=numbers.finite(), copies=copies)


def scale_gradients(parameters: Iterable[nn.Parameter], coefficient: Tensor) -> None:
    """Multiply gradients by a coefficient, in their parameters' dtype."""
    for alike in by_kind(gradients(parameters)):
        grads = list(map(local_tensor, alike))
        torch._foreach_mul_(grads, coefficient.to(grads[0]))


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the existing gradients, converted in place to their parameters' dtype."""
    there = [p for p in parameters if p.grad is not None]
    narrow = [p for p in there if p.grad.dtype != p.dtype]
    wide = list(map(torch.empty_like, narrow))
    if narrow:
        torch._foreach_copy_(wide, [p.grad for p in narrow])
    for p, grad in zip(narrow, wide, strict=True):
        p.grad = grad
    return [p.grad for p in there]


class Reading(NamedTuple):
    """The results of a step on the host."""

    loss: float
    grad_norm: float
    signal: float
    # Reports of the loss.
    reports: list[float]
    # The numbers that telemetry requested.
    seen: list[float]


class Moment:
    """The moment at which the device finishes all work queued so far; on a CPU: now."""

    def __init__(self, device: torch.device):
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment; waits for this moment."""
        self.wait()
        if self.event is None:
            return self.time - earlier.time
        return earlier.event.elapsed_time(self.event) / 1e3


class HostCopy:
    """A step's numbers in transit from the device to the host.

    The host need not wait for them until it calls `wait`.
    """

    def __init__(self, step: StepNumbers, *seen: Tensor):
        numbers = torch.cat([torch.stack([*step[:3], *step.reports]), *seen])
        self.reports = len(step.reports)
        self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        self.numbers.copy_(numbers, non_blocking=True)
        self.arrived = Moment(numbers.device)

    def wait(self) -> Reading:
        self.arrived.wait()
        loss, grad_norm, signal, *more = self.numbers.tolist()
        return Reading(loss, grad_norm, signal, more[: self.reports], more[self.reports :])
