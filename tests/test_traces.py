"""What is made of a trace's events."""

from __future__ import annotations

import pytest

from titan_linear.observe.traces import PAUSE, Cost, of_trace, summary


def event(name: str, ts: float, dur: float, cat: str = "kernel", **more: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **more}


NCCL = "ncclDevKernel_AllReduce(int)"


@pytest.mark.parametrize(
    ("ran", "exposed"),
    [
        ([("gemm", 0, 40), (NCCL, 30, 30), ("gemm", 70, 30)], 20),  # half hidden, half not, and a gap after it
        ([("gemm", 0, 100), (NCCL, 10, 80)], 0),  # hidden
        ([(NCCL, 0, 100), ("gemm", 10, 20), ("gemm", 25, 25)], 60),  # kernels of two streams overlap
        ([(NCCL, 0, 60), ("ncclDevKernel_SendRecv", 40, 60)], 100),  # and collectives do
        ([(NCCL, 0, 50), ("gemm", 50, 50)], 50),
        ([("gemm", 0, 100)], 0),
    ],
)
def test_exposed_communication(ran: list, exposed: int) -> None:
    """Of 100 µs in two steps; where another kernel only begins, is of the host or a mark, nothing changes."""
    marks = [
        event(f"ProfilerStep#{n}", 50 * n, 50, cat)
        for n in (3, 4)
        for cat in ("user_annotation", "gpu_user_annotation")
    ]
    others = [event(NCCL, 0, 100, "cpu_op"), event("gemm", 0, 100, "cuda_runtime"), {**event("gemm", 0, 99), "ph": "i"}]
    found = summary([*marks, *others, *(event(*one) for one in reversed(ran))])
    assert found == pytest.approx((2, 100e-6, exposed * 1e-6))


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
    assert summary(events) == pytest.approx((2, 90e-6, 20e-6))
    assert summary([*marks, *between, *second, *first]).span == pytest.approx(580e-6)  # as another program has them


def test_without_kernels() -> None:
    assert summary([event("aten::mm", 0, 10, "cpu_op")]) == (0, 0.0, 0.0)


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
