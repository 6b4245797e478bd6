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
from titan_linear.losses.loss import Loss, Targets, column, document_sums, logprobs
from titan_linear.ops.cross_entropy import ChunkedLogits, Rows


@dataclass(frozen=True)
class Policy(Loss):
    keys: schema.Policy = field(default_factory=schema.Policy)
    group: ClassVar[int] = 1
    reports: ClassVar[tuple[str, ...]] = ("entropy", "clipped", "kl")  # clipped: share of tokens (documents)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("advantages", "behaviour", *["reference"] * (self.keys.kl > 0))

    @property
    def reads_twice(self) -> bool:
        return self.keys.level == "sequence"

    def __call__(self, logits: ChunkedLogits, batch: Targets) -> Tensor:
        labels = batch.labels.flatten()
        columns = [batch.columns[name][0] for name in ("weights", "advantages", "behaviour")]
        of_ratios = columns
        if self.reads_twice:
            # Each token has its document's mean weight, advantage and log ratio: together they have its gradient.
            logp = logprobs(logits, labels)
            weights, advantages, behaviour = columns
            sums = document_sums(batch, weights, advantages, logp - behaviour)
            *means, log_ratio = (sums[1:] / sums[0].clamp(min=1))[:, batch.columns["document"][0]]
            of_ratios = [*means, logp - log_ratio]

        def terms(rows: Rows, tokens: slice) -> Tensor:
            logp = rows.logprobs[:, 0]
            weights, advantages, behaviour = (x[tokens].to(logp.dtype) for x in of_ratios)
            ratio = (logp - behaviour).exp()
            free = ratio * advantages
            bounded = ratio.clamp(1 - self.keys.clip_low, 1 + self.keys.clip_high) * advantages
            of_tokens = column(batch, "weights", logp)[tokens]
            kl = torch.zeros_like(logp)
            if self.keys.kl:
                distance = column(batch, "reference", logp)[tokens] - logp
                kl = of_tokens * (distance.exp() - distance - 1)
            loss = self.keys.kl * kl - weights * torch.minimum(free, bounded)
            return torch.stack([loss, of_tokens * rows.entropy, weights * (bounded < free), kl], 1)

        return logits.sum(labels, terms, statistics=True)
