"""Forward and backward of micro-batches: they give a step's loss, part by part, and its gradients; and mixed precision
where FSDP2 does not see to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.losses import Loss
from titan_linear.losses.loss import logprobs
from titan_linear.models.decoder import Decoder
from titan_linear.models.lora import without_adapters
from titan_linear.step.feed import Feed, MicroBatch, StepTokens
from titan_linear.step.optimizer import gradients


class Forward:
    """The forward of a micro-batch, done or queued on the device. `backward` or `drop` must end it, because the context
    `precision` is around both passes.

    Its loss is a part of two means: that of `loss` by the step's weight, and the load-balance loss over all of the
    step's tokens.

    step: of the whole step, over all ranks.
    """

    def __init__(
        self,
        model: Decoder,
        batch: MicroBatch,
        step: StepTokens,
        precision: AbstractContextManager[object],
        loss: Loss,
    ):
        weight = step.weight or 1.0
        with ExitStack() as inside:
            inside.enter_context(precision)
            parts = model(
                batch.tokens,
                batch.plan,
                loss=partial(loss, batch=batch),
                balance_weight=weight / step.total,
            )
            self.loss = parts / weight
            self.inside = inside.pop_all()

    def backward(self) -> Tensor:
        """Return this rank's part of the loss and of its reports; gradients accumulate, as sums over the step."""
        # a separate thread doubles the host's time
        with self.inside, torch.autograd.set_multithreading_enabled(False):
            self.loss.flatten()[0].backward()
        return self.loss.detach()

    def drop(self) -> None:
        """Discard the forward, without gradients."""
        with self.inside:
            del self.loss


def with_reference(
    model: Decoder, batch: MicroBatch, precision: AbstractContextManager[object]
) -> MicroBatch:
    """The batch, with the column that the loss reads of the base: the log-probability of each label."""
    if not (model.config.adapter and model.config.adapter.base_is_reference):
        return batch
    of_labels = partial(logprobs, ids=batch.labels.flatten())
    with precision, torch.no_grad(), without_adapters(model):
        reference = model(batch.tokens, batch.plan, loss=of_labels)
    return replace(batch, columns=batch.columns | {"reference": reference.unsqueeze(0)})


class Begun(NamedTuple):
    tokens: StepTokens
    batches: Iterator[MicroBatch]  # all of the step's
    first: Forward  # of the first of them


@dataclass(eq=False)
class Passes:
    """The passes of one step after the other.

    Args:
        watching: a context around both passes of a micro-batch.
        replicas_once: FSDP2 sums gradients over HSDP's replicas only in the last micro-step, for all micro-steps.
    """

    model: Decoder
    feed: Feed
    precision: AbstractContextManager[object]
    loss: Loss
    watching: Callable[[MicroBatch], AbstractContextManager[object]] = lambda batch: nullcontext()
    replicas_once: bool = False
    begun: Begun | None = None

    def next_step(self) -> tuple[StepTokens, Iterator[MicroBatch]]:
        tokens, batches = self.feed.next_step()
        return tokens, (with_reference(self.model, batch, self.precision) for batch in batches)

    def forward(self, batch: MicroBatch, step: StepTokens) -> Forward:
        return Forward(self.model, batch, step, self.precision, self.loss)

    def begin(self) -> None:
        """Queue the next step's first forward, so that the device has work while the host waits for numbers of the step
        before. `run` continues from there; `drop` discards it."""
        tokens, batches = self.next_step()
        first = next(batches)
        self.begun = Begun(tokens, chain([first], batches), self.forward(first, tokens))

    def drop(self) -> None:
        """Discard the step that has begun, if any, and its batches."""
        if self.begun:
            self.begun.first.drop()
            self.begun = None

    def run(
        self, ask: Callable[[int], None] = lambda done: None
    ) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Compute the next step's gradients; return for each micro-batch this rank's part of the loss, [micro-steps]
        float64 (with reports [micro-steps, 1 + reports]), and its streams. `ask` is called before each micro-step with
        the number of those done, and may raise.
        """
        tokens, batches = self.begun[:2] if self.begun else self.next_step()
        losses, streams = [], []
        for done, batch in enumerate(batches):
            ask(done)
            if self.replicas_once:
                self.model.set_requires_all_reduce(done == self.feed.micro_steps - 1)
            with self.watching(batch):
                forward = self.begun.first if self.begun else self.forward(batch, tokens)
                self.begun = None
                losses.append(forward.backward())
            streams.append(batch.streams)
        return torch.stack(losses).double(), streams


# --- Mixed precision where no ranks share parameters -----------------------------------------------------------------


class ComputeCopies:
    """Copies of a model's parameters in the dtype of compute, except those that are kept in float32 or wider.

    Inside `with`, the modules hold the copies, made anew of parameters that have changed since; AdamW writes those of
    large tensors itself. When it ends, the gradients that backward left on the copies are the parameters' own; a second
    one is added in the parameters' dtype.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype):
        kept = set(replicated_parameters(model))
        self.copy_of: dict[nn.Parameter, nn.Parameter] = {}
        for p in model.parameters():
            if p not in kept and p.dtype != dtype:
                p.grad_dtype = None  # any
                self.copy_of[p] = nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad)
        # of parameters, when their copies were made
        self.versions: dict[nn.Parameter, int] = {}
        self.slots = [  # a tied parameter has two
            (module._parameters, name, p)
            for module in model.modules()
            for name, p in module._parameters.items()
            if p in self.copy_of
        ]

    def current(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Its copy, unless there is none or the parameter has changed since it was made."""
        made = self.versions.get(parameter) == parameter._version
        return self.copy_of[parameter] if made else None

    def written(self, parameters: list[nn.Parameter]) -> None:
        """Note that the copies of these were made of the parameters as they are now."""
        self.versions.update((p, p._version) for p in parameters)

    def __enter__(self) -> None:
        stale = [p for p in self.copy_of if self.versions.get(p) != p._version]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([self.copy_of[p] for p in stale], stale)
            self.written(stale)
        for owner, name, p in self.slots:
            owner[name] = self.copy_of[p]

    def __exit__(self, *_: object) -> None:
        for owner, name, p in self.slots:
            owner[name] = p
        given = {p: copy.grad for p, copy in self.copy_of.items() if copy.grad is not None}
        again = [p for p in given if p.grad is not None]
        if again:
            torch._foreach_add_(gradients(again), [given[p] for p in again])
        for p, grad in given.items():
            p.grad = grad if p.grad is None else p.grad
            self.copy_of[p].grad = None
