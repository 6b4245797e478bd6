"""Deliberate faults, and the checks that find them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tests.keys import argv_of
from titan_linear.proof.findings import Finding

CP = "parallelism.context_parallel_degree"
KEYS = {
    "training.dataset": "jsonl",
    "training.seq_len": 256,
    "training.global_batch_size": 4,
    "debug.seed": 1,
    CP: 4,
    "lr_scheduler.warmup_steps": 4,
}


def arguments(corpus, **more):
    return argv_of(
        KEYS | {"training.dataset_path": corpus, "job.dump_folder": corpus.parent / "run"}, **more
    )


@contextmanager
def sabotaged(owner, name, broken):
    """`owner.name(...)` is broken(what it was, ...) inside."""
    was = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            owner, name, lambda *arguments, **keywords: broken(was, *arguments, **keywords)
        )
        yield


def failures(findings):
    return (
        str(finding) for finding in findings if isinstance(finding, Finding) and not finding.holds
    )
