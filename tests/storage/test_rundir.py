import errno
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

from tests.processes import elsewhere
from tests.records import read_json
from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.run.folder import RunFolder
from titan_linear.storage import files, run_manifest
from titan_linear.storage.run_lock import lock_folder
from titan_linear.storage.run_manifest import write_manifest
from titan_linear.storage.rundir import cut_metrics


@pytest.fixture
def folder(tmp_path):
    """A folder that holds a run which has logged a step."""
    folder = tmp_path / "a run"
    with lock_folder(str(folder)):
        pass
    RunFolder(run(folder)).write_config()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    """As NFS without its lock service, or Lustre mounted without flock."""
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):

        def no_locks(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files.fcntl, "lockf", no_locks)
        message = f"job.dump_folder = '{tmp_path}' cannot be locked: {os.strerror(number)}; use a folder on another"
        with refused(re.escape(message)), lock_folder(str(tmp_path)):
            pass
    assert not any(tmp_path.iterdir())


def test_checkpoints_may_lie_on_a_file_system_without_locks(folder, tmp_path, monkeypatch):
    locked = files.fcntl.lockf

    def locks_for_runs_alone(file, how):
        if Path(file.name).parent != folder:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        locked(file, how)

    monkeypatch.setattr(files.fcntl, "lockf", locks_for_runs_alone)
    with RunFolder(run(folder, "--checkpoint.folder", str(tmp_path / "another disk"))).claimed():
        assert not (tmp_path / "another disk").exists()


@pytest.mark.parametrize("there", ["", "outputs", "outputs/notes", "outputs/.lock"])
@pytest.mark.parametrize("refusal", [ValueError, SystemExit])
def test_a_start_that_is_refused_leaves_nothing(tmp_path, there, refusal):
    """Of its folder and of that of its checkpoints; what was there stays."""
    path = tmp_path / there
    path.parent.mkdir(exist_ok=True)
    path.touch() if "/" in there else path.mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with (
        pytest.raises(refusal),
        RunFolder(
            run(tmp_path / "outputs", f"--checkpoint.folder={tmp_path}/disk/checkpoints")
        ).claimed(),
    ):
        assert (tmp_path / "outputs/.lock").exists() and (
            tmp_path / "disk/checkpoints/.lock"
        ).exists()
        raise refusal
    assert sorted(tmp_path.rglob("*")) == before


def test_a_start_beside_another_run_leaves_its_lock(tmp_path):
    checkpoints = f"--checkpoint.folder={tmp_path / 'disk'}"
    with elsewhere(lambda: RunFolder(run(tmp_path / "outputs", checkpoints)).claimed()):
        for own in ("outputs", "others"):
            with (
                refused("in use by another run"),
                RunFolder(run(tmp_path / own, checkpoints)).claimed(),
            ):
                pass
        names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert names == {"outputs", "outputs/.lock", "disk", "disk/.lock"}


def run(folder, *overrides):
    return load_config([f"--job.dump_folder={folder}", *overrides])


def test_the_same_run_goes_on(folder):
    assert RunFolder(run(folder)).check_resume() == []


@pytest.mark.parametrize(
    "override, change",
    [
        ("parallelism.context_parallel_degree=2", "parallelism.context_parallel_degree: 1 → 2"),
        ("training.steps=2000", "training.steps: 1000 → 2000"),
        ("lr_scheduler.total_steps=2000", "lr_scheduler.total_steps: 0 → 2000"),
        ("training.local_batch_size=2", "training.local_batch_size: 1 → 2"),
        ("training.on_bad_document=skip", "training.on_bad_document: 'stop' → 'skip'"),
        ("checkpoint.interval=7", "checkpoint.interval: 500 → 7"),
        ("metrics.log_freq=1", "metrics.log_freq: 10 → 1"),
        ("profiling.enable_profiling=true", "profiling.enable_profiling: False → True"),
        ("comm.train_timeout_seconds=1", "comm.train_timeout_seconds: 100 → 1"),
    ],
)
def test_how_a_run_is_computed_may_change(folder, override, change):
    assert RunFolder(run(folder, f"--{override}", "--job.description=again")).check_resume() == [
        change
    ]


