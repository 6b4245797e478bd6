"""Writes corpora: documents of tokens, one by one, into `<folder>.tmp`, which becomes the corpus when it is whole.

A writer holds a lock on `<folder>.lock`, syncs its files to the disk, and renames the folder, so that a corpus is whole
or absent, and of processes that start together one writes and the others wait. If the writing of texts (cache.py) is
stopped, it goes on where it was: every few seconds the files in `<folder>.tmp` are synced to the disk, and
progress.json says how much of them counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titan_linear.data.chat import Learnt
from titan_linear.data.corpus import (
    ANSWERS,
    ANSWERS_FORMAT,
    FILE_ENDS,
    FILES,
    FORMAT,
    INFO,
    PATHS,
    add_file,
    as_json,
    described,
    info_checksum,
)
from titan_linear.data.tokenise import Tokens
from titan_linear.data.tokenizer import Tokenizer
from titan_linear.files import lock, sync, write_whole

JOURNAL_SECONDS = 5.0  # of tokenising that a kill costs
JOURNAL = "progress.json"
_OURS = {*FILES, ANSWERS, FILE_ENDS, *(name + end for name in (PATHS, INFO, JOURNAL) for end in ("", ".new"))}


def write_corpus(
    folder: str | Path, documents: Iterable[np.ndarray] | Iterable[Learnt], tokenizer: Tokenizer, *,
    answers: bool = False,
) -> None:  # fmt: skip
    """Writes a corpus from documents that are tokens already, each [n] integers with its eos if it is to have one.

    answers: each document is its tokens and which of them are learnt, [n] bool; otherwise all are learnt.
    ValueError: the folder exists, there is no document, a document is empty or has an id outside the vocabulary.
    """
    folder = Path(folder)
    with locked(folder):
        if folder.exists():
            raise ValueError(f"{folder} exists already; choose another folder")
        write_into(folder, iter(documents), tokenizer, Progress(answers=answers))


class BadDocument(ValueError):
    """A document stops the work; the user may then choose to skip such documents."""


@dataclass
class Progress:
    """How far the writing of a corpus has come; as JSON, the journal of the files in <folder>.tmp."""

    key: str = ""  # of the texts; empty: documents that are tokens already, which are not journaled
    texts: str = ""  # hash of their content
    read: int = 0  # documents of the source
    size: float = 0.0  # their bytes
    skipped_empty: int = 0
    skipped_bad: int = 0
    bad: list[str] = field(default_factory=list)  # the first few
    num_documents: int = 0  # written
    num_tokens: int = 0
    answers: bool = False  # documents say which of their tokens are learnt
    num_answers: int = 0
    num_learnt: int = 0  # tokens
    num_ended: int = 0  # documents whose last answer ends in the end token
    files_read: int = 0  # text files that have been read to their ends
    num_files: int = 0  # those of them whose ends are in files.bin


def temporary_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


def lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `<folder>.lock`, which stays behind: removing it would let two processes lock different files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(folder).open("w") as file:
        if not lock(file):
            print(f"waiting for another process that writes {folder}", flush=True)
            lock(file, wait=True)
        yield


def write_into(
    folder: Path, documents: Iterator[Tokens], tokenizer: Tokenizer, progress: Progress, dataset: str | None = None,
    texts: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Writes all of `<folder>.tmp`, or the rest of it, then renames it. The caller holds the lock.

    progress: what is there already; documents: those that follow. dataset, texts: where they are from, if from texts.
    """
    temporary = temporary_folder(folder)
    if not progress.read:
        _remove_remains(temporary)  # of a writer that was killed
        temporary.mkdir(parents=True)
    try:
        content = _write_arrays(temporary, documents, tokenizer, progress)
        names = list(_names(progress))
        if dataset:
            write_whole(temporary / PATHS, as_json(list(map(str, texts))))
            names.append(PATHS)
        files = {name: described(temporary / name) for name in names}
        of_tokenizer = {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos": tokenizer.eos_id,
        }
        source = _source(dataset, len(texts), progress) if dataset else None
        head = {"format": ANSWERS_FORMAT if progress.answers else FORMAT, **content}
        info = {**head, "tokenizer": of_tokenizer, "source": source, "files": files}
        if progress.texts:
            info["texts"] = progress.texts
        info["checksum"] = info_checksum(info)
        write_whole(temporary / INFO, as_json(info))
        (temporary / JOURNAL).unlink(missing_ok=True)
        sync(temporary)
        os.rename(temporary, folder)
        sync(folder.parent)
    except BaseException as stop:
        if isinstance(stop, (KeyboardInterrupt, SystemExit, BadDocument)) and (temporary / JOURNAL).exists():
            print(f"what is tokenised is kept in {temporary}: the same command resumes from it", flush=True)
        else:  # a full disk, say: leave no half corpus to fill it
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _source(dataset: str, files: int, progress: Progress) -> dict[str, Any]:
    """The value of "source" in corpus.json."""
    source = {"dataset": dataset, "files": files, "skipped_empty": progress.skipped_empty}
    return source | ({"skipped_bad": progress.skipped_bad, "bad": progress.bad} if progress.bad else {})


def _remove_remains(temporary: Path) -> None:
    if temporary.exists():
        if others := sorted({path.name for path in temporary.iterdir()} - _OURS):
            raise ValueError(
                f"{temporary}, where a corpus is written first, holds {others[0]!r}; choose another folder"
            )
        shutil.rmtree(temporary)


