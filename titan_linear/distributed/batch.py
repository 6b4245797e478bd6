"""A data-parallel rank's batch → what this rank computes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_linear.data import Batch
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.models.packed import Packed
from titan_linear.ops import build_cp_context


@dataclass(frozen=True)
class BatchSharding:
    """How batches are cut, and which methods and implementations the mixers use on them."""

    dims: ParallelDims
    device: torch.device
    layout: str
    softmax_method: str
    linear_method: str
    impl: str

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Packed]:
        """tokens [1, T_local], labels [1, T_local] and their documents. Labels were shifted before the cut."""
        methods = {"impl": self.impl, "softmax_method": self.softmax_method, "linear_method": self.linear_method,
                   "num_streams": batch.num_streams}  # fmt: skip
        if self.dims.cp == 1:
            tokens, labels, positions = (self._move(x) for x in (batch.tokens, batch.labels, batch.position_ids))
            return tokens, labels, Packed(positions[0], cu_seqlens=batch.cu_seqlens, **methods)
        context = build_cp_context(
            self._move(batch.cu_seqlens), self.dims.cp_group, layout=self.layout,
            cu_seqlens_cpu=batch.cu_seqlens, num_streams=batch.num_streams,
        )  # fmt: skip
        mine = [slice(start, end) for start, end in context.fragments]
        tokens, labels = (self._move(torch.cat([x[:, f] for f in mine], 1)) for x in (batch.tokens, batch.labels))
        return tokens, labels, Packed(context.position_ids, cp_context=context, **methods)

    def _move(self, x: torch.Tensor) -> torch.Tensor:
        """To the device; from pinned memory, so that the host does not wait."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x
