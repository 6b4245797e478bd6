"""Sources: where documents come from, and in what order.

    stdlib    the *.py files of this Python's standard library; a file is a document
    text      a file, a folder (all its files except hidden ones) or globs, separated by commas; a
              file is a document
    jsonl     the same, *.jsonl (also compressed: .gz, .zst, .xz, .bz2) in folders; a line is a
              document: its text field
    parquet   the same, *.parquet in folders; a row is a document: its text column. In folders of
              records, names that begin with "_" (a table's log, what a job left unfinished) are
              skipped
    arrow     the same, *.arrow in folders; a row is a document. A folder that Hugging Face's
              `datasets` saved is read in the order of its state.json

Users' modules register further sources of records (`RecordSource`).

A record (a line or a row) yields as document the text of one field or, in other formats,
the conversation that several fields hold (chat.py). Files are read in the order of their
sorted paths, so a corpus does not depend on the file system. The compression of a file of
text or lines, or its being another kind of file, is detected from its first bytes, whatever
its name.
"""

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field
from pydantic_core import to_json

from titan_linear.config.nesting import check_nesting
from titan_linear.config.registry import TABLES
from titan_linear.data.corpus.chat import ANSWER_WEIGHTS, QUESTIONS
from titan_linear.storage.files import Json, read_json, shown

Names = tuple[str, ...]

TEXT_SOURCES = ("stdlib", "text", "jsonl", "parquet", "arrow")
# Stands for registered sources in the names of their caches.
CUSTOM = "custom"
# Required and optional fields of records that are conversations, by format.
RECORD_FIELDS = {
    "messages": (("messages",), ("conversations", "system", "tools", "chat_template_kwargs")),
    "completion": (("prompt", "completion"), ()),
    "tokens": (("tokens",), ()),
    "preference": (
        ("chosen", "rejected"),
        (*QUESTIONS, "system", "tools", "chat_template_kwargs"),
    ),
    "tree": (("children",), ("text", "tokens", "weights")),
}
# The name in ShareGPT.
_OTHER_NAMES = {"messages": "conversations"}
FORMATS = ("text", *RECORD_FIELDS)
SUFFIXES = {
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".jsonl.bz2"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
# Number of rows read at a time.
ROWS = 256
# Maximum nesting of a record's lists and objects.
RECORD_NESTED = 250

# Names of fields that hold columns or weights, even if misspelt.
_LIKE_A_COLUMN = re.compile(
    "(^|_)(w[eight]{4}|advan|adv$|reward|mask|label|loss|logp|reference|behavi|teacher|train)"
)


def _open_zstd(raw: io.BufferedReader) -> io.BufferedReader:
    # pyarrow brings zstd: Python has it from 3.14.
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))


# First bytes of compressed text files, and how to open them; first bytes of other files,
# and remedies.
_COMPRESSED = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"\x28\xb5\x2f\xfd": _open_zstd}
_COMPRESSED |= {b"BZh%d1AY&SY" % size: bz2.open for size in range(1, 10)}
_TWO_OBJECTS = re.compile(rb'\s*\{\s*"[^\n]*\}[ \t\r]*\n\s*\{\s*"')
_REWRITE_UTF_16 = "UTF-16; write it in UTF-8 (iconv -f UTF-16 -t UTF-8)"
_NO_TEXT = {
    codecs.BOM_UTF16_LE: _REWRITE_UTF_16,
    codecs.BOM_UTF16_BE: _REWRITE_UTF_16,
    b"{\0": _REWRITE_UTF_16,
    b"\0{": _REWRITE_UTF_16,
    b"PAR1": "a parquet file; training.dataset = 'parquet' reads it",
    b"ARROW1": "an arrow file; training.dataset = 'arrow' reads it",
    b"PK\3\4": "a zip archive; unpack it",
    b"\x04\x22\x4d\x18": "compressed with lz4; unpack it, or compress it with zstd",
}


