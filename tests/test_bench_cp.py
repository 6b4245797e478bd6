"""What the benchmark of context parallelism computes without GPUs."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.ops.inputs import tokens_of
from tests.worlds import Worlds
from titan_linear.models.mixers import Attention
from titan_linear.ops import build_cp_context
from titan_linear.ops.reference.attention import attention as reference
from titan_linear.planner.memory import Batch
from titan_linear.planner.timing import Machine, read_rates, shipped
from tools import bench_cp

H200 = read_rates(shipped()["H200"])
aten = torch.ops.aten


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
        "KDA, kcp",
        "KDA, ulysses",
        "GDN, kcp",
        "GDN, ulysses",
        "attention, ring",
        "attention, allgather",
        "attention, ulysses",
    ]
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
        ran("ncclDevKernel_AllReduce", 5, 9000),
        ran("fill", 9100, 6000),
        ran("ncclDevKernel_SendRecv", 15200, 40),
    )
    late = ran("gemm", 15230, 5000)
    events = [late, ran("fill", 0, 3), barrier, nccl, flush, {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 16000}]
    assert bench_cp.after_flush(events) == [nccl, late]
    assert bench_cp.summary(bench_cp.after_flush(events)).exposed == pytest.approx(30e-6)


def test_rows() -> None:
    documents, layouts = ["one", "packed"], ["contiguous", "zigzag", "whole"]
    ours = [("", "one", "alone"), *(("", d, layout) for d in documents for layout in layouts)]
    for op in ("kda", "gdn", "conv"):
        rows = list(bench_cp.rows(op, documents, layouts, ["FLA", "torch"]))
        assert [row for row in rows if not row[0]] == ours == list(bench_cp.rows(op, documents, layouts, []))
        peers = {i: row for i, row in enumerate(rows) if row[0]}
        assert list(peers.values()) == [("FLA", d, layout) for d in documents for layout in layouts[:2]]
        assert all(rows[i - 1][1:] == row[1:] for i, row in peers.items())
    for op in ("ring", "allgather"):
        rows = list(bench_cp.rows(op, documents, layouts, ["FLA", "torch"]))
        assert rows == [*ours[:3], ("torch", "one", "zigzag"), *ours[3:]]
    assert list(bench_cp.rows("ulysses", documents, layouts, ["FLA", "torch"])) == ours


# cuDNN's operators, computed by those of the CPU; all else of torch's context parallelism runs as it does on GPUs.


def cudnn_forward(q, k, v, bias=None, with_lse=True, dropout=0.0, causal=False, debug=False, *, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    unused = torch.zeros((), dtype=torch.int64)
    return o, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], unused, unused, None


def cudnn_backward(do, q, k, v, o, lse, *unused, scale=None):
    """unused: seed, offset, bias, boundaries, lengths, and dropout and causal, where they are not the default."""
    causal = len(unused) == 9 and unused[8]
    heads, (k, v) = k.shape[1], (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse.squeeze(-1), 0.0, causal, scale=scale
    )
    return dq, *(x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))


def scaled_dot_product_attention(q, k, v, is_causal, enable_gqa):
    """As torch's, with cuDNN's backend chosen."""
    assert torch.backends.cuda.cudnn_sdp_enabled() and enable_gqa == (q.shape[1] != k.shape[1])
    with_lse = torch.is_grad_enabled()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, with_lse, 0.0, is_causal, False)[0]


def errors_of_torch_peer(rank: int, W: int, op: str, Hkv: int) -> list[float]:
    """Absolute, of o without gradients, o, dq, dk, dv of this rank's tokens in our zig-zag."""
    torch.manual_seed(0)
    T, H, D = 16 * W, 4, 8
    x = {name: torch.randn(1, T, heads, D) for name, heads in zip("qkv", (H, Hkv, Hkv))}
    do, wanted = torch.randn(1, T, H, D), {name: t.clone().requires_grad_() for name, t in x.items()}
    o = reference(**wanted)
    o.backward(do.double())
    cu = torch.tensor([0, T])
    cp = build_cp_context(cu, rank=rank, world_size=W, layout="zigzag")
    own = tokens_of(cp)
    call = bench_cp.torch_peer(op, {name: t[:, own] for name, t in x.items()}, cu, "zigzag")
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        patch("torch.nn.functional.scaled_dot_product_attention", scaled_dot_product_attention),
    ):
        library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
        with call.within as tokens:
            assert torch.equal(tokens, own)
            with torch.no_grad():
                got = [call.fn(**call.inputs)]
            leaves = {name: t.requires_grad_() for name, t in call.inputs.items()}
            got.append(call.fn(**leaves))
            got += torch.autograd.grad(got[1], list(leaves.values()), do[:, own].transpose(1, 2))
    expected = [o, o, *(t.grad for t in wanted.values())]
    return [(a.transpose(1, 2) - b[:, own]).abs().max().item() for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize(("op", "Hkv"), [("allgather", 4), ("ring", 2)])
def test_torch_computes_the_same_attention(op: str, Hkv: int, worlds: Worlds) -> None:
    for errors in worlds(2).run(errors_of_torch_peer, op, Hkv):
        assert max(errors) < 1e-5
