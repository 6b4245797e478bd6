"""What is made of a trace's events."""

import pytest

from tools.traces import busy, on_device


def event(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


NCCL = "ncclDevKernel_AllReduce(int)"


@pytest.mark.parametrize(
    "ran, microseconds",
    [
        # two kernels overlap, and a gap comes after them
        ([("gemm", 0, 40), (NCCL, 30, 30), ("gemm", 70, 30)], 90),
        ([("gemm", 0, 100), (NCCL, 10, 80)], 100),  # one inside another
        # kernels of two streams overlap
        ([(NCCL, 0, 100), ("gemm", 10, 20), ("gemm", 25, 25)], 100),
        ([(NCCL, 0, 60), ("ncclDevKernel_SendRecv", 40, 60)], 100),  # and collectives do
        ([("Memcpy PtoP (Device -> Device)", 0, 50), ("gemm", 50, 50)], 100),
        ([("gemm", 7, 100), ("gemm", 20, 10)], 100),
        ([], 0),
    ],
)
def test_time_on_the_device_counts_overlaps_once(ran, microseconds):
    """Where another kernel only begins, and what is of the host or a mark, changes nothing."""
    others = [
        event(NCCL, 0, 100, "cpu_op"),
        event("gemm", 0, 100, "cuda_runtime"),
        {**event("gemm", 0, 99), "ph": "i"},
    ]
    found = on_device([*others, *(event(*one) for one in reversed(ran))])
    assert busy(found) == pytest.approx(microseconds * 1e-6)
