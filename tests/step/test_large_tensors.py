"""AdamW's path of large tensors in whole runs, on a CPU: tensors are large from FROM elements on, and Triton's
interpreter runs the kernel."""

import math
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.ops.inputs import same
from tests.training import SMALL_HYBRID, arguments, trainer_of
from titan_linear.config import Optimizer, load_config
from titan_linear.distributed.parts import local_tensor
from titan_linear.ops.triton import adamw as kernels
from titan_linear.proof import resume
from titan_linear.proof.doctor import one_process
from titan_linear.proof.subject import subject_of
from titan_linear.step import optimizer as optimizer_of_runs
from titan_linear.step.optimizer import LARGE, ComputeCopies, StepNumbers, build_optimizer, is_large

FROM = 64
ROUNDINGS = 16  # of 2⁻²⁴ each, most that an element's update takes
ONE_LAYER = SMALL_HYBRID | {"model.num_layers": 1, "model.pattern": '["gdn"]'}
KEYS = {
    "training.steps": 3,
    "training.seq_len": 32,
    "training.global_batch_size": 2,
    "training.local_batch_size": 2,
    "training.max_norm": 0.1,  # so that all steps are clipped
    "training.mixed_precision_param": "bfloat16",
    "lr_scheduler.warmup_steps": 0,
    "checkpoint.enable": "true",
    "metrics.telemetry_freq": 1,
}
ADAPTERS = {
    "adapter.enable": "true",
    "adapter.rank": 4,
    "adapter.train_extra": '["*norm", "head"]',
}
MICRO_STEPS = {"training.local_batch_size": 1}
RUNS = {
    "one process": (1, ONE_LAYER),
    "accumulation": (1, ONE_LAYER | MICRO_STEPS),
    "offload": (1, ONE_LAYER | {"training.enable_cpu_offload": "true"}),
    "Muon": (1, ONE_LAYER | {"optimizer.name": "muon"}),
    "LoRA": (1, ONE_LAYER | ADAPTERS),
    "experts": (1, {"model.name": "hybrid", "model.flavor": "experts"}),
    "dp 2": (2, ONE_LAYER | MICRO_STEPS),
    "HSDP": (2, ONE_LAYER | MICRO_STEPS | {"parallelism.data_parallel_replicate_degree": 2}),
    "cp 2": (2, ONE_LAYER | {"parallelism.context_parallel_degree": 2}),
}


@contextmanager
def large_tensors():
    """Counts launches of the kernel for large tensors, by whether they wrote a copy."""
    launches, adamw = Counter(), kernels.adamw

    def rounded(p, copy, *rest):
        adamw(p, copy, *rest)
        launches[copy is not None] += 1
        if copy is not None:
            copy.data.copy_(p)  # the interpreter cuts bfloat16 off, where a GPU rounds

    def large(p):
        return p.dtype == torch.float32 and local_tensor(p).numel() >= FROM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "adamw", rounded)
        patch.setattr(optimizer_of_runs, "is_large", large)
        yield launches


def tensors(trainer):
    """This rank's parts of weights and optimizer states."""
    found = {}
    for name, p in trainer.model.named_parameters():
        found[name] = p
        found |= {
            f"{name} {key}": x for key, x in trainer.session.optimizer.state.get(p, {}).items()
        }
    return {name: local_tensor(x).detach().clone() for name, x in found.items()}


def steps(rank, world_size, argv, large, last):
    """A run up to step `last`, which saves after the second one: tensors after the first of these steps and after the
    last, and the last one's numbers."""
    with large_tensors() if large else nullcontext(Counter()) as launches:
        trainer, seen = trainer_of(argv), []
        launches.clear()  # of torch's step that makes the state
        while trainer.step < last:
            numbers = trainer.train_step()
            seen.append(tensors(trainer))
            if trainer.step == 2:
                trainer.save()
        trainer.checkpointer.wait()
        trainer.passes.drop()
    copied = isinstance(trainer.passes.precision, ComputeCopies)
    assert bool(launches[copied]) == large and not launches[not copied]
    return seen[0], seen[-1], (numbers["loss"], numbers["grad_norm"], str(trainer.telemetry.seen))


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_the_uninterrupted_one(name, corpus, worlds, tmp_path):
    """Bit for bit; and its first update is that of torch's AdamW but for roundings."""
    processes, keys = RUNS[name]
    runs = {}
    for run, large, last in (("by torch", False, 1), ("whole", True, 3), ("resumed", True, 3)):
        folder = {"job.dump_folder": tmp_path / str(large)}
        argv = arguments(corpus, KEYS, keys, folder)
        runs[run] = worlds(processes).run(steps, argv, large, last)
    rate = load_config(argv).optimizer.lr
    for theirs, whole, resumed in zip(*runs.values(), strict=True):
        assert same(whole[1], resumed[1]) and whole[2] == resumed[2]
        for tensor, want in theirs[0].items():
            size = want.abs() + (rate if " " not in tensor else 0)
            off = (whole[0][tensor] - want).abs()
            assert (off <= ROUNDINGS * 2**-24 * size + 1e-38).all(), (tensor, off.max())


