"""Clipped policy objective, with given advantages A and log-probabilities.

The behavior policy, which wrote the tokens, gave them these log-probabilities.

The loss is −min(ρ A, clip(ρ) A). The ratio ρ = p / p_behavior is per token (PPO, GRPO) or
per document. A document's ratio is the geometric mean over its tokens (GSPO, Zheng et al.
2025), with their mean advantage. `kl` scales an additional divergence from a reference,
estimated as exp(d) − d − 1 with d = log p_reference − log p (GRPO, Shao et al. 2024).

Ratios are clipped in the logarithm, so that a ratio outside the dtype's range has the loss
of its bound and no gradient. A ratio that is not clipped (where A is negative), or exp(d),
may overflow. The loss is then infinite, and training.on_nonfinite decides what happens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import LocalBatch, LossFunction, column, document_sums, of_documents
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics


class PolicyLoss(LossFunction):
    section = schema.Policy
    keys: schema.Policy
    group = 1
    unit = "clipped objective per token, negated"
    reports = {
        "entropy": "entropy, nats per token",
        "clipped": "clipped share of tokens or documents",
        "kl": "KL from the reference, nats per token",
    }

    @property
    def columns(self) -> dict[str, int]:
        columns = {"advantages": 0, "behaviour": 0}
        return columns | {"reference": 0} if self.keys.kl > 0 else columns

    @property
    def reads_twice(self) -> bool:
        return self.keys.level == "sequence"

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        labels = batch.labels.flatten()
        # Ratios of documents take a first pass over the head, without gradients.
        first_pass = logits.rows(labels, statistics=True) if self.reads_twice else None
        of_sequences = self._of_sequences(batch, first_pass) if first_pass else None

        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            logp = rows.logprobs[:, 0]
            weights, advantages, behaviour = (
                column(batch, name, logp)[tokens] for name in ("weights", "advantages", "behaviour")
            )
            # Clipped objective, by document or by token.
            if of_sequences:
                of_tokens = of_sequences(logp, tokens)
                loss = of_tokens["loss"]
                clipped = of_tokens["clipped"]
            else:
                objective, is_clipped = self._objectives(logp - behaviour, advantages)
                loss = -weights * objective
                clipped = weights * is_clipped
            # Divergence from the reference.
            kl = torch.zeros_like(logp)
            if self.keys.kl:
                distance = column(batch, "reference", logp)[tokens] - logp
                kl = weights * (distance.expm1() - distance)
            entropy = weights * rows.entropy
            return self.terms(loss + self.keys.kl * kl, entropy=entropy, clipped=clipped, kl=kl)

        return logits.sum(labels, terms, statistics=True, rows=first_pass)

    def _of_sequences(
        self, batch: LocalBatch, first_pass: LogitStatistics
    ) -> Callable[[Tensor, slice], dict[str, Tensor]]:
        """Return the function that gives each token's loss and clipped weight, [n] each."""
        distance = first_pass.logprobs[:, 0] - batch.columns["behaviour"][0]
        advantages = batch.columns["advantages"][0]
        sums = document_sums(batch, advantages=advantages, distance=distance)
        # Means over each document.
        means = {name: x / sums.length for name, x in sums.numbers.items()}
        objective, clipped = self._objectives(means["distance"], means["advantages"])
        # The slope is 0 where the ratio is clipped.
        slopes = -sums.weights * ~clipped * objective / sums.length
        return of_documents(batch, slopes, loss=-objective, clipped=clipped.to(objective.dtype))

    def _objectives(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return min(ρ A, clip(ρ) A), and whether ρ was clipped.

        ρ is bounded below if A is negative, else above.
        """
        lowest = math.log1p(-self.keys.clip_low)
        highest = math.log1p(self.keys.clip_high)
        negative = advantages < 0
        bounded = torch.where(negative, log_ratio.clamp(min=lowest), log_ratio.clamp(max=highest))
        return bounded.exp() * advantages, (bounded != log_ratio) & (advantages != 0)
