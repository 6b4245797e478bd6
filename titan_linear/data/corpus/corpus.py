"""Corpora on disk: documents as tokens, memory-mapped, with a checksum for every byte.

A corpus is a folder (little-endian, no headers):

    tokens.bin    uint16 if the vocabulary has at most 2¹⁶ ids, else uint32   [num_tokens], documents end to end
    offsets.bin   int64    [num_documents + 1]; document d is tokens[offsets[d] : offsets[d+1]], never empty
    hashes.bin    uint64   [num_documents]; blake2b of the document's tokens, which decides the held-out split
    column-*.bin  [num_tokens] or [num_tokens, n]: numbers beside the tokens, as "columns" in corpus.json says;
                  column-weights.bin: how much each counts, of conversations 0 but for answers. Without it all count 1
    files.bin     int64    [num_files + 1], texts only: documents files[f] to files[f + 1] are of text file f
    files.json    the paths of these text files when they were tokenised
    corpus.json   counts, dtype, the tokenizer's fingerprint, the content's fingerprint, the source, and each file's
                  size and CRC-32 per 16 MiB; a CRC-32 of the JSON itself under "checksum"

Elsewhere (in a checkpoint, say) a corpus is identified by `Corpus.fingerprint`, made only from the tokens and which of
them are trained on.

Opening checks corpus.json and the sizes and structure of every file. `verify_corpus` checks everything against the
checksums (at the disk's speed, in threads); the preflight does that before training starts, unless it has found the
corpus whole before and no file has changed since (`verify_changed`). A damaged corpus is an error and is never rebuilt
automatically: nothing that might be someone's only copy is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.columns import WEIGHTS, check_kinds
from titan_linear.data.corpus.sources import FIELD_SOURCES, TEXT_SOURCES
from titan_linear.storage.files import (
    Json,
    Unreadable,
    default_cache_dir,
    progress,
    read_json,
    write_whole,
)

FORMAT = "titan_linear corpus 1"
# code that knows only the first would train on every token alike
WEIGHTS_FORMAT = "titan_linear corpus 4"
DTYPES = ("<u2", "<u4")  # of tokens
CRC_BLOCK = 1 << 24  # bytes
SMALL = 1 << 22  # documents: every process may look at this many
# of the folders that are ours to remove
CACHE_NAME = re.compile(rf"({'|'.join(TEXT_SOURCES)})-[0-9a-f]{{24}}")
TOKENS, OFFSETS, HASHES = FILES = ("tokens.bin", "offsets.bin", "hashes.bin")
FILE_ENDS, PATHS = "files.bin", "files.json"  # of the text files
INFO = "corpus.json"
PLACE = "place"  # the column of places in the corpus


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus. Its arrays are memory-mapped."""

    folder: Path
    tokens: ndarray  # [num_tokens] uint16 | uint32
    offsets: ndarray  # [num_documents + 1] int64
    hashes: ndarray  # [num_documents] uint64
    info: Json  # corpus.json
    # [num_files + 1] int64: documents before each text file; None: unknown
    files: ndarray | None = None
    paths: tuple[str, ...] | None = None  # of these files, where they were asked for
    # [num_tokens] or [num_tokens, n] each
    columns: Mapping[str, ndarray] = field(default_factory=dict)
    name: str = ""  # for messages: its folder, or the key and path of its texts

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if len(column) != self.num_tokens:
                raise ValueError(
                    f"the column {name!r} has {len(column):,} rows for the {self.num_tokens:,} tokens of "
                    f"{self.folder}; restore it from a copy, or write it again"
                )

    @property
    def num_documents(self) -> int:
        return len(self.hashes)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def group(self) -> int:
        """How many documents belong together: 2 in a corpus of pairs."""
        return self.info.get("group", 1)

    @property
    def pairs(self) -> bool:
        """Of documents, or trees of two."""
        return 2 in (self.group, self.info.get("leaves"))

    @property
    def fingerprint(self) -> str:
        """Identifies the content: these tokens, as these documents, in this order, and which of them are trained
        on. The tokenizer has a fingerprint of its own."""
        return self.info["fingerprint"]

    @property
    def identity(self) -> tuple[str, str]:
        """Of its content and its tokenizer."""
        return self.fingerprint, self.info["tokenizer"]["fingerprint"]

    def column(self, name: str, positions: ndarray) -> ndarray:
        """The numbers beside the tokens at these positions, or the last token, [n] or [n, width]; of PLACE these."""
        if name == PLACE:
            return positions.copy()
        if name == WEIGHTS and name not in self.columns:
            return np.ones(len(positions), dtype=np.float32)
        return np.take(self.columns[name], np.minimum(positions, self.num_tokens - 1), 0)

    @property
    def summary(self) -> str:
        """For the console: one line, then one for each warning."""
        source = self.info["source"] or {"dataset": "tokens", "skipped_empty": 0}
        what = "texts" if source["dataset"] in FIELD_SOURCES else "files"
        skipped = (
            f" ({source['skipped_empty']:,} empty {what} skipped)"
            if source["skipped_empty"]
            else ""
        )
        answers = (
            f", {self.info['num_answer_tokens']:,} of them in answers"
            if WEIGHTS in self.columns
            else ""
        )
        lines = [
            f"corpus {source['dataset']}: {self.num_documents:,} documents{skipped}, {self.num_tokens:,} tokens"
            f"{answers}, in {self.folder}"
        ]
        if bad := source.get("skipped_bad"):
            lines.append(
                f"warning: {bad:,} bad documents skipped: " + "; ".join([*source["bad"], "…"][:bad])
            )
        if unread := source.get("unread"):
            lines.append(
                f"warning: fields that are not read: {unread}; training.dataset_columns reads those that a loss has, "
                "and a message counts by its weight, train, trainable, loss or loss_scale (docs/losses.md)"
            )
        if self.info["tokenizer"]["eos"] is None:
            lines.append(
                "warning: the tokenizer has no end token, so nothing in the tokens separates documents: the model will "
                "not learn to end a text, and generation goes on to its last token; name one as eos_token in a "
                "tokenizer_config.json beside tokenizer.json"
            )
        elif WEIGHTS in self.columns and not self.info["num_ended"]:
            lines.append(
                f"warning: no answer ends in the tokenizer's end token, {self.info['tokenizer']['eos']}, where "
                "generation stops; name the end of a turn as eos_token in a tokenizer_config.json beside tokenizer.json"
            )
        return "\n".join(lines)


