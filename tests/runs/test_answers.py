"""Runs that learn answers alone: the same losses on any number of processes, and after a restart."""

import pytest
import torch

from tests.data.corpus.chat_tokenizer import UNMARKED, make_tokenizer
from tests.keys import argv_of
from tests.records import write_lines
from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.distributed.parts import local_tensor
from titan_linear.run.preflight import preflight
from titan_linear.train import Trainer


def trained(rank, world_size, argv):
    trainer = Trainer(load_config(argv))
    begins_from, losses = trainer.step, []
    while trainer.step < trainer.config.training.steps:
        losses.append(trainer.train_step()["loss"])
        trainer.save()
    return begins_from, [*losses, trainer.validate()]


def test_losses_of_answers_do_not_depend_on_the_processes(tmp_path, worlds):
    """Losses of answers do not depend on the processes, and a run resumes in the middle."""
    make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    words = ["four", "eight", "sixteen", "two and a half", "a lot"]
    chats = [
        {
            "messages": [
                m
                for i in range(n % 3 + 1)
                for m in (
                    {"role": "user", "content": f"{n} and {i}?"},
                    {"role": "assistant", "content": words[(n + i) % 5]},
                )
            ]
        }
        for n in range(60)
    ]
    keys = {
        "training.dataset": "jsonl",
        "training.dataset_path": write_lines(tmp_path / "chats.jsonl", chats),
        "training.dataset_format": "messages",
        "model.tokenizer_path": tmp_path / "tokenizer",
        "training.seq_len": 64,
        "training.dtype": "float64",
        "training.global_batch_size": 4,
        "training.steps": 3,
        "validation.enable": "true",
        "validation.holdout": 0.2,
    }

    def run(processes, name, **more):
        return worlds(processes).run(
            trained, argv_of(keys, job__dump_folder=tmp_path / name, **more)
        )

    ((_, alone),) = run(1, "alone")
    for _, losses in run(2, "cp", parallelism__context_parallel_degree=2):
        assert losses == pytest.approx(alone, rel=1e-9)
    run(1, "resumed", training__steps=1, lr_scheduler__total_steps=3)
    for begins_from, losses in run(2, "resumed", lr_scheduler__total_steps=3):  # dp 2
        assert begins_from == 1 and losses == pytest.approx(alone[1:], rel=1e-9)


def long_prompts(folder, **more):
    """The arguments of a run in most of whose streams there is no answer."""
    records = [{"prompt": f"{n}" + " and so on" * 30, "completion": "."} for n in range(20)]
    keys = {
        "model.name": "kda",
        "training.dataset": "jsonl",
        "training.dataset_path": write_lines(folder / "long", records),
        "training.dataset_format": "completion",
        "training.seq_len": 32,
        "training.global_batch_size": 1,
        "job.dump_folder": folder / "run",
        "checkpoint.enable": "false",
        "lr_scheduler.warmup_steps": 0,
    }
    return argv_of(keys, **more)


def steps_without_labels(rank, world_size, argv):
    trainer = Trainer(load_config(argv))
    # now: a forward that has begun shows others
    weights = [local_tensor(p).detach() for p in trainer.model.parameters()]
    numbers, moved = [], []
    for _ in range(trainer.config.training.steps):
        before = [p.detach().clone() for p in weights]
        numbers.append(trainer.train_step())
        moved.append(not all(map(torch.equal, before, weights)))
    losses = [line["loss"] for line in numbers]
    assert losses[0] is None and not moved[0], "the run has to begin with such a step"
    learnt = [loss for loss in losses if loss is not None]
    assert all(loss > 0 for loss in learnt) and list(trainer.spikes.outliers.last) == learnt != []
    assert all((line["grad_norm"] == 0) == (line["loss"] is None) for line in numbers)
    assert all(p.isfinite().all() for p in weights)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_without_a_label_has_no_loss_and_no_gradient(processes, tmp_path, worlds):
    more = {
        "optimizer.weight_decay": 0.0,
        "training.steps": 24,
        "parallelism.context_parallel_degree": processes,
    }
    worlds(processes).run(steps_without_labels, long_prompts(tmp_path, **more))


def test_a_validation_without_a_label_is_refused(tmp_path):
    """Its loss would be 0 / 0."""
    keys = {"validation.enable": "true", "validation.holdout": 0.2}
    message = r"validation.steps = 1: no token in the first 1 of .* held-out streams is one to learn, .*raise it"
    with refused(message):
        preflight(load_config(long_prompts(tmp_path, **keys, **{"validation.steps": 1})), 1)
    preflight(load_config(long_prompts(tmp_path, **keys)), 1)
