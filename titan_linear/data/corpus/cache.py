"""Texts as corpora: tokenised once, into the user's cache or into a separate folder.

`open_corpus` uses the cache; `tokenise_corpus` writes a folder.

The name of a cache's folder is a hash of everything that would change its content: the
format, the dataset, the text field (for conversations, their kind and template), the
tokenizer's fingerprint, and path, size and modification time of every file. The texts
themselves are not read for it, because that would mean reading up to a terabyte at every
start. So a change that leaves a file's size and time intact is not noticed.

If no folder has that name, the texts are read once, which takes little time
compared with tokenising them. If an existing cache has the same texts, under whatever paths
and times, a file `<folder>.same` names that cache from then on.

Whether bad documents stop the work or are skipped does not enter the name. A corpus records
the documents that it lacks, and is refused where they should have stopped the work.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from titan_linear.config import has_records
from titan_linear.data.corpus.chat import Completions, Conversations, Ids, Preferences
from titan_linear.data.corpus.columns import (
    WEIGHTS,
    DocumentTokens,
    Problem,
    check_width,
    with_columns,
)
from titan_linear.data.corpus.corpus import (
    CACHE_NAME,
    INFO,
    PATHS,
    Corpus,
    add_file,
    format_of,
    how_to_mend,
    load_corpus,
    unfitting,
)
from titan_linear.data.corpus.sources import (
    CUSTOM,
    TEXT_SOURCES,
    Document,
    read_documents,
    source_files,
)
from titan_linear.data.corpus.tokenise import Encoder, may_have_children, tokenise, worker_count
from titan_linear.data.corpus.tokenizer import Tokenizer
from titan_linear.data.corpus.tree_records import (
    BACK,
    MOST,
    PendingDocument,
    TreeEncoder,
    agreeing,
    shared,
    trees_of,
)
from titan_linear.data.corpus.writing import (
    BadDocument,
    Journal,
    lock_file,
    locked,
    read_journal,
    temporary_folder,
    write_into,
)
from titan_linear.ops.layout.prefix_trees import PrefixTrees
from titan_linear.storage.files import (
    Json,
    Unreadable,
    default_cache_dir,
    lock,
    open_own,
    progress,
    read_json,
    shown,
    write_whole,
)

# Number of reasons for which a skipped bad document is named.
_NAMED = 10
_SKIP = 'training.on_bad_document = "skip" (titan-linear corpus: --on-bad-document skip) counts and skips them'


@dataclass(frozen=True)
class Texts:
    """Texts to tokenise and how, or a corpus of tokens.

    Args:
        dataset_format: "text", or for records that are conversations "messages",
            "completion", ... (chat.py).
        on_bad_document: with "stop", a bad document (not JSON, without the field or an
            answer, not UTF-8 for a tokenizer that needs it) is an error. With "skip", it is
            skipped and counted, and `Corpus.summary` names the first few.
        path_key: the key that errors name.
        columns: names of record fields that hold numbers for tokens, with their dtypes
            (columns.py).
        share_prefixes: merge documents that share beginnings into trees. Candidates are
            consecutive documents with the same value of group_field; without group_field,
            consecutive documents that share their beginnings.
        seq_len: maximum number of tokens of a unit that must lie in one stream: a pair, a
            document or a path of a tree. Longer units are bad documents; 0 allows any
            length.
        max_length: maximum number of tokens of a document; 0 allows any. A longer one keeps
            its beginning (truncation "right") or its end ("left"), or its record is left
            out ("skip").
    """

    dataset: str
    path: str | None
    tokenizer: Tokenizer
    _: KW_ONLY
    text_field: str = "text"
    dataset_format: str = "text"
    on_bad_document: str = "stop"
    path_key: str = "training.dataset_path"
    columns: Mapping[str, str] = field(default_factory=dict)
    share_prefixes: bool = False
    group_field: str = ""
    seq_len: int = 0
    max_length: int = 0
    truncation: str = "right"

    @cached_property
    def files(self) -> list[Path]:
        return source_files(self.dataset, self.path, path_key=self.path_key)

    @cached_property
    def encoder(self) -> Encoder:
        """Return the encoder of documents: the tokenizer for texts, else a `RecordEncoder`."""
        makers: dict[str, Callable[[Tokenizer], Any]] = {
            "messages": Conversations,
            "completion": Completions,
            "tokens": Ids,
            "preference": Preferences,
            "tree": partial(TreeEncoder, columns=self.columns),
        }
        if self.dataset_format == "text":
            return self.tokenizer
        return makers[self.dataset_format](self.tokenizer)

    @property
    def all_columns(self) -> dict[str, str]:
        """Return all columns, including the structure of trees and the weights of answers."""
        columns = dict(self.columns)
        if self.dataset_format == "tree" or self.share_prefixes:
            columns[BACK] = "<i4"
        if self.dataset_format not in ("text", "tokens"):
            columns[WEIGHTS] = "<f4"
        return columns

    @property
    def kind(self) -> str:
        """The first part of the name of the texts' cache."""
        return self.dataset if self.dataset in TEXT_SOURCES else CUSTOM

    @property
    def group(self) -> int:
        return 2 if self.dataset_format == "preference" else 1

    @cached_property
    def content(self) -> str:
        """Return a hash of everything that determines the tokens.

        It is independent of paths and times. Reads all files.
        """
        content = hashlib.blake2b(json.dumps(self._how).encode(), digest_size=16)
        try:
            for file in progress(self.files, f"reading {self.dataset}"):
                about = f"\n{file.suffix} {file.stat().st_size}\n"
                content.update(about.encode("utf-8", "surrogateescape"))
                add_file(file, content)
        except OSError as error:
            raise _unreadable(error) from error
        return content.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield the documents of all files."""
        fields = list(self.columns)
        if self.group_field:
            fields.append(self.group_field)
        how = self.text_field, self.dataset_format, fields
        for number, file in enumerate(self.files):
            for document in read_documents(self.dataset, file, *how):
                yield document._replace(file=number)

    @property
    def _how(self) -> list[str | None]:
        """Return everything besides the files that determines the tokens."""
        field_or_format = self.text_field if has_records(self.dataset) else None
        if self.dataset_format != "text":
            field_or_format = self.encoder.fingerprint
        tokenizer = self.tokenizer.fingerprint
        how = [format_of(self.all_columns), self.dataset, field_or_format, tokenizer]
        how += [f"{name}, 2" for name in sorted(self.columns)]
        if self.share_prefixes:
            how.append(f"shared by {self.group_field}, 2")
        if self.seq_len:
            how.append(f"seq_len {self.seq_len}")
        if self.max_length:
            how.append(f"max_length {self.max_length} {self.truncation}")
        return how

    @property
    def key(self) -> str:
        """Return a hash of whatever could change the tokens.

        Files enter it by their paths, sizes and times.
        """
        stats = []
        try:
            for file in self.files:
                stat = file.stat()
                stats.append((str(file), stat.st_size, stat.st_mtime_ns))
        except OSError as error:
            raise _unreadable(error) from error
        return hashlib.sha256(json.dumps([*self._how, stats]).encode()).hexdigest()[:24]


def open_corpus(texts: Texts, *, cache_dir: Path | None = None, with_paths: bool = False) -> Corpus:
    """Open a corpus; tokenise its texts first if they are not in the cache.

    Each text ends in `tokenizer.eos_id` if there is one. Empty texts are skipped and
    counted.

    Args:
        cache_dir: by default $XDG_CACHE_HOME/titan_linear, or ~/.cache/titan_linear.
        with_paths: also set `Corpus.paths` to the text files' paths. For a corpus of
            tokens, these are the paths at the time of writing, if known.

    Raises:
        ValueError: a bad path, a bad document (with file and line), a damaged corpus, or a
            corpus of another tokenizer.
    """
    paths = None
    if texts.dataset == "tokens":
        folder = Path(os.path.expanduser(texts.path or "")).absolute()
        if not folder.is_dir():
            raise ValueError(
                f"{texts.path_key} = {texts.path!r}: no such folder; give a corpus's (titan-linear corpus writes one)"
            )
        corpus = load_corpus(folder)
        if with_paths:
            paths = _paths_when_written(corpus)
    else:
        folder = (cache_dir or default_cache_dir()) / f"{texts.kind}-{texts.key}"
        folder = _named(folder) or _build_cache(folder, texts)
        with suppress(OSError):  # not permitted in a cache that others wrote for us
            # Record the last use.
            os.utime(lock_file(folder))
        name = f"{texts.path_key} = {texts.path or texts.dataset!r}"
        corpus = replace(load_corpus(folder), name=name)
        if with_paths:
            paths = tuple(map(shown, texts.files))
        # Refuse a corpus without documents that must stop the work.
        bad = corpus.info["source"].get("skipped_bad")
        if bad and texts.on_bad_document == "stop":
            raise ValueError(f"{corpus.info['source']['bad'][0]}; {_SKIP} ({bad:,} in all)")
    if corpus.info["tokenizer"]["fingerprint"] != texts.tokenizer.fingerprint:
        raise ValueError(
            f"{texts.path_key} = {texts.path!r}: written with tokenizer {corpus.info['tokenizer']['fingerprint']!r}, "
            f"but model.tokenizer_path gives {texts.tokenizer.fingerprint!r}; set the tokenizer that it was written "
            "with"
        )
    return replace(corpus, paths=paths)


def cached_corpus(texts: Texts) -> Corpus | None:
    """Return a corpus of tokens, or of texts if it is in the cache; None if it is missing.

    Nothing is written.
    """
    try:
        folder = Path(os.path.expanduser(texts.path or ""))
        if texts.dataset != "tokens":
            folder = _named(default_cache_dir() / f"{texts.kind}-{texts.key}")
        return load_corpus(folder) if folder and (folder / INFO).exists() else None
    except ValueError:
        # The run itself refuses it.
        return None


def tokenise_corpus(folder: Path, texts: Texts) -> Corpus:
    """Write the corpus of these texts into a separate folder.

    Raises:
        ValueError: as in `open_corpus`, or the folder exists or cannot be written.
    """
    # Bad files are refused before anything is written.
    _ = texts.files
    try:
        with locked(folder):
            if folder.exists():
                raise ValueError(f"{folder} exists already; choose another folder")
            _tokenise_into(folder, texts)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written: {error}; choose a folder that can"
        ) from error
    return load_corpus(folder)


def remove_cache(folder: Path) -> bool:
    """Remove a cache and the rest of an unfinished one.

    Returns False if another process is writing it.
    """
    assert CACHE_NAME.fullmatch(folder.name), folder
    with open_own(lock_file(folder), "a") as file:
        if not lock(file):
            return False
        shutil.rmtree(temporary_folder(folder), ignore_errors=True)
        if folder.exists():
            # A removal that is cut short leaves nothing that could be opened.
            folder.rename(temporary_folder(folder))
            shutil.rmtree(temporary_folder(folder))
    return True


def _paths_when_written(corpus: Corpus) -> tuple[str, ...] | None:
    """Return the paths of a corpus's text files when it was written.

    None means that it was written from tokens.
    """
    if corpus.files is None:
        return None
    path = corpus.folder / PATHS
    paths = read_json(path, tuple[str, ...], how_to_mend(corpus.folder))
    if len(paths) != len(corpus.files) - 1:
        raise unfitting(path)
    return paths


def _unreadable(error: OSError) -> ValueError:
    return ValueError(
        f"{error.filename} cannot be read: {error.strerror}; leave it out, or give the permission"
    )


def _named(folder: Path) -> Path | None:
    """Return the cache that a folder's name stands for, or None.

    It is this folder, or a cache of the same texts that its `.same` file names.
    """
    if folder.exists():
        return folder
    with suppress(OSError, ValueError):
        same = folder.with_name(_same_file(folder).read_text())
        return same if CACHE_NAME.fullmatch(same.name) and same.exists() else None
    return None


def _build_cache(folder: Path, texts: Texts) -> Path:
    try:
        with locked(folder):
            if there := _named(folder):  # another process wrote it while this one waited
                return there
            if same := _same_texts(folder.parent, texts):
                _check_unchanged(folder.name.rpartition("-")[2], texts)
                write_whole(_same_file(folder), same.name)
                return same
            _tokenise_into(folder, texts)
            return folder
    except OSError as error:  # no permission, a full disk, no locks on this file system
        raise ValueError(
            f"the token cache {folder} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error


def _same_texts(caches: Path, texts: Texts) -> Path | None:
    """Return a cache of these texts, whatever their paths and times were."""
    known = {}
    for info in caches.glob(f"{texts.kind}-*/{INFO}"):
        # Skip caches that are damaged or written from tokens.
        with suppress(Unreadable, KeyError):
            known[read_json(info, Json, "")["texts"]] = info.parent
    return known.get(texts.content) if known else None


def _tokenise_into(folder: Path, texts: Texts) -> None:
    group, leaves = (1, texts.group) if texts.share_prefixes else (texts.group, 1)
    journal = _resumable(folder, texts) or Journal(
        key=texts.key,
        texts=texts.content,
        columns=texts.all_columns,
        group=group,
        leaves=leaves,
    )
    if journal.read:
        print(f"continuing where tokenising was stopped, after {journal.num_documents:,} documents")
    # Its processes end with the writing, however that ends.
    with closing(_tokenised(texts, journal)) as documents:
        write_into(folder, documents, texts.tokenizer, journal, texts.dataset, texts.files)


def _resumable(folder: Path, texts: Texts) -> Journal | None:
    """Return an earlier writer's progress on the same texts, or None to begin anew."""
    journal = read_journal(folder)
    if journal is None or journal.key != texts.key:
        return None
    # It skipped a document that should now stop the work.
    stops = texts.on_bad_document == "stop" and journal.skipped_bad
    return None if stops else journal