@pytest.mark.parametrize(
    "override, change",
    [
        ("model.flavor=340M", "model.flavor: 'debug' → '340M'"),
        ("model.name=kda", "model.name: 'hybrid' → 'kda'"),
        ("model.num_layers=4", "model.num_layers: 0 → 4"),
        ("model.kda.heads=4", "model.mixers: {} → {'kda': {'heads': 4}}"),
        ("model.tokenizer_path=/t.json", "model.tokenizer_path: '' → '/t.json'"),
        ("training.dataset=text", "training.dataset: 'stdlib' → 'text'"),
        ("training.dataset_path=/x", "training.dataset_path: '' → '/x'"),
        ("training.seq_len=64", "training.seq_len: 2048 → 64"),
        ("training.global_batch_size=4", "training.global_batch_size: 8 → 4"),
        ("training.dtype=float64", "training.dtype: 'float32' → 'float64'"),
        ("optimizer.lr=1", "optimizer.lr: 0.0003 → 1.0"),
        ("lr_scheduler.decay_type=linear", "lr_scheduler.decay_type: 'cosine' → 'linear'"),
        ("validation.holdout=0.5", "validation.holdout: 0.01 → 0.5"),
        ("debug.seed=1", "debug.seed: 0 → 1"),
    ],
)
def test_what_a_run_computes_may_not_change(folder, override, change):
    with pytest.raises(ValueError) as error:
        RunFolder(run(folder, f"--{override}", "--training.steps=2000")).check_resume()
    assert f"\n  {change}\n" in str(error.value) and "another job.dump_folder" in str(error.value)
    assert "training.steps" not in str(error.value)


@pytest.mark.parametrize("key", ["checkpoint.enable=false", "checkpoint.folder=other"])
def test_checkpoints_are_not_passed_over(folder, key):
    """The run would begin again, and its metrics be cut."""
    assert RunFolder(run(folder, f"--{key}")).check_resume()
    (folder / "checkpoint" / "step-1").mkdir(parents=True)
    (folder / "checkpoint" / "step-1" / "manifest.json").write_text("{}")
    assert RunFolder(run(folder)).check_resume() == []
    with refused(r"would begin again in .* restore the key, or start a new run"):
        RunFolder(run(folder, f"--{key}")).check_resume()


def test_checkpoints_of_another_run_are_named(tmp_path):
    """A new run whose checkpoint.folder is that of another: without checkpoints it has nothing to do with it."""
    theirs, folder = tmp_path / "theirs", tmp_path / "mine"
    (theirs / "step-1").mkdir(parents=True)
    (theirs / "step-1/manifest.json").write_text("{}")
    with refused(r"checkpoint\.folder = '.*theirs' holds checkpoints of another run"):
        RunFolder(run(folder, f"--checkpoint.folder={theirs}")).check_resume()
    alone = run(
        folder, f"--checkpoint.folder={theirs}", "--checkpoint.enable=false", "--training.steps=3"
    )
    assert (
        RunFolder(alone).check_resume() == [] and not RunFolder(alone).finished_without_checkpoint
    )
    folder.mkdir()
    RunFolder(alone).write_config()
    (folder / "metrics.jsonl").write_text('{"step": 3}\n')
    assert RunFolder(alone).check_resume() == [] and RunFolder(alone).finished_without_checkpoint


def test_one_folder_of_checkpoints_has_many_names(folder):
    (folder / "checkpoint" / "step-1").mkdir(parents=True)
    (folder / "checkpoint" / "step-1" / "manifest.json").write_text("{}")
    (folder / "link").symlink_to("checkpoint")
    for name in ("checkpoint/", "./checkpoint", folder / "checkpoint", "link"):
        changes = RunFolder(run(folder, f"--checkpoint.folder={name}")).check_resume()
        assert changes == [f"checkpoint.folder: 'checkpoint' → '{name}'"]


def test_a_folder_without_a_trained_step_holds_no_run(folder):
    (folder / "metrics.jsonl").write_text("")
    assert RunFolder(run(folder, "--model.name=kda")).check_resume() == []
    (folder / "metrics.jsonl").unlink()
    assert RunFolder(run(folder, "--model.name=kda")).check_resume() == []
    (folder / "checkpoint/step-1").mkdir(parents=True)
    with refused(r"model.name: 'hybrid' → 'kda'"):
        RunFolder(run(folder, "--model.name=kda")).check_resume()


def test_a_run_without_its_configuration_is_refused(folder):
    (folder / "config.toml").unlink()
    with refused(r"holds a run without its config.toml"):
        RunFolder(run(folder)).check_resume()


