"""A run of the tests begins with empty caches of its own, and no test depends on what another one left."""

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import caches
from tests.order import in_order
from tests.state import isolated
from titan_linear.models.presets import MODELS
from titan_linear.storage.files import default_cache_dir

ROOT = Path(__file__).parents[1]
NAMES = (*caches.COMPILED, *caches.OTHERS)


def caches_here(rank=0, world_size=1):
    return {name: os.environ[name] for name in NAMES}


def test_libraries_and_processes_use_the_caches_of_the_run(worlds):
    from huggingface_hub.constants import HF_HUB_CACHE
    from matplotlib import get_cachedir

    folder = Path(os.environ[caches.FOLDER])
    named = [*caches_here().values(), HF_HUB_CACHE, get_cachedir(), default_cache_dir()]
    named.append(tempfile.gettempdir())
    assert all(Path(name).is_relative_to(folder) for name in named)
    assert worlds(1).run(caches_here) == [caches_here()]


def test_workers_share_what_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", "/a/user's")
    monkeypatch.delenv(caches.WORKER, raising=False)
    controller, other_run = caches.new_caches(), caches.new_caches()
    monkeypatch.setenv(caches.FOLDER, controller[caches.FOLDER])
    monkeypatch.setenv(caches.WORKER, "gw0")
    worker = caches.new_caches()
    assert "HF_HUB_CACHE" not in os.environ
    assert {name for name in NAMES if worker[name] == controller[name]} == {*caches.COMPILED}
    assert not any(controller[name] == other_run[name] for name in NAMES)
    assert not any(file.is_file() for file in tmp_path.rglob("*"))


def test_the_caches_end_with_the_run(tmp_path):
    """After multiprocessing, which has temporary files there."""
    code = "import os; from tests.caches import new_caches; os.environ.update(new_caches())\n"
    code += "from multiprocessing.util import get_temp_dir; print(get_temp_dir(), flush=True)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop(caches.WORKER, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(tmp_path)) and not done.stderr
    assert [*tmp_path.iterdir()] == []


CHANGES = {
    "recursion limit": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "sys.path": (lambda: sys.path.append("elsewhere"), lambda: list(sys.path)),
    "working directory": (lambda: os.chdir("/"), os.getcwd),
    "new variable": (lambda: os.environ.update(ANOTHER="1"), lambda: dict(os.environ)),
    "no variable": (lambda: os.environ.pop("PATH"), lambda: dict(os.environ)),
    "signal": (
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGUSR1),
    ),
    "warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "flavors": (lambda: MODELS["hybrid"].update(another=None), lambda: list(MODELS["hybrid"])),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "threads": (lambda: torch.set_num_threads(7), torch.get_num_threads),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_restored(name, fails):
    change, state = CHANGES[name]
    before = state()
    with suppress(RuntimeError), isolated():
        change()
        assert state() != before
        if fails:
            raise RuntimeError
    assert state() == before


def test_draws_do_not_depend_on_the_tests_before():
    def draw():
        with isolated():
            return torch.rand(3).tolist()

    assert draw() == draw()


@pytest.mark.parametrize(
    "order, files", [("", "abc"), ("reversed", "cba"), ("random:0", "acb"), ("random:1", "bca")]
)
def test_the_order_of_files(order, files):
    """A file's tests stay together, in their order."""
    items = [SimpleNamespace(path=path, test=n) for path in "abc" for n in range(2)]
    ordered = in_order(items, order)
    assert [(item.path, item.test) for item in ordered] == [(f, n) for f in files for n in range(2)]


@pytest.mark.parametrize("order", ["sideways", "random", "random:x"])
def test_an_order_that_is_not_known(order):
    with pytest.raises(pytest.UsageError, match="must be reversed or random:SEED"):
        in_order([], order)
