"""Corpora of texts, as tests open and write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_linear import data
from titan_linear.data import Corpus, Texts, Tokenizer


def open_corpus(
    dataset: str,
    path: str | None,
    tokenizer: Tokenizer,
    *,
    cache_dir: Path | None = None,
    with_paths: bool = False,
    **how: Any,
) -> Corpus:
    return data.open_corpus(Texts(dataset, path, tokenizer, **how), cache_dir=cache_dir, with_paths=with_paths)


def tokenise_corpus(folder: Path, dataset: str, path: str | None, tokenizer: Tokenizer, **how: Any) -> Corpus:
    return data.tokenise_corpus(folder, Texts(dataset, path, tokenizer, **how))
