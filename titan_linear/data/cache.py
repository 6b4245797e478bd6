"""Corpora on disk: documents as tokens, memory-mapped, with a checksum for every byte.

A corpus is a folder (little-endian, no headers):

    tokens.bin    uint16 if the vocabulary has at most 2¹⁶ ids, else uint32   [num_tokens], documents end to end
    offsets.bin   int64    [num_documents + 1]; document d is tokens[offsets[d] : offsets[d+1]], never empty
    hashes.bin    uint64   [num_documents]; blake2b of the document's tokens, which decides the held-out split
    answers.bin   int64    [2 · num_answers], of conversations alone: tokens[answers[2a] : answers[2a + 1]] is answer a,
                           which is learnt; the other tokens are not. Without this file all are
    files.bin     int64    [num_files + 1], of texts alone: documents files[f] to files[f + 1] are of text file f
    files.json    the paths of these text files when they were tokenised
    corpus.json   counts, dtype, the tokenizer's fingerprint, the content's fingerprint, the source, and each file's
                  size and CRC-32 per 16 MiB; a CRC-32 of the JSON itself under "checksum"

Corpora of earlier versions have neither files.bin nor files.json. A cache gets them when somebody asks for them, for
which its texts are read once more.

`write_corpus` writes one from documents that are tokens already and `tokenise_corpus` from texts (`training.dataset =
"tokens"` then reads them); `open_corpus` writes one from texts, once, as a cache. All write to `<folder>.tmp` under an
flock on `<folder>.lock`, fsync, and rename, so that a corpus is whole or absent, and of the processes that start
together one writes and the others wait. A tokenising that was stopped goes on where it was: every few seconds the files
in `<folder>.tmp` are brought to the disk, and progress.json says how much of them counts.

A cache's folder is named by what would change its content: the format, the dataset, the text field (of conversations
their kind and template), the tokenizer's fingerprint, and path, size and modification time of every file. The texts
themselves are not read for it, because that would mean reading all of a terabyte at every start; so a file changed with
its size and time kept is not noticed. Where there is no folder of that name, the texts are read once, which takes
little beside tokenising them: if they are those of a cache that is there, under whatever paths and times, a file
`<folder>.same` names that one from then on. What identifies a corpus elsewhere (in a checkpoint, say) is
`Corpus.fingerprint`, made from the tokens alone and which of them are learnt. Whether bad documents stop the work or
are skipped is no part of the name: a corpus notes those that it lacks, and is refused where they should have stopped
it.

Opening checks corpus.json and the sizes and structure of every file. `verify_corpus` reads everything once (at
the disk's speed, in threads) against the checksums; the preflight does that before training starts, of a corpus that it
has found whole before only where a file is another (`verify_changed`). A damaged corpus is an error and is never
rebuilt by itself: nothing that might be someone's only copy is deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from titan_linear.data.chat import Completions, Conversations, Learnt
from titan_linear.data.sources import (
    FIELD_SOURCES,
    FORMATS,
    TEXT_SOURCES,
    Document,
    read_documents,
    source_files,
)
from titan_linear.data.tokenise import Encoder, Tokens, tokenise, worker_count
from titan_linear.data.tokenizer import Tokenizer
from titan_linear.files import sync, write_whole

DATASETS = (*TEXT_SOURCES, "tokens")
FORMAT = "titan_linear corpus 1"
ANSWERS_FORMAT = "titan_linear corpus 2"  # what reads the first alone would learn every token
CRC_BLOCK = 1 << 24  # bytes
LONG = 50 * 10**9  # bytes that take some time to read
SMALL = 1 << 22  # documents of which every process may look at all
JOURNAL_SECONDS = 5.0  # of tokenising that a kill costs
CACHE_NAME = re.compile(rf"({'|'.join(TEXT_SOURCES)})-[0-9a-f]{{24}}")  # of the folders that are ours to remove
_FILES = ("tokens.bin", "offsets.bin", "hashes.bin")
_ANSWERS = "answers.bin"
_SOURCE, _PATHS = "files.bin", "files.json"  # of the texts
_INFO, _JOURNAL = "corpus.json", "progress.json"
_OURS = {*_FILES, _ANSWERS, _SOURCE, *(name + end for name in (_PATHS, _INFO, _JOURNAL) for end in ("", ".new"))}
_NAMED = 3  # of the bad documents that were skipped
_SKIP = (
    'training.on_bad_document = "skip" (tools.corpus: --on-bad-document skip) goes past such documents and counts them'
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus. Its arrays are memory-mapped; pickled, it travels as its path."""

    folder: Path
    tokens: np.ndarray  # [num_tokens] uint16 | uint32
    offsets: np.ndarray  # [num_documents + 1] int64
    hashes: np.ndarray  # [num_documents] uint64
    info: dict[str, Any]  # corpus.json
    answers: np.ndarray | None = None  # [2 · num_answers] int64, rising; None: all tokens are learnt
    files: np.ndarray | None = None  # [num_files + 1] int64: documents before each text file; None: it is not known
    paths: tuple[str, ...] | None = None  # of these files, where they were asked for

    def __reduce__(self) -> tuple:
        return load_corpus, (self.folder,)

    @property
    def num_documents(self) -> int:
        return len(self.hashes)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """Identifies the content: these tokens, as these documents, in this order, and which of them are learnt. The
        tokenizer has its own."""
        return self.info["fingerprint"]

    def is_learnt(self, positions: np.ndarray) -> np.ndarray:
        """Which tokens are to be predicted, [n] bool, of those at these positions in `tokens`, [n] int64."""
        if self.answers is None:
            return np.ones(len(positions), dtype=bool)
        return np.searchsorted(self.answers, positions, side="right") % 2 == 1

    @property
    def summary(self) -> str:
        """For the console: a line, and one for each thing that one should know."""
        source = self.info["source"] or {"dataset": "tokens", "skipped_empty": 0}
        what = "texts" if source["dataset"] in FIELD_SOURCES else "files"
        skipped = f" ({source['skipped_empty']:,} empty {what} skipped)" if source["skipped_empty"] else ""
        learnt = "" if self.answers is None else f", {self.info['num_learnt']:,} of them in answers"
        lines = [
            f"corpus {source['dataset']}: {self.num_documents:,} documents{skipped}, {self.num_tokens:,} tokens"
            f"{learnt}, in {self.folder}"
        ]
        if bad := source.get("skipped_bad"):
            lines.append(f"warning: {bad:,} bad documents skipped: " + "; ".join([*source["bad"], "…"][:bad]))
        if self.info["tokenizer"]["eos"] is None:
            lines.append(
                "warning: the tokenizer has no end token, so nothing in the tokens separates documents: the model will "
                "not learn to end a text, and generation goes on to its last token; name one as eos_token in a "
                "tokenizer_config.json beside tokenizer.json"
            )
        elif self.answers is not None and not self.info["num_ended"]:
            lines.append(
                f"warning: no answer ends in the tokenizer's end token, {self.info['tokenizer']['eos']}, where "
                "generation stops; name the end of a turn as eos_token in a tokenizer_config.json beside tokenizer.json"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Texts:
    """What is to be tokenised, and how."""

    dataset: str
    files: list[Path]
    text_field: str
    dataset_format: str
    tokenizer: Tokenizer
    on_bad_document: str
    show_progress: bool

    @cached_property
    def encoder(self) -> Encoder:
        """Of the documents: the tokenizer of texts, or what knows conversations."""
        makers = {"messages": Conversations, "completion": Completions}
        return self.tokenizer if self.dataset_format == "text" else makers[self.dataset_format](self.tokenizer)

    @property
    def format(self) -> str:
        return FORMAT if self.dataset_format == "text" else ANSWERS_FORMAT

    @cached_property
    def content(self) -> str:
        """Another one for whatever does change them: the same under other paths and times. Reads all files."""
        content = hashlib.blake2b(json.dumps(self._how).encode("utf-8", "surrogateescape"), digest_size=16)
        try:
            for file in tqdm(self.files, desc=f"reading {self.dataset}", disable=not self.show_progress, delay=2):
                content.update(f"\n{file.suffix} {file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
                _digest(file, content)
        except OSError as error:
            raise _unreadable(error) from error
        return content.hexdigest()

    @property
    def _how(self) -> list[str | None]:
        """What the tokens depend on beside the files."""
        field_or_format = self.text_field if self.dataset in FIELD_SOURCES else None
        if self.dataset_format != "text":
            field_or_format = self.encoder.fingerprint
        return [self.format, self.dataset, field_or_format, self.tokenizer.fingerprint]

    @property
    def key(self) -> str:
        """Another one for whatever could change the tokens."""
        try:
            stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in self.files]
        except OSError as error:
            raise _unreadable(error) from error
        key = json.dumps([*self._how, stats])
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def open_corpus(
    dataset: str,
    dataset_path: str | None,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    dataset_format: str = "text",
    on_bad_document: str = "stop",
    cache_dir: Path | None = None,
    with_paths: bool = False,
    show_progress: bool = False,
    path_key: str = "training.dataset_path",
) -> Corpus:
    """Opens a corpus, tokenising its texts first if no cache of them exists.

    Each text ends in `tokenizer.eos_id` where there is one. Empty texts are skipped and counted.
    dataset_format: "text", or of records that are conversations "messages" or "completion" (chat.py).
    on_bad_document: what is none (no JSON, no such field, no UTF-8 for a tokenizer that needs it, no answer) is an
    error ("stop"), or it is skipped, counted, and the first few are named in `Corpus.summary` ("skip").
    cache_dir: $XDG_CACHE_HOME/titan_linear, or ~/.cache/titan_linear. path_key: the key that errors name.
    with_paths: the text files' paths too, in `Corpus.paths`; of a corpus of tokens those of when it was written, if it
    knows them.
    ValueError: an unknown dataset, a bad path, a bad document (file and line named), a damaged corpus, a corpus of
    another tokenizer.
    """
    if dataset not in DATASETS:
        raise ValueError(f"training.dataset = {dataset!r} must be one of {', '.join(DATASETS)}")
    assert dataset_format in FORMATS, dataset_format
    if dataset == "tokens":
        if not dataset_path:
            raise ValueError(f'{path_key} is empty: training.dataset = "tokens" needs a corpus\'s folder')
        folder = Path(dataset_path).expanduser().absolute()
        if not folder.is_dir():
            raise ValueError(
                f"{path_key} = {dataset_path!r}: there is no such folder; give a corpus's (tools.corpus writes one)"
            )
    else:
        files = source_files(dataset, dataset_path, path_key=path_key)
        texts = _Texts(dataset, files, text_field, dataset_format, tokenizer, on_bad_document, show_progress)
        folder = (cache_dir or default_cache_dir()) / f"{dataset}-{texts.key}"
        folder = _named(folder) or _build_cache(folder, texts)
        with suppress(OSError):  # a cache that others wrote for us
            os.utime(_lock_file(folder))  # its last use
    corpus = load_corpus(folder)
    if with_paths:
        corpus = _with_own_paths(corpus) if dataset == "tokens" else _with_paths(corpus, texts)
    if corpus.info["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{path_key} = {dataset_path!r}: written with tokenizer {corpus.info['tokenizer']['fingerprint']!r}, but "
            f"model.tokenizer_path gives {tokenizer.fingerprint!r}; set the tokenizer that it was written with"
        )
    if dataset != "tokens" and on_bad_document == "stop" and (source := corpus.info["source"]).get("skipped_bad"):
        raise ValueError(f"{source['bad'][0]}; {_SKIP} ({source['skipped_bad']:,} in all)")
    return corpus


def cached_corpus(
    dataset: str, dataset_path: str | None, tokenizer: Tokenizer, *, text_field: str, dataset_format: str,
    on_bad_document: str,
) -> Corpus | None:  # fmt: skip
    """A corpus of tokens, or of texts that are in the cache; None: it is not here. Nothing is written."""
    try:
        folder = Path(dataset_path or "").expanduser()
        if dataset != "tokens":
            files = source_files(dataset, dataset_path)
            texts = _Texts(dataset, files, text_field, dataset_format, tokenizer, on_bad_document, False)
            folder = _named(default_cache_dir() / f"{dataset}-{texts.key}")
        return load_corpus(folder) if folder and (folder / _INFO).exists() else None
    except ValueError:  # which the run refuses itself
        return None


def default_cache_dir() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan_linear"


def write_corpus(
    folder: str | Path, documents: Iterable[np.ndarray] | Iterable[Learnt], tokenizer: Tokenizer, *,
    answers: bool = False,
) -> None:  # fmt: skip
    """Writes a corpus from documents that are tokens, each [n] integers with its eos if it is to have one.

    answers: each document is its tokens and which of them are learnt, [n] bool; else all are.
    ValueError: the folder exists, there is no document, a document is empty or has an id outside the vocabulary.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if folder.exists():
            raise ValueError(f"{folder} exists already; choose another folder")
        _write_corpus(folder, iter(documents), tokenizer, _Progress(answers=answers))


def tokenise_corpus(
    folder: Path,
    dataset: str,
    dataset_path: str | None,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    dataset_format: str = "text",
    on_bad_document: str = "stop",
    show_progress: bool = False,
    path_key: str = "training.dataset_path",
) -> Corpus:
    """Writes the corpus of these texts into a folder of its own; arguments and errors of `open_corpus`.

    ValueError, too: the folder exists, or cannot be written.
    """
    if dataset not in TEXT_SOURCES:
        raise ValueError(f"training.dataset = {dataset!r} must be one of {', '.join(TEXT_SOURCES)}")
    files = source_files(dataset, dataset_path, path_key=path_key)
    texts = _Texts(dataset, files, text_field, dataset_format, tokenizer, on_bad_document, show_progress)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if folder.exists():
                raise ValueError(f"{folder} exists already; choose another folder")
            _tokenise_into(folder, texts)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error}; choose a folder that can") from error
    return load_corpus(folder)


def remove_cache(folder: Path) -> bool:
    """Removes a cache and what an unfinished one left; False if another process writes it."""
    assert CACHE_NAME.fullmatch(folder.name), folder
    with _lock_file(folder).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(_temporary(folder), ignore_errors=True)
        if folder.exists():
            folder.rename(_temporary(folder))  # cut short, the removal leaves nothing that could be opened
            shutil.rmtree(_temporary(folder))
    return True


def load_corpus(folder: Path) -> Corpus:
    """Opens a corpus's folder; checks corpus.json and each file's size and structure (not its checksums). The lengths
    of more than SMALL documents are checked once in a machine, with their sums (split.py).

    ValueError: a file is missing, truncated or not what corpus.json says.
    """
    info, remedy = _read_info(folder), _remedy(folder)
    dtypes = dict(zip((*_FILES, _ANSWERS, _SOURCE), (info["dtype"], "<i8", "<u8", "<i8", "<i8")))
    arrays: dict[str, np.ndarray] = {}
    for name in _names_in(info):
        path, expected = folder / name, info["files"][name]["size"]
        if not path.is_file():
            raise ValueError(f"{path} is missing; {remedy}")
        if path.stat().st_size != expected:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes instead of {expected:,}; {remedy}")
        if name in dtypes:
            arrays[name] = np.asarray(np.memmap(path, dtypes[name], mode="r"))
    (tokens, offsets, hashes), answers = (arrays[name] for name in _FILES), arrays.get(_ANSWERS)
    if offsets[0] != 0 or offsets[-1] != len(tokens) or len(offsets) != len(hashes) + 1:
        raise ValueError(f"{folder / 'offsets.bin'} does not fit the other files; {remedy}")
    corpus = Corpus(folder, tokens, offsets, hashes, info, answers, arrays.get(_SOURCE))
    if corpus.num_documents <= SMALL:
        check_lengths(corpus, 0, corpus.num_documents)
    if answers is not None and (
        len(answers) % 2 or answers[0] < 0 or answers[-1] > len(tokens) or _falls(answers)
    ):  # fmt: skip
        raise ValueError(f"{folder / _ANSWERS} does not fit the other files; {remedy}")
    if corpus.files is not None and (
        corpus.files[0] != 0 or corpus.files[-1] != corpus.num_documents or _falls(corpus.files)
    ):  # fmt: skip
        raise ValueError(f"{folder / _SOURCE} does not fit the other files; {remedy}")
    return corpus


def check_lengths(corpus: Corpus, low: int, high: int) -> np.ndarray:
    """Where documents [low, high) begin, and the last one's end, [high − low + 1] int64.

    ValueError: one has no tokens.
    """
    offsets = read(corpus.offsets, low, high + 1)
    if not (rising := offsets[1:] > offsets[:-1]).all():
        empty, remedy = low + int(rising.argmin()), _remedy(corpus.folder)
        raise ValueError(f"{corpus.folder / 'offsets.bin'}: document {empty} has no tokens; {remedy}")
    return offsets


def read(numbers: np.ndarray, low: int, high: int) -> np.ndarray:
    """numbers[low:high]; those of a mapped file by reading it, which for all of a large one is several times as fast as
    the faults of its pages, and leaves none of them in this process."""
    if isinstance(numbers.base, np.memmap):
        offset = low * numbers.itemsize
        return np.fromfile(numbers.base.filename, numbers.dtype, high - low, offset=offset)
    return numbers[low:high]


def _falls(numbers: np.ndarray) -> bool:
    """Whether some number is less than the one before; part by part, as there may be 10⁹."""
    parts = (read(numbers, low, min(low + SMALL, len(numbers))) for low in range(0, len(numbers), SMALL - 1))
    return any((part[1:] < part[:-1]).any() for part in parts)


def verify_corpus(corpus: Corpus) -> None:
    """Reads every byte of a corpus against its checksums. ValueError naming the file and the place."""
    remedy, names = _remedy(corpus.folder), _names_in(corpus.info)
    if (size := sum(corpus.info["files"][name]["size"] for name in names)) >= LONG:
        print(
            f"reading {size / 1e9:,.0f} GB in {corpus.folder} against their checksums (training.verify = 'changed': "
            "later starts do so only where a file is another)",
            flush=True,
        )
    for name in names:
        expected, found = corpus.info["files"][name]["crc32"], _checksums(corpus.folder / name)
        for block, (want, got) in enumerate(zip(expected, found, strict=True)):
            if want != got:
                raise ValueError(
                    f"{corpus.folder / name} was altered: bytes {block * CRC_BLOCK:,} to "
                    f"{(block + 1) * CRC_BLOCK:,} do not have their checksum; {remedy}"
                )


def verify_changed(corpus: Corpus) -> None:
    """`verify_corpus`, unless every file still has the size, time and inode that it had when this last found it whole.

    Where that cannot be noted among the caches, it says so, and the next start reads everything again.
    """
    note = default_cache_dir() / f"whole-{hashlib.sha256(os.fsencode(corpus.folder)).hexdigest()[:24]}.json"
    stats = ((name, (corpus.folder / name).stat()) for name in (_INFO, *_names_in(corpus.info)))
    files = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats}
    with suppress(OSError, ValueError):
        if json.loads(note.read_bytes()) == files:
            return
    verify_corpus(corpus)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, _json(files))
    except OSError as error:
        print(
            f"warning: {note} cannot be written ({error}), so the next start reads all of {corpus.folder} again; set "
            "XDG_CACHE_HOME to a folder that can",
            flush=True,
        )


# --- writing -----------------------------------------------------------------------------------------------------


class _BadDocument(ValueError):
    """A document stops the work, after which one may choose to skip it."""


@dataclass
class _Progress:
    """How far the writing of a corpus has come; as JSON, the journal of the files in <folder>.tmp."""

    key: str = ""  # of the texts; empty: documents that are tokens, which are not journaled
    texts: str = ""  # their content
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
    files_read: int = 0  # to their ends
    num_files: int = 0  # of them, those that are written


# --- the texts' files --------------------------------------------------------------------------------------------


def _with_own_paths(corpus: Corpus) -> Corpus:
    """With the paths that it was written with, if it knows them."""
    if corpus.files is None:
        return corpus
    path, paths = corpus.folder / _PATHS, ()
    with suppress(OSError, ValueError, TypeError):
        paths = tuple(json.loads(path.read_bytes()))
    if len(paths) != len(corpus.files) - 1:
        raise ValueError(f"{path} does not fit the other files; {_remedy(corpus.folder)}")
    return replace(corpus, paths=paths)


def _with_paths(corpus: Corpus, texts: _Texts) -> Corpus:
    """With the paths under which its texts are now. A cache of an earlier version first learns its files."""
    if corpus.files is None:
        try:
            with locked(corpus.folder):
                if load_corpus(corpus.folder).files is None:  # no other process has just done it
                    _add_files(corpus, texts)
        except OSError as error:
            raise ValueError(
                f"the token cache {corpus.folder} cannot be written ({error}), and is of an earlier version, which did "
                "not note the files of documents; set XDG_CACHE_HOME to a folder that can"
            ) from error
        corpus = load_corpus(corpus.folder)
    assert corpus.files is not None and len(corpus.files) == len(texts.files) + 1, corpus.folder
    return replace(corpus, paths=tuple(map(str, texts.files)))


def _add_files(corpus: Corpus, texts: _Texts) -> None:
    """Counts the documents of each file, and adds files.bin and files.json to a cache."""
    folder, key, counts = corpus.folder, texts.key, [0]
    for file in tqdm(texts.files, desc=f"reading {texts.dataset}", disable=not texts.show_progress, delay=2):
        documents = read_documents(texts.dataset, [file], texts.text_field, texts.dataset_format)
        counts.append(sum(document.content != "" and not document.problem for document in documents))
    _check_unchanged(key, texts)
    if sum(counts) != corpus.num_documents:  # the tokenizer had skipped some: which, it would have to say again
        raise ValueError(
            f"the token cache {folder} is of an earlier version, which did not note the files of documents, and their "
            f"texts alone do not tell which were skipped; python -m tools.corpus prune {folder.name} removes it, and "
            "the next start writes it again"
        )
    with (folder / _SOURCE).open("wb") as file:
        file.write(np.cumsum(counts).astype("<i8").tobytes())
        _sync(file)
    write_whole(folder / _PATHS, _json([str(file) for file in texts.files]))
    added = {name: _described(folder / name) for name in (_SOURCE, _PATHS)}
    info = corpus.info | {"files": corpus.info["files"] | added}
    write_whole(folder / _INFO, _json(info | {"checksum": _info_checksum(info)}))
    sync(folder)


def _unreadable(error: OSError) -> ValueError:
    return ValueError(f"{error.filename} cannot be read: {error.strerror}; leave it out, or give the permission")


def _named(folder: Path) -> Path | None:
    """The cache that a name means: its own, or that of the same texts elsewhere."""
    if folder.exists():
        return folder
    with suppress(OSError, ValueError):
        same = folder.with_name(_same_file(folder).read_text())
        return same if CACHE_NAME.fullmatch(same.name) and same.exists() else None
    return None


def _build_cache(folder: Path, texts: _Texts) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if there := _named(folder):  # another process wrote it while this one waited
                return there
            if same := _same_texts(folder.parent, texts):
                _check_unchanged(folder.name.rpartition("-")[2], texts)
                _same_file(folder).write_text(same.name)
                return same
            _tokenise_into(folder, texts)
            return folder
    except OSError as error:  # no permission, a full disk, no locks on this file system
        raise ValueError(
            f"the token cache {folder} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error


def _same_texts(caches: Path, texts: _Texts) -> Path | None:
    """A cache of these texts, under whatever paths and times they had."""
    known = {}
    for info in caches.glob(f"{texts.dataset}-*/{_INFO}"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # damaged, or of an older version
            known[json.loads(info.read_bytes())["texts"]] = info.parent
    return known.get(texts.content) if known else None


def _tokenise_into(folder: Path, texts: _Texts) -> None:
    new = _Progress(texts.key, texts.content, answers=texts.format == ANSWERS_FORMAT)
    progress = _read_journal(folder, texts) or new
    if progress.read:
        print(f"continuing where tokenising was stopped, after {progress.num_documents:,} documents", flush=True)
    _write_corpus(folder, _tokenised(texts, progress), texts.tokenizer, progress, texts)


def _tokenised(texts: _Texts, progress: _Progress) -> Iterator[Tokens]:
    """The tokens of each document that `progress` has not read, of texts with eos. Counts what it reads and skips."""
    ends: deque[int] = deque()  # of the files that are read: documents up to its end
    eos = np.array([] if texts.tokenizer.eos_id is None else [texts.tokenizer.eos_id], dtype=np.int64)
    total = sum(file.stat().st_size for file in texts.files)
    documents = islice(_read(texts, ends), progress.read, None)
    progress.files_read = 0
    bar = tqdm(
        total=total, initial=progress.size, unit="B", unit_scale=True, desc=f"tokenising {texts.dataset}", smoothing=0,
        disable=not texts.show_progress,
    )  # fmt: skip
    with bar, closing(tokenise(texts.encoder, documents, worker_count(total))) as encoded:
        for document, tokens in encoded:
            bar.update(document.size)
            while ends and ends[0] <= progress.read:
                ends.popleft()
                progress.files_read += 1
            progress.read, progress.size = progress.read + 1, progress.size + document.size
            if problem := document.problem or (tokens if isinstance(tokens, str) else ""):
                _meet_bad_document(f"{document.origin}: {problem}", texts, progress)
            elif progress.answers:
                yield tokens
            elif len(tokens):
                yield np.concatenate([tokens, eos])
            else:
                progress.skipped_empty += 1
    progress.files_read = len(texts.files)
    if not progress.num_documents:
        bad = f"; bad are {progress.skipped_bad:,}: {progress.bad[0]}" if progress.bad else ""
        raise ValueError(
            f"training.dataset = {texts.dataset!r} has no text: {len(texts.files)} files, all empty "
            f"({texts.files[0]}, …){bad}; give others (training.dataset_path)"
        )
    _check_unchanged(progress.key, texts)


def _read(texts: _Texts, ends: deque[int]) -> Iterator[Document]:
    """The documents of all files. How many there are up to the end of each file is added to `ends` behind it."""
    read = 0
    for file in texts.files:
        for document in read_documents(texts.dataset, [file], texts.text_field, texts.dataset_format):
            read += 1
            yield document
        ends.append(read)


def _check_unchanged(key: str, texts: _Texts) -> None:
    if texts.key != key:
        raise ValueError(f"files of training.dataset = {texts.dataset!r} changed while they were read; start again")


def _meet_bad_document(problem: str, texts: _Texts, progress: _Progress) -> None:
    if texts.on_bad_document == "stop":
        raise _BadDocument(f"{problem}; {_SKIP}")
    progress.skipped_bad += 1
    if len(progress.bad) < _NAMED:
        progress.bad.append(problem)


def _temporary(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


def _same_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".same")


def _lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `<folder>.lock`, which stays behind: removing it would let two processes lock different files."""
    with _lock_file(folder).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_corpus(
    folder: Path, documents: Iterator[Tokens], tokenizer: Tokenizer, progress: _Progress,
    texts: _Texts | None = None,
) -> None:  # fmt: skip
    """Writes `<folder>.tmp` whole, or the rest of it, then renames it."""
    temporary = _temporary(folder)
    if not progress.read:
        _remove_remains(temporary)  # of a writer that was killed: the caller holds the lock
        temporary.mkdir(parents=True)
    try:
        content = _write_arrays(temporary, documents, tokenizer, progress)
        names = list(_names(progress))
        if texts is not None:
            write_whole(temporary / _PATHS, _json([str(file) for file in texts.files]))
            names.append(_PATHS)
        files = {name: _described(temporary / name) for name in names}
        described = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos_id}
        source = None if texts is None else _describe(texts, progress)
        head = {"format": ANSWERS_FORMAT if progress.answers else FORMAT, **content}
        info = {**head, "tokenizer": described, "source": source, "files": files}
        if progress.texts:
            info["texts"] = progress.texts
        info["checksum"] = _info_checksum(info)
        write_whole(temporary / _INFO, _json(info))
        (temporary / _JOURNAL).unlink(missing_ok=True)
        sync(temporary)
        os.rename(temporary, folder)
        sync(folder.parent)
    except BaseException as stop:
        if isinstance(stop, (KeyboardInterrupt, SystemExit, _BadDocument)) and (temporary / _JOURNAL).exists():
            print(f"what is tokenised is kept in {temporary}: the same command resumes from it", flush=True)
        else:  # a full disk, say: leave no half corpus to fill it
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _described(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "crc32": _checksums(path)}


