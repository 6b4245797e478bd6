"""Who owns which tokens under context parallelism: the one place that knows.

A packed stream of documents is cut into *fragments*, contiguous ranges of global tokens, and each rank owns
one ("contiguous") or two ("zigzag") of every stream. Everything that crosses a cut reads this table: batch
sharding, positions, the convolution's halo, the states of the linear layers, softmax attention. It is plain
Python integers, built once per batch on the CPU, so that no layer waits for a device-to-host copy.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Fragment:
    """A range of global tokens that one rank owns, and the documents at its two ends."""

    start: int
    end: int
    rank: int  # the owner
    slot: int  # index among the owner's fragments
    head: tuple[int, int]  # global (start, end) of the document that holds the first token
    tail: tuple[int, int]  # global (start, end) of the document that holds the last token

    @property
    def enters(self) -> bool:
        """A document comes in from the fragment before."""
        return self.head[0] < self.start

    @property
    def leaves(self) -> bool:
        """A document goes on into the fragment after."""
        return self.tail[1] > self.end

    @property
    def through(self) -> bool:
        """One document comes in, fills the fragment and goes out: the only case that needs M."""
        return self.enters and self.leaves and self.head == self.tail


@dataclass(frozen=True, eq=False)
class CPContext:
    """This rank's part of a packed stream (see `build_cp_context`)."""

    group: dist.ProcessGroup | None
    layout: str
    rank: int
    world_size: int
    conv1d_kernel_size: int | None
    documents: tuple[int, ...]  # global boundaries, empty documents left out
    table: tuple[Fragment, ...]  # every rank's fragments, in global order
    cu_seqlens: torch.Tensor  # [N_local + 1] int32, rank-local entries, on the device of the caller's cu_seqlens
    cu_seqlens_cpu: torch.Tensor  # the same on the CPU
    position_ids: torch.Tensor  # [T_local] int64, positions within documents

    @cached_property
    def local(self) -> tuple[Fragment, ...]:
        """This rank's fragments in the order in which its tokens lie in memory."""
        return self.fragments_of(self.rank)

    def fragments_of(self, rank: int) -> tuple[Fragment, ...]:
        """The fragments of `rank`, by slot."""
        return tuple(_by_slot(self.table, rank))

    @property
    def fragments(self) -> tuple[tuple[int, int], ...]:
        """This rank's fragments as global (start, end)."""
        return tuple((f.start, f.end) for f in self.local)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """[slots + 1] local token offset of each of this rank's fragments, then T_local."""
        offsets = [0]
        for f in self.local:
            offsets.append(offsets[-1] + f.end - f.start)
        return tuple(offsets)

    @cached_property
    def entries(self) -> tuple[tuple[int, int], ...]:
        """For each local fragment the (first, last) entry of `cu_seqlens` inside it."""
        cu = self.cu_seqlens_cpu.tolist()
        starts = [cu.index(o) for o in self.offsets]
        return tuple((a, b - 1) for a, b in pairwise(starts))

    def document(self, token: int) -> tuple[int, int]:
        """Global (start, end) of the document that holds a global token."""
        return _document(self.documents, token)

    # For a contiguous layout of one stream, in the words of flash-linear-attention. None in other layouts.

    @property
    def _only(self) -> Fragment | None:
        return self.local[0] if self.layout == "contiguous" and len(self.local) == 1 else None

    @property
    def is_first_rank(self) -> bool | None:
        """The document of this rank's first token begins on this rank."""
        return None if self._only is None else not self._only.enters

    @property
    def is_last_rank(self) -> bool | None:
        """The document of this rank's last token ends on this rank."""
        return None if self._only is None else not self._only.leaves

    @property
    def pre_num_ranks(self) -> int | None:
        """How many ranks before this one hold tokens of the document of its first token."""
        if (f := self._only) is None:
            return None
        return sum(g.end > f.head[0] for g in self.table[: self.rank])

    @property
    def post_num_ranks(self) -> int | None:
        """How many ranks after this one hold tokens of the document of its last token."""
        if (f := self._only) is None:
            return None
        return sum(g.start < f.tail[1] for g in self.table[self.rank + 1 :])

    @property
    def pre_num_conv_tokens(self) -> int | None:
        """How many tokens of the first token's document lie before this rank."""
        return None if (f := self._only) is None else f.start - f.head[0]


