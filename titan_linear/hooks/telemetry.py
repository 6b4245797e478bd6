"""Observations in every `metrics.telemetry_freq`-th step beyond its loss.

They are norms by layer, reports of the mixers, loss by position and source, and experts'
loads:

    grad_norm, update_norm, weight_norm   of each layer, embedding and head: 2-norms of the gradient
                                          before clipping, of the optimizer's change of the weights
                                          (before these are rounded to their dtype), and of the
                                          weights after it
    half_life, state_norm, carried_share  of linear layers, by head (models/mixers/recurrent.py)
    fragment_share                        likewise, under context parallelism, of ACROSS layers at a time
    attention_entropy                     of softmax attention, by head, as a share of the maximum
                                          (models/layers.py)
    router_load                           tokens sent to each expert; 1 is an equal share
    loss_by_position                      nats per token of positions 1, 2–3, 4–7, … in documents,
                                          keyed by the first
    loss_by_depth                         likewise of multi-token prediction, by how many tokens later
    loss_by_source                        likewise of a mixture's sources and of the file groups in
                                          metrics.loss_by_source
    tokens_by_source                      number of tokens with a label, of each of these file groups

Mixers are watched in a window: the first of each rank's tokens in the step's first
micro-batch. Hooks before the layers, outside compiled or recomputed code, pass a layer's
input to its mixer's `watch`, without gradients. fragment_share is over all of the rank's
tokens in that micro-batch, and costs more than everything else together. So one watched
step covers a few layers, and the next one the next few. Norms and losses cover the whole
step. Each rank contributes numerators and denominators. One collective sums them over the
ranks, and its result is read with the step's numbers. The step itself computes the same as
without telemetry.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.data import IGNORE, FileGroups, MixedStreams, Streams
from titan_linear.hooks.hook import Hook, StepResult
from titan_linear.hooks.norms import Parameters, squares_of_each, update_squares
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.decoder import Block
from titan_linear.models.mlps.moe import MoE
from titan_linear.models.plan import BatchPlan, Window
from titan_linear.ops.exchange.collectives import gather_along
from titan_linear.ops.layout.tables import to_device
from titan_linear.run.session import Session
from titan_linear.step.optimizer import AdamW, StepNumbers

# Least and most tokens of the window, which is 1/SHARE of a rank's tokens.
WINDOW = (256, 4096)
SHARE = 16
# Layers per watched step for which fragment_share is computed.
ACROSS = 4
# Quantity → layer, position or source → number, or numbers by head or expert.
Observed = dict[str, dict[str, Any]]


class PartialSum(NamedTuple):
    """This rank's part of a sum over ranks."""

    # [n, m], this rank's values, on the device.
    values: Tensor
    # Maps the sums over the ranks [tp, n, m], on the host, to the numbers that are shown.
    finish: Callable[[Tensor], Any]


# Functions from sums [tp, n, m] to the numbers that are shown, by name where there are names.


def _norms(names: list[str], sums: Tensor) -> dict[str, float]:
    return dict(zip(names, sums.sum(0)[0].sqrt().tolist(), strict=True))


def _means(sums: Tensor) -> list[float] | None:
    """Return numerators over denominators; None if a denominator is 0."""
    numerators, denominators = sums.sum(0)
    return (numerators / denominators).tolist() if denominators.all() else None


def _by_head(sums: Tensor) -> list[float] | None:
    """Return means by head, for the heads of all tp ranks."""
    return _means(sums.movedim(0, 1).flatten(1).unsqueeze(0))


def _by_name(names: list[str], sums: Tensor) -> dict[str, float]:
    numerators, denominators = sums.sum(0).tolist()
    return {name: a / b for name, a, b in zip(names, numerators, denominators, strict=True) if b}


def _counts(names: list[str], sums: Tensor) -> dict[str, int]:
    return dict(zip(names, map(int, sums.sum(0)[0].tolist()), strict=True))


