"""Whole runs: the same losses, gradient norms and weights however the work is split."""

import errno
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.inputs import same
from tests.records import read_lines
from tests.refusals import refused
from tests.steps import after_backward
from tests.training import (
    EXPERT_SPLITS,
    FLOAT64,
    FOUR_STEPS,
    OWN_FLAVORS,
    SMALL_HYBRID,
    SPLITS,
    _local,
    arguments,
    check_equal,
    early,
    train_on_rank,
    trainer_of,
    whole_weights,
    worst,
)
from titan_linear.config import Training, load_config
from titan_linear.data import build_tokenizer
from titan_linear.distributed.process import be_deterministic
from titan_linear.hooks.spikes import NonFinite
from titan_linear.models.config import LoraConfig
from titan_linear.models.presets import MODELS
from titan_linear.run.console import unbalanced
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import preflight
from titan_linear.storage import checkpoint, hf_writing
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.step_folders import read_progress
from titan_linear.train import Trainer

# Where two further tokens are predicted too, over documents that may be shorter, whose tokens lie on other ranks; other
# tests have these splits without.
FURTHER = (
    "dp 2",
    "HSDP x cp",
    "cp 4",
    "cp 2 zig-zag",
    "tp 2 x cp 2 zig-zag",
    "HSDP x tp",
    "accumulation",
    "cp 2 ring contiguous",
    "cp 2 allgather zigzag",
    "cp 2 all heads",
)
TWO_FURTHER = {"model.mtp_layers": 2, "loss.mtp_weight": 0.5}

# Each kind of sum and of message, in float32 too.
FLOAT32 = (
    "dp 2",
    "cp 4",
    "cp 2 zig-zag",
    "cp 4 sharded over 2",
    "tp 2",
    "accumulation",
    "cp 2 ring contiguous",
)


@pytest.fixture(scope="module")
def one_process(corpus, worlds):
    """The reference for some keys, computed once."""
    done = {}

    def get(keys):
        if str(keys) not in done:
            argv = arguments(corpus, keys)
            preflight(load_config(argv), world_size=1)
            done[str(keys)] = worlds(1).run(train_on_rank, argv)[0]
        return done[str(keys)]

    return get


@pytest.mark.parametrize("name", SPLITS)
def test_float64_runs_are_equal(name, corpus, worlds, one_process):
    processes, split = SPLITS[name]
    keys = FOUR_STEPS | FLOAT64 | (TWO_FURTHER if name in FURTHER else {})
    losses, norms, _ = one = one_process(keys)
    for rank in worlds(processes).run(train_on_rank, arguments(corpus, keys, split)):
        check_equal(rank, one)
    assert losses[-1] < losses[0] - 1  # it learns
    assert min(norms) > Training().max_norm  # and is clipped in each step


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_runs_are_equal(name, corpus, worlds, one_process):
    processes, keys = SPLITS[name]
    losses, norms, _ = one_process(FOUR_STEPS)
    for rank in worlds(processes).run(train_on_rank, arguments(corpus, FOUR_STEPS, keys)):
        assert worst(rank[0], losses) < 1e-5 and worst(rank[1], norms) < 1e-3


