"""Writer of corpora: tokens go to `<folder>.tmp`, which becomes the corpus at the end.

A writer holds a lock on `<folder>.lock`, syncs its files to the disk, and renames the
folder. So a corpus is whole or absent, and of processes that start together one writes and
the others wait. A stopped writing of texts (cache.py) resumes where it was: every few
seconds, the files in `<folder>.tmp` are synced to the disk, and journal.json records how
much of them counts.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO

import numpy as np
from pydantic import BaseModel

from titan_linear.data.corpus.columns import (
    WEIGHTS,
    DocumentTokens,
    Problem,
    check_kinds,
    with_columns,
)
from titan_linear.data.corpus.corpus import (
    FILE_ENDS,
    FILES,
    HASHES,
    INFO,
    OFFSETS,
    PATHS,
    TOKENS,
    add_file,
    column_file,
    described,
    format_of,
    info_checksum,
    write_json,
)
from titan_linear.data.corpus.tokenise import Tokens
from titan_linear.data.corpus.tokenizer import Tokenizer
from titan_linear.storage.files import Json, lock, open_own, read_json, shown, sync

# Seconds of tokenising that a kill costs.
JOURNAL_SECONDS = 5.0
JOURNAL = "journal.json"
# Open files by name.
Files = dict[str, IO[bytes]]
_OURS = {*FILES, FILE_ENDS, PATHS, INFO, JOURNAL}


def write_corpus(
    folder: str | Path,
    documents: Iterable[Tokens],
    tokenizer: Tokenizer,
    *,
    columns: Mapping[str, str] = MappingProxyType({}),
    pairs: bool = False,
) -> None:
    """Write a corpus from documents that are already tokens.

    Each is [n] integers, with its end token if it is to have one.

    Args:
        columns: names and dtypes of columns that each document has, as a `DocumentTokens`.
            Without "weights", all tokens are trained on alike.
        pairs: each two consecutive documents form a pair, the chosen one first.

    Raises:
        ValueError: the folder exists, no document is given, or a document is empty, has
            another shape or type, has an id outside the vocabulary, has a column that is
            not among `columns`, or lacks one that is (unless none of its tokens counts).
    """
    folder = Path(folder)
    check_kinds({name: (dtype, 0) for name, dtype in columns.items()}, "columns")
    with locked(folder):
        if folder.exists():
            raise ValueError(f"{folder} exists already; choose another folder")
        journal = Journal(columns=dict(columns), group=1 + pairs)
        each = ([_checked(document, tokenizer, journal)] for document in documents)
        write_into(folder, each, tokenizer, journal)


class BadDocument(ValueError):
    """A document stops the work. The user may then choose to skip such documents."""


class Journal(BaseModel):
    """Progress of writing a corpus.

    As JSON, it is the journal of the files in <folder>.tmp.
    """

    # The key of the texts. Empty for documents that are already tokens, which are not
    # journaled.
    key: str = ""
    # A hash of their content.
    texts: str = ""
    # Documents of the source, and their bytes.
    read: int = 0
    size: float = 0.0
    skipped_empty: int = 0
    skipped_bad: int = 0
    # For each of the first few reasons: how often it occurred, and its first problem.
    reasons: dict[str, int] = {}
    bad: list[str] = []
    # Records with a document longer than Texts.max_length.
    too_long: int = 0
    # Unread fields that are named like columns, and where each first occurs.
    unread: dict[str, str] = {}
    # Documents written.
    num_documents: int = 0
    num_tokens: int = 0
    # Tokens with a weight above 0.
    num_answer_tokens: int = 0
    # Name → dtype.
    columns: dict[str, str] = {}
    # Name → count of numbers for each token; 0 for one number without a list.
    widths: dict[str, int] = {}
    # Documents that belong together.
    group: int = 1
    # Documents that belong together in one tree.
    leaves: int = 1
    # Documents whose last token with a weight above 0 is the end token.
    num_ended: int = 0
    # Text files that have been read to their ends.
    files_read: int = 0
    # Files among these whose ends are in files.bin.
    num_files: int = 0
    # Bytes that count in each file of the folder.
    sizes: dict[str, int] = {}


def temporary_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


def lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `<folder>.lock` inside `with`.

    The file stays: removing it would let two processes lock different files.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open_own(lock_file(folder), "a") as file:
        if not lock(file):
            print(f"waiting for another process that writes {folder}")
            lock(file, wait=True)
        yield


def write_into(
    folder: Path,
    documents: Iterator[Sequence[DocumentTokens]],
    tokenizer: Tokenizer,
    journal: Journal,
    dataset: str | None = None,
    texts: Sequence[Path] = (),
) -> None:
    """Write all or the rest of `<folder>.tmp`, then rename it. The caller holds the lock.

    Args:
        documents: the documents that follow, some of them together.
        journal: describes what is already there.
        dataset, texts: the source, if documents come from texts.
    """
    temporary = temporary_folder(folder)
    if not journal.read:
        # Left by a writer that was killed.
        _remove_remains(temporary)
        temporary.mkdir(parents=True)
    try:
        # corpus.json comes last; its folder then gets its name.
        fingerprint = _write_arrays(temporary, documents, tokenizer, journal)
        names = _names(journal)
        source = None
        if dataset:
            write_json(temporary / PATHS, list(map(shown, texts)))
            names.append(PATHS)
            source = _source(dataset, len(texts), journal)
        files = {name: described(temporary / name) for name in names}
        write_json(temporary / INFO, _info(fingerprint, tokenizer, source, files, journal))
        (temporary / JOURNAL).unlink(missing_ok=True)
        sync(temporary)
        os.rename(temporary, folder)
        sync(folder.parent)
    except BaseException as stop:
        asked = isinstance(stop, (KeyboardInterrupt, SystemExit, BadDocument))
        if asked and (temporary / JOURNAL).exists():
            print(f"what is tokenised is kept in {temporary}: the same command resumes from it")
        else:
            # On a full disk, for example: leave no half corpus that fills it.
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _info(
    fingerprint: str,
    tokenizer: Tokenizer,
    source: Json | None,
    files: dict[str, Json],
    journal: Journal,
) -> Json:
    """Return the content of corpus.json."""
    info = {
        "format": format_of(journal.columns),
        "num_documents": journal.num_documents,
        "num_tokens": journal.num_tokens,
        "num_answer_tokens": journal.num_answer_tokens,
        "num_ended": journal.num_ended,
        "dtype": _dtype(tokenizer.vocab_size),
        "fingerprint": fingerprint,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos": tokenizer.eos_id,
        },
        "source": source,
        "files": files,
        "group": journal.group,
        "leaves": journal.leaves,
        "columns": {name: [kind, journal.widths[name]] for name, kind in journal.columns.items()},
        "texts": journal.texts,
    }
    return {**info, "checksum": info_checksum(info)}


def _source(dataset: str, files: int, journal: Journal) -> Json:
    """Return the value of "source" in corpus.json."""
    return {
        "dataset": dataset,
        "files": files,
        "skipped_empty": journal.skipped_empty,
        "skipped_bad": journal.skipped_bad,
        "reasons": journal.reasons,
        "bad": journal.bad,
        "too_long": journal.too_long,
        "unread": journal.unread,
    }


def _remove_remains(temporary: Path) -> None:
    if temporary.exists():
        # A writer that was killed may leave files in the making.
        names = {path.name.removesuffix(".new") for path in temporary.iterdir()}
        if others := sorted(name for name in names - _OURS if not name.startswith("column-")):
            raise ValueError(
                f"{temporary}, where a corpus is written first, holds {others[0]!r}; choose another folder"
            )
        shutil.rmtree(temporary)


def _write_arrays(
    folder: Path,
    documents: Iterator[Sequence[DocumentTokens]],
    tokenizer: Tokenizer,
    journal: Journal,
) -> str:
    """Continue the files of `_names` after the content that counts.

    Returns the content's fingerprint.
    """
    content = hashlib.sha256()
    with ExitStack() as stack:
        files = _open_arrays(folder, journal, stack)
        add_file(folder / HASHES, content)
        journaled = time.monotonic()
        for together in documents:
            for document in together:
                content.update(_write_document(document, files, tokenizer, journal))
            if journal.key and time.monotonic() - journaled >= JOURNAL_SECONDS:
                _sync_files(files, journal)
                write_json(folder / JOURNAL, journal.model_dump())
                journaled = time.monotonic()
        # Check the counts, and complete the files.
        if not journal.num_documents:
            raise ValueError(f"no documents to write to {folder}; give one at least")
        if journal.num_documents % journal.group:
            raise ValueError(
                f"{journal.num_documents:,} documents for {folder} are no pairs; give each its other one"
            )
        _write_file_ends(files, journal)
        _sync_files(files, journal)
    if WEIGHTS in journal.columns and not journal.num_answer_tokens:
        raise ValueError(f"no token of {folder} has a weight above 0; give some")
    for name in sorted(journal.columns):
        add_file(folder / column_file(name), content)
    return content.hexdigest()[:32]


def _write_document(
    document: DocumentTokens,
    files: Files,
    tokenizer: Tokenizer,
    journal: Journal,
) -> bytes:
    """Add a document to all files but corpus.json, and return its hash."""
    ids = document.tokens
    for name in journal.columns:
        files[column_file(name)].write(_rows(name, document, journal))
    # Count answer tokens, and answers that end in the end token.
    if WEIGHTS in journal.columns:
        counted = np.flatnonzero(document.weights)
        journal.num_answer_tokens += len(counted)
        journal.num_ended += int(len(counted) > 0 and ids[counted[-1]] == tokenizer.eos_id)
    _write_file_ends(files, journal)
    # Nothing is copied if the type fits already.
    data = np.ascontiguousarray(ids, dtype=_dtype(tokenizer.vocab_size)).data
    digest = hashlib.blake2b(data, digest_size=8).digest()
    journal.num_documents += 1
    journal.num_tokens += len(ids)
    files[TOKENS].write(data)
    files[OFFSETS].write(np.int64(journal.num_tokens).tobytes())
    files[HASHES].write(digest)
    return digest


def _rows(name: str, document: DocumentTokens, journal: Journal) -> bytes:
    """Return what a document adds to a column's file.

    A document whose tokens count nothing may lack the column, and then has zeros.
    """
    dtype = journal.columns[name]
    column = document.columns.get(name)
    lacking = len(document.tokens)
    rows = b""
    if column is not None:
        # Earlier documents may all have lacked the column.
        lacking = 0 if name in journal.widths else journal.num_tokens
        journal.widths[name] = sum(column.shape[1:])
        rows = column.astype(dtype).tobytes()
    if name not in journal.widths:
        return rows
    return np.zeros((lacking, max(journal.widths[name], 1)), dtype).tobytes() + rows


def _checked(document: Tokens, tokenizer: Tokenizer, journal: Journal) -> DocumentTokens:
    """Return the document that follows in a journal, after checking it."""
    tokens, columns = document if isinstance(document, tuple) else DocumentTokens(document)
    ids = np.asarray(tokens)
    said = f"document {journal.num_documents}"
    if not ids.size:
        raise ValueError(f"{said} has no tokens; leave it out")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{said} is {ids.dtype} {list(ids.shape)}; give its tokens as integers [n]"
        )
    last = tokenizer.vocab_size - 1
    if ids.min() < 0 or ids.max() > last:
        raise ValueError(f"{said} has tokens outside the vocabulary, 0 to {last}; leave them out")
    if undeclared := columns.keys() - journal.columns:
        raise ValueError(
            f"{said} has a column {min(undeclared)!r}; name it in columns, or leave it out"
        )
    dtypes = {name: journal.columns[name] for name in columns}
    widths = {**journal.widths}
    try:
        (checked,) = with_columns([DocumentTokens(ids)], columns, dtypes, tokenizer, widths)
        checked.check()
    except Problem as problem:
        raise ValueError(f"{said}: its column {problem}") from None
    if (missing := journal.columns.keys() - columns) and checked.weights.any():
        raise ValueError(f"{said} has no column {min(missing)!r}, which columns names; give it")
    return checked


def _write_file_ends(files: Files, journal: Journal) -> None:
    """Add to files.bin the text files that have been read to their ends since."""
    if FILE_ENDS in files:
        ends = np.full(journal.files_read - journal.num_files, journal.num_documents, dtype="<i8")
        files[FILE_ENDS].write(ends.tobytes())
        journal.num_files = journal.files_read


def _dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _names(journal: Journal) -> list[str]:
    """Return the names of the files that are written document by document."""
    names = [*FILES, *map(column_file, journal.columns)]
    return [*names, FILE_ENDS] if journal.texts else names


def _open_arrays(folder: Path, journal: Journal, stack: ExitStack) -> Files:
    """Open the files of `_names` at their ends, cut to the content that counts."""
    files: Files = {}
    for name in _names(journal):
        files[name] = stack.enter_context(open_own(folder / name, "ab"))
        # New offsets.bin and files.bin begin with 0, which is 8 zeros.
        begin = 8 if name in (OFFSETS, FILE_ENDS) else 0
        files[name].truncate(journal.sizes.get(name, begin))
    return files


def read_journal(folder: Path) -> Journal | None:
    """Return an earlier writer's progress, if the files that it wrote still exist."""
    temporary = temporary_folder(folder)
    try:
        journal = read_json(temporary / JOURNAL, Journal, "")
        for name in _names(journal):
            if (temporary / name).stat().st_size < journal.sizes[name]:
                return None
    except (OSError, LookupError, ValueError):
        return None
    return journal


def _sync_files(files: Files, journal: Journal) -> None:
    """Have everything so far on disk, where it counts."""
    for name, file in files.items():
        file.flush()
        os.fsync(file.fileno())
        journal.sizes[name] = os.fstat(file.fileno()).st_size
