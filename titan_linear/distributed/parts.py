"""Of what a rank's parameters are parts, for checkpoints, initial weights and Hugging Face folders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Parts:
    """How parameters were cut before FSDP cuts what is left: by tp, and stacked experts by ep. In that order."""

    splits: dict[str, int]  # parameter → the dimension that tp splits; others are whole on each of its ranks
    mesh: DeviceMesh  # tp, then what FSDP shards over
    experts: frozenset[str] = frozenset()  # parameters whose first dimension ep splits
    expert_mesh: DeviceMesh | None = None  # tp, ep, then what FSDP shards these over

    def whole(self, name: str, tensor: torch.Tensor) -> DTensor:
        """A parameter, or a tensor of its shape, as the part that it is of the whole one. It shares its memory."""
        mesh, dims = self.mesh, [self.splits.get(name)]
        if name in self.experts:
            mesh, dims = self.expert_mesh, [*dims, 0]
        shape, local, sharding = list(tensor.shape), tensor.detach(), [Replicate()] * (mesh.ndim - len(dims))
        for i, dim in enumerate(dims):
            if dim is not None:
                shape[dim] *= mesh.size(i)
        if isinstance(local, DTensor):
            local, sharding = local.to_local(), local.placements
        placements = [*(Replicate() if dim is None else Shard(dim) for dim in dims), *sharding]
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def whole(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of `model`, or a tensor of its shape, that says where it lies in the whole one, if it is a part."""
    parts = getattr(model, "parts", None)
    return tensor if parts is None else parts.whole(name, tensor)


def take_part(module: nn.Module, leaf: str, dim: int, size: int, rank: int) -> None:
    """Leave a module one of `size` equal parts of a parameter."""
    parameter = getattr(module, leaf)
    assert parameter.shape[dim] % size == 0, (leaf, parameter.shape, dim)
    part = parameter.detach().chunk(size, dim)[rank].contiguous()
    setattr(module, leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
