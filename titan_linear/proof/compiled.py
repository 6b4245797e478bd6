"""The run's compiled layers, in its type, implementations and split, against the same layers uncompiled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.config import changed
from titan_linear.distributed.groups import host_group, of_all_ranks
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.parts import local_tensor
from titan_linear.ops.runtime.support import short
from titan_linear.proof.findings import Finding, Findings, Note, bound_of_model
from titan_linear.proof.processes import passes_of
from titan_linear.proof.subject import Subject
from titan_linear.run.build import build_dims
from titan_linear.run.compilation import Graphs

BATCHES = 10


class Measured(NamedTuple):
    """What a rank sees of some batches."""

    losses: Tensor  # [BATCHES] float64, this rank's parts
    gradients: list[Tensor]  # this rank's parts, summed over the batches
    graphs: list[int]  # number of graphs after each batch
    breaks: int


def layers(subject: Subject) -> Findings:
    """Losses and gradients of ten batches, and the graphs that later batches compile. Every rank calls this."""
    if not subject.config.compile.enable:
        return
    dims = build_dims(subject.config, subject.device)
    host = host_group()
    want, got = (_steps(subject, dims, enable) for enable in (False, True))
    check = f"compiled, {short(subject.dtype)}"
    bound = bound_of_model(subject.dtype, subject.model.num_layers)
    pairs = {"losses": ([got.losses], [want.losses]), "gradients": (got.gradients, want.gradients)}
    for name, (a, b) in pairs.items():
        squares = [sum((x.double() - y.double()).square().sum().item() for x, y in zip(a, b, strict=True))]
        squares.append(sum(y.double().square().sum().item() for y in b))
        error, size = (sum(of_ranks) for of_ranks in zip(*of_all_ranks(squares, host), strict=True))
        what = f"{name} of {BATCHES} batches, {dims.description}, against uncompiled layers"
        yield Finding(check, what, math.sqrt(error / size), bound)
    first = 1 if dims.ep > 1 else 0  # experts' rows vary: the second batch compiles for any number
    more = max(of_all_ranks(got.graphs[-1] - got.graphs[first], host))
    yield Finding("compiled", f"graphs that batches after the first {first + 1} compile", more, 0)
    yield Note(f"compiled: {got.graphs[-1]} graphs, {got.breaks} breaks in them")


def _steps(subject: Subject, dims: ParallelDims, enable: bool) -> Measured:
    """Forward and backward of the batches, from the same weights."""
    torch.compiler.reset()
    config = changed(subject.config, {"compile.enable": enable})
    passes = passes_of(replace(subject, config=config), dims, micro_steps=1)
    counted = Graphs()
    before = Graphs().counts()
    losses = []
    graphs = []
    for _ in range(BATCHES):
        losses.append(passes.run()[0])
        graphs.append(counted.counts()["compiled_graphs"] - before["compiled_graphs"])
    gradients = [local_tensor(p.grad) for p in passes.model.parameters() if p.grad is not None]
    breaks = counted.counts()["graph_breaks"] - before["graph_breaks"]
    return Measured(torch.cat(losses), gradients, graphs, breaks)
