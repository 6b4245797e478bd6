"""Scores: columns of a corpus in a separate folder, written by `titan-linear score`.

column-*.bin
    [num_tokens] or [num_tokens, n], as in the folder of a corpus.
scores.json
    Fingerprints of the corpus and the tokenizer, the columns, and the scoring's progress;
    at the end, each file's size and checksums, as in corpus.json.

Checksums are compared when scores are opened, at the disk's speed, unless no file has
changed since the last comparison.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from titan_linear.data.corpus.columns import Kinds, check_kinds
from titan_linear.data.corpus.corpus import (
    Corpus,
    column_file,
    described,
    open_columns,
    verify_once,
    write_json,
)
from titan_linear.storage.files import Json, read_json, sync

SCORES = "scores.json"
# Places in the corpus [n], then each column, [n] or [n, width].
Rows = list[np.ndarray]


class Scores(BaseModel):
    # The corpus's fingerprint.
    corpus: str
    tokenizer: str
    # Everything else that changes the numbers: the weights, the temperature, the packing of
    # streams.
    by: dict[str, str]
    columns: Kinds
    next_stream: int
    streams: int
    # Set once all streams are scored.
    files: dict[str, Json] = {}


def read_scores(folder: Path) -> Scores:
    scores = read_json(folder / SCORES, Scores, "give a folder that titan-linear score wrote")
    check_kinds(scores.columns, folder / SCORES)
    return scores


def open_scores(folder: Path) -> tuple[Scores, dict[str, np.ndarray]]:
    """Open a folder of scores and its columns.

    Raises:
        ValueError: it holds no scores, is not finished, or was altered since.
    """
    scores = read_scores(folder)
    if scores.next_stream < scores.streams or not scores.files:
        raise ValueError(
            f"{folder} is scored to stream {scores.next_stream} of {scores.streams}; run the same titan-linear score "
            "again, which goes on from there"
        )
    verify_once(folder, SCORES, scores.files)
    return scores, open_columns(folder, scores.columns)


def content_of_scores(folders: str) -> str:
    """Return a fingerprint of the columns of loss.scores; "none" without any."""
    content = [read_scores(Path(folder)).files for folder in folders.split(",") if folder]
    return hashlib.sha256(str(content).encode()).hexdigest()[:16] if content else "none"


def with_scores(
    corpora: Iterable[Corpus], folders: Iterable[str], temperature: float
) -> list[Corpus]:
    """Return the corpora with the columns of these folders.

    Raises:
        ValueError: a folder belongs to none of the corpora, or was scored at another
            temperature than the loss has.
    """
    corpora = list(corpora)
    for folder in map(Path, folders):
        scores, columns = open_scores(folder)
        identity = scores.corpus, scores.tokenizer
        identities = [corpus.identity for corpus in corpora]
        if identity not in identities:
            raise ValueError(
                f"loss.scores: {folder} is of another corpus or tokenizer (fingerprints {' and '.join(identity)}) than "
                f"the run's ({', '.join(map(' and '.join, identities))}); score that"
            )
        if float(scores.by["temperature"]) != temperature:
            raise ValueError(
                f"loss.scores: {folder} was scored with --temperature {scores.by['temperature']}, and the loss reads "
                f"log-probabilities at {temperature:g}; score with that, or set distillation.temperature"
            )
        # Add the columns to every corpus with the content that was scored.
        for i, corpus in enumerate(corpora):
            if corpus.identity == identity:
                corpora[i] = replace(corpus, columns={**corpus.columns, **columns})
    return corpora


def begin(folder: Path, scores: Scores, num_tokens: int) -> None:
    """Create new files, unless `folder` already holds some of these scores.

    Raises:
        ValueError: it holds other scores.
        OSError: the disk is full.
    """
    if (folder / SCORES).exists():
        if read_scores(folder).model_copy(update={"next_stream": 0, "files": {}}) != scores:
            raise ValueError(
                f"{folder} holds scores of other weights, texts or columns; choose another folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, (dtype, width) in scores.columns.items():
        size = num_tokens * np.dtype(dtype).itemsize * max(width, 1)
        with (folder / column_file(name)).open("wb") as file:
            try:
                # Reserve the space: files are written through a mapping, where a full disk
                # would be a signal.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise OSError(*error.args, file.name) from None
    write_json(folder / SCORES, scores.model_dump())


def put(folder: Path, scores: Scores, rows: Iterable[Rows]) -> None:
    """Write these rows, which count once `keep` records them."""
    columns = open_columns(folder, scores.columns, "r+")
    for places, *numbers in rows:
        for column, of_places in zip(columns.values(), numbers):
            column[places] = of_places


def keep(folder: Path, scores: Scores, end: int) -> None:
    """Record that the rows of the streams before `end` are written."""
    for name in scores.columns:
        sync(folder / column_file(name))
    names = map(column_file, scores.columns)
    files = {n: described(folder / n) for n in names if end == scores.streams}
    now = scores.model_copy(update={"next_stream": end, "files": files})
    write_json(folder / SCORES, now.model_dump())
    sync(folder)


def differences(first: Path, second: Path) -> dict[str, tuple[float, int]]:
    """Return, for each common column, the largest difference and the token it is at.

    Raises:
        ValueError: the folders score different texts, or have no column in common.
    """
    one, columns = open_scores(first)
    other, others = open_scores(second)
    if (one.corpus, one.tokenizer) != (other.corpus, other.tokenizer):
        raise ValueError(
            f"{first} and {second} are of other corpora or tokenizers; score one with both"
        )
    found = {}
    for name, column in columns.items():
        if other.columns.get(name) == one.columns[name]:
            apart = np.abs(column.astype(np.float64) - others[name])
            of_tokens = apart.reshape(len(column), -1).max(1)
            found[name] = float(of_tokens.max()), int(of_tokens.argmax())
    if not found:
        raise ValueError(
            f"{first} has {', '.join(columns)}, and {second} has {', '.join(others)}: no column is in both"
        )
    return found
