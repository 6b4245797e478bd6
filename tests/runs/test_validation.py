"""Validation: the same loss on any number of processes."""

import pytest

from tests.keys import argv_of
from tests.records import write_texts
from titan_linear.config import load_config
from titan_linear.train import Trainer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    texts = [
        " ".join(["def", "return", "self", "import"][i % (n % 4 + 1)] for i in range(n % 37))
        for n in range(100)
    ]
    write_texts(file, (f"{n} {text}" for n, text in enumerate(texts)))
    return file


def validated(rank, world_size, argv):
    return Trainer(load_config(argv)).validate()


@pytest.mark.parametrize("steps", [5, -1])
def test_the_loss_does_not_depend_on_the_processes(steps, corpus, worlds):
    keys = {
        "training.dataset": "jsonl",
        "training.dataset_path": corpus,
        "training.seq_len": 64,
        "training.dtype": "float64",
        "job.dump_folder": corpus.parent / "run",
        "checkpoint.enable": "false",
        "validation.enable": "true",
        "validation.holdout": 0.2,
        "validation.steps": steps,
    }

    def losses(processes, **more):
        return worlds(processes).run(validated, argv_of(keys, **more))

    (alone,) = losses(1)
    for others in (
        losses(2),
        losses(2, validation__local_batch_size=2),
        losses(2, parallelism__context_parallel_degree=2),
        losses(2, parallelism__tensor_parallel_degree=2),
    ):
        assert others == pytest.approx([alone, alone], rel=1e-12)


class Broken(RuntimeError):
    pass


def breaking_on_rank(rank, world_size, argv, method):
    """A run that fails in this method at its first validation, after step 2; the checkpoints that are whole then."""
    trainer = Trainer(load_config(argv))

    def fail(*_):
        raise Broken

    setattr(trainer.evaluation, method, fail)
    with pytest.raises(Broken):
        trainer.train()
    trainer.checkpointer.finish()
    return [path.parent.name for path in trainer.checkpointer.folder.glob("step-*/manifest.json")]


@pytest.mark.parametrize(
    "method, mode", [("validate", "disabled"), ("validate", "async"), ("text", "disabled")]
)
def test_an_error_while_validating_costs_no_steps(method, mode, corpus, worlds, tmp_path):
    """Of a step after which a save is due too."""
    keys = {
        "model.name": "kda",
        "training.dataset": "jsonl",
        "training.dataset_path": corpus,
        "training.seq_len": 32,
        "training.global_batch_size": 1,
        "training.steps": 4,
        "lr_scheduler.warmup_steps": 1,
        "job.dump_folder": tmp_path,
        "checkpoint.interval": 2,
        "checkpoint.async_mode": mode,
        "validation.enable": "true",
        "validation.freq": 2,
        "validation.holdout": 0.2,
        "validation.steps": 1,
        "validation.sample_tokens": 2,
        "metrics.enable_tensorboard": "false",
    }
    assert worlds(1).run(breaking_on_rank, argv_of(keys), method) == [["step-2"]]
