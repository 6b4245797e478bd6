"""What the benchmark of context parallelism computes without GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from titan_linear.memory import Batch
from titan_linear.models.mixers import Attention
from titan_linear.timing import Machine, read_rates, shipped
from tools import bench_cp

H200 = read_rates(shipped()["H200"])


def test_the_share_of_an_all_to_all() -> None:
    """q, k, v and o travel forward, their gradients backward, and nothing hides them."""
    H, D, W, n = 32, 128, 4, 8192
    batch = Batch(n * W, 1, None, W, "contiguous", "ulysses", "kcp", 1, 1, torch.bfloat16)
    share = bench_cp.planned_share(
        Machine(H200, 8, np.inf, "flash4"), Attention(heads=H, kv_heads=H, head_dim=D), batch
    )
    message = H200.node.latency + 2 * n * H * D * (W - 1) / W / H200.node.all_to_all
    flops = 4 * D * H * (n * W) * (n * W + 1) / 2 / W
    assert share == pytest.approx(8 * message / (3.5 * flops / H200.attention["flash4"]["128"][1] / 1e12), rel=1e-6)


def test_estimate() -> None:
    head, _, *rows = bench_cp.estimate("H200", (4,), [4096, 65536], 16, 4).splitlines()
    assert head == "| 16 heads | ranks | 4096 | 65536 | below 5% from |"
    cells = {row.split(" | ")[0].removeprefix("| "): row.strip("| ").split(" | ")[2:] for row in rows}
    assert list(cells) == [
        "KDA, kcp", "KDA, ulysses", "GDN, kcp", "GDN, ulysses", "attention, ring", "attention, allgather",
        "attention, ulysses",
    ]  # fmt: skip
    shares = {name: [float(share.rstrip("%")) for share in row[:2]] for name, row in cells.items()}
    assert all(short > long for short, long in shares.values())
    assert all(shares[f"{op}, kcp"] < shares[f"{op}, ulysses"] for op in ("KDA", "GDN"))
    assert cells["KDA, kcp"][2] == "65536" and cells["KDA, ulysses"][2] == "–"


def test_documents() -> None:
    for kind, (middle, _) in bench_cp.LENGTHS.items():
        bounds = bench_cp.boundaries(kind, 2**20)
        assert bounds[0] == 0 and bounds[-1] == 2**20 and (bounds.diff() > 0).all()
        assert bounds.diff()[:-1].median().item() == pytest.approx(middle, rel=0.25)


def test_what_ran_after_the_flush() -> None:
    def ran(name: str, ts: float, dur: float) -> dict:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur}

    barrier, flush, nccl = (
        ran("ncclDevKernel_AllReduce", 5, 9000), ran("fill", 9100, 6000), ran("ncclDevKernel_SendRecv", 15200, 40),
    )  # fmt: skip
    late = ran("gemm", 15230, 5000)
    events = [late, ran("fill", 0, 3), barrier, nccl, flush, {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 16000}]
    assert bench_cp.after_flush(events) == [nccl, late]
    assert bench_cp.summary(bench_cp.after_flush(events)).exposed == pytest.approx(30e-6)
