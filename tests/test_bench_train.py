"""The bench of training steps, on the CPU with a tiny model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.refusals import is_refused
from tests.worlds import World
from titan_linear.data import IGNORE
from tools import bench_train
from tools.bench_train import HEAD, RandomStreams, Row, largest_costs, line

SMALL = ["--models", "hybrid/debug", "--seq-len", "128", "--documents", "40", "--steps", "2", "--warmup", "0"]


def measured_on_rank(rank: int, world_size: int, argv: list[str]) -> list[Row]:
    return list(bench_train.measured(*bench_train.parse(argv)))


def test_steps_of_two_ranks(worlds: Callable[[int], World]) -> None:
    keys = ["--", "--parallelism.context_parallel_degree=2", "--metrics.peak_tflops=1"]
    argv = [*SMALL, "--checkpointing", "none", "selective", *keys]
    rows, other = worlds(2).run(measured_on_rank, argv)
    assert [row.checkpointing for row in rows] == ["none", "selective"]
    for row, theirs in zip(rows, other, strict=True):
        assert (row.model, row.by, row.tokens, row.gpus) == ("hybrid/debug", "titan_linear", 128, 2)
        assert row.tokens_per_second == pytest.approx(128 / 2 / row.step_ms * 1e3)  # one stream that both share
        assert 0 < row.tflops == row.mfu and row.first_step_seconds > 0 and row.memory_gib > 0
        assert row.launches is row.idle is None and len(row.costs) == 10  # of kernels: none are launched here
        assert theirs.step_ms == row.step_ms  # the slowest rank's
    assert line(rows[0]).count("|") == len(HEAD) + 1
    assert "hybrid/debug, titan_linear, checkpointing none" in largest_costs(rows[0])


@pytest.mark.parametrize("mean", [None, 1, 30, 1000])
def test_random_streams(mean: int | None) -> None:
    stream, again = (RandomStreams(300, 50, mean)[3] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(vars(stream).values(), vars(again).values(), strict=True))
    cu, ends = stream.cu_seqlens, stream.cu_seqlens[1:] - 1
    assert cu[0] == 0 and cu[-1] == 300 and (np.diff(cu) > 0).all() and (mean is not None or len(cu) == 2)
    assert (stream.labels[ends] == IGNORE).all() and (stream.labels == IGNORE).sum() == len(ends)
    inside = stream.labels != IGNORE
    assert (stream.labels[inside] == stream.tokens[1:][inside[:-1]]).all()
    assert (stream.position_ids[cu[:-1]] == 0).all() and (stream.position_ids[ends] == np.diff(cu) - 1).all()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--documents", "few"], "--documents 'few' must be 'one', or"),
        (["--steps", "0"], "--steps 0 must be 1 or more"),
        (["--layers", "0"], "--layers 0 must be 1 or more"),
        (["--models", "kda/7B"], "model.flavor = '7B' is unknown"),
        (["--checkpointing", "some"], "command line: activation_checkpoint.mode = 'some' must be"),
        (["--seq-len", "30", "--", "--parallelism.context_parallel_degree=4"], "parallelism: "),
        (["--fla"], "--fla needs flash-linear-attention, which is not installed"),
    ],
)
def test_what_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_train, "find_spec", lambda name: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert is_refused(bench_train.main, argv, capsys).startswith(message)