def _tokenised(texts: Texts, journal: Journal) -> Generator[Sequence[DocumentTokens], None, None]:
    """Yield the documents of each record that `journal` has not read.

    Documents of several records may come merged. Texts get their end token. Read and skipped
    records are counted in `journal`.
    """
    total = sum(file.stat().st_size for file in texts.files)
    documents = islice(texts.documents(), journal.read, None)
    doing = f"tokenising {texts.dataset}"
    bar = progress(None, doing, total, initial=journal.size, unit="B", unit_scale=True, smoothing=0)
    # A chat template runs in a worker (chat.py).
    least = int(texts.dataset_format in ("messages", "preference") and may_have_children())
    workers = max(least, worker_count(total))
    with bar, closing(tokenise(texts.encoder, documents, workers)) as encoded:
        held: list[PendingDocument] = []
        for document, tokens in encoded:
            # Documents that may share a tree wait until one comes that does not join them.
            parts: Sequence[DocumentTokens] = []
            problem = ""
            try:
                parts = _parts(document, tokens, texts, journal)
            except Problem as error:
                problem = str(error)
            file_ended = document.file > journal.files_read
            apart = parts and not (held and _joins(held, document, parts, texts))
            if held and (file_ended or apart):
                yield _trees(held, texts, journal)
                held = []
            # Sizes of rows are fractions, whose sum may exceed the total.
            bar.update(min(document.size, total - bar.n))
            # Count the record, then yield, hold or skip its documents.
            journal.files_read = document.file
            journal.read += 1
            journal.size += document.size
            for name in document.unread:
                journal.unread.setdefault(name, document.origin)
            if problem:
                _meet_bad_document(f"{document.origin}: {problem}", texts, journal)
            elif texts.share_prefixes:
                group = document.columns.get(texts.group_field)
                held += [PendingDocument(document.origin, group, part) for part in parts]
            else:
                yield parts
        if held:
            yield _trees(held, texts, journal)
    journal.files_read = len(texts.files)
    # A corpus needs a document, and where tokens are weighted, one token that counts.
    if not journal.num_documents:
        more = f" and {len(texts.files) - 1:,} more" if len(texts.files) > 1 else ""
        why = "all empty"
        if journal.bad:
            why = f"bad documents: {journal.skipped_bad:,}, the first {journal.bad[0]}"
        raise ValueError(
            f"{texts.path_key} has no text in {texts.files[0]}{more}: {why}; give other files"
        )
    if WEIGHTS in journal.columns and not journal.num_answer_tokens:
        raise ValueError(
            f"{texts.path_key} = {texts.path!r}: no token has a weight above 0; give some"
        )
    _check_unchanged(journal.key, texts)


