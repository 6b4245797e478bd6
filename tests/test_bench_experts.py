"""The bench of experts on the CPU; it times them on GPUs."""

from __future__ import annotations

import pytest
import torch

from titan_linear.models.mlps.moe import MoEConfig
from tools.bench_experts import ours, shapes


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_what_is_timed_is_the_sum_of_the_chosen_experts(activation):
    """With gradients of all that others are given, too; gates come first."""
    c = MoEConfig(num_experts=5, top_k=2, hidden_dim=6, activation=activation)
    up, down = (torch.randn(5, *sizes, dtype=torch.float64) for sizes in shapes(c, 4))
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
