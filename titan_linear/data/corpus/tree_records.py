"""Prefix trees: records that branch, `training.dataset_format = "tree"`.

A node is an object with

    tokens, or text     its own, which continue the parent's
    weights             optional: how much each token counts, a number or a list with one for each
    children            optional: nodes
    other columns       (columns.py) as the loss reads them; optional in a node whose tokens count
                        nothing

and a record is the root. Each path from the root to a leaf is a document; a text ends, at a
leaf, with the end token. `trees_of` makes trees of documents (`training.share_prefixes`).

A corpus holds a tree as one document, depth first, with the column BACK: the offset from
each token to its parent token, 0 for a tree's first. Streams also have SHARE: the total
weight of the documents that contain a token.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.chat import Ids, Record, RecordEncoder
from titan_linear.data.corpus.columns import (
    BACK,
    WEIGHTS,
    DocumentTokens,
    Problem,
    Widths,
    with_columns,
)
from titan_linear.data.corpus.tokenizer import Tokenizer

SHARE = "share"
# Documents share multiples of this many tokens, a recurrence's chunk, since shorter nodes
# cost as much.
LEAST = 64
# Documents of a tree, unless a field says which belong together.
MOST = 64


class PendingDocument(NamedTuple):
    """A document that waits for others that share its beginning."""

    origin: str
    # The value of training.group_field.
    group: Any
    document: DocumentTokens


class TreeEncoder(RecordEncoder):
    """Encoder of tree records."""

    fingerprint = "tree-1"

    def __init__(self, tokenizer: Tokenizer, columns: Mapping[str, str]):
        self.columns = columns
        self._tokenizer = tokenizer
        self._ids = Ids(tokenizer)
        self._continuing = tokenizer.continuing()

    def encode(self, record: Record) -> DocumentTokens:
        nodes = list(self._nodes(record, "root", 0, {}))
        return _joined(nodes, (BACK, WEIGHTS, *self.columns))

    def _nodes(
        self,
        node: Any,
        place: str,
        back: int,
        widths: Widths,
    ) -> Iterator[DocumentTokens]:
        """Yield a node and the nodes below it, depth first.

        Args:
            place: the node's name in errors.
            back: the offset from the node's first token to its parent token.
        """
        children = node.get("children") if isinstance(node, dict) else 0
        if not isinstance(children, list | None):
            raise Problem(f"{place} is not an object, or its 'children' are not a list; correct it")
        try:
            ids = self._tokens(node, root=back == 0, leaf=not children)
            columns = self._columns(node, ids, widths)
        except Problem as problem:
            raise Problem(f"{place}: {problem}") from None
        offsets = np.append(back, np.ones(len(ids) - 1, dtype=np.int64))
        yield DocumentTokens(ids, {**columns, BACK: offsets})
        # Children continue this node's last token, each one behind the nodes of the others.
        back = 1
        for n, child in enumerate(children or []):
            for below in self._nodes(child, f"{place}.children[{n}]", back, widths):
                yield below
                back += len(below.tokens)

    def _columns(self, node: Record, ids: ndarray, widths: Widths) -> Mapping[str, ndarray]:
        """Return the node's columns, except omitted ones."""
        names = [name for name in (WEIGHTS, *self.columns) if node.get(name) is not None]
        dtypes = {name: self.columns.get(name, "<f4") for name in names}
        counted = DocumentTokens(ids, {WEIGHTS: np.ones(len(ids), dtype=np.float32)})
        (made,) = with_columns([counted], node, dtypes, self._tokenizer, widths)
        missing = [name for name in self.columns if name not in (WEIGHTS, *names)]
        if missing and made.weights.any():
            raise Problem(f"no {missing[0]!r} for tokens that count; give it, or 'weights': 0")
        return made.columns

    def _tokens(self, node: Record, root: bool, leaf: bool) -> ndarray:
        text = node.get("text")
        ids = node.get("tokens")
        if not isinstance(text, str | None) or (text is None) == (ids is None):
            raise Problem("it must have either 'text' or 'tokens'; give one")
        if text is not None:
            tokenizer = self._tokenizer if root else self._continuing
            ids = tokenizer.encode(text).tolist() + self._tokenizer.eos * leaf
        if ids == []:
            raise Problem("it is empty")
        return self._ids.encode({"tokens": ids}).tokens


