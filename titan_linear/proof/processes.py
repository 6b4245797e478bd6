"""The run's own processes, under torchrun, against one process.

They prove FSDP2, the mesh and the collectives of the devices.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.distributed.groups import host_group, of_all_ranks
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.one_process import Degrees
from titan_linear.distributed.parts import whole
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import owned
from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import Tensors
from titan_linear.proof.findings import Findings
from titan_linear.proof.model import (
    Station,
    StepOutputs,
    Trace,
    Wrong,
    first_wrong,
    in_one_process,
    of_step,
    stations,
    traced_tokens,
)
from titan_linear.proof.ranks import passes_of
from titan_linear.proof.subject import STREAMS, ProofSubject
from titan_linear.run.build import DTYPES, build_dims
from titan_linear.run.session import session_of
from titan_linear.step.passes import Passes
from titan_linear.step.update import gradient_sums, sum_gradients
from titan_linear.storage.tensors import named_parameters


def split(subject: ProofSubject) -> Findings:
    """Check that a step of all processes gives the loss and gradients of one process.

    It is compared in float64 and in the run's dtype. Every rank calls this, and gets the
    same findings.
    """
    dims = build_dims(subject.config, subject.device)
    subject = replace(subject, degrees=Degrees(dims.dp, dims.cp, dims.tp, dims.ep))
    # The exact step, then each dtype; below float64 one process tells how far rounding
    # goes.
    exact = in_one_process(subject.in_float64, subject.whole(torch.float64))
    for this in (subject.in_float64, subject):
        one = None
        if this.dtype != torch.float64:
            one = in_one_process(this, this.whole(DTYPES[this.config.training.dtype]))
        compared = _of_processes(this, dims, exact, one)
        yield from of_step(
            f"processes, {short(this.dtype)}", dims.description, *compared, exact, this.dtype, one
        )


def _of_processes(
    subject: ProofSubject, dims: ParallelDims, want: StepOutputs, one: StepOutputs | None
) -> tuple[Tensor, dict[tuple[str, int], float], Wrong | None]:
    """Return the loss of all ranks, the errors of gradients, and the first wrong place.

    An error is how far a rank's part of a parameter's gradient is off, by name and rank.
    The place is where the step first differs from one process.
    """
    # Take a step as the trainer does.
    host = host_group()
    passes = passes_of_process(subject, dims, host, STREAMS)
    model = passes.model
    with Trace(model) as trace:
        losses, _ = passes.run()
    loss = losses.sum()
    sum_gradients(gradient_sums(model, dims))
    dist.all_reduce(loss)
    # Collect the errors, and the first wrong place, of all ranks.
    ranks = of_all_ranks(_errors(model, want.gradients), host)
    errors = {
        (name, rank): of_rank[name] for name in want.gradients for rank, of_rank in enumerate(ranks)
    }
    here = _first_wrong(subject, dims, trace, stations(subject, want, subject.dtype, one))
    wrong = [place for place in of_all_ranks(here, host) if place]
    return loss, errors, min(wrong, key=lambda place: (place.station, -place.error), default=None)


def _first_wrong(
    subject: ProofSubject, dims: ParallelDims, trace: Trace, stations: list[Station]
) -> Wrong | None:
    """Return `first_wrong` for this rank's tokens."""
    mine = traced_tokens(subject, dims).to(subject.device)
    wholes = (
        at.exact.index_copy(1, mine, x) for at, x in zip(stations, trace.passed(), strict=True)
    )
    return first_wrong(subject, wholes, stations)


def passes_of_process(
    subject: ProofSubject, dims: ParallelDims, host: dist.ProcessGroup, micro_steps: int
) -> Passes:
    """Return the passes of the subject's model, with its weights, on its streams."""
    session = session_of(subject.config, subject.model, dims=dims, host=host)
    _fill(session.model, subject.weights)
    return passes_of(subject, session, micro_steps)


@torch.no_grad()
def _fill(model: Decoder, weights: Tensors) -> None:
    """Set this rank's parts of the parameters from whole ones."""
    for name, p in named_parameters(model).items():
        local, box = _part(p)
        local.copy_(weights[name][box])


def _errors(model: Decoder, want: Tensors) -> dict[str, float]:
    """Return how far this rank's part of each gradient is off, relative to the whole
    gradient.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    errors = {}
    grads = {names[id(p)]: p.grad for p in model.parameters() if p.grad is not None}
    for name, exact in want.items():
        part, box = _part(whole(model, name, grads[name]))
        error = part.to(exact.device, torch.float64) - exact[box]
        errors[name] = (
            (error.norm() / exact.norm()).nan_to_num(torch.inf).item() if part.numel() else 0.0
        )
    return errors


def _part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor, and its place in the whole tensor."""
    local, offsets = owned(tensor)
    return local, tuple(slice(a, a + n) for a, n in zip(offsets, local.shape, strict=True))
