"""What is made of a trace's events."""

import pytest

from tools.traces import busy, exposed, on_device


def event(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


NCCL = "ncclDevKernel_AllReduce(int)"


@pytest.mark.parametrize(
    "ran, microseconds",
    [
        # half hidden, half not, and a gap after it
        ([("gemm", 0, 40), (NCCL, 30, 30), ("gemm", 70, 30)], (90, 20)),
        ([("gemm", 0, 100), (NCCL, 10, 80)], (100, 0)),  # hidden
        # kernels of two streams overlap
        ([(NCCL, 0, 100), ("gemm", 10, 20), ("gemm", 25, 25)], (100, 60)),
        ([(NCCL, 0, 60), ("ncclDevKernel_SendRecv", 40, 60)], (100, 100)),  # and collectives do
        ([("Memcpy PtoP (Device -> Device)", 0, 50), ("gemm", 50, 50)], (100, 50)),
        ([("gemm", 7, 100), ("gemm", 20, 10)], (100, 0)),
        ([], (0, 0)),
    ],
)
def test_busy_and_exposed(ran, microseconds):
    """Where another kernel only begins, and what is of the host or a mark, changes nothing."""
    others = [
        event(NCCL, 0, 100, "cpu_op"),
        event("gemm", 0, 100, "cuda_runtime"),
        {**event("gemm", 0, 99), "ph": "i"},
    ]
    found = on_device([*others, *(event(*one) for one in reversed(ran))])
    assert (busy(found), exposed(found)) == pytest.approx(tuple(x * 1e-6 for x in microseconds))