def _joined(nodes: Sequence[DocumentTokens], names: Iterable[str]) -> DocumentTokens:
    """Concatenate nodes. Missing columns are 0, unless all nodes lack them."""
    columns = {}
    for name in names:
        widths = [node.columns[name].shape[1:] for node in nodes if name in node.columns]
        if widths:
            zeros = [np.zeros((len(node.tokens), *widths[0])) for node in nodes]
            parts = [node.columns.get(name, x) for node, x in zip(nodes, zeros)]
            columns[name] = np.concatenate(parts)
    return DocumentTokens(np.concatenate([node.tokens for node in nodes]), columns)


def shared(a: ndarray, b: ndarray) -> int:
    """Return the number of tokens that two documents share.

    Each keeps at least one for itself.
    """
    most = min(len(a), len(b)) - 1
    return int(np.append(a[:most] != b[:most], True).argmax()) // LEAST * LEAST


def agreeing(
    held: Sequence[PendingDocument], pair: bool
) -> tuple[list[PendingDocument], list[str]]:
    """Return the documents in which shared tokens count the same, in their trees' order.

    Also returns the problems of the others: of two that differ, the one that differs from
    more documents is dropped.
    """
    kept: list[PendingDocument] = []
    problems: list[str] = []
    order = held if pair else sorted(held, key=lambda h: h.document.tokens.astype(">u4").tobytes())
    voters = order[:: len(held) // MOST + 1]
    for now in order:
        # Compare with the previous document; on a difference, the sample of voters decides.
        while kept and (problem := _difference(kept[-1], now)):
            votes_before = sum(not _difference(kept[-1], voter) for voter in voters)
            votes_now = sum(not _difference(now, voter) for voter in voters)
            if votes_before >= votes_now:
                problems.append(problem)
                break
            problems.append(_difference(now, kept.pop()))
        else:
            kept.append(now)
    return kept, problems


def trees_of(held: Sequence[PendingDocument], pair: bool) -> list[DocumentTokens]:
    """Return trees whose paths are these documents, as `agreeing` has them, depth first.

    Documents that share nothing go to different trees, except the two of a pair, whose
    order stays.
    """
    trees: list[list[DocumentTokens]] = []
    before = None
    path = np.zeros(0, dtype=np.int64)
    for now in held:
        ids, columns = now.document
        common = shared(before.document.tokens, ids) if before else 0
        # Begin a tree.
        if not trees or not (common or pair):
            trees.append([])
            path = path[:0]
            count = 0
        # Append the part that the previous document does not share. `path` holds the places
        # of this document's tokens in the tree.
        own = count + np.arange(len(ids) - common)
        back = np.ones(len(own), dtype=np.int64)
        back[0] = count - path[common - 1] if common else 0
        path = np.append(path[:common], own)
        count += len(own)
        columns = {name: column[common:] for name, column in columns.items()}
        trees[-1].append(DocumentTokens(ids[common:], columns | {BACK: back}))
        before = now
    return [_joined(nodes, nodes[0].columns) for nodes in trees]


def _difference(a: PendingDocument, b: PendingDocument) -> str:
    """Return a problem of two documents whose shared tokens do not count the same, else ""."""
    common = shared(a.document.tokens, b.document.tokens)
    # Only tokens that count in either matter, and the first is never predicted.
    weights = np.maximum(a.document.weights[:common], b.document.weights[:common])
    counted = (weights > 0) & (np.arange(common) > 0)
    for name, column in a.document.columns.items():
        x = column[:common]
        y = b.document.columns[name][:common]
        differ = (x != y).reshape(common, -1).any(1) & counted
        if differ.any():
            at = int(differ.argmax())
            return (
                f"{b.origin} shares its first {common} tokens with {a.origin}, and {name!r} of token {at} is {y[at]} "
                f"here and {x[at]} there; give shared tokens weights 0, or the same numbers"
            )
    return ""
