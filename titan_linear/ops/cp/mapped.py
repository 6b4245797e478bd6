"""Small messages between the GPUs of one node, written straight into each other's memory.

KCP's states and the tokens of a convolution's halo are a few rows for a few ranks. NCCL takes longer to launch such an
exchange than the links take to carry it. Here each rank of a group has memory that all others have mapped
(`torch.distributed._symmetric_memory`), and one kernel on each rank writes its rows where they belong, tells every rank
so by writing a number there, and waits for the numbers of the others.

A rank's memory has two halves, which exchanges use in turn, and no rank has to announce that a half is free: a rank
writes exchange n + 2 only after it has seen that all others wrote exchange n + 1, and each of them, in the order of its
one stream, did that after it had read what exchange n brought to the same half.
"""

from __future__ import annotations

import os
import socket
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from titan_linear.ops.cp.exchange import between_nodes, group_named

MOST = 256 << 20  # bytes of a half: exchanges that need more go through NCCL
ROW = 16  # bytes: the size of a row must be a multiple of it
TRIES = 1 << 22  # how often a trial looks for numbers: some seconds


class Mapped:
    """The mapped memory of a group's ranks. It grows when an exchange needs more. Its size is the same on all ranks,
    which all make the same exchanges in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = ref(group), device
        self.rank, self.size, self.exchanges, self.stream = group.rank(), group.size(), 0, None
        self.counters = torch.zeros(2, dtype=torch.int32, device=device)
        self.numbers = _mapped((self.size,), torch.int32, group, device)
        own = list(self.numbers[1].buffer_ptrs)
        self.raise_at = self._on_device([address + 4 * self.rank for address in own])
        self.raised_at = self._on_device([own[self.rank] + 4 * p for p in range(self.size)])
        self.memory, self.nbytes = None, 0
        self.views: dict[tuple, list[torch.Tensor]] = {}  # of the memory, each made once; by `_came`'s arguments

    def _on_device(self, addresses: list[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def takes(self, places: int, *sources: torch.Tensor) -> bool:
        """Whether `put` can send these; the same on all ranks."""
        rows = [x.nbytes // x.shape[0] for x in sources]
        return all(n % ROW == 0 for n in rows) and places * sum(rows) <= MOST

    def put(
        self, puts: torch.Tensor, count: int, *sources: torch.Tensor, places: int, tries: int = -1
    ) -> list[torch.Tensor]:
        """Exchange rows. Every rank of the group must call it, with the same number of places and the same row sizes.

        Args:
            puts: [., 4] int32, on the device: row `puts[i, 1]` of source `puts[i, 0]` goes to rank `puts[i, 2]`,
                into row `puts[i, 3]` of what that rank gets for this source, for i < `count`.
            sources: one or two, [., ...], for which `takes` is true.

        Returns: for each source [places, ...], the rows that arrived; rows that no rank wrote are undefined. Read them
            on the current stream, before the exchange after the next one.
        """
        from titan_linear.ops.triton import puts as kernels  # Triton is available on Linux only

        self._reserve(places * sum(x.nbytes // x.shape[0] for x in sources))
        self._follow(torch._C._cuda_getCurrentRawStream(self.device.index))
        half, self.exchanges = self.exchanges % 2, self.exchanges + 1
        kernels.put(
            puts, count, tuple(map(_rows, sources)), self.addresses[half], places, self.counters, self.raise_at,
            self.raised_at, tries,
        )  # fmt: skip
        return self._came(half, places, *((x.dtype, x.shape[1:]) for x in sources))

    def _came(self, half: int, places: int, *rows: tuple[torch.dtype, torch.Size]) -> list[torch.Tensor]:
        """What arrived in a half, as views [places, ...], for sources with rows of these dtypes and shapes."""
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
        """Keep exchanges in order, whatever streams they are made on."""
        if self.stream not in (None, stream):
            torch.cuda.current_stream().wait_stream(torch.cuda.ExternalStream(self.stream))
        self.stream = stream

    def barrier(self) -> None:
        """Wait until everything that any rank has queued is done."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group(), device_ids=[self.device.index])

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self.nbytes:
            return
        self.nbytes = max(1 << 20, 1 << (nbytes - 1).bit_length())
        self.barrier()  # no rank still writes to the old memory
        self.memory = None
        self.views.clear()
        torch.cuda.empty_cache()  # the driver cannot give what the allocator keeps for itself
        self.memory = _mapped((2 * self.nbytes,), torch.uint8, self.group(), self.device)
        starts = list(self.memory[1].buffer_ptrs)
        self.addresses = [self._on_device([p + half * self.nbytes for p in starts]) for half in range(2)]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, ...], or [n, .] if it must be flattened, with rows that the kernel can read as words of 4 bytes."""
    flat = x if x.is_contiguous() else x.flatten(1)
    readable = flat.stride(-1) == 1 and flat.stride(0) * flat.element_size() % 4 == flat.data_ptr() % 4 == 0
    return flat if readable else flat.clone(memory_format=torch.contiguous_format)


def _mapped(
    shape: tuple[int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, Any]:
    """Zeros that all ranks have mapped, and the handle with their addresses. They live as long as both are held."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(*shape, dtype=dtype, device=device).zero_()
    torch.cuda.synchronize(device)  # before another rank may write there
    return own, symmetric.rendezvous(own, group.group_name)


