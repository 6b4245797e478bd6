"""Processes that are not ours to wait for."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path


def children(pid: int) -> list[int]:
    """Those of all threads."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


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


@contextmanager
def elsewhere(inside: Callable[[], AbstractContextManager[object]]) -> Iterator[int]:
    """Meanwhile another process, of this id, is in `with inside()`."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_stay, args=(inside, theirs))
    process.start()
    try:
        assert ours.poll(60), "timed out"
        yield process.pid
    finally:
        process.kill()
        process.join()


def _stay(inside: Callable[[], AbstractContextManager[object]], connection: Connection) -> None:
    with inside():
        connection.send("inside")
        time.sleep(600)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
