"""A signal with little time left: what was begun is given up, and the run goes on from there as if nothing had been."""

import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.records import read_lines
from tests.steps import after_backward
from tests.training import arguments
from titan_linear.config import load_config
from titan_linear.distributed.process import StopSignal
from titan_linear.hooks.grace import Grace, StepAbandoned
from titan_linear.step.cut import BatchSharding
from titan_linear.storage.tensors import holds_optimizer
from titan_linear.train import Trainer

KEYS = {
    "model.name": "kda",
    "model.num_layers": 1,
    "training.steps": 3,
    "training.local_batch_size": 1,
    "training.seq_len": 32,
    "metrics.log_freq": 1,
    "checkpoint.enable": "true",
    "checkpoint.grace_seconds": 3000,
}


def train_on_rank(rank, world_size, argv, step_seconds):
    """A run in which rank 1 gets SIGTERM in the first micro-step of step 2, if steps take any time; the signal that all
    ranks heed."""
    trainer = Trainer(load_config(argv))

    def signalled(loss):
        if step_seconds and trainer.step == 1 and rank == 1:
            trainer.stop.received = signal.SIGTERM
        trainer.grace.step_seconds = step_seconds
        return loss

    after_backward(trainer, signalled)
    trainer.train()
    return trainer.stop.agreed


def reported(folder):
    lines = read_lines(folder / "metrics.jsonl")
    return [(line["step"], line["loss"], line.get("grad_norm")) for line in lines if "loss" in line]


def test_a_step_is_completed_if_there_is_time(corpus, worlds, tmp_path):
    """One that is not leaves no trace in the run that goes on."""
    runs = {"alone": 0.0, "fits": 1.0, "does not": 10000.0, "does not, ": 0.0}
    reached = {"alone": 3, "fits": 2, "does not": 1, "does not, ": 3}
    for name, seconds in runs.items():
        folder = tmp_path / name.rstrip(", ")
        folder.mkdir(exist_ok=True)
        argv = arguments(corpus, KEYS, {"job.dump_folder": folder})
        signals = worlds(2).run(train_on_rank, argv, seconds)
        assert signals == [signal.SIGTERM if seconds else 0] * 2
        assert (
            max(path.name for path in (folder / "checkpoint").iterdir()) == f"step-{reached[name]}"
        )
    assert reported(tmp_path / "does not") == reported(tmp_path / "alone")


def validate_on_rank(rank, world_size, argv):
    """Rank 1 gets SIGTERM in a validation; the signal that all ranks heed, and the step they reach."""
    trainer = Trainer(load_config(argv))

    class Signalled(BatchSharding):
        def __call__(self, batch):
            trainer.stop.received = signal.SIGTERM * rank
            return super().__call__(batch)

    cut = Signalled(**vars(trainer.feed.cut))  # the feed has its own
    trainer.session.sharding = cut
    trainer.train()
    return trainer.stop.agreed, trainer.step


@pytest.mark.parametrize("last", [False, True])
def test_a_validation_is_given_up(last, corpus, worlds, tmp_path):
    """After the last step what was saved before it stays, weights only."""
    validation = {"validation.enable": "true", "validation.freq": 2, "validation.holdout": 0.2}
    more = {"training.steps": 2, "checkpoint.last_save_model_only": "true"} if last else {}
    argv = arguments(corpus, KEYS, validation, more, {"job.dump_folder": tmp_path})
    assert worlds(2).run(validate_on_rank, argv) == [(signal.SIGTERM, 2)] * 2
    assert (tmp_path / "checkpoint/step-2/manifest.json").exists()
    assert holds_optimizer(tmp_path / "checkpoint/step-2") != last
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-2"]
    assert "validation_loss" not in (tmp_path / "metrics.jsonl").read_text()


def test_after_a_signal_no_validation_begins(corpus, worlds, tmp_path):
    """It came in the step after which one was due, and there was time to complete that step."""
    validation = {"validation.enable": "true", "validation.freq": 2, "validation.holdout": 0.2}
    argv = arguments(corpus, KEYS, validation, {"job.dump_folder": tmp_path})
    assert worlds(2).run(train_on_rank, argv, 1.0) == [signal.SIGTERM] * 2
    assert (tmp_path / "checkpoint/step-2/manifest.json").exists()
    assert "validation_loss" not in (tmp_path / "metrics.jsonl").read_text()


def decide(rank, world_size):
    """What is decided of a signal on rank 1 before micro-step `done` of a step of 40 s, a save taking 15."""
    said = []
    patch = pytest.MonkeyPatch()
    patch.setattr("titan_linear.hooks.grace.time", SimpleNamespace(monotonic=lambda: 0.0))
    for seconds, done, save in (
        (50, 2, 15.0),
        (60, 2, 15.0),
        (60, 0, 15.0),
        (0, 2, 15.0),
        (81, 2, 0.0),
        (79, 2, 0.0),
    ):
        stop = StopSignal()
        grace = Grace(seconds, stop, dist.group.WORLD, 4, lambda save=save: save)
        grace.step_seconds = 40.0
        said.append(grace.warning())
        grace.before_step(1)
        grace.ask(done)
        stop.received = signal.SIGTERM * rank
        try:
            grace.ask(done)
            said.append(f"completed {stop.agreed}")
        except StepAbandoned as why:
            said.append(f"given up {stop.agreed}: {why}")
    patch.undo()
    return said


def test_decisions_are_of_all_ranks(worlds):
    no, save = "completed 0", "given up 15: the rest of the step begun would take 40 s and a save"
    for said in worlds(2).run(decide):
        assert said[1::2] == [f"{save} 15 s", no, "given up 15: ", no, no, f"{save} 40 s"]
        assert said[::2] == [""] * 6


def test_a_warning_once_where_a_save_may_come_too_late():
    grace = Grace(20, StopSignal(), None, 4, lambda: 0.0)
    grace.before_step(1)
    grace.after_step(None)
    assert grace.warning() == ""  # the first step compiles
    grace.step_seconds = 44.0
    assert (
        "a micro-step takes 11 s and a save 10 s (assumed" in grace.warning()
        and not grace.warning()
    )