def load_corpus(folder: Path) -> Corpus:
    """Opens a corpus's folder; checks corpus.json and each file's size and structure (not its checksums). If there are
    more than SMALL documents, their lengths are checked once per machine, as they are summed (split.py).

    ValueError: a file is missing, truncated or not what corpus.json says.
    """
    info = _read_info(folder)
    dtypes = {TOKENS: info["dtype"], OFFSETS: "<i8", HASHES: "<u8", FILE_ENDS: "<i8"}
    files: dict[str, ndarray] = {}
    for name, file in files_in(info).items():
        _check_size(folder / name, file["size"])
        if name in dtypes:
            files[name] = np.asarray(np.memmap(folder / name, dtypes[name], mode="r"))
    corpus = Corpus(
        folder=folder,
        tokens=files[TOKENS],
        offsets=files[OFFSETS],
        hashes=files[HASHES],
        info=info,
        name=str(folder),
        files=files.get(FILE_ENDS),
        columns={
            name: open_column(folder, name, *kind) for name, kind in info.get("columns", {}).items()
        },
    )
    if len(corpus.offsets) != corpus.num_documents + 1 or not _spans(
        corpus.offsets, corpus.num_tokens
    ):
        raise unfitting(folder / OFFSETS)
    if corpus.num_documents <= SMALL:
        check_lengths(corpus, 0, corpus.num_documents)
    if corpus.files is not None and (
        not _spans(corpus.files, corpus.num_documents) or _falls(corpus.files)
    ):
        raise unfitting(folder / FILE_ENDS)
    return corpus


def open_column(folder: Path, name: str, dtype: str, width: int, mode: Any = "r") -> ndarray:
    """[num_tokens], or with a width [num_tokens, width]; mapped."""
    numbers = np.asarray(np.memmap(folder / column_file(name), dtype, mode=mode))
    return numbers.reshape(-1, width) if width else numbers


def format_of(columns: Iterable[str]) -> str:
    return WEIGHTS_FORMAT if WEIGHTS in columns else FORMAT


def column_file(name: str) -> str:
    return f"column-{name}.bin"


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; {how_to_mend(path.parent)}")
    if path.stat().st_size != size:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes instead of {size:,}; {how_to_mend(path.parent)}"
        )


def _spans(ends: ndarray, total: int) -> bool:
    return ends[0] == 0 and ends[-1] == total


def unfitting(path: Path) -> ValueError:
    return ValueError(f"{path} does not fit the other files; {how_to_mend(path.parent)}")


def check_lengths(corpus: Corpus, low: int, high: int) -> ndarray:
    """Where documents [low, high) begin, and the last one's end, [high − low + 1] int64.

    ValueError: one has no tokens.
    """
    offsets = read(corpus.offsets, low, high + 1)
    if not (rising := offsets[1:] > offsets[:-1]).all():
        empty = low + int(rising.argmin())
        remedy = how_to_mend(corpus.folder)
        raise ValueError(
            f"{corpus.folder / 'offsets.bin'}: document {empty} has no tokens; {remedy}"
        )
    return offsets


def read(numbers: ndarray, low: int, high: int) -> ndarray:
    """numbers[low:high]; if they are of a mapped file, by reading it. For all of a large file that is several times as
    fast as page faults, and leaves none of its pages in this process."""
    if isinstance(numbers.base, np.memmap):
        offset = low * numbers.itemsize
        return np.fromfile(numbers.base.filename, numbers.dtype, high - low, offset=offset)
    return numbers[low:high]