def sums_over_replicas(rank, world_size, argv):
    """Those of a step, and FSDP's units with parameters of their own."""
    trainer = trainer_of(argv)
    (replicas, _), sums, add_up = trainer.dims.fsdp_mesh.get_all_groups(), [], dist.all_reduce

    def count(x, *args, **options):
        sums.append(options.get("group") is replicas)
        return add_up(x, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", count)
        trainer.train_step()
    units = [
        unit
        for unit in trainer.model.modules()
        if isinstance(unit, FSDPModule) and unit is not trainer.model
    ]
    return sum(sums), len(units)


def test_replicas_add_up_once_a_step(corpus, worlds):
    """Once a micro-step, of which there are two, with CPU offload and where reductions are of another type: in bfloat16
    the sum of many micro-steps would be rounded as often."""
    in_each = (
        {"training.enable_cpu_offload": "true"},
        {"training.mixed_precision_reduce": "bfloat16"},
    )
    cases = [(split, {}, 1) for split in ("HSDP x cp", "cp 4 sharded over 2")]
    cases += [("HSDP x cp", more, 2) for more in in_each]
    for split, more, times in cases:
        processes, keys = SPLITS[split]
        argv = arguments(corpus, SMALL_HYBRID, keys, more)
        for found, units in worlds(processes).run(sums_over_replicas, argv):
            assert found == times * units


def test_tied_embeddings_and_other_presets(corpus, worlds, one_process):
    """Each family, and the head that shares its weight with the embedding."""
    for name, flavor, splits in (
        ("kda", "debug", ("cp 2 zig-zag", "HSDP x tp")),
        ("gdn", "debug", ("full activation checkpointing", "tp 2")),
        ("rwkv7", "debug", ("cp 2 all heads",)),
        ("hybrid", "wide-norms", ("tp 2",)),
    ):
        keys = FLOAT64 | {
            "training.steps": 3,
            "model.name": name,
            "model.flavor": flavor,
            "model.num_layers": 2,
        }
        one = one_process(keys)
        for processes, split in (SPLITS[split] for split in splits):
            got = worlds(processes).run(train_on_rank, arguments(corpus, keys, split))[0]
            check_equal(got, one)


def test_a_compiled_run_is_equal(corpus, worlds, one_process):
    """Documents change from step to step, and the graphs stay (`tests/models/test_plan.py` compiles each mixer)."""
    softmax = FLOAT64 | {"training.steps": 3, "model.name": "hybrid", "model.flavor": "softmax"}
    experts = FLOAT64 | {"training.steps": 3, "model.name": "hybrid", "model.flavor": "experts"}
    # a layer gives values
    rwkv7 = FLOAT64 | {"training.steps": 3, "model.name": "rwkv7", "model.num_layers": 2}
    compiled = {"compile.enable": "true", "compile.backend": "aot_eager"}
    falcon = FLOAT64 | {"training.steps": 3, "model.name": "falcon-h1", "model.num_layers": 1}
    full = {"activation_checkpoint.mode": "full", "training.local_batch_size": 2}  # two micro-steps
    for keys, (processes, split), more in (
        (softmax, SPLITS["cp 2 zig-zag"], {"training.enable_cpu_offload": "true"}),
        (rwkv7, SPLITS["tp 2"], full),
        (falcon, SPLITS["tp 2"], {"activation_checkpoint.mode": "selective"}),
        (experts | {"model.mtp_layers": 1}, EXPERT_SPLITS["ep 2, dp 2"], {}),
    ):
        one = one_process(keys)
        argv = arguments(corpus, keys, split, more, compiled)
        got = worlds(processes).run(train_on_rank, argv)[0]
        check_equal(got, one)


EXPERT_RUNS = ("accumulation", "dp 2", "dp 2 x cp 2", "tp 2 x cp 2 zig-zag", *EXPERT_SPLITS, "kept")
# One family is split in every way, the others in those that their own parts see: heads, groups, means over ranks.
MIXTURES = {
    "kimi-linear": EXPERT_RUNS,
    "ling-3": ("tp 2 x cp 2 zig-zag", "ep 2, dp 2", "cp 4"),
    "qwen3.5": ("dp 2 x cp 2", "tp 2 x cp 2 zig-zag", "ep 2, dp 2"),
    "nemotron-h": ("tp 2 x cp 2 zig-zag", "ep 2, dp 2"),
    "granite-h": ("tp 2 x cp 2 zig-zag",),
    "minimax": ("tp 2 x cp 2 zig-zag",),
    "nano-3": ("tp 2 x cp 2 zig-zag", "ep 2, HSDP x cp 2 x tp 2"),
    "granite-tiny": ("ep 2, dp 2",),
    "falcon-h1": ("tp 2 x cp 2 zig-zag", "cp 4", "HSDP x cp"),
    "falcon-0.5B": ("tp 2 x cp 2 zig-zag",),
    "lfm2-350M": ("tp 2 x cp 2 zig-zag",),
    "lfm2-moe": ("ep 2, dp 2",),
    "rwkv7": ("HSDP x cp",),
    "rwkv7-0.1B": ("tp 2 x cp 2 zig-zag",),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts(name, corpus, worlds, one_process):
    """A load-balance loss, a selection bias that moves, latent attention with positions and without, Lightning
    attention, Mamba-2 of one group and of several, mixers side by side, over FSDP and both layouts; six steps of
    published shapes, cut, in which rates warm up and decay."""
    keys = FLOAT64 | {"training.steps": 3, "model.name": name, "activation_checkpoint.mode": "full"}
    keys |= {"model.mtp_layers": int(name in ("ling-3", "qwen3.5", "nemotron-h"))}
    if name in OWN_FLAVORS:
        short = {"training.seq_len": 32, "activation_checkpoint.mode": "none"}
        short |= {"training.global_batch_size": 2, "training.local_batch_size": 2}
        keys = FLOAT64 | SMALL_HYBRID | {"model.flavor": name} | short
    one = one_process(keys)
    kept = {"kept": (1, {"activation_checkpoint.mode": "none"})}
    for processes, split in ((SPLITS | EXPERT_SPLITS | kept)[split] for split in MIXTURES[name]):
        got = worlds(processes).run(train_on_rank, arguments(corpus, keys, split))[0]
        check_equal(got, one)
    bias = one[2].get("layers.1.mlp.router.selection_bias")
    assert (bias is not None and bool(bias.any())) == (
        name in ("kimi-linear", "lfm2-moe", "ling-3", "nemotron-h")
    )


def test_how_experts_are_balanced(corpus):
    """The configuration's word comes before the model's, and is refused where it means nothing."""

    def moe(name, **keys):
        argv = arguments(
            corpus, {"model.name": name} | {f"training.expert_{k}": v for k, v in keys.items()}
        )
        return Origin.of(load_config(argv)).model_for(build_tokenizer(None)).moe

    assert (moe("kimi-linear").bias_update_rate, moe("qwen3.5").balance_coefficient) == (1e-3, 1e-2)
    assert moe("kimi-linear", bias_update_rate=0.0, balance_coefficient=0.5) == replace(
        moe("kimi-linear"), bias_update_rate=0.0, balance_coefficient=0.5
    )
    assert not any(unbalanced(MODELS[name]["debug"]) for name in ("kimi-linear", "qwen3.5", "lfm2"))
    for name, adapter, words in (
        ("kimi-linear", None, r"loads; .* 0.01 or training.expert_bias_update_rate = 0.001 does"),
        ("kimi-linear", LoraConfig(1, 1.0), "0.01 does"),  # which leave biases as they are
        ("minimax", None, "1 does"),
    ):
        model = MODELS[name]["debug"]
        assert re.search(
            words,
            unbalanced(
                replace(model, adapter=adapter, moe=replace(model.moe, bias_update_rate=0.0))
            ),
        )
    with refused(r"training.expert_balance_coefficient .* has no experts"):
        moe("hybrid", balance_coefficient=0.1)
    with refused(r"training.expert_bias_update_rate .* has no selection bias"):
        moe("qwen3.5", bias_update_rate=0.1)


def poisoned(rank, world_size, argv):
    """A NaN in what rank 1 computes at step 2: the message, whether weights stayed as they were, skipped steps."""
    trainer = Trainer(load_config(argv))
    trainer._next_follows = lambda: False  # a forward that has begun holds gathered parameters
    trainer.train_step()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    after_backward(trainer, lambda loss: loss * (float("nan") if rank == 1 else 1.0))
    message = ""
    try:
        trainer.train_step()
    except NonFinite as error:
        message = str(error)
    same = all(
        torch.equal(_local(a), _local(b))
        for a, b in zip(before, trainer.model.parameters(), strict=True)
    )
    return message, same, trainer.skipped


def test_a_non_finite_loss_never_reaches_the_weights(corpus, worlds):
    keys = {"training.local_batch_size": 2}
    for message, kept, _ in worlds(2).run(poisoned, arguments(corpus, keys)):
        assert "step 2" in message and "rank 1: streams 6, 7." in message and kept
    for message, kept, skipped in worlds(2).run(
        poisoned, arguments(corpus, keys, {"training.on_nonfinite": "skip"})
    ):
        assert message == "" and kept and skipped == 1


def ended(rank, world_size, argv, full):
    """A run that saves each step, slowly or to a full disk, and meets a NaN in its second: the steps of whole
    checkpoints afterwards."""
    trainer = Trainer(load_config(argv))
    after_backward(trainer, lambda loss: loss * (float("nan") if trainer.step == 1 else 1.0))
    write = checkpoint._Writer.write_data

    def slowly(*given):
        time.sleep(0.5)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint._Writer, "write_data", slowly)
        with pytest.raises(NonFinite):
            trainer.train()
        trainer.checkpointer.finish()
    return checkpoint.complete_steps(Path(trainer.config.job.dump_folder) / "checkpoint")


def test_the_last_good_state_reaches_the_disk(corpus, worlds, tmp_path):
    keys = {
        "checkpoint.enable": "true",
        "checkpoint.interval": 1,
        "checkpoint.async_mode": "async",
        "training.local_batch_size": 2,
    }
    for full, steps in ((True, []), (False, [1])):
        (tmp_path / str(full)).mkdir()
        argv = arguments(corpus, keys, {"job.dump_folder": tmp_path / str(full)})
        assert worlds(2).run(ended, argv, full) == [steps, steps]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_begins_early_changes_nothing(processes, corpus, worlds):
    """In bfloat16, with copies of the weights or with FSDP's; losses, and weights after a stop, are the same bit for
    bit, though the next step's forward had begun."""
    keys = SMALL_HYBRID | {
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
        "training.on_nonfinite": "skip",
        "training.local_batch_size": 2 // processes,
        "parallelism.fsdp_reshard_after_forward": "never",
    }
    argv = arguments(corpus, keys)
    runs = [worlds(processes).run(early, argv, goes_on) for goes_on in (True, False)]
    for (losses, weights, begun), (expected, expected_weights, never) in zip(*runs, strict=True):
        assert begun == [True] * 4 + [False] and not any(never)
        assert math.isnan(losses.pop(1)) and math.isnan(expected.pop(1)) and losses == expected
        assert same(weights, expected_weights)


# --- What the host waits for -----------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts the times that a tensor's numbers are asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "cpu"):  # on a CPU they are not dispatched
            self.patch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patch.undo()

    def _counted(self, read):
        def counted(*args, **kwargs):
            self.count += 1
            return read(*args, **kwargs)

        return counted


def reads_of_a_step(rank, world_size, argv):
    """Reads by the trainer in a step, its forward and backward and what is known on the host left out; a control."""
    trainer = Trainer(load_config(argv))
    trainer.train_step()
    passed = trainer.passes.run()
    trainer.passes.run, trainer._next_follows = lambda ask: passed, lambda: False
    trainer.feed.prefetch()
    with Reads() as reads:
        trainer.train_step()
    with Reads() as control:
        x = torch.ones(2)
        x.tolist(), x[0].item(), bool(x[0] > 0), x.cpu()
    return reads.count, control.count


@pytest.mark.parametrize("name", ["hybrid", "kimi-linear"])
def test_the_host_waits_once_in_a_step(name, corpus, worlds):
    keys = {"model.name": name, "training.local_batch_size": 1}
    for reads, control in worlds(2).run(reads_of_a_step, arguments(corpus, keys)):
        assert reads == 1 and control == 4


def slow_disk(rank, world_size, argv, seconds):
    """A run whose rank 0 takes `seconds` to finish a save, and again to finish an export."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Checkpointer, "_commit"), (hf_writing, "_create")):
            patch.setattr(owner, name, delayed(getattr(owner, name), seconds))
        Trainer(load_config(argv)).train()


def delayed(work, seconds):
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return work(*args, **kwargs)

    return slow


def test_ranks_wait_for_a_slow_disk(corpus, worlds, tmp_path):
    """Longer than a collective of training may take after the first step, which is the last."""
    keys = {
        "checkpoint.enable": "true",
        "checkpoint.last_save_in_hf": "true",
        "training.steps": 1,
        "lr_scheduler.warmup_steps": 0,
        "model.name": "kda",
        "training.local_batch_size": 2,
        "job.dump_folder": tmp_path,
        "comm.train_timeout_seconds": 2,
    }
    worlds(2).run(slow_disk, arguments(corpus, keys), 4.0)
    assert read_progress(tmp_path / "checkpoint/step-1").step == 1
    assert (tmp_path / "checkpoint/step-1-hf/config.json").is_file()


# --- On GPUs ---------------------------------------------------------------------------------------------------------


def train_on_gpus(rank, world_size, argv):
    """A whole run with deterministic algorithms; the whole weights after it."""
    be_deterministic()
    try:
        trainer = Trainer(load_config(argv))
        assert trainer.session.device == torch.device("cuda", torch.cuda.current_device())
        trainer.train()
        return {name: p.cpu() for name, p in whole_weights(trainer).items()}
    finally:
        torch.use_deterministic_algorithms(False)


def reported(folder):
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in read_lines(folder / "metrics.jsonl")
    ]


@pytest.mark.cuda(2)
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
@pytest.mark.parametrize("split", ["dp 2", "cp 2", "cp 2 zig-zag", "tp 2, offload"])
def test_resumed_on_two_gpus(split, async_mode, corpus, worlds, tmp_path, one_process):
    """In bfloat16: what is resumed equals what was not interrupted bit by bit, and begins as one process on the CPU."""
    splits = SPLITS | {
        "tp 2, offload": (2, SPLITS["tp 2"][1] | {"training.enable_cpu_offload": "true"})
    }
    keys = splits[split][1] | {
        "training.steps": 8,
        "lr_scheduler.total_steps": 8,
        "metrics.log_freq": 1,
        "checkpoint.enable": "true",
        "checkpoint.interval": 4,
        "checkpoint.async_mode": async_mode,
    }

    def train(folder, steps):
        argv = arguments(
            corpus, keys, {"training.steps": steps, "job.dump_folder": tmp_path / folder}
        )
        (tmp_path / folder).mkdir(exist_ok=True)  # which a run that holds its folder has made
        preflight(load_config(argv), world_size=2)
        return worlds(2, "nccl").run(train_on_gpus, argv)

    whole = train("whole", 8)
    train("parts", 5)
    resumed = train("parts", 8)
    assert reported(tmp_path / "parts") == reported(tmp_path / "whole")
    for a, b in zip(whole, resumed, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    losses, _, _ = one_process({"training.steps": 8})
    assert worst([loss for _, loss, _ in reported(tmp_path / "whole")][:3], losses[:3]) < 5e-3


# --- Errors ----------------------------------------------------------------------------------------------------------
