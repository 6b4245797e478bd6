"""Files that are whole or absent, even after a kill or a power cut; locks on files; and the folder of caches."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, which by then is on the disk."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content if isinstance(content, bytes) else content.encode())
    sync(new)
    new.rename(path)


def sync(path: Path, *, forget: bool = False) -> Path:
    """Sync a written file, or the names in a folder, to the disk.

    forget: have the system drop the file from its cache, where it can, so that later reads come from the disk.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return path


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link, whose target stays; it may be gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(file: IO[str], *, wait: bool = False) -> bool:
    """Lock an open file until it is closed or this process ends, however it ends. False: another process holds it, or
    did and has removed it.

    The lock is POSIX's: it belongs to the process, not to its children, and works on shared file systems.

    Raises:
        OSError: the file system has no such locks, or none without a lock service.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (BlockingIOError, PermissionError, FileNotFoundError):  # POSIX allows either of the first two
        return False


def default_cache_dir() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan_linear"
