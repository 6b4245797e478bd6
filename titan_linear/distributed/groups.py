"""Process groups: their time-outs, and work that rank 0 does for all ranks."""

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

# Time-out while one rank works alone (a slow disk, tokenization). A rank that dies still
# ends the others at once.
NO_TIMEOUT = timedelta(days=1)
T = TypeVar("T")


@contextmanager
def process_group(timeout: timedelta) -> Iterator[Ending]:
    """Create the default group described by the environment, and end all groups in order.

    The launcher or torchrun sets the environment. An error inside ends this process
    (`Ending.leave`): nothing outside this context sees it.
    """
    # Number of collectives that the flight recorder keeps (hangs.py).
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if port := os.environ.get(STORE):
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    else:
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    # One store may serve all starts of the workers. The prefix hides what an earlier start
    # wrote.
    store = dist.PrefixStore(f"workers-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    ending = Ending(store)
    try:
        yield ending
    except BaseException as error:
        ending.leave(error)
    # Meshes form cycles, and a group lives as long as one refers to it.
    gc.collect()
    dist.destroy_process_group()


def host_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks, on the hosts, that waits as long as needed."""
    return dist.new_group(backend="gloo", timeout=NO_TIMEOUT)


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Set the time-out of collectives that begin from here on."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def without_timeout(
    groups: list[dist.ProcessGroup], host: dist.ProcessGroup, timeout: timedelta
) -> Iterator[None]:
    """Let collectives of `groups` wait as long as it takes inside this context.

    All ranks leave together; then the time-out is `timeout`. An error inside ends this
    rank, and the others through the store (hangs.py), although they wait for this rank.

    Args:
        host: a `host_group`.
    """
    set_timeout(groups, NO_TIMEOUT)
    yield
    dist.barrier(host)
    set_timeout(groups, timeout)


def of_all_ranks(own: T, host: dist.ProcessGroup) -> list[T]:
    """Return each rank's `own`, in rank order."""
    ranks = [own] * dist.get_world_size(host)
    dist.all_gather_object(ranks, own, group=host)
    return ranks


def gathered(own: T, host: dist.ProcessGroup) -> list[T]:
    """Return each rank's `own` on rank 0, in rank order; elsewhere an empty list."""
    ranks = [own] * dist.get_world_size(host) if dist.get_rank() == 0 else None
    dist.gather_object(own, ranks, group=host)
    return ranks or []


def on_rank_0(work: Callable[[], T], host: dist.ProcessGroup) -> T:
    """Return the result of `work`, which rank 0 alone does and sends to the others.

    The others wait as long as it takes.

    Raises:
        Any error of `work`, on rank 0, which has to report it; SystemExit with its exit
            code on the others.
    """
    # The result and the exit code.
    outcome: list[Any] = [None, None]
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