class Telemetry(Hook):
    """The telemetry of one rank. In a step that is not watched, it computes nothing."""

    def __init__(
        self,
        session: Session,
        freq: int,
        seq_len: int,
        streams: Streams | None,
        groups: FileGroups | None,
    ):
        """Prepare telemetry for this session's model.

        Args:
            freq: every how many steps it watches; 0: never.
            seq_len: number of tokens of the longest streams.
            streams: the streams that batches come from, if losses by source are wanted.
            groups: groups of their files.
        """
        self.freq = freq
        self.model = session.model
        self.dims = session.dims
        self.device = session.device
        self.streams = streams
        self.sources = list(streams.sources) if isinstance(streams, MixedStreams) else []
        self.groups = groups
        self.buckets = seq_len.bit_length()
        # Norms are by unit: a layer, the embedding or the head.
        self.units = list(dict.fromkeys(_unit(name) for name, _ in self.model.named_parameters()))
        self.experts = {
            f"layers.{i}": m.mlp for i, m in enumerate(self.model.layers) if isinstance(m.mlp, MoE)
        }
        # `_turn` is the number of the watched step, from 1.
        self.on = False
        self._turn = 0
        # Observations in the last step.
        self.seen: Observed = {}
        # Parts by quantity and layer.
        self._parts: dict[tuple[str, str], PartialSum] = {}
        self._windowed = False
        # Parameters that this rank counts in a watched step, and the unit of each.
        self._counted: Parameters = []
        self._unit_of: Tensor | None = None

    def watches(self, step: int) -> bool:
        """Whether `step` (from 1) is watched."""
        return bool(self.freq) and step % self.freq == 0

    def before_step(self, step: int) -> None:
        self.on = self.watches(step)
        self._turn = step // self.freq if self.on else 0
        self._parts = {}
        self._windowed = False

    @contextmanager
    def watching(self, batch: LocalBatch) -> Iterator[None]:
        """Observe the forward and backward of a micro-batch, which run inside this context."""
        if not self.on:
            yield
            return
        # The head adds its losses by token here; row 0 is the next token's.
        shape = 1 + self.model.config.mtp_layers, batch.labels.numel()
        losses = torch.zeros(shape, dtype=torch.float64, device=batch.labels.device)
        with ExitStack() as undone:
            self._look_at_mixers(batch.plan, undone)
            undone.callback(setattr, self.model.head, "token_losses", None)
            self.model.head.token_losses = losses
            yield
        self._add_losses(batch, losses)

    def _look_at_mixers(self, plan: BatchPlan, hooks: ExitStack) -> None:
        """Register hooks on the layers, in the step's first micro-batch only."""
        if self._windowed:
            return
        self._windowed = True
        # Only ACROSS layers at a time get the window with fragments, which is expensive.
        window = Window.of(plan, _window_tokens(len(plan.position_ids)))
        inside = replace(window, fragments=None)
        layers = self.model.layers
        for i, layer in enumerate(layers):
            across = (i - self._turn * ACROSS) % len(layers) < ACROSS
            handle = layer.register_forward_pre_hook(
                partial(self._look_at, f"layers.{i}", window if across else inside)
            )
            hooks.callback(handle.remove)

    @torch.no_grad()
    def _look_at(self, name: str, window: Window, layer: Block, inputs: tuple[Tensor, ...]) -> None:
        """Let a layer's mixers observe their input.

        inputs: the layer's inputs, x [1, T, dim] first; under tensor parallelism x has this
        rank's tokens. Mixers get all tokens if the window has fragments, else at least the
        window's.
        """
        if not any(hasattr(mixer, "watch") for mixer in layer.mixers):
            return
        x = inputs[0] if window.fragments else inputs[0][:, : window.tokens]
        if self.dims.tp > 1:
            x = gather_along(x, 1, self.dims.tp_ranks.group, self.dims.tp)
        # Compute the mixer's input as the layer does, then let each of its mixers observe
        # it.
        x = layer.mixer_input(layer.joined(x))
        for mixer, takes, of in zip(layer.mixers, layer.takes, layer.mixer_names, strict=True):
            where = name if of == "mixer" else f"{name}.{of}"
            taken = inputs[3:] if takes else ()
            seen = mixer.watch(x, window, *taken) if hasattr(mixer, "watch") else {}
            self._parts |= {
                (quantity, where): PartialSum(torch.stack(pair), _by_head)
                for quantity, pair in seen.items()
            }

    def _add_losses(self, batch: LocalBatch, losses: Tensor) -> None:
        """Add the losses of a micro-batch to the sums.

        losses: [1 + further tokens, T] nats; under tensor parallelism the first rank has
        all of them.
        """
        losses, *further = losses
        device = losses.device
        plan = batch.plan
        positions = plan.position_ids
        # All tp ranks have the same tokens: only the first of them counts.
        first = self.dims.tp_ranks.rank == 0
        pairs = torch.stack([losses, (batch.labels.flatten() != IGNORE).double() * first])  # [2, T]
        # Rows of the tokens from which the labels are predicted.
        rows = torch.arange(len(positions), device=device)
        if plan.branches is not None:
            rows = torch.cat([rows, plan.branches])
        # Losses by position, in bins of powers of 2.
        powers = 2 ** torch.arange(1, self.buckets, device=device)
        bucket = torch.bucketize(positions[rows] + 1, powers, right=True)
        self._add("loss_by_position", pairs, bucket, [str(2**b) for b in range(self.buckets)])
        # Losses of the layers that predict further tokens.
        depths = [str(k) for k, _ in enumerate(further, 1)]
        for k, of in enumerate(further):
            valid = (plan.later.labels[k] != IGNORE).double() * first
            self._add("loss_by_depth", torch.stack([of, valid]), torch.full_like(bucket, k), depths)
        # Losses by source: of the mixture's sources, then of the file groups.
        names = self.sources + (self.groups.names if self.groups else [])
        if self.sources:
            sources = [self.sources.index(self.streams.source(i)[0]) for i in batch.streams]
            stream = rows // (len(positions) // len(sources))
            of_token = torch.tensor(sources, device=device)[stream]
            self._add("loss_by_source", pairs, of_token, names)
        if self.groups:
            group = self._groups_of_tokens(batch)[rows]
            self._add("loss_by_source", pairs, group + len(self.sources), names)
            self._add("tokens_by_source", pairs[1:], group, self.groups.names, _counts)

    def _groups_of_tokens(self, batch: LocalBatch) -> Tensor:
        """Return the group of each of this rank's tokens, [T] int64, on the device."""
        of_streams = np.concatenate([self.groups.of_stream(i) for i in batch.streams])
        own = np.concatenate(
            [of_streams[start:end] for start, end in batch.plan.cp_context.fragments]
        )
        return to_device(torch.from_numpy(own), self.device)

    def _add(
        self,
        quantity: str,
        values: Tensor,
        index: Tensor,
        names: list[str],
        finish: Callable[[list[str], Tensor], Any] = _by_name,
    ) -> None:
        """Add values [n, m] to the quantity's sums, by index [m] into names."""
        new = PartialSum(values.new_zeros(len(values), len(names)), partial(finish, names))
        self._parts.setdefault((quantity, ""), new).values.index_add_(1, index, values)

    def gradients(self, counted: Parameters) -> None:
        """Record the gradients of a watched step, before clipping.

        counted: the parameters that this rank counts (`counted_parameters`).
        """
        unit_of = {p: self.units.index(_unit(name)) for name, p in self.model.named_parameters()}
        self._counted = [p for p in counted if p.requires_grad]
        self._unit_of = torch.tensor(
            [unit_of[p] for p in self._counted], dtype=torch.int64, device=self.device
        )
        # A parameter without a gradient counts as zero.
        none = torch.zeros(1, device=self.device)
        grads = [none if p.grad is None else p.grad for p in self._counted]
        self._add_norms("grad_norm", squares_of_each(grads, self.device))

    def sums(self, numbers: StepNumbers, optimizer: AdamW) -> Tensor:
        """Return the sums over all ranks, [.] float64, which `named` reads.

        Call it after the update. If the step's numbers are not finite, the update was
        skipped, and is zero here.
        """
        # Norms of the update and of the weights.
        finite = numbers.finite()
        self._add_norms(
            "update_norm", update_squares(optimizer, self._counted, self.device).where(finite, 0.0)
        )
        self._add_norms("weight_norm", squares_of_each(self._counted, self.device))
        # Loads of experts, relative to an equal share.
        for name, moe in self.experts.items():
            loads = moe.loads.double()
            self._parts["router_load", name] = PartialSum(
                torch.stack([loads, loads.mean().expand_as(loads)]), _means
            )
        # All parts travel in one collective.
        flat = torch.cat([part.values.double().flatten() for part in self._parts.values()])
        # Each tp rank has other heads, and so a row of its own.
        rows = flat.new_zeros(self.dims.tp, len(flat))
        rows[self.dims.tp_ranks.rank] = flat
        dist.all_reduce(rows)
        return rows.flatten()

    def _add_norms(self, quantity: str, squares: Tensor) -> None:
        """Add norms by unit. squares: [n] float64, one for each counted parameter."""
        self._add(quantity, squares.unsqueeze(0), self._unit_of, self.units, _norms)

    def after_step(self, done: StepResult) -> None:
        self.seen = self.named(done.seen) if done.seen else {}

    def named(self, numbers: list[float]) -> Observed:
        """Return the observations, from `sums` on the host; means without tokens are left
        out.
        """
        rows = torch.tensor(numbers, dtype=torch.float64).view(self.dims.tp, -1)
        seen: Observed = {}
        start = 0
        # Parts lie one after the other in each row.
        for (quantity, where), part in self._parts.items():
            size = part.values.numel()
            found = part.finish(rows[:, start : start + size].unflatten(1, part.values.shape))
            start += size
            if found not in (None, {}):
                seen.setdefault(quantity, {}).update({where: found} if where else found)
        return seen


def _window_tokens(tokens: int) -> int:
    """Return the number of tokens in the window of a rank with `tokens` tokens."""
    least, most = WINDOW
    return min(tokens, max(least, min(tokens // SHARE, most)))


def _unit(parameter: str) -> str:
    """Map layers.3.mixer.q_proj.weight to layers.3, and head.norm.weight to head."""
    return re.findall(r"layers\.\d+|[^.]+", parameter)[0]
