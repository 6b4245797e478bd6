"""Runs that an earlier version began resume, and compute what that version would have computed.

earlier_runs.tar.xz: two runs of version 0.1.0 (commit a7175eb) on two processes, killed while they saved step 6 of 6,
so that step 3 is their newest whole checkpoint and metrics.jsonl has what comes after it. `gdn` is of the family
Qwen3.5 (GDN, attention) and validates, `kda` is of Kimi-Linear (KDA, MLA).
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import exit_of, own_handlers
from tests.test_resume import STARTS, train_on_rank
from tests.worlds import World
from titan_linear import launch

RUNS = Path(__file__).with_name("earlier_runs.tar.xz")
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "skipped_steps", "validation_loss")


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in COMPARED if key in line} for line in lines]


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_a_run_of_version_0_1_resumes(
    name: str, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    with tarfile.open(RUNS) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / name / "run"
    known = metrics(folder)
    assert known[-1]["step"] == 6 and ("validation_loss" in known[-1]) == (name == "gdn")
    argv = ["--job.config_file", folder / "config.toml", "--job.dump_folder", folder]
    argv += ["--training.dataset_path", tmp_path / "corpus.jsonl", "--model.hf_assets_path", tmp_path / name / "model"]
    argv = [str(argument) for argument in argv]
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "run_workers", lambda *_: STARTS)
    with own_handlers():
        code, said = exit_of(launch.main, argv, capfd)
    assert code == STARTS, said
    assert worlds(2).run(train_on_rank, argv, str(tmp_path)) == [3, 3]
    for line, expected in zip(metrics(folder), known, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