class Document(NamedTuple):
    """A text, or a record of several fields, and its origin.

    Bytes of a text file that are not UTF-8 become surrogate escapes.
    """

    content: str | Json
    # "file", "file, line 3" or "file, row 3".
    origin: str
    # Bytes of the source that were read for it.
    size: float
    # What is wrong with it; then it has no content.
    problem: str = ""
    # Values for its tokens (columns.py).
    columns: Json = {}
    # Unread fields that are named like columns or weights.
    unread: Sequence[str] = ()
    # Number of the source's files before its own.
    file: int = 0


class _Fields(NamedTuple):
    """The fields of a record that make a document."""

    needed: Names
    optional: Names = ()
    is_text: bool = True
    remedy: str = ""
    columns: Names = ()

    def document(
        self,
        record: Json,
        origin: str,
        size: float,
        names: Collection[str] = (),
    ) -> Document:
        """Return the document of a record.

        Args:
            names: names of all fields, where the record has only the fields that are read.
        """
        if missing := self.missing(record):
            return Document("", origin, size, missing)
        content = {name: record.get(name) for name in self.needed + self.optional}
        if self.is_text:
            (name,) = self.needed
            if not isinstance(content := record[name], str):
                remedy = f"; {_reading(record)}" if isinstance(content, list) else ""
                return Document(
                    "", origin, size, f"{name!r} is {type(content).__name__}, not text{remedy}"
                )
        try:
            to_json(content, bytes_mode="base64", fallback=str)
        except ValueError as error:
            # Half a character.
            return Document("", origin, size, f"not JSON in UTF-8: {error}; repair it")
        columns = {name: record[name] for name in self.columns}
        # Look for unread fields of the record and its messages that are named like columns.
        of_messages: set[str] = set()
        for value in record.values():
            for element in value if isinstance(value, list) else ():
                if isinstance(element, dict):
                    of_messages |= element.keys()
        fields = {*names, *record} | (of_messages - {*ANSWER_WEIGHTS})
        fields -= {*self.needed, *self.optional, *columns}
        unread = sorted(filter(_LIKE_A_COLUMN.search, fields))
        return Document(content, origin, size, columns=columns, unread=unread)

    def missing(self, names: Collection[str], what: str = "field") -> str:
        """Return a problem if a needed field is missing, else ""."""
        if name := _lacked(self.needed, names):
            has = ", ".join(map(repr, names))
            return f"no {what} {name!r} (it has: {has}); {self.remedy or _reading(names)}"
        if name := _lacked(self.columns, names):
            return f"no {what} {name!r}, which training.dataset_columns or group_field names; correct that"
        return ""


def _lacked(needed: Iterable[str], names: Collection[str]) -> str | None:
    """Return the first of the needed fields that is missing, under its other name too."""
    for name in needed:
        if name not in names and _OTHER_NAMES.get(name) not in names:
            return name
    return None


def _reading(names: Collection[str]) -> str:
    """Return how records with these fields can be read, other than by the field asked for."""
    for form, (needed, _) in RECORD_FIELDS.items():
        if _lacked(needed, names) is None:
            return (
                f'for conversations set training.dataset_format = "{form}" (titan-linear corpus: --format {form}), '
                "for texts training.dataset_text_field (--text-field)"
            )
    return (
        "set training.dataset_text_field (titan-linear corpus: --text-field), or for conversations "
        "training.dataset_format (--format)"
    )


@dataclass(frozen=True)
class RecordSource:
    """A kind of files with records, registered as a value of training.dataset.

    What applies to jsonl applies to it: fields, formats, columns.
    """

    chosen_by = "training.dataset"
    name: str
    # Ends of the names of files that are read in folders.
    suffixes: Names
    # Yields the records of a file, in order. ValueError: the file cannot be read.
    read: Callable[[Path], Iterable[Json]]

    def __call__(self, file: Path, fields: _Fields) -> Iterator[Document]:
        size = file.stat().st_size
        for number, record in enumerate(self.read(file), 1):
            yield fields.document(record, f"{shown(file)}, record {number}", size)
            # The first record counts the whole file as read.
            size = 0


