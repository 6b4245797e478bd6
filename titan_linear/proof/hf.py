"""Logits of the run's Hugging Face folder beside those of transformers."""

from __future__ import annotations

from titan_linear.proof.findings import Findings
from titan_linear.proof.subject import Subject


def logits(subject: Subject) -> Findings:
    yield from ()
