"""Runs that learn answers alone: the same losses on any number of processes, and after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.test_chat import UNMARKED, as_lines, make_tokenizer
from tests.worlds import World
from titan_linear.config import load_config
from titan_linear.train import Trainer


def trained(rank: int, world_size: int, argv: list[str], cache: str) -> tuple[int, list[float]]:
    os.environ["XDG_CACHE_HOME"] = cache
    trainer = Trainer(load_config(argv))
    begins_from, losses = trainer.step, []
    while trainer.step < trainer.config.training.steps:
        losses.append(trainer.train_step()["loss"])
        trainer.save()
    return begins_from, [*losses, trainer.validate()]


def test_losses(tmp_path: Path, worlds: Callable[[int], World]) -> None:
    """Losses of answers do not depend on the processes, and a run resumes in the middle."""
    make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    words = ["four", "eight", "sixteen", "two and a half", "a lot"]
    chats = [
        {"messages": [m for i in range(n % 3 + 1) for m in (
            {"role": "user", "content": f"{n} and {i}?"}, {"role": "assistant", "content": words[(n + i) % 5]})]}
        for n in range(60)
    ]  # fmt: skip
    keys = {
        "training.dataset": "jsonl", "training.dataset_path": as_lines(tmp_path / "chats.jsonl", chats),
        "training.dataset_format": "messages", "model.tokenizer_path": tmp_path / "tokenizer", "training.seq_len": 64,
        "training.dtype": "float64", "training.global_batch_size": 4, "training.steps": 3, "validation.enable": "true",
        "validation.holdout": 0.2,
    }  # fmt: skip

    def run(processes: int, name: str, **more: object) -> list[tuple[int, list[float]]]:
        given = keys | {"job.dump_folder": tmp_path / name} | {k.replace("__", "."): v for k, v in more.items()}
        argv = [text for key, value in given.items() for text in (f"--{key}", str(value))]
        return worlds(processes).run(trained, argv, str(tmp_path))

    ((_, alone),) = run(1, "alone")
    for _, losses in run(2, "cp", parallelism__context_parallel_degree=2):
        assert losses == pytest.approx(alone, rel=1e-9)
    run(1, "resumed", training__steps=1, lr_scheduler__total_steps=3)
    for begins_from, losses in run(2, "resumed", lr_scheduler__total_steps=3):  # dp 2
        assert begins_from == 1 and losses == pytest.approx(alone[1:], rel=1e-9)
