"""A run that moves: other paths to the same content, a copied config.toml, a folder begun anew."""

import contextlib
import io
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.keys import argv_of
from tests.records import read_lines, write_texts
from tests.refusals import exit_of, own_handlers, refused
from titan_linear.config import check_config, load_config
from titan_linear.run import launch
from titan_linear.run.console import finished, unwarmed
from titan_linear.run.folder import RunFolder
from titan_linear.run.preflight import preflight
from titan_linear.train import Trainer

ROOT = Path(__file__).parents[2]


def run(folder, *overrides):
    return load_config([f"--job.dump_folder={folder}", *overrides])


def trained(folder, *overrides):
    """A folder whose run has logged step 3 of 3."""
    folder.mkdir()
    config = run(folder, "--training.steps=3", *overrides)
    RunFolder(config).write_config()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n')
    (folder / "manifest.json").write_text("{}")
    return config


def save(folder, step):
    (folder / f"checkpoint/step-{step}").mkdir(parents=True)
    (folder / f"checkpoint/step-{step}/manifest.json").write_text("{}")


def test_paths_are_written_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [
        "--training.dataset=jsonl",
        "--training.dataset_path=data/*.jsonl, more",
        "--model.tokenizer_path=t/tokenizer.json",
        "--checkpoint.initial_load_path=~/old",
        "--validation.dataset_path=held",
    ]
    config = trained(Path("a run"), *keys)
    stored = load_config(["--job.config_file", "a run/config.toml"])
    assert stored.job.dump_folder == f"{tmp_path}/a run" and stored.model.hf_assets_path == ""
    assert stored.training.dataset_path == f"{tmp_path}/data/*.jsonl,{tmp_path}/more"
    assert stored.model.tokenizer_path == f"{tmp_path}/t/tokenizer.json"
    assert stored.checkpoint.initial_load_path == os.path.expanduser("~/old")
    assert RunFolder(config).check_resume() == []  # the same, said from here
    monkeypatch.chdir("/")
    assert RunFolder(stored).check_resume() == []
    in_bytes = trained(
        tmp_path / "b",
        "--training.dataset=jsonl",
        "--training.dataset_path=x",
        "--model.tokenizer_path=bytes",
    )
    stored = load_config(["--job.config_file", f"{tmp_path}/b/config.toml"])
    assert in_bytes.model.tokenizer_path == stored.model.tokenizer_path == "bytes"  # no path


def test_content_may_move_and_nothing_else(tmp_path):
    keys = [
        "--training.dataset=jsonl",
        "--training.dataset_path=/a/x",
        "--model.tokenizer_path=/a/t",
    ]
    trained(tmp_path / "run", *keys)
    moved = [
        keys[0],
        "--training.dataset_path=/b/x",
        "--model.tokenizer_path=/b/t",
        "--training.steps=3",
    ]
    assert RunFolder(run(tmp_path / "run", *moved)).check_resume() == [
        "model.tokenizer_path: '/a/t' → '/b/t'",
        "training.dataset_path: '/a/x' → '/b/x'",
    ]
    with refused(r"optimizer.lr: .* 1.0\n.* or begin again here: job.start_anew = true"):
        RunFolder(run(tmp_path / "run", *moved, "--optimizer.lr=1")).check_resume()
    (tmp_path / "run/checkpoint/step-3").mkdir(parents=True)
    (tmp_path / "run/checkpoint/step-3/manifest.json").touch()
    with refused(r"optimizer.lr: .* 1.0\n.* whose checkpoint.initial_load_path may be this one"):
        RunFolder(run(tmp_path / "run", *moved, "--optimizer.lr=1")).check_resume()
    for key in ("model.tokenizer_path", "training.dataset_path"):
        with refused(rf"{key}: '/a/.' → ''"):
            RunFolder(run(tmp_path / "run", *moved, f"--{key}=")).check_resume()
    with refused(r"validation.dataset_path: '' → '/v'"):  # it would change the training split
        RunFolder(run(tmp_path / "run", *moved, "--validation.dataset_path=/v")).check_resume()


