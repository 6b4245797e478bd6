"""What rank 0 does for all, and who waits for how long."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.worlds import Worlds
from titan_linear.distributed.groups import host_group, on_rank_0, set_timeout, without_timeout

SHORT, SLOW = timedelta(seconds=3), 5.0  # seconds


def alone(rank: int, world_size: int) -> tuple[int, str, object]:
    """What `on_rank_0` gives, raises for a mistake, and for an exit."""

    def refuse() -> None:
        raise ValueError("a mistake")

    def end() -> None:
        raise SystemExit(7)

    raised = []
    host = host_group()
    for work in (refuse, end):
        try:
            on_rank_0(work, host)
        except (ValueError, SystemExit) as error:
            raised.append(repr(error))
    return on_rank_0(lambda: 10 + rank, host), *raised


def test_what_rank_0_does_holds_for_all(worlds: Worlds) -> None:
    assert worlds(2).run(alone) == [
        (10, "ValueError('a mistake')", "SystemExit(7)"),
        (10, "SystemExit(2)", "SystemExit(7)"),
    ]


def waits(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a rank waits for one that is slow: inside `without_timeout`, and after it."""
    host, group = host_group(), dist.new_group(timeout=SHORT)
    set_timeout([group], SHORT)

    def meet() -> bool:
        time.sleep(SLOW if rank == 0 else 0)
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError:
            return False
        return True

    with without_timeout([group], host, SHORT):
        inside = meet()
        time.sleep(SLOW if rank == 0 else 0)  # alone at its disk
    dist.all_reduce(torch.zeros(1), group=group)  # they left together
    return inside, meet()


def test_ranks_wait_for_a_slow_one_inside_alone(worlds: Worlds) -> None:
    assert worlds(2).run(waits)[1] == (True, False)
