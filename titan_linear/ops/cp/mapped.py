"""Small messages between the GPUs of one node, written straight into each other's memory.

What a layer exchanges by KCP, and the tokens of a convolution's halo, are a few rows for a few ranks. NCCL takes longer
to launch such an exchange than the links to carry it. Here each rank of a group has memory that all others have mapped
(`torch.distributed._symmetric_memory`), and one kernel of each rank writes its rows where they belong, tells every rank
so by a number, and waits for the numbers of the others.

A rank's memory has two halves, which exchanges use in turn, and nobody has to say that a half is free. A rank writes
exchange n + 2 only after it has seen from all others that they wrote exchange n + 1, which they did, each on one
stream, after they had read what exchange n had brought to the same half.
"""

from __future__ import annotations

import os
import socket
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from titan_linear.ops.cp.exchange import between_nodes, group_named

MOST = 256 << 20  # bytes of a half: what needs more goes through NCCL
ROW = 16  # bytes, of which rows have whole numbers
TRIES = 1 << 22  # looks of a trial, some seconds


class Mapped:
    """The mapped memory of a group's ranks. It grows at an exchange that needs more; sizes are the same on all ranks,
    and each makes the same exchanges in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = ref(group), device
        self.rank, self.size, self.exchanges, self.stream = group.rank(), group.size(), 0, None
        self.counters = torch.zeros(2, dtype=torch.int32, device=device)
        self.numbers = _mapped((self.size,), torch.int32, group, device)
        own = list(self.numbers[1].buffer_ptrs)
        self.raise_at = self._on_device([address + 4 * self.rank for address in own])
        self.raised_at = self._on_device([own[self.rank] + 4 * p for p in range(self.size)])
        self.memory, self.nbytes = None, 0
        self.views: dict[tuple, list[torch.Tensor]] = {}  # of the memory, made once: by `_came`'s arguments

    def _on_device(self, addresses: list[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def takes(self, places: int, *sources: torch.Tensor) -> bool:
        """Whether `put` can send these: the same on all ranks."""
        rows = [x.nbytes // x.shape[0] for x in sources]
        return all(n % ROW == 0 for n in rows) and places * sum(rows) <= MOST

    def put(
        self, puts: torch.Tensor, count: int, *sources: torch.Tensor, places: int, tries: int = -1
    ) -> list[torch.Tensor]:
        """Every rank of the group calls it, with as many places and rows as long.

        Args:
            puts: [., 4] int32, on the device: row `puts[i, 1]` of source `puts[i, 0]` goes to rank `puts[i, 2]`,
                into row `puts[i, 3]` of what that one gets for this source; the first `count` of them.
            sources: one or two, [., ...], of which `takes` is true.

        Returns: for each source [places, ...], what came; rows that nobody wrote hold anything. To be read on the
            current stream, before the exchange after the next one.
        """
        from titan_linear.ops.triton import puts as kernels  # Triton is there on Linux only

        self._reserve(places * sum(x.nbytes // x.shape[0] for x in sources))
        self._follow(torch._C._cuda_getCurrentRawStream(self.device.index))
        half, self.exchanges = self.exchanges % 2, self.exchanges + 1
        kernels.put(
            puts, count, tuple(map(_rows, sources)), self.addresses[half], places, self.counters, self.raise_at,
            self.raised_at, tries,
        )  # fmt: skip
        return self._came(half, places, *((x.dtype, x.shape[1:]) for x in sources))

    def _came(self, half: int, places: int, *rows: tuple[torch.dtype, torch.Size]) -> list[torch.Tensor]:
        """Of a half, what came for sources with such rows."""
        key = half, places, *rows
        views = self.views.get(key)
        if views is None:
            views, own, begin = [], self.memory[0], half * self.nbytes
            for dtype, shape in rows:
                end = begin + places * shape.numel() * dtype.itemsize
                views.append(own[begin:end].view(dtype).view(places, *shape))
                begin = end
            self.views[key] = views
        return views

    def _follow(self, stream: int) -> None:
        """Exchanges are made one after the other, on whatever streams."""
        if self.stream not in (None, stream):
            torch.cuda.current_stream().wait_stream(torch.cuda.ExternalStream(self.stream))
        self.stream = stream

    def barrier(self) -> None:
        """When it returns, all that any rank has queued is done."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group(), device_ids=[self.device.index])

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self.nbytes:
            return
        self.nbytes = max(1 << 20, 1 << (nbytes - 1).bit_length())
        self.barrier()  # nobody writes any more to what this rank had
        self.memory = None
        self.views.clear()
        torch.cuda.empty_cache()  # what the allocator keeps for itself, the driver cannot give
        self.memory = _mapped((2 * self.nbytes,), torch.uint8, self.group(), self.device)
        starts = list(self.memory[1].buffer_ptrs)
        self.addresses = [self._on_device([p + half * self.nbytes for p in starts]) for half in range(2)]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, ...] itself or [n, .], with rows that the kernel can read in words of 4 bytes."""
    flat = x if x.is_contiguous() else x.flatten(1)
    readable = flat.stride(-1) == 1 and flat.stride(0) * flat.element_size() % 4 == flat.data_ptr() % 4 == 0
    return flat if readable else flat.clone(memory_format=torch.contiguous_format)


def _mapped(
    shape: tuple[int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, Any]:
    """Zeros that all ranks have mapped, and what knows their addresses. They are there as long as both are held."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(*shape, dtype=dtype, device=device).zero_()
    torch.cuda.synchronize(device)  # before another rank may write there
    return own, symmetric.rendezvous(own, group.group_name)


