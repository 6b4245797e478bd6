"""Rows that travel to the ranks of their experts. Whole runs are in test_train.py."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from titan_linear.config import ActivationCheckpoint
from titan_linear.distributed import experts
from titan_linear.distributed.compiling import apply_compile
from titan_linear.distributed.experts import apply_ep
from titan_linear.distributed.parallelize import apply_ac
from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import Attention
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.exchange.collectives import Ranks

MOE = MoEConfig(num_experts=4, top_k=2, hidden_dim=6, shared_hidden_dim=10, selection_bias=True)


def layer(bias):
    model = Decoder(
        ModelConfig(
            8, 16, (Attention(heads=1, kv_heads=1, head_dim=8, rope_theta=None),), 1, 24, moe=MOE
        )
    ).double()
    initialise(model, seed=0)
    model.layers[0].mlp.router.selection_bias.data.copy_(torch.tensor(bias))
    return model


def errors(rank, world_size, bias):
    """Of the output, of x's gradient and of this rank's experts', against a rank that has them all."""
    alone, spread = layer(bias), layer(bias)
    apply_ep(spread, Ranks(dist.group.WORLD.group_name, world_size, rank))
    x = torch.randn(
        1, 7 + rank, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )
    results = []
    for model in (alone, spread):
        own = x.clone().requires_grad_()
        y = model.layers[0].mlp(own, BatchPlan(torch.arange(x.shape[1]))).y
        y.square().sum().backward()
        results.append(
            [y.detach(), own.grad, *(p.grad for p in model.layers[0].mlp.experts.parameters())]
        )
    for grad in results[0][2:]:
        dist.all_reduce(grad)
    mine = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    results[0][2:] = [grad[mine] for grad in results[0][2:]]
    return [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("bias", [[0, 0, 0, 0], [0, 0, 9, 9]])
def test_no_row_is_dropped(bias, worlds):
    """Nor where all rows go to one rank, and none to the other; ranks have different numbers of tokens."""
    for found in worlds(2).run(errors, bias):
        assert max(found) < 1e-14


def reads(rank, world_size, mode, compiled):
    """How often the host asked how many rows travel, forward and backward; how often rows came back, and gradients
    travelled; and the gradient of the layer's input."""
    model, asked = layer([0, 0, 9, 9]), 0
    apply_ep(model, Ranks(dist.group.WORLD.group_name, world_size, rank))
    if compiled:
        apply_compile(model, "eager")
    apply_ac(model, ActivationCheckpoint(mode=mode), compiled=compiled)
    x = torch.randn(
        1, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    ).requires_grad_()
    exchange = dist.all_to_all_single

    def counted(out, *args, **kwargs):
        nonlocal asked
        asked += not out.is_floating_point()
        return exchange(out, *args, **kwargs)

    exposed = patch.object(experts, "all_to_all", wraps=experts.all_to_all)
    with patch.object(dist, "all_to_all_single", counted), exposed as calls:
        y, *_ = model.layers[0](x, BatchPlan(torch.arange(8)))
        forward = asked
        y.square().sum().backward()
    return forward, asked - forward, calls.call_count, x.grad


def test_the_host_reads_nothing_in_backward(worlds):
    """However much of a layer is computed again, and of a compiled one too. Rows come back once, three gradients go."""
    ways = [
        ("none", False),
        ("selective", False),
        ("attention", False),
        ("full", False),
        ("full", True),
    ]
    runs = [worlds(2).run(reads, *way) for way in ways]
    for of_rank in zip(*runs, strict=True):
        assert [counts for *counts, _ in of_rank] == [[1, 0, 4]] * len(ways)
        assert all((grad - of_rank[0][-1]).abs().max() < 1e-14 for *_, grad in of_rank)


def graphs_of_batches(rank, world_size):
    """Compiled graphs after each pass of a layer, in training and in validation, over other tokens each time."""
    model = layer([0, 0, 0, 0]).bfloat16()
    apply_ep(model, Ranks(dist.group.WORLD.group_name, world_size, rank))
    apply_compile(model, "eager")
    torch.compiler.reset()
    counters.clear()
    graphs = []
    for seed, grad in enumerate([True, True, False, True, False, True]):
        x = torch.randn(
            1, 40, 16, generator=torch.Generator().manual_seed(2 * seed + rank)
        ).bfloat16()
        with torch.set_grad_enabled(grad):
            y, *_ = model.layers[0](x.requires_grad_(), BatchPlan(torch.arange(40)))
        if grad:
            y.square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_graphs_lie_between_exchanges(worlds):
    """A pass has seven graphs: what lies between exchanges, and between groups where a CPU takes them one by one. There
    are passes of one number of rows, of any number, and in validation. Where the exchanges' own functions were compiled
    too, for each of their uses, it was twice as many, and the compiler gave up."""
    for graphs in worlds(2).run(graphs_of_batches):
        assert graphs[0] <= 7 and graphs[-1] == graphs[2] <= 21
