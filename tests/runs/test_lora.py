"""Runs that train adapters of a frozen base: equal under every split, resumed, and refused for another base."""

from __future__ import annotations

import pytest

from tests.training import (
    EXPERT_SPLITS,
    FLOAT64,
    FOUR_STEPS,
    SPLITS,
    arguments,
    check_equal,
    train_on_rank,
)

LORA = {"adapter.enable": "true", "adapter.rank": 3, "adapter.train_extra": '["*norm", "head"]'}
OF_HYBRID = (
    "dp 2",
    "cp 4",
    "HSDP x cp",
    "cp 4 sharded over 2",
    "tp 2",
    "tp 2 x cp 2 zig-zag",
    "HSDP x tp",
    "accumulation",
    "full activation checkpointing",
    "cp 2 all heads",
)
RUNS = {
    "hybrid": (FOUR_STEPS, OF_HYBRID),
    "kimi-linear": (
        {"model.name": "kimi-linear"},
        ("tp 2 x cp 2 zig-zag", "ep 2, dp 2 x cp 2", "ep 2, HSDP x cp 2 x tp 2"),
    ),
    "qwen3.5": ({"model.name": "qwen3.5"}, ("tp 2 x cp 2 zig-zag", "ep 2, dp 2")),
    "nemotron-h": ({"model.name": "nemotron-h"}, ("tp 2 x cp 2 zig-zag", "ep 2, dp 2")),
    "rwkv7": ({"model.name": "rwkv7"}, ("tp 2 x cp 2 zig-zag",)),
}


@pytest.mark.parametrize("name", RUNS)
def test_float64_runs_are_equal(name, corpus, worlds):
    """Norms and the head are trained as a whole; nothing else of the base moves."""
    model, splits = RUNS[name]
    keys = {"training.steps": 3} | model | FLOAT64 | LORA
    one = worlds(1).run(train_on_rank, arguments(corpus, keys))[0]
    for processes, split in ((SPLITS | EXPERT_SPLITS)[split] for split in splits):
        check_equal(worlds(processes).run(train_on_rank, arguments(corpus, keys, split))[0], one)