_CONNECTED: dict[str, Mapped] = {}  # by the group's name, which is all that operators know of it


def mapped_of(name: str) -> Mapped | None:
    """Of the group of this name, where `connect` has found that they reach each other."""
    mapped = _CONNECTED.get(name)
    return mapped if mapped is not None and mapped.group() is group_named(name) else None


def connect(group: dist.ProcessGroup, device: torch.device) -> str:
    """Let the ranks of a group write into each other's memory from now on, where they can; each calls this.

    Returns "", or why NCCL carries these messages too: the same on all ranks. What is promised is tried: some rows go
    to every rank, and are looked at.
    """
    disconnect(group)
    if reason := _agreed(_hindrance(group, device), group):
        return reason
    try:
        mapped = Mapped(group, device)
    except RuntimeError:  # of the driver, or of a container
        mapped = None
    if reason := _agreed("memory cannot be mapped" if mapped is None else "", group):
        return reason
    if reason := _agreed("" if _delivers(mapped) else "a trial did not bring what was sent", group):
        return reason
    _CONNECTED[group.group_name] = mapped
    return ""


def disconnect(group: dist.ProcessGroup) -> None:
    """Let NCCL carry these messages again; every rank calls it."""
    _CONNECTED.pop(group.group_name, None)


def _agreed(reason: str, group: dist.ProcessGroup) -> str:
    """The first of all ranks' reasons."""
    reasons: list[str] = [""] * group.size()
    dist.all_gather_object(reasons, reason, group)
    return next(filter(None, reasons), "")


def _hindrance(group: dist.ProcessGroup, device: torch.device) -> str:
    """What can be seen before anything is mapped."""
    if group.size() == 1:
        return "there is one rank"
    if device.type != "cuda":
        return "ranks are not on GPUs"
    where: list[tuple[str, int]] = [("", 0)] * group.size()
    dist.all_gather_object(where, (socket.gethostname(), device.index), group)
    if between_nodes(group) or len({host for host, _ in where}) > 1:
        return "ranks are of several nodes"
    # PyTorch refuses it, unless it is told (tests tell it); ranks that each see one GPU only look the same.
    if len(set(where)) < len(where) and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        return "several ranks have the same GPU, or each sees its own only"
    others = {index for _, index in where} - {device.index}
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "GPUs cannot read each other's memory"
    return ""


def _delivers(mapped: Mapped, rounds: int = 4) -> bool:
    """Whether rows of numbers, another from each rank to each, come. At first nobody waits for them in the kernel: it
    is compiled then, on one rank sooner than on another."""
    size, n = mapped.size, 4096
    ranks, numbers = (torch.arange(m, device=mapped.device, dtype=torch.int32) for m in (size, n * size))
    puts = torch.stack([ranks * 0, ranks * 0, ranks, ranks * 0 + mapped.rank], 1)
    for i in range(rounds):
        row = (numbers[:n] + n * (size * i + mapped.rank))[None]
        (came,) = mapped.put(puts, size, row, places=size, tries=TRIES if i else 0)
        if i == 0:
            mapped.barrier()
        if not torch.equal(came.flatten(), numbers + n * size * i):
            return False
    return True
