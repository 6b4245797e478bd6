"""Cross-entropy, multiplied by each token's weight.

The term is −log p of the label. Label smoothing replaces a share ε of it by the mean over
the vocabulary. Z-loss adds ζ (log Σ exp z)², which keeps logits z small (PaLM, section 5).
"""

from torch import Tensor

from titan_linear.config import schema
from titan_linear.losses.loss import LocalBatch, LossFunction, column
from titan_linear.ops.cross_entropy import ChunkedLogits, LogitStatistics, cross_entropy


class CrossEntropyLoss(LossFunction):
    section = schema.CrossEntropy
    keys: schema.CrossEntropy

    def __call__(self, logits: ChunkedLogits, batch: LocalBatch) -> Tensor:
        smoothing = self.keys.label_smoothing
        z_loss = self.keys.z_loss

        def terms(rows: LogitStatistics, tokens: slice) -> Tensor:
            loss = cross_entropy(rows, tokens)
            if smoothing:
                loss = (1 - smoothing) * loss + smoothing * (rows.lse - rows.mean)
            if z_loss:
                loss = loss + z_loss * rows.lse.square()
            return column(batch, "weights", loss)[tokens] * loss

        return logits.sum(batch.labels.flatten(), terms, statistics=smoothing > 0)
