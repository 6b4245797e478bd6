"""The run's own processes, under torchrun: FSDP2, the mesh and the collectives of the devices against one process."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_linear.build import DTYPES, build_dims, build_model, build_sharding, mixed_precision
from titan_linear.checkpoint import named_parameters
from titan_linear.config import Config
from titan_linear.distributed.feed import Feed
from titan_linear.distributed.groups import unhurried_group
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.parallelize import sum_gradients
from titan_linear.distributed.parts import whole
from titan_linear.gradients import Passes
from titan_linear.models.decoder import Decoder
from titan_linear.proof.findings import Finding, Findings, off, worst
from titan_linear.proof.model import Step, gradient_bound, in_one_process
from titan_linear.proof.ops import short
from titan_linear.proof.subject import STREAMS, Degrees, Subject

Tensors = dict[str, torch.Tensor]


def split(subject: Subject) -> Findings:
    """A step of all processes gives the loss and gradients of one, in float64 and in the run's type. Every rank calls
    it, and has the same findings."""
    dims = build_dims(subject.config, subject.device)
    subject = replace(subject, degrees=Degrees(dims.dp, dims.cp, dims.tp, dims.ep))
    exact = in_one_process(subject, subject.whole(torch.float64), torch.float64, "torch")
    for config in (_in_float64(subject.config), subject.config):
        this = replace(subject, config=config)
        one = None
        if this.dtype != torch.float64:
            one = in_one_process(this, this.whole(DTYPES[config.training.dtype]), this.dtype, config.model.impl)
        loss, errors = _of_processes(this, dims, exact)
        check, what = f"processes, {short(this.dtype)}", f"{dims.description} against one process"
        bound = gradient_bound(this.dtype, None if one is None else off(one.loss, exact.loss))
        yield Finding(check, f"loss, {what}", off(loss, exact.loss), bound)
        bounds = {
            name: gradient_bound(this.dtype, None if one is None else off(one.gradients[name], exact.gradients[name]))
            for name in errors
        }
        name = worst(errors, bounds)
        yield Finding(check, f"{len(errors)} gradients, {what}", errors[name], bounds[name], name)


def _in_float64(config: Config) -> Config:
    types = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float64")
    model = config.model.model_copy(update={"impl": "torch"})
    compiled = config.compile.model_copy(update={"enable": False})
    training = config.training.model_copy(update=types)
    return config.model_copy(update={"training": training, "model": model, "compile": compiled})


def _of_processes(subject: Subject, dims: ParallelDims, want: Step) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of all ranks, and by parameter how far its gradient is off."""
    config = subject.config
    model = build_model(config, subject.model, dims, subject.device)
    _fill(model, subject.weights)
    precision = mixed_precision(config, model, dims)
    feed = Feed(
        iter(subject.loader(dims.dp_rank, dims.dp, 1)), build_sharding(config, subject.model, dims, subject.device),
        micro_steps=STREAMS, copies=dims.copies, host=unhurried_group(), device=subject.device,
    )  # fmt: skip
    losses, _ = Passes(model, feed, precision, config.training.loss_chunk_size).run()
    loss = losses.sum()
    sum_gradients(model, dims)
    dist.all_reduce(loss)
    return loss, _errors(model, want.gradients)


@torch.no_grad()
def _fill(model: Decoder, weights: Tensors) -> None:
    for name, p in named_parameters(model).items():
        local, box = _part(p)
        local.copy_(weights[name][box])


def _errors(model: Decoder, want: Tensors) -> dict[str, float]:
    """Of each gradient the largest error of any rank's part of it, relative to the whole."""
    names = {id(p): name for name, p in model.named_parameters()}
    grads = {names[id(p)]: p.grad for p in model.parameters() if p.grad is not None}
    found = torch.zeros(len(want), dtype=torch.float64, device=next(model.parameters()).device)
    for i, (name, exact) in enumerate(want.items()):
        part, box = _part(whole(model, name, grads[name]))
        error = part.to(exact.device, torch.float64) - exact[box]
        found[i] = error.norm() / exact.norm() if part.numel() else 0.0
    dist.all_reduce(found.nan_to_num_(torch.inf), dist.ReduceOp.MAX)
    return dict(zip(want, found.tolist(), strict=True))


def _part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What this rank has of a tensor, and where in the whole it lies."""
    if not isinstance(tensor, DTensor):
        return tensor, (slice(None),) * tensor.dim()
    (own,) = tensor.__create_chunk_list__()
    return tensor.to_local(), tuple(slice(a, a + n) for a, n in zip(own.offsets, own.sizes, strict=True))
