"""Process groups: how long ranks wait in them for each other, and what rank 0 does for all."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_linear.distributed.ending import Ending, explain
from titan_linear.distributed.process import STORE

# The time-out while one rank works alone: uses a slow disk, tokenises. A rank that dies still ends the others at once.
NO_TIMEOUT = timedelta(days=1)
T = TypeVar("T")


@contextmanager
def process_group(timeout: timedelta) -> Iterator[Ending]:
    """The default group, which the launcher's or torchrun's environment describes, and an orderly end of all groups.

    An error inside ends this process (`Ending.leave`): nothing that is around this context sees it.
    """
    # collectives that the flight recorder keeps (hangs.py)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if port := os.environ.get(STORE):
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    else:
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    # One store may serve all starts of the workers: the prefix hides what an earlier start wrote.
    store = dist.PrefixStore(f"workers-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    ending = Ending(store)
    try:
        yield ending
    except BaseException as error:
        ending.leave(error)
    gc.collect()  # meshes in cycles: a group lives as long as one refers to it
    dist.destroy_process_group()


def host_group() -> dist.ProcessGroup:
    """A new gloo group of all ranks, on the hosts, whose collectives wait as long as it takes."""
    return dist.new_group(backend="gloo", timeout=NO_TIMEOUT)


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Set the time-out of collectives that begin from here on."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def without_timeout(
    groups: list[dist.ProcessGroup], host: dist.ProcessGroup, timeout: timedelta
) -> Iterator[None]:
    """Inside, collectives of `groups` wait as long as it takes. All ranks leave together; then their time-out is
    `timeout`. An error inside ends this rank, and the others through the store (hangs.py), although they wait for it.

    host: a `host_group`.
    """
    set_timeout(groups, NO_TIMEOUT)
    yield
    dist.barrier(host)
    set_timeout(groups, timeout)


def of_all_ranks(own: T, host: dist.ProcessGroup) -> list[T]:
    """Each rank's `own`, in rank order."""
    ranks = [own] * dist.get_world_size(host)
    dist.all_gather_object(ranks, own, group=host)
    return ranks


def gathered(own: T, host: dist.ProcessGroup) -> list[T]:
    """On rank 0 each rank's `own`, in rank order; elsewhere nothing."""
    ranks = [own] * dist.get_world_size(host) if dist.get_rank() == 0 else None
    dist.gather_object(own, ranks, group=host)
    return ranks or []


def on_rank_0(work: Callable[[], T], host: dist.ProcessGroup) -> T:
    """The result of `work`, which rank 0 alone does and sends to the others, however long it takes.

    Raises:
        Any error of `work`, on rank 0, which has to report it; SystemExit with its exit code on the others.
    """
    outcome: list[Any] = [None, None]  # result, exit code
    raised = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except BaseException as error:
            raised = error
            outcome[1], _ = explain(error)
    dist.broadcast_object_list(outcome, 0, group=host)
    if raised is not None:
        raise raised
    if outcome[1] is not None:
        raise SystemExit(outcome[1])
    return outcome[0]
