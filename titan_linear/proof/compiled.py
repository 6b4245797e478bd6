"""The run's compiled layers against the same layers uncompiled.

They have the run's dtype, implementations and split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.distributed.groups import host_group, of_all_ranks
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.one_process import LocalDims
from titan_linear.distributed.parts import local_tensor
from titan_linear.hooks.compilation import Graphs
from titan_linear.ops.runtime.support import short
from titan_linear.proof.findings import Finding, Findings, Note, bound_of_model
from titan_linear.proof.processes import passes_of_process
from titan_linear.proof.ranks import on_ranks, passes_of, session_on
from titan_linear.proof.subject import ProofSubject
from titan_linear.run.build import DTYPES, build_dims
from titan_linear.step.passes import Passes

# Number of batches; in one process every rank computes IN_ONE_PROCESS of them in turn.
BATCHES = 10
IN_ONE_PROCESS = 4


class Measured(NamedTuple):
    """A rank's results of some batches."""

    # [1] float64, this rank's parts of the loss.
    losses: list[Tensor]
    # This rank's parts, summed over the batches.
    gradients: list[Tensor]
    # Number of graphs after each batch, and number of breaks in them.
    graphs: list[int]
    breaks: int


def layers(subject: ProofSubject) -> Findings:
    """Compare losses and gradients of some batches, and count the graphs of later batches.

    Every process calls this. If one process has all ranks, the last rank's layers are
    compiled.
    """
    if not subject.config.compile.enable:
        return
    # Compute the same batches without and with compilation.
    host = host_group()
    alone = dist.get_world_size(host) < subject.degrees.ranks
    dims = None if alone else build_dims(subject.config, subject.device)
    want, got = (_steps(subject, dims, host, enable) for enable in (False, True))
    split = dims.description if dims else f"{subject.degrees}, the last rank's"
    check = f"compiled, {short(subject.dtype)}"
    bound = bound_of_model(subject.dtype, subject.model.num_layers)
    # Compare over all ranks: relative error of the joined losses, then of the gradients.
    for name in ("losses", "gradients"):
        a, b = ([x for rank in ranks for x in getattr(rank, name)] for ranks in (got, want))
        squares = [_square(x - y for x, y in zip(a, b, strict=True)), _square(b)]
        error, size = (sum(of_ranks) for of_ranks in zip(*of_all_ranks(squares, host), strict=True))
        what = f"{name} of {len(got[0].losses)} batches, {split}, against uncompiled layers"
        yield Finding(check, what, math.sqrt(error / size), bound)
    # The number of rows for experts varies: the second batch compiles for any number.
    first = 1 if subject.degrees.ep > 1 else 0
    graphs = got[-1].graphs
    more = max(of_all_ranks(graphs[-1] - graphs[first], host))
    yield Finding("compiled", f"graphs that batches after the first {first + 1} compile", more, 0)
    yield Note(f"compiled: {graphs[-1]} graphs, {got[-1].breaks} breaks in them")


def _steps(
    subject: ProofSubject, dims: ParallelDims | None, host: dist.ProcessGroup, enable: bool
) -> list[Measured]:
    """Return this process's results; without dims, the results of each rank in it.

    In that case, the last rank compiles.
    """
    torch.compiler.reset()
    # Under torchrun this process is one rank of the run.
    if dims is not None:
        config = subject.config.changed({"compile.enable": enable})
        subject = replace(subject, config=config)
        return [_measured(passes_of_process(subject, dims, host, micro_steps=1), BATCHES)]
    # In one process, all ranks share the memory of one model.
    whole = subject.whole(DTYPES[subject.config.training.dtype])

    def on_rank(dims: LocalDims) -> Measured:
        last = dims.rank == subject.degrees.ranks - 1
        session = session_on(subject, whole, dims, compiled=enable and last)
        return _measured(passes_of(subject, session, micro_steps=1), IN_ONE_PROCESS)

    return on_ranks(subject.degrees, on_rank)


def _square(tensors: Iterable[Tensor]) -> float:
    return sum(x.double().square().sum().item() for x in tensors)


def _measured(passes: Passes, batches: int) -> Measured:
    """Run forward and backward of the batches, and count graphs after each."""
    counted = Graphs()
    before = counted.counts()
    losses = []
    graphs = []
    for _ in range(batches):
        losses.append(passes.run()[0])
        graphs.append(counted.counts()["compiled_graphs"] - before["compiled_graphs"])
    gradients = [local_tensor(p.grad) for p in passes.model.parameters() if p.grad is not None]
    breaks = counted.counts()["graph_breaks"] - before["graph_breaks"]
    return Measured(losses, gradients, graphs, breaks)