_CONNECTED: dict[str, Mapped] = {}  # by the group's name, which is all that operators know of it


def mapped_of(name: str) -> Mapped | None:
    """The mapped memory of the group of this name, if `connect` has found that its ranks reach each other."""
    mapped = _CONNECTED.get(name)
    return mapped if mapped is not None and mapped.group() is group_named(name) else None


def connect(group: dist.ProcessGroup, device: torch.device) -> str:
    """Let the ranks of a group write into each other's memory from now on, if they can; every rank must call it.

    Returns "", or the reason why NCCL still carries these messages; the same on all ranks. A trial tests whether it
    works: some rows go to every rank and are checked.
    """
    disconnect(group)
    if reason := _agreed(_hindrance(group, device), group):
        return reason
    try:
        mapped = Mapped(group, device)
    except RuntimeError:  # from the driver, or because of a container
        mapped = None
    if reason := _agreed("memory cannot be mapped" if mapped is None else "", group):
        return reason
    if reason := _agreed("" if _delivers(mapped) else "a trial did not bring what was sent", group):
        return reason
    _CONNECTED[group.group_name] = mapped
    return ""


def disconnect(group: dist.ProcessGroup) -> None:
    """Let NCCL carry these messages again; every rank must call it."""
    _CONNECTED.pop(group.group_name, None)


def _agreed(reason: str, group: dist.ProcessGroup) -> str:
    """The first reason of any rank, in rank order; "" if none has one."""
    reasons: list[str] = [""] * group.size()
    dist.all_gather_object(reasons, reason, group)
    return next(filter(None, reasons), "")


def _hindrance(group: dist.ProcessGroup, device: torch.device) -> str:
    """What rules mapped memory out and can be seen before anything is mapped; "" if nothing does."""
    if group.size() == 1:
        return "there is one rank"
    if device.type != "cuda":
        return "ranks are not on GPUs"
    where: list[tuple[str, int]] = [("", 0)] * group.size()
    dist.all_gather_object(where, (socket.gethostname(), device.index), group)
    if between_nodes(group) or len({host for host, _ in where}) > 1:
        return "ranks are of several nodes"
    # PyTorch refuses a shared GPU unless told otherwise (tests do); ranks that each see only one GPU look the same.
    if len(set(where)) < len(where) and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        return "several ranks have the same GPU, or each sees its own only"
    others = {index for _, index in where} - {device.index}
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "GPUs cannot read each other's memory"
    return ""


def _delivers(mapped: Mapped, rounds: int = 4) -> bool:
    """Whether rows of numbers, different from each rank, arrive at every rank. In the first round the kernel does not
    wait for them, as it is compiled then, on one rank sooner than on another."""
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
