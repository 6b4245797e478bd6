"""The whole model: the run's split against one process, documents packed and alone, a step
repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.distributed.mesh import ParallelDims
from titan_linear.distributed.one_process import LocalDims
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.decoder import Decoder
from titan_linear.ops.layout.tables import to_device
from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import DELTA, Tensors
from titan_linear.proof.data import later, tokens_in
from titan_linear.proof.findings import (
    UNIT,
    Finding,
    Findings,
    bound_of_model,
    by_token,
    difference,
    of_count,
    of_worst,
    off,
    worst,
)
from titan_linear.proof.ops import ALONE, SMALL, begins, may_differ, plan_of, repeatable
from titan_linear.proof.ranks import on_ranks, passes_of, session_on, sum_as_fsdp, whole_gradients
from titan_linear.proof.subject import STREAMS, ProofSubject
from titan_linear.run.build import DTYPES
from titan_linear.step.optimizer import ComputeCopies
from titan_linear.step.passes import with_reference
from titan_linear.step.update import gradient_sums, sum_gradients


@dataclass
class StepOutputs:
    """The results of a step: loss, gradients, and the tensors that pass between layers."""

    loss: Tensor
    gradients: Tensors
    # As `Trace.passed` returns it.
    passed: list[Tensor]


class Trace:
    """Keeps the inputs of each layer and of the head, and their gradients, inside `with`."""

    def __init__(self, model: Decoder):
        n = model.config.num_layers
        # Modules in the order of computation.
        self.modules = [*model.layers[:n], model.head, *model.layers[n:]]
        # Inputs, and their gradients, by module and micro-step.
        self.between: list[list[Tensor]] = [[] for _ in self.modules]
        self.backward: list[list[Tensor]] = [[] for _ in self.modules]

    def __enter__(self) -> Trace:
        self.hooks = []
        for i, module in enumerate(self.modules):
            self.hooks.append(module.register_forward_pre_hook(partial(self._keep, i)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, i: int, _: object, arguments: tuple[Tensor, ...]) -> None:
        # Without gradients, the frozen base computes alone, without its adapters.
        if not torch.is_grad_enabled():
            return
        x = arguments[0]
        self.between[i].append(x.detach().double())
        if x.requires_grad:
            x.register_hook(lambda grad: self.backward[i].append(grad.detach().double()))

    def passed(self) -> list[Tensor]:
        """Return each module's input, and its gradients, in the order in which they are
        computed.

        They are [1, tokens of all micro-steps, dim] float64.
        """
        every = [*self.between, *reversed(self.backward)]
        return [torch.cat(steps, 1) for steps in every if steps]


def in_one_process(subject: ProofSubject, whole: Decoder) -> StepOutputs:
    """Run a step of the model alone, on all streams at once.

    Documents are given by boundaries, and labels are counted here.
    """
    batch = subject.batch
    weight = batch.weight or 1.0
    device = subject.device
    # The plan of documents, and the batch as one rank would have it.
    further = to_device(later(batch, subject.model.mtp_layers), device)
    plan = plan_of(subject, batch.cu_seqlens, batch.num_streams, further)
    columns = {name: column.to(device) for name, column in batch.columns.items()}
    micro = LocalBatch(
        batch.tokens.to(device),
        batch.labels.to(device),
        columns,
        batch.streams,
        batch.num_documents,
        plan=plan,
    )
    # Forward and backward; the loss is per unit of weight.
    whole.use(subject.config.model.impl, device, subject.dtype).zero_grad(set_to_none=True)
    micro = with_reference(whole, micro, ComputeCopies(whole, subject.dtype))
    of = partial(subject.loss, batch=micro)
    with (
        torch.autograd.set_multithreading_enabled(False),
        Trace(whole) as trace,
        ComputeCopies(whole, subject.dtype),
    ):
        balance = weight / batch.tokens.numel()
        loss = whole(micro.tokens, plan, loss=of, balance_weight=balance).flatten()[0] / weight
        loss.backward()
    # Gradients move to the result, so that the model can be used again.
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    whole.zero_grad(set_to_none=True)
    return StepOutputs(loss.detach().double(), gradients, trace.passed())


@dataclass
class ShardedStepOutputs:
    """The results of a step on the run's ranks."""

    loss: Tensor
    # Pairs of rank and whole gradients, for each set of ranks that holds them.
    copies: list[tuple[int, Tensors]]
    # Tensors that pass between layers, for all tokens.
    passed: list[Tensor]


