"""The order of documents, and the sums that it is found by, at any size."""

import multiprocessing
import tracemalloc
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from tests.data.conftest import documents_of, packed, random_documents
from tests.data.simulated import simulated_corpus
from tests.data.streams.checks import check_stream
from tests.refusals import refused
from titan_linear.data import PackedStreams, split_corpus
from titan_linear.data.streams import packing, split
from titan_linear.data.streams.packing import ROUNDS, Pooled, permuted

SEED = 7
PINNED = [[8, 5, 4, 0, 1, 7, 6, 2, 9, 3], [6, 4, 3, 2, 8, 1, 7, 0, 5, 9]]
PINNED_BUNDLES = [418, 850, 605, 651, 536, 951, 633, 732, 990, 889, 439, 788]


@pytest.fixture
def small_pools(monkeypatch):
    """Few documents are many pools."""
    monkeypatch.setattr(split, "BUNDLE", 4)
    monkeypatch.setattr(split, "SPAN", 3)
    monkeypatch.setattr(packing, "POOL", 3)


def brute_force_order(corpus, chosen, epoch):
    """Bundles of 4 documents in the permuted order, three to a pool, the documents of a pool by their draws."""
    key, found = np.array([SEED, epoch], dtype=np.uint64), []
    bundles = permuted(
        np.arange(-(-corpus.num_documents // 4)),
        -(-corpus.num_documents // 4),
        drawn(key, 0, ROUNDS),
    )
    for pool in range(-(-len(bundles) // 3)):
        documents = [
            d
            for c in bundles[3 * pool : 3 * pool + 3]
            for d in range(4 * c, 4 * c + 4)
            if d in chosen
        ]
        draws = drawn(key, pool + 1, len(documents))
        found += [document for _, document in sorted(zip(draws.tolist(), documents))]
    return found


def drawn(key, stream, count):
    return np.random.Philox(
        key=key, counter=np.array([0, stream, 0, 0], dtype=np.uint64)
    ).random_raw(count)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000])
def test_a_permutation_has_every_place_once(count):
    orders = [
        permuted(np.arange(count), count, drawn(np.array([k, 0], np.uint64), 0, ROUNDS))
        for k in range(20)
    ]
    assert all(sorted(x) == list(range(count)) for x in orders)
    assert count < 5 or len({tuple(x) for x in orders}) == 20
    assert (
        permuted(np.array([count - 1]), count, drawn(np.array([0, 0], np.uint64), 0, ROUNDS))
        == orders[0][-1]
    )


def test_a_permutation_is_as_good_as_random():
    """Neighbours are not kept, and places are uncorrelated with what they have: of 20,000, within 5 σ."""
    n = 20_000
    x = permuted(np.arange(n), n, drawn(np.array([0, 0], np.uint64), 0, ROUNDS))
    assert np.sum(np.abs(np.diff(x)) == 1) < 2 + 5 * 2**0.5
    assert abs(np.corrcoef(np.arange(n), x)[0, 1]) < 5 / n**0.5
    lengths = np.diff(np.flatnonzero(np.diff(x) < 0))  # of ascents: 2 in the mean
    assert abs(lengths.mean() - 2) < 0.1


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("holdout", [0.0, 0.3])
@pytest.mark.parametrize("seq_len", [8, 100, 3000])
def test_streams_are_slices_of_the_line(make_corpus, seq_len, holdout):
    documents = random_documents([int(n) for n in np.random.default_rng(1).integers(1, 40, 50)])
    corpus = make_corpus(documents)
    side, chosen = split_corpus(corpus, holdout, "train"), documents_of(corpus, holdout, "train")
    streams = PackedStreams(side, seq_len=seq_len, seed=SEED)
    assert streams.num_tokens == sum(len(documents[d]) for d in chosen)
    line = [d for epoch in range(9) for d in brute_force_order(corpus, chosen, epoch)]
    tokens = [t for d in line for t in documents[d].tolist()]
    owners = [n for n, d in enumerate(line) for _ in documents[d]]
    for i in np.random.default_rng(0).permutation(2 * streams.num_tokens // seq_len + 1):
        check_stream(streams[i], tokens, owners, int(i) * seq_len, seq_len)


@pytest.mark.usefixtures("small_pools")
def test_a_pass_is_in_the_order_of_the_corpus(make_corpus):
    documents = random_documents([int(n) for n in np.random.default_rng(2).integers(1, 40, 90)])
    corpus = make_corpus(documents)
    streams = PackedStreams(
        split_corpus(corpus, 0.2, "validation"), seq_len=33, seed=0, repeat=False
    )
    expected = np.concatenate([documents[d] for d in documents_of(corpus, 0.2, "validation")])
    assert len(streams) > 3
    assert np.array_equal(
        np.concatenate([stream.tokens for stream in streams])[: len(expected)], expected
    )


def test_order_is_pinned(make_corpus):
    """The order of a seed may never change: runs would not go on as they began."""
    corpus = make_corpus([[i] for i in range(10)])
    streams = packed(corpus, seq_len=10, seed=42)
    assert [streams[i].tokens.tolist() for i in (0, 1)] == PINNED
    assert (
        permuted(np.arange(12), 1000, drawn(np.array([42, 3], np.uint64), 0, ROUNDS)).tolist()
        == PINNED_BUNDLES
    )


def test_sums_of_a_large_corpus_are_kept(make_corpus, tmp_path, monkeypatch):
    corpus = make_corpus(random_documents([3] * 500))
    expected = split_corpus(corpus, 0.1, "train").ends
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(split, "SMALL", 100)
    assert np.array_equal(split_corpus(corpus, 0.1, "train").ends, expected)
    (file,) = (tmp_path / "cache/titan_linear").glob("split-*.bin")
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(split, "_sums", None)  # it is read, not made again
        assert np.array_equal(split_corpus(corpus, 0.1, "train").ends, expected)
    for damaged in (whole[:-9], whole[:40] + b"\x01" + whole[41:], b""):
        file.write_bytes(damaged)
        assert (
            np.array_equal(split_corpus(corpus, 0.1, "train").ends, expected)
            and file.read_bytes() == whole
        )
    offsets = np.fromfile(corpus.folder / "offsets.bin", "<i8")
    offsets[400] = offsets[399]
    offsets.tofile(corpus.folder / "offsets.bin")
    file.unlink()
    with refused(r"offsets.bin: document 399 has no tokens; restore it"):
        split_corpus(corpus, 0.1, "train")
    (tmp_path / "none").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    with refused(r"sums of a split, .* cannot be written .*; set XDG_CACHE_HOME"):
        split_corpus(corpus, 0.1, "train")


def peak_of_a_large_corpus():
    """(bytes at most beside the corpus, streams that differ less streams that were asked for)"""
    corpus = simulated_corpus(1 << 22)
    tracemalloc.start()
    streams = PackedStreams(split_corpus(corpus, 0.01, "train"), seq_len=4096, seed=0)
    epoch = streams.num_tokens // 4096
    # each in a pool that was not asked for yet
    indices = [0, 10**13, *range(epoch // 7, epoch, epoch // 7)]
    found = {streams[i].tokens.tobytes() for i in indices}
    return tracemalloc.get_traced_memory()[1], len(found) - len(indices)


def test_a_large_corpus_takes_little_memory():
    """4 million documents, 40 billion tokens: 0.5 MB of sums for the 64 MB of offsets and hashes. In a process of its
    own: threads that earlier tests left would count."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        peak, repeated = alone.submit(peak_of_a_large_corpus).result()
    assert peak < 8e6 and not repeated


def test_places_of_a_corpus_are_mixed():
    """A stretch of an epoch, a hundredth of a pool, has documents from all over the corpus."""
    corpus = simulated_corpus(1 << 22)
    line = Pooled(split_corpus(corpus, 0.0, "train"), seed=0)
    documents, _ = line.around(0, line.side.num_tokens // 3, line.side.num_tokens // 3 + 1)
    assert len(documents) == packing.POOL * split.BUNDLE
    tenths = np.bincount(documents[:164] * 10 >> 22, minlength=10)
    assert tenths.min() >= 3 and len(set(documents[:164] // split.BUNDLE)) > 60
