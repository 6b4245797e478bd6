"""The set-up that run_train.sh and tests/run.sh share, without installing anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("python", "python3", "python3.10", "python3.11", "python3.12", "python3.13")
# A Python of the right version, without dependencies until its pip has installed them ($PIP: pip's exit code).
FAKE = """#!/bin/sh
case "$*" in
  -c*) exit 0 ;;
  "-m venv"*) echo "$*" >>"$LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip"*) echo "$*" >>"$LOG"; touch "$0.extras"; echo "${6##*[}" >>"$0.extras"; exit "${PIP:-0}" ;;
  "- "*) shift 2; [ -e "$0.extras" ] && { [ -z "$1" ] || grep -q "$1" "$0.extras"; } ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """The set-up's files in a folder with a space in its name."""
    checkout = tmp_path / "a checkout"
    (checkout / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools/env.sh", checkout / "tools")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    return checkout


@pytest.fixture
def find(checkout, tmp_path):
    """find_python with the fake Python: what it says, and the commands that it ran."""
    (folder := tmp_path / "bin").mkdir()
    executable(folder / "python", FAKE)

    def find(*extras, **environment):
        (log := tmp_path / "log").write_text("")
        done = find_python(checkout, folder, *extras, LOG=str(log), **environment)
        return done, log.read_text().splitlines()

    return find


def executable(file, text):
    file.write_text(text)
    file.chmod(0o755)


def find_python(checkout, path, *extras, **environment):
    """find_python's PYTHON and PYTHONPATH, called elsewhere, with this PATH."""
    shell = (
        'set -euo pipefail; source "$0/tools/env.sh"; find_python "$@"; echo "$PYTHON|$PYTHONPATH"'
    )
    command = [shutil.which("bash"), "-c", shell, checkout, *extras]
    environment = {"PATH": f"{path}:/usr/bin:/bin", **environment}
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)


def test_an_active_python_with_everything_is_used(checkout):
    active = Path(sys.executable).parent
    done = find_python(checkout, active, "dev")
    python, _, path = done.stdout.strip().partition("|")
    assert done.returncode == 0 and os.path.samefile(
        shutil.which(python, path=active), sys.executable
    )
    assert path == str(checkout) and not (checkout / ".venv").exists()


@pytest.mark.parametrize("requirement", ["torch>=99", "nonesuch; python_version > '3'"])
def test_a_python_that_lacks_one_is_not_used(requirement, checkout):
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace('"torch>=2.11,<2.14"', f'"{requirement}"'))
    (checkout / ".venv").mkdir()  # so that none is made
    done = find_python(checkout, Path(sys.executable).parent)
    assert done.returncode == 1 and "lacks dependencies" in done.stderr
    project.write_text(
        project.read_text().replace(f'"{requirement}"', "\"nonesuch; python_version < '3'\"")
    )
    assert find_python(checkout, Path(sys.executable).parent).returncode == 0


def test_an_old_python_is_named(checkout, tmp_path):
    for name in NAMES:
        executable(tmp_path / name, "#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.1\nexit 1\n")
    done = find_python(checkout, tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "error: Python 3.10 or newer is needed; found Python 3.9.1\n",
    )


def test_an_environment_is_made_once_and_brought_up_to_date(checkout, find):
    venv = checkout / ".venv"
    done, (made, installed) = find()
    assert done.stdout.startswith(f"{venv}/bin/python|") and made == f"-m venv {venv}"
    assert installed.startswith("-m pip install ") and installed.endswith(f"-e {checkout}")
    assert find()[1] == []
    _, (installed,) = find("dev")
    assert installed.endswith(f"-e {checkout}[dev]")
    assert find("dev")[1] == []


def test_a_set_up_that_fails_is_made_anew(checkout, find):
    done, commands = find(PIP="1")
    assert done.returncode == 1 and len(commands) == 2
    assert done.stderr.endswith("error: pip failed; the same command tries again\n")
    (checkout / ".venv" / "torn").touch()
    done, commands = find()
    assert (
        done.returncode == 0 and len(commands) == 2 and not (checkout / ".venv" / "torn").exists()
    )


def test_an_environment_of_the_users_is_left_alone(checkout, find):
    (checkout / ".venv" / "mine").mkdir(parents=True)
    done, commands = find()
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert (checkout / ".venv" / "mine").exists() and commands == []


@pytest.mark.parametrize(
    "capability, code, tried", [("8.0", 0, False), ("9.0", 0, True), ("10.0\n9.0", 1, True)]
)
def test_flash_attention_4_is_tried_where_it_has_kernels(
    capability, code, tried, checkout, tmp_path, find
):
    executable(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\necho '{capability}'\n")
    fails = f'"-m pip"*"[gpu]") echo "$*" >>"$LOG"; exit {code} ;;\n  "-m pip"*)'
    executable(tmp_path / "bin" / "python", FAKE.replace('"-m pip"*)', fails))
    done, commands = find()
    assert done.returncode == 0 and ("cannot be installed" in done.stderr) == bool(code)
    assert [c.endswith("[gpu]") for c in commands] == [False, False] + [True] * tried


def test_the_quick_tests_touch_every_room():
    """Files and tests that are there, at least one of each folder of tests, but of those that only a marker runs."""
    lines = (ROOT / "tests/quick.txt").read_text(encoding="utf-8").splitlines()[1:]
    rooms = set()
    for line in lines:
        path, _, name = line.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")
        rooms.add(Path(path).parent)
    every = {file.parent.relative_to(ROOT) for file in ROOT.glob("tests/**/test_*.py")}
    assert rooms == every - {Path("tests/verl")} and len({*lines}) == len(lines)
