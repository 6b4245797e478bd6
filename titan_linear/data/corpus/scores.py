"""Scores: columns of a corpus in a folder of their own, as `titan-linear score` writes them.

column-*.bin   [num_tokens] or [num_tokens, n], as beside a corpus's tokens
scores.json    the corpus and the tokenizer by their fingerprints, the columns, and how far the scoring has come
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from titan_linear.data.corpus.corpus import Corpus, as_json, column_file, open_column
from titan_linear.storage.files import read_json, sync, write_whole

SCORES = "scores.json"


class Scores(BaseModel):
    corpus: str  # fingerprint
    tokenizer: str
    by: dict[str, str]  # what else gives other numbers: the weights, the temperature, how streams are packed
    columns: dict[str, tuple[str, int]]  # dtype, numbers for each token or 0
    next_stream: int
    streams: int


def open_scores(folder: Path) -> Scores:
    """ValueError: it holds none, or not all yet."""
    scores = read_json(folder / SCORES, Scores, "give a folder that titan-linear score wrote")
    if scores.next_stream < scores.streams:
        raise ValueError(
            f"{folder} is scored to stream {scores.next_stream} of {scores.streams}; run the same titan-linear score "
            "again, which goes on from there"
        )
    return scores


def with_scores(corpora: Iterable[Corpus], folders: Iterable[str]) -> list[Corpus]:
    """The corpora with the columns of these folders. ValueError: one is of none of the corpora."""
    corpora = list(corpora)
    for folder in map(Path, folders):
        scores = open_scores(folder)
        fits = [corpus.fingerprint == scores.corpus for corpus in corpora]
        if not any(fits):
            raise ValueError(
                f"loss.scores: {folder} is of another corpus or tokenizer (fingerprints {scores.corpus} and "
                f"{scores.tokenizer}) than the run's ({', '.join(c.fingerprint for c in corpora)}); score that"
            )
        columns = {name: open_column(folder, name, *kind) for name, kind in scores.columns.items()}
        corpora = [
            replace(corpus, columns={**corpus.columns, **columns}) if fit else corpus
            for corpus, fit in zip(corpora, fits)
        ]
    return corpora


def begin(folder: Path, scores: Scores, num_tokens: int) -> Scores:
    """What `folder` holds of these scores so far; new files if nothing. ValueError: it holds others."""
    if (folder / SCORES).exists():
        found = read_json(folder / SCORES, Scores, "choose another folder")
        if found.model_copy(update={"next_stream": 0}) != scores:
            raise ValueError(f"{folder} holds scores of other weights, texts or columns; choose another folder")
        return found
    folder.mkdir(parents=True, exist_ok=True)
    for name, (dtype, width) in scores.columns.items():
        with (folder / column_file(name)).open("wb") as file:
            file.truncate(num_tokens * np.dtype(dtype).itemsize * max(width, 1))
    write_whole(folder / SCORES, as_json(scores.model_dump()))
    return scores


def put(folder: Path, scores: Scores, rows: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]], end: int) -> None:
    """Write rows (places in the corpus [n], and columns [n] or [n, width]) of the streams before `end`."""
    for name, (dtype, width) in scores.columns.items():
        shape = (-1, width) if width else (-1,)
        column = np.memmap(folder / column_file(name), dtype, mode="r+").reshape(shape)
        for places, columns in rows:
            column[places] = columns[name]
        column.flush()
    write_whole(folder / SCORES, as_json(scores.model_copy(update={"next_stream": end}).model_dump()))
    sync(folder)


def differences(first: Path, second: Path) -> dict[str, tuple[float, int]]:
    """For each column that both have: the largest difference, and the token it is at. ValueError: other texts."""
    one, other = open_scores(first), open_scores(second)
    if (one.corpus, one.tokenizer) != (other.corpus, other.tokenizer):
        raise ValueError(f"{first} and {second} are of other corpora or tokenizers; score one with both")
    found = {}
    for name, kind in one.columns.items():
        if other.columns.get(name) == kind:
            a, b = (open_column(folder, name, *kind) for folder in (first, second))
            apart = np.abs(a.astype(np.float64) - b)
            apart = apart.max(1) if kind[1] else apart
            found[name] = float(apart.max()), int(apart.argmax())
    return found
