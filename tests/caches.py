"""Caches of a test run: folders of its own, empty when it begins and removed when it ends.

They are named in the environment before anything is imported; processes that tests start inherit them. Workers of
pytest-xdist share what is compiled, and each has the other caches for itself.
"""

import os
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from shutil import rmtree

# Inductor keeps some of its caches among temporary files.
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TMPDIR": "tmp"}
OTHERS = {
    "XDG_CACHE_HOME": "xdg",
    "MPLCONFIGDIR": "matplotlib",
    "HF_HOME": "hugging_face",
    "TORCH_HOME": "torch",
}
# Parts of HF_HOME, which a user may keep elsewhere.
PARTS = ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")
FOLDER = "TITAN_LINEAR_TEST_CACHES"  # of the run, for its workers
WORKER = "PYTEST_XDIST_WORKER"  # set by pytest-xdist
PYTEST_FILES = "PYTEST_DEBUG_TEMPROOT"  # read by pytest


def new_caches() -> dict[str, str]:
    """Variables that name them, and where tests write their own files, which stay for a while."""
    temporary, worker = tempfile.gettempdir(), os.environ.get(WORKER)
    shared = Path(os.environ[FOLDER] if worker else tempfile.mkdtemp(prefix="titan-tests-"))
    if not worker:  # after its workers, and after multiprocessing has removed its files
        Finalize(None, rmtree, (shared,), {"ignore_errors": True}, exitpriority=-200)
    own = shared / (worker or "main")
    for name in PARTS:
        os.environ.pop(name, None)
    found = {name: shared / cache for name, cache in COMPILED.items()}
    found |= {name: own / cache for name, cache in OTHERS.items()}
    for folder in found.values():
        folder.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = None  # TMPDIR is read anew
    others = {FOLDER: shared, PYTEST_FILES: os.environ.get(PYTEST_FILES, temporary)}
    return {name: str(path) for name, path in (found | others).items()}
