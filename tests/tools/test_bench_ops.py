"""The cases of the bench of ops, on the CPU; it times them on GPUs."""

from __future__ import annotations

import argparse

import pytest
import torch

from titan_linear.models.mlps.moe import MoEConfig
from titan_linear.ops.triton.configs import config
from tools.bench_ops import OPS, Case, candidates, head_counts, matrices, ours


@pytest.mark.parametrize("op", OPS)
def test_the_ops_take_their_cases(op):
    """Every input has a gradient, with grouped heads too."""
    case = Case(op, 40, 2, 4, 16, 32)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    y = case.function(cu_seqlens=torch.tensor([0, 13, 40], dtype=torch.int32))(**x)
    assert y.shape == ((1, 40, 4 * 16) if op == "conv" else (1, 40, 4, 32))
    grads = torch.autograd.grad(y, list(x.values()), torch.ones_like(y))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    if op in ("kda", "gdn"):
        assert x["g"].dtype == torch.float32


def test_candidates_have_the_place_of_the_shipped_one():
    """Only while they are timed, only for these dims, and only for this kernel."""
    x = torch.empty(1, dtype=torch.bfloat16)
    before = {
        dim: (config("gdn scan", x, dim), config("gdn reverse", x, dim)) for dim in (128, 256)
    }
    tried = candidates(Case("gdn", 64, 1, 1, 64, 128), "gdn scan", "BV=16,8", "num_warps=2,1")
    for chosen in ((16, 2), (16, 1), (8, 2), (8, 1)):
        changes = dict(zip(("BV", "num_warps"), chosen))
        assert next(tried) == (str(changes), OPS["gdn"].fn)
        assert config("gdn scan", x, 128) == before[128][0] | changes
        assert (
            config("gdn reverse", x, 128) == before[128][1]
            and config("gdn scan", x, 256) == before[256][0]
        )
    assert next(tried, None) is None and config("gdn scan", x, 128) == before[128][0]


def test_heads_are_read_as_one_number_or_two():
    assert (head_counts("64"), head_counts("16/32")) == ((64, 64), (16, 32))
    for text in ("0", "a", "16/24", "/4"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number of heads"):
            head_counts(text)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_what_is_timed_of_experts_is_the_sum_of_the_chosen_ones(activation):
    """With gradients of all that others are given, too; gates come first."""
    c = MoEConfig(num_experts=5, top_k=2, hidden_dim=6, activation=activation)
    up, down = (25 * matrix.double() for matrix in matrices(c, 4))
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weights, experts = torch.rand(7, 5, dtype=torch.float64).topk(2)
    weights.requires_grad_()
    layer, module = ours(c, up, down)
    y = layer(x, weights, experts)
    h = torch.einsum("nd,nkhd->nkh", x, up[experts])
    h = (
        h.relu().square()
        if activation == "relu2"
        else torch.nn.functional.silu(h[..., :6]) * h[..., 6:]
    )
    torch.testing.assert_close(
        y, torch.einsum("nk,nkh,nkdh->nd", weights, h, down[experts]), rtol=0, atol=1e-11
    )
    grads = torch.autograd.grad(y.sum(), [x, weights, *module.parameters()])
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
