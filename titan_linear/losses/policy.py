"""A policy's clipped objective, with given advantages A and log-probabilities of the behaviour that wrote the tokens.

−min(ρ A, clip(ρ) A) with the ratio ρ = p / p_behaviour of a token (PPO, GRPO), or of a document: the geometric mean of
its tokens' (GSPO, Zheng et al. 2025), with their mean advantage. `kl` adds as much of the divergence from a reference,
estimated as exp(d) − d − 1 of d = log p_reference − log p (GRPO, Shao et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import Loss, Targets, column, through_documents
from titan_linear.ops.cross_entropy import ChunkedLogits, Rows


@dataclass(frozen=True)
class Policy(Loss):
    keys: schema.Policy = field(default_factory=schema.Policy)
    group: ClassVar[int] = 1
    reports: ClassVar[tuple[str, ...]] = ("entropy", "clipped", "kl")  # clipped: share of tokens (documents)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("advantages", "behaviour", *["reference"] * (self.keys.kl > 0))

    def __call__(self, logits: ChunkedLogits, batch: Targets) -> Tensor:
        labels = batch.labels.flatten()
        of_sequences = self.keys.level == "sequence"
        if of_sequences:
            columns = [batch.columns[name].flatten() for name in ("weights", "advantages", "behaviour")]
            numbers, slopes = through_documents(logits, batch, columns, self._of_sums)

        def terms(rows: Rows, tokens: slice) -> Tensor:
            logp = rows.logprobs[:, 0]
            weights, advantages, behaviour = (
                column(batch, name, logp)[tokens] for name in ("weights", "advantages", "behaviour")
            )
            kl = torch.zeros_like(logp)
            if self.keys.kl:
                distance = column(batch, "reference", logp)[tokens] - logp
                kl = distance.exp() - distance - 1
            if of_sequences:
                change = slopes[tokens] * logp
                loss, clipped = change - change.detach(), torch.zeros_like(logp)
            else:
                loss, clipped = (weights * x for x in self._clipped((logp - behaviour).exp(), advantages))
            return torch.stack([loss + weights * self.keys.kl * kl, weights * rows.entropy, clipped, weights * kl], 1)

        sums = logits.sum(labels, terms, statistics=True)
        return sums + numbers if of_sequences else sums

    def _of_sums(self, policy: Tensor, weights: Tensor, advantages: Tensor, behaviour: Tensor, count: Tensor) -> Tensor:
        count = count.clamp(min=1)
        loss, clipped = self._clipped(((policy - behaviour) / count).exp(), advantages / count)
        return torch.stack([loss, torch.zeros_like(loss), clipped, torch.zeros_like(loss)]) @ weights

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The objective, and 1 where it is clipped."""
        free, bounded = ratio * advantages, ratio.clamp(1 - self.keys.clip_low, 1 + self.keys.clip_high) * advantages
        return -torch.minimum(free, bounded), (bounded < free).to(ratio.dtype)