def on_all_ranks(subject: ProofSubject, whole: Decoder) -> ShardedStepOutputs:
    """Take a step as the trainer does, on every rank.

    Raises:
        RankFailed: a rank raised an error.
    """

    def on_rank(dims: LocalDims) -> tuple[Tensor, LocalDims, Decoder, Trace]:
        session = session_on(subject, whole, dims)
        model = session.model
        with Trace(model) as trace:
            losses, _ = passes_of(subject, session, STREAMS).run()
        sum_as_fsdp(model, dims)
        sum_gradients(gradient_sums(model, dims))
        return losses.view(len(losses), -1)[:, 0].sum(), dims, model, trace

    # Join the results of the ranks.
    losses, dims, models, traces = zip(*on_ranks(subject.degrees, on_rank))
    passed = _together(subject, dims, traces)
    return ShardedStepOutputs(sum(losses), whole_gradients(list(zip(dims, models))), passed)


def _together(
    subject: ProofSubject, ranks: Sequence[LocalDims], traces: Sequence[Trace]
) -> list[Tensor]:
    """Join the ranks' traces, each of its own tokens, into tensors of all tokens."""
    # Each rank writes its tokens into tensors of all.
    total = subject.batch.tokens.shape[1]
    wholes: list[Tensor] = []
    for dims, trace in zip(ranks, traces):
        passed = trace.passed()
        wholes = wholes or [x.new_empty(1, total, x.shape[2]) for x in passed]
        mine = traced_tokens(subject, dims)
        for x, whole in zip(passed, wholes, strict=True):
            whole[:, mine.to(whole.device)] = x
    return wholes


def traced_tokens(subject: ProofSubject, dims: LocalDims | ParallelDims) -> Tensor:
    """Return the indices in the batch of a rank's tokens between layers, [T_local] int64.

    They are one micro-step's stream after the other.
    """
    cp_rank = dims.cp_group.rank()
    tp_rank = dims.tp_group.rank()
    # The rank's streams, one per micro-step.
    streams = range(dims.dp_rank, STREAMS * subject.degrees.dp, subject.degrees.dp)
    of_streams = [tokens_in(subject, [stream], cp_rank) for stream in streams]
    return torch.cat([tokens.chunk(subject.degrees.tp)[tp_rank] for tokens in of_streams])


def split(subject: ProofSubject) -> Findings:
    """Check that the run's split gives the loss and every gradient of one process.

    It is compared in float64 and in the run's dtype.
    """
    for step, whole in comparisons(subject):
        if step.subject.dtype != torch.float64:
            yield step.of_rounding()
        got = on_all_ranks(step.subject, whole)
        # A gradient that a rank lacks is infinitely wrong.
        errors = {}
        for rank, gradients in got.copies:
            for name, x in step.exact.gradients.items():
                errors[name, rank] = off(gradients[name], x) if name in gradients else math.inf
        wrong = step.first_wrong(got.passed)
        yield from step.findings("split", str(subject.degrees), got.loss, errors, wrong)


def comparisons(subject: ProofSubject) -> Iterator[tuple[Comparison, Decoder]]:
    """Yield the comparison in float64, then in the run's dtype, each with the whole model."""
    exact = None
    for this in subject.in_each_dtype:
        whole = subject.whole(DTYPES[this.config.training.dtype])
        one = in_one_process(this, whole)
        exact = exact or one
        yield Comparison(this, exact, one), whole


class Wrong(NamedTuple):
    # Index of the tensor that passes between layers, in the order of computation.
    station: int
    error: float
    where: str


@dataclass
class Comparison:
    """Compares a split step with one process, in the dtype of the subject."""

    subject: ProofSubject
    # The step of one process in float64, and in the subject's dtype.
    exact: StepOutputs
    one: StepOutputs

    def bound(self, one: Tensor, exact: Tensor) -> float:
        """Return the bound for a result of a split step.

        In a dtype that rounds, a split may be off twice as far as one process.
        """
        dtype = self.subject.dtype
        return DELTA if dtype == torch.float64 else 2 * off(one, exact) + 8 * UNIT[dtype]

    def of_rounding(self) -> Finding:
        """Return how far the gradient of one process is off."""
        want = self.exact.gradients
        errors = {name: off(g, want[name]) for name, g in self.one.gradients.items()}
        norms = {name: want[name].norm().item() for name in errors}
        total = math.hypot(*(errors[name] * norm for name, norm in norms.items()))
        total /= math.hypot(*norms.values())
        dtype = self.subject.dtype
        bound = bound_of_model(dtype, self.subject.model.num_layers)
        what = "gradient of one process against float64"
        return Finding(
            f"one process, {short(dtype)}", what, total, bound, max(errors, key=errors.get)
        )

    def findings(
        self,
        check: str,
        split: str,
        loss: Tensor,
        errors: Mapping[tuple[str, int], float],
        wrong: Wrong | None,
    ) -> Findings:
        """Yield how far the loss and the gradients of a split step are off.

        errors: of gradients, by name and rank.
        """
        check = f"{check}, {short(self.subject.dtype)}"
        what = f"{split} against one process"
        where = wrong.where if wrong else ""
        exact = self.exact
        bound = self.bound(self.one.loss, exact.loss)
        yield Finding(check, f"loss, {what}", off(loss, exact.loss), bound, where)
        # Each gradient has its own bound; report the one that is worst relative to it.
        of_name = {}
        for name, x in exact.gradients.items():
            of_name[name] = self.bound(self.one.gradients[name], x)
        bounds = {(name, rank): of_name[name] for name, rank in errors}
        name, rank = key = worst(errors, bounds)
        said = f"{name}, rank {rank}"
        if where and not errors[key] <= bounds[key]:
            said += f"; first {where}"
        what = f"{len(exact.gradients)} gradients, {what}"
        yield Finding(check, what, errors[key], bounds[key], said)

    def first_wrong(self, got: Iterable[Tensor]) -> Wrong | None:
        """Return where a split first differs from one process.

        It is the layer, and the rank and document where the difference begins.

        Args:
            got: the tensors that pass between layers, as `Trace.passed` returns them.
        """
        names = stations(self.subject)
        compared = zip(got, self.exact.passed, self.one.passed, strict=True)
        for i, (x, exact, one) in enumerate(compared):
            error = off(x, exact)
            if not error <= self.bound(one, exact):
                place = _place(self.subject, x, exact, names[i].endswith("backward"))
                return Wrong(i, error, f"{names[i]}, {place}")
        return None


