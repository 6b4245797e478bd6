"""Prefix trees: records that branch, `training.dataset_format = "tree"`. A node is an object with

    tokens, or text     its own, which continue those of the node above
    weights             optional: how much each token counts, a number or a list with one for each
    children            optional: nodes

and a record is the root. Each path from the root to a leaf is a document; a text ends, at a leaf, with the end token.
A corpus holds a tree as one document, depth first, with the column BACK: how many tokens before each one that lies
which it continues; 0 for a tree's first. Streams have WORTH, too: what each token counts as a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_linear.data.corpus.chat import Ids, Record
from titan_linear.data.corpus.columns import DocumentTokens, column_of
from titan_linear.data.corpus.tokenizer import Tokenizer

BACK, WORTH = "back", "worth"
Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # of a node: tokens, weights, back


class Trees:
    """Gives the tokens of records, or says what is wrong with them (`RecordEncoder`)."""

    fingerprint = "tree-1"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._ids = tokenizer, Ids(tokenizer)
        self._continuing = tokenizer.continuing()
        self._eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode_batch(self, records: Sequence[Record]) -> list[DocumentTokens | str]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> DocumentTokens | str:
        parts: list[Part] = []
        try:
            self._lay(record, "root", 0, parts)
        except ValueError as problem:
            return str(problem)
        ids, weights, back = (np.concatenate(x) for x in zip(*parts))
        return DocumentTokens(ids, weights, {BACK: back})

    def _lay(self, node: Any, place: str, back: int, parts: list[Part]) -> int:
        """Add a node's part, whose first token lies so far behind that which it continues, and those below it, depth
        first. The number of tokens of all."""
        children = node.get("children") if isinstance(node, dict) else 0
        if not isinstance(children, list | None):
            raise ValueError(f"{place} is no object, or its 'children' are no list; correct it")
        ids = self._tokens(node, place, back == 0, not children)
        weights = column_of("weights", 1.0 if node.get("weights") is None else node["weights"], len(ids), {})
        if isinstance(weights, str):
            raise ValueError(f"{place}: 'weights' {weights}")
        parts.append((ids, weights.astype(np.float32), np.append(back, np.ones(len(ids) - 1, dtype=np.int64))))
        below = 0
        for n, child in enumerate(children or []):
            below += self._lay(child, f"{place}.children[{n}]", below + 1, parts)
        return len(ids) + below

    def _tokens(self, node: dict[str, Any], place: str, root: bool, leaf: bool) -> np.ndarray:
        text, ids = node.get("text"), node.get("tokens")
        if not isinstance(text, str | None) or (text is None) == (ids is None):
            raise ValueError(f"{place} must have either 'text' or 'tokens'; give one")
        if text is not None:
            ids = [*map(int, (self._tokenizer if root else self._continuing).encode(text)), *self._eos * leaf]
        (masked,) = self._ids.encode_batch([{"tokens": ids}])
        if isinstance(masked, str):
            raise ValueError(f"{place}: {'it is empty' if ids == [] else masked}")
        return masked.tokens
