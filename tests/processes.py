"""Processes that are not ours to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    """A zombie is."""
    try:
        return _state(Path(f"/proc/{pid}/stat")) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stopped(pid: int) -> bool:
    """Each of its threads is."""
    return all(_state(stat) == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