def build_cp_context(
    cu_seqlens: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    conv1d_kernel_size: int | None = None,
    layout: str = "contiguous",
    cu_seqlens_cpu: torch.Tensor | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_streams: int = 1,
) -> CPContext:
    """Cut a packed stream among the W ranks of a group.

    Args:
        cu_seqlens: [N+1] int, GLOBAL boundaries of the documents, from 0 to the length of the whole stream.
            Padding is a last document of its own.
        group: the context-parallel process group. With `rank` and `world_size` and no group the result only
            describes; no operation can communicate with it.
        conv1d_kernel_size: width of the short convolutions; `causal_conv1d` checks that its weight has it.
        layout: "contiguous" (rank r owns [r·T/W, (r+1)·T/W)) or "zigzag" (2W blocks; rank r owns blocks r and
            2W−1−r, in that order, never merged).
        cu_seqlens_cpu: the same values on the CPU; spares a device-to-host copy when cu_seqlens is on a GPU.
        num_streams: `cu_seqlens` describes that many streams of equal length, one after the other; each is
            cut by itself, and a rank's tokens are its part of the first stream, of the second, and so on.

    Raises:
        ValueError: boundaries that do not start at 0 or decrease, an unknown layout, a stream length that W
            (2W for zigzag) does not divide, streams whose edges are not document boundaries.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r} is unknown; use one of {', '.join(map(repr, LAYOUTS))}")
    if group is not None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}, world_size = {world_size}: give a group, or both with 0 <= rank < world_size")
    boundaries = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if len(boundaries) < 2 or boundaries[0] != 0 or any(b < a for a, b in pairwise(boundaries)) or not boundaries[-1]:
        raise ValueError(f"cu_seqlens = {_short(boundaries)}: must start at 0, never decrease, and hold a token")
    documents = tuple(sorted(set(boundaries)))
    ranges = _ranges(documents[-1], num_streams, world_size, layout)
    for i in range(1, num_streams):
        if i * documents[-1] // num_streams not in documents:
            raise ValueError(f"num_streams = {num_streams}: stream {i} must begin a document in cu_seqlens")
    table = tuple(
        Fragment(s, e, owner, slot, head=_document(documents, s), tail=_document(documents, e - 1))
        for s, e, owner, slot in ranges
    )
    cu_local, positions = _local_layout(documents, _by_slot(table, rank))
    device = cu_seqlens.device
    return CPContext(
        group=group, layout=layout, rank=rank, world_size=world_size, conv1d_kernel_size=conv1d_kernel_size,
        documents=documents, table=table, cu_seqlens=cu_local.to(device, non_blocking=True), cu_seqlens_cpu=cu_local,
        position_ids=positions.to(device, non_blocking=True),
    )  # fmt: skip


def _ranges(total: int, num_streams: int, world_size: int, layout: str) -> list[tuple[int, int, int, int]]:
    """(start, end, rank, slot) of every fragment in global order."""
    length, blocks = total // num_streams, world_size * (2 if layout == "zigzag" else 1)
    if total % num_streams or length % blocks:
        raise ValueError(
            f"a stream of {total / num_streams:g} tokens cannot be cut into {blocks} equal blocks ({layout} layout on "
            f"{world_size} ranks); pad each stream to a multiple of {blocks}"
        )
    size, per_stream = length // blocks, blocks // world_size
    ranges = []
    for stream in range(num_streams):
        for block in range(blocks):
            mirrored = block >= world_size  # only in the zigzag layout
            owner = 2 * world_size - 1 - block if mirrored else block
            start = stream * length + block * size
            ranges.append((start, start + size, owner, stream * per_stream + mirrored))
    return ranges


def _by_slot(table: tuple[Fragment, ...], rank: int) -> list[Fragment]:
    return sorted((f for f in table if f.rank == rank), key=lambda f: f.slot)


def _document(documents: tuple[int, ...], token: int) -> tuple[int, int]:
    i = bisect_right(documents, token) - 1
    return documents[i], documents[i + 1]


def _local_layout(documents: tuple[int, ...], fragments: list[Fragment]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank-local boundaries [N_local+1] int32 and positions within documents [T_local] int64."""
    boundaries, positions = [0], []
    for f in fragments:
        start = f.start
        while start < f.end:
            first, last = _document(documents, start)
            end = min(last, f.end)
            boundaries.append(boundaries[-1] + end - start)
            positions.append(torch.arange(start - first, end - first))
            start = end
    return torch.tensor(boundaries, dtype=torch.int32), torch.cat(positions)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, …, {values[-1]}]"
