"""Prefix trees: records that branch, `training.dataset_format = "tree"`. A node is an object with

    tokens, or text     its own, which continue those of the node above
    weights             optional: how much each token counts, a number or a list with one for each
    children            optional: nodes
    other columns       (columns.py) as the loss reads them; a node whose tokens count nothing may leave them out

and a record is the root. Each path from the root to a leaf is a document; a text ends, at a leaf, with the end token.
A corpus holds a tree as one document, depth first, with the column BACK: how many tokens before each one that lies
which it continues; 0 for a tree's first. Streams have SHARE, too: how much the documents that hold a token count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan_linear.data.corpus.chat import Ids, MaskedTokens, Record
from titan_linear.data.corpus.columns import DocumentTokens, with_columns
from titan_linear.data.corpus.tokenizer import Tokenizer

BACK, SHARE = "back", "share"


class Trees:
    """Gives the tokens of records, or says what is wrong with them (`RecordEncoder`)."""

    fingerprint = "tree-1"

    def __init__(self, tokenizer: Tokenizer, columns: Mapping[str, str]):
        self.columns = columns
        self._tokenizer, self._ids = tokenizer, Ids(tokenizer)
        self._continuing = tokenizer.continuing()
        self._eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode_batch(self, records: Sequence[Record]) -> list[DocumentTokens | str]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> DocumentTokens | str:
        nodes: list[DocumentTokens] = []
        try:
            self._lay(record, "root", 0, nodes, {})
        except ValueError as problem:
            return str(problem)
        names = [BACK, *(name for name in self.columns if name != "weights")]
        columns = {
            name: _joined([node.columns.get(name, np.zeros(len(node.tokens))) for node in nodes]) for name in names
        }
        ids, weights = (np.concatenate(of_nodes) for of_nodes in zip(*(node[:2] for node in nodes)))
        return DocumentTokens(ids, weights, columns)

    def _lay(self, node: Any, place: str, back: int, nodes: list[DocumentTokens], widths: dict[str, int]) -> int:
        """Add a node, whose first token lies so far behind that which it continues, and those below it, depth first.
        The number of tokens of all."""
        children = node.get("children") if isinstance(node, dict) else 0
        if not isinstance(children, list | None):
            raise ValueError(f"{place} is no object, or its 'children' are no list; correct it")
        nodes.append(self._node(node, place, self._tokens(node, place, back == 0, not children), widths))
        tokens = len(nodes[-1].tokens)
        columns = {**nodes[-1].columns, BACK: np.append(back, np.ones(tokens - 1, dtype=np.int64))}
        nodes[-1] = nodes[-1]._replace(columns=columns)
        below = 0
        for n, child in enumerate(children or []):
            below += self._lay(child, f"{place}.children[{n}]", below + 1, nodes, widths)
        return tokens + below

    def _node(self, node: dict[str, Any], place: str, ids: np.ndarray, widths: dict[str, int]) -> DocumentTokens:
        """Its tokens with its columns, less those that it leaves out."""
        numbers = {name: node[name] for name in ("weights", *self.columns) if node.get(name) is not None}
        dtypes = {name: self.columns.get(name, "<f4") for name in numbers}
        whole = MaskedTokens(ids, np.ones(len(ids), dtype=np.float32))
        made = with_columns([whole], numbers, dtypes, self._tokenizer, widths)
        if isinstance(made, str):
            raise ValueError(f"{place}: {made}")
        missing = [name for name in self.columns if name not in ("weights", *numbers)]
        if missing and made[0].loss_mask.any():
            raise ValueError(f"{place} has no {missing[0]!r} for tokens that count; give it, or 'weights': 0")
        return made[0]

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


def _joined(columns: list[np.ndarray]) -> np.ndarray:
    """Of all nodes; those without numbers have 0."""
    width = max(columns, key=np.ndim).shape[1:]
    return np.concatenate([x if x.shape[1:] == width else np.zeros((len(x), *width)) for x in columns])