def _write_arrays(
    folder: Path, documents: Iterator[Tokens], tokenizer: Tokenizer, progress: Progress
) -> dict[str, Any]:
    """Writes the files of _names on from what counts of them. Returns the counts, dtype and fingerprint for
    corpus.json."""
    dtype = _dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        if hasattr(documents, "close"):
            stack.callback(documents.close)  # its processes end with the writing, however that ends
        files = _open_arrays(folder, dtype, progress, stack)
        (tokens, offsets, hashes), rest = files[:3], dict(zip(_names(progress)[3:], files[3:]))
        answers, sources = rest.get(ANSWERS), rest.get(FILE_ENDS)
        content = _content_so_far(folder / "hashes.bin")
        journaled = time.monotonic()
        for document in documents:
            ids, learnt = document if progress.answers else (document, None)
            data = _checked(np.asarray(ids), progress.num_documents, tokenizer.vocab_size).astype(dtype).tobytes()
            digest = hashlib.blake2b(data, digest_size=8).digest()
            if answers:
                answers.write(_answers(np.asarray(ids), np.asarray(learnt), tokenizer, progress))
            if sources:
                sources.write(_file_ends(progress))
            progress.num_documents, progress.num_tokens = progress.num_documents + 1, progress.num_tokens + len(ids)
            tokens.write(data)
            offsets.write(np.int64(progress.num_tokens).tobytes())
            hashes.write(digest)
            content.update(digest)
            if progress.key and time.monotonic() - journaled >= JOURNAL_SECONDS:
                for file in files:
                    sync_file(file)
                write_whole(folder / JOURNAL, as_json(asdict(progress)))
                journaled = time.monotonic()
        if not progress.num_documents:
            raise ValueError(f"no documents to write to {folder}; give one at least")
        if sources:
            sources.write(_file_ends(progress))
        for file in files:
            sync_file(file)
    counts = {"num_documents": progress.num_documents, "num_tokens": progress.num_tokens, "dtype": dtype}
    if progress.answers:
        add_file(folder / ANSWERS, content)
        counts |= {"num_learnt": progress.num_learnt, "num_ended": progress.num_ended}
    return {**counts, "fingerprint": content.hexdigest()[:32]}


def _checked(ids: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """The tokens of document n, [n]."""
    if not ids.size:
        raise ValueError(f"document {n} has no tokens; leave it out")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"document {n} has tokens outside the vocabulary, 0 to {vocab_size - 1}; leave them out")
    return ids


def _answers(ids: np.ndarray, learnt: np.ndarray, tokenizer: Tokenizer, progress: Progress) -> bytes:
    """What to add to answers.bin for the document that follows; ids [n], learnt [n] bool."""
    if learnt.shape != ids.shape or not learnt.any():
        n = progress.num_documents
        raise ValueError(f"document {n}: which of its tokens are learnt must be [n] bool, one of them true at least")
    edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False))  # begin, end, begin, end, …
    progress.num_answers += len(edges) // 2
    progress.num_learnt += int(learnt.sum())
    progress.num_ended += int(ids[edges[-1] - 1] == tokenizer.eos_id)
    return (progress.num_tokens + edges).astype("<i8").tobytes()


def _file_ends(progress: Progress) -> bytes:
    """What to add to files.bin for the files that have been read to their ends meanwhile."""
    ends = np.full(progress.files_read - progress.num_files, progress.num_documents, dtype="<i8")
    progress.num_files = progress.files_read
    return ends.tobytes()


def _content_so_far(hashes: Path) -> Any:
    content = hashlib.sha256()
    add_file(hashes, content)
    return content


def _dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _names(progress: Progress) -> tuple[str, ...]:
    """The files of a corpus that are written document by document."""
    return (*FILES, *[ANSWERS] * progress.answers, *[FILE_ENDS] * bool(progress.texts))


def _sizes(progress: Progress, dtype: str) -> list[int]:
    """Number of bytes that count in each file of _names."""
    n = progress.num_documents
    sizes = {ANSWERS: 16 * progress.num_answers, FILE_ENDS: 8 * (progress.num_files + 1)}
    sizes |= dict(zip(FILES, (progress.num_tokens * np.dtype(dtype).itemsize, 8 * (n + 1), 8 * n)))
    return [sizes[name] for name in _names(progress)]


def _open_arrays(folder: Path, dtype: str, progress: Progress, stack: ExitStack) -> list[BinaryIO]:
    """The files of _names, cut to what counts of them and open at their ends."""
    files = [stack.enter_context((folder / name).open("ab")) for name in _names(progress)]
    for file, size in zip(files, _sizes(progress, dtype)):
        file.truncate(size)  # extends new offsets.bin and files.bin, which begin with 0, to 8 zeros
    return files


def read_journal(folder: Path, vocab_size: int) -> Progress | None:
    """How far an earlier writer came, if what it wrote is still there."""
    try:
        progress = Progress(**json.loads((temporary_folder(folder) / JOURNAL).read_bytes()))
        there = [(temporary_folder(folder) / name).stat().st_size for name in _names(progress)]
    except (OSError, ValueError, TypeError):
        return None
    whole = all(size >= counts for size, counts in zip(there, _sizes(progress, _dtype(vocab_size))))
    return progress if whole else None


def sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
