"""Rows that travel to the ranks of their experts. Whole runs are in test_train.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.worlds import World
from titan_linear.distributed.experts import spread_experts
from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import GDN
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.collectives import Ranks

MOE = MoEConfig(num_experts=4, top_k=2, hidden_dim=6, shared_hidden_dim=10, selection_bias=True)


def layer(bias: list[float]) -> Decoder:
    model = Decoder(ModelConfig(8, 16, (GDN(heads=1, v_heads=1, head_dim=8, v_head_dim=8),), 1, 24, moe=MOE)).double()
    initialise(model, seed=0)
    model.layers[0].mlp.router.selection_bias.data.copy_(torch.tensor(bias))
    return model


def errors(rank: int, world_size: int, bias: list[float]) -> list[float]:
    """Of the output, of x's gradient and of this rank's experts', against a rank that has them all."""
    alone, spread = layer(bias), layer(bias)
    spread_experts(spread, Ranks(dist.group.WORLD.group_name, world_size, rank))
    x = torch.randn(1, 7 + rank, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    results = []
    for model in (alone, spread):
        own = x.clone().requires_grad_()
        y, _ = model.layers[0].mlp(own, BatchPlan(torch.arange(x.shape[1])))
        y.square().sum().backward()
        results.append([y.detach(), own.grad, *(p.grad for p in model.layers[0].mlp.experts.parameters())])
    for grad in results[0][2:]:
        dist.all_reduce(grad)
    mine = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    results[0][2:] = [grad[mine] for grad in results[0][2:]]
    return [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("bias", [[0, 0, 0, 0], [0, 0, 9, 9]])
def test_no_row_is_dropped(bias: list[float], worlds: Callable[[int], World]) -> None:
    """Nor where all rows go to one rank, and none to the other; ranks have different numbers of tokens."""
    for found in worlds(2).run(errors, bias):
        assert max(found) < 1e-14
