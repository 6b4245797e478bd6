"""Corpora on disk: documents as tokens, memory-mapped, with a checksum for every byte.

A corpus is a folder (little-endian, no headers):

    tokens.bin    uint16 if the vocabulary has at most 2¹⁶ ids, else uint32   [num_tokens], documents end to end
    offsets.bin   int64    [num_documents + 1]; document d is tokens[offsets[d] : offsets[d+1]], never empty
    hashes.bin    uint64   [num_documents]; blake2b of the document's tokens, which decides the held-out split
    corpus.json   counts, dtype, the tokenizer's fingerprint, the content's fingerprint, the source, and each file's
                  size and CRC-32 per 16 MiB; a CRC-32 of the JSON itself under "checksum"

`write_corpus` writes one from documents that are tokens already (`training.dataset = "tokens"` then reads it), and
`open_corpus` from texts, once, as a cache. Both write to `<folder>.tmp` under an flock on `<folder>.lock`, fsync, and
rename, so that a corpus is whole or absent, and of the processes that start together one writes and the others wait.

A cache's folder is named by what would change its content: the format, the dataset, the text field, the tokenizer's
fingerprint, and path, size and modification time of every file. The texts themselves are not read for it, because that
would mean reading all of a terabyte at every start; so a file changed with its size and time kept is not noticed. What
identifies a corpus elsewhere (in a checkpoint, say) is `Corpus.fingerprint`, made from the tokens alone: it is the
same on another machine, under other paths and times.

Opening checks corpus.json and the sizes and structure of every file. `verify_corpus` reads everything once (at
the disk's speed, in threads) against the checksums; the preflight does that before training starts. A damaged
corpus is an error and is never rebuilt by itself: nothing that might be someone's only copy is deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from titan_linear.data.sources import TEXT_SOURCES, Document, read_documents, source_files
from titan_linear.data.tokenizer import Tokenizer

DATASETS = (*TEXT_SOURCES, "tokens")
FORMAT = "titan_linear corpus 1"
CRC_BLOCK = 1 << 24  # bytes
_FILES = ("tokens.bin", "offsets.bin", "hashes.bin")
_REMEDY = "If this is a token cache, delete its folder and the next start writes it again; else restore it from a copy"


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus. Its arrays are memory-mapped; pickled, it travels as its path."""

    folder: Path
    tokens: np.ndarray  # [num_tokens] uint16 | uint32
    offsets: np.ndarray  # [num_documents + 1] int64
    hashes: np.ndarray  # [num_documents] uint64
    info: dict[str, Any]  # corpus.json

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
        """Identifies the content: these tokens, as these documents, in this order. The tokenizer has its own."""
        return self.info["fingerprint"]

    @property
    def summary(self) -> str:
        """One line for the console."""
        source = self.info["source"] or {"dataset": "tokens", "skipped_empty": 0}
        skipped = f" ({source['skipped_empty']:,} empty files skipped)" if source["skipped_empty"] else ""
        return (
            f"corpus {source['dataset']}: {self.num_documents:,} documents{skipped}, {self.num_tokens:,} tokens, "
            f"in {self.folder}"
        )


def open_corpus(
    dataset: str,
    dataset_path: str | None,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    cache_dir: Path | None = None,
    show_progress: bool = False,
    path_key: str = "training.dataset_path",
) -> Corpus:
    """Opens a corpus, tokenising its texts first if no cache of them exists.

    Each document ends in `tokenizer.eos_id` where there is one. An empty file of `stdlib` or `text` is skipped, and
    `Corpus.summary` counts them; an empty text of `jsonl` or `parquet` is an error.
    cache_dir: $XDG_CACHE_HOME/titan_linear, or ~/.cache/titan_linear. path_key: the key that errors name.
    ValueError: an unknown dataset, a bad path, a bad document (file and line named), a damaged corpus, a corpus of
    another tokenizer.
    """
    if dataset not in DATASETS:
        raise ValueError(f"training.dataset = {dataset!r}: there are {', '.join(DATASETS)}")
    if dataset == "tokens":
        if not dataset_path:
            raise ValueError(f'{path_key} is empty: training.dataset = "tokens" needs a corpus\'s folder')
        folder = Path(dataset_path).expanduser().absolute()
        if not folder.is_dir():
            raise ValueError(f"{path_key} = {dataset_path!r}: there is no such folder")
    else:
        files = source_files(dataset, dataset_path, path_key=path_key)
        folder = (cache_dir or default_cache_dir()) / f"{dataset}-{_cache_key(dataset, files, text_field, tokenizer)}"
        if not folder.exists():
            _build_cache(folder, dataset, files, text_field, tokenizer, show_progress)
    corpus = load_corpus(folder)
    if corpus.info["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{path_key} = {dataset_path!r}: written with tokenizer {corpus.info['tokenizer']['fingerprint']!r}, but "
            f"model.tokenizer_path gives {tokenizer.fingerprint!r}; set the tokenizer that it was written with"
        )
    return corpus


