"""What rank 0 does for all, and who waits for how long."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_linear.distributed.groups import host_group, on_rank_0, without_timeout

SHORT, SLOW = timedelta(seconds=1), 2.0  # seconds


def alone(rank, world_size):
    """What `on_rank_0` gives, raises for a mistake, and for an exit."""

    def refuse():
        raise ValueError("a mistake")

    def end():
        raise SystemExit(7)

    raised = []
    host = host_group()
    for work in (refuse, end):
        try:
            on_rank_0(work, host)
        except (ValueError, SystemExit) as error:
            raised.append(repr(error))
    return on_rank_0(lambda: 10 + rank, host), *raised


def test_what_rank_0_does_holds_for_all(worlds):
    assert worlds(2).run(alone) == [
        (10, "ValueError('a mistake')", "SystemExit(7)"),
        (10, "SystemExit(2)", "SystemExit(7)"),
    ]


def waits(rank, world_size):
    """A slow rank 0, inside `without_timeout` and after it: whether it had done its work when another one left, and
    whether that one then waits."""
    host, group = host_group(), dist.new_group(timeout=SHORT)
    store = dist.PrefixStore("waits", dist.distributed_c10d._get_default_store())
    with without_timeout([group], host, SHORT):
        if rank == 0:
            time.sleep(SLOW)
        dist.all_reduce(torch.zeros(1), group=group)
        if rank == 0:
            time.sleep(SLOW)  # alone at its disk
            store.set("done", "")
    together = store.check(["done"])
    if rank == 0:
        store.wait(["tired"])
        return together, True
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError:
        store.set("tired", "")
        return together, False
    return together, True


def test_ranks_wait_for_a_slow_one_inside_alone(worlds):
    assert worlds(2).run(waits)[1] == (True, False)
