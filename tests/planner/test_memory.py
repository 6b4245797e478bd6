"""Planned numbers against a real model's."""

from dataclasses import replace

import pytest
import torch

from titan_linear.config import load_config
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import materialise, parallelize, set_dtype
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import owned
from titan_linear.models.mixers import MLA
from titan_linear.models.presets import preset
from titan_linear.planner import memory
from titan_linear.step.optimizer import hidden_matrices

LATENT = MLA(heads=4, kv_rank=16, nope_dim=16, shared_k_dim=8, v_dim=16)
MIXED = replace(
    preset("hybrid", "debug"),
    pattern=(*preset("hybrid", "debug").pattern, LATENT),
    num_layers=4,
    mtp_layers=1,
)


def owned_bytes(rank, world_size, tp):
    """Of all parameters, and of the matrices that Muon would update."""
    with torch.device("meta"):
        model = Decoder(MIXED)
    set_dtype(model, torch.float32)
    dims = build_mesh("cpu", 1, world_size // tp, 1, tp)
    parallelize(model, dims, SessionOptions(), torch.device("cpu"))
    materialise(model, torch.device("cpu"))
    kinds = (model.parameters(), hidden_matrices(model).values())
    return tuple(sum(owned(p)[0].numel() * p.element_size() for p in ps) for ps in kinds)


@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_are_those_of_the_fullest_rank(tp, worlds):

    def planned(*keys):
        config = load_config([f"--parallelism.tensor_parallel_degree={tp}", *keys])
        return memory.PlannedRank(config, MIXED, gpus=4)

    report = planned().memory()
    whole, matrices = max(worlds(4).run(owned_bytes, tp))
    assert report["parameters"] == whole
    muon = planned("--optimizer.name=muon")
    assert muon.memory()["optimizer"] == 2 * whole - matrices
    assert muon.moments()["update"]["working"] == matrices / 4 * memory.MUON_WORKING
    assert report["gradients"] == report["optimizer"] / 2 == report["parameters"]
    assert set(report) == set(memory.PARTS)
    offloaded = planned("--training.enable_cpu_offload=true")
    stays = offloaded.memory()
    moved, host = report["parameters"] - stays["parameters"], offloaded.host_memory()
    assert stays["optimizer"] == 2 * stays["parameters"] < 0.01 * report["optimizer"]
    assert 4 * moved <= host <= 6 * moved  # pinned in powers of two


def test_activations_are_split_by_tensor_parallelism():
    """All but what layers do on all tokens with whole tensors: their gathered inputs, the latents."""
    alone, shared = (load_config([f"--parallelism.tensor_parallel_degree={tp}"]) for tp in (1, 2))
    whole, part = (memory.layers(MIXED, memory.MicroBatchShape.of(run)) for run in (alone, shared))
    for one, two in zip(whole, part, strict=True):
        assert 0.5 < two.plain.kept / one.plain.kept < 0.7


def test_a_balance_loss_is_planned_under_context_parallelism():
    """The ranks' sum of means is a call, made of nothing here."""
    run = [
        "--model.name=qwen3.5",
        "--training.expert_balance_coefficient=0.01",
        "--compile.enable=true",
    ]
    run += ["--parallelism.context_parallel_degree=2", "--training.seq_len=256"]
    assert memory.PlannedRank(load_config(run), preset("qwen3.5", "debug"), gpus=2).needs > 0


def test_compiled_layers_and_checkpointing_keep_less():
    for layer in memory.layers(MIXED, memory.MicroBatchShape.of(load_config([], cuda=True))):
        assert layer.input < layer.compiled.kept < 0.7 * layer.plain.kept
        assert (
            0 < layer.plain.selective < layer.plain.kept
            and 0 < layer.compiled.selective < layer.compiled.kept
        )
        assert layer.plain.working > 0 and layer.compiled.working > 0


@pytest.mark.parametrize("name", ["hybrid", "kimi-linear", "nemotron-h", "falcon-h1"])
def test_checkpointing_takes_memory_in_order(name):
    model, kept, sums = preset(name, "debug"), [], []
    for mode in ("full", "attention", "selective", "none"):
        config = load_config(
            ["--model.name", name, "--activation_checkpoint.mode", mode], cuda=True
        )
        rank = memory.PlannedRank(config, model, gpus=1)
        kept.append(sum(rank.saved()[0]))
        sums.append(sum(rank.moments()["fullest layer"].values()))
    assert kept == sorted(set(kept)) and sums == sorted(sums) and sums[0] < sums[-1]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_layers_that_are_not_recomputed_keep_what_they_keep(compiled):
    """Every third of seven layers is recomputed: the third and the sixth."""
    model = replace(preset("hybrid", "debug"), num_layers=7)

    def of(mode, option="op"):
        """What each layer keeps, and the most that is alive in backward."""
        keys = {
            "activation_checkpoint.mode": mode,
            "activation_checkpoint.selective_ac_option": option,
        }
        config = load_config([f"--compile.enable={compiled}"], cuda=True).changed(keys)
        rank = memory.PlannedRank(config, model, 1)
        fullest = rank.moments()["fullest layer"]
        return list(rank.saved()[0]), fullest["activations"] + fullest["working"]

    counted = memory.layers(model, memory.MicroBatchShape.of(load_config([], cuda=True)))
    working = [(layer.compiled if compiled == "true" else layer.plain).working for layer in counted]
    (whole, plain), (inputs, full) = of("none"), of("full")
    third, most = of("selective", "3")
    assert third == [inputs[i] if i in (2, 5) else whole[i] for i in range(7)]
    needed = [sum(third[: i + 1]) + (whole[i] if i in (2, 5) else 0) + working[i] for i in range(7)]
    assert most - max(needed) == plain - max(sum(whole[: i + 1]) + working[i] for i in range(7)) > 0
    assert full < most < plain
    assert of("selective", "1") == (inputs, full) and of("selective", "8") == (whole, plain)