class _File(BaseModel):
    filename: str


class _Saved(BaseModel):
    """Content of a saved dataset's state.json."""

    files: list[_File] = Field(alias="_data_files")
    indices: list[_File] | None = Field(None, alias="_indices_data_files")


def source_files(
    dataset: str,
    dataset_path: str | None,
    *,
    path_key: str = "training.dataset_path",
) -> list[Path]:
    """Return the files of a text source, in order.

    Raises:
        ValueError: (naming the key) no file is found.
    """
    if dataset == "stdlib":
        if dataset_path:
            raise ValueError(
                f'{path_key} = {dataset_path!r}: training.dataset = "stdlib" takes none; leave it empty'
            )
        return _stdlib_files()
    if not dataset_path:
        raise ValueError(
            f"{path_key} is empty: training.dataset = {dataset!r} needs a file, a folder or globs"
        )
    # Expand each path or glob.
    suffixes = _suffixes(dataset)
    files: set[Path] = set()
    patterns = [dataset_path] if os.path.exists(dataset_path) else dataset_path.split(",")
    for pattern in map(str.strip, patterns):
        if not pattern:
            raise ValueError(
                f"{path_key} = {dataset_path!r}: nothing stands beside a comma; leave the comma out"
            )
        found = _expand(pattern, dataset)
        if not found:
            path = Path(os.path.expanduser(pattern))
            here = "" if path.is_absolute() else f" in {os.getcwd()}"
            what = "nothing"
            if os.path.exists(path) or glob.has_magic(pattern):
                what = f"no {suffixes[0]} file".replace("  ", " ")
                what += ", compressed or not," if suffixes[1:] else ""
            raise ValueError(
                f"{path_key} = {dataset_path!r}: {what} is at {pattern!r}{here}; "
                "give a file, a folder or globs (separated by commas)"
            )
        files.update(found)
    once = _each_once(files)
    for file in once:
        # Reading a pipe would wait for a writer.
        if file.exists() and not file.is_file():
            raise ValueError(
                f"{path_key}: {file} is a pipe or a device; write its content to a file, or leave it out"
            )
    return sorted(once) if dataset != "arrow" else _as_saved(once, path_key)


def read_documents(
    dataset: str,
    file: Path,
    text_field: str,
    dataset_format: str,
    columns: Collection[str] = (),
) -> Iterator[Document]:
    """Yield the documents of a file, in order; a bad one has its `problem`.

    Args:
        dataset_format: one of FORMATS.

    Raises:
        ValueError: naming a file that cannot be read.
    """
    fields = _Fields((text_field,), columns=(*columns,))
    if dataset_format != "text":
        remedy = "rename the field, or set training.dataset_format (titan-linear corpus: --format)"
        needed, optional = RECORD_FIELDS[dataset_format]
        # Columns are in the nodes.
        if dataset_format == "tree":
            optional = (*dict.fromkeys((*optional, *columns)),)
            columns = ()
        fields = _Fields(needed, optional, False, remedy, (*columns,))
    try:
        yield from SOURCES[dataset](file, fields)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        # All but the first come from damaged compressed files.
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{file} cannot be read: {why}; leave it out, or restore it from a copy"
        ) from error


# --- finding files -----------------------------------------------------------------------------------------------


def _suffixes(dataset: str) -> Names:
    return SUFFIXES.get(dataset) or SOURCES[dataset].suffixes


