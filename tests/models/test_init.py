"""Initial weights are a function of (seed, name, element), however parameters are split."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from titan_linear.models import init
from titan_linear.models.decoder import Decoder
from titan_linear.models.draws import Elements, normal, ones, stream, time_step_bias, uniform_decay
from titan_linear.models.init import fill, initialise
from titan_linear.models.presets import preset

N = 1 << 20


def drawn(name="a", seed=0, n=N):
    return Elements(stream(seed, name), torch.arange(n)).normal()


# --- The numbers -----------------------------------------------------------------------------------------------------


def test_bits_are_those_of_splitmix64():
    """The first numbers of the published generator for the seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    bits = Elements((1234567, golden), torch.arange(1, 6)).bits()
    assert [n % 2**64 for n in bits.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_numbers_are_normal():
    """Moments and correlations within five standard deviations of their estimates over N numbers."""
    z = drawn()
    assert abs(z.mean()) < 5 / math.sqrt(N)
    assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / N)
    assert abs(z.pow(3).mean()) < 5 * math.sqrt(15 / N)
    assert abs(z.pow(4).mean() - 3) < 5 * math.sqrt(96 / N)
    for lag in (1, 2, 3, 4, 64, 1024):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / math.sqrt(N - lag)
        assert abs((z[lag:].square() - 1).mul(z[:-lag].square() - 1).mean()) < 5 * 2 / math.sqrt(
            N - lag
        )
    inside = (z.abs() < 1).double().mean()
    p = math.erf(1 / math.sqrt(2))
    assert abs(inside - p) < 5 * math.sqrt(p * (1 - p) / N)
    for other in (drawn("b"), drawn("layers.1.mixer.q_proj.weight"), drawn(seed=1), drawn(seed=-1)):
        assert abs((z * other).mean()) < 5 / math.sqrt(N)


def test_numbers_are_uniform():
    u = Elements(stream(0, "a"), torch.arange(N)).uniform()
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    assert (counts - N / 64).abs().max() < 5 * math.sqrt(N / 64)


def test_decays_and_time_steps_are_in_their_ranges():
    elements = Elements(stream(0, "a"), torch.arange(N))
    for low in (0.0, 1.0):
        decay = uniform_decay(low)(elements).exp()
        assert low < decay.min() < low + 1e-3 and 16 - 1e-3 < decay.max() <= 16 * (1 + 1e-12)
        assert abs(decay.mean() - (16 + low) / 2) < 5 * (16 - low) / math.sqrt(12 * N)
    log_dt = nn.functional.softplus(time_step_bias(elements)).log10()  # uniform on (−3, −1)
    assert log_dt.min() > -3 - 1e-9 and log_dt.max() < -1 + 1e-9
    assert abs(log_dt.mean() + 2) < 5 * 2 / math.sqrt(12 * N)


# --- Parts of a parameter --------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setitem(init.BLOCKS, "cpu", 1 << 15)


def part(shape, box):
    local = torch.full([s.stop - s.start for s in box], float("nan"))
    fill(local, shape, tuple(s.start for s in box), normal(1.0), stream(0, "a"))
    return local


@pytest.mark.parametrize(
    "shape", [(7,), (130_001,), (13, 5), (257, 1031), (3, 10, 6), (5, 129, 33), (2, 3, 4, 5)]
)
def test_parts_equal_the_whole(shape, small_blocks):
    """To the last bit, for boxes at odd offsets and of odd sizes, empty ones too; across blocks."""
    whole, rng = part(shape, tuple(slice(0, n) for n in shape)), np.random.default_rng(0)
    assert torch.equal(whole.flatten(), drawn(n=whole.numel()).float())
    for _ in range(12):
        ends = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
        box = tuple(
            slice(a, b) if rng.random() < 0.7 else slice(0, n) for (a, b), n in zip(ends, shape)
        )
        assert torch.equal(part(shape, box), whole[box]), box


def test_a_part_across_blocks(small_blocks):
    n = 3 * init.BLOCKS["cpu"] + 77
    whole = part((n,), (slice(0, n),))
    assert torch.equal(
        part((n,), (slice(init.BLOCKS["cpu"] - 5, n),)), whole[init.BLOCKS["cpu"] - 5 :]
    )
    assert len(whole.unique()) > 0.8 * n  # no block is drawn twice


# --- Sharded models --------------------------------------------------------------------------------------------------

SHAPES = {"matrix": (13, 10), "long": (40, 3), "experts": (5, 6, 7), "vector": (11,), "norm": (9,)}


class Parameters(nn.Module):
    """Parameters of these shapes, whole or as `split` gives them."""

    def __init__(self, split=lambda tensor: tensor):
        super().__init__()
        self.config = SimpleNamespace(init_std=0.02)
        self.initial = {"norm": ones, "vector": time_step_bias}
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(split(torch.full(shape, float("nan")))))


def whole_parameters():
    model = Parameters()
    initialise(model, 3)
    return {name: p.detach() for name, p in model.named_parameters()}


def shard_on_rank(rank, world_size):
    """Parameters that are not those of one process, by placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    wrong, whole = [], whole_parameters()
    line, square = (
        init_device_mesh("cpu", (world_size,)),
        init_device_mesh("cpu", (world_size // 2, 2)),
    )
    cases = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(1), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
        (square, [Replicate(), Shard(0)]),
    ]
    for mesh, placements in cases:

        def split(tensor, mesh=mesh, placements=placements):
            own = [
                p if p.is_replicate() or p.dim < tensor.dim() else Replicate() for p in placements
            ]
            return distribute_tensor(tensor, mesh, own)

        model = Parameters(split)
        initialise(model, 3)
        for name, p in model.named_parameters():
            if not torch.equal(p.full_tensor(), whole[name]):
                wrong.append(f"{name} {placements}")
    return wrong


def fsdp_on_rank(rank, world_size, tensor_parallel):
    """Parameters of sharded models that are not those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def mlp():
        model = nn.Sequential(nn.Linear(10, 24, bias=False), nn.Linear(24, 13, bias=False))
        model.config = SimpleNamespace(init_std=0.02)
        return model

    mesh = init_device_mesh(
        "cpu", (world_size // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp")
    )
    wrong = []
    for build in (mlp, lambda: Decoder(preset("hybrid", "debug"))):
        whole, model = build(), build()
        if build is mlp and tensor_parallel > 1:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        initialise(whole, 5)
        initialise(model, 5)
        wrong += [
            name
            for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True)
            if not torch.equal(p.full_tensor(), q)
        ]
    return wrong


@pytest.mark.parametrize("processes", [2, 4])
def test_sharded_parameters_equal_those_of_one_process(processes, worlds):
    assert worlds(processes).run(shard_on_rank) == [[]] * processes
    assert worlds(processes).run(fsdp_on_rank, processes // 2) == [[]] * processes