def default_cache_dir() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan_linear"


def write_corpus(folder: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> None:
    """Writes a corpus from documents that are tokens, each [n] integers with its eos if it is to have one.

    ValueError: the folder exists, there is no document, a document is empty or has an id outside the vocabulary.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if folder.exists():
            raise ValueError(f"{folder} exists already: choose another folder, or delete it first")
        _write_corpus(folder, documents, tokenizer, source=None)


def load_corpus(folder: Path) -> Corpus:
    """Opens a corpus's folder; checks corpus.json and each file's size and structure (not its checksums).

    ValueError: a file is missing, truncated or not what corpus.json says.
    """
    info = _read_info(folder)
    dtypes = dict(zip(_FILES, (info["dtype"], "<i8", "<u8")))
    arrays = []
    for name in _FILES:
        path, expected = folder / name, info["files"][name]["size"]
        if not path.is_file():
            raise ValueError(f"{path} is missing. {_REMEDY}")
        if path.stat().st_size != expected:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes instead of {expected:,}. {_REMEDY}")
        arrays.append(np.asarray(np.memmap(path, dtypes[name], mode="r")))
    tokens, offsets, hashes = arrays
    if offsets[0] != 0 or offsets[-1] != len(tokens) or len(offsets) != len(hashes) + 1:
        raise ValueError(f"{folder / 'offsets.bin'} does not fit the other files. {_REMEDY}")
    if not (rising := offsets[1:] > offsets[:-1]).all():
        raise ValueError(f"{folder / 'offsets.bin'}: document {rising.argmin()} has no tokens. {_REMEDY}")
    return Corpus(folder, tokens, offsets, hashes, info)


def verify_corpus(corpus: Corpus) -> None:
    """Reads every byte of a corpus against its checksums. ValueError naming the file and the place."""
    for name in _FILES:
        expected, found = corpus.info["files"][name]["crc32"], _checksums(corpus.folder / name)
        for block, (want, got) in enumerate(zip(expected, found, strict=True)):
            if want != got:
                raise ValueError(
                    f"{corpus.folder / name} was altered: bytes {block * CRC_BLOCK:,} to "
                    f"{(block + 1) * CRC_BLOCK:,} do not have their checksum. {_REMEDY}"
                )


# --- writing -----------------------------------------------------------------------------------------------------


def _cache_key(dataset: str, files: list[Path], text_field: str, tokenizer: Tokenizer) -> str:
    try:
        stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    field = text_field if dataset in ("jsonl", "parquet") else None
    key = json.dumps([FORMAT, dataset, field, tokenizer.fingerprint, stats])
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _build_cache(
    folder: Path, dataset: str, files: list[Path], text_field: str, tokenizer: Tokenizer, show_progress: bool
) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if folder.exists():  # another process wrote it while this one waited
                return
            source = {"dataset": dataset, "files": len(files), "skipped_empty": 0}
            documents = _tokenised(dataset, files, text_field, tokenizer, source, show_progress)
            _write_corpus(folder, documents, tokenizer, source)
    except OSError as error:  # no permission, a full disk, no locks on this file system
        raise ValueError(
            f"the token cache {folder} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can"
        ) from error


def _tokenised(
    dataset: str, files: list[Path], text_field: str, tokenizer: Tokenizer, source: dict[str, Any], show_progress: bool
) -> Iterator[np.ndarray]:
    """Each document's tokens, [n] int64 with eos. Counts empty files in source["skipped_empty"]."""
    key, found = _cache_key(dataset, files, text_field, tokenizer), False
    eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.int64)
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenising {dataset}", disable=not show_progress) as bar:
        for batch in _batches(read_documents(dataset, files, text_field)):
            for document, tokens in zip(batch, _encode(tokenizer, batch)):
                bar.update(document.size)
                if len(tokens):
                    found = True
                    yield np.concatenate([tokens, eos])
                elif dataset in ("jsonl", "parquet"):
                    raise ValueError(f"{document.origin}: {text_field!r} has no tokens; drop it or give it text")
                else:
                    source["skipped_empty"] += 1
    if not found:
        raise ValueError(f"training.dataset = {dataset!r} has no text: {len(files)} files, all empty ({files[0]}, …)")
    if key != _cache_key(dataset, files, text_field, tokenizer):
        raise ValueError(f"files of training.dataset = {dataset!r} changed while they were read; start again")


