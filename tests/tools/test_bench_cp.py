"""What the benchmark of context parallelism computes without GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titan_linear.models.config import ModelConfig
from titan_linear.models.mixers import Attention
from titan_linear.ops.layout.levels import FARTHER
from titan_linear.planner.machine import Machine, read_rates, shipped
from titan_linear.planner.memory import MicroBatchShape, layers
from titan_linear.planner.timing import Clock
from tools import bench_cp, bench_ops
from tools.bench_ops import Case

H200 = read_rates(shipped()["H200"])


def test_the_time_of_two_dimensions():
    """Forward, zig-zag, over two nodes of eight: q, k, v and o travel in the node, then keys to the other one, behind
    the blocks but for a slice; and each rank computes a sixteenth."""
    H, D, W, n = 16, 128, 16, 4096
    batch = MicroBatchShape(
        n * W, 1, None, W, "zigzag", "ulysses+ring", "kcp", 1, 1, torch.bfloat16
    )
    mixer, machine = Attention(heads=H, kv_heads=H, head_dim=D), Machine(H200, 8, 50e9, "flash4")
    model = ModelConfig(vocab_size=1024, dim=2048, pattern=(mixer,), num_layers=1, hidden_dim=2048)
    (layer,), clock = layers(model, batch), Clock(machine, batch, compiled=True)
    parts = clock.of(layer.forward, layer.forward.calls).parts
    flops = 4 * D * H * (n * W) * (n * W + 1) / 2 / W
    assert parts["attention"] == pytest.approx(
        flops / H200.attention["flash4"]["128"][0] / 1e12, rel=1e-3
    )
    head = H200.node.latency + 2 * n * H * D * 7 / 8 / H200.node.all_to_all
    keys = H200.node.latency + FARTHER + 2 * 2 * n * H * D / 50e9
    assert parts["communication"] == pytest.approx(
        4 * head + max(keys - parts["attention"], keys / 4), rel=1e-6
    )


def test_lengths_have_the_median_of_their_kind():
    for kind, (middle, _) in bench_cp.LENGTHS.items():
        bounds = bench_cp.boundaries(kind, 2**20)
        assert bounds[0] == 0 and bounds[-1] == 2**20 and (bounds.diff() > 0).all()
        assert bounds.diff()[:-1].median().item() == pytest.approx(middle, rel=0.25)


def test_each_op_has_its_layouts():
    documents, layouts = ["one", "packed"], ["contiguous", "zigzag", "whole", "heads"]
    for op in ("kda", "gdn", "ssd", "conv", "ring", "allgather", "ulysses"):
        of_op = layouts if op in ("kda", "gdn", "ssd") else layouts[:3]
        ours = [("", "one", "alone"), *(("", d, layout) for d in documents for layout in of_op)]
        rows = list(bench_cp.rows(op, documents, layouts, fla=True))
        assert (
            [row for row in rows if not row[0]]
            == ours
            == list(bench_cp.rows(op, documents, layouts, fla=False))
        )
        peers = {i: row for i, row in enumerate(rows) if row[0]}
        found = [("FLA", d, layout) for d in documents for layout in layouts[:2]]
        assert list(peers.values()) == (found if op in ("kda", "gdn", "conv") else [])
        assert all(rows[i - 1][1:] == row[1:] for i, row in peers.items())


def test_every_op_has_a_shape_unless_told():
    args = bench_cp.parse([])
    dims = {case.op: (case.K, case.V) for case in bench_ops.cases(args)}
    assert (
        list(dims) == args.ops
        and dims["rwkv7"] == (64, 64)
        and dims["ring"] == dims["kda"] == (128, 128)
    )


@pytest.mark.parametrize("op", [*bench_cp.OPS, *bench_cp.METHODS])
def test_what_a_row_times(op, monkeypatch):
    """Each op takes its inputs, with the context of a rank alone, and gives one output with a gradient of all."""
    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor)
    case = Case(op, 64, 2, 4, 128, 128) if op != "conv" else Case(op, 64, 2, 2, 128, 128)
    x = {name: t.requires_grad_() for name, t in bench_cp.make_inputs(case).items()}
    cu = torch.tensor([0, 10, 64], dtype=torch.int32)
    y = bench_cp.ours(case, cu, "alone")(**x)
    assert y.shape[:2] == (1, 64)
    grads = torch.autograd.grad(y, list(x.values()), torch.ones_like(y))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


def heads_beside_states(rank, world_size):
    """What a row of each layout gives for this rank's tokens; weights are the same on all."""
    torch.manual_seed(0)
    cuda = Tensor.cuda
    Tensor.cuda = lambda tensor: tensor
    try:
        case = Case("ssd", 32, 2, 4, 16, 8)
        x = bench_cp.make_inputs(case)
        cu = torch.tensor([0, 10, 64], dtype=torch.int32)
        return [bench_cp.ours(case, cu, way)(**x) for way in ("contiguous", "heads")]
    finally:
        Tensor.cuda = cuda


def test_heads_are_another_way_to_the_same(worlds):
    for states, heads in worlds(2).run(heads_beside_states):
        torch.testing.assert_close(heads, states, rtol=2e-2, atol=2e-2)
        assert states.any()