def _parts(
    document: Document,
    tokens: Any,
    texts: Texts,
    journal: Journal,
) -> Sequence[DocumentTokens]:
    """Return a record's documents; none if it is empty or left out, which is counted.

    Raises:
        Problem: the record's.
    """
    if isinstance(tokens, str):
        raise Problem(tokens)
    if isinstance(tokens, np.ndarray):
        # A text gets its end token.
        if not len(tokens):
            if any(map(str.isalnum, document.content)):
                raise Problem("the tokenizer has no token for any of it")
            journal.skipped_empty += 1
            return []
        end = np.array(texts.tokenizer.eos, dtype=tokens.dtype)
        tokens = DocumentTokens(np.append(tokens, end))
    # Attach the columns. A tree's columns came with its nodes.
    parts = tokens if isinstance(tokens, list) else [tokens]
    if texts.dataset_format == "tree":
        widths = {**journal.widths}
        for name, column in parts[0].columns.items():
            check_width(name, column, widths)
    elif texts.columns:
        values = document.columns
        dtypes = texts.columns
        parts = with_columns(parts, values, dtypes, texts.tokenizer, journal.widths)
    for part in parts:
        part.check()
    if texts.max_length and any(len(part.tokens) > texts.max_length for part in parts):
        journal.too_long += 1
        parts = _truncated(parts, texts)
    if texts.seq_len and parts:
        _check_length(parts, texts)
    return parts


