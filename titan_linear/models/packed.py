"""What a mixer knows of the tokens besides their values: one frozen object per batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_linear.ops import CPContext


@dataclass(frozen=True)
class Packed:
    """Documents of a packed stream, or of this rank's part of it.

    With neither `cu_seqlens` nor `cp_context` the rows of the batch are sequences of their own (generation).
    """

    position_ids: torch.Tensor  # [T] int64, positions within documents; or [B, T], of each row its own
    cu_seqlens: torch.Tensor | None = None  # [N+1] int32
    cp_context: CPContext | None = None
    first_key: torch.Tensor | None = None  # [B] int64, token by token: padding before a row's keys in the cache
    num_streams: int = 1  # of equal length, one after the other
    impl: str = "auto"  # "auto" | "triton" | "torch", the implementation of every op
    softmax_method: str = "auto"  # "auto" | "ring" | "allgather" | "ulysses", under context parallelism
    linear_method: str = "kcp"  # "kcp" | "ulysses", likewise

    @property
    def documents(self) -> dict[str, object]:
        """The keywords that tell an op where documents lie."""
        return {"cp_context": self.cp_context} if self.cp_context is not None else {"cu_seqlens": self.cu_seqlens}
