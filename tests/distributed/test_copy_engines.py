"""FSDP's collectives by copy engines: NCCL's numbers, whatever runs beside them, and in a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.worlds import World
from titan_linear.config import load_config
from titan_linear.distributed.copy_engines import CopiedGather, CopiedReduceScatter, copy_shards
from titan_linear.preflight import check_transport, preflight
from titan_linear.train import Trainer

GPUS = [pytest.param(n, marks=pytest.mark.cuda(n, peers=True)) for n in (2, 4)]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["--parallelism.fsdp_transport", "copy_engines", "--parallelism.context_parallel_degree", "2"])
    with pytest.raises(ValueError, match="needs GPUs, and there are none here; use 'nccl'"):
        check_transport(config, 8, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_transport(config, 8, 8)
    with pytest.raises(ValueError, match="8 ranks share parameters, and a node has 4; use 'nccl', or"):
        check_transport(config, 8, 4)
    replicas = ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.fsdp_transport", "copy_engines"]
    check_transport(load_config(replicas), 8, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 7])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 3)
    with pytest.raises(ValueError, match="cannot read each other's memory; use 'nccl'"):
        copy_shards([], SimpleNamespace(size=lambda: 3), torch.device("cuda", 1))


def collectives(rank: int, world_size: int, nbytes: int) -> tuple[bool, float, bool]:
    """Sixty of each, of changing sizes, on streams of their own while products run; whether all gathers are NCCL's,
    how far sums are off, as shares of their terms, and whether ranks are in step to the end."""
    device, group = torch.device("cuda", rank), dist.group.WORLD
    gather, reduce_scatter = CopiedGather(group, device, nbytes), CopiedReduceScatter(group, device, nbytes)
    streams = [torch.cuda.Stream(priority=-1) for _ in range(2)]
    draw = torch.Generator(device).manual_seed(rank)
    sizes, x = torch.Generator().manual_seed(0), torch.randn(2048, 2048, device=device)
    equal, worst = True, 0.0
    for _ in range(60):
        n = int(torch.randint(1, 200_000, (), generator=sizes))
        out = torch.empty(world_size * n, device=device, dtype=torch.bfloat16)
        mine = out.view(world_size, n)[rank].copy_(torch.randn(n, device=device, generator=draw))
        given, total = torch.randn(world_size * n, device=device, generator=draw), torch.empty(n, device=device)
        if (rank + n) % world_size == 0:
            torch.cuda._sleep(2_000_000)  # one rank is late
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            gather(out, mine, group)
        with torch.cuda.stream(streams[1]):
            reduce_scatter(total, given, group, dist.ReduceOp.SUM)
        x = x @ x / 50
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        expected, all_given = torch.empty_like(out), torch.empty(world_size, world_size * n, device=device)
        dist.all_gather_into_tensor(expected, mine.clone())
        dist.all_gather_into_tensor(all_given, given)
        equal &= torch.equal(out, expected)
        exact = all_given.view(world_size, world_size, n)[:, rank].double()
        worst = max(worst, ((total - exact.sum(0)).abs() / exact.abs().sum(0)).max().item())
    return equal, worst, gather.stage.exchange == reduce_scatter.stage.exchange or nbytes < 1 << 20


@pytest.mark.parametrize("nbytes", [16 << 20, 64 << 10])
@pytest.mark.parametrize("processes", GPUS)
def test_collectives(processes: int, nbytes: int, worlds: Callable[..., World]) -> None:
    """In one part, and in many."""
    for equal, worst, in_step in worlds(processes, "nccl").run(collectives, nbytes):
        assert equal and in_step
        assert worst < processes * 2**-24  # a rounding for each term


def weights(rank: int, world_size: int, copied: bool) -> list[torch.Tensor]:
    """Of linear layers after three steps in small integers, which float32 adds up exactly in any order."""
    device, draw = torch.device("cuda", rank), torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=draw).float()

    mesh = init_device_mesh("cuda", (world_size,))
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48, bias=False) for _ in range(3)))
    for layer in model:
        layer.weight.data = integers(48, 48)
    units = [fully_shard(layer.to(device), mesh=mesh) for layer in model] + [fully_shard(model.to(device), mesh=mesh)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if copied:
        copy_shards(units, mesh.get_group(), device)
    for x in integers(3, world_size, 8, 48):
        model(x[rank].to(device)).sum().backward()
        for p in model.parameters():
            p.data -= p.grad.sign()
            p.grad = None
    return [p.detach().full_tensor().cpu() for p in model.parameters()]


@pytest.mark.parametrize("processes", GPUS)
def test_a_model(processes: int, worlds: Callable[..., World]) -> None:
    copied, by_nccl = (worlds(processes, "nccl").run(weights, how) for how in (True, False))
    for own, expected in zip(copied, by_nccl, strict=True):
        assert all(map(torch.equal, own, expected))


def losses(rank: int, world_size: int, argv: list[str], cache: str, transport: str) -> list[float]:
    """Of ten steps."""
    os.environ["XDG_CACHE_HOME"] = cache
    trainer = Trainer(load_config([*argv, "--parallelism.fsdp_transport", transport]))
    return [trainer.train_step()["loss"] for _ in range(10)]


@pytest.mark.cuda(2, peers=True)
@pytest.mark.parametrize("reshard", ["always", "never"])
def test_a_run(reshard: str, tmp_path: Path, worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks add two numbers, in whatever order: losses in bfloat16 are the same bit for bit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = {
        "job.dump_folder": tmp_path / "run", "model.name": "hybrid", "model.flavor": "debug", "model.impl": "torch",
        "training.dataset": "stdlib", "training.seq_len": 512, "training.global_batch_size": 4, "training.steps": 10,
        "checkpoint.enable": "false", "metrics.enable_tensorboard": "false",
        "parallelism.fsdp_reshard_after_forward": reshard,
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in keys.items()]
    preflight(load_config(argv), world_size=2)
    copied, by_nccl = (
        worlds(2, "nccl").run(losses, argv, str(tmp_path), transport)[0] for transport in ("copy_engines", "nccl")
    )
    assert copied == by_nccl and copied[-1] < copied[0]
