"""Files and folders that are whole or absent, even after a kill or a power cut.

Also locks, and the folder of caches.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from codecs import BOM_UTF8 as BOM
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from tqdm import tqdm

T = TypeVar("T")
# A JSON object.
Json = dict[str, Any]


class Unreadable(ValueError):
    """A file is missing, may not be read, or does not hold what it should."""


def read_json(file: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file as `parse_json` does.

    The file may begin with a byte order mark.

    Raises:
        Unreadable: with the remedy.
    """
    try:
        # Reading a pipe would wait for a writer.
        if os.path.exists(file) and not os.path.isfile(file):
            raise ValueError("it is not a regular file")
        return parse_json(file.read_bytes().removeprefix(BOM), kind)
    except OSError as error:
        why = error.strerror
        # A folder without the file that tells its kind may be of another kind.
        if isinstance(error, FileNotFoundError) and file.name in KINDS:
            remedy = kind_of(file.parent, remedy)
    except ValueError as error:
        why = str(error)
    raise Unreadable(f"'{file}' cannot be read ({why}); {remedy}")


def parse_json(data: str | bytes, kind: type[T]) -> T:
    """Parse JSON as a pydantic model, or any other type that pydantic knows.

    Raises:
        ValueError: it is not JSON of this type, or is nested more than 200 deep.
    """
    try:
        return _adapter(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {why}" if where else why) from None


_adapter = cache(TypeAdapter)


def read_inside(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Return the content of a folder's files by relative name, for a copy to be published.

    A link may lead to a file in the same folder or, in a cache of the Hugging Face hub, to
    its blobs.

    Raises:
        ValueError: a file is not regular, or is a link to one elsewhere.
    """
    within = folder.resolve()
    if within.parent.name == "snapshots" and within.parents[1].name.startswith("models--"):
        within = within.parents[1]
    content = {}
    for file in sorted(chain.from_iterable(map(folder.glob, patterns))):
        target = file.resolve()
        if not (target.is_file() and target.is_relative_to(within)):
            raise ValueError(
                f"'{file}' is not a regular file, or a link to one elsewhere ('{target}') that a copy would publish; "
                "remove it, or put the file itself there"
            )
        content[file.relative_to(folder).as_posix()] = target.read_bytes().removeprefix(BOM)
    return content


def json_bytes(content: Json) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


# Kinds of folders by a file that they hold, with their use. The first match decides.
KINDS = {
    "adapter_config.json": "a PEFT folder: titan-linear convert merge adds its adapters to their base, and "
    "adapter.initial_load_path begins a run with them",
    "scores.json": "a folder of scores, for loss.scores",
    "corpus.json": "a tokenised corpus, for training.dataset_path with training.dataset = 'tokens'",
    "config.json": "a Hugging Face folder, for checkpoint.initial_load_path with checkpoint.initial_load_in_hf = true",
    "config.toml": "the folder of a run, of which titan-linear convert to-hf writes what others open",
    "progress.json": "a checkpoint, of which titan-linear convert to-hf writes what others open",
    "tokenizer.json": "a tokenizer without a model, for model.tokenizer_path",
}


def kind_of(path: Path, otherwise: str) -> str:
    """Return a remedy that names the folder's kind, if it is one of KINDS."""
    kinds = (f"it is {kind}" for name, kind in KINDS.items() if (path / name).is_file())
    return next(kinds, otherwise)


def shown(path: Path) -> str:
    """Return a path as text. Bytes that are not UTF-8 are escaped for JSON and terminals."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def progress(
    items: Iterable[T] | None,
    doing: str,
    total: int | None = None,
    **options: Any,
) -> tqdm[T]:
    """Return the items with a progress bar on rank 0, shown after two seconds."""
    return tqdm(items, doing, total, delay=2, disable=os.environ.get("RANK", "0") != "0", **options)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new one, which then is on disk."""
    new = path.with_name(f"{path.name}.new")
    # Left by a killed write, or a link that somebody has put there.
    new.unlink(missing_ok=True)
    with new.open("xb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    sync(new)
    new.rename(path)


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file to which this program appends, or which it locks.

    Its name is predictable, so in a folder from elsewhere it may be a link to any of the
    user's files: this raises OSError.
    """
    assert mode[0] == "a", mode
    encoding = None if "b" in mode else "utf-8"

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, encoding=encoding, opener=opener)


def sync(path: Path, *, forget: bool = False) -> Path:
    """Sync a written file, or the names in a folder, to the disk.

    Args:
        forget: have the system drop the file from its cache, where it can, so that later
            reads come from the disk.
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
    """Remove a folder with its content, a file, or a link, whose target stays.

    The path may be gone already.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(file: IO[str], *, wait: bool = False) -> bool:
    """Lock an open file until it is closed or this process ends in any way.

    Returns False if another process holds the lock, or has held it and removed the file.
    The lock is a POSIX lock: it belongs to the process, not to its children, and works on
    shared file systems.

    Raises:
        OSError: the file system has no such locks, or needs a lock service that is missing.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (BlockingIOError, PermissionError, FileNotFoundError):
        # POSIX allows either of the first two.
        return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new folder that takes the place of `path`, synced, when `with` ends.

    No other process writes it meanwhile. A kill at any moment leaves the old folder or the
    new one, whole. A failure leaves the old one and nothing else.

    Raises:
        OSError: another process writes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, "tmp")
    lock_file = beside(path, "lock")
    with open_own(lock_file, "a") as file:
        if not _locks(file):
            raise OSError("another process is writing it")
        try:
            # Clean up after a killed writer, then let the caller fill a new folder.
            finish_replacing(path)
            remove(temporary)
            temporary.mkdir()
            yield temporary
            # Everything is on disk before the folder gets its name.
            for written in [*temporary.rglob("*"), temporary]:
                sync(written)
            _replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                lock_file.unlink()


def _locks(file: IO[str]) -> bool:
    """Lock a file; True where the file system has no locks."""
    try:
        return lock(file)
    except OSError:
        return True


def _replace(temporary: Path, path: Path) -> None:
    """Put the new folder in the place of an old one.

    Between the two renames, the old folder has another name. The next writer of `path`
    restores it.
    """
    if os.path.lexists(path):
        path.rename(beside(path, "replaced"))
    try:
        temporary.rename(path)
        sync(path.parent)
    finally:
        finish_replacing(path)


def finish_replacing(path: Path) -> None:
    """Remove what `_replace` has replaced or, if it failed or was killed before, restore it."""
    aside = beside(path, "replaced")
    if os.path.lexists(aside):
        if os.path.lexists(path):
            remove(aside)
        else:
            aside.rename(path)


def beside(path: Path, what: str) -> Path:
    """Return a sibling path of a folder for a temporary use.

    Args:
        what: "tmp" while the folder is written, "lock" for its lock file, or "replaced" for
            the folder that it replaces.
    """
    return path.with_name(f".{path.name}.{what}")


def default_cache_dir() -> Path:
    """Return the user's cache folder.

    Raises:
        ValueError: it is unknown, as in a container whose user has no home.
    """
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if caches.startswith("~"):
        raise ValueError(
            "no home folder is known for token caches: HOME is not set; set it, or XDG_CACHE_HOME"
        )
    return Path(caches, "titan_linear")
