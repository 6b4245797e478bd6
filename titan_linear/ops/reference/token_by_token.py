"""The loop that the recurrences' oracles share.

A state passes through the tokens of each sequence, in float64.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor


def token_by_token(
    step: Callable[[int, Tensor], Tensor],
    q: Tensor,
    V: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = step(t, S_{t−1}) for token t of B·T, and o_t = scale · S_tᵀ q_t.

    The last three arguments are arguments of every oracle: scale (K^−½ by default),
    initial_state [N,HV,K,V], and cu_seqlens, the boundaries of packed documents. q is
    [B,T,HV,K] float64. Returns o [B,T,HV,V] and the final states [N,HV,K,V], both float64.
    """
    B, T, HV, K = q.shape
    q = q.flatten(0, 1).unsqueeze(-1)  # [B·T, HV, K, 1]
    outputs = []
    states = []
    for n, (start, end) in enumerate(sequences(B, T, cu_seqlens)):
        S = q.new_zeros(HV, K, V) if initial_state is None else initial_state[n].double()
        for t in range(start, end):
            S = step(t, S)
            outputs.append((S * q[t]).sum(1))
        states.append(S)
    o = torch.stack(outputs) * (K**-0.5 if scale is None else scale)
    return o.unflatten(0, (B, T)), torch.stack(states)


def sequences(B: int, T: int, cu_seqlens: Tensor | None) -> Iterator[tuple[int, int]]:
    """Return where sequences, or packed documents, begin and end among B·T tokens."""
    return pairwise([i * T for i in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist())