def stations(subject: ProofSubject) -> list[str]:
    """Return the names of the tensors that pass between layers, in the order of computation.

    A name is of the module that produced it, for example "layer 1 (gdn), forward".
    """
    layers = [subject.layer(i) for i in range(len(subject.model.layers))]
    n = subject.model.num_layers
    # Layers of the trunk, then the layers that predict further tokens.
    trunk = layers[:n]
    more = layers[n:]
    forward = ["the embedding", *trunk]
    for layer, before in zip(subject.model.layers[n:], ["", *more]):
        forward.append("the embeddings of later tokens" if layer.joins else before)
    backward = [*more[::-1], "the head or the loss", *trunk[::-1]]
    # The output of a frozen embedding has no gradient, which would be the last station.
    return [f"{name}, forward" for name in forward] + [f"{name}, backward" for name in backward]


def _place(subject: ProofSubject, x: Tensor, y: Tensor, backward: bool) -> str:
    token = begins(by_token(difference(x, y)), backward)
    # The rank of dp that takes the stream, the rank of cp that has the token, the first of tp.
    stream = token // subject.config.training.seq_len
    degrees = subject.degrees
    cp_rank = next(r for r in range(degrees.cp) if token in tokens_in(subject, [stream], r))
    rank = (stream % degrees.dp * degrees.cp + cp_rank) * degrees.tp
    return f"rank {rank}, {subject.document(token)}"


def documents(subject: ProofSubject) -> Findings:
    """Check that each document gives the same between layers, packed and alone."""
    whole = subject.whole(torch.float64).use("torch", subject.device, torch.float64)
    packed = _forward(subject, whole, subject.batch.tokens, subject.batch.cu_seqlens)
    # Compare the shortest and the longest documents.
    documents = pairwise(subject.batch.cu_seqlens.tolist())
    order = sorted(documents, key=lambda document: document[1] - document[0])
    errors = {}
    for a, b in dict.fromkeys([*order[: ALONE // 2], *order[-ALONE // 2 :]]):
        alone = _forward(subject, whole, subject.batch.tokens[:, a:b], [0, b - a])
        for i, (x, y) in enumerate(zip(packed, alone, strict=True)):
            error = off(x[:, a:b], y, SMALL * x.norm().item())
            name = "the embedding" if i == 0 else subject.layer(i - 1)
            errors[f"{name}, {subject.document(a)}"] = error
            # The layers above it are wrong, too.
            if error > DELTA:
                break
    what = "the whole model, packed and alone, float64"
    yield of_worst("documents", what, errors, DELTA)


@torch.no_grad()
def _forward(
    subject: ProofSubject, whole: Decoder, tokens: Tensor, bounds: Tensor | list[int]
) -> list[Tensor]:
    with Trace(whole) as trace:
        whole(tokens.to(subject.device), plan_of(subject, bounds), loss=lambda logits: logits.x)
    return trace.passed()


def repeated(subject: ProofSubject) -> Findings:
    """Check that a step taken twice gives the same bits."""
    whole = subject.whole(DTYPES[subject.config.training.dtype])
    with repeatable(may_differ(subject, range(len(subject.model.layers)))):
        first, again = (on_all_ranks(subject, whole) for _ in range(2))
    differ = [] if torch.equal(first.loss, again.loss) else ["loss"]
    # The gradients of the first copy.
    _, gradients = first.copies[0]
    _, others = again.copies[0]
    differ += [name for name, x in gradients.items() if not torch.equal(x, others[name])]
    what = "a step: loss and gradients that differ in their bits when it runs again"
    yield of_count("repeated", what, differ, shown=3)
