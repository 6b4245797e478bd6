"""Runs whose parameters lie in the host's memory: bit for bit those of runs without, resumed either way."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tests.ops.inputs import same
from tests.training import (
    FLOAT64,
    SMALL_HYBRID,
    arguments,
    check_weights,
    early,
    train_on_rank,
    trainer_of,
    whole_weights,
    worst,
)
from titan_linear.config import Optimizer, load_config
from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.distributed.parts import Parts, local_tensor
from titan_linear.distributed.process import be_deterministic
from titan_linear.models.presets import OWN
from titan_linear.run.folder import RunFolder
from titan_linear.step.optimizer import build_optimizer, step_numbers, update
from titan_linear.storage.hf_writing import gather
from titan_linear.train import Trainer

OFFLOAD = {"training.enable_cpu_offload": "true"}
CLIPPED = {"training.steps": 2, "training.max_norm": 0.1}
EXPERTS = {
    "model.name": "kimi-linear",
    "parallelism.expert_parallel_degree": 2,
    "training.local_batch_size": 1,
}
RUNS = {
    "one process": (1, SMALL_HYBRID | {"training.local_batch_size": 2}),
    "dp 2, kept until backward": (
        2,
        SMALL_HYBRID
        | {
            "training.local_batch_size": 2,
            "metrics.telemetry_freq": 1,
            "parallelism.fsdp_reshard_after_forward": "never",
        },
    ),
    "tp 2, tied embeddings": (
        2,
        SMALL_HYBRID | {"model.flavor": "wide-norms", "parallelism.tensor_parallel_degree": 2},
    ),
    "ep 2, accumulation": (2, EXPERTS),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_the_same_bit_for_bit(name, corpus, worlds):
    processes, keys = RUNS[name]
    plain, offloaded = (
        worlds(processes).run(train_on_rank, arguments(corpus, FLOAT64, CLIPPED, keys, more))
        for more in ({}, OFFLOAD)
    )
    for (losses, norms, weights), (want_losses, want_norms, want) in zip(
        offloaded, plain, strict=True
    ):
        assert losses == want_losses and norms == want_norms and min(norms) > 0.1
        assert same(weights, want)


def test_a_step_that_is_not_finite_and_a_stop(corpus, worlds):
    """In bfloat16; the next step's forward has begun before."""
    keys = SMALL_HYBRID | {
        "training.mixed_precision_param": "bfloat16",
        "training.on_nonfinite": "skip",
        "training.local_batch_size": 1,
    }
    runs = [worlds(2).run(early, arguments(corpus, keys, more), True) for more in ({}, OFFLOAD)]
    for (losses, weights, begun), (want, want_weights, _) in zip(*runs, strict=True):
        assert begun == [True] * 4 + [False] and str(losses) == str(want)
        assert same(weights, want_weights)


def train_on(rank, world_size, argv):
    """A whole run, which saves; whether FSDP2 had the model, and the weights after it."""
    trainer = trainer_of(argv)
    trainer.train()
    return isinstance(trainer.model, FSDPModule), whole_weights(trainer)


def test_a_run_resumes_with_and_without(corpus, worlds, tmp_path):
    """On other processes too; saves are written while training goes on."""
    keys = SMALL_HYBRID | {
        "checkpoint.enable": "true",
        "checkpoint.interval": 1,
        "checkpoint.async_mode": "async",
        "lr_scheduler.total_steps": 4,
        "training.local_batch_size": 2,
    }

    def train(processes, steps, folder, more):
        argv = arguments(
            corpus,
            FLOAT64,
            keys,
            more,
            {"training.steps": steps, "job.dump_folder": tmp_path / folder},
        )
        (tmp_path / folder).mkdir(exist_ok=True)
        RunFolder(load_config(argv)).check_resume()
        return worlds(processes).run(train_on, argv)[0]

    _, want = train(1, 4, "whole", {})
    assert train(1, 2, "parts", OFFLOAD)[0]
    assert not train(1, 3, "parts", {})[0]
    _, got = train(1, 4, "parts", OFFLOAD)
    assert same(got, want)
    train(2, 2, "split", OFFLOAD | {"parallelism.tensor_parallel_degree": 2})
    _, got = train(1, 4, "split", {})
    check_weights(got, want)