def _truncated(parts: Sequence[DocumentTokens], texts: Texts) -> list[DocumentTokens]:
    """Return a record's documents with at most max_length tokens each, or none."""
    if texts.truncation == "skip":
        return []
    longest = texts.max_length
    kept = slice(longest) if texts.truncation == "right" else slice(-longest, None)
    short = []
    for part in parts:
        columns = {name: column[kept] for name, column in part.columns.items()}
        short.append(DocumentTokens(part.tokens[kept], columns))
    # An answer may be cut off, or the difference between two.
    answered = all(part.weights[1:].any() for part in short)
    if not answered or (len(short) == 2 and np.array_equal(short[0].tokens, short[1].tokens)):
        raise Problem(
            f"nothing to learn is left in the {longest} tokens of training.max_length; raise it"
        )
    return short


def _check_length(parts: Sequence[DocumentTokens], texts: Texts) -> None:
    """Raise Problem if a unit for one stream is too long."""
    tokens = sum(len(document.tokens) for document in parts)
    if texts.dataset_format == "tree":
        # The longest path of the tree.
        tokens = PrefixTrees.behind(parts[0].columns[BACK]).positions.max() + 1
    elif texts.share_prefixes and len(parts) > 1:
        tokens -= shared(*(document.tokens for document in parts))
    if tokens > texts.seq_len:
        raise Problem(
            f"{tokens:,} tokens that must lie in one stream, and training.seq_len = {texts.seq_len}; raise it"
        )


