"""The parts of whole tensors that a rank's parameters are, and their devices.

Checkpoints, initial weights and Hugging Face folders use them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


@dataclass(frozen=True)
class Parts:
    """How parameters were cut before FSDP: by tp, then, if they are stacked experts, by ep."""

    # Parameter → the dimension that tp splits; other parameters are whole on each tp rank.
    splits: dict[str, int]
    # tp, then what FSDP shards over.
    mesh: DeviceMesh
    # Parameters whose first dimension ep splits.
    experts: frozenset[str] = frozenset()
    # tp, ep, then what FSDP shards these parameters over.
    expert_mesh: DeviceMesh | None = None

    def whole(self, name: str, tensor: Tensor) -> DTensor:
        """Return a parameter, or a tensor of its shape, as a part of the whole tensor.

        The result shares its memory.
        """
        # The cuts by tp and ep, and the whole shape.
        mesh = self.mesh
        dims = [self.splits.get(name)]
        if name in self.experts:
            mesh = self.expert_mesh
            dims = [*dims, 0]
        shape = list(tensor.shape)
        local = tensor.detach()
        sharding = [Replicate()] * (mesh.ndim - len(dims))
        for i, dim in enumerate(dims):
            if dim is not None:
                shape[dim] *= mesh.size(i)
        # Then FSDP's cuts, if there are any.
        if isinstance(local, DTensor):
            sharding = local.placements
            local = local.to_local()
        cuts = [Replicate() if dim is None else Shard(dim) for dim in dims]
        placements = (*cuts, *sharding)
        whole = torch.empty(shape, device="meta")
        meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
        # `from_local` would copy host memory to the device of the mesh.
        return DTensor(local, DTensorSpec(mesh, placements, meta), requires_grad=False)


def whole(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a parameter of `model`, or a tensor of its shape, as a part of the whole.

    If it is only a part, the result is a DTensor with the part's place in the whole.
    """
    parts = getattr(model, "parts", None)
    return tensor if parts is None else parts.whole(name, tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype: with offload, some are in host memory."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def shard_parameter(module: nn.Module, leaf: str, dim: int, size: int, rank: int) -> None:
    """Leave a module only one of `size` equal parts of a parameter."""
    parameter = getattr(module, leaf)
    assert parameter.shape[dim] % size == 0, (leaf, parameter.shape, dim)
    part = parameter.detach().chunk(size, dim)[rank].contiguous()
    setattr(module, leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
