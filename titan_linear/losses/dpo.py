"""Direct preference optimization (Rafailov et al. 2023).

Documents come in pairs: a chosen one, then a rejected one.

The loss is −log σ(β (r_chosen − r_rejected) − margin). A document's reward is

    r = Σ_t (log p − log p_reference).

`length_normalised` replaces the sum by the mean, and `reference_free` leaves out the
reference. With both and a margin this is SimPO (Meng et al. 2024). The weight of a pair is
the sum of its tokens' weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import LocalBatch, LossFunction, document_sums, of_documents
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics


class DPOLoss(LossFunction):
    section = schema.DPO
    keys: schema.DPO
    group = 2
    reads_twice = True
    unit = "nats per pair"
    reports = {
        "accuracy": "accuracy, share of pairs",
        "margin": "margin of the rewards, nats",
    }

    @property
    def columns(self) -> dict[str, int]:
        return {} if self.keys.reference_free else {"reference": 0}

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        labels = batch.labels.flatten()
        # First pass over the head: rewards of whole documents, which may span ranks.
        first_pass = logits.rows(labels)
        columns = {name: batch.columns[name][0] for name in self.columns}
        sums = document_sums(batch, policy=first_pass.logprobs[:, 0], **columns)
        length = sums.length if self.keys.length_normalised else torch.ones_like(sums.count)
        reward = (sums.numbers["policy"] - sums.numbers.get("reference", 0)) / length
        margin = self.keys.beta * (reward[0::2] - reward[1::2])
        short = self.keys.margin - margin
        # new_full avoids a copy from the host, for which the host would wait.
        accuracy = torch.heaviside(margin, margin.new_full((), 0.5))
        of_pairs = {"loss": F.softplus(short), "accuracy": accuracy, "margin": margin}
        # Slope of the loss in each token's log p. It raises chosen documents and lowers
        # rejected ones.
        pull = -self.keys.beta * short.sigmoid() * (sums.weights[0::2] + sums.weights[1::2])
        slopes = torch.stack([pull, -pull], 1).flatten() / length
        values = {name: x.repeat_interleave(2) for name, x in of_pairs.items()}
        of_tokens = of_documents(batch, slopes, **values)

        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            return self.terms(**of_tokens(rows.logprobs[:, 0], tokens))

        return logits.sum(labels, terms, rows=first_pass)