def _stdlib_files() -> list[Path]:
    # site-packages lies inside this folder but is not part of the library. Test folders are
    # left out because distributions differ in whether they ship them, and because they hold
    # broken sources and other encodings on purpose.
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(
        root,
        (".py",),
        skip={"site-packages", "dist-packages", "test", "tests", "idle_test"},
        follow=False,
    )
    if not files:
        raise ValueError(
            f'training.dataset = "stdlib": this Python has no library sources in {root}; choose another'
        )
    return files


def _walk(
    folder: Path,
    suffixes: Names,
    skip: Set[str] = frozenset(),
    *,
    follow: bool = True,
) -> list[Path]:
    """Return the files in a folder and in folders below it.

    Args:
        follow: include linked folders, each folder once.

    Raises:
        ValueError: a folder cannot be read.
    """
    found = []
    seen = set()
    for root, folders, names in os.walk(folder, onerror=_refuse_unreadable, followlinks=follow):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(real)
        # Sorted, so that of two links to a folder the first one is followed on any file
        # system.
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in skip)
        names = [name for name in names if name[0] != "." and name.endswith(suffixes)]
        found += [Path(root, name) for name in names]
    return sorted(found)


def _refuse_unreadable(error: OSError) -> None:
    raise ValueError(
        f"{error.filename} cannot be read: {error.strerror}; give the permission, or leave the folder out"
    )


def _expand(pattern: str, dataset: str) -> list[Path]:
    """Return the files of a file's path, a folder's path, or a glob.

    If a glob matches only folders, return the files in them. For records, folders below
    whose names begin with "_" are skipped unless the glob names them: they hold a table's
    log or a job's unfinished files.
    """
    path = Path(os.path.expanduser(pattern)).absolute()
    if path.exists() and not path.is_dir():
        return [path]
    # The folder's name may contain brackets.
    folder = next(each for each in (path, *path.parents) if each.is_dir())
    below = path.relative_to(folder)
    matches = [folder / name for name in glob.glob(str(below), root_dir=folder, recursive=True)]
    files = [match for match in matches if not match.is_dir()]
    if not files:
        for match in matches:
            files += _walk(match, _suffixes(dataset))
    if dataset == "text":
        return files

    def skipped(file: Path) -> bool:
        unnamed = {*file.relative_to(folder).parent.parts} - {*below.parts}
        return any(name.startswith("_") for name in unnamed)

    return [file for file in files if not skipped(file)]


def _each_once(files: Set[Path]) -> set[Path]:
    """Return each file under one path: the first of several paths that lead to it by links."""
    # A folder is resolved once for all its files.
    folder_of = cache(os.path.realpath)
    first: dict[str, Path] = {}
    for file in sorted(files):
        real = os.path.join(folder_of(file.parent), file.name)
        if file.is_symlink():
            real = os.path.realpath(file)
        first.setdefault(real, file)
    return set(first.values())


def _as_saved(files: Set[Path], path_key: str) -> list[Path]:
    """Return the files, folder by folder, sorted or as a folder's state.json lists them.

    Raises:
        ValueError: such a folder lacks a listed file or is a selection of rows, or several
            splits of a dataset are given at once.
    """
    ordered: list[Path] = []
    folders = sorted({file.parent for file in files})
    for root in sorted({folder.parent for folder in folders}):
        names = [folder.name for folder in folders if folder.parent == root]
        if len(names) > 1 and (root / "dataset_dict.json").is_file():
            raise ValueError(
                f"{path_key}: {root} holds the splits {', '.join(names)}; give one, {root / names[0]}"
            )
    for folder in folders:
        here = sorted(file for file in files if file.parent == folder)
        if (folder / "state.json").is_file():
            listed = _listed(folder / "state.json")
            # Otherwise, single files were chosen.
            here = listed if set(here) >= set(listed) else here
        ordered += here
    return ordered


def _listed(state: Path) -> list[Path]:
    saved = read_json(state, _Saved, "save the dataset again")
    paths = [state.parent / file.filename for file in saved.files]
    if saved.indices:
        raise ValueError(
            f"{state}: the dataset is a selection of rows; save its flatten_indices() instead"
        )
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{path} is missing: state.json lists it; restore it, or save it again"
            )
    return paths


