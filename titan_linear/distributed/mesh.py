"""The ranks of a run and their groups: one DeviceMesh `dp_replicate, dp_shard, cp, tp`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_linear.ops.collectives import Ranks


@dataclass(frozen=True)
class ParallelDims:
    """Degrees, whose product is the world size, and the mesh of the ranks, innermost last."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    mesh: DeviceMesh  # dp_replicate, dp_shard, cp, tp
    fsdp_mesh: DeviceMesh  # what FSDP shards over: dp_shard × cp; with replicas before them (HSDP)
    data_group: dist.ProcessGroup  # dp_replicate × dp_shard × cp: the ranks that have the same part of each tensor

    @property
    def dp(self) -> int:
        """Ranks that take different streams."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        """Several ranks have the same parameters, and share them: FSDP2's work."""
        return self.fsdp_mesh.size() > 1

    @property
    def dp_rank(self) -> int:
        return self.mesh.get_rank() // self.copies

    @property
    def copies(self) -> int:
        """Ranks that get the same batches."""
        return self.cp * self.tp

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that share a stream."""
        return self.mesh.get_group("cp")

    @property
    def tp_ranks(self) -> Ranks:
        """The ranks that share every layer."""
        return Ranks(self.mesh.get_group("tp").group_name, self.tp, self.mesh.get_local_rank("tp"))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups in which ranks train."""
        return [dist.group.WORLD, *self.mesh.get_all_groups(), *self.fsdp_mesh.get_all_groups(), self.data_group]

    @property
    def degrees(self) -> dict[str, int]:
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}

    @cached_property
    def parameter_mesh(self) -> DeviceMesh:
        """tp, then the dimensions of `fsdp_mesh`: the order in which parameters are cut."""
        sizes = [self.fsdp_mesh.size(dim) for dim in range(self.fsdp_mesh.ndim)]
        ranks = self.mesh.mesh.reshape(*sizes, self.tp).movedim(-1, 0).contiguous()
        return DeviceMesh.from_group(
            [self.mesh.get_group("tp"), *self.fsdp_mesh.get_all_groups()], self.mesh.device_type, ranks,
            mesh_dim_names=("tp", *self.fsdp_mesh.mesh_dim_names),
        )  # fmt: skip


def build_mesh(device_type: str, dp_replicate: int, dp_shard: int, cp: int, tp: int = 1) -> ParallelDims:
    """The mesh over all ranks. tp is innermost, then cp: ranks that share a layer, or a stream, talk most and sit side
    by side."""
    assert dp_replicate * dp_shard * cp * tp == dist.get_world_size()
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh(device_type, (dp_replicate, dp_shard, cp, tp), mesh_dim_names=names)
    fsdp_mesh = mesh["dp_shard", "cp"]._flatten("fsdp")  # no public function flattens dimensions
    data_group = fsdp_mesh.get_group()
    if dp_replicate > 1:
        data_group = mesh["dp_replicate", "dp_shard", "cp"]._flatten("data").get_group()
        ranks = mesh.mesh[..., mesh.get_local_rank("tp")].reshape(dp_replicate, dp_shard * cp)
        fsdp_mesh = DeviceMesh.from_group(
            [mesh.get_group("dp_replicate"), fsdp_mesh.get_group()], device_type, ranks,
            mesh_dim_names=("dp_replicate", "fsdp"),
        )  # fmt: skip
    return ParallelDims(dp_replicate, dp_shard, cp, tp, mesh, fsdp_mesh, data_group)
