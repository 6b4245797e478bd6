"""Runs on mixtures: the same losses on any number of processes, and changes by name alone."""

import os
from types import SimpleNamespace

import pytest

from tests.data.conftest import random_documents
from tests.keys import argv_of
from tests.refusals import refused
from titan_linear.config import Config, check_config, difference, load_config
from titan_linear.data import ByteTokenizer, Phase, write_corpus
from titan_linear.run.data import RunData
from titan_linear.run.folder import RunFolder
from titan_linear.run.preflight import preflight
from titan_linear.storage.step_folders import Content, Progress
from titan_linear.train import Trainer


def mixture(folder, **weights):
    parts = (
        f'{{name="{n}", weight={w}, dataset="tokens", dataset_path="{folder / n}"}}'
        for n, w in weights.items()
    )
    return f"[{', '.join(parts)}]"


@pytest.fixture
def folder(tmp_path):
    for n, name in enumerate(["a", "b", "c"]):
        write_corpus(tmp_path / name, random_documents([20 + n] * 50, seed=n), ByteTokenizer())
    return tmp_path


def keys(folder, **more):
    given = {
        "model.pattern": '["attention"]',
        "model.num_layers": 1,
        "training.seq_len": 32,
        "training.dtype": "float64",
        "training.global_batch_size": 4,
        "training.steps": 2,
        "validation.enable": "true",
        "validation.holdout": 0.1,
        "job.dump_folder": folder / "run",
        "lr_scheduler.total_steps": 6,
    }
    return argv_of(given, **more)


def trained(rank, world_size, argv):
    config = load_config(argv)
    if rank == 0:
        preflight(config, world_size)
    trainer, losses = Trainer(config), []
    while trainer.step < trainer.config.training.steps:
        losses.append(trainer.train_step()["loss"])
    trainer.save()
    return [*losses, trainer.validate()], trainer.content


def test_losses_of_mixtures_do_not_depend_on_the_processes(folder, worlds):
    """The losses do not depend on the processes; a run resumes, changes by name, and its checkpoint knows all of it."""

    def run(processes, step, **more):
        return worlds(processes).run(trained, keys(folder, training__steps=step, **more))[0]

    two, three = mixture(folder, a=3, b=1.5), mixture(folder, c=1, b=2)
    alone, _ = run(1, 4, training__mixture=two, job__dump_folder=folder / "alone")
    first, _ = run(2, 2, training__mixture=two)
    resumed, content = run(1, 4, training__mixture=two)
    assert [*first[:-1], *resumed] == pytest.approx(alone, rel=1e-9)
    assert content.mixture == [Phase(0, {"a": 3.0, "b": 1.5})]
    another = load_config(keys(folder, training__steps=6, training__mixture=three))
    with refused(r"at step 4 \('c' added, 'a' left out, 'b': weight 1.5 → 2.0\); restore it, or "):
        preflight(another, 1)
    with refused(r"training\.mixture_from_step = 4"):
        preflight(
            load_config(
                keys(
                    folder,
                    training__steps=6,
                    training__mixture=three,
                    training__mixture_from_step=2,
                )
            ),
            1,
        )
    _, content = run(2, 5, training__mixture=three, training__mixture_from_step=4)
    assert content.mixture[1] == Phase(16, {"c": 1.0, "b": 2.0}) and set(content.corpora) == set(
        "abc"
    )
    os.rename(folder / "a", folder / "elsewhere")  # it is not needed any more
    _, content = run(1, 6, training__mixture=three, training__mixture_from_step=4)
    assert len(content.mixture) == 2
    os.rename(folder / "b", folder / "was b")
    write_corpus(folder / "b", random_documents([7] * 50), ByteTokenizer())
    with refused(r"source 'b' is another corpus than .*; restore it, or give a new source a name"):
        preflight(
            load_config(
                keys(
                    folder, training__steps=7, lr_scheduler__total_steps=7, training__mixture=three
                )
            ),
            1,
        )


def test_a_change_twice_at_a_step_is_the_last_one():
    phases = [Phase(0, {"a": 1}), Phase(16, {"b": 1})]
    progress = Progress(
        step=4, content=Content(tokenizer="t", model="m", corpora={}, mixture=phases)
    )
    data = RunData(Config(), ByteTokenizer())
    source = SimpleNamespace(name="c", weight=1.0)
    data.training = SimpleNamespace(mixture=[source], mixture_from_step=4, global_batch_size=4)
    assert data.mixture_phases(progress) == [
        Phase(0, {"a": 1}),
        Phase(16, {"c": 1.0}),
    ]