def _describe(texts: _Texts, progress: _Progress) -> dict[str, Any]:
    source = {"dataset": texts.dataset, "files": len(texts.files), "skipped_empty": progress.skipped_empty}
    return source | ({"skipped_bad": progress.skipped_bad, "bad": progress.bad} if progress.bad else {})


def _remove_remains(temporary: Path) -> None:
    if temporary.exists():
        if others := sorted({path.name for path in temporary.iterdir()} - _OURS):
            raise ValueError(
                f"{temporary}, where a corpus is written first, holds {others[0]!r}; choose another folder"
            )
        shutil.rmtree(temporary)


def _write_arrays(
    folder: Path, documents: Iterator[Tokens], tokenizer: Tokenizer, progress: _Progress
) -> dict[str, Any]:
    """Writes what is in _names after what counts of it; the counts, dtype and fingerprint for corpus.json."""
    dtype = _dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        if hasattr(documents, "close"):
            stack.callback(documents.close)  # its processes end with the writing, however that ends
        files = _open_arrays(folder, dtype, progress, stack)
        (tokens, offsets, hashes), rest = files[:3], dict(zip(_names(progress)[3:], files[3:]))
        answers, sources = rest.get(_ANSWERS), rest.get(_SOURCE)
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
                    _sync(file)
                write_whole(folder / _JOURNAL, _json(asdict(progress)))
                journaled = time.monotonic()
        if not progress.num_documents:
            raise ValueError(f"no documents to write to {folder}; give one at least")
        if sources:
            sources.write(_file_ends(progress))
        for file in files:
            _sync(file)
    counts = {"num_documents": progress.num_documents, "num_tokens": progress.num_tokens, "dtype": dtype}
    if progress.answers:
        _digest(folder / _ANSWERS, content)
        counts |= {"num_learnt": progress.num_learnt, "num_ended": progress.num_ended}
    return {**counts, "fingerprint": content.hexdigest()[:32]}


