"""Groups of text files: the group of each token of a stream, by the file of its document.

Patterns are globs: * and ? match characters of a name, ** matches any folders. A pattern
that begins at the root is matched against whole paths. Any other pattern may begin at any
folder: "books/*.jsonl" matches every .jsonl file in a folder named books, "**/*.py" every
.py file.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.corpus import Corpus
from titan_linear.data.streams.mixture import Streams

_PART = re.compile(r"\*\*/|\*\*|.", re.DOTALL)
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class FileGroups:
    """The groups of the text files behind endless streams.

    Args:
        patterns: each group's globs, separated by commas. A file belongs to the first group
            with a matching glob. Files that match no glob belong to the last group,
            `other`, as do documents of mixture sources that do not know their files.

    Raises:
        ValueError: (naming metrics.loss_by_source) a glob matches no file, all files that a
            group matches belong to earlier groups, or no corpus knows its files.
    """

    def __init__(self, streams: Streams, patterns: Mapping[str, str], other: str):
        self.streams = streams
        self.names = [*patterns, other]
        corpora = {name: source.corpus for name, source in streams.sources.items()}
        # Where each file's tokens begin and the last file ends, [num_files + 1] int64, and the
        # group of each file. A corpus that does not know its files counts as one file.
        self._edges = {name: np.array([0, corpus.num_tokens]) for name, corpus in corpora.items()}
        self._groups = {name: np.array([len(patterns)]) for name in corpora}
        for name, groups in _grouped(corpora, patterns).items():
            self._edges[name] = corpora[name].offsets[corpora[name].files]
            self._groups[name] = groups

    def of_stream(self, i: int) -> ndarray:
        """Return the group of each token of stream i as an index into `names`, [T] int64.

        Padding belongs to `other`.
        """
        name, own = self.streams.source(i)
        source = self.streams.sources[name]
        starts, lengths, *_ = source.runs(own)
        # The file of each document that the stream holds.
        files = np.searchsorted(self._edges[name][1:], starts, side="right")
        groups = np.append(self._groups[name][files], len(self.names) - 1)
        _, seq_len = source.place(own)
        return np.repeat(groups, np.append(lengths, seq_len - lengths.sum()))

    @property
    def summary(self) -> str:
        """Return the number of tokens of each group, for the console."""
        tokens = np.zeros(len(self.names))
        for name, groups in self._groups.items():
            tokens += np.bincount(groups, np.diff(self._edges[name]), minlength=len(tokens))
        counts = [f"{name} {count:,.0f} tokens" for name, count in zip(self.names, tokens)]
        return "loss by source: " + ", ".join(counts)


def _grouped(corpora: Mapping[str, Corpus], patterns: Mapping[str, str]) -> dict[str, ndarray]:
    """Map each corpus that knows its files to the group of each file, [num_files] int64."""
    paths_of = {name: corpus.paths for name, corpus in corpora.items() if corpus.paths is not None}
    paths = list(chain.from_iterable(paths_of.values()))
    if not paths:
        folders = ", ".join(corpus.name for corpus in corpora.values())
        raise ValueError(
            f"metrics.loss_by_source: {folders} does not know from which files its documents are: it was written from "
            "tokens; write it from its texts (titan-linear corpus), or remove metrics.loss_by_source"
        )
    # Assign from the last group to the first, so that the first match wins.
    groups = np.full(len(paths), len(patterns))
    numbered = list(enumerate(patterns.items()))
    for place, (name, globs) in reversed(numbered):
        for glob in globs.split(","):
            groups[_fits(glob.strip(), paths, name)] = place
    for place, (name, globs) in numbered:
        if not (groups == place).any():
            raise ValueError(
                f"metrics.loss_by_source, group {name!r}: files = {globs!r} fits only files of groups before it; "
                "put it before them, or remove it"
            )
    # Split the groups of all files by corpus.
    ends = np.cumsum([len(own) for own in paths_of.values()])
    return dict(zip(paths_of, np.split(groups, ends[:-1])))


def _fits(glob: str, paths: Sequence[str], name: str) -> ndarray:
    """Return which paths match a glob, [n] bool."""
    # A glob that fits nothing is a mistake.
    pattern = re.compile(_regex(glob), re.DOTALL)
    fits = np.array([pattern.fullmatch(path) is not None for path in paths])
    if not fits.any():
        raise ValueError(
            f"metrics.loss_by_source, group {name!r}: files = {glob!r} fits none of {len(paths):,} files ({paths[0]}, "
            "…); correct it, or remove it"
        )
    return fits


def _regex(glob: str) -> str:
    # A relative glob may begin at any folder.
    glob = str(Path(os.path.expanduser(glob)))
    start = "" if glob.startswith("/") else "(?:.*/)?"
    return start + "".join(_WILD.get(part) or re.escape(part) for part in _PART.findall(glob))