# --- reading them ------------------------------------------------------------------------------------------------


def _read_text(file: Path, _: _Fields) -> Iterator[Document]:
    with file.open("rb") as raw, _decompressed(raw) as text:
        _check_kind(file, text.peek(1), "text")
        data = text.read().removeprefix(codecs.BOM_UTF8)
    # The first lines are JSON objects, or the beginning and the name say so.
    problem = ""
    named = file.name.endswith(SUFFIXES["jsonl"]) and data.lstrip().startswith(b"{")
    if named or _TWO_OBJECTS.match(data):
        problem = "lines of JSON; training.dataset = 'jsonl' reads them"
    content = data.decode("utf-8", "surrogateescape")
    yield Document(content, shown(file), file.stat().st_size, problem)


def _read_jsonl(file: Path, fields: _Fields) -> Iterator[Document]:
    with file.open("rb") as raw, _decompressed(raw) as lines:
        head = lines.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()
        _check_kind(file, head, "lines of JSON")
        first, _, rest = head.partition(b"\n")
        if first.startswith(b"[") and not (first.rstrip().endswith(b"]") and rest.strip()):
            remedy = "write a line for each of its elements (jq -c '.[]')"
            raise ValueError(f"{file} does not hold lines of JSON: it is one JSON array; {remedy}")
        read = 0
        for number, line in enumerate(lines, 1):
            # Bytes of the file on disk, which is read in blocks.
            before = read
            read = raw.tell()
            if line := line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                yield _line(line, f"{shown(file)}, line {number}", read - before, fields)


def _line(line: bytes, origin: str, size: float, fields: _Fields) -> Document:
    try:
        text = line.decode("utf-8")
        check_nesting(text, RECORD_NESTED)
        record = json.loads(text)
    except ValueError as error:
        what = "" if type(error) is ValueError else "not JSON in UTF-8: "
        return Document("", origin, size, f"{what}{error}")
    if not isinstance(record, dict):
        return Document("", origin, size, f"not a JSON object with a field {fields.needed[0]!r}")
    return fields.document(record, origin, size)


def _decompressed(raw: io.BufferedReader) -> Any:
    """Return the open file, or a reader of what is compressed in it."""
    head = raw.peek(1)
    for begin, opened in _COMPRESSED.items():
        if head.startswith(begin):
            return opened(raw)
    return raw


def _check_kind(file: Path, head: bytes, wanted: str) -> None:
    """Raise ValueError if a file with these first bytes does not hold what is wanted."""
    for begin, kind in _NO_TEXT.items():
        if head.startswith(begin):
            raise ValueError(f"{file} does not hold {wanted}: it is {kind}")


def _read_parquet(file: Path, fields: _Fields) -> Iterator[Document]:
    # Only this source pays the 0.3 s of this import.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            batches = table.iter_batches(batch_size=ROWS, columns=_columns(file, names, fields))
            yield from _rows(file, names, batches, table.metadata.num_rows, fields)
    except pa.ArrowException as error:
        raise ValueError(
            f"{file}: not a whole parquet file: {error}; leave it out, or write it again"
        ) from error


def _read_arrow(file: Path, fields: _Fields) -> Iterator[Document]:
    """Yield the documents of a file in Arrow's stream or file format.

    `datasets` writes the stream format.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            open_table = pa.ipc.open_file if source.read(6) == b"ARROW1" else pa.ipc.open_stream
            source.seek(0)
            # The file is mapped: a column's bytes are read when they are used.
            table = open_table(source).read_all()
            names = table.column_names
            batches = _sound(table.select(_columns(file, names, fields)))
            yield from _rows(file, names, batches, table.num_rows, fields)
    except pa.ArrowException as error:
        raise ValueError(
            f"{file}: not a whole arrow file: {error}; leave it out, or write it again"
        ) from error


def _sound(table: Any) -> Iterator[Any]:
    """Yield a table's batches, each once its values are known to lie inside its buffers."""
    import pyarrow as pa

    for batch in table.to_batches():
        for column in batch.columns:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                # The fault may be only a text that is not UTF-8, which spoils just its own
                # row.
                column.view(_of_bytes(column.type)).validate(full=True)
        for row in range(0, len(batch), ROWS):
            yield batch.slice(row, ROWS)


