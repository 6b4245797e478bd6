"""Lock of a run's folder: one run at a time writes there."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_linear.storage.files import lock, open_own
from titan_linear.storage.rundir import LOCK


class Unlockable(ValueError):
    """The file system has no locks."""


@contextmanager
def lock_folder(folder: str, key: str = "job.dump_folder") -> Iterator[None]:
    """Make the folder and lock it inside `with`, or until this process ends (`files.lock`).

    A start that is refused inside `with` leaves nothing new behind.

    Raises:
        ValueError: another run holds the folder, or it cannot be written or locked.
    """
    # Remember which paths are new, so that a refused start can remove them.
    path = Path(folder) / LOCK
    new = [made for made in (path, *path.parents) if not os.path.lexists(made)]
    with _refusing(folder, key):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_own(path, "a+")
    with file:
        try:
            locked = lock(file)
        except OSError as error:
            _take_back(new)
            raise Unlockable(
                f"{key} = {folder!r} cannot be locked: {error.strerror}; use a folder on another file system, or "
                "have this one mounted with POSIX locks"
            ) from None
        if not locked:
            file.seek(0)
            raise ValueError(
                f"{key} = {folder!r} is in use by another run ({file.read().strip()}); wait for it, stop it, or use "
                "another folder"
            )
        try:
            # Write the holder's process into the lock.
            with _refusing(folder, key):
                file.truncate(0)
                holder = f"process {os.getpid()} on {socket.gethostname()}\n"
                os.write(file.fileno(), holder.encode())
            yield
        except (ValueError, SystemExit):
            # The start is refused.
            _take_back(new)
            raise


def _take_back(new: list[Path]) -> None:
    """Remove the new lock and its new folders that are empty, innermost first."""
    for path in new:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


@contextmanager
def _refusing(folder: str, key: str) -> Iterator[None]:
    """Raise ValueError for what the system refuses to write inside `with`."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        raise ValueError(
            f"{key} = {folder!r} cannot be written: {where}{error.strerror}; use another folder"
        ) from None
