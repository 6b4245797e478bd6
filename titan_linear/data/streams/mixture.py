"""Mixtures: which source a stream is from, in exact proportions, and which of the source's own streams it is.

    cycle    | web web code web chat web code web …|code web web …     P streams each; P is 256 for most weights
    streams  | 0   1   2    3   4    5   6    7    | …

Of the first b·P streams, a source has its exact share, rounded up or down: so its count at the edge of a cycle is known
without counting, and never more than one off. Within a cycle the sources stand in an order drawn from (seed, cycle).
A source gives its own streams one after the other, as in a run on it alone.

A run may change its mixture at a step: the streams from there on are another `Phase`, in which every source goes on
with the stream after its last one. All phases are in the checkpoint, so that stream i stays a function of i.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from titan_linear.data.streams.packing import Length, PackedStreams, Stream

CYCLE = 256  # streams, at least


class Phase(NamedTuple):
    """From stream `start` on, each source has this share."""

    start: int
    weights: Mapping[str, float]


class MixedStreams:
    """streams[i]: stream i of a mixture of sources; random access, the same everywhere.

    sources: by name, with all of the last phase's. If one of earlier phases is missing, its streams cannot be had.
    known: by name, fingerprints of the corpora that sources have had so far.
    lengths: those of the mixture's streams, where they change; by default those of the sources.
    repeat=False: one pass over `sources`, each of them a single pass, in proportion to their lengths, without `phases`.
    """

    def __init__(
        self,
        sources: Mapping[str, PackedStreams],
        phases: Sequence[Phase] = (),
        *,
        seed: int,
        repeat: bool = True,
        known: Mapping[str, str] | None = None,
        lengths: Sequence[Length] = (),
    ):
        if not repeat:
            phases = [Phase(0, {name: len(streams) for name, streams in sources.items()})]
        assert phases and phases[0].start == 0 and set(phases[-1].weights) <= set(sources), phases
        self.sources = dict(sources)
        self.phases = list(phases)
        self.repeat = repeat
        self.known = dict(known or {})
        self._turns = [
            Interleaving(list(p.weights.values()), seed, p.start, finite=not repeat) for p in phases
        ]
        # for each phase: streams that sources gave in those before
        self._before: list[dict[str, int]] = [{}]
        for n, following in enumerate(phases[1:]):
            self._before.append(self._given(following.start, n))
        if lengths:
            given = [
                (self._given(length.start, self._phase(length.start)), length.seq_len)
                for length in lengths
            ]
            for name, streams in sources.items():
                own = [Length(counts.get(name, 0), seq_len) for counts, seq_len in given]
                self.sources[name] = streams.of_lengths(own)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Those of the corpora that sources have or had, by name."""
        return self.known | {
            name: streams.corpus.fingerprint for name, streams in self.sources.items()
        }

    def __len__(self) -> int:
        if self.repeat:
            raise TypeError("repeated streams have no end")
        return sum(len(streams) for streams in self.sources.values())

    def __getitem__(self, i: int) -> Stream:
        name, own = self.source(i)
        if name not in self.sources:
            raise ValueError(
                f"stream {i} is of {name!r}, which training.mixture no longer has; name it there again"
            )
        return self.sources[name][own]

    def source(self, i: int) -> tuple[str, int]:
        """The source of stream i, and which of the source's streams it is."""
        i = operator.index(i)
        if i < 0 or (not self.repeat and i >= len(self)):
            raise IndexError(f"stream {i}")
        n = self._phase(i)
        place, own = self._turns[n].place(i - self.phases[n].start)
        name = list(self.phases[n].weights)[place]
        return name, self._before[n].get(name, 0) + own

    def summary(self, end: int) -> str:
        """For the console: each source's share of the streams before `end`, and its epochs in them."""
        given = self._given(end, self._phase(end))
        parts = []
        for name, source in self.sources.items():
            epochs = source.place(given[name])[0] / source.num_tokens
            parts.append(
                f"{name} {given[name] / end:.1%} ({epochs:.3g} epochs of {source.num_tokens:,} tokens)"
            )
        return f"mixture: {', '.join(parts)}"

    def _phase(self, i: int) -> int:
        """The phase of stream i."""
        return bisect_right(self.phases, i, key=lambda phase: phase.start) - 1

    def _given(self, i: int, n: int) -> dict[str, int]:
        """How many streams each source has given before stream i, which is of phase n or ends it."""
        given = dict(self._before[n])
        counts = self._turns[n].counts(i - self.phases[n].start)
        for name, count in zip(self.phases[n].weights, counts, strict=True):
            given[name] = given.get(name, 0) + count
        return given

    def padding(self) -> Stream:
        """A stream of padding only: it gives a rank as many streams as the others have."""
        return next(iter(self.sources.values())).padding()


class Interleaving:
    """0, 2, 0, 1, 0, …: places in `weights`, each as often as its weight says.

    weights: decimal numbers count as they are written, not as the nearest binary ones. start: it varies the order.
    finite: weights are counts, and the sequence ends where each place has come that many times.
    """

    def __init__(
        self, weights: Sequence[float], seed: int, start: int = 0, *, finite: bool = False
    ):
        exact = [Fraction(str(weight)) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        counts = [int(weight * common) for weight in exact]
        self.sums = [sum(counts[:n]) for n in range(len(counts) + 1)]
        self.end = self.sums[-1] if finite else None
        least = -(-self.sums[-1] // min(counts))  # streams of which each source has one
        self.cycle = max(CYCLE, 1 << (least - 1).bit_length())
        self.seed, self.start = seed, start
        self._cycle = lru_cache(maxsize=2)(self._drawn)

    def place(self, i: int) -> tuple[int, int]:
        """Which weight has its turn at i, and how many turns it had before."""
        cycle, rest = divmod(i, self.cycle)
        order = self._cycle(cycle)
        mine = int(order[rest])
        return mine, self._at_edge(cycle)[mine] + int(np.count_nonzero(order[:rest] == mine))

    def counts(self, i: int) -> list[int]:
        """How many turns each weight had before i."""
        cycle, rest = divmod(i, self.cycle)
        within = (
            np.bincount(self._cycle(cycle)[:rest], minlength=len(self.sums) - 1)
            if rest
            else [0] * len(self.sums)
        )
        return [edge + int(more) for edge, more in zip(self._at_edge(cycle), within)]

    def _at_edge(self, cycle: int) -> list[int]:
        """Each weight's turns before a cycle. The running sums of weights are rounded, so that all turns add up to the
        cycle's edge."""
        edge = cycle * self.cycle if self.end is None else min(cycle * self.cycle, self.end)
        sums = [edge * weight // self.sums[-1] for weight in self.sums]
        return [high - low for low, high in pairwise(sums)]

    def _drawn(self, cycle: int) -> np.ndarray:
        """A cycle's order, [cycle] int64 (a finite sequence's last one is shorter)."""
        turns = [
            after - before for before, after in zip(self._at_edge(cycle), self._at_edge(cycle + 1))
        ]
        order = np.repeat(np.arange(len(turns)), turns)
        key = np.array([self.seed % 2**64, cycle], dtype=np.uint64)
        counter = np.array([0, 0, 1, self.start], dtype=np.uint64)
        draws = np.random.Philox(key=key, counter=counter).random_raw(len(order))
        return order[np.argsort(draws, kind="stable")]


Streams = PackedStreams | MixedStreams
