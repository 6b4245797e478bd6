"""Columns: numbers beside a document's tokens, one or several for each, as a record has them.

A record's field is one number, for all of its tokens, or a list with one for each token; or with a list of n numbers
for each. The number beside a token is about predicting this token. The column "weights" says how much each token
counts: it multiplies what the conversation itself says of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from titan_linear.data.corpus.chat import MaskedTokens


class DocumentTokens(NamedTuple):
    """A `MaskedTokens` with columns."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    columns: Mapping[str, np.ndarray] = MappingProxyType({})  # [n] or [n, width] each


def with_columns(
    document: MaskedTokens, values: Mapping[str, Any], dtypes: Mapping[str, str], widths: MutableMapping[str, int]
) -> DocumentTokens | str:
    """The document with these columns, or what is wrong with one.

    widths: numbers for each token in the documents so far, 0 for columns without lists; this one's are added.
    """
    ids, loss_mask = document
    columns = {}
    for name, dtype in dtypes.items():
        try:
            column = np.asarray(values[name], dtype=np.float64)
        except (TypeError, ValueError):
            return f"{name!r} is no number and no list of numbers, or of lists that are equally long"
        if column.ndim == 0:
            column = np.full(len(ids), column)
        if len(column) != len(ids) or column.ndim > 2:
            return (
                f"{name!r} has {len(column):,} rows, and the document {len(ids):,} tokens with its end; give one each"
            )
        width = column.shape[1] if column.ndim == 2 else 0
        if widths.setdefault(name, width) != width:
            return (
                f"{name!r} has {width} numbers for a token, and {widths[name]} in documents before; let all have those"
            )
        if not np.isfinite(column).all() or (name == "weights" and (width or column.min() < 0)):
            return f"{name!r} has a number that is not finite, or a weight below 0, or several; correct it"
        columns[name] = column.astype(dtype)
    weights = columns.pop("weights", None)
    return DocumentTokens(ids, loss_mask if weights is None else loss_mask * weights, columns)
