import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

import numpy as np
import pytest
import torch

from tests.data.conftest import packed, random_documents
from tests.refusals import refused
from titan_linear.data import IGNORE, StreamLoader, validation_batches
from titan_linear.data.streams import packing, split

G, T = 8, 16
SPLITS = [(1, 1), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]  # (dp, L)


@pytest.fixture
def streams(make_corpus):
    return packed(make_corpus(random_documents([5, 40, 1, 17, 33, 8])), seq_len=T, seed=0)


def loader(streams, dp, local, rank, **kwargs):
    return StreamLoader(
        streams, global_batch_size=G, local_batch_size=local, dp_rank=rank, dp_degree=dp, **kwargs
    )


def rank_by_rank(per_rank):
    """Global stream indices in the order micro-step, rank, position."""
    return list(chain.from_iterable(batch.streams for step in zip(*per_rank) for batch in step))


@pytest.mark.parametrize("dp, local", SPLITS)
def test_ranks_take_streams_in_order(streams, dp, local):
    micro_steps = G // (dp * local)
    per_rank = [
        list(islice(loader(streams, dp, local, rank), 3 * micro_steps)) for rank in range(dp)
    ]
    assert rank_by_rank(per_rank) == list(range(3 * G))


def test_batch_is_its_streams(streams):
    batch = next(iter(loader(streams, 2, 4, 1)))
    assert batch.streams == (4, 5, 6, 7) and batch.num_streams == 4
    for name in ("tokens", "labels", "position_ids"):
        value = getattr(batch, name)
        assert value.shape == (1, 4 * T) and value.dtype == torch.int64
        assert value[0].tolist() == list(
            chain.from_iterable(getattr(streams[i], name) for i in batch.streams)
        )
    edges = [
        edge + j * T for j, i in enumerate(batch.streams) for edge in streams[i].cu_seqlens.tolist()
    ]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == sorted(set(edges))
    assert {0, T, 2 * T, 3 * T, 4 * T} <= set(batch.cu_seqlens.tolist())