@pytest.mark.parametrize(
    "key, used",
    [
        ("checkpoint.folder", "checkpoint.enable"),
        ("profiling.save_traces_folder", "profiling.enable_profiling"),
        ("profiling.save_memory_snapshot_folder", "profiling.enable_memory_snapshot"),
    ],
)
@pytest.mark.parametrize("where", ["metrics.jsonl", "metrics.jsonl/below", "nowhere"])
def test_folders_that_cannot_be_made_are_refused_before_the_run(folder, key, used, where):
    """Not at the first save, hours later."""
    (folder / "nowhere").symlink_to(folder / "a disk that is not mounted")
    there = folder / where.partition("/")[0]
    message = f"{key} = '{where}' cannot be written: '{there}' is not a folder; use another"
    with refused(re.escape(message)):
        RunFolder(run(folder, f"--{used}=true", f"--{key}={where}")).check_writable()
    RunFolder(run(folder, f"--{used}=false", f"--{key}={where}")).check_writable()
    RunFolder(run(folder, f"--{used}=true", f"--{key}=new/below")).check_writable()
    assert not (folder / "new").exists()


def test_a_folder_that_may_not_be_written_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with refused(re.escape(f"checkpoint.folder = 'checkpoint' cannot be written: '{folder}'")):
        RunFolder(run(folder)).check_writable()


def test_a_lock_that_cannot_be_signed_is_refused(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))  # as a full disk
    try:
        with (
            refused("job.dump_folder = .* cannot be written: File too large"),
            lock_folder(str(tmp_path / "run")),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_a_run_below_the_folder_is_another(folder):
    (folder / "checkpoint/step-1").mkdir(parents=True)
    assert RunFolder(run(folder.parent)).check_resume() == []
    (folder / "config.toml").unlink()
    (folder / "metrics.jsonl").unlink()
    with refused(r"holds a run without its config.toml"):
        RunFolder(run(folder)).check_resume()


def test_checks_write_nothing(folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError):
        RunFolder(run(folder, "--model.name=kda")).check_resume()
    RunFolder(run(folder, "--training.steps=2")).check_resume()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_written_configuration_starts_the_same_run(folder):
    config = run(folder, "--training.steps=7")
    RunFolder(config).write_config()
    again = load_config(["--job.config_file", str(folder / "config.toml")])
    assert again.model_dump(exclude={"job": {"config_file"}}) == config.model_dump(
        exclude={"job": {"config_file"}}
    )


def test_the_manifest_records_versions_and_implementations(folder):
    write_manifest(
        folder,
        parameters=1234,
        world_size=2,
        degrees={"dp_shard": 1, "cp": 2},
        implementations={"chunk_kda": "torch"},
    )
    manifest = read_json(folder / "manifest.json")
    assert manifest["parameters"] == 1234
    assert manifest["world_size"] == 2 and manifest["degrees"] == {"dp_shard": 1, "cp": 2}
    assert manifest["implementations"] == {"chunk_kda": "torch"}
    assert {"titan_linear", "python", "torch", "triton", "cuda"} == manifest["versions"].keys()
    assert manifest["hardware"]["cpu"] and isinstance(manifest["hardware"]["gpus"], list)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "config.toml",
        "manifest.json",
        "metrics.jsonl",
    ]


def test_git_commit_of_the_sources_only(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(run_manifest, "PACKAGE", package)
    assert run_manifest._git_commit() is None
    git("init")
    git("commit", "--allow-empty", "-m", "other work")
    assert run_manifest._git_commit() is None  # a package installed inside another repository
    git("add", ".")
    git("commit", "-m", "package")
    assert run_manifest._git_commit() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("x = 1")
    assert run_manifest._git_commit()["dirty"] is True


@pytest.mark.parametrize("torn", ["", '{"step": 5, "los', '{"step": 4, "loss": 1}'])
def test_metrics_after_the_step_are_cut(folder, torn):
    lines = [f'{{"step": {step}, "loss": {step}.5}}\n' for step in (1, 2, 2, 3, 4)]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)
    cut_metrics(str(folder), 3)
    assert (folder / "metrics.jsonl").read_text() == "".join(lines[:4])
    cut_metrics(str(folder), 0)
    assert (folder / "metrics.jsonl").read_text() == ""


def test_a_torn_line_alone_is_dropped_whatever_its_step(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    cut_metrics(str(folder), 9)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("line", ['{"loss": 2}', '{"step": null}', "2", "[" * 100_000])
def test_a_broken_line_of_metrics_is_named(folder, line):
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    (folder / "metrics.jsonl").write_text(text)
    with refused(rf"metrics.jsonl, line 2, is not a line of metrics: '{re.escape(line[:80])}'"):
        cut_metrics(str(folder), 1)
    assert (folder / "metrics.jsonl").read_text() == text
