"""Distillation: KL(teacher ‖ student), given the teacher's k likeliest tokens.

All other tokens form one class.

At temperature τ both distributions are softmax(z / τ), and the loss is multiplied by τ²,
which keeps the size of the gradients (Hinton et al. 2015). The columns hold the teacher's
log-probabilities at that temperature.
"""

from dataclasses import replace

import torch
from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import LocalBatch, LossFunction, column
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics, cross_entropy

# Largest number of teacher ids per token.
MOST_IDS = 256


class DistillationLoss(LossFunction):
    section = schema.Distillation
    keys: schema.Distillation
    columns = {"teacher_ids": MOST_IDS, "teacher_logprobs": MOST_IDS}

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        tau = self.keys.temperature
        # Labels in column 0, then the teacher's ids.
        ids = torch.cat([batch.labels.int().unsqueeze(-1), batch.columns["teacher_ids"]], -1)[0]

        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            student = rows.logprobs[:, 1:]
            teacher = column(batch, "teacher_logprobs", student)[tokens]
            q = teacher.exp()
            # All other tokens form one class, with the remaining probability.
            others_q = (1 - q.sum(1)).clamp(min=0)
            others_p = (1 - student.exp().sum(1)).clamp(min=torch.finfo(student.dtype).eps)
            others = torch.xlogy(others_q, others_q) - others_q * others_p.log()
            kl = (q * (teacher - student)).sum(1) + others
            return tau**2 * column(batch, "weights", kl)[tokens] * kl

        # The reported cross-entropy of each token does not depend on the temperature.
        if logits.token_losses is not None:
            with torch.no_grad():
                logits.sum(batch.labels.flatten(), cross_entropy)
        return replace(logits, x=logits.x / tau, token_losses=None).sum(ids, terms)
