"""Corpora on disk: documents as tokens, memory-mapped, with a checksum for every byte.

A corpus is a folder (little-endian, no headers):

    tokens.bin    uint16 if the vocabulary has at most 2¹⁶ ids, else uint32   [num_tokens],
                  documents end to end
    offsets.bin   int64    [num_documents + 1]; document d is tokens[offsets[d] : offsets[d+1]],
                  never empty
    hashes.bin    uint64   [num_documents]; blake2b of the document's tokens, which decides the
                  held-out split
    column-*.bin  [num_tokens] or [num_tokens, n]: values of tokens, described by "columns" in
                  corpus.json; column-weights.bin: weight of each, in conversations 0 except for
                  answers. Without it, all count 1
    files.bin     int64    [num_files + 1], texts only: documents files[f] to files[f + 1] are of
                  text file f
    files.json    the paths of these text files when they were tokenised
    corpus.json   counts, dtype, the tokenizer's fingerprint, the content's fingerprint, the source,
                  and each file's size and CRC-32 per 16 MiB; a CRC-32 of the JSON itself under
                  "checksum"

Elsewhere (in a checkpoint, for example) a corpus is identified by `Corpus.fingerprint`,
which depends only on the tokens and on which of them are trained on.

Opening checks corpus.json and the sizes and structure of every file. `verify_corpus` checks
everything against the checksums, at the disk's speed, in threads. The preflight does that
before training starts, unless it has found the corpus whole before and no file has changed
since (`verify_changed`). A damaged corpus is an error and is never rebuilt automatically:
nothing that might be someone's only copy is deleted.
"""

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

from titan_linear.config import has_records
from titan_linear.data.corpus.columns import WEIGHTS, Kinds, check_kinds
from titan_linear.data.corpus.sources import CUSTOM, TEXT_SOURCES
from titan_linear.storage.files import (
    Json,
    Unreadable,
    default_cache_dir,
    progress,
    read_json,
    write_whole,
)

