"""Direct preference optimisation (Rafailov et al. 2023), of pairs: a chosen document, then a rejected one.

−log σ(β (r_chosen − r_rejected) − margin), with r = Σ_t log p − log p_reference of a document; with `length_normalised`
its mean, with `reference_free` without the reference: both and a margin are SimPO (Meng et al. 2024). A pair counts as
much as the weights of its tokens, together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import Loss, Targets, through_documents
from titan_linear.ops.cross_entropy import ChunkedLogits, Rows


@dataclass(frozen=True)
class DPO(Loss):
    keys: schema.DPO = field(default_factory=schema.DPO)
    group: ClassVar[int] = 2
    reports: ClassVar[tuple[str, ...]] = ("accuracy", "margin")  # share of pairs whose margin is right; the margin

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.keys.reference_free else ("reference",)

    def __call__(self, logits: ChunkedLogits, batch: Targets) -> Tensor:
        columns = [batch.columns[name].flatten() for name in ("weights", *self.columns)]
        numbers, slopes = through_documents(logits, batch, columns, self._of_sums)
        if not torch.is_grad_enabled():
            return numbers

        def terms(rows: Rows, tokens: slice) -> Tensor:
            return slopes[tokens] * rows.logprobs[:, 0]

        change = logits.sum(batch.labels.flatten(), terms)
        return numbers + (change - change.detach())

    def _of_sums(self, policy: Tensor, weights: Tensor, *reference_and_count: Tensor) -> Tensor:
        *reference, count = reference_and_count
        reward = policy - sum(reference)
        if self.keys.length_normalised:
            reward = reward / count.clamp(min=1)
        margin = self.keys.beta * (reward[0::2] - reward[1::2])
        loss = -F.logsigmoid(margin - self.keys.margin)
        accuracy = torch.heaviside(margin.detach(), margin.new_tensor(0.5))
        return torch.stack([loss, accuracy, margin]) @ (weights[0::2] + weights[1::2])
