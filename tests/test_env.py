"""The set-up that run_train.sh and tests/run.sh share, without installing anything."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The set-up's files in a folder with a space in its name."""
    checkout = tmp_path / "a checkout"
    shutil.copytree(ROOT / "tools", checkout / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    return checkout


@pytest.fixture
def env(checkout, monkeypatch) -> ModuleType:
    """tools/env.py, with `run` noting commands in `env.commands` (and making what `-m venv` makes)."""
    spec = importlib.util.spec_from_file_location("env", checkout / "tools/env.py")
    env = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(env)
    env.commands = []

    def run(*command):
        env.commands.append(" ".join(map(str, command[1:])))
        if command[1:3] == ("-m", "venv"):
            env.PYTHON.parent.mkdir(parents=True)
            env.PYTHON.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            env.PYTHON.chmod(0o755)

    monkeypatch.setattr(env, "run", run)
    return env


def find_python(checkout: Path, path: Path | str) -> subprocess.CompletedProcess:
    """find_python's PYTHON and PYTHONPATH, called elsewhere, with this PATH."""
    shell = 'set -euo pipefail; source "$0/tools/env.sh"; find_python dev; echo "$PYTHON|$PYTHONPATH"'
    environment = {"PATH": f"{path}:/usr/bin:/bin"}
    command = [shutil.which("bash"), "-c", shell, checkout]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)


def test_an_active_python_with_everything_is_used(checkout):
    done = find_python(checkout, Path(sys.executable).parent)
    python, _, path = done.stdout.strip().partition("|")
    assert done.returncode == 0 and os.path.samefile(python, sys.executable)
    assert path == str(checkout) and not (checkout / ".venv").exists()


def test_an_old_python_is_named(checkout, tmp_path):
    for name in ("python", "python3", "python3.10", "python3.11", "python3.12", "python3.13"):
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.1\nexit 1\n")
        fake.chmod(0o755)
    done = find_python(checkout, tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: Python 3.10 or newer is needed; found Python 3.9.1\n")


def test_what_is_missing_is_named(env):
    project = env.ROOT / "pyproject.toml"
    assert env.missing(["dev"]) == ""
    project.write_text(project.read_text().replace('"torch>=2.11,<2.14"', '"torch>=99"'))
    assert env.missing([]) == "torch>=99"
    project.write_text(project.read_text().replace('"torch>=99"', "\"nonesuch; python_version > '3'\""))
    assert env.missing([]).startswith("nonesuch")
    project.write_text(project.read_text().replace("version > '3'", "version < '3'"))
    assert env.missing([]) == ""


def test_an_environment_is_made_once(env):
    env.install(["dev"])
    venv, pip = env.commands
    assert venv == f"-m venv {env.VENV}" and pip.startswith("-m pip install ") and pip.endswith(f"-e {env.ROOT}[dev]")
    assert env.ready(["dev"])


def test_an_interrupted_set_up_is_made_anew(env):
    env.install([])
    (env.VENV / "torn").touch()
    env.STATE.write_text("installing")
    assert not env.ready([])
    env.install([])
    assert len(env.commands) == 4 and not (env.VENV / "torn").exists() and env.ready([])


def test_a_set_up_that_fails_is_not_ready(env, monkeypatch):
    env.install([])
    monkeypatch.setattr(env, "run", lambda *command: sys.exit("error: no network"))
    with pytest.raises(SystemExit):
        env.install(["dev"])
    assert not env.ready([])


def test_an_outdated_environment_is_brought_up_to_date(env):
    env.install([])
    (env.VENV / "kept").touch()
    env.install(["dev"])
    assert len(env.commands) == 3 and (env.VENV / "kept").exists()


def test_an_environment_of_the_users_is_left_alone(env):
    (env.VENV / "mine").mkdir(parents=True)
    with pytest.raises(SystemExit, match="was not made by this script"):
        env.install([])
    assert (env.VENV / "mine").exists() and env.commands == []


def test_a_python_without_venv_is_named(env, monkeypatch):
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="has no venv module"):
        env.install([])
    assert env.commands == []


@pytest.mark.parametrize(("capability", "code", "tried"), [("8.0", 0, False), ("9.0", 0, True), ("10.0\n9.0", 1, True)])
def test_flash_attention_4_is_tried_once_where_it_has_kernels(env, monkeypatch, capsys, capability, code, tried):
    env.install([])
    commands, subprocess_run = [], env.subprocess.run

    def run(command, **options):
        if command[0] == "nvidia-smi":
            return subprocess.CompletedProcess(command, 0, stdout=f"{capability}\n")
        if "pip" in command:
            commands.append(command[-1])
            return subprocess.CompletedProcess(command, code)
        return subprocess_run(command, **options)

    monkeypatch.setattr(env.subprocess, "run", run)
    monkeypatch.setattr(env, "missing", lambda extras: "torch")  # of the interpreter that runs this
    for _ in range(2):
        env.main([])
    assert commands == [f"{env.ROOT}[gpu]"] * tried
    captured = capsys.readouterr()
    assert captured.out == f"{env.PYTHON}\n" * 2 and ("cannot be installed" in captured.err) == bool(code)
