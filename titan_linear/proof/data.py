"""The ranks' data: labels, their cuts of a batch, the same streams under other degrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise, product

import numpy as np
import torch
from torch import Tensor

from titan_linear.data import IGNORE, Batch, StreamLoader
from titan_linear.data.corpus.tree_records import BACK
from titan_linear.distributed.one_process import LocalDims
from titan_linear.models.plan import Later
from titan_linear.proof.findings import Finding, Findings, of_count
from titan_linear.proof.ranks import on_ranks, sharding_of
from titan_linear.proof.subject import STREAMS, ProofSubject

# Number of steps whose streams are compared.
STEPS = 2
# Streams per step that are compared token by token.
COMPARED = 16


def labels(subject: ProofSubject) -> Findings:
    """Check that every label is the next token of the same document, and that none is
    missing.

    Every token that is trained on must have a label.
    """
    wrong: list[str] = []
    missing: list[str] = []
    total = 0
    sources = subject.streams.sources
    weighted = any("weights" in source.corpus.columns for source in sources.values())
    for i in range(STREAMS * subject.degrees.dp):
        stream = subject.streams[i]
        name, number = subject.streams.source(i)
        # The expected label of each token, and the tokens that have labels. The document of
        # the last token may continue in the source's next stream.
        want = np.append(stream.tokens[1:], sources[name][number + 1].tokens[0])
        labelled = stream.labels != IGNORE
        # Ends of documents, except the last one, which may continue in the next stream.
        ends = np.zeros(len(want), dtype=bool)
        ends[stream.cu_seqlens[1:-1] - 1] = True
        # In prefix trees, a node ends where the next token does not continue it.
        if BACK in stream.columns:
            ends = np.roll(stream.columns[BACK], -1) != 1
        # A label is wrong, or one is missing.
        bad = labelled & (ends | (stream.labels != want))
        absent = ~labelled & ~ends & (not weighted)
        # The last token, and padding, have no label.
        lengths = sources[name].runs(number).lengths
        absent[lengths.sum() - 1 :] = False
        total += len(want)
        # Describe the places of errors.
        for places, tokens in ((wrong, bad), (missing, absent)):
            for at in np.flatnonzero(tokens):
                n = np.searchsorted(stream.cu_seqlens, at, side="right") - 1
                places.append(f"stream {i}, document {n}, token {at - stream.cu_seqlens[n]}")
    what = f"of {total} tokens, labels that are not the next token of their document"
    yield of_count("labels", what, wrong)
    yield of_count("labels", "tokens within a document that have none", missing)


def targets(subject: ProofSubject) -> Findings:
    """Check the columns that a loss reads in addition to labels, and the order of pairs.

    Columns must have the corpus's numbers of these tokens. Pairs must be together and in
    order.
    """
    apart = []
    wrong = []
    for i in range(STREAMS * subject.degrees.dp):
        name, number = subject.streams.source(i)
        source = subject.streams.sources[name]
        # The documents of the stream, in the order of the corpus.
        corpus = source.corpus
        starts, lengths, *_ = source.runs(number)
        documents = np.searchsorted(corpus.offsets, starts, side="right") - 1
        # The documents of a group follow each other, from the group's first.
        first = documents[:: corpus.group] // corpus.group * corpus.group
        together = np.add.outer(first, range(corpus.group)).ravel()
        if source.targets.group and not np.array_equal(documents, together):
            apart.append(f"stream {i}")
        # Columns are compared at the tokens that have labels, document by document.
        stream = source[number]
        begins = np.cumsum(lengths) - lengths
        for n, (start, begin, length) in enumerate(zip(starts, begins, lengths)):
            rows = np.flatnonzero(stream.labels[begin : begin + length] != IGNORE)
            # The next token in the stream may continue another document.
            rows = rows[rows + 1 < length]
            for column in source.targets.columns:
                numbers = stream.columns[column][begin + rows]
                if (numbers != corpus.columns[column][start + rows + 1]).any():
                    wrong.append(f"{column}, stream {i}, document {n}")
    if subject.loss.group:
        what = "streams with a text that is not beside its other one, the chosen one first"
        yield of_count("pairs", what, apart)
    if subject.config.loss.name != "cross_entropy":
        what = "documents with a number that is not its label's"
        yield of_count("columns", what, wrong)


def cut(subject: ProofSubject) -> Findings:
    """Check that the ranks' cuts of a batch, joined, are the batch.

    Tokens, labels, positions and documents are compared.
    """

    def on_rank(dims: LocalDims) -> tuple[Tensor, dict[str, Tensor]]:
        # Cut the batch as the trainer does.
        batch = next(iter(subject.loader(dims.dp_rank, dims.dp)))
        micro = sharding_of(subject, dims)(batch)
        # All that it has of each token, by name.
        parts = {"tokens": micro.tokens[0], "labels": micro.labels[0]}
        parts |= {name: column[0] for name, column in micro.columns.items()}
        parts["position_ids"] = micro.plan.position_ids
        parts |= _by_depth(micro.plan.later)
        starts = torch.zeros(len(micro.labels[0]), dtype=torch.bool)
        starts[micro.plan.cp_context.cu_seqlens_cpu[:-1]] = True
        parts["boundaries of documents"] = starts
        mine = tokens_of(subject, dims.dp_rank, dims.cp_group.rank())
        return mine, {name: x.cpu() for name, x in parts.items()}

    # Compute the expected positions and columns from the boundaries of documents.
    batch = subject.batch
    degrees = subject.degrees
    bounds = batch.cu_seqlens.numpy().astype(np.int64)
    position = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    want = {
        "tokens": batch.tokens[0],
        "labels": batch.labels[0],
        "position_ids": torch.from_numpy(position),
    }
    want |= _by_depth(later(batch, subject.model.mtp_layers))
    want |= {name: column[0] for name, column in batch.columns.items()}
    # A rank's documents begin where documents begin, and at each of its fragments.
    starts = torch.from_numpy(position == 0)
    starts[:: _fragment(subject)] = True
    want["boundaries of documents"] = starts
    # Compare each rank's parts with its tokens of the batch.
    ranks = on_ranks(degrees, on_rank)
    for name, x in want.items():
        places = []
        for rank, (mine, parts) in enumerate(ranks):
            bad = (parts[name] != x[mine]).view(len(mine), -1).any(1)
            places += [(rank, token) for token in mine[bad].tolist()]
        where = ""
        if places:
            rank, token = places[0]
            where = f"rank {rank}, {subject.document(token)}"
        what = f"{name} of {degrees.ranks} ranks that differ from the streams'"
        yield Finding("cut", what, len(places), 0, where)


def later(batch: Batch, depth: int) -> Later | None:
    """Return the training data of the layers that predict further tokens.

    It is computed document by document; None if the model has no such layers.
    """
    tokens = torch.zeros(depth, batch.tokens.shape[1], dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    weights = torch.zeros(tokens.shape)
    # In a document, token t is trained on t + k, unless the document ends before.
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        for k in range(1, min(depth, b - a - 1) + 1):
            here = slice(a, b - k)
            ahead = slice(a + k, b)
            tokens[k - 1, here] = batch.tokens[0, ahead]
            labels[k - 1, here] = batch.labels[0, ahead]
            weights[k - 1, here] = batch.columns["weights"][0, ahead]
    return Later(tokens, labels, weights) if depth else None


def _by_depth(later: Later | None) -> dict[str, Tensor]:
    columns = {}
    for name, rows in later._asdict().items() if later else ():
        for k, x in enumerate(rows, 1):
            columns[f"{name} {k} later"] = x
    return columns


def tokens_of(subject: ProofSubject, dp_rank: int, cp_rank: int) -> Tensor:
    """Return the indices in the batch of a rank's tokens, [T_local] int64, in its order.

    The rank takes all of its streams at once.
    """
    return tokens_in(subject, range(dp_rank * STREAMS, (dp_rank + 1) * STREAMS), cp_rank)


def tokens_in(subject: ProofSubject, streams: Iterable[int], cp_rank: int) -> Tensor:
    """Return the indices in the batch of a rank's tokens of these streams, [T_local] int64.

    They are in the rank's order.
    """
    T = subject.config.training.seq_len
    W = subject.degrees.cp
    # With the zig-zag layout a rank has two blocks of each stream, else one.
    blocks = torch.arange(T).view(-1, _fragment(subject))
    own = [cp_rank, 2 * W - 1 - cp_rank] if len(blocks) > W else [cp_rank]
    mine = blocks[own].flatten()
    return torch.cat([mine + stream * T for stream in streams])


def _fragment(subject: ProofSubject) -> int:
    """Return the number of tokens in a fragment."""
    # A zig-zag layout has two blocks for each rank.
    W = subject.degrees.cp
    zigzag = subject.config.parallelism.context_parallel_layout == "zigzag" and W > 1
    return subject.config.training.seq_len // (2 * W if zigzag else W)


def stream(subject: ProofSubject) -> Findings:
    """Check that together the ranks take each stream of a step once.

    This holds for every data-parallel degree and micro-batch, and every step from which a
    run resumes.
    """
    # The expected tokens of the first streams of each step.
    G = subject.run.training.global_batch_size
    want = {}
    for first in range(0, STEPS * G, G):
        for i in range(first, first + min(G, COMPARED)):
            want[i] = subject.streams[i].tokens
    # Each split must take the same streams, with the same tokens.
    for dp, local in _splits(G):
        wrong = []
        for step in range(STEPS):
            due = set(range(step * G, (step + 1) * G))
            for dp_rank in range(dp):
                for i, tokens in _taken(subject, G, dp, local, dp_rank, step):
                    differs = i in want and not np.array_equal(tokens, want[i])
                    if i not in due or differs:
                        wrong.append(f"rank {dp_rank}, step {step + 1}, stream {i}")
                    due.discard(i)
            # Streams that are still due were not taken by any rank.
            wrong += [f"no rank, step {step + 1}, stream {i}" for i in sorted(due)]
        what = f"dp {dp}, {local} at a time: streams of a step that are others, taken twice or left out"
        yield of_count("streams", what, wrong)


def _splits(G: int) -> list[tuple[int, int]]:
    """Return the splits to try: (data-parallel degree, streams per micro-batch)."""
    every = dict.fromkeys(product((1, 2, G), (1, 2)))
    return [(dp, local) for dp, local in every if dp <= 8 and G % (dp * local) == 0]


def _taken(
    subject: ProofSubject,
    G: int,
    dp: int,
    local: int,
    dp_rank: int,
    step: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a rank's streams of a step, and their tokens, in a run that resumed at that
    step.
    """
    loader = StreamLoader(
        subject.streams,
        global_batch_size=G,
        local_batch_size=local,
        dp_rank=dp_rank,
        dp_degree=dp,
        next_stream=step * G,
    )
    for batch in islice(loader, G // (dp * local)):
        yield from zip(batch.streams, batch.tokens.numpy().reshape(local, -1), strict=True)
