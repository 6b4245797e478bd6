"""The dry run as a command; its numbers are in test_memory.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import dry_run

ROOT = Path(__file__).parents[1]


def test_the_command(capsys: pytest.CaptureFixture) -> None:
    run = ["--training.seq_len", "4096", "--parallelism.context_parallel_degree", "2"]
    assert dry_run.main(["--gpus", "2", "8", "--", *run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("hybrid/debug: 5") and [line[:5] for line in lines[-2:]] == ["| 2 |", "| 8 |"]
    assert dry_run.main(["--gpus", "3", "--", *run]) == 2
    assert "need a multiple of 2 processes" in capsys.readouterr().err
    assert dry_run.main(["--gpus", "0"]) == 2 and "--gpus 0 must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("config", sorted(ROOT.glob("train_configs/*.toml")), ids=lambda path: path.stem)
def test_the_shipped_configurations_as_they_are(config: Path, capsys: pytest.CaptureFixture) -> None:
    """No GPU, no corpus and no tokenizer is here, and the types are those of GPUs."""
    absent = ["--model.tokenizer_path", "none/tokenizer.json", "--training.dataset", "jsonl"]
    assert dry_run.main(["--gpus", "8", "--", "--job.config_file", str(config), *absent]) == 0
    out = capsys.readouterr().out
    assert "compute bfloat16" in out and "'none/tokenizer.json' is not here: a vocabulary of" in out
