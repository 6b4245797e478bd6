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
from titan_linear.proof.cases import Tensors
from titan_linear.proof.findings import Findings
from titan_linear.proof.model import Comparison, Trace, Wrong, comparisons, traced_tokens
from titan_linear.proof.ranks import passes_of
from titan_linear.proof.subject import STREAMS, ProofSubject
from titan_linear.run.build import build_dims
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
    for step, _ in comparisons(subject):
        yield from step.findings("processes", dims.description, *_of_processes(step, dims))


def _of_processes(
    step: Comparison, dims: ParallelDims
) -> tuple[Tensor, dict[tuple[str, int], float], Wrong | None]:
    """Return the loss of all ranks, the errors of gradients, and the first wrong place.

    An error is how far a rank's part of a parameter's gradient is off, by name and rank.
    The place is where the step first differs from one process.
    """
    # Take a step as the trainer does.
    subject = step.subject
    host = host_group()
    passes = passes_of_process(subject, dims, host, STREAMS)
    model = passes.model
    with Trace(model) as trace:
        losses, _ = passes.run()
    loss = losses.sum()
    sum_gradients(gradient_sums(model, dims))
    dist.all_reduce(loss)
    # Collect the errors of all ranks.
    want = step.exact.gradients
    ranks = of_all_ranks(_errors(model, want), host)
    errors = {(name, rank): of_rank[name] for name in want for rank, of_rank in enumerate(ranks)}
    # Find the first wrong place among this rank's tokens, then of all ranks.
    mine = traced_tokens(subject, dims).to(subject.device)
    pairs = zip(step.exact.passed, trace.passed(), strict=True)
    here = step.first_wrong(exact.index_copy(1, mine, x) for exact, x in pairs)
    wrong = [place for place in of_all_ranks(here, host) if place]
    return loss, errors, min(wrong, key=lambda place: (place.station, -place.error), default=None)


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
    errors = {}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, exact in want.items():
        part, box = _part(whole(model, name, grads[name]))
        error = part.to(exact.device, torch.float64) - exact[box]
        share = (error.norm() / exact.norm()).nan_to_num(torch.inf).item()
        errors[name] = share if part.numel() else 0.0
    return errors


def _part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor, and its place in the whole tensor."""
    local, offsets = owned(tensor)
    return local, tuple(slice(a, a + n) for a, n in zip(offsets, local.shape, strict=True))
