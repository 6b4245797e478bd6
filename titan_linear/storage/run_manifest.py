"""manifest.json of a run: software, hardware and mesh of its latest start."""

import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from titan_linear import __version__
from titan_linear.storage.files import write_whole
from titan_linear.storage.rundir import RUN_MANIFEST

PACKAGE = Path(__file__).parents[1]


def write_manifest(
    folder: Path,
    *,
    parameters: int,
    world_size: int,
    degrees: Mapping[str, int],
    implementations: Mapping[str, str],
) -> None:
    """Write manifest.json: software, hardware and mesh of this start of the run.

    Args:
        parameters: number of parameters of the model.
        degrees: sizes of the mesh's dimensions, {"dp_replicate": 1, "dp_shard": 2, ...}.
        implementations: the implementation chosen for each op, {"chunk_kda": "triton",
            ...}.
    """
    # null stands for anything that is missing here.
    manifest = {
        "versions": {
            "titan_linear": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": next((found.version for found in distributions(name="triton")), None),
            "cuda": torch.version.cuda,
        },
        "git": _git_commit(),
        "hardware": {
            "host": socket.gethostname(),
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "parameters": parameters,
        "world_size": world_size,
        "degrees": degrees,
        "implementations": implementations,
    }
    write_whole(folder / RUN_MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^model name.*?:(.*)", info.read_text() if info.exists() else "")
    return found[1].strip() if found else platform.processor() or platform.machine()


def _git_commit() -> Any:
    """Return the commit of this source tree, and whether it has changes.

    Returns None for an installed package or without git.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git("rev-parse", "HEAD")
    return commit and {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str | None:
    """Run git in this package's folder and return its output, or None if that fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        # Git is missing, or this is not a repository.
        return None
    return done.stdout.strip()
