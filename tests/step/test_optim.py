"""The schedule, the groups of the optimizer, and norms over sharded and replicated gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.keys import argv_of
from titan_linear.config import Optimizer, load_config
from titan_linear.distributed.parts import local_tensor
from titan_linear.hooks import norms
from titan_linear.hooks.norms import squares_of_each, update_squares
from titan_linear.models.decoder import Decoder
from titan_linear.models.presets import preset
from titan_linear.step.optimizer import (
    HOST_BLOCK,
    ComputeCopies,
    StepNumbers,
    build_optimizer,
    learning_rate,
    scale_gradients,
    step_numbers,
    sum_of_squares,
    update,
)


@pytest.mark.parametrize(
    "keys, expected",
    [
        (
            {"lr_scheduler.warmup_steps": 4},
            {1: 0.25, 4: 1.0, 52: (1 + math.cos(math.pi / 2)) / 2 * 0.9 + 0.1, 100: 0.1},
        ),
        (
            {
                "lr_scheduler.warmup_steps": 0,
                "lr_scheduler.decay_type": "linear",
                "lr_scheduler.min_lr_factor": 0.0,
            },
            {1: 0.99, 50: 0.5, 100: 0.0},
        ),
        (
            {
                "lr_scheduler.warmup_steps": 10,
                "lr_scheduler.decay_ratio": 0.2,
                "lr_scheduler.decay_type": "linear",
            },
            {10: 1.0, 80: 1.0, 90: 0.55, 100: 0.1},
        ),
        (
            {
                "lr_scheduler.warmup_steps": 0,
                "lr_scheduler.decay_ratio": 1.0,
                "lr_scheduler.decay_type": "sqrt",
                "lr_scheduler.min_lr_factor": 0.0,
            },
            {25: 0.5, 100: 0.0},
        ),
        ({"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0}, {1: 1.0, 100: 1.0}),
        (
            {
                "lr_scheduler.warmup_steps": 10,
                "lr_scheduler.total_steps": 200,
                "lr_scheduler.decay_type": "linear",
                "lr_scheduler.min_lr_factor": 0.0,
            },
            {105: 0.5},
        ),
        ({"lr_scheduler.warmup_steps": 200}, {100: 0.5}),
    ],
)
def test_the_learning_rate_follows_its_keys(keys, expected):
    schedule = load_config(argv_of(keys)).lr_scheduler
    for step, factor in expected.items():
        assert learning_rate(step, 2.0, schedule, steps=100) == pytest.approx(2 * factor)


def test_the_optimizer_has_the_values_of_its_keys(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    keys = {"optimizer.name": "muon", "optimizer.beta1": 0.5, "optimizer.beta2": 0.6}
    keys |= {"optimizer.eps": 1e-3, "optimizer.momentum": 0.7}
    model = Decoder(preset("hybrid", "debug"))
    groups = build_optimizer(model, load_config(argv_of(keys)).optimizer).param_groups
    muon = [group for group in groups if "momentum" in group]
    assert [group["momentum"] for group in muon] == [0.7]
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.5, 0.6, 1e-3)}


def test_only_matrices_decay():
    model = Decoder(preset("hybrid", "debug"))
    names = {id(p): name for name, p in model.named_parameters()}
    decays = {
        names[id(p)]: g["weight_decay"]
        for g in build_optimizer(model, Optimizer()).param_groups
        for p in g["params"]
    }
    assert set(decays) == set(names.values())
    for name, decay in decays.items():
        gate_or_scale = name.endswith((".A_log", ".dt_bias", ".bias")) or "norm" in name
        assert decay == (0.0 if gate_or_scale else 0.1), name


class Kinds(TorchDispatchMode):
    """What the optimizer's kernels are given."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten._fused_adamw_.default, torch.ops.aten._foreach_add_.Scalar):
            self.seen |= {type(x) for tensors in args if isinstance(tensors, list) for x in tensors}
        return op(*args, **(kwargs or {}))


