"""What the delta rule's driver and its implementations hand to each other."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Inputs(NamedTuple):
    """The inputs of a delta rule, with B folded into T except in the first checks; or their gradients."""

    q: torch.Tensor  # [T, H, K]
    k: torch.Tensor  # [T, H, K]
    v: torch.Tensor  # [T, HV, V]
    g: torch.Tensor  # [T, HV, K] (KDA) or [T, HV] (GDN)
    beta: torch.Tensor  # [T, HV]
    A_log: torch.Tensor | None = None  # [HV]
    dt_bias: torch.Tensor | None = None  # [HV·K] or [HV]


class States(NamedTuple):
    """States of entries, or their gradients."""

    values: torch.Tensor  # [S, HV, K, V], or the convolution's [S, D, W−1]
    index: torch.Tensor | None = None  # [≥ N] int32: the row of each entry, −1 for zeros; None: row n is entry n's

    def of_entries(self, N: int) -> torch.Tensor:
        """The state of each entry, [N, ...]."""
        if self.index is None:
            return self.values
        index = self.index[:N].long()
        none = (index < 0).view(-1, *[1] * (self.values.dim() - 1))
        return self.values[index.clamp(min=0)].masked_fill(none, 0.0)


def state_dtype(inputs: Inputs) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.promote_types(inputs.q.dtype, torch.float32)