def _checked(ids: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """The tokens of document n, [n]."""
    if not ids.size:
        raise ValueError(f"document {n} has no tokens; leave it out")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"document {n} has tokens outside the vocabulary, 0 to {vocab_size - 1}; leave them out")
    return ids


def _answers(ids: np.ndarray, learnt: np.ndarray, tokenizer: Tokenizer, progress: _Progress) -> bytes:
    """Of answers.bin, for the document that follows; ids [n], learnt [n] bool."""
    if learnt.shape != ids.shape or not learnt.any():
        n = progress.num_documents
        raise ValueError(f"document {n}: which of its tokens are learnt must be [n] bool, one of them true at least")
    edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False))  # begin, end, begin, end, …
    progress.num_answers += len(edges) // 2
    progress.num_learnt += int(learnt.sum())
    progress.num_ended += int(ids[edges[-1] - 1] == tokenizer.eos_id)
    return (progress.num_tokens + edges).astype("<i8").tobytes()


def _file_ends(progress: _Progress) -> bytes:
    """Of files.bin, for the files that have been read to their ends meanwhile."""
    ends = np.full(progress.files_read - progress.num_files, progress.num_documents, dtype="<i8")
    progress.num_files = progress.files_read
    return ends.tobytes()


def _content_so_far(hashes: Path) -> Any:
    content = hashlib.sha256()
    _digest(hashes, content)
    return content