FORMAT = "titan_linear corpus 1"
# Code that knows only the first format would train on every token alike.
WEIGHTS_FORMAT = "titan_linear corpus 4"
# The dtypes of tokens.
DTYPES = ("<u2", "<u4")
# Bytes that one checksum covers.
CRC_BLOCK = 1 << 24
# Every process may look at this many documents.
SMALL = 1 << 22
# Names of cache folders, which we may remove.
CACHE_NAME = re.compile(rf"({'|'.join(TEXT_SOURCES)}|{CUSTOM})-[0-9a-f]{{24}}")
TOKENS, OFFSETS, HASHES = FILES = ("tokens.bin", "offsets.bin", "hashes.bin")
# Names of the files about text files.
FILE_ENDS = "files.bin"
PATHS = "files.json"
INFO = "corpus.json"
# The column of places in the corpus.
PLACE = "place"


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus. Its arrays are memory-mapped."""

    folder: Path
    tokens: ndarray  # [num_tokens] uint16 | uint32
    offsets: ndarray  # [num_documents + 1] int64
    hashes: ndarray  # [num_documents] uint64
    info: Json  # corpus.json
    # [num_files + 1] int64, number of documents before each text file; None if unknown.
    files: ndarray | None = None
    # The paths of these files, if requested.
    paths: tuple[str, ...] | None = None
    # [num_tokens] or [num_tokens, n] each.
    columns: Mapping[str, ndarray] = field(default_factory=dict)
    # The name in messages: the folder, or the key and path of the texts.
    name: str = ""

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
        """Return the number of documents that belong together: 2 in a corpus of pairs."""
        return self.info.get("group", 1)

    @property
    def pairs(self) -> bool:
        """Whether the corpus holds pairs, as two documents or as trees with two leaves."""
        return 2 in (self.group, self.info.get("leaves"))

    @property
    def fingerprint(self) -> str:
        """Return an identifier of the content.

        It covers these tokens, as these documents, in this order, and which of them are
        trained on. The tokenizer has a separate fingerprint.
        """
        return self.info["fingerprint"]

    @property
    def identity(self) -> tuple[str, str]:
        """Return the fingerprints of the content and the tokenizer."""
        return self.fingerprint, self.info["tokenizer"]["fingerprint"]

    def column(self, name: str, positions: ndarray) -> ndarray:
        """Return the values of the tokens at these positions, [n] or [n, width].

        A position after the last token stands for it. PLACE returns the positions
        themselves.
        """
        if name == PLACE:
            return positions.copy()
        if name == WEIGHTS and name not in self.columns:
            return np.ones(len(positions), dtype=np.float32)
        return np.take(self.columns[name], np.minimum(positions, self.num_tokens - 1), 0)

    @property
    def summary(self) -> str:
        """Return one line for the console, then one for each warning."""
        source = self.info["source"] or {"dataset": "tokens", "skipped_empty": 0}
        skipped = answers = ""
        if empty := source["skipped_empty"]:
            what = "texts" if has_records(source["dataset"]) else "files"
            skipped = f" ({empty:,} empty {what} skipped)"
        if WEIGHTS in self.columns:
            answers = f", {self.info['num_answer_tokens']:,} of them in answers"
        lines = [
            f"corpus {source['dataset']}: {self.num_documents:,} documents{skipped}, {self.num_tokens:,} tokens"
            f"{answers}, in {self.folder}"
        ]
        # Warnings.
        if bad := source.get("skipped_bad"):
            # The first of each reason, and how many share it.
            counts = [*source.get("reasons", {}).values()] or [1] * len(source["bad"])
            named = []
            for problem, count in zip(source["bad"], counts, strict=True):
                named.append(problem + (f" ({count:,} such)" if count > 1 else ""))
            if sum(counts) < bad:
                named.append("…")
            lines.append(f"warning: {bad:,} bad documents skipped: {'; '.join(named)}")
        if too_long := source.get("too_long"):
            lines.append(
                f"{too_long:,} records are longer than training.max_length, and were cut or left out as "
                "training.truncation has it"
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
    """Open a corpus's folder.

    Checks corpus.json and each file's size and structure, but not its checksums. The
    lengths of more than SMALL documents are checked once per machine, when they are summed
    (split.py).

    Raises:
        ValueError: a file is missing, truncated, or not as corpus.json describes it.
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
        columns=open_columns(folder, info.get("columns", {})),
    )
    # Check that offsets and files span the corpus in ascending order.
    count = corpus.num_documents
    offsets = corpus.offsets
    ends = corpus.files
    if len(offsets) != count + 1 or (offsets[0], offsets[-1]) != (0, corpus.num_tokens):
        raise unfitting(folder / OFFSETS)
    if count <= SMALL:
        check_lengths(corpus, 0, count)
    if ends is not None and ((ends[0], ends[-1]) != (0, count) or (np.diff(ends) < 0).any()):
        raise unfitting(folder / FILE_ENDS)
    return corpus


def open_columns(folder: Path, kinds: Kinds, mode: Any = "r") -> dict[str, ndarray]:
    """Map columns, [num_tokens] each, or with a width [num_tokens, width]."""
    columns = {}
    for name, (dtype, width) in kinds.items():
        numbers = np.asarray(np.memmap(folder / column_file(name), dtype, mode=mode))
        columns[name] = numbers.reshape(-1, width) if width else numbers
    return columns


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


def unfitting(path: Path) -> ValueError:
    return ValueError(f"{path} does not fit the other files; {how_to_mend(path.parent)}")


def check_lengths(corpus: Corpus, low: int, high: int) -> ndarray:
    """Return where documents [low, high) begin and the last ends, [high − low + 1] int64.

    Raises:
        ValueError: a document has no tokens.
    """
    offsets = read(corpus.offsets, low, high + 1)
    rising = offsets[1:] > offsets[:-1]
    if not rising.all():
        empty = low + int(rising.argmin())
        remedy = how_to_mend(corpus.folder)
        raise ValueError(f"{corpus.folder / OFFSETS}: document {empty} has no tokens; {remedy}")
    return offsets


def read(numbers: ndarray, low: int, high: int) -> ndarray:
    """Return numbers[low:high], read from disk if `numbers` is a mapped file.

    For a whole large file, reading is several times faster than page faults, and leaves
    none of its pages in this process.
    """
    if isinstance(numbers.base, np.memmap):
        offset = low * numbers.itemsize
        return np.fromfile(numbers.base.filename, numbers.dtype, high - low, offset=offset)
    return numbers[low:high]


