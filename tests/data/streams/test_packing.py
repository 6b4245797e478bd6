import re
from itertools import pairwise

import numpy as np
import pytest

from tests.data.conftest import documents_of, packed, random_documents
from tests.data.streams.checks import check_stream
from tests.refusals import refused
from titan_linear.data import IGNORE
from titan_linear.data.streams.split import _threshold

# 123 tokens: streams end before, on and after documents' ends
LENGTHS = [1, 7, 30, 2, 1, 13, 64, 5]


def brute_force_line(documents, seed, epochs):
    """The line token by token: its tokens, and for each the number of the document it lies in, counted on the line.

    So few documents are one pool.
    """
    tokens, owners, count = [], [], 0
    for epoch in range(epochs):
        key, counter = (
            np.array([seed, epoch], dtype=np.uint64),
            np.array([0, 1, 0, 0], dtype=np.uint64),
        )
        draws = np.random.Philox(key=key, counter=counter).random_raw(len(documents))
        for _, document in sorted(zip(draws.tolist(), range(len(documents)))):
            tokens += documents[document].tolist()
            owners += [count] * len(documents[document])
            count += 1
    return tokens, owners


@pytest.mark.parametrize("seed", [0, 1, 1234567])
# 41 · 3 = one epoch; 400: three epochs in a stream
@pytest.mark.parametrize("seq_len", [1, 8, 41, 123, 400])
def test_streams_are_slices_of_the_line(make_corpus, seed, seq_len):
    documents = random_documents(LENGTHS)
    streams = packed(make_corpus(documents), seq_len=seq_len, seed=seed)
    count = max(3, 500 // seq_len)
    tokens, owners = brute_force_line(documents, seed, epochs=count * seq_len // 123 + 2)
    for i in np.random.default_rng(0).permutation(count):  # random access, in any order
        check_stream(streams[i], tokens, owners, int(i) * seq_len, seq_len)


def test_a_single_document_repeats_as_another_document(make_corpus):
    """It meets itself at the end of an epoch, and is another document there."""
    documents = random_documents([5])
    streams = packed(make_corpus(documents), seq_len=12, seed=0)
    assert streams[0].cu_seqlens.tolist() == [0, 5, 10, 12]
    assert streams[0].labels[[4, 9, 11]].tolist() == [IGNORE, IGNORE, documents[0][2]]


def test_any_stream_is_read_at_once(make_corpus):
    """Stream 10¹² comes as quickly as stream 0."""
    corpus = make_corpus(random_documents(LENGTHS))
    one = packed(corpus, seq_len=41, seed=0)
    far = one[3 * 10**12]  # three streams are an epoch
    assert sorted(
        far.tokens.tolist()
        + one[3 * 10**12 + 1].tokens.tolist()
        + one[3 * 10**12 + 2].tokens.tolist()
    ) == (sorted(corpus.tokens.tolist()))


def test_seeds_and_epochs_differ(make_corpus):
    corpus = make_corpus([[i] for i in range(50)])
    orders = {
        tuple(packed(corpus, seq_len=50, seed=s)[i].tokens) for s in (0, 1, -1) for i in (0, 1)
    }
    assert len(orders) == 6


@pytest.mark.parametrize("seq_len, streams", [(41, [0, 3, 6]), (50, [0, 3, 5]), (400, [0, 1, 1])])
def test_epochs_follow_each_other_without_a_gap(make_corpus, seq_len, streams):
    """An epoch has 123 tokens."""
    of = packed(make_corpus(random_documents(LENGTHS)), seq_len=seq_len, seed=0)
    assert [of.streams_in(epochs) for epochs in range(3)] == streams


def test_one_pass_ends_with_padding(make_corpus):
    documents = random_documents(LENGTHS)
    streams = packed(make_corpus(documents), seq_len=50, seed=0, repeat=False)
    assert len(streams) == 3
    tokens = np.concatenate(documents).tolist() + [0] * 27
    owners = np.repeat(np.arange(9), [*LENGTHS, 27]).tolist()
    for i in (0, 1):
        check_stream(streams[i], tokens, owners, i * 50, 50)
    last = streams[2]
    assert last.tokens.tolist() == tokens[100:] and last.cu_seqlens.tolist() == [0, 18, 23, 50]
    assert last.labels[22:].tolist() == [IGNORE] * 28
    assert last.position_ids[23:].tolist() == list(range(27))
    assert sum((streams[i].labels != IGNORE).sum() for i in range(3)) == sum(LENGTHS) - len(LENGTHS)
    assert len(list(streams)) == 3  # IndexError ends it
    padding = streams.padding()
    assert (
        padding.cu_seqlens.tolist() == [0, 50]
        and set(padding.labels) == {IGNORE}
        and not padding.tokens.any()
    )


def test_one_pass_that_fits(make_corpus):
    streams = packed(make_corpus(random_documents([10, 10])), seq_len=10, seed=0, repeat=False)
    assert len(streams) == 2
    assert [streams[i].cu_seqlens.tolist() for i in (0, 1)] == [[0, 10], [0, 10]]


def test_split_is_by_content(make_corpus):
    documents = random_documents([20] * 1000)
    documents += documents[:500]  # each of them twice
    corpus, shuffled = make_corpus(documents), make_corpus(documents[::-1])
    train, held_out = (documents_of(corpus, 0.1, split) for split in ("train", "validation"))
    assert sorted([*train, *held_out]) == list(range(1500))
    assert 50 < sum(held_out < 1000) < 150
    texts = {
        split: {documents[i].tobytes() for i in side}
        for split, side in (("t", train), ("v", held_out))
    }
    assert not texts["t"] & texts["v"]
    assert {
        documents[::-1][i].tobytes() for i in documents_of(shuffled, 0.1, "validation")
    } == texts["v"]
    assert set(held_out) < set(documents_of(corpus, 0.2, "validation"))
    assert len(documents_of(corpus, 0, "train")) == 1500


@pytest.mark.parametrize("holdout", [0.1, 0.25, 1e-12, 2.0**-53, 0.7])
def test_the_hashes_below_the_share_are_held_out(holdout):
    """By a hash's first 53 bits: the last that is below the share, and the first that is not."""
    first = int(_threshold(holdout)) >> 11
    assert (first - 1) / 2**53 < holdout <= first / 2**53


def test_split_empty_sides(make_corpus):
    corpus = make_corpus(random_documents([20] * 3))
    with refused(r"validation\.holdout = 0 leaves no document for validation"):
        documents_of(corpus, 0, "validation")
    with refused(r"validation\.holdout = 0\.999999 leaves no document for train"):
        documents_of(corpus, 0.999999, "train")


def test_documents_never_mix(make_corpus):
    """Every label is the next token of a document of the corpus: each (token, label) run is found in one."""
    # a document's tokens are its index
    documents = [np.full(length, i) for i, length in enumerate(LENGTHS)]
    streams = packed(make_corpus(documents), seq_len=32, seed=5)
    for i in range(20):
        stream = streams[i]
        for start, end in pairwise(stream.cu_seqlens):
            assert len(set(stream.tokens[start:end])) == 1
            valid = stream.labels[start:end][stream.labels[start:end] != IGNORE]
            assert set(valid) <= {stream.tokens[start]}


@pytest.mark.parametrize("count", [2, 3, 40])
@pytest.mark.parametrize("holdout, split", [(1e-12, "validation"), (1 - 1e-12, "train")])
def test_a_split_without_documents_says_which_share_leaves_some(make_corpus, count, holdout, split):
    corpus = make_corpus([np.array([n, 256]) for n in range(count)])
    with refused(rf"leaves no document for {split}, of {count}; .* it, to ") as error:
        documents_of(corpus, holdout, split)
    better = float(re.search(r"to (\S+) for example", str(error.value))[1])
    assert (
        len(documents_of(corpus, better, "train")) + len(documents_of(corpus, better, "validation"))
        == count
    )


def test_equal_documents_cannot_be_split(make_corpus):
    with refused(r"all are the same: give validation.dataset_path"):
        documents_of(make_corpus([np.array([1, 256])] * 3), 0.01, "validation")
