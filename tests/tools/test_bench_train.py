"""The bench of training steps, on the CPU with a tiny model."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.refusals import is_refused
from tools import bench_train
from tools.bench_train import COLUMNS
from tools.harness import cells

SMALL = [
    "--models",
    "hybrid/debug",
    "--seq-len",
    "128",
    "--documents",
    "40",
    "--steps",
    "2",
    "--warmup",
    "0",
]


def measured_on_rank(rank, world_size, argv):
    return list(bench_train.measured(*bench_train.parse(argv)))


def test_steps_of_two_ranks(worlds):
    keys = ["--", "--parallelism.context_parallel_degree=2", "--metrics.peak_tflops=1"]
    argv = [*SMALL, "--checkpointing", "none", "selective", *keys]
    rows, other = worlds(2).run(measured_on_rank, argv)
    assert [row["checkpointing"] for row in rows] == ["none", "selective"]
    for row, theirs in zip(rows, other, strict=True):
        assert (row["model"], row["tokens"], row["gpus"]) == (
            "hybrid/debug",
            128,
            2,
        )
        # one stream that both share
        assert row["tokens_per_second"] == pytest.approx(128 / 2 / row["step_ms"] * 1e3)
        assert (
            0 < row["tflops"] == row["mfu"]
            and row["first_step_seconds"] > 0
            and row["memory_gib"] > 0
        )
        assert theirs["step_ms"] == row["step_ms"]  # the slowest rank's
    assert len(cells(COLUMNS, rows[0])) == len(COLUMNS)


@pytest.mark.parametrize("documents", ["one", "20"])
def test_streams_of_the_trainer(worlds, documents):
    """Each step has the documents that were asked for, as the trainer packs them."""
    argv = [
        "--models",
        "gdn/debug",
        "--seq-len",
        "200",
        "--documents",
        documents,
        "--steps",
        "1",
        "--warmup",
        "0",
    ]
    (row,) = worlds(1).run(measured_on_rank, argv)[0]
    assert row["in_step"].tokens == 200
    mean = (2 * row["in_step"].pairs / 200) - 1  # of tokens' own documents: Σ n² / Σ n
    assert (mean == 200) == (documents == "one") and mean > 20 / 3


def test_streams_of_the_keys(worlds, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 3)
    argv = [
        "--models",
        "gdn/debug",
        "--seq-len",
        "62",
        "--documents",
        "run",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--",
    ]
    argv += ["--training.dataset=text", f"--training.dataset_path={tmp_path}/a.txt"]
    (row,) = worlds(1).run(measured_on_rank, argv)[0]
    assert row["in_step"].pairs == 2 * 31 * 32 / 2  # a document is its 30 bytes and an end


@pytest.mark.cuda
def test_a_row_of_a_gpu(worlds):
    (row,) = worlds(1, "nccl").run(
        measured_on_rank,
        ["--models", "gdn/340M", "--seq-len", "4096", "--", "--model.num_layers=2"],
    )[0]
    assert 0 < row["memory_gib"] < 20
    assert (row.get("sm_clock_mhz") is None) == (find_spec("pynvml") is None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--documents", "few"], "--documents 'few' must be 'one', 'run', or"),
        (["--steps", "0"], "--steps 0 must be 1 or more"),
        (["--", "--model.num_layers=-1"], "command line: model.num_layers = -1 must be"),
        (["--models", "kda/7B"], "model.flavor = '7B' is unknown"),
        (["--checkpointing", "some"], "command line: activation_checkpoint.mode = 'some' must be"),
        (["--seq-len", "30", "--", "--parallelism.context_parallel_degree=4"], "parallelism: "),
    ],
)
def test_what_is_refused(argv, message, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert is_refused(bench_train.main, argv, capsys).startswith(message)
