"""Whole matrices of the model, gathered from ranks that hold parts.

One rank receives each matrix, and distributes the result.

A parameter [..., R, C] is a stack of matrices. Where FSDP or tp cut the matrices, each goes
to one rank, so that ranks have about the same work. Matrices that ranks hold whole
(experts, or all on one process) stay there. Parts come from the copy of the parameter to
which the receiving rank belongs, and go back to all copies.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, product
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

# A function of matrices of any shapes.
Apply = Callable[[list[Tensor]], list[Tensor]]


class MatrixShard(NamedTuple):
    """A rank's part of a stack of matrices."""

    # Number of the copy of the stack to which this part belongs.
    copy: int
    matrices: range
    rows: slice
    columns: slice


@dataclass
class Matrix:
    """A matrix that is cut over ranks."""

    stack: int
    # Its index in the stack.
    number: int
    shape: torch.Size  # [R, C]
    parts: dict[int, MatrixShard]  # by rank
    owner: int = 0

    @property
    def work(self) -> int:
        return self.shape.numel() * min(self.shape)

    @property
    def sources(self) -> list[int]:
        """Ranks whose parts make up the copy to which the owner belongs."""
        copy = self.parts[self.owner].copy
        return [rank for rank, part in self.parts.items() if part.copy == copy]


