"""Muon under every split, beside torch's own on one process. Whole runs are in test_train.py and test_resume.py."""

import re
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ops.inputs import same
from tests.training import (
    FLOAT64,
    SMALL_HYBRID,
    SPLITS,
    arguments,
    check_weights,
    train_on_rank,
    trainer_of,
    whole_weights,
    worst,
)
from titan_linear.config import Optimizer, load_config
from titan_linear.distributed.matrices import WholeMatrices
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.parts import local_tensor
from titan_linear.hooks.norms import squares_of_each, update_squares
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.presets import preset
from titan_linear.run.build import options_of
from titan_linear.run.preflight import preflight
from titan_linear.run.session import Session
from titan_linear.step import optimizer as optim
from titan_linear.step.optimizer import StepNumbers, build_optimizer, hidden_matrices, update
from titan_linear.storage.hf_writing import gather
from titan_linear.storage.tensors import named_parameters

CONFIG = Optimizer(name="muon", lr=0.1)
STEPS = 3
MODELS = {
    # a matrix of 4 rows, and of 1 among the experts
    "hybrid": replace(preset("hybrid", "debug"), num_layers=2),
    "experts": replace(preset("qwen3.5", "debug"), num_layers=1),
    "experts without gates": replace(preset("nemotron-h", "debug"), num_layers=2),
}
# dp_replicate, dp_shard, cp, tp, ep, and what parameters are sharded over
CUTS = {
    "dp 4": {"dp_shard": 4},
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "dp 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "HSDP x tp 2": {"dp_replicate": 2, "tp": 2},
    "tp 4": {"tp": 4},
    "cp 4, sharded over 2": {"cp": 4, "fsdp_shard": 2},
    "dp 2 x cp 2, ep 2": {"dp_shard": 2, "cp": 2, "ep": 2},
    "dp 2 x tp 2, ep 2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "dp 3": {"dp_shard": 3},
    "offload": {"cpu_offload": True},
}


def device():
    """In worlds of the CPU no GPU is seen."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dims_of(**degrees):
    return build_mesh(device().type, **{"dp_replicate": 1, "dp_shard": 1, "cp": 1} | degrees)


def built(config, dims):
    keys = [
        "--training.dtype=float64",
        f"--training.enable_cpu_offload={str(dims.cpu_offload).lower()}",
    ]
    return Session(config, dims, options_of(load_config(keys)), device=device()).model


def drawn(model, seed):
    """Its parameters that learn, drawn anew."""
    initialise(model, seed, named_parameters(model))
    return [p for p in model.parameters() if p.requires_grad]


def trained(config, dims):
    """A model after some updates whose gradients are other models' weights, none of them zero; and how far off the
    squares of what the last one added are. One before and one after, of losses that are not finite, change nothing."""
    model, other = built(config, dims), built(config, dims)
    optimizer = build_optimizer(model, CONFIG)
    numbers = StepNumbers(*torch.zeros(3, dtype=torch.float64, device=device()))
    ps = drawn(model, seed=0)
    assert unchanged_by_nan(optimizer, ps)
    for step in range(STEPS):
        before = [local_tensor(p).detach().clone() for p in ps]
        for p, grad in zip(ps, drawn(other, seed=1 + step), strict=True):
            p.grad = grad.detach() + 0.01
        update(optimizer, numbers, CONFIG.lr / (1 + step), max_norm=1.0)
    added = [local_tensor(p).detach() - old for p, old in zip(ps, before, strict=True)]
    want = squares_of_each(added, device())
    off = (update_squares(optimizer, ps, device()) - want).abs().max() / want.max()
    assert unchanged_by_nan(optimizer, ps)
    return model, off.item()


def unchanged_by_nan(optimizer, parameters):
    """Of this rank's parts of weights and momenta, which begin at zero. Telemetry looks at such a step, too."""
    before = tensors(parameters, optimizer)
    for p in parameters:
        p.grad = torch.full_like(p, float("nan"))
    update(
        optimizer,
        StepNumbers(*torch.full((3,), float("nan"), device=device())),
        CONFIG.lr,
        max_norm=1.0,
    )
    update_squares(optimizer, parameters, device())
    return same(tensors(parameters, optimizer), before)


def tensors(parameters, optimizer):
    """Copies of this rank's parts of weights and momenta."""
    own = [p for group in optimizer.param_groups if "momentum" in group for p in group["params"]]
    momenta = [optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) for p in own]
    return [local_tensor(x).detach().clone() for x in (*parameters, *momenta)]


def on_ranks(rank, world_size, name, split):
    """Whole weights, and the shapes of what was made orthogonal here."""
    seen, original = [], optim.orthogonalised

    def looking(matrices):
        seen.append([tuple(x.shape) for x in matrices])
        return original(matrices)

    with patch.object(optim, "orthogonalised", looking):
        model, off = trained(MODELS[name], dims_of(**split))
    get = gather(model)
    assert off < 1e-10 and len(seen) == STEPS + 3 and all(shapes == seen[0] for shapes in seen)
    return {n: get(n).cpu() for n, _ in model.named_parameters()}, seen[0]


