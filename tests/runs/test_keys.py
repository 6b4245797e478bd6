"""Whole runs follow keys that no other test of runs is about."""

from datetime import timedelta

import pytest

from tests.training import arguments
from titan_linear import train
from titan_linear.config import load_config

SHORT = {"model.name": "kda", "training.steps": 1, "lr_scheduler.warmup_steps": 0}


def built(rank, world_size, argv):
    """Threads that prefetch, whether saves are read back, how far outliers are, and what texts of validations begin
    with."""
    trainer = train.Trainer(load_config(argv))
    prompts = []
    trainer.evaluation.text = lambda prompt, tokens: prompts.append((prompt, tokens)) or ""
    trainer.train()
    sigmas = trainer.spikes.outliers.sigmas
    return trainer.loader.num_workers, trainer.checkpointer.verify, sigmas, prompts[0]


def test_a_run_is_built_from_its_keys(corpus, worlds, tmp_path):
    keys = {
        "job.dump_folder": tmp_path,
        "training.num_workers": 2,
        "checkpoint.enable": "true",
        "checkpoint.verify": "false",
        "metrics.spike_sigmas": 2.5,
        "validation.enable": "true",
        "validation.freq": 1,
        "validation.steps": 1,
        "validation.sample_prompt": "import",
        "validation.sample_tokens": 3,
    }
    (found,) = worlds(1).run(built, arguments(corpus, SHORT, keys))
    assert found == (2, False, 2.5, ("import", 3))


class Joined(Exception):
    pass


@pytest.mark.parametrize("deterministic", [False, True])
def test_ranks_join_as_their_keys_say(deterministic, monkeypatch):
    done = []

    def join(timeout):
        done.append(timeout)
        raise Joined

    monkeypatch.setattr(train, "be_deterministic", lambda: done.append("deterministic"))
    monkeypatch.setattr(train, "process_group", join)
    keys = [f"--debug.deterministic={str(deterministic).lower()}", "--comm.init_timeout_seconds=7"]
    with pytest.raises(Joined):
        train.join(load_config(keys))
    assert done == ["deterministic"] * deterministic + [timedelta(seconds=7)]
