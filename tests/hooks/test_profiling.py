"""When traces and memory snapshots are written, and what is written beside a trace."""

import os
import pickle
import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.keys import argv_of
from titan_linear.config import load_config
from titan_linear.hooks.profiling import MemorySnapshots, Profiler


def profiler(config, done, between_steps=ExitStack):
    return Profiler(config.job.dump_folder, config.profiling, done, lambda: None, between_steps)


def test_a_trace_of_the_profiler(tmp_path, monkeypatch):
    """By the schedule of the keys: two steps, once, in time that counts for no step."""
    monkeypatch.setenv("RANK", "0")
    keys = {
        "job.dump_folder": tmp_path,
        "profiling.enable_profiling": "true",
        "profiling.profile_freq": 3,
        "profiling.profiler_active": 2,
        "profiling.profiler_warmup": 5,
        "profiling.profile_count": 1,
    }
    config = load_config(argv_of(keys))
    pauses = []
    # resumed after 10 steps
    with profiler(config, 10, lambda: pauses.append(step) or ExitStack()) as profile:
        for step in range(11, 18):
            torch.ones(8) @ torch.ones(8)
            profile.after_step(SimpleNamespace(step=step))
    assert pauses == [13]
    trace, costs = sorted((tmp_path / "profile_traces").iterdir())
    assert (trace.name, costs.name) == ("rank0_step13.json", "rank0_step13.txt")
    (row,) = (line.split() for line in costs.read_text().splitlines() if "aten::dot" in line)
    assert row[-1] == "2"  # calls


@pytest.mark.parametrize("asked, warmup, wait", [(2, 2, 3), (9, 5, 0)])
def test_the_steps_before_a_trace_warm_up(asked, warmup, wait, tmp_path, monkeypatch):
    """As many as asked for, and as the steps between two traces have room for."""
    monkeypatch.setenv("RANK", "0")
    keys = {"profiling.profile_freq": 6, "profiling.profiler_active": 1}
    config = load_config(argv_of(keys, profiling__profiler_warmup=asked, job__dump_folder=tmp_path))
    schedules = []
    monkeypatch.setattr(
        torch.profiler, "schedule", lambda **x: schedules.append(x) or (lambda step: None)
    )
    profiler(config, 0)
    assert (schedules[0]["warmup"], schedules[0]["wait"]) == (warmup, wait)


@pytest.mark.parametrize(
    "freq, active, steps, traces",
    [(1, 1, 2, {1: 1, 2: 1}), (3, 1, 5, {3: 1}), (3, 2, 5, {3: 2, 5: 1})],
)
def test_the_end_of_a_run_leaves_traces_of_steps(
    freq, active, steps, traces, tmp_path, monkeypatch, recwarn
):
    """Where another trace begins then, it would be of no step, in the place of the last one's."""
    monkeypatch.setenv("RANK", "0")
    keys = {"profile_freq": freq, "profiler_active": active, "enable_profiling": "true"}
    config = load_config(
        [f"--job.dump_folder={tmp_path}", *(f"--profiling.{key}={x}" for key, x in keys.items())]
    )
    with profiler(config, 0) as profile:
        for _ in range(steps):
            torch.ones(8) @ torch.ones(8)
            profile.after_step(SimpleNamespace())
    found = {
        path.name: path.read_text().count('"aten::dot"')
        for path in (tmp_path / "profile_traces").glob("*.json")
    }
    assert found == {f"rank0_step{step}.json": recorded for step, recorded in traces.items()}
    assert "Profiler clears events" not in str([warning.message for warning in recwarn])


@pytest.mark.parametrize("rank, steps, said", [("0", 8, True), ("0", 9, False), ("1", 8, False)])
def test_a_start_too_short_for_a_trace_says_so(rank, steps, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    keys = {"profile_freq": 10, "profiler_active": 2, "enable_profiling": "true"}
    config = load_config(
        [f"--job.dump_folder={tmp_path}", *(f"--profiling.{key}={x}" for key, x in keys.items())]
    )
    with profiler(config, 5) as profile:
        for _ in range(steps):
            profile.after_step(SimpleNamespace())
    assert any((tmp_path / "profile_traces").iterdir()) == (steps == 9)
    line = "no trace was written: the first begins with step 9 of a start (profiling.profile_freq = 10), and this run"
    assert (line in capsys.readouterr().out) == said


def test_a_signal_asks_for_a_memory_snapshot(tmp_path, monkeypatch, capsys):
    recorded = []
    monkeypatch.setenv("RANK", "1")
    before = signal.getsignal(signal.SIGUSR1)
    config = load_config(
        [f"--job.dump_folder={tmp_path}", "--profiling.enable_memory_snapshot=true"]
    )
    with MemorySnapshots(config.job.dump_folder, config.profiling) as snapshots:
        os.kill(os.getpid(), signal.SIGUSR1)
        if not torch.cuda.is_available():
            snapshots.after_step(SimpleNamespace(step=1))
            assert "there is no GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **keys: recorded.append(keys)
    )
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", lambda _: None, raising=False
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("dumped")
    )
    with MemorySnapshots(config.job.dump_folder, config.profiling) as snapshots:
        snapshots.after_step(SimpleNamespace(step=1))
        os.kill(os.getpid(), signal.SIGUSR1)
        snapshots.after_step(SimpleNamespace(step=2))
        snapshots.after_step(SimpleNamespace(step=3))
    assert signal.getsignal(signal.SIGUSR1) == before and len(recorded) == 1
    assert [file.name for file in (tmp_path / "memory_snapshots").iterdir()] == [
        "rank1_step2.pickle"
    ]


@pytest.mark.parametrize("full", [False, True])
def test_a_snapshot_when_memory_runs_out(full, tmp_path, monkeypatch, capsys):
    """Of what is allocated where it does, not of what is left where the error is caught; on a full disk a line."""
    held, observers = [], []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **keys: None)
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False
    )

    def dump(path):
        if full:
            raise OSError("disk full")
        Path(path).write_text(f"{len(held)} held")

    def allocate():
        held.append("an activation")
        try:
            observers[0](0, 2**31, 2**36, 2**20)  # as the allocator does before it raises
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            held.clear()

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    config = load_config(
        [f"--job.dump_folder={tmp_path}", "--profiling.enable_memory_snapshot=true"]
    )
    with (
        pytest.raises(torch.OutOfMemoryError),
        MemorySnapshots(config.job.dump_folder, config.profiling),
    ):
        allocate()
    path, said = (
        tmp_path / "memory_snapshots" / "rank1_out_of_memory.pickle",
        capsys.readouterr().err,
    )
    if full:
        assert said == "rank 1: no snapshot of the GPU's memory: disk full\n"
    else:
        assert (
            said == f"rank 1: '{path}' is a snapshot of the GPU's memory\n"
            and path.read_text() == "1 held"
        )


@pytest.mark.cuda
def test_a_gpus_snapshot_when_memory_runs_out(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    config = load_config(
        [f"--job.dump_folder={tmp_path}", "--profiling.enable_memory_snapshot=true"]
    )
    try:
        with (
            pytest.raises(torch.OutOfMemoryError),
            MemorySnapshots(config.job.dump_folder, config.profiling),
        ):
            held = torch.ones(3 << 20, dtype=torch.uint8, device="cuda")
            held.new_empty(1 << 50)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    with (tmp_path / "memory_snapshots" / "rank0_out_of_memory.pickle").open("rb") as file:
        segments = pickle.load(file)["segments"]
    assert 3 << 20 in [
        b["requested_size"]
        for s in segments
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    ]
