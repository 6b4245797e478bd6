"""Worlds of processes that tests share: started once per size, reused by every test of that size.

def check(rank, world_size, argument): ...          # module-level, so that a child can import it
results = worlds(4).run(check, argument)            # one result per rank; a failure raises here

worlds(4, "nccl") has a GPU for each rank, or with `pytest -m cuda --share-gpus` ranks that share those that there are.
Start NVIDIA's MPS first (`nvidia-cuda-mps-control -d`): without it ranks take turns, and an all-reduce takes 27 ms, not
0.2.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.interpreter import quicken
from tests.state import isolated
from tests.thrift import be_thrifty
from titan_linear.distributed.groups import set_timeout

# What most processes of tests import, imported once, in the server that they are forked from; the compiler's too.
COMPILER = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._functorch.partitioners",
    "networkx",
    "sympy.tensor",
]
mp.set_forkserver_preload(
    ["titan_linear.train", "tests.hf_workers", "tests.storage.test_checkpoint", *COMPILER]
)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank, world_size, backend, port, tasks, results):
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays, and need not be searched
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    if backend == "nccl":
        # what deterministic algorithms want, before cuBLAS starts
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        take_gpu(rank, world_size)
        backend = "cpu:gloo,cuda:nccl"  # as in a run
    else:
        quicken()
        be_thrifty()
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    while (task := tasks.get()) is not None:
        fn, args, caches = task
        os.environ["XDG_CACHE_HOME"] = caches
        try:
            with isolated():
                result = fn(rank, world_size, *args)
            results.put((rank, result, None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
        _destroy_own_groups()
        # PyTorch's: a run has one of its own
        set_timeout([dist.group.WORLD], timedelta(minutes=30))
    dist.destroy_process_group()


def take_gpu(rank, world_size):
    """One each, or where there are fewer, in turn (--share-gpus)."""
    devices = torch.cuda.device_count()
    if world_size > devices:
        # NCCL takes two ranks on one GPU for a mistake, unless they are of two hosts; it then sends through sockets.
        os.environ |= {"NCCL_HOSTID": str(rank), "LOCAL_RANK": str(rank % devices)}
    torch.cuda.set_device(rank % devices)


def _destroy_own_groups() -> None:
    """The groups that a test made. The threads of each wake up a hundred times a second for as long as it lives."""
    own = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if not own:
        return
    gc.collect()  # what holds them, in cycles
    for group in own:
        dist.destroy_process_group(group)
    # DTensor takes a mesh that equals one before for that one, whose groups are gone.
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()


class World:
    """`world_size` processes with a group of `backend`, waiting for functions to run."""

    def __init__(self, world_size: int, backend: str):
        context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
        self.world_size, self.broken = world_size, False
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(world_size)]
        port = free_port()
        self.processes = [
            context.Process(
                target=_serve,
                args=(r, world_size, backend, port, self.tasks[r], self.results),
                daemon=True,
            )
            for r in range(world_size)
        ]
        # On the CPU, on a machine with GPUs too: the server has imported what decides by these.
        with patch.dict(
            os.environ,
            {} if backend == "nccl" else {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
        ):
            for process in self.processes:
                process.start()

    def run(self, fn: Callable, *args: Any) -> list[Any]:
        """fn(rank, world_size, *args) on every rank, with this process's token caches; the results in rank order."""
        for tasks in self.tasks:
            tasks.put((fn, args, os.environ["XDG_CACHE_HOME"]))
        outcomes: dict[int, Any] = {}
        try:
            for _ in range(self.world_size):
                rank, value, error = self._next_result()
                if error is not None:
                    raise AssertionError(f"rank {rank} of {self.world_size} failed:\n{error}")
                outcomes[rank] = value
        except BaseException:
            self.close()  # the other ranks may hang in a collective
            raise
        return [outcomes[r] for r in range(self.world_size)]

    def _next_result(self) -> tuple[int, Any, str | None]:
        """However long it takes, while all ranks live."""
        while True:
            with suppress(queue.Empty):
                return self.results.get(timeout=5)
            assert all(process.is_alive() for process in self.processes), "a rank has died"

    def close(self) -> None:
        self.broken = True
        for process in self.processes:
            process.kill()


class Worlds:
    """One of each size and backend, as they are asked for."""

    def __init__(self) -> None:
        self.alive: dict[tuple[int, str], World] = {}
        self.used: set[tuple[int, str]] = set()

    def __call__(self, world_size: int, backend: str = "gloo") -> World:
        key = world_size, backend
        if key not in self.alive or self.alive[key].broken:
            self.alive[key] = World(*key)
        self.used.add(key)
        return self.alive[key]

    def close(self, keys: set[tuple[int, str]]) -> None:
        for key in keys:
            self.alive.pop(key).close()