def _digest(path: Path, content: Any) -> None:
    """Add a file to a hash."""
    with path.open("rb") as file:
        while block := file.read(CRC_BLOCK):
            content.update(block)


def _dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _names(progress: _Progress) -> tuple[str, ...]:
    """The files of a corpus that are written document by document."""
    return (*_FILES, *[_ANSWERS] * progress.answers, *[_SOURCE] * bool(progress.texts))


def _names_in(info: dict[str, Any]) -> list[str]:
    """The files of a corpus beside corpus.json."""
    needed = (*_FILES, *[_ANSWERS] * (info["format"] == ANSWERS_FORMAT))
    return [*needed, *(name for name in (_SOURCE, _PATHS) if name in info["files"])]


def _sizes(progress: _Progress, dtype: str) -> list[int]:
    """Bytes that count of each of _names."""
    n = progress.num_documents
    sizes = {_ANSWERS: 16 * progress.num_answers, _SOURCE: 8 * (progress.num_files + 1)}
    sizes |= dict(zip(_FILES, (progress.num_tokens * np.dtype(dtype).itemsize, 8 * (n + 1), 8 * n)))
    return [sizes[name] for name in _names(progress)]


def _open_arrays(folder: Path, dtype: str, progress: _Progress, stack: ExitStack) -> list[BinaryIO]:
    """Those of _names, cut to what counts of them and at their ends."""
    files = [stack.enter_context((folder / name).open("ab")) for name in _names(progress)]
    for file, size in zip(files, _sizes(progress, dtype)):
        file.truncate(size)  # to 8 zeros for offsets.bin and files.bin, which begin with 0
    return files