def kinds_in_an_update(rank, world_size):
    """Whether kernels are given DTensors for a sharded and a whole parameter, and moments are sharded like these."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.ParameterDict(
        {
            "sharded": nn.Parameter(distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])),
            "whole": nn.Parameter(torch.ones(3)),
        }
    )
    optimizer = build_optimizer(model, Optimizer())
    for p in model.values():
        p.grad = torch.ones_like(p)
    with Kinds() as kinds:
        update(optimizer, StepNumbers(*torch.ones(3, dtype=torch.float64)), lr=0.1, max_norm=1.0)
    alike = all(type(optimizer.state[p]["exp_avg"]) is type(p.data) for p in model.values())
    assert kinds.seen
    return DTensor in kinds.seen, alike and all(
        (p.detach() < 1).all() for p in map(local_tensor, model.values())
    )


def test_kernels_of_an_update_get_plain_tensors(worlds):
    assert worlds(2).run(kinds_in_an_update) == [(False, True)] * 2


@pytest.mark.parametrize("at_once", [1, 20, 1 << 20])
def test_what_a_step_added(at_once, monkeypatch):
    """Of each parameter, in any order, found together with few others or with all."""
    monkeypatch.setattr(norms, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (4, 5), (2, 7), (6,), (3, 3)]
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    optimizer = build_optimizer(nn.ParameterList(ps), Optimizer())
    for _ in range(3):
        before = [p.detach().clone() for p in ps]
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        update(optimizer, StepNumbers(*torch.ones(3, dtype=torch.float64)), lr=0.1, max_norm=10.0)
    got = update_squares(optimizer, ps[::-1], torch.device("cpu"))
    want = [(p.detach() - old).square().sum().item() for p, old in zip(ps, before, strict=True)][
        ::-1
    ]
    assert got.tolist() == pytest.approx(want, rel=1e-12)
    assert squares_of_each(ps, torch.device("cpu")).tolist() == pytest.approx(
        [p.detach().square().sum().item() for p in ps], rel=1e-14
    )


def numbers(rank, world_size):
    """Loss, norm and signal of two copies of the parameters, with a sharded and a replicated gradient; what is left of
    the norm after scaling to 1."""
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    sharded = nn.Parameter(
        distribute_tensor(torch.zeros(5, 2, dtype=torch.float64), mesh, [Replicate(), Shard(0)])
    )
    whole = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    gradient = torch.arange(10, dtype=torch.float64).view(5, 2)
    sharded.grad = distribute_tensor(gradient, mesh, [Replicate(), Shard(0)])
    whole.grad = torch.full((3,), 2.0, dtype=torch.float64)
    loss, signal = torch.tensor(rank + 0.5), 15 if rank == 1 else 0
    counted = ([sharded, whole] if rank == 0 else [sharded]) if rank < world_size // 2 else []
    before = step_numbers(loss, counted, signal)
    scale_gradients([sharded, whole], 1 / (before.grad_norm + 1e-6))
    return torch.stack(before[:3]).tolist(), step_numbers(loss, counted, signal).grad_norm.item()


def test_loss_norm_and_signal_across_ranks_and_kinds_of_tensors(worlds):
    want = math.sqrt(sum(i * i for i in range(10)) + 3 * 4)
    for (loss, before, signal), after in worlds(4).run(numbers):
        assert loss == 8 and signal == 15
        assert before == pytest.approx(want, rel=1e-14) and after == pytest.approx(1.0, rel=1e-6)


def test_large_tensors_on_the_host_have_their_norm():
    """In float32, of every length; a sum one by one would be off by 0.2%."""
    tensors = [torch.full((n,), 0.1) for n in (0, 7, HOST_BLOCK, 64 * HOST_BLOCK + 7)]
    want = 0.1**2 * sum(map(len, tensors))
    assert sum_of_squares(tensors, torch.device("cpu")).item() == pytest.approx(want, rel=2e-5)
    assert sum_of_squares(tensors[:1], torch.device("cpu")) == 0


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_an_update_clips_and_leaves_out_what_is_not_finite(bad):
    """bad: which of loss and norm is NaN."""
    numbers = torch.tensor([2.0, 10.0, 0.0], dtype=torch.float64)
    results = []
    for clipped_by_hand in (False, True):
        p = nn.Parameter(torch.linspace(-1, 1, 6))
        # not free of the gradient's scale
        optimizer = build_optimizer(nn.ParameterList([p]), Optimizer(eps=1.0))
        for _ in range(2):
            p.grad = torch.full_like(p, 3.0) * (0.5 / (10 + 1e-6) if clipped_by_hand else 1.0)
            update(
                optimizer, StepNumbers(*(torch.zeros(3) if clipped_by_hand else numbers)), 0.1, 0.5
            )
        results.append((p.detach().clone(), optimizer.state[p]["exp_avg_sq"].clone()))
        if bad is not None and not clipped_by_hand:
            numbers[bad], p.grad = float("nan"), torch.full_like(p, 3.0)
            update(optimizer, StepNumbers(*numbers), 0.1, 0.5)
            assert torch.equal(p, results[0][0]) and torch.equal(
                optimizer.state[p]["exp_avg_sq"], results[0][1]
            )
            assert optimizer.state[p]["step"] == 2
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_copies_are_made_anew_of_what_has_changed(monkeypatch):
    """By an update, or by torch; and of nothing else."""
    model, made, copy = nn.ModuleDict({n: nn.Linear(3, 3) for n in "ab"}), [], torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: made.append(len(to)) or copy(to, of)
    )
    copies, optimizer = ComputeCopies(model, torch.bfloat16), build_optimizer(model, Optimizer())

    def are_alike():
        with copies:
            now = [p.clone() for p in model.parameters()]
        return all(map(torch.equal, now, (p.bfloat16() for p in model.parameters())))

    assert are_alike() and are_alike() and made == [4]
    for p in model["a"].parameters():
        p.grad = torch.ones_like(p)
    update(optimizer, StepNumbers(*torch.ones(3, dtype=torch.float64)), lr=0.1, max_norm=1.0)
    assert are_alike() and made == [4, 2]
    model.load_state_dict({n: p + 1 for n, p in model.state_dict().items()})
    assert are_alike() and made[2:] == [4]
