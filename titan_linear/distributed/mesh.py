"""The ranks of a run and their groups.

The DeviceMesh is `dp_replicate, dp_shard, cp, tp`. FSDP2 and experts see the same ranks in
other meshes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_linear.ops.exchange.collectives import Ranks


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism, and the mesh of the ranks, innermost dimension last.

    The product of the degrees without ep is the world size.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    # Neighboring ranks of dp_shard × cp that share the experts.
    ep: int
    mesh: DeviceMesh  # dp_replicate, dp_shard, cp, tp
    # Ranks over which FSDP shards; if shards have copies (HSDP), with replicate before it.
    fsdp_mesh: DeviceMesh
    # DeviceMesh of the same ranks: replicate, expert_shard, ep, tp; None if ep is 1.
    expert_mesh: Any
    # dp_replicate × dp_shard × cp: ranks that have the same tensor-parallel part of each
    # tensor.
    data_group: dist.ProcessGroup
    # Whether FSDP2's shards of the parameters lie in host memory.
    cpu_offload: bool = False

    @property
    def dp(self) -> int:
        """Number of ranks that take different streams."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 manages the parameters.

        It does if several ranks share them, or if they come from host memory.
        """
        return self.fsdp_mesh.size() > 1 or self.cpu_offload

    @property
    def replicas(self) -> int:
        """Number of copies of each shard of the parameters."""
        return self.fsdp_mesh.size(0) if self.fsdp_mesh.ndim > 1 else 1

    @property
    def replica(self) -> int:
        """Number of the copy that this rank has."""
        return self.fsdp_mesh.get_local_rank("replicate") if self.replicas > 1 else 0

    @property
    def dp_rank(self) -> int:
        return self.mesh.get_rank() // self.copies

    @property
    def copies(self) -> int:
        """Number of ranks that receive the same batches."""
        return self.cp * self.tp

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Ranks that share a stream."""
        return self.mesh.get_group("cp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Ranks that share every layer."""
        return self.mesh.get_group("tp")

    @property
    def tp_ranks(self) -> Ranks:
        """Ranks of `tp_group`, in the form that operators take."""
        return Ranks(self.tp_group.group_name, self.tp, self.tp_group.rank())

    @property
    def ep_ranks(self) -> Ranks:
        """Ranks that share the experts, in the form that operators take."""
        group = self.expert_mesh.get_group("ep")
        return Ranks(group.group_name, self.ep, group.rank())

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """All groups in which ranks train."""
        experts = self.expert_mesh.get_all_groups() if self.expert_mesh else []
        meshes = [*self.mesh.get_all_groups(), *self.fsdp_mesh.get_all_groups(), *experts]
        return [dist.group.WORLD, *meshes, self.data_group]

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of each dimension.

        ep and the degree of FSDP's shards, which are not factors of the world size, are
        included where used.
        """
        degrees = {name: self.mesh.size(dim) for dim, name in enumerate(self.mesh.mesh_dim_names)}
        shards = self.dp * self.cp // self.replicas
        fewer = {"fsdp": shards} if shards < self.dp_shard * self.cp else {}
        return degrees | ({"ep": self.ep} if self.ep > 1 else {}) | fewer

    @property
    def description(self) -> str:
        """Degrees for people to read: "dp_replicate 1 × dp_shard 2 × cp 2 × tp 1, ep 2"."""
        sizes = [f"{name} {size}" for name, size in self.degrees.items()]
        return ", ".join([" × ".join(sizes[: self.mesh.ndim]), *sizes[self.mesh.ndim :]])

    @cached_property
    def parameter_mesh(self) -> DeviceMesh:
        """tp, then the dimensions of `fsdp_mesh`: the order in which parameters are cut."""
        sizes = [self.fsdp_mesh.size(dim) for dim in range(self.fsdp_mesh.ndim)]
        ranks = self.mesh.mesh.reshape(*sizes, self.tp).movedim(-1, 0)
        groups = {"tp": self.mesh.get_group("tp")}
        groups |= zip(self.fsdp_mesh.mesh_dim_names, self.fsdp_mesh.get_all_groups())
        return _mesh_of(self.mesh.device_type, ranks, groups)

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Ranks over which FSDP shards a rank's experts: expert_shard.

        If shards have copies, replicate comes before it.
        """
        names = ("replicate", "expert_shard")
        return self.expert_mesh[names if self.replicas > 1 else names[1]]

    @cached_property
    def expert_parameter_mesh(self) -> DeviceMesh:
        """tp, ep, then `expert_fsdp_mesh`: the order in which experts are cut."""
        ranks = self.expert_mesh.mesh.permute(3, 2, 0, 1)
        names = ("tp", "ep", *self.expert_fsdp_mesh.mesh_dim_names)
        ranks = ranks if self.replicas > 1 else ranks.squeeze(2)
        groups = {name: self.expert_mesh.get_group(name) for name in names}
        return _mesh_of(self.mesh.device_type, ranks, groups)


def _mesh_of(device_type: str, ranks: Tensor, groups: dict[str, dist.ProcessGroup]) -> DeviceMesh:
    """Build a mesh of existing groups, one for each dimension."""
    names = tuple(groups)
    ranks = ranks.contiguous()
    return DeviceMesh.from_group(list(groups.values()), device_type, ranks, mesh_dim_names=names)


def build_mesh(
    device_type: str,
    dp_replicate: int,
    dp_shard: int,
    cp: int,
    tp: int = 1,
    ep: int = 1,
    cpu_offload: bool = False,
    fsdp_shard: int = -1,
) -> ParallelDims:
    """Build the mesh over all ranks.

    tp is innermost, then cp: ranks that share a layer, or a stream, communicate most and
    are neighbors.

    Args:
        fsdp_shard: number of neighboring ranks, out of dp_shard × cp, over which parameters
            are sharded; -1: all.
    """
    assert dp_replicate * dp_shard * cp * tp == dist.get_world_size()
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh(device_type, (dp_replicate, dp_shard, cp, tp), mesh_dim_names=names)
    # No public function flattens dimensions.
    data = mesh[names[:-1]]._flatten("data")
    shards = dp_shard * cp if fsdp_shard == -1 else fsdp_shard
    replicas = data.size() // shards
    # HSDP: FSDP's mesh gets a dimension of copies.
    fsdp_mesh = data
    expert_mesh = None
    if replicas > 1:
        names = ("replicate", "fsdp", "tp")
        fsdp_mesh = init_device_mesh(device_type, (replicas, shards, tp), mesh_dim_names=names)[
            "replicate", "fsdp"
        ]
    # Experts: a mesh of their own over the same ranks.
    if ep > 1:
        sizes = (replicas, shards // ep, ep, tp)
        names = ("replicate", "expert_shard", "ep", "tp")
        expert_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    dims = (dp_replicate, dp_shard, cp, tp, ep)
    return ParallelDims(*dims, mesh, fsdp_mesh, expert_mesh, data.get_group(), cpu_offload)
