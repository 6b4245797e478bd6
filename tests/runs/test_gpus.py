"""Fifty steps in bfloat16 on GPUs: the losses of one of them however the work is split, and compiled or not.

`pytest -m cuda tests/runs/test_gpus.py -rP` prints how far each is off.
"""

from dataclasses import replace

import pytest

from tests.training import worst
from titan_linear.config import load_config
from titan_linear.hooks.compilation import Graphs
from titan_linear.models.presets import MODELS
from titan_linear.run.preflight import preflight
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
        DEBUG,
        dim=256,
        hidden_dim=512,
        num_layers=2,
        pattern=(
            replace(DEBUG.pattern[0], heads=4, v_heads=4, head_dim=64, v_head_dim=64),
            replace(DEBUG.pattern[2], heads=4, kv_heads=4, head_dim=64),
        ),
    ),
    "kimi-linear": MODELS["kimi-linear"]["debug"],
}
# Head dims that differ, and documents that are cut into segments in some batches and not in others.
UNEQUAL = replace(
    FLAVORS["hybrid"],
    pattern=(
        replace(DEBUG.pattern[0], heads=2, v_heads=2, head_dim=128, v_head_dim=128),
        replace(DEBUG.pattern[2], heads=4, kv_heads=4, head_dim=64),
    ),
)
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
    ("hybrid", "cp 4 sharded over 2", 4, {CP: 4, "parallelism.fsdp_shard_degree": 2}),
    ("hybrid", "tp 4", 4, {TP: 4}),
    ("hybrid", "cp 2 x tp 2", 4, {CP: 2, TP: 2}),
    ("hybrid", "dp 2 x tp 2", 4, {TP: 2} | DP_2),
    (
        "hybrid",
        "HSDP, offload",
        4,
        {"parallelism.data_parallel_replicate_degree": 2} | DP_4 | OFFLOAD,
    ),
    ("kimi-linear", "accumulation", 1, {"training.local_batch_size": 1}),
    ("kimi-linear", "dp 4", 4, DP_4),
    ("kimi-linear", "ep 4", 4, {EP: 4} | DP_4),
    ("kimi-linear", "ep 2 x tp 2", 4, {EP: 2, TP: 2} | DP_2),
    ("kimi-linear", "ep 2, offload", 2, {EP: 2} | DP_2 | OFFLOAD),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, flavor in FLAVORS.items():
            patch.setitem(MODELS[name], "gpus", flavor)
        patch.setitem(MODELS["hybrid"], "unequal", UNEQUAL)
        yield tmp_path_factory.mktemp("gpus")


def train_on_rank(rank, world_size, argv):
    for name, flavor in FLAVORS.items():
        MODELS[name]["gpus"] = flavor
    MODELS["hybrid"]["unequal"] = UNEQUAL
    trainer = Trainer(load_config(argv))
    assert trainer.session.device.type == "cuda"
    return [trainer.train_step()["loss"] for _ in range(trainer.config.training.steps)]


@pytest.fixture(scope="module")
def run(folder, worlds):
    """Losses of a model, on so many GPUs, with keys; of each only once."""
    done = {}

    def losses(model, processes, keys):
        keys = BASE | SLOWLY.get(model, {}) | {"model.name": model} | keys
        argv = [f"--{key}={value}" for key, value in keys.items()]
        argv.append(f"--job.dump_folder={folder / 'run'}")
        if str(argv) not in done:
            preflight(load_config(argv), world_size=processes)
            done[str(argv)] = worlds(processes, "nccl").run(train_on_rank, argv)[0]
        return done[str(argv)]

    return losses


@pytest.mark.parametrize(
    "model, processes, keys",
    [
        pytest.param(
            model, processes, keys, id=f"{model}, {name}", marks=pytest.mark.cuda(processes)
        )
        for model, name, processes, keys in RUNS
    ],
)
def test_losses_are_those_of_one_gpu(model, processes, keys, run):
    losses, alone = run(model, processes, keys), run(model, 1, {})
    print(f"{worst(losses, alone):.1e} of the loss, {alone[0]:.3f} to {alone[-1]:.3f}")
    assert worst(losses, alone) < 1e-3 and alone[-1] < alone[0] - 1


def compiled_on_rank(rank, world_size, argv):
    """The number of graphs after the first step, the first validation and the last of both; breaks; losses."""
    MODELS["hybrid"]["unequal"] = UNEQUAL
    trainer, graphs, losses = Trainer(load_config(argv)), [], []
    counted, before = Graphs(), Graphs().counts()
    for step in range(trainer.config.training.steps):
        losses.append(trainer.train_step()["loss"])
        graphs.append(counted.counts()["compiled_graphs"] - before["compiled_graphs"])
        if step % trainer.config.validation.freq:
            trainer.validate()
            graphs.append(counted.counts()["compiled_graphs"] - before["compiled_graphs"])
    return graphs, counted.counts()["graph_breaks"] - before["graph_breaks"], losses


@pytest.mark.parametrize(
    "processes, keys",
    [
        pytest.param(1, OFFLOAD, id="offload", marks=pytest.mark.cuda(1)),
        pytest.param(2, DP_2, id="dp 2", marks=pytest.mark.cuda(2)),
        pytest.param(2, {CP: 2}, id="cp 2", marks=pytest.mark.cuda(2)),
    ],
)
def test_kinds_of_layers_are_compiled_once(processes, keys, folder, worlds):
    """Each in the first step, and without gradients in the first validation, whatever the documents."""
    steps = {
        "training.local_batch_size": 1,
        "training.seq_len": 8192,
        "training.steps": 12,
        "validation.freq": 2,
    }
    validation = {"validation.enable": "true", "validation.steps": 4, "validation.holdout": 0.05}
    keys = BASE | steps | validation | keys | {"model.name": "hybrid", "model.flavor": "unequal"}
    found = []
    for compile_ in ("true", "false"):
        argv = [f"--{key}={value}" for key, value in (keys | {"compile.enable": compile_}).items()]
        argv.append(f"--job.dump_folder={folder / 'run'}")
        preflight(load_config(argv), world_size=processes)
        found.append(worlds(processes, "nccl").run(compiled_on_rank, argv))
    for (graphs, breaks, losses), (_, _, uncompiled) in zip(*found, strict=True):
        assert not breaks and graphs[:2] == [2, 2] and set(graphs[2:]) == {4}, graphs
        assert worst(losses, uncompiled) < 1e-3