def _joins(
    held: Sequence[PendingDocument],
    document: Document,
    parts: Sequence[DocumentTokens],
    texts: Texts,
) -> bool:
    """Whether a record's document may share a tree with the waiting ones.

    A pair always has its own tree.
    """
    if texts.group_field or len(parts) > 1:
        return len(parts) == 1 and document.columns[texts.group_field] == held[0].group
    return len(held) < MOST and shared(held[0].document.tokens, parts[0].tokens) > 0


def _trees(
    held: Sequence[PendingDocument], texts: Texts, journal: Journal
) -> Sequence[DocumentTokens]:
    pair = texts.group == 2
    kept, problems = agreeing(held, pair)
    for problem in problems:
        _meet_bad_document(problem, texts, journal)
    return [] if pair and problems else trees_of(kept, pair)


def _check_unchanged(key: str, texts: Texts) -> None:
    if texts.key != key:
        raise ValueError(f"files of {texts.path_key} changed while they were read; start again")


def _meet_bad_document(problem: str, texts: Texts, journal: Journal) -> None:
    if texts.on_bad_document == "stop":
        raise BadDocument(f"{problem}; {_SKIP}")
    journal.skipped_bad += 1
    # Problems with the same reason differ in their origins, numbers and quoted texts.
    reason = re.sub(r"'[^']*'|\d[\d,.]*", "…", problem.partition(": ")[2])
    if reason not in journal.reasons and len(journal.bad) < _NAMED:
        journal.bad.append(problem)
        journal.reasons[reason] = 0
    if reason in journal.reasons:
        journal.reasons[reason] += 1


def _same_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".same")