def _of_bytes(kind: Any) -> Any:
    """Return the type with bytes in place of texts, also inside lists and structs."""
    import pyarrow as pa

    def field(of: Any) -> Any:
        return of.with_type(_of_bytes(of.type))

    if isinstance(kind, pa.MapType):
        return pa.map_(_of_bytes(kind.key_type), field(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(field(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct(list(map(field, kind)))
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind, kind)


def _columns(file: Path, names: list[str], fields: _Fields) -> list[str]:
    """Return the columns to read."""
    if missing := fields.missing(names, "column"):
        raise ValueError(f"{file}: {missing}")
    wanted = [name for name in fields.needed + fields.optional + fields.columns if name in names]
    for name in wanted:
        if names.count(name) > 1:
            raise ValueError(f"{file} has several columns {name!r}; write it with one")
    return wanted


def _rows(
    file: Path,
    names: list[str],
    batches: Iterable[Any],
    num_rows: int,
    fields: _Fields,
) -> Iterator[Document]:
    size = file.stat().st_size / max(num_rows, 1)
    records = chain.from_iterable(_records(batch, fields) for batch in batches)
    for number, record in enumerate(records, 1):
        origin = f"{shown(file)}, row {number}"
        if isinstance(record, str):
            yield Document("", origin, size, record)
        else:
            yield fields.document(record, origin, size, names)


def _records(batch: Any, fields: _Fields) -> Iterator[Json | str]:
    """Yield a batch's rows; for one that cannot be read, its problem as text."""
    try:
        records = batch.to_pylist()
        if not fields.is_text:
            records = [_as_in_json(record, batch.schema) for record in records]
    except ValueError as error:
        what = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        records = [f"{what} ({error})"]
        # Read the rows one by one, so that only unreadable rows become problems.
        if len(batch) > 1:
            rows = (batch.slice(row, 1) for row in range(len(batch)))
            records = chain.from_iterable(_records(row, fields) for row in rows)
    yield from records


def _as_in_json(value: Any, kind: Any) -> Any:
    """Return a value of a table's type as JSON has it.

    Maps become objects, bytes become UTF-8 text, and texts of the type JSON are parsed.
    Nulls that fill up structs, which have the same fields in all rows of a table, are left
    out.
    """
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        check_nesting(value, RECORD_NESTED)
        return json.loads(value)
    # Nested types: structs lose their null fields.
    if isinstance(kind, pa.Schema | pa.StructType):
        present = [field for field in kind if value[field.name] is not None]
        return {field.name: _as_in_json(value[field.name], field.type) for field in present}
    if isinstance(kind, pa.MapType):
        entries = {}
        for key, x in value:
            entries[str(_as_in_json(key, kind.key_type))] = _as_in_json(x, kind.item_type)
        return entries
    if isinstance(value, list):
        return [_as_in_json(x, kind.value_type) for x in value]
    # Scalars.
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if not isinstance(value, str | int | float):
        raise ValueError(f"JSON has no {kind}; cast it to text or a number")
    return value


# Readers by value of training.dataset. Folders of tokens have none (corpus.py).
SOURCES: dict[str, Any] = TABLES[RecordSource.chosen_by]
SOURCES.update(
    stdlib=_read_text,
    text=_read_text,
    jsonl=_read_jsonl,
    parquet=_read_parquet,
    arrow=_read_arrow,
    tokens=None,
)