def test_a_mixture_says_its_shares_and_epochs(folder, capsys):
    """In all steps, of 2 × 4 streams of 32 tokens; a has 50 documents of 20."""
    argv = keys(
        folder, **{"training.mixture": mixture(folder, a=3, b=1), "validation.enable": "false"}
    )
    preflight(config := load_config(argv), 1)
    streams, _ = RunData(config, ByteTokenizer()).streams(None)
    of_a = [streams.source(i)[0] for i in range(2 * 4)].count("a")
    said = f"\nmixture: a {of_a / 8:.1%} ({of_a * 32 / 1000:.3g} epochs of 1,000 tokens), b {1 - of_a / 8:.1%} ("
    assert said in capsys.readouterr().out


WEB = '{name="web", weight=1, dataset="jsonl", dataset_path="x"}'


@pytest.mark.parametrize(
    "value, message",
    [
        ("[3]", r"training.mixture.0 = 3 must be a table, \{name"),
        ("3", r"training.mixture = 3 must be a list, \[\{name"),
        ("nothing", "training.mixture = 'nothing' must be a list"),
        (
            '[{name="web"}]',
            r"(?s)training.mixture.0.weight is missing; give it.*mixture.0.dataset is missing",
        ),
        (
            f"[{WEB.replace('}', ', wieght=3}')}]",
            "wieght is not a key; a table of training.mixture has name, w",
        ),
        (
            f"[{WEB.replace('weight=1', 'weight=0')}]",
            "training.mixture.0.weight = 0 must be greater than 0",
        ),
        (f"[{WEB}, {WEB}]", "two sources with name = 'web'; give each"),
        (f"[{WEB.replace('jsonl', 'stdlib')}]", "source 'web': dataset_path = 'x' is not used by"),
        (f"[{WEB.replace('x', '')}]", "source 'web': dataset = 'jsonl' needs .* dataset_path"),
        (
            f"[{WEB}, {WEB.replace('web', 'rare').replace('=1', '=1e-6')}]",
            "source 'rare': weight = 1e-06 is less than",
        ),
    ],
)
def test_bad_mixtures_are_refused(value, message):
    with refused(message):
        check_config(load_config(["--training.mixture", value]), 1)


@pytest.mark.parametrize(
    "key", ["training.dataset=text", "training.dataset_path=y", "validation.dataset_path=y"]
)
def test_what_a_mixture_leaves_unused(key):
    with refused(rf"{key.partition('=')[0]} = .* is not used beside training.mixture"):
        check_config(
            load_config(["--training.mixture", f"[{WEB}]", "--validation.enable=true", f"--{key}"]),
            1,
        )


def test_changes_of_tables_are_said_by_name():
    a, b, c = ({"name": name, "weight": 1.0, "files": "*"} for name in "abc")
    assert (
        difference([a, b], [b | {"weight": 3.0}, c])
        == "'c' added, 'a' left out, 'b': weight 1.0 → 3.0"
    )
    assert difference([a, b], [b, a]) == "in the order b, a" and difference([], [a]) == "'a' added"
    for old, new in (([], [{"until_step": 3}]), ([{"until_step": 3}], []), (1, 2)):
        assert difference(old, new) == f"{old!r} → {new!r}"


def test_the_folder_of_a_run(tmp_path, monkeypatch):
    """Paths are written from the root; a run keeps its mixture, or its one corpus."""
    monkeypatch.chdir(tmp_path)
    config = load_config(["--job.dump_folder=run", "--training.mixture", f"[{WEB}]"])
    os.mkdir("run")
    RunFolder(config).write_config()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    stored = load_config(["--job.config_file", "run/config.toml"])
    assert stored.training.mixture[0].dataset_path == f"{tmp_path}/x"
    assert RunFolder(config).check_resume() == RunFolder(stored).check_resume() == []
    moved = load_config(
        ["--job.dump_folder=run", "--training.mixture", f"[{WEB.replace('x', 'y')}]"]
    )
    # The checkpoint knows the content.
    assert RunFolder(moved).check_resume() == [
        f"training.mixture: 'web': dataset_path '{tmp_path}/x' → '{tmp_path}/y'"
    ]
    with refused(r"training.mixture: 'web' left out\n"):
        RunFolder(load_config(["--job.dump_folder=run"])).check_resume()