def by_torch(name, device="cpu"):
    """The same updates by torch's optimizers, of which Muon is given each matrix as a parameter."""
    config = MODELS[name]
    plain = [Decoder(config).double() for _ in range(1 + STEPS)]
    for seed, model in enumerate(plain):
        initialise(model, seed)
    weights, *gradients = (
        {n: p.detach().to(device) for n, p in model.named_parameters() if p.requires_grad}
        for model in plain
    )
    matrices = {
        n: list(weights[n].view(-1, *p.shape[-2:])) for n, p in hidden_matrices(plain[0]).items()
    }
    own = [nn.Parameter(x) for stack in matrices.values() for x in stack]
    rest = {n: nn.Parameter(x) for n, x in weights.items() if n not in matrices}
    common = {"lr": CONFIG.lr, "weight_decay": CONFIG.weight_decay}
    muon = torch.optim.Muon(own, momentum=CONFIG.momentum, adjust_lr_fn="match_rms_adamw", **common)
    decays = [p for p in rest.values() if p.dim() > 1]
    others = [p for p in rest.values() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": decays}, {"params": others, "weight_decay": 0.0}],
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
        **common,
    )
    for step in range(STEPS):
        grads = {n: g + 0.01 for n, g in gradients[step].items()}
        for p, g in zip(
            own, (g for n in matrices for g in grads[n].view(-1, *grads[n].shape[-2:])), strict=True
        ):
            p.grad = g
        for n, p in rest.items():
            p.grad = grads[n]
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = CONFIG.lr / (1 + step)
            optimizer.step()
    return {n: x.cpu() for n, x in weights.items()}


@pytest.fixture(scope="module")
def reference(request):
    return request.param, by_torch(request.param)


# Experts without gates are cut as those with gates are, but along dimensions of other sizes.
UNEVEN = ("dp 3", "tp 4", "dp 2 x cp 2, ep 2", "dp 2 x tp 2, ep 2")
CASES = [("hybrid", split) for split in CUTS if "ep" not in CUTS[split]]
CASES += [("experts", split) for split in CUTS]
CASES += [("experts without gates", split) for split in UNEVEN]


@pytest.mark.parametrize("reference, split", CASES, indirect=["reference"])
def test_updates_are_torchs_under_every_split(split, reference, worlds):
    """What is made orthogonal are the whole matrices, each expert's its own; each on one rank if ranks have cut it."""
    name, want = reference
    degrees = CUTS[split]
    size = 1
    for degree in ("dp_replicate", "dp_shard", "cp", "tp"):
        size *= degrees.get(degree, 1)
    results = worlds(size).run(on_ranks, name, degrees)
    for got, _ in results:
        check_weights(got, want)
    shapes = Counter(shape for _, shapes in results for shape in shapes)
    with torch.device("meta"):
        matrices = hidden_matrices(Decoder(MODELS[name])).values()
    whole = Counter(tuple(p.shape[-2:]) for p in matrices for _ in range(p.shape[:-2].numel()))
    assert set(shapes) == set(whole) and shapes >= whole
    if name == "hybrid" and degrees.get("tp", 1) == 1:
        assert shapes == whole


@pytest.mark.cuda(2)
@pytest.mark.parametrize(
    "split", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "ep": 2}, {"cpu_offload": True}], ids=str
)
def test_muon_on_gpus_equals_torchs(split, worlds):
    want = by_torch("experts", "cuda")
    for got, _ in worlds(1 if "cpu_offload" in split else 2, "nccl").run(
        on_ranks, "experts", split
    ):
        check_weights(got, want)


def refused(rank, world_size):
    stack = distribute_tensor(
        torch.ones(2, 4, 3, 5), init_device_mesh("cpu", (world_size,)), [Shard(1)]
    )
    with pytest.raises(ValueError, match="muon") as refusal:
        WholeMatrices({"layers.0.x": stack}, torch.device("cpu"))
    return str(refusal.value)


def test_a_cut_that_no_rank_can_undo_is_refused(worlds):
    said = r"optimizer.name = 'muon': layers.0.x \[2, 4, 3, 5\] is cut by S\(1\), so that no rank can gather"
    for line in worlds(2).run(refused):
        assert re.match(said, line) and "\n" not in line


# --- Whole runs ------------------------------------------------------------------------------------------------------

MUON = (
    SMALL_HYBRID
    | FLOAT64
    | {"optimizer.name": "muon", "training.steps": 6, "lr_scheduler.total_steps": 6}
)


def run_on_rank(rank, world_size, argv):
    """A run with its checkpoints; the whole weights after it."""
    trainer = trainer_of(argv)
    trainer.train()
    return whole_weights(trainer)


def test_a_run_resumes_under_another_split(corpus, worlds, tmp_path):
    """Saved under FSDP and resumed under tp with offload, it equals one process's run that was not interrupted."""
    argv = arguments(corpus, MUON)
    preflight(load_config(argv), world_size=1)
    losses, norms, weights = worlds(1).run(train_on_rank, argv)[0]
    assert losses[-1] < losses[0] and min(norms) > 0
    processes, keys = SPLITS["tp 2 x cp 2 zig-zag"]
    got = worlds(processes).run(train_on_rank, arguments(corpus, MUON, keys))[0]
    assert worst(got[0], losses) < 1e-9 and worst(got[1], norms) < 1e-9
    folder = {"job.dump_folder": tmp_path, "checkpoint.enable": "true"}
    for steps, (processes, keys) in ((3, SPLITS["dp 2"]), (6, SPLITS["HSDP x tp"])):
        argv = arguments(corpus, MUON, folder, keys, {"training.steps": steps})
        preflight(load_config(argv), world_size=processes)
        got = worlds(processes).run(run_on_rank, argv)[0]
    check_weights(got, weights)
