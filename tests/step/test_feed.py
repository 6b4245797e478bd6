"""Steps of micro-batches: counted over all ranks, and fetched ahead."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from titan_linear.data import IGNORE, Batch
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.config import Documents
from titan_linear.step.feed import Feed, FeedStats

T, MICRO_STEPS = 8, 2
CPU = torch.device("cpu")


def batches(data_rank, log):
    """Batch n has n + data_rank labels (modulo T) that are not ignored."""
    for n in range(100):
        log.append(f"fetch {n}")
        labels = torch.full((1, T), IGNORE)
        labels[0, : (n + data_rank) % T] = 1
        columns = {"weights": (labels != IGNORE).float()}
        yield Batch(
            labels,
            labels,
            torch.tensor([0, T], dtype=torch.int32),
            labels,
            1,
            (10 * data_rank + n,),
            columns,
        )


def two_steps(rank, world_size, cp):
    """What happened in order, each step's count and streams, and what the feed says of both."""
    log = []

    def cut(batch):
        log.append(f"cut {batch.streams[0] % 10}")
        return LocalBatch(
            batch.tokens,
            batch.labels,
            {},
            batch.streams,
            plan=SimpleNamespace(pairs=1.0 + 10 * rank),
        )

    feed = Feed(
        batches(rank // cp, log),
        cut,
        micro_steps=MICRO_STEPS,
        copies=cp,
        host=dist.group.WORLD,
        device=CPU,
    )
    steps, fed = [], FeedStats()
    for _ in range(2):
        (total, valid), micro_batches = feed.next_step()
        assert total == T * MICRO_STEPS * world_size // cp
        streams = []
        for micro_batch in micro_batches:
            streams.append(micro_batch.streams)
            log.append("compute")
        feed.prefetch()
        feed.prefetch()  # nothing more
        feed.settle()
        assert feed._ahead[-1].is_completed()
        log.append("update")
        steps.append((valid, streams))
        fed += feed.take()
    assert feed.take().most_pairs == 0
    return log, steps, fed


def test_steps_are_fetched_ahead_and_counted_over_all_ranks(worlds):
    first, later = (
        "fetch 0, fetch 1, cut 0",
        "compute, cut {}, compute, fetch {}, fetch {}, cut {}, update",
    )
    order = ", ".join([first, later.format(1, 2, 3, 2), later.format(3, 4, 5, 4)])
    for cp, counts in ((1, [0 + 1 + 1 + 2, 2 + 3 + 3 + 4]), (2, [0 + 1, 2 + 3])):
        for rank, (log, steps, fed) in enumerate(worlds(2).run(two_steps, cp)):
            base = 10 * (rank // cp)
            assert ", ".join(log) == order
            assert [valid for valid, _ in steps] == counts
            documents = 2 * MICRO_STEPS * 2 // cp  # each of T tokens
            assert fed.steps == 2 and fed.valid == sum(counts)
            assert fed.most_pairs == 2 * MICRO_STEPS * 11  # rank 1's
            assert fed.documents == Documents(
                *(documents * n for n in (T, T * (T + 1) // 2, T * T))
            )
            assert 0 < fed.seconds < fed.waited  # on a CPU all of it, and the wait for the count
            assert [streams for _, streams in steps] == [
                [(base,), (base + 1,)],
                [(base + 2,), (base + 3,)],
            ]