class WholeMatrices:
    """Applies a function to whole matrices.

    Which rank owns which matrix is determined once.
    """

    def __init__(self, stacks: Mapping[str, Tensor], device: torch.device):
        """Assign matrices to ranks.

        Args:
            stacks: parameters by name, as `parts.whole` returns them, the same on all
                ranks.
            device: device on which ranks exchange.

        Raises:
            ValueError: no rank can gather the matrices of a parameter.
        """
        self.shapes = [stack.shape[-2:] for stack in stacks.values()]
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # Which matrices are cut, and which are whole on this rank.
        self.cut: list[Matrix] = []
        self.whole: list[int] = []
        # For each stack, the first of its matrices of which this rank has a part.
        self.first: list[int] = []
        for i, (name, stack) in enumerate(stacks.items()):
            parts = parts_of(name, stack, self.size)
            self.first.append(parts[self.rank].matrices.start)
            if _is_cut(self.shapes[i], parts):
                self.cut += _cut(i, self.shapes[i], parts)
            else:
                self.whole.append(i)
        # The largest matrices first, each to the rank with the least work so far.
        loads = [0] * self.size
        for m in sorted(self.cut, key=lambda m: -m.work):
            m.owner = min(m.parts, key=lambda rank: loads[rank])
            loads[m.owner] += m.work

    @property
    def owned(self) -> list[Matrix]:
        return [m for m in self.cut if m.owner == self.rank]

    def apply(self, fn: Apply, parts: list[Tensor]) -> list[Tensor]:
        """Apply `fn` to the whole matrices. All ranks call this.

        Ranks exchange tensors of the parts' dtype on `device`, and `fn` receives such
        tensors.

        Args:
            parts: this rank's part of each stack.

        Returns:
            The same parts of the results of `fn`.
        """
        # Matrices that are whole here, then matrices gathered here.
        stacks = [_stacked(part.to(self.device)) for part in parts]
        here = chain.from_iterable(stacks[i] for i in self.whole)
        results = iter(fn([*here, *self._gather(stacks)]))
        # Results go back in the same order.
        found = [torch.empty_like(stack) for stack in stacks]
        for i in self.whole:
            for matrix in found[i]:
                matrix.copy_(next(results))
        if self.cut:
            self._scatter(list(results), found)
        return [x.view_as(part) for x, part in zip(found, parts, strict=True)]

    def _gather(self, stacks: list[Tensor]) -> list[Tensor]:
        """Gather the matrices that this rank owns."""
        if not self.cut:
            return []
        # Send parts of this rank's copy to the owners; list the shapes that arrive.
        sent = [(m.owner, self._part(stacks, m)) for m in self.cut if self.rank in m.sources]
        coming = [(rank, _shape(m.parts[rank])) for m in self.owned for rank in m.sources]
        received = iter(self._exchange(sent, coming, stacks[0].dtype))
        # Assemble each matrix.
        matrices = []
        for m in self.owned:
            matrix = torch.empty(m.shape, dtype=stacks[0].dtype, device=self.device)
            for rank in m.sources:
                part = m.parts[rank]
                matrix[part.rows, part.columns] = next(received)
            matrices.append(matrix)
        return matrices

    def _scatter(self, matrices: list[Tensor], stacks: list[Tensor]) -> None:
        """Fill all ranks' parts from the matrices that this rank owns."""
        sent = []
        for m, matrix in zip(self.owned, matrices, strict=True):
            for rank, part in m.parts.items():
                sent.append((rank, matrix[part.rows, part.columns]))
        held = [m for m in self.cut if self.rank in m.parts]
        coming = [(m.owner, _shape(m.parts[self.rank])) for m in held]
        received = self._exchange(sent, coming, stacks[0].dtype)
        for m, result in zip(held, received, strict=True):
            self._part(stacks, m).copy_(result)

    def _part(self, stacks: list[Tensor], m: Matrix) -> Tensor:
        return stacks[m.stack][m.number - self.first[m.stack]]

    def _exchange(
        self,
        sent: list[tuple[int, Tensor]],
        coming: list[tuple[int, torch.Size]],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Exchange tensors between all ranks.

        Args:
            sent: receivers, each with a tensor for it.
            coming: senders, each with the shape of a tensor from it, in the sender's order.

        Returns:
            The tensors that come.
        """
        # All numbers in one row, ordered by receiver; a row may be empty.
        row = [torch.empty(0, dtype=dtype, device=self.device)]
        to = [0] * self.size
        for rank, x in sorted(sent, key=itemgetter(0)):
            row.append(x.flatten())
            to[rank] += x.numel()
        # Numbers that come from each rank.
        of = [0] * self.size
        for rank, shape in coming:
            of[rank] += shape.numel()
        received = row[0].new_empty(sum(of))
        dist.all_to_all_single(received, torch.cat(row), of, to)
        # Each sender's numbers hold its tensors one after the other.
        senders = received.split(of)
        begins = [0] * self.size
        tensors = []
        for rank, shape in coming:
            end = begins[rank] + shape.numel()
            tensors.append(senders[rank][begins[rank] : end].view(shape))
            begins[rank] = end
        return tensors


def parts_of(name: str, stack: Tensor, ranks: int) -> dict[int, MatrixShard]:
    """Return each rank's part of a parameter [..., R, C]."""
    # A plain tensor is whole on each rank.
    if not isinstance(stack, DTensor):
        *leading, rows, columns = stack.shape
        place = range(math.prod(leading)), slice(0, rows), slice(0, columns)
        return {rank: MatrixShard(rank, *place) for rank in range(ranks)}
    # Each mesh dimension either copies the parameter or cuts one of its dimensions.
    mesh = stack.device_mesh.mesh
    each = stack.shape[1:-2].numel()
    last = stack.dim() - 2, stack.dim() - 1
    parts = {}
    for where in product(*map(range, mesh.shape)):
        copy = 0
        bounds = [(0, size) for size in stack.shape]
        for n, i, placement in zip(mesh.shape, where, stack.placements):
            if isinstance(placement, Replicate):
                copy = copy * n + i
            elif isinstance(placement, Shard) and placement.dim in (0, *last):
                bounds[placement.dim] = _chunk(*bounds[placement.dim], n, i)
            else:
                raise ValueError(
                    f"optimizer.name = 'muon': {name} {list(stack.shape)} is cut by {placement}, so that no rank can "
                    "gather its matrices; use 'AdamW', or cut it along its first or last two dimensions"
                )
        # A rank's range of the first dimension covers `each` matrices per index.
        start, stop = bounds[0] if stack.dim() > 2 else (0, 1)
        rows, columns = (slice(*pair) for pair in bounds[-2:])
        parts[int(mesh[where])] = MatrixShard(copy, range(start * each, stop * each), rows, columns)
    return parts


def _chunk(start: int, stop: int, n: int, i: int) -> tuple[int, int]:
    """Return the bounds of chunk i of n, as torch.chunk cuts.

    The last chunks may be shorter, or empty.
    """
    size = -(-(stop - start) // n)
    return min(start + i * size, stop), min(start + (i + 1) * size, stop)


def _is_cut(shape: torch.Size, parts: dict[int, MatrixShard]) -> bool:
    return any(_shape(part) != shape for part in parts.values() if part.matrices)


def _cut(stack: int, shape: torch.Size, parts: dict[int, MatrixShard]) -> list[Matrix]:
    """Return the matrices of a stack that ranks have cut."""
    count = max(part.matrices.stop for part in parts.values())
    matrices = [Matrix(stack, i, shape, {}) for i in range(count)]
    for rank, part in parts.items():
        for i in part.matrices:
            matrices[i].parts[rank] = part
    return matrices


def _shape(part: MatrixShard) -> torch.Size:
    return torch.Size([part.rows.stop - part.rows.start, part.columns.stop - part.columns.start])


def _stacked(part: Tensor) -> Tensor:
    """Reshape [..., r, c] -> [n, r, c]."""
    return part.flatten(0, -3) if part.dim() > 2 else part.unsqueeze(0)
