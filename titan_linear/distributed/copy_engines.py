"""FSDP's all-gather and reduce-scatter between the GPUs of one node, by their copy engines.

NCCL's kernels hold up to a fifth of the multiprocessors while layers compute. A matrix product that fills all of them
then runs in two waves instead of one, and so does a scan: the computation that hides communication pays for it. Here a
rank's copy engines move the bytes between memory that all ranks of the group have mapped
(`torch.distributed._symmetric_memory`). Ranks wait for each other through numbers in that memory, which CUDA streams
raise and wait for (cuStreamWriteValue32, cuStreamWaitValue32). Multiprocessors take part only in the sum at the end of
a reduce-scatter.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.distributed.fsdp import FSDPModule

STAGE = 256 << 20  # bytes of a rank's mapped memory for each collective: larger messages go in parts
READY, FREE = range(2)
GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ, for which the 32 bits may wrap around


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Stage:
    """Memory of each rank of a group that all others have mapped, with two numbers for each pair of ranks.

    `memory[p]` is rank p's, [bytes]. A rank's numbers say, for each other rank, up to which exchange what that rank
    wrote is READY, and up to which it is done, so that memory is FREE again.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int):
        self.rank, self.size, self.exchange = group.rank(), group.size(), 0
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]  # no two begin with the same
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        numbers = symmetric.empty(2 * self.size, dtype=torch.int32, device=device).zero_()
        torch.cuda.synchronize(device)  # the zeros are written before another rank may raise one
        handles = [symmetric.rendezvous(x, group.group_name) for x in (own, numbers)]
        self.memory = [handles[0].get_buffer(p, (nbytes,), torch.uint8) for p in range(self.size)]
        self.addresses = list(handles[1].buffer_ptrs)
        self.mapped = own, numbers, handles  # kept alive as long as another rank may write there
        dist.barrier(group)

    def raise_to(self, kind: int, exchange: int) -> None:
        """Raise this rank's number on all other ranks, once what was queued on the current CUDA stream is done."""
        for p in self.others:
            self._queue("cuStreamWriteValue32_v2", self.addresses[p], kind, self.rank, exchange, 0)

    def wait_for(self, kind: int, exchange: int, *ranks: int) -> None:
        """Make the current CUDA stream wait until these ranks have raised their numbers to `exchange`."""
        for p in ranks:
            self._queue("cuStreamWaitValue32_v2", self.addresses[self.rank], kind, p, exchange, GREATER_OR_EQUAL)

    def _queue(self, call: str, numbers: int, kind: int, rank: int, exchange: int, flags: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(numbers + 4 * (kind * self.size + rank))
        if error := getattr(_driver(), call)(stream, address, ctypes.c_uint32(exchange), flags):
            raise RuntimeError(f"{call} failed: error {error} of the CUDA driver")


class Copies:
    """A collective as FSDP2 takes it. All calls are on one CUDA stream, so that one stage serves all layers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int = STAGE):
        self.name, self.nbytes = group.group_name, nbytes
        self.stage = Stage(group, device, nbytes)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def parts(self, rows: torch.Tensor, most: int) -> Iterator[tuple[int, torch.Tensor]]:
        """rows [size, n] → parts [size, at most `most`], each with the number of its exchange."""
        for part in rows.split(most, 1):
            self.stage.exchange += 1
            yield self.stage.exchange, part


class CopiedGather(Copies):
    """Every rank copies its shard into its own stage, and the others copy it from there."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """input [n] of each rank → output [size · n], in which the input already lies, on the current CUDA stream."""
        stage, out = self.stage, output_tensor.view(self.stage.size, -1)
        assert group.group_name == self.name and out[stage.rank].data_ptr() == input_tensor.data_ptr()
        for exchange, part in self.parts(out, self.nbytes // out.element_size()):
            staged = [x[: part[0].nbytes].view(part.dtype) for x in stage.memory]
            stage.wait_for(FREE, exchange - 1, *stage.others)
            staged[stage.rank].copy_(part[stage.rank])
            stage.raise_to(READY, exchange)
            for p in stage.others:
                stage.wait_for(READY, exchange, p)
                part[p].copy_(staged[p])
            stage.raise_to(FREE, exchange)


class CopiedReduceScatter(Copies):
    """Every rank copies what it has for each rank into that rank's stage. Each then sums its own in rank order."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """input [size · n] of each rank → output [n], this rank's part of their sum, on the current CUDA stream."""
        stage, given = self.stage, input_tensor.view(self.stage.size, -1)
        assert group.group_name == self.name and op == dist.ReduceOp.SUM
        most, done = self.nbytes // given.element_size() // stage.size, 0
        for exchange, part in self.parts(given, most):
            staged = [x[: part.nbytes].view(part.dtype).view(part.shape) for x in stage.memory]
            staged[stage.rank][stage.rank].copy_(part[stage.rank])
            for p in stage.others:
                stage.wait_for(FREE, exchange - 1, p)
                staged[p][stage.rank].copy_(part[p])
            stage.raise_to(READY, exchange)
            stage.wait_for(READY, exchange, *stage.others)
            torch.sum(staged[stage.rank], 0, out=output_tensor[done : done + part.shape[1]])
            stage.raise_to(FREE, exchange)
            done += part.shape[1]


def copy_shards(units: Iterable[FSDPModule], group: dist.ProcessGroup, device: torch.device) -> None:
    """Have these units gather and reduce-scatter by copy engines in this group. Its ranks are on one node, and each
    calls this.

    Raises:
        ValueError: the GPUs cannot access each other's memory.
    """
    if group.size() == 1:
        return
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    others = {rank % size for rank in dist.get_process_group_ranks(group)} - {device.index}
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        raise ValueError(
            "parallelism.fsdp_transport = 'copy_engines': the GPUs cannot read each other's memory; use 'nccl'"
        )
    gather, reduce_scatter = CopiedGather(group, device), CopiedReduceScatter(group, device)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce_scatter)
