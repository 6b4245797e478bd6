"""What is made of a trace's events."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from titan_linear.traces import PAUSE, Cost, of_trace, own_costs, read, summary
from tools import trace


def event(name: str, ts: float, dur: float, cat: str = "kernel", **more: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **more}


NCCL = "ncclDevKernel_AllReduce(int)"


@pytest.mark.parametrize(
    ("ran", "communication", "exposed"),
    [
        ([("gemm", 0, 40), (NCCL, 30, 30), ("gemm", 70, 30)], 30, 20),  # half hidden, half not, and a gap after it
        ([("gemm", 0, 100), (NCCL, 10, 80)], 80, 0),  # hidden
        ([(NCCL, 0, 100), ("gemm", 10, 20), ("gemm", 25, 25)], 100, 60),  # kernels of two streams overlap
        ([(NCCL, 0, 60), ("ncclDevKernel_SendRecv", 40, 60)], 100, 100),  # and collectives do
        ([(NCCL, 0, 50), ("gemm", 50, 50)], 50, 50),
        ([("gemm", 0, 100)], 0, 0),
    ],
)
def test_exposed_communication(ran: list, communication: int, exposed: int) -> None:
    """Of 100 µs in two steps; where another kernel only begins, is of the host or a mark, nothing changes."""
    marks = [
        event(f"ProfilerStep#{n}", 50 * n, 50, cat)
        for n in (3, 4)
        for cat in ("user_annotation", "gpu_user_annotation")
    ]
    others = [event(NCCL, 0, 100, "cpu_op"), event("gemm", 0, 100, "cuda_runtime"), {**event("gemm", 0, 99), "ph": "i"}]
    found = summary([*marks, *others, *(event(*one) for one in reversed(ran))])
    assert found.steps == 2 and found.launches == len(ran) and found.span == pytest.approx(100e-6)
    assert (found.communication, found.exposed) == pytest.approx((communication * 1e-6, exposed * 1e-6))


def launched(name: str, at: float, ts: float, dur: float, cat: str = "kernel") -> list[dict]:
    """A kernel, and when the host asked for it."""
    ids = {"args": {"correlation": int(at)}}
    return [event("cudaLaunchKernel", at, 1, "cuda_runtime", **ids), event(name, ts, dur, cat, **ids)]


def test_what_lies_between_steps_is_left_out() -> None:
    """Of two steps of 50 and 40 µs, a validation, a save that waits for the disk; the first runs on into the pause."""
    pauses = [event(PAUSE, ts, dur, "user_annotation") for ts, dur in ((50, 300), (500, 1000))]
    marks = [event("ProfilerStep#3", 0, 100, "user_annotation"), event("ProfilerStep#4", 100, 900, "user_annotation")]
    first = [*launched("gemm", 10, 20, 30), *launched(NCCL, 11, 50, 10), *launched("adamw", 12, 60, 10)]
    between = [
        *launched("gemm", 60, 80, 200),
        *launched(NCCL, 61, 280, 60),
        *launched("copy", 510, 520, 80, "gpu_memcpy"),
    ]
    second = [*launched("gemm", 360, 380, 20), *launched(NCCL, 361, 390, 20), event("unknown to the host", 410, 10)]
    host = [event("aten::mm", 5, 8, "cpu_op"), event("aten::mm", 55, 8, "cpu_op"), {"ph": "M", "name": "thread_name"}]
    events = [*pauses, *marks, *between, *second, *first, *host]
    assert summary(events) == pytest.approx((2, 6, 90e-6, 90e-6, 30e-6, 20e-6))
    head, _, _, _, *rows = trace.report(events, 9).splitlines()
    assert head == "0.1 ms, training steps: 2, 6 launches: idle 0.0%, communication 33.3%, exposed 22.2%"
    assert sorted(rows)[-1] == "| 0.05 | 55.6% | 2 | `gemm` |" and len(rows) == 4
    assert trace.report([*pauses, *host], 9).splitlines()[-1] == "| 0.01 | – | 1 | `aten::mm` |"
    whole = summary([*marks, *between, *second, *first])  # as another program has them
    assert whole.launches == 9 and whole.span == pytest.approx(580e-6)


def test_without_kernels() -> None:
    assert summary([event("aten::mm", 0, 10, "cpu_op")]) == (0, 0, 0.0, 0.0, 0.0, 0.0)


def test_kernels_of_a_trace() -> None:
    """Two streams that overlap, a gap, and what did not run on the device."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "void at::native::add<float>(int)", "ts": 0.0, "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 25.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 8.0, "dur": 2.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 100.0, "dur": 20.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 30.0, "dur": 500.0},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 30.0},
    ]
    launches, busy, costs = of_trace(events)
    assert launches == 4 and busy == pytest.approx(50e-6)
    assert costs == [Cost("gemm", 0.045, 2), Cost("add<float>", 0.01, 1), Cost("Memcpy DtoD", 0.002, 1)]


def test_own_times_of_operators() -> None:
    events = [
        event("outer", 0, 100, "cpu_op", tid=1), event("inner", 10, 30, "cpu_op", tid=1),
        event("inner", 50, 20, "cpu_op", tid=1), event("deep", 55, 5, "cpu_op", tid=1),
        event("inner", 20, 7, "cpu_op", tid=2),
    ]  # fmt: skip
    assert own_costs(events) == [("inner", 0.052, 3), ("outer", 0.05, 1), ("deep", 0.005, 1)]


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    """Cut short, altered, of another kind; and a trace of kernels that took no time."""
    whole = gzip.compress(json.dumps({"traceEvents": [{"pad": "x" * 1000}]}).encode(), mtime=0)
    event = {"ph": "X", "name": "k", "ts": 1, "dur": 1}
    no_events = ["x"], [{"ph": "X"}], [event | {"ts": "1"}], [event | {"dur": None}], [event | {"ts": math.nan}]
    damaged = whole[:-20], whole[:20] + b"\xff" * 8 + whole[28:], b"{}", b""
    for content in (*damaged, *(gzip.compress(json.dumps({"traceEvents": x}).encode()) for x in no_events)):
        (file := tmp_path / "t.json.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"is no trace \(.*give a \.json or \.json\.gz"):
            read(file)
    nothing = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 0, "args": {"stream": 7}}
    assert "| 0.00 | 0.0% | 1 | `k` |" in trace.report([nothing], 1)
