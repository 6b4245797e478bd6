"""Forward and backward passes of micro-batches: a step's loss, part by part, and gradients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.losses import LossFunction
from titan_linear.losses.loss import LocalBatch, logprobs
from titan_linear.models.decoder import Decoder
from titan_linear.models.lora import without_adapters
from titan_linear.step.feed import Feed, StepTokens


class Forward:
    """The forward pass of a micro-batch, done or queued on the device.

    Call `backward` or `drop` to end it, because the context `precision` spans both passes.

    The loss is this micro-batch's part of two means: `loss`, divided by the step's weight,
    and the load-balance loss, averaged over all of the step's tokens.

    Args:
        step: token counts of the whole step, over all ranks.
    """

    def __init__(
        self,
        model: Decoder,
        batch: LocalBatch,
        step: StepTokens,
        precision: AbstractContextManager[object],
        loss: LossFunction,
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
        """Accumulate gradients, as sums over the step.

        Returns:
            This rank's part of the loss and of its reports.
        """
        # A separate autograd thread would double the host's time.
        with self.inside, torch.autograd.set_multithreading_enabled(False):
            self.loss.flatten()[0].backward()
        return self.loss.detach()

    def drop(self) -> None:
        """Discard the forward pass, without computing gradients."""
        with self.inside:
            del self.loss


def with_reference(
    model: Decoder, batch: LocalBatch, precision: AbstractContextManager[object]
) -> LocalBatch:
    """Add the base model's log-probability of each label as a column, if the loss reads it."""
    if not model.config.base_is_reference:
        return batch
    of_labels = partial(logprobs, ids=batch.labels.flatten())
    with precision, torch.no_grad(), without_adapters(model):
        reference = model(batch.tokens, batch.plan, loss=of_labels)
    return replace(batch, columns=batch.columns | {"reference": reference.unsqueeze(0)})


class Begun(NamedTuple):
    tokens: StepTokens
    # All micro-batches of the step.
    batches: Iterator[LocalBatch]
    # Forward pass of the first micro-batch.
    first: Forward


@dataclass(eq=False)
class Passes:
    """The passes of one step after another.

    Args:
        watching: a context around both passes of a micro-batch.
        replicas_once: with HSDP, sum gradients over replicas only in the last micro-step, for
            all micro-steps.
    """

    model: Decoder
    feed: Feed
    precision: AbstractContextManager[object]
    loss: LossFunction
    watching: Callable[[LocalBatch], AbstractContextManager[object]] = lambda batch: nullcontext()
    replicas_once: bool = False
    begun: Begun | None = None

    def next_step(self) -> tuple[StepTokens, Iterator[LocalBatch]]:
        tokens, batches = self.feed.next_step()
        return tokens, (with_reference(self.model, batch, self.precision) for batch in batches)

    def forward(self, batch: LocalBatch, step: StepTokens) -> Forward:
        return Forward(self.model, batch, step, self.precision, self.loss)

    def begin(self) -> None:
        """Queue the next step's first forward pass.

        The device then has work while the host waits for the numbers of the previous step.
        `run` continues from here; `drop` discards it.
        """
        tokens, batches = self.next_step()
        first = next(batches)
        self.begun = Begun(tokens, chain([first], batches), self.forward(first, tokens))

    def drop(self) -> None:
        """Discard the step begun by `begin`, if any, and its batches."""
        if self.begun:
            self.begun.first.drop()
            self.begun = None

    def run(
        self, ask: Callable[[int], None] = lambda done: None
    ) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Compute the gradients of the next step.

        Args:
            ask: called before each micro-step with the number of finished micro-steps; may
                raise.

        Returns:
            This rank's part of the loss for each micro-batch, [micro-steps] float64 (with
            reports [micro-steps, 1 + reports]), and the streams of each micro-batch.
        """
        tokens, batches = self.begun[:2] if self.begun else self.next_step()
        losses = []
        streams = []
        for done, batch in enumerate(batches):
            ask(done)
            if self.replicas_once:
                self.model.set_requires_all_reduce(done == self.feed.micro_steps - 1)
            # The first forward may already be queued by `begin`.
            with self.watching(batch):
                forward = self.begun.first if self.begun else self.forward(batch, tokens)
                self.begun = None
                losses.append(forward.backward())
            streams.append(batch.streams)
        return torch.stack(losses).double(), streams