def _falls(numbers: ndarray) -> bool:
    """Whether some number is less than the one before; looks part by part, as there may be 10⁹."""
    parts = (
        read(numbers, low, min(low + SMALL, len(numbers)))
        for low in range(0, len(numbers), SMALL - 1)
    )
    return any((part[1:] < part[:-1]).any() for part in parts)


def verify_corpus(corpus: Corpus) -> None:
    """Checks every byte of a corpus against its checksums. ValueError naming the file and the place."""
    verify_files(corpus.folder, files_in(corpus.info))


def verify_files(folder: Path, files: Mapping[str, Json]) -> None:
    """`verify_corpus`, of any files as `described`."""
    for name, expected in files.items():
        found = _checksums(folder / name)
        for block, (want, got) in enumerate(zip(expected["crc32"], found, strict=True)):
            if want != got:
                raise ValueError(
                    f"{folder / name} was altered: bytes {block * CRC_BLOCK:,} to "
                    f"{(block + 1) * CRC_BLOCK:,} do not have their checksum; {how_to_mend(folder)}"
                )


def verify_changed(corpus: Corpus) -> None:
    """`verify_corpus`, unless no file has changed since this last found the corpus whole."""
    verify_once(corpus.folder, INFO, files_in(corpus.info))


def verify_once(folder: Path, info: str, files: Mapping[str, Json]) -> None:
    """`verify_files`, unless every file still has the size, time and inode that it had when this last found them whole.

    If these cannot be noted among the caches, it says so, and the next start reads everything again.
    """
    for name, file in files.items():
        _check_size(folder / name, file["size"])
    path = os.fsencode(os.path.abspath(folder))
    note = default_cache_dir() / f"whole-{hashlib.sha256(path).hexdigest()[:24]}.json"
    stats = ((name, (folder / name).stat()) for name in (info, *files))
    found = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats}
    with suppress(Unreadable):
        if read_json(note, dict[str, list[int]], "") == found:
            return
    verify_files(folder, files)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, as_json(found))
    except OSError as error:
        print(
            f"warning: {note} cannot be written ({error}), so the next start reads all of {folder} again; set "
            "XDG_CACHE_HOME to a folder that can",
        )


def files_in(info: Json) -> dict[str, Json]:
    """The files of a corpus besides corpus.json."""
    columns = map(column_file, info.get("columns", {}))
    more = (name for name in (FILE_ENDS, PATHS) if name in info["files"])
    return {name: info["files"][name] for name in (*FILES, *columns, *more)}


def described(path: Path) -> Json:
    return {"size": path.stat().st_size, "crc32": _checksums(path)}


def _checksums(path: Path) -> list[int]:
    """CRC-32 of each CRC_BLOCK of a file, in threads (zlib releases the interpreter's lock)."""

    def checksum(start: int) -> int:
        return zlib.crc32(os.pread(file.fileno(), CRC_BLOCK, start))

    with path.open("rb") as file, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        starts = range(0, path.stat().st_size, CRC_BLOCK)
        return list(progress(pool.map(checksum, starts), f"reading {path}", len(starts)))


def info_checksum(info: Json) -> int:
    rest = {key: value for key, value in info.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def as_json(content: Any) -> str:
    return json.dumps(content, indent=1)


def how_to_mend(folder: Path) -> str:
    if CACHE_NAME.fullmatch(folder.name):
        return "it is a token cache: delete its folder and the next start writes it again"
    return "restore it from a copy, or write it again under another name"


def _read_info(folder: Path) -> Json:
    path = folder / INFO
    remedy = how_to_mend(folder)
    if (
        not path.is_file()
        and not CACHE_NAME.fullmatch(folder.name)
        and not (folder / FILES[0]).exists()
    ):
        raise ValueError(
            f"{path} is missing: {folder} is no corpus of tokens; titan-linear corpus writes one; for texts "
            f"training.dataset is {', '.join(TEXT_SOURCES[1:-1])} or {TEXT_SOURCES[-1]}"
        )
    info = read_json(path, Json, remedy)
    # Of other types, numpy would take what is in the file for addresses of Python's objects.
    for key, known in (("format", (FORMAT, WEIGHTS_FORMAT)), ("dtype", DTYPES)):
        if info.get(key) not in known:
            raise ValueError(
                f"{path}: {key} = {info.get(key)!r} must be {' or '.join(map(repr, known))}; {remedy}"
            )
    if info.get("checksum") != info_checksum(info):
        raise ValueError(f"{path} was altered: it does not have its checksum; {remedy}")
    check_kinds(info.get("columns", {}), path)
    return info


def add_file(path: Path, content: Any) -> None:
    """Add a file to a hash."""
    with path.open("rb") as file:
        while block := file.read(CRC_BLOCK):
            content.update(block)