def test_the_doctors_resume_holds(corpus, tmp_path, monkeypatch):
    """It takes the trainer's own steps."""
    monkeypatch.setattr(resume, "BEFORE", 1)
    keys = KEYS | {"model.name": "gdn", "model.num_layers": 1, "job.dump_folder": tmp_path}
    subject = subject_of(load_config(arguments(corpus, keys)))
    with large_tensors() as launches, one_process():
        findings = list(resume.resume(subject))
    assert len(findings) == 5 and all(finding.holds for finding in findings), findings
    assert launches[True] > launches[False]  # one step makes the state that is loaded


# --- The optimizer alone ---------------------------------------------------------------------------------------------


def layer():
    """A large tensor and a small one."""
    torch.manual_seed(0)
    return nn.Linear(FROM, 2)


def stepped(model, optimizer, *, loss=1.0, copies=None):
    """An update by gradients of ones, which are not clipped."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    numbers = StepNumbers(*torch.tensor([loss, 0.5, 0.0], dtype=torch.float64))
    optimizer_of_runs.update(optimizer, numbers, lr=0.1, max_norm=1.0, copies=copies)


def made_anew(copies, model, monkeypatch):
    """How many copies are, before they are used; all must then be their parameters, rounded."""
    made, copy = [], torch._foreach_copy_
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda to, of: made.extend(to) or copy(to, of))
        with copies:
            now = [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, now, (p.bfloat16() for p in model.parameters())))
    return len(made)


def test_no_copy_is_stale(monkeypatch):
    """Whether the update is given the copies or not, and whatever else changes the weights."""
    model = layer()
    optimizer = build_optimizer(model, Optimizer())
    copies, others = ComputeCopies(model, torch.bfloat16), ComputeCopies(model, torch.bfloat16)

    def used():
        return made_anew(copies, model, monkeypatch), made_anew(others, model, monkeypatch)

    with large_tensors() as launches:
        assert used() == (2, 2) and used() == (0, 0)
        stepped(model, optimizer, copies=copies)
        assert used() == (1, 2)
        stepped(model, optimizer, loss=math.nan, copies=copies)
        assert used() == (1, 2) and launches == {True: 2}
        stepped(model, optimizer)
        assert used() == (2, 2)
        # A skipped step writes no copy, so one that was out of date stays so.
        model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()})
        stepped(model, optimizer, loss=math.nan, copies=copies)
        assert used() == (2, 2)


@pytest.mark.parametrize("large", [False, True])
def test_a_step_without_arguments(large):
    """It is not clipped; and torch makes the state by one, with the weights as they were."""
    with large_tensors() if large else nullcontext():
        model, same_model = layer(), layer()
        optimizer, other = (build_optimizer(m, Optimizer()) for m in (model, same_model))
        state = get_optimizer_state_dict(model, optimizer)["state"]
        assert state.keys() == {"weight", "bias"}
        for name, p in model.named_parameters():
            moments = state[name]
            assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert not moments["exp_avg"].any() and not moments["exp_avg_sq"].any()
            assert torch.equal(p, same_model.get_parameter(name))
            moments["step"].zero_()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.1
        optimizer.step()
        stepped(same_model, other)
    assert all(map(torch.equal, model.parameters(), same_model.parameters()))


def test_which_tensors_are_large():
    """On a GPU, in float32, from LARGE elements on."""
    kinds = ("cuda", torch.float32, 0), ("cuda", torch.float32, -1)
    kinds += ("cuda", torch.bfloat16, 0), ("cpu", torch.float32, 0)
    with FakeTensorMode():
        tensors = [torch.empty(LARGE + n, dtype=dtype, device=at) for at, dtype, n in kinds]
        assert list(map(is_large, tensors)) == [True, False, False, False]
