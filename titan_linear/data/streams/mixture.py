"""Mixtures: which source each stream comes from, and which of that source's streams it is.

    cycle    | web web code web chat web code web …|code web web …     P streams each; P is 256 for most weights
    streams  | 0   1   2    3   4    5   6    7    | …

Shares are exact: of the first b·P streams, each source has its exact share, rounded up or
down. So its count at the edge of a cycle is known without counting, and is never more than
one off. Within a cycle, the sources stand in an order drawn from (seed, cycle). Each source
gives its streams in order, as in a run on that source alone.

A run may change its mixture at a step. The streams from there on are another `Phase`, in
which every source continues after its last stream. The checkpoint stores all phases, so
stream i stays a function of i.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from titan_linear.data.streams.packing import Length, PackedStreams, Stream, draws

# Least number of streams in a cycle.
CYCLE = 256


class Phase(NamedTuple):
    """Share of each source from stream `start` on."""

    start: int
    weights: Mapping[str, float]


class MixedStreams:
    """Streams of a mixture of sources, with random access.

    Stream i is the same everywhere.

    Args:
        sources: the sources by name, with all sources of the last phase. Reading a stream
            of a source that only earlier phases have, and that is missing here, is an
            error.
        known: fingerprints, by source name, of the corpora that sources have had so far.
        lengths: the lengths of the mixture's streams, where they change. By default, the
            sources' own lengths.
        repeat: False makes one pass over `sources`, each of them a single pass, in
            proportion to their lengths and without `phases`.
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
        self._turns = []
        for phase in phases:
            weights = list(phase.weights.values())
            self._turns.append(Interleaving(weights, seed, phase.start, finite=not repeat))
        # Streams that each source gave before each phase.
        self._before: list[dict[str, int]] = [{}]
        for n, following in enumerate(phases[1:]):
            self._before.append(self._given(following.start, n))
        # Translate each change of length from the mixture's stream indices to each source's
        # own.
        if lengths:
            before = [self._given(length.start) for length in lengths]
            for name, streams in sources.items():
                starts = [given.get(name, 0) for given in before]
                own = [Length(start, length.seq_len) for start, length in zip(starts, lengths)]
                self.sources[name] = streams.of_lengths(own)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints, by source name, of the corpora that sources have or had."""
        own = {name: streams.corpus.fingerprint for name, streams in self.sources.items()}
        return self.known | own

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
        """Return the source of stream i, and the index of the stream within that source."""
        i = operator.index(i)
        if i < 0 or (not self.repeat and i >= len(self)):
            raise IndexError(f"stream {i}")
        n = self._phase(i)
        place, own = self._turns[n].place(i - self.phases[n].start)
        name = list(self.phases[n].weights)[place]
        return name, self._before[n].get(name, 0) + own

    def summary(self, end: int) -> str:
        """Return each source's share of the streams before `end` and its epochs, as a line."""
        given = self._given(end)
        parts = []
        for name, source in self.sources.items():
            read, _ = source.place(given[name])
            parts.append(
                f"{name} {given[name] / end:.1%} ({read / source.num_tokens:.3g} epochs of "
                f"{source.num_tokens:,} tokens)"
            )
        return f"mixture: {', '.join(parts)}"

    def _phase(self, i: int) -> int:
        """Return the index of the phase that contains stream i."""
        return bisect_right(self.phases, i, key=lambda phase: phase.start) - 1

    def _given(self, i: int, n: int | None = None) -> dict[str, int]:
        """Return the number of streams that each source gave before stream i.

        Phase n contains stream i (the default) or ends there.
        """
        n = self._phase(i) if n is None else n
        given = dict(self._before[n])
        counts = self._turns[n].counts(i - self.phases[n].start)
        for name, count in zip(self.phases[n].weights, counts, strict=True):
            given[name] = given.get(name, 0) + count
        return given

    def padding(self) -> Stream:
        """Return a stream of padding only, for ranks that have fewer streams than others."""
        return next(iter(self.sources.values())).padding()


class Interleaving:
    """Sequence of indices into `weights`, each as frequent as its weight: 0, 2, 0, 1, 0, …

    Args:
        weights: relative frequencies. Decimal numbers count as written, not as the nearest
            binary numbers.
        start: varies the order.
        finite: the weights are counts, and the sequence ends once each index has come that
            many times.
    """

    def __init__(
        self,
        weights: Sequence[float],
        seed: int,
        start: int = 0,
        *,
        finite: bool = False,
    ):
        # Convert the weights to integers over their common denominator.
        exact = [Fraction(str(weight)) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        counts = [int(weight * common) for weight in exact]
        self.sums = list(accumulate(counts, initial=0))
        self.end = self.sums[-1] if finite else None
        # Number of streams in which each source has at least one.
        least = -(-self.sums[-1] // min(counts))
        self.cycle = max(CYCLE, 1 << (least - 1).bit_length())
        self.seed = seed
        self.start = start
        self._cycle = lru_cache(maxsize=2)(self._drawn)

    def place(self, i: int) -> tuple[int, int]:
        """Return the index whose turn it is at i, and the number of turns it had before."""
        cycle, rest = divmod(i, self.cycle)
        order = self._cycle(cycle)
        mine = int(order[rest])
        return mine, self._at_edge(cycle)[mine] + int(np.count_nonzero(order[:rest] == mine))

    def counts(self, i: int) -> list[int]:
        """Return the number of turns that each index had before position i."""
        cycle, rest = divmod(i, self.cycle)
        counts = self._at_edge(cycle)
        # At an edge the next cycle, which may be none, is not drawn.
        if rest:
            within = np.bincount(self._cycle(cycle)[:rest], minlength=len(counts))
            counts = (counts + within).tolist()
        return counts

    def _at_edge(self, cycle: int) -> list[int]:
        """Return the number of turns of each index before a cycle.

        Running sums of the weights are rounded, so that all turns add up to the cycle's
        edge.
        """
        edge = cycle * self.cycle if self.end is None else min(cycle * self.cycle, self.end)
        sums = [edge * weight // self.sums[-1] for weight in self.sums]
        return [high - low for low, high in pairwise(sums)]

    def _drawn(self, cycle: int) -> np.ndarray:
        """Draw the order of a cycle, [cycle] int64.

        The last cycle of a finite sequence is shorter.
        """
        turns = np.subtract(self._at_edge(cycle + 1), self._at_edge(cycle))
        order = np.repeat(np.arange(len(turns)), turns)
        # Sort by a random draw for each turn, keyed by seed, cycle and start.
        places = draws(self.seed, cycle, len(order), use=(0, 1, self.start))
        return order[np.argsort(places, kind="stable")]


Streams = PackedStreams | MixedStreams
