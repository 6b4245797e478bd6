"""Folds of KCP, S ← M S + S_ext, by the kernels of ops/triton/fold.py or in float64.

Without kernels they run in float64, because float32 products run as TF32 if a user enables
it, and TF32's error grows with the chain. M is a matrix [.., K, K], or the diagonal of one,
[.., K] or [.., 1].
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.chains import STATE, STATE_AND_M, Chains


class BlockRuns(NamedTuple):
    """Runs of n blocks that follow each other in global order, and what the blocks pass on."""

    S_ext: Tensor  # [runs, n, HV, K, V]
    M: Tensor  # [runs, n, HV, K, K], or [runs, n, HV, K or 1]
    wanted: Tensor  # [runs, n] int32; on the CPU unless kernels fold


def by_kernels(S_ext: Tensor) -> bool:
    """Whether kernels compute the folds, with products as exact as float32 products."""
    K, V = S_ext.shape[-2:]
    return (
        K in (16, 32, 64, 128, 256)
        and V % 16 == 0
        and S_ext.is_cuda
        and S_ext.dtype == torch.float32
    )


def act(M: Tensor, S: Tensor, reverse: bool) -> Tensor:
    """Compute M S [.., K, V], in reverse Mᵀ S, in float64."""
    if M.dim() < S.dim():
        return M.double().unsqueeze(-1) * S
    return (M.mT if reverse else M).double() @ S


def fold_chains(S_rows: Tensor, M_rows: Tensor, c: Chains, reverse: bool) -> Tensor:
    """Fold the links of each slot's chain -> [slots, HV, K, V]; zeros without a chain."""
    if by_kernels(S_rows):
        from titan_linear.ops.triton.fold import fold  # Triton is available on Linux only

        return fold(S_rows, M_rows, c.chain_offsets, c.s_row, c.m_row, reverse)
    states = S_rows.new_zeros(len(c.slots), *S_rows.shape[1:], dtype=torch.float64)
    for slot, s, m in c.links.tolist():
        # The first link of a chain has no M, and padding has no slot.
        if m >= 0:
            states[slot] = act(M_rows[m], states[slot], reverse)
        if slot >= 0:
            states[slot] += S_rows[s]
    return states.to(S_rows.dtype)


def fold_runs(runs: BlockRuns, start: Tensor | None, reverse: bool) -> Tensor:
    """Return the state that enters each block [runs, n, HV, K, V].

    In reverse, return the gradient of the state that leaves it. `start` [runs, HV, K, V]
    holds the states that enter the runs; None: zeros. What a block does not pass on is not
    read: even multiplied by zero, NaN of one document would enter the next.
    """
    S_ext, M, wanted = runs
    n = wanted.shape[1]
    if by_kernels(S_ext):
        from titan_linear.ops.triton.fold import fold_segments

        rows = S_ext.flatten(0, 1), M.flatten(0, 1)
        firsts = _firsts(runs)
        return fold_segments(*rows, start, None, firsts, wanted.flatten(), reverse).view_as(S_ext)
    # Without kernels, walk through the blocks of each run.
    states = S_ext.new_zeros(S_ext.shape, dtype=torch.float64)
    walk = range(n)[::-1] if reverse else range(n)
    for i, passes in enumerate(wanted.tolist()):
        if start is not None:
            states[i, walk[0]] = start[i]
        for before, j in pairwise(walk):
            states[i, j] = _passed(
                S_ext[i, before], M[i, before], passes[before], states[i, before], reverse
            )
    return states.to(S_ext.dtype)


def compose_runs(runs: BlockRuns, reverse: bool) -> tuple[Tensor, Tensor]:
    """Compose the blocks of each run into one block: S_ext [runs, HV, K, V], M [runs, HV,
    ...].

    The results are valid where the block passes them on. M is the transition of the forward
    direction, in reverse too.
    """
    S_ext, M, wanted = runs
    if by_kernels(S_ext):
        from titan_linear.ops.triton.fold import fold_entries

        firsts = _firsts(runs)
        entries = torch.arange(len(wanted), dtype=torch.int32, device=S_ext.device)
        return fold_entries(
            S_ext.flatten(0, 1), M.flatten(0, 1), firsts, entries, wanted.flatten(), reverse
        )
    # S_ext is the state that leaves the last block if nothing enters the first.
    last = 0 if reverse else -1
    entering = fold_runs(runs, None, reverse)[:, last].double()
    passes = wanted[:, last].tolist()
    states = [
        _passed(*of_run, reverse) for of_run in zip(S_ext[:, last], M[:, last], passes, entering)
    ]
    # M is the product of the blocks' transitions.
    columns = M if M.dim() == S_ext.dim() else M.unsqueeze(-1)
    transition = columns[:, 0].double()
    for i in range(1, M.shape[1]):
        transition = act(M[:, i], transition, reverse=False)
    return torch.stack(states).to(S_ext.dtype), transition.view_as(M[:, 0]).to(M.dtype)


def _passed(S_ext: Tensor, M: Tensor, wanted: int, S: Tensor, reverse: bool) -> Tensor:
    """Return the state that a block passes on, in float64, if S enters it.

    S and M are read only if the block passes on what enters it.
    """
    if wanted == STATE_AND_M:
        return S_ext + act(M, S, reverse)
    return S_ext.double() if wanted == STATE else torch.zeros_like(S)


def _firsts(runs: BlockRuns) -> Tensor:
    """Return the first block of each run, [runs + 1] int32."""
    count, n = runs.wanted.shape
    return torch.arange(0, count * n + 1, n, dtype=torch.int32, device=runs.wanted.device)
