"""Fifty steps in bfloat16 on GPUs: the losses of one of them however the work is split, and compiled or not.

`pytest -m cuda tests/test_gpus.py -rP` prints how far each is off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_train import worst
from tests.worlds import World
from titan_linear.config import load_config
from titan_linear.models.presets import MODELS
from titan_linear.preflight import preflight
from titan_linear.train import Trainer

BASE = {
    "model.flavor": "gpus",
    "training.dataset": "stdlib",
    "training.seq_len": 4096,
    "training.global_batch_size": 4,
    "training.local_batch_size": 4,
    "training.steps": 50,
    "optimizer.lr": 1e-3,
    "lr_scheduler.warmup_steps": 10,
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
}
DEBUG = MODELS["hybrid"]["debug"]
FLAVORS = {  # two kinds of mixers: kernels are compiled for each number of heads that a rank has
    "hybrid": replace(
        DEBUG, dim=256, hidden_dim=512, num_layers=2,
        pattern=(replace(DEBUG.pattern[0], heads=4, v_heads=4, head_dim=64, v_head_dim=64),
                 replace(DEBUG.pattern[2], heads=4, kv_heads=4, head_dim=64)),
    ),
    "kimi-linear": MODELS["kimi-linear"]["debug"],
}  # fmt: skip
CP, TP, EP = (f"parallelism.{kind}_parallel_degree" for kind in ("context", "tensor", "expert"))
# A token that sums in another order send to another expert changes the loss by more than the sums: at 1e-3, streams one
# after the other instead of all at once, on one GPU, are 1e-3 off after 45 steps.
SLOWLY = {"kimi-linear": {"optimizer.lr": 3e-4}}
DP_2, DP_4 = {"training.local_batch_size": 2}, {"training.local_batch_size": 1}
OFFLOAD = {"training.enable_cpu_offload": "true"}
# (model, what it is: processes, what differs from one)
RUNS = [
    ("hybrid", "compiled", 1, {"compile.enable": "true"}),
    ("hybrid", "compiled, offload", 1, {"compile.enable": "true"} | OFFLOAD),
    ("hybrid", "tp 2", 2, {TP: 2}),
    ("hybrid", "tp 2, offload, accumulation", 2, {TP: 2, "training.local_batch_size": 1} | OFFLOAD),
    ("hybrid", "dp 4", 4, DP_4),
    ("hybrid", "cp 4", 4, {CP: 4}),
    ("hybrid", "cp 4 by NCCL", 4, {CP: 4, "parallelism.context_parallel_transport": "nccl"}),
    ("hybrid", "tp 4", 4, {TP: 4}),
    ("hybrid", "cp 2 x tp 2", 4, {CP: 2, TP: 2}),
    ("hybrid", "dp 2 x tp 2", 4, {TP: 2} | DP_2),
    ("hybrid", "HSDP, offload", 4, {"parallelism.data_parallel_replicate_degree": 2} | DP_4 | OFFLOAD),
    ("kimi-linear", "accumulation", 1, {"training.local_batch_size": 1}),
    ("kimi-linear", "dp 4", 4, DP_4),
    ("kimi-linear", "ep 4", 4, {EP: 4} | DP_4),
    ("kimi-linear", "ep 2 x tp 2", 4, {EP: 2, TP: 2} | DP_2),
    ("kimi-linear", "ep 2, offload", 2, {EP: 2} | DP_2 | OFFLOAD),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for name, flavor in FLAVORS.items():
            patch.setitem(MODELS[name], "gpus", flavor)
        yield folder


def train_on_rank(rank: int, world_size: int, argv: list[str], cache: str) -> list[float]:
    os.environ["XDG_CACHE_HOME"] = cache
    for name, flavor in FLAVORS.items():
        MODELS[name]["gpus"] = flavor
    trainer = Trainer(load_config(argv))
    assert trainer.device.type == "cuda"
    return [trainer.train_step()["loss"] for _ in range(trainer.config.training.steps)]


@pytest.fixture(scope="module")
def run(cache: Path, worlds: Callable[..., World]) -> Callable[..., list[float]]:
    """Losses of a model, on so many GPUs, with keys; of each only once."""
    done: dict[str, list[float]] = {}

    def losses(model: str, processes: int, keys: dict[str, object]) -> list[float]:
        keys = BASE | SLOWLY.get(model, {}) | {"model.name": model} | keys
        argv = [f"--{key}={value}" for key, value in keys.items()]
        argv.append(f"--job.dump_folder={cache / 'run'}")
        if str(argv) not in done:
            preflight(load_config(argv), world_size=processes)
            done[str(argv)] = worlds(processes, "nccl").run(train_on_rank, argv, str(cache))[0]
        return done[str(argv)]

    return losses


@pytest.mark.parametrize(
    ("model", "processes", "keys"),
    [
        pytest.param(model, processes, keys, id=f"{model}, {name}", marks=pytest.mark.cuda(processes))
        for model, name, processes, keys in RUNS
    ],
)
def test_losses_are_those_of_one_gpu(model: str, processes: int, keys: dict[str, object], run: Callable) -> None:
    losses, alone = run(model, processes, keys), run(model, 1, {})
    print(f"{worst(losses, alone):.1e} of the loss, {alone[0]:.3f} to {alone[-1]:.3f}")
    assert worst(losses, alone) < 1e-3 and alone[-1] < alone[0] - 1