@pytest.mark.parametrize("dp, local", SPLITS)
def test_goes_on_under_another_split(streams, dp, local):
    per_rank = [
        list(islice(loader(streams, dp, local, r, next_stream=2 * G), G // (dp * local)))
        for r in range(dp)
    ]
    assert rank_by_rank(per_rank) == list(range(2 * G, 3 * G))
    assert next(iter(loader(streams, dp, local, 0, next_stream=5 * G))).streams[0] == 5 * G


def test_workers_change_nothing(streams):
    alone, helped = loader(streams, 2, 2, 1), loader(streams, 2, 2, 1, num_workers=2)
    state = torch.get_rng_state()
    for batch, other in islice(zip(alone, helped), 7):
        assert batch.streams == other.streams
        assert torch.equal(batch.tokens, other.tokens) and torch.equal(
            batch.cu_seqlens, other.cu_seqlens
        )
    later = loader(streams, 2, 2, 1, num_workers=2, next_stream=10 * G)
    assert next(iter(later)).streams == (10 * G + 2, 10 * G + 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_it_resumes_where_finished_steps_end(streams, num_workers):
    """Not where it has read to; under another split."""
    first = loader(streams, 2, 2, 1, num_workers=num_workers)
    for _ in islice(first, 5):  # two steps, and a batch ahead
        pass
    first.advance()
    state = first.state_dict()
    assert {name: int(x) for name, x in state.items()} == {"next_stream": G}
    second = loader(streams, 4, 1, 3, num_workers=2)
    second.load_state_dict(state)
    assert [batch.streams for batch in islice(second, 3)] == [(G + 3,), (G + 7,), (2 * G + 3,)]
    with refused(r"training\.global_batch_size = 8 does not divide the next stream 12"):
        second.load_state_dict({"next_stream": torch.tensor(12)})


class Failing:
    """Streams of which stream 20 cannot be read."""

    def __init__(self, streams):
        self.streams = streams

    def __getitem__(self, i):
        if i == 20:
            raise ValueError("line 3 is not JSON; repair it")
        return self.streams[i]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_arrives_as_it_is(streams, num_workers):
    batches = iter(loader(Failing(streams), 2, 2, 0, num_workers=num_workers))
    assert [next(batches).streams[0] for _ in range(5)] == [0, 4, 8, 12, 16]
    with refused(r"^line 3 is not JSON; repair it$"):
        next(batches)


def test_threads_may_share_streams(make_corpus, monkeypatch):
    """One uses a pool while others drop it."""
    monkeypatch.setattr(split, "BUNDLE", 2)
    monkeypatch.setattr(packing, "POOL", 2)
    monkeypatch.setattr(packing, "POOLS_KEPT", 1)
    line = packed(make_corpus(random_documents([9] * 80)), seq_len=12, seed=1).line

    def documents(start):
        return [
            line.around(0, 9 * (n % 80), 9 * (n % 80) + 1)[0].tolist()
            for n in range(start, start + 2000)
        ]

    expected = documents(0)[:80] * 27
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for start, found in enumerate(pool.map(documents, range(8))):
                assert found == expected[start : start + 2000]
    finally:
        sys.setswitchinterval(before)


def test_sizes_that_do_not_divide_are_refused(streams):
    for dp, local in ((3, 1), (2, 3), (16, 1)):
        with pytest.raises(AssertionError):
            loader(streams, dp, local, 0)
    with refused(r"training\.global_batch_size = 8 does not divide the next stream 12"):
        loader(streams, 1, 1, 0, next_stream=12)


def validated(streams, dp, local, limit=-1):
    """Batches of each rank."""
    per_rank = [
        list(
            validation_batches(
                streams, local_batch_size=local, dp_rank=rank, dp_degree=dp, limit=limit
            )
        )
        for rank in range(dp)
    ]
    assert len({len(batches) for batches in per_rank}) == 1  # no rank waits for another
    return per_rank


LENGTHS = [5, 40, 1, 17, 33, 8]  # 104 tokens: 7 streams


@pytest.mark.parametrize("dp, local", [(1, 1), (1, 4), (2, 2), (4, 3), (8, 1)])
def test_a_validation_pass_reads_each_document_once(make_corpus, dp, local):
    corpus = make_corpus(random_documents(LENGTHS))
    per_rank = validated(packed(corpus, seq_len=T, seed=0, repeat=False), dp, local)
    indices = rank_by_rank(per_rank)
    assert indices == list(range(len(indices))) and 7 <= len(indices) < 7 + dp * local
    flat = [batch for step in zip(*per_rank) for batch in step]
    assert torch.cat([batch.tokens[0] for batch in flat])[:104].tolist() == corpus.tokens.tolist()
    labels = torch.cat([batch.labels[0] for batch in flat])
    assert (labels != IGNORE).sum() == sum(LENGTHS) - len(LENGTHS)
    assert (labels[104:] == IGNORE).all()
    assert all(
        batch.cu_seqlens[-1] == local * T and batch.tokens.shape == (1, local * T) for batch in flat
    )


@pytest.mark.parametrize("limit", [1, 4, 6, 100])
@pytest.mark.parametrize("dp, local", [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_a_bounded_validation_has_the_same_streams_on_any_ranks(make_corpus, dp, local, limit):
    streams = packed(make_corpus(random_documents(LENGTHS)), seq_len=T, seed=0, repeat=False)
    per_rank = validated(streams, dp, local, limit)
    labels = torch.cat([batch.labels[0] for step in zip(*per_rank) for batch in step])
    expected = torch.from_numpy(np.concatenate([streams[i].labels for i in range(min(limit, 7))]))
    assert (
        torch.equal(labels[: len(expected)], expected) and (labels[len(expected) :] == IGNORE).all()
    )
