"""Print an interpreter that has titan_linear's dependencies: `python tools/env.py [extra]`.

It is the interpreter that runs this, if it has them in the versions of pyproject.toml; otherwise that of .venv beside
pyproject.toml, which is made, or repaired after an interruption. Everything else goes to stderr. Needs nothing but
Python; pip takes packages from wherever it is configured to.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = VENV / ".titan_linear"  # only in a .venv made here: "installing", then "installed"
TRIED = VENV / ".titan_linear.gpu"  # only in a .venv made here, once installing the extra "gpu" was tried
RECENT_GPUS = ("9.0", "10.0", "10.3")  # compute capabilities for which FlashAttention-4 has kernels of its own
MISSING = 3  # exit code of --check
EXTRAS = ("dev", "gpu")  # of pyproject.toml


def main(extras: list[str]) -> None:
    if not (lacks := missing(extras)):
        print(sys.executable)
        return
    if not ready(extras):
        with open(ROOT / "pyproject.toml", "r+") as file:  # locked, never written: two set-ups take turns
            say(f"{sys.executable} lacks {lacks}; setting up {VENV}: this takes minutes, once")
            fcntl.flock(file, fcntl.LOCK_EX)
            if not ready(extras):
                install(extras)
    if STATE.exists() and not TRIED.exists() and set(capabilities()) & set(RECENT_GPUS):
        install_for_gpus()
    print(PYTHON)


def missing(extras: list[str]) -> str:
    """The first requirement that this interpreter lacks, such as "torch>=2.11,<2.14"; "" if it has everything."""
    try:
        from packaging.requirements import Requirement

        project = read_project()
    except ImportError as error:  # both come with the dependencies
        return str(error.name)
    optional = project["optional-dependencies"]
    for text in project["dependencies"] + [text for extra in extras for text in optional[extra]]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                return text
            if not requirement.specifier.contains(version, prereleases=True):
                return text
    return ""


def read_project() -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def ready(extras: list[str]) -> bool:
    """Whether .venv exists, was not left in the middle of an installation, and has everything."""
    if not PYTHON.exists() or (STATE.exists() and STATE.read_text() != "installed"):
        return False
    return subprocess.run([PYTHON, __file__, "--check", *extras]).returncode == 0


def install(extras: list[str]) -> None:
    """Make .venv, or bring it up to date. After an interrupted installation make it anew: its packages may be torn."""
    if VENV.exists() and not STATE.exists():
        sys.exit(f"error: {VENV} was not made by this script and lacks dependencies; activate it and install them "
                 "(pip install -e .), or move it away")  # fmt: skip
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        sys.exit(f"error: {sys.executable} has no venv module; install it (Debian, Ubuntu: apt install python3-venv), "
                 "or activate an environment with the dependencies of pyproject.toml")  # fmt: skip
    if not PYTHON.exists() or STATE.read_text() != "installed":
        if Path(sys.prefix) == VENV:
            sys.exit(f"error: {VENV} is incomplete, and active; deactivate it and start again")
        shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir(exist_ok=True)
    STATE.write_text("installing")
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", VENV)
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-e", target)
    STATE.write_text("installed")


def capabilities() -> list[str]:
    """Compute capabilities of the GPUs here, as the driver's tool (nvidia-smi) reports them."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
        )
    except OSError:
        return []
    return done.stdout.split()


def install_for_gpus() -> None:
    """Try once to install the extra "gpu". It may fail: without it everything runs, only more slowly."""
    say("adding FlashAttention-4 for this GPU")
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-e", f"{ROOT}[gpu]"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        say(f"it cannot be installed: attention will run by PyTorch's kernels. Remove {TRIED} to try again")
    TRIED.write_text("")


def run(*command: str | Path) -> None:
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"error: set-up failed (exit code {done.returncode}); the same command tries again")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--check"]
    if unknown := sorted(set(named) - set(EXTRAS)):
        sys.exit(f"error: {unknown[0]!r} is no extra: python -m tools.env [--check] [{'] ['.join(EXTRAS)}]")
    if sys.argv[1:2] == ["--check"]:
        sys.exit(MISSING if missing(named) else 0)
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
