"""Direct preference optimization (Rafailov et al. 2023).

Documents come in pairs: a chosen one, then a rejected one.

The loss is −log σ(β (r_chosen − r_rejected) − margin). A document's reward is

    r = Σ_t (log p − log p_reference).

`length_normalised` replaces the sum by the mean, and `reference_free` leaves out the
reference. With both and a margin this is SimPO (Meng et al. 2024). The weight of a pair is
the sum of its tokens' weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import LocalBatch, LossFunction, document_sums, of_documents
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics


class DPOLoss(LossFunction):
    keys: schema.DPO
    group = 2
    reads_twice = True
    unit = "nats per pair"
    reports = {
        "accuracy": "accuracy, share of pairs",
        "margin": "margin of the rewards, nats",
    }

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.keys.reference_free else ("reference",)

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        labels = batch.labels.flatten()
        # First pass over the head: rewards of whole documents, which may span ranks.
        known = logits.rows(labels)
        columns = (batch.columns[name][0] for name in self.columns)
        weights, count, policy, *reference = document_sums(batch, known.logprobs[:, 0], *columns)
        length = count.clamp(min=1) if self.keys.length_normalised else torch.ones_like(count)
        reward = (policy - sum(reference)) / length
        margin = self.keys.beta * (reward[0::2] - reward[1::2])
        short = self.keys.margin - margin
        # new_full avoids a copy from the host, for which the host would wait.
        accuracy = torch.heaviside(margin, margin.new_full((), 0.5))
        of_pairs = torch.stack([F.softplus(short), accuracy, margin], 1).repeat_interleave(2, 0)
        # Slope of the loss in each token's log p. It raises chosen documents and lowers
        # rejected ones.
        pull = -self.keys.beta * short.sigmoid() * (weights[0::2] + weights[1::2])
        of_tokens = of_documents(batch, of_pairs, torch.stack([pull, -pull], 1).flatten() / length)

        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            return torch.stack(of_tokens(rows.logprobs[:, 0], tokens), 1)

        return logits.sum(labels, terms, rows=known)
