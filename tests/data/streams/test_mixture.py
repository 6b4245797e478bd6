"""Mixtures: exact shares, each source's own streams in their order."""

from collections import Counter

import numpy as np
import pytest

from tests.data.conftest import packed, random_documents
from tests.refusals import refused
from titan_linear.data import MixedStreams, Phase, validation_batches
from titan_linear.data.streams.mixture import Interleaving

WEIGHTS = [0.7, 0.1, 0.2, 1e-3]
PINNED = [(0, 0), (2, 0), (0, 1), (0, 2), (2, 1), (0, 3)]


@pytest.mark.parametrize("weights", [WEIGHTS, [1.0], [1 / 3, 2 / 3], [1e-4, 5.0]])
def test_shares_are_exact_and_every_place_is_known_at_once(weights):
    turns = Interleaving(weights, seed=3)
    count, seen = 2 * turns.cycle + 77, Counter()
    for i in range(count):
        who, own = turns.place(i)
        assert own == seen[who]  # nothing is left out, nothing comes twice
        seen[who] += 1
        if i % 500 == 0:
            assert turns.counts(i + 1) == [seen[n] for n in range(len(weights))]
    far = 10**6 * turns.cycle
    for had, weight in zip(turns.counts(far), weights):
        assert abs(had - far * weight / sum(weights)) < 1 + 1e-9 * far
    tenths = Interleaving([0.7, 0.1, 0.2], seed=0).counts(10**15)
    assert tenths == [7 * 10**14, 10**14, 2 * 10**14]  # as the weights are written


def test_sources_are_mixed_within_a_cycle_and_by_the_seed():
    orders = [
        [Interleaving([1, 1], seed).place(i)[0] for i in range(b, b + 256)]
        for seed in (0, 1)
        for b in (0, 256)
    ]
    assert (
        all(sum(order) == 128 for order in orders) and len({tuple(order) for order in orders}) == 4
    )
    assert max(abs(np.cumsum(np.array(order) * 2 - 1)).max() for order in orders) < 40
    other = [Interleaving([1, 1], 0, start=800).place(i)[0] for i in range(256)]
    assert other not in orders
    # it may never change
    assert [Interleaving(WEIGHTS, seed=42).place(i) for i in range(6)] == PINNED


@pytest.mark.parametrize("weights", [[1, 255], [2, 511], [2, 8191]])
def test_each_source_has_a_stream_in_a_cycle(weights):
    """Also if its share is just less than one in a power of two."""
    turns = Interleaving(weights, 0)
    assert min(turns.counts(turns.cycle)) >= 1


@pytest.mark.parametrize("counts", [[3, 1], [1, 700, 2], [5]])
def test_a_pass_has_each_once(counts):
    turns = Interleaving(counts, seed=0, finite=True)
    places = [turns.place(i) for i in range(sum(counts))]
    assert sorted(places) == [(n, own) for n, count in enumerate(counts) for own in range(count)]


@pytest.fixture
def sources(make_corpus):
    corpora = {
        name: make_corpus(random_documents([9, 30, 4, 50], seed=n))
        for n, name in enumerate(["a", "b", "c"])
    }
    return {name: packed(corpus, seq_len=16, seed=5) for name, corpus in corpora.items()}


def test_streams_are_the_sources_own(sources):
    two = {name: sources[name] for name in "ab"}
    first = MixedStreams(two, [Phase(0, {"a": 3, "b": 1})], seed=5)
    for i in (0, 1, 299, 300, 10**9):
        name, own = first.source(i)
        assert np.array_equal(first[i].tokens, sources[name][own].tokens)
    changed = MixedStreams(
        sources, [*first.phases, Phase(300, {"b": 2.0, "c": 1.0}), Phase(900, {"a": 1})], seed=5
    )
    seen = Counter()
    for i in range(1200):
        name, own = changed.source(i)
        assert own == seen[name]  # a source goes on with the stream after its last
        assert i >= 300 or (name, own) == first.source(i)
        seen[name] += 1
    assert seen["c"] == pytest.approx(200, abs=20) and seen["b"] == pytest.approx(475, abs=40)
    rest = MixedStreams({"a": sources["a"]}, changed.phases, seed=5, known={"b": "x"})
    assert rest.source(1199) == changed.source(1199) and rest.fingerprints.keys() == {"a", "b"}
    with refused(r"stream 899 is of '[bc]', which training.mixture no longer has; name it"):
        rest[899]
    with pytest.raises(IndexError):
        first[-1]


def test_a_validation_pass_has_all_streams_of_all_sources(make_corpus):
    corpora = [make_corpus(random_documents([20] * n)) for n in (40, 5)]
    passes = {str(n): packed(c, seq_len=16, seed=0, repeat=False) for n, c in enumerate(corpora)}
    mixed = MixedStreams(passes, seed=0, repeat=False)
    assert len(mixed) == sum(map(len, passes.values())) == len(list(mixed))
    found = Counter(mixed[i].tokens.tobytes() for i in range(len(mixed)))
    assert found == Counter(
        stream.tokens.tobytes() for streams in passes.values() for stream in streams
    )
    batches = validation_batches(mixed, local_batch_size=2, dp_rank=1, dp_degree=2, limit=10)
    assert [batch.streams for batch in batches] == [(2, 3), (6, 7), (10, 11)]
