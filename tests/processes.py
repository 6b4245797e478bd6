"""Processes that are not ours to wait for."""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn


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


def handles(pid: int, number: int) -> bool:
    """Whether it has a handler for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught[1], 16) >> number - 1 & 1)


@contextmanager
def elsewhere(inside: Callable[[], AbstractContextManager[object]]) -> Iterator[int]:
    """Meanwhile another process, of this id, is in `with inside()`."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_stay, args=(inside, theirs))
    process.start()
    try:
        ours.recv()
        yield process.pid
    finally:
        process.kill()
        process.join()


def _stay(inside: Callable[[], AbstractContextManager[object]], connection: Connection) -> None:
    with inside():
        connection.send("inside")
        stay()


def stay() -> NoReturn:
    """Until it is killed."""
    while True:
        signal.pause()


def until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.02)
