"""Files of tests: records as lines of JSON or as tables, and changes of a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_lines(file: Path, records: Iterable[dict]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_texts(file: Path, texts: Iterable[str]) -> Path:
    """Lines like {"text": "…"}."""
    return write_lines(file, ({"text": text} for text in texts))


def write_table(file: Path, table: pa.Table | dict, **options: object) -> Path:
    """A table, or its columns, as the file's name says: .parquet, with the options of its writer, or .arrow."""
    table = pa.table(table) if isinstance(table, dict) else table
    if file.suffix == ".parquet":
        pq.write_table(table, file, **options)
    else:
        with pa.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table, max_chunksize=1000)  # several batches
    return file


def write_record(file: Path, record: dict) -> Path:
    """One record, as the file's name says: .jsonl, or a table."""
    if file.suffix == ".jsonl":
        return write_lines(file, [record])
    return write_table(file, pa.Table.from_pylist([record]))


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def change_json(file: Path, fields: dict) -> None:
    """Fields of an object, added or in place of those that it has."""
    write_json(file, read_json(file) | fields)


def events_of(run: Path) -> Any:
    """What TensorBoard shows of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tb" / run.name))  # the run has its folder's name
    events.Reload()
    return events