def test_a_copied_configuration_says_where_it_writes(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    trained(folder)
    elsewhere = shutil.copytree(folder, tmp_path / "moved")
    copy = shutil.copyfile(folder / "config.toml", tmp_path / "mine.toml")

    def said(file, *overrides):
        return RunFolder(
            load_config(["--job.config_file", str(file), *overrides])
        ).copied_configuration

    assert said(folder / "config.toml") == ""
    assert f"run in '{folder}', and this start writes there; --job.dump_folder FOLDER" in said(copy)
    monkeypatch.setenv("HOME", str(tmp_path))
    # `--job.config_file=~/mine.toml`: no shell has read the ~
    assert said(Path("~/mine.toml")) == said(copy)
    assert said(copy, "--job.dump_folder=outputs/other") == ""
    assert said(elsewhere / "config.toml").endswith(
        f"; --job.dump_folder '{elsewhere}' resumes where it lies"
    )
    assert said(elsewhere / "config.toml", f"--job.dump_folder={elsewhere}") == ""
    for config in ROOT.glob("train_configs/*.toml"):
        assert said(config) == ""
    os.mkfifo(pipe := tmp_path / "pipe")  # which can be read once
    assert (
        RunFolder(load_config([]).changed({"job.config_file": str(pipe)})).copied_configuration
        == ""
    )


def test_a_run_without_checkpoints_can_be_begun_anew(tmp_path):
    folder = tmp_path / "run"
    config = trained(folder)
    assert (
        RunFolder(config).finished_without_checkpoint
        and not RunFolder(run(folder, "--training.steps=4")).finished_without_checkpoint
    )
    other = ["--training.steps=3", "--model.name=kda"]
    with refused(r"begin again here: job.start_anew = true \(it deletes nothing\)"):
        RunFolder(run(folder, *other)).check_resume()
    anew = run(folder, *other, "--job.start_anew=true")
    files = (
        "profile_traces/rank0_step2.json",
        "flight_recorder/rank_0",
        "memory_snapshots/a/b",
        "tb/run/events",
    )
    for name in files:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    assert RunFolder(anew).check_resume() == [] and RunFolder(anew).starts_anew
    RunFolder(anew).set_run_aside()
    RunFolder(anew).write_config()
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["config.toml"]
    (aside,) = folder.glob("abandoned-*")
    left = {str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()}
    assert left == {"config.toml", "manifest.json", "metrics.jsonl", *files}
    assert not load_config(["--job.config_file", str(folder / "config.toml")]).job.start_anew


@pytest.mark.parametrize("traces", ["tb", "tb/profile", "./both", "a/t"])
def test_traces_anywhere_in_the_folder_are_set_aside(traces, tmp_path):
    """Among TensorBoard's files, beside snapshots, below another folder."""
    folder, files = (
        tmp_path / "run",
        {f"{os.path.normpath(traces)}/t.json", "both/s.pickle", "tb/run/events"},
    )
    trained(folder)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    keys = (
        f"--profiling.save_traces_folder={traces}",
        "--profiling.save_memory_snapshot_folder=both",
    )
    RunFolder(run(folder, *keys, "--job.start_anew=true")).set_run_aside()
    (aside,) = folder.glob("abandoned-*")
    left = {path for path in folder.rglob("*") if path.is_file()}
    assert left == {
        aside / name for name in ("config.toml", "manifest.json", "metrics.jsonl", *files)
    }


@pytest.mark.parametrize("key", ["save_traces_folder", "save_memory_snapshot_folder"])
@pytest.mark.parametrize("name", [".", "..", "../shared", "a/../.."])
def test_traces_belong_to_the_run(key, name, tmp_path):
    with refused(rf"profiling\.{key} = .* must be a folder inside job\.dump_folder; give"):
        check_config(run(tmp_path, f"--profiling.{key}={name}"), 1)


def test_a_run_with_a_checkpoint_is_not_begun_anew(tmp_path):
    folder = tmp_path / "run"
    config = trained(folder)
    save(folder, 2)
    assert (
        not RunFolder(config).finished_without_checkpoint
        and not RunFolder(run(folder, "--job.start_anew=true")).starts_anew
    )
    with refused(r"another job.dump_folder, whose checkpoint"):
        RunFolder(
            run(folder, "--training.steps=3", "--model.name=kda", "--job.start_anew=true")
        ).check_resume()
    with refused(r"checkpoint.folder = 'other' would begin again in job.dump_folder"):
        RunFolder(
            run(folder, "--training.steps=3", "--checkpoint.folder=other", "--job.start_anew=true")
        ).check_resume()


def train_on_rank(rank, world_size, config):
    """What a worker prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        Trainer(config).train()
    return said.getvalue()


@pytest.fixture
def launched(worlds, capfd, monkeypatch, tmp_path):
    """launched(corpus, folder, code, **keys): what a run of four steps in one process prints; "__" stands for the dot.
    The launcher is this process, its worker one that other tests use too."""
    monkeypatch.setenv("NGPU", "1")

    def run_workers(config, *_):
        print(*worlds(1).run(train_on_rank, config))
        return 0

    monkeypatch.setattr(launch, "run_workers", run_workers)

    def launched(corpus, folder, code=0, **keys):
        found, said = exit_of(launch.main, arguments(corpus, folder, **keys), capfd)
        assert (found or 0) == code, said
        return said

    with own_handlers():
        yield launched


@pytest.fixture
def corpus(tmp_path):
    return write_texts(
        tmp_path / "corpus.jsonl", (f"document {n} " * (n % 9 + 1) for n in range(100))
    )


def arguments(corpus, folder, **keys):
    given = {
        "training.dataset": "jsonl",
        "training.dataset_path": corpus,
        "job.dump_folder": folder,
        "training.steps": 4,
        "training.seq_len": 64,
        "training.global_batch_size": 1,
        "checkpoint.interval": 2,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
    }
    return argv_of(given, **keys)


def test_a_run_goes_back_and_its_corpus_moves(corpus, tmp_path, launched):
    folder = tmp_path / "run"
    steps = folder / "checkpoint"
    launched(corpus, folder)
    moved = corpus.rename(tmp_path / "moved.jsonl")
    os.utime(moved, (1, 1))
    said = launched(moved, folder, checkpoint__load_step=2, checkpoint__interval=1)
    assert (
        f"resuming with training.dataset_path: '{corpus}' → '{moved}'" in said
        and "resuming from step 2" in said
    )
    assert "step-4 moved to" in said and sorted(path.name for path in steps.glob("step-*")) == [
        "step-2",
        "step-3",
        "step-4",
    ]
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    said = launched(moved, folder, checkpoint__load_step=2)
    assert "went back to checkpoint.load_step = 2 before" in said and "is finished: 4 of" in said
    with refused(r"training.steps = 3 is less than the 4 steps that the run in '.*' has done"):
        preflight(load_config(arguments(moved, folder, training__steps=3)), 1)
    assert "resuming from step 4" in launched(
        moved, folder, checkpoint__load_step=2, training__steps=5, lr_scheduler__total_steps=5
    )
    moved.write_text(moved.read_text().replace("document", "Document"))
    assert "training.dataset_path gives another corpus" in launched(
        moved, folder, 2, training__steps=6, lr_scheduler__total_steps=6
    )


def test_a_finished_run_without_checkpoints_says_how_to_begin_anew(corpus, tmp_path, launched):
    folder, keys = tmp_path / "run", {"checkpoint__enable": "false", "training__steps": 1}
    launched(corpus, folder, **keys)
    before = (folder / "metrics.jsonl").read_bytes()
    assert "--job.start_anew true trains it again" in launched(corpus, folder, **keys)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert "metrics.jsonl moved to" in launched(corpus, folder, **keys, job__start_anew="true")
    assert next(folder.glob("abandoned-*/metrics.jsonl")).read_bytes() == before


def test_epochs_give_the_number_of_steps(corpus, tmp_path, launched):
    folder = tmp_path / "run"
    tokens = sum(len(line["text"]) + 1 for line in read_lines(corpus))
    steps = -(-2 * tokens // (64 * 40))
    keys = {"training__epochs": 2, "training__global_batch_size": 40}
    assert f"training.epochs = 2: {steps} steps" in launched(corpus, folder, **keys)
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")][-1] == steps
    said = launched(corpus, folder, **keys)
    assert f"is finished: {steps} of training.steps = {steps}" in said


def test_a_run_ends_once_its_validation_loss_no_longer_falls(corpus, tmp_path, launched):
    """Here weights do not change, so that no validation is better than the first."""
    folder = tmp_path / "run"
    keys = {
        "training__steps": 9,
        "optimizer__lr": 1e-30,
        "validation__enable": "true",
        "validation__holdout": 0.1,
        "validation__freq": 1,
        "validation__keep_best": "true",
        "checkpoint__interval": 1,
        "checkpoint__keep_latest_k": 1,
    }
    ended = r"finished: {} of training.steps = 9, .*patience = {} v[^|]*lowest .* at step 1, saved in '.*step-1'"
    for patience, last in ((2, 3), (4, 5)):
        said = launched(corpus, folder, **keys, validation__patience=patience)
        assert re.search(ended.format(last, patience), said)
        kept = sorted(path.name for path in (folder / "checkpoint").glob("step-*"))
        assert kept == ["step-1", f"step-{last}"]
    assert re.search(ended.format(5, 4), launched(corpus, folder, **keys, validation__patience=4))


def test_a_restart_after_the_last_save_does_what_is_left(corpus, tmp_path, launched, worlds):
    """Also where that holds weights only. A new start says that the run is finished."""
    folder = tmp_path / "run"
    keys = {"checkpoint__last_save_model_only": "true", "sample__max_new_tokens": 2}
    sample = re.compile("--- sample\n.*?\n---", re.DOTALL)
    ended = sample.search(launched(corpus, folder, **keys))
    argv = arguments(corpus, folder, **keys)
    again = worlds(1).run(train_on_rank, load_config(argv))[0]
    assert "resuming from step 4" in again and ended[0] == sample.search(again)[0]
    assert again.endswith(finished(load_config(argv), 4) + "\n")
    assert finished(load_config(argv), 4) in launched(corpus, folder, **keys)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment in .venv of the folder in which one is, and not active."""
    (scripts := tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("titan-linear", "tensorboard"):
        (scripts / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return scripts


def test_the_last_lines_of_a_run_can_be_copied(installed, monkeypatch):
    assert "  .venv/bin/titan-linear generate a --prompt" in finished(run("a"), 1000)
    monkeypatch.chdir(installed)
    assert "  titan-linear convert to-hf a FOLDER" in finished(run("a"), 1000)
    monkeypatch.chdir("/")
    assert f"  {str(installed)[1:]}/tensorboard --logdir a/tb\n" in finished(run("a"), 1000)
    (installed / "titan-linear").unlink()
    script = f"PYTHONPATH={ROOT} {installed}/python -m titan_linear generate a"
    assert f"  {script} --prompt" in finished(run("a"), 1000)


def test_the_prompt_is_the_samples_or_of_the_demos_texts(installed):
    texts = ["--training.dataset=text", "--training.dataset_path=x"]
    assert "--prompt 'def '\n" in finished(run("a"), 1000)
    assert "--prompt TEXT\n" in finished(run("a", *texts), 1000)
    assert "--prompt 'Once upon'\n" in finished(run("a", *texts, "--sample.prompt=Once upon"), 1000)


def test_after_chats_one_chats_and_adapters_are_merged(installed):
    chats = ["--training.dataset=jsonl", "--training.dataset_path=x"]
    chats.append("--training.dataset_format=messages")
    said = finished(run("a", *chats, "--adapter.enable=true"), 1000)
    assert "  .venv/bin/titan-linear generate a --chat\n" in said
    assert "  .venv/bin/titan-linear convert merge a FOLDER\n" in said
    mixture = '[{name = "c", weight = 1.0, dataset = "jsonl", dataset_path = "x", dataset_format = "messages"}]'
    said = finished(run("a", "--training.mixture", mixture), 1000)
    assert "generate a --chat\n" in said and "merge" not in said


def test_a_run_that_ends_while_it_warms_up_says_so():
    assert unwarmed(steps=100, warmup=100) == ""
    assert "training.steps = 99 ends within" in unwarmed(steps=99, warmup=100)


def test_the_end_of_a_run_says_what_can_be_done_with_it(installed, monkeypatch):
    monkeypatch.setenv("PATH", str(installed))
    said = finished(run("my runs/a"), 1000)
    assert said.startswith("the run in 'my runs/a' is finished: 1000 of training.steps = 1000\n")
    for command in (
        "tensorboard --logdir 'my runs/a'/tb",
        "titan-linear generate 'my runs/a' --prompt 'def '",
        "titan-linear convert to-hf 'my runs/a' FOLDER",
    ):
        assert f" {command}\n" in f"{said}\n"
    without = run("a", "--metrics.enable_tensorboard=false", "--checkpoint.enable=false")
    assert finished(without, 1000).count("\n") == 0
