"""The definitions of all losses: whole logits, one process, float64, a document at a time. Tests compare with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.config import schema


class Document(NamedTuple):
    """The tokens of a document that have a label, as a stream has them."""

    stream: int
    logits: Tensor  # [n, vocab]
    labels: Tensor  # [n]
    columns: dict[str, Tensor]  # "weights" [n], others [n] or [n, k]


def mean(documents: Sequence[Document], terms: Callable[[Document], Tensor], normalise: str) -> Tensor:
    """The mean of the terms of tokens [n], by their weights; of documents or streams if these count alike."""
    groups = {
        "token": [[*documents]],
        "document": [[document] for document in documents],
        "stream": [[d for d in documents if d.stream == i] for i in {d.stream for d in documents}],
    }[normalise]
    loss = weight = torch.tensor(0.0, dtype=torch.float64)
    for group in groups:
        weights = torch.cat([document.columns["weights"] for document in group])
        values = torch.cat([terms(document) for document in group])
        count = max(len(weights), 1) if normalise != "token" else 1
        loss = loss + (weights * values).sum() / count
        weight = weight + weights.sum() / count
    return loss / weight


def cross_entropy(document: Document, keys: schema.CrossEntropy) -> Tensor:
    """[n]"""
    logprobs = document.logits.log_softmax(-1)
    of_label = -logprobs.gather(1, document.labels[:, None])[:, 0]
    smooth = (1 - keys.label_smoothing) * of_label - keys.label_smoothing * logprobs.mean(-1)
    return smooth + keys.z_loss * document.logits.exp().sum(-1).log() ** 2
