"""Columns: numbers for each token of a document, one or several, as records give them.

A record's field is one number for all of its tokens, a list with one number for each, or a
list with n numbers for each. A record of two documents has a list of two such values. A
token's value applies to its own prediction. The column "weights" scales the loss of each
token; without it all count 1. A record's weights multiply the weights of its conversation's
answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from titan_linear.config import COLUMNS
from titan_linear.data.corpus.tokenizer import Tokenizer

WEIGHTS = "weights"
# The column of prefix trees (tree_records.py).
BACK = "back"
DTYPES = {**COLUMNS, BACK: "<i4"}
LOGPROBS = "reference", "behaviour", "teacher_logprobs"
# Tolerated excess of a log-probability above 0, where it was computed in 16 bits.
ROUNDED = 0.5
# A document without any log-probability below 0 is refused if its largest exceeds this.
# Rounding to float32 gives less.
EXACT = 1e-4
# Largest sum of a teacher's probabilities: bfloat16 rounds log-probabilities by 0.2%.
MOST_SUM = 1.01


# For each column: its dtype, and the count of numbers for each token (0: no list).
Kinds = Mapping[str, tuple[str, int]]
# For each column: this count in earlier documents.
Widths = dict[str, int]


def check_kinds(kinds: Kinds, where: Any) -> None:
    """Raise ValueError if columns have unknown names, dtypes or widths.

    With other dtypes, numpy would take a file's content for addresses of Python objects.
    """
    for name, (dtype, width) in kinds.items():
        if DTYPES.get(name) != dtype or width < 0:
            raise ValueError(
                f"{where}: column {name!r}, {dtype!r}, {width} for each token, must be one of {DTYPES}"
            )


class Problem(ValueError):
    """A problem of a document, which stops the work or is skipped."""


class DocumentTokens(NamedTuple):
    tokens: ndarray  # [n] int64
    columns: Mapping[str, ndarray] = {}  # [n] or [n, width] each

    @property
    def weights(self) -> ndarray:
        """Return [n] float32, 0 for tokens that are not trained on."""
        return self.columns.get(WEIGHTS, np.ones(len(self.tokens), dtype=np.float32))

    def check(self) -> None:
        """Raise Problem if the values of tokens that count are wrong.

        Other values may be zero.
        """
        counted = np.flatnonzero(self.weights[1:] > 0) + 1
        for name, column in self.columns.items() if len(counted) else ():
            numbers = column[counted].reshape(len(counted), -1)
            if name in LOGPROBS and numbers.min() >= 0 and numbers.max() > EXACT:
                raise Problem(
                    f"{name!r} is nowhere below 0, as probabilities are; give their logarithms"
                )
            if name == "teacher_ids" and not np.diff(np.sort(numbers)).all():
                raise Problem(f"{name!r} lists an id twice for a token; give each once")
            if name == "teacher_logprobs" and (most := np.exp(numbers).sum(1).max()) > MOST_SUM:
                raise Problem(f"{name!r} has probabilities that sum to {most:.4g}; give at most 1")


def with_columns(
    documents: Sequence[DocumentTokens],
    values: Mapping[str, Any],
    dtypes: Mapping[str, str],
    tokenizer: Tokenizer,
    widths: Widths,
) -> list[DocumentTokens]:
    """Return a record's documents with their columns.

    Args:
        dtypes: dtypes of the columns to read.
        widths: this record's widths are added.

    Raises:
        Problem: a value does not fit its document.
    """
    made = [(document.tokens, dict(document.columns)) for document in documents]
    for name, dtype in dtypes.items():
        of_each = values[name] if len(made) > 1 else [values[name]]
        if not isinstance(of_each, list) or len(of_each) != len(made):
            raise Problem(
                f"{name!r} is not a list of {len(made)}, one for each of its documents; give that"
            )
        for (ids, columns), value in zip(made, of_each):
            column = column_of(name, value, len(ids), widths, tokenizer.vocab_size).astype(dtype)
            columns[name] = column * columns.get(name, 1)
    return [DocumentTokens(ids, columns) for ids, columns in made]


def column_of(
    name: str,
    value: Any,
    tokens: int,
    widths: Widths,
    vocab_size: int,
) -> ndarray:
    """Return a column of a document, [tokens] or [tokens, width] float64.

    Raises:
        Problem: the value does not fit the document.
    """
    try:
        column = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise Problem(
            f"{name!r} is neither a number nor a list of numbers, or of lists of one length"
        ) from None
    # One number stands for all tokens.
    if column.ndim == 0 and (tokens == 1 or name not in LOGPROBS):
        column = np.full(tokens, column)
    if column.ndim == 0:
        raise Problem(
            f"{name!r} is one number, the document's sum perhaps; give each token's log-probability"
        )
    if len(column) != tokens or column.ndim > 2:
        raise Problem(
            f"{name!r} has {len(column):,} rows, and the document {tokens:,} tokens with its end; give one each"
        )
    check_width(name, column, widths)
    # Neither infinite nor NaN.
    finite = column.size and np.abs(column).max() <= np.finfo(np.float32).max
    if not finite or (name == WEIGHTS and (column.ndim == 2 or column.min() < 0)):
        raise Problem(
            f"{name!r} must have finite numbers, and weights 0 or more, one per token; correct it"
        )
    if name == "teacher_ids":
        ids = (column >= 0) & (column < vocab_size) & (column % 1 == 0)
        if not ids.all():
            raise Problem(
                f"{name!r} has ids outside the vocabulary, 0 to {vocab_size - 1}; correct it"
            )
    if name in LOGPROBS and column.max() > ROUNDED:
        raise Problem(
            f"{name!r} has {column.max():g}, and log-probabilities are 0 or less; give these"
        )
    return column


def check_width(name: str, column: ndarray, widths: Widths) -> None:
    """Raise Problem if a column's width differs from earlier documents'."""
    width = sum(column.shape[1:])
    if widths.setdefault(name, width) != width:
        raise Problem(
            f"{name!r} has {width} numbers for a token, and {widths[name]} in documents before; "
            "every document needs as many"
        )