def verify_corpus(corpus: Corpus) -> None:
    """Check every byte of a corpus against its checksums.

    Raises:
        ValueError: naming the file and the place.
    """
    verify_files(corpus.folder, files_in(corpus.info))


def verify_files(folder: Path, files: Mapping[str, Json]) -> None:
    """Check files against the sizes and checksums that `described` returned."""
    for name, expected in files.items():
        found = _checksums(folder / name)
        for block, (want, got) in enumerate(zip(expected["crc32"], found, strict=True)):
            if want != got:
                raise ValueError(
                    f"{folder / name} was altered: bytes {block * CRC_BLOCK:,} to "
                    f"{(block + 1) * CRC_BLOCK:,} do not have their checksum; {how_to_mend(folder)}"
                )


def verify_changed(corpus: Corpus) -> None:
    """Run `verify_corpus`, unless no file has changed since it last found the corpus whole."""
    verify_once(corpus.folder, INFO, files_in(corpus.info))


def verify_once(folder: Path, info: str, files: Mapping[str, Json]) -> None:
    """Run `verify_files`, unless every file is unchanged since it was last found whole.

    A file's size, time and inode decide. If these cannot be stored in the cache folder, a
    warning is printed, and the next start reads everything again.
    """
    for name, file in files.items():
        _check_size(folder / name, file["size"])
    # Compare with the file stats noted when the files were last found whole.
    path = os.fsencode(os.path.abspath(folder))
    note = default_cache_dir() / f"whole-{hashlib.sha256(path).hexdigest()[:24]}.json"
    stats = ((name, (folder / name).stat()) for name in (info, *files))
    found = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats}
    with suppress(Unreadable):
        if read_json(note, dict[str, list[int]], "") == found:
            return
    # Read everything, and note the stats for the next start.
    verify_files(folder, files)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, found)
    except OSError as error:
        print(
            f"warning: {note} cannot be written ({error}), so the next start reads all of {folder} again; set "
            "XDG_CACHE_HOME to a folder that can",
        )


def files_in(info: Json) -> dict[str, Json]:
    """Return the files of a corpus besides corpus.json."""
    columns = map(column_file, info.get("columns", {}))
    more = (name for name in (FILE_ENDS, PATHS) if name in info["files"])
    return {name: info["files"][name] for name in (*FILES, *columns, *more)}


def described(path: Path) -> Json:
    return {"size": path.stat().st_size, "crc32": _checksums(path)}


def _checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each CRC_BLOCK of a file.

    Threads compute them (zlib releases the interpreter's lock).
    """

    def checksum(start: int) -> int:
        return zlib.crc32(os.pread(file.fileno(), CRC_BLOCK, start))

    with path.open("rb") as file, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        starts = range(0, path.stat().st_size, CRC_BLOCK)
        return list(progress(pool.map(checksum, starts), f"reading {path}", len(starts)))


def info_checksum(info: Json) -> int:
    rest = {key: value for key, value in info.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1))


def how_to_mend(folder: Path) -> str:
    if CACHE_NAME.fullmatch(folder.name):
        return "it is a token cache: delete its folder and the next start writes it again"
    return "restore it from a copy, or write it again under another name"


def _read_info(folder: Path) -> Json:
    path = folder / INFO
    remedy = how_to_mend(folder)
    ours = CACHE_NAME.fullmatch(folder.name) or (folder / TOKENS).exists()
    if not path.is_file() and not ours:
        raise ValueError(
            f"{path} is missing: {folder} is not a corpus of tokens; titan-linear corpus writes one; for texts "
            f"training.dataset is {', '.join(TEXT_SOURCES[1:-1])} or {TEXT_SOURCES[-1]}"
        )
    info = read_json(path, Json, remedy)
    # With other dtypes, numpy would take the file's content for addresses of Python
    # objects.
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
    """Add a file's content to a hash."""
    with path.open("rb") as file:
        while block := file.read(CRC_BLOCK):
            content.update(block)