def _batches(documents: Iterator[Document], max_bytes: int = 1 << 23, max_documents: int = 1024) -> Iterator[list]:
    batch, size = [], 0.0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= max_bytes or len(batch) == max_documents:
            yield batch
            batch, size = [], 0.0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[Document]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_batch([document.text for document in batch])
    except UnicodeEncodeError as error:
        origin = next(document.origin for document in batch if document.text == error.object)
        raise ValueError(
            f"{origin}: not UTF-8 at character {error.start}; repair it, or train on bytes (no model.tokenizer_path)"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds `<folder>.lock`, which stays behind: removing it would let two processes lock different files."""
    with folder.with_name(folder.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_corpus(
    folder: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer, source: dict[str, Any] | None
) -> None:
    """Writes `<folder>.tmp` whole, then renames it. source: noted as it is once the last document has been taken."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a writer that was killed: the caller holds the lock
    temporary.mkdir(parents=True)
    try:
        content = _write_arrays(temporary, documents, tokenizer.vocab_size)
        files = {n: {"size": (temporary / n).stat().st_size, "crc32": _checksums(temporary / n)} for n in _FILES}
        described = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos_id}
        info = {"format": FORMAT, **content, "tokenizer": described, "source": source, "files": files}
        info["checksum"] = _info_checksum(info)
        with (temporary / "corpus.json").open("w") as file:
            json.dump(info, file, indent=1)
            _sync(file)
        _sync_folder(temporary)
        os.rename(temporary, folder)
        _sync_folder(folder.parent)
    except BaseException:  # a full disk or Ctrl-C: leave no half corpus to fill the disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_arrays(folder: Path, documents: Iterable[np.ndarray], vocab_size: int) -> dict[str, Any]:
    """Writes tokens, offsets and hashes; the counts, dtype and content fingerprint for corpus.json."""
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    num_documents, num_tokens, content = 0, 0, hashlib.sha256()
    with ExitStack() as stack:
        tokens, offsets, hashes = (stack.enter_context((folder / name).open("wb")) for name in _FILES)
        offsets.write(np.int64(0).tobytes())
        for ids in map(np.asarray, documents):
            if not ids.size:
                raise ValueError(f"document {num_documents} has no tokens")
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise ValueError(f"document {num_documents} has tokens outside the vocabulary, 0 to {vocab_size - 1}")
            data = ids.astype(dtype).tobytes()
            digest = hashlib.blake2b(data, digest_size=8).digest()
            num_documents, num_tokens = num_documents + 1, num_tokens + ids.size
            tokens.write(data)
            offsets.write(np.int64(num_tokens).tobytes())
            hashes.write(digest)
            content.update(digest)
        if not num_documents:
            raise ValueError(f"no documents to write to {folder}")
        for file in (tokens, offsets, hashes):
            _sync(file)
    counts = {"num_documents": num_documents, "num_tokens": num_tokens, "dtype": dtype}
    return {**counts, "fingerprint": content.hexdigest()[:32]}


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / "corpus.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: {folder} is no corpus. {_REMEDY}")
    try:
        info = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. {_REMEDY}") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise ValueError(f"{path} does not say that it is a {FORMAT!r}. {_REMEDY}")
    if info.get("checksum") != _info_checksum(info):
        raise ValueError(f"{path} was altered: it does not have its checksum. {_REMEDY}")
    return info
