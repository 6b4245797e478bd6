"""Runs whose parameters lie in the host's memory: bit for bit those of runs without, resumed either way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.steps import after_backward
from tests.test_train import FLOAT64, SMALL_HYBRID, arguments, corpus, train_on_rank, whole_weights  # noqa: F401
from tests.worlds import World
from titan_linear.config import load_config
from titan_linear.train import Trainer

OFFLOAD = {"training.enable_cpu_offload": "true"}
CLIPPED = {"training.steps": 3, "training.max_norm": 0.1}
EXPERTS = {"model.name": "kimi-linear", "parallelism.expert_parallel_degree": 2, "training.local_batch_size": 1}
RUNS = {
    "one process": (1, SMALL_HYBRID | {"training.local_batch_size": 2}),
    "dp 2, kept until backward": (2, SMALL_HYBRID | {"training.local_batch_size": 2,
                                     "parallelism.fsdp_reshard_after_forward": "never"}),
    "tp 2, tied embeddings": (2, SMALL_HYBRID | {"model.flavor": "wide norms", "parallelism.tensor_parallel_degree": 2}),
    "cp 2 x tp 2, accumulation, full": (4, SMALL_HYBRID | {"parallelism.context_parallel_degree": 2,
                                           "parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 1,
                                           "activation_checkpoint.mode": "full"}),
    "ep 2, accumulation": (2, EXPERTS),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_the_same_bit_for_bit(name: str, corpus: Path, worlds: Callable[[int], World]) -> None:
    processes, keys = RUNS[name]
    plain, offloaded = (
        worlds(processes).run(train_on_rank, arguments(corpus, FLOAT64, CLIPPED, keys, more), str(corpus.parent))
        for more in ({}, OFFLOAD)
    )
    for (losses, norms, weights), (want_losses, want_norms, want) in zip(offloaded, plain, strict=True):
        print(max(abs(a/b-1) for a,b in zip(norms,want_norms)), max(abs(a/b-1) for a,b in zip(losses,want_losses)))
        assert losses == want_losses and norms == want_norms and min(norms) > 0.1
        assert all(torch.equal(weights[name], w) for name, w in want.items())