def host_tensors(rank, world_size):
    """Shards in the host's memory of a parameter [4, 2] on a mesh of GPUs: whether what is filled, and what is
    gathered, is the parameter's own; the parameter after an update, and after one that is not finite."""
    group = dist.group.WORLD
    mesh = DeviceMesh.from_group(
        [group], "cuda", torch.arange(world_size), mesh_dim_names=("fsdp",)
    )
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    both = DeviceMesh.from_group(
        [alone, group], "cuda", torch.arange(world_size)[None], mesh_dim_names=("tp", "fsdp")
    )
    own = torch.zeros(4 // world_size, 2)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([4, 2]), (2, 1), own.dtype))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor(own, spec, requires_grad=False))
    model.parts = Parts({}, both)
    part = model.parts.whole("weight", model.weight)
    shared = part.to_local().data_ptr() == own.data_ptr() and part.device.type == "cpu"
    part.to_local().fill_(rank + 1.0)
    gathered = gather(model)("weight").flatten().tolist() == [
        r + 1.0 for r in range(world_size) for _ in range(4)
    ]
    optimizer, found = build_optimizer(model, Optimizer(weight_decay=0.0)), []
    for bad in (0.0, float("nan")):
        model.weight.grad = torch.ones_like(model.weight)
        update(optimizer, step_numbers(torch.tensor(bad), [model.weight], 0), 0.5, 100.0)
        found.append(own.flatten().tolist())
    return shared, gathered, *found


def test_what_lies_in_the_hosts_memory_stays_there(worlds):
    """Though its mesh is of GPUs, to which DTensor moves what it is given."""
    for rank, (shared, gathered, first, second) in enumerate(worlds(2).run(host_tensors)):
        assert shared and gathered and first == second == pytest.approx([rank + 0.5] * 4)


# --- On GPUs ---------------------------------------------------------------------------------------------------------

# 12 layers of 12.6M parameters each, so that FSDP's gathered ones are a small part of the whole.
LARGE = replace(OWN["hybrid"]["debug"], dim=1024, hidden_dim=4096, num_layers=12)
ON_GPUS = {
    "dp 2": {"training.local_batch_size": 2},
    "tp 2": {"parallelism.tensor_parallel_degree": 2},
}


def train_on_gpus(rank, world_size, argv):
    """Ten steps: losses, a weight's norm after them, the peak of what is allocated on the GPU, the moments' bytes."""
    OWN["hybrid"]["large"] = LARGE
    be_deterministic()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        trainer = Trainer(load_config(argv))
        losses = [trainer.train_step()["loss"] for _ in range(10)]
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        small = set(replicated_parameters(trainer.model))  # A_log and dt_bias
        moments = {
            p: (state["exp_avg"], state["exp_avg_sq"])
            for p, state in trainer.session.optimizer.state.items()
        }
        assert small and len(moments) == len(list(trainer.model.parameters()))
        for p, own in moments.items():
            here = p in small or not trainer.dims.cpu_offload
            assert all(x.is_cuda == here for x in (p, *own)) and (here or p.to_local().is_pinned())
        nbytes = sum(local_tensor(x).nbytes for own in moments.values() for x in own)
        return (
            losses,
            gather(trainer.model)("layers.0.mlp.up_proj.weight").norm().item(),
            peak,
            nbytes,
        )
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpus(processes, corpus, worlds, split):
    """Host and GPU round an update's numbers in float32 differently. So some weights' copies in bfloat16 become others,
    by 2^-8 of themselves, and the loss after one update is off by 1e-4 (as much as an ulp of noise in all weights makes
    it, on the CPU). What training then makes of that, while the loss falls to a quarter in ten steps, was 3e-3."""
    keys = {"model.name": "hybrid", "model.flavor": "large", "optimizer.lr": 3e-4}
    runs = [
        worlds(processes, "nccl").run(train_on_gpus, arguments(corpus, keys, split, more))
        for more in ({}, OFFLOAD)
    ]
    for (want, norm, peak, moments), (losses, like, lower, _) in zip(*runs, strict=True):
        print(
            f"losses within {worst(losses, want):.1e}; {peak / 2**20:.0f} MiB, offloaded {lower / 2**20:.0f}"
        )
        assert losses[0] == pytest.approx(want[0], rel=1e-5) and losses[1] == pytest.approx(
            want[1], rel=1e-3
        )
        assert worst(losses, want) < 1e-2 and like == pytest.approx(norm, rel=1e-3), (losses, want)
        assert losses[-1] < losses[0] - 0.1 and lower < peak - moments, (lower, peak, moments)


@pytest.mark.cuda
def test_one_gpu_with_offload_equals_one_without(corpus, worlds):
    on_gpus(1, corpus, worlds, {})


@pytest.mark.cuda(2)
@pytest.mark.parametrize("split", ON_GPUS)
def test_two_gpus_with_offload_equal_those_without(split, corpus, worlds):
    on_gpus(2, corpus, worlds, ON_GPUS[split])
