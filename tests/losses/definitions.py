"""Reference definitions of all losses, for comparison in tests.

They take whole logits in one process, in float64, one document at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_linear.config import schema


class Document(NamedTuple):
    """The labeled tokens of one document, as a stream contains them."""

    stream: int
    logits: Tensor  # [n, vocab]
    labels: Tensor  # [n]
    columns: dict[str, Tensor]  # "weights" [n], others [n] or [n, k]

    @property
    def logprobs(self) -> Tensor:
        return self.logits.log_softmax(-1).gather(1, self.labels[:, None])[:, 0]


def loss(name: str, documents: Sequence[Document], keys: Any, normalise: str) -> Tensor:
    """Return the weighted mean over tokens, documents or streams, as `normalise` says."""
    # The number by which each document's weights are divided.
    counts = {
        "token": [1 for _ in documents],
        "document": [len(d.labels) for d in documents],
        "stream": [
            sum(len(other.labels) for other in documents if other.stream == d.stream)
            for d in documents
        ],
    }[normalise]
    weights = [d.columns["weights"] / max(count, 1) for d, count in zip(documents, counts)]
    terms = {"cross_entropy": cross_entropy, "distillation": distillation, "policy": policy}
    # Both documents of a pair have the pair's loss, and count with their own weights.
    if name == "dpo":
        of_each = [dpo(*pair, keys) for pair in zip(documents[0::2], documents[1::2]) for _ in pair]
    else:
        of_each = [
            terms[name](document, keys) if len(document.labels) else 0 for document in documents
        ]
    return (
        sum((w * x).sum() for w, x in zip(weights, of_each) if w.any()) / torch.cat(weights).sum()
    )


def cross_entropy(document: Document, keys: schema.CrossEntropy) -> Tensor:
    """Return the loss of each token, [n]."""
    uniform = document.logits.log_softmax(-1).mean(-1)
    smooth = -(1 - keys.label_smoothing) * document.logprobs - keys.label_smoothing * uniform
    return smooth + keys.z_loss * document.logits.exp().sum(-1).log() ** 2


def distillation(document: Document, keys: schema.Distillation) -> Tensor:
    """Return the loss of each token, [n]."""
    p = (document.logits / keys.temperature).softmax(-1)
    ids, q = document.columns["teacher_ids"].long(), document.columns["teacher_logprobs"].exp()
    among = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, True)
    p_rest, q_rest = (p * ~among).sum(-1), 1 - q.sum(-1)
    kl = (q * (q / p.gather(1, ids)).log()).sum(-1) + q_rest * (q_rest / p_rest).log()
    return keys.temperature**2 * kl


def dpo(chosen: Document, rejected: Document, keys: schema.DPO) -> Tensor:
    def reward(document: Document) -> Tensor:
        ratio = document.logprobs
        if not keys.reference_free:
            ratio = ratio - document.columns["reference"]
        return ratio.mean() if keys.length_normalised else ratio.sum()

    return -torch.sigmoid(keys.beta * (reward(chosen) - reward(rejected)) - keys.margin).log()


def policy(document: Document, keys: schema.Policy) -> Tensor:
    """Return the loss of each token, [n]; of sequences, n times the same value."""
    ratio = (document.logprobs - document.columns["behaviour"]).exp()
    advantages = document.columns["advantages"]
    if keys.level == "sequence":
        ratio = ratio.prod() ** (1 / len(ratio)) * torch.ones_like(ratio)
        advantages = advantages.mean() * torch.ones_like(ratio)
    clipped = ratio.clamp(1 - keys.clip_low, 1 + keys.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if not keys.kl:
        return -objective
    to_reference = document.columns["reference"] - document.logprobs
    return -objective + keys.kl * (to_reference.exp() - to_reference - 1)
