"""The ranks of a run and their groups: one DeviceMesh `dp_replicate, dp_shard, cp, tp`."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ParallelDims:
    """Degrees, whose product is the world size, and the mesh of the ranks, innermost last."""

    dp_replicate: int
    dp_shard: int
    cp: int
    mesh: DeviceMesh  # dp_replicate, dp_shard, cp, tp
    fsdp_mesh: DeviceMesh  # what parameters are sharded over: dp_shard × cp; with replicas after them (HSDP)

    @property
    def dp(self) -> int:
        """Ranks that take different streams."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.mesh.get_rank() // self.cp

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the parameters between them: the first so many have the first copy."""
        return self.dp_shard * self.cp

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that share a stream."""
        return self.mesh.get_group("cp")

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups in which ranks train."""
        return [dist.group.WORLD, *self.mesh.get_all_groups(), *self.fsdp_mesh.get_all_groups()]

    @property
    def degrees(self) -> dict[str, int]:
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": 1}


def build_mesh(device_type: str, dp_replicate: int, dp_shard: int, cp: int) -> ParallelDims:
    """The mesh over all ranks. cp is innermost: ranks that share a stream talk most, and sit side by side."""
    assert dp_replicate * dp_shard * cp == dist.get_world_size()
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh(device_type, (dp_replicate, dp_shard, cp, 1), mesh_dim_names=names)
    # The same ranks with dp_shard and cp as one dimension; flattening a mesh's dimensions is no public function.
    shards = {"dp_replicate": dp_replicate, "dp_shard_cp": dp_shard * cp}
    shards = {name: n for name, n in shards.items() if n > 1 or name != "dp_replicate"}
    fsdp_mesh = init_device_mesh(device_type, tuple(shards.values()), mesh_dim_names=tuple(shards))
    return ParallelDims(dp_replicate, dp_shard, cp, mesh, fsdp_mesh)