def _read_journal(folder: Path, texts: _Texts) -> _Progress | None:
    """How far an earlier writer of the same texts came, if what it wrote is there."""
    try:
        progress = _Progress(**json.loads((_temporary(folder) / _JOURNAL).read_bytes()))
        sizes = [(_temporary(folder) / name).stat().st_size for name in _names(progress)]
    except (OSError, ValueError, TypeError):
        return None
    whole = all(there >= size for there, size in zip(sizes, _sizes(progress, _dtype(texts.tokenizer.vocab_size))))
    stops = texts.on_bad_document == "stop" and progress.skipped_bad  # it went past a document at which to stop
    return progress if progress.key == texts.key and whole and not stops else None


def _json(content: Any) -> str:
    return json.dumps(content, indent=1)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# --- checking ----------------------------------------------------------------------------------------------------


def _checksums(path: Path) -> list[int]:
    """CRC-32 of each CRC_BLOCK of a file, in threads (zlib gives up the interpreter's lock)."""

    def checksum(start: int) -> int:
        return zlib.crc32(os.pread(file.fileno(), CRC_BLOCK, start))

    with path.open("rb") as file, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(checksum, range(0, path.stat().st_size, CRC_BLOCK)))


def _info_checksum(info: dict[str, Any]) -> int:
    rest = {key: value for key, value in info.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _remedy(folder: Path) -> str:
    if CACHE_NAME.fullmatch(folder.name):
        return "it is a token cache: delete its folder and the next start writes it again"
    return "restore it from a copy, or write it again under another name"


def _read_info(folder: Path) -> dict[str, Any]:
    path, remedy = folder / _INFO, _remedy(folder)
    if not path.is_file() and not CACHE_NAME.fullmatch(folder.name) and not (folder / _FILES[0]).exists():
        raise ValueError(
            f"{path} is missing: {folder} is no corpus of tokens; tools.corpus writes one, and for a folder of texts "
            f"training.dataset is {', '.join(TEXT_SOURCES[1:-1])} or {TEXT_SOURCES[-1]}"
        )
    if not path.is_file():
        raise ValueError(f"{path} is missing; {remedy}")
    try:
        info = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {remedy}") from error
    if not isinstance(info, dict) or info.get("format") not in (FORMAT, ANSWERS_FORMAT):
        raise ValueError(f"{path} does not say that it is a {FORMAT!r} or {ANSWERS_FORMAT!r}; {remedy}")
    if info.get("checksum") != _info_checksum(info):
        raise ValueError(f"{path} was altered: it does not have its checksum; {remedy}")
    return info
