"""Sources: where documents come from, and in what order.

    stdlib    the *.py files of this Python's standard library; a file is a document
    text      a file, a folder (all its files, hidden ones aside) or globs, several of them parted by commas; a file
              is a document
    jsonl     the same, *.jsonl in folders; a line is a document: its text field
    parquet   the same, *.parquet in folders; a row is a document: its text column

Files are read in the order of their sorted paths, so that a corpus does not depend on the file system.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

TEXT_SOURCES = ("stdlib", "text", "jsonl", "parquet")


@dataclass(frozen=True)
class Document:
    """A text and where it comes from. Bytes of a text file that are no UTF-8 are surrogate escapes."""

    text: str
    origin: str  # "file", "file, line 3" or "file, row 3"
    size: float  # bytes of the source that were read for it


def source_files(dataset: str, dataset_path: str | None, *, path_key: str = "training.dataset_path") -> list[Path]:
    """The files of a text source, sorted. ValueError (naming the key) if there are none."""
    if dataset == "stdlib":
        if dataset_path:
            raise ValueError(f'{path_key} = {dataset_path!r}: training.dataset = "stdlib" takes none; leave it empty')
        return _stdlib_files()
    if not dataset_path:
        raise ValueError(f"{path_key} is empty: training.dataset = {dataset!r} needs a file, a folder or globs")
    suffix = {"text": "", "jsonl": ".jsonl", "parquet": ".parquet"}[dataset]
    files: set[Path] = set()
    for pattern in [dataset_path] if os.path.exists(dataset_path) else dataset_path.split(","):
        found = _expand(pattern.strip(), suffix)
        if not found:
            raise ValueError(
                f"{path_key} = {dataset_path!r}: no {suffix or 'file'} is at {pattern.strip()!r}; give a file, a "
                "folder or globs (parted by commas)"
            )
        files.update(found)
    return sorted(files)


def read_documents(dataset: str, files: list[Path], text_field: str = "text") -> Iterator[Document]:
    """The documents of these files, in order. ValueError naming the file and the line or row that is bad."""
    read = {"stdlib": _read_text, "text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}[dataset]
    for file in files:
        try:
            yield from read(file, text_field)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error


def _stdlib_files() -> list[Path]:
    # site-packages lies inside this folder but is not the library. Test folders are left out because distributions
    # differ in whether they ship them, and because they hold, on purpose, broken sources and other encodings.
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, ".py", skip={"site-packages", "dist-packages", "test", "tests", "idle_test"})
    if not files:
        raise ValueError(f'training.dataset = "stdlib": this Python has no library sources in {root}; choose another')
    return files


def _walk(folder: Path, suffix: str, skip: Set[str] = frozenset()) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(root, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(found)


def _expand(pattern: str, suffix: str) -> list[Path]:
    path = Path(pattern).expanduser().absolute()
    if path.is_dir():
        return _walk(path, suffix)
    if path.is_file():
        return [path]
    return [Path(found) for found in glob.glob(str(path), recursive=True) if os.path.isfile(found)]


def _read_text(file: Path, _: str) -> Iterator[Document]:
    data = file.read_bytes()
    yield Document(data.decode("utf-8", "surrogateescape"), str(file), len(data))


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            origin = f"{file}, line {number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise ValueError(f"{origin}: not JSON in UTF-8: {error}") from error
            if not isinstance(record, dict) or text_field not in record:
                fields = ", ".join(map(repr, record)) if isinstance(record, dict) else "no object"
                raise ValueError(
                    f"{origin}: no field {text_field!r} (it has: {fields}); set training.dataset_text_field, or "
                    "drop the line"
                )
            yield Document(_as_text(record[text_field], origin, text_field), origin, len(line))


def _read_parquet(file: Path, text_field: str) -> Iterator[Document]:
    import pyarrow as pa  # 0.3 s that only this source pays
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise ValueError(
                    f"{file}: no column {text_field!r} (it has: {', '.join(map(repr, names))}); set "
                    "training.dataset_text_field"
                )
            row, size = 0, file.stat().st_size / max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    origin = f"{file}, row {row}"
                    yield Document(_as_text(value, origin, text_field), origin, size)
    except pa.ArrowException as error:
        raise ValueError(f"{file}: not a whole parquet file: {error}") from error


def _as_text(value: object, origin: str, text_field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{origin}: {text_field!r} is {type(value).__name__}, not text; repair or drop it")
    return value
