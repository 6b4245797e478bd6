"""Process groups: how long a rank waits in them for the others."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def process_group(timeout: timedelta) -> Iterator[None]:
    """The default group, which torchrun's environment describes, and an orderly end of all groups."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    try:
        yield
    finally:
        # Groups live as long as a mesh refers to them, and threads of a group that outlive the interpreter abort it.
        gc.collect()
        dist.destroy_process_group()


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """For collectives that begin from here on."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
