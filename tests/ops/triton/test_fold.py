"""The folds of S ← M S + S_ext against the same in float64."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from tests.ops.inputs import relative_error
from titan_linear.ops.triton.fold import fold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def folded(S_ext: torch.Tensor, M: torch.Tensor, chains: list[list[tuple[int, int]]], reverse: bool) -> torch.Tensor:
    states = []
    for links in chains:
        S = torch.zeros_like(S_ext[0])
        for s_row, m_row in links:
            S = S_ext[s_row] + (0.0 if m_row < 0 else (M[m_row].mT if reverse else M[m_row]) @ S)
        states.append(S)
    return torch.stack(states)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("K", "V"), [(32, 64), (128, 32), (32, 96)])
def test_fold(K: int, V: int, reverse: bool) -> None:
    """Chains of none, one, two and four links, in any order of rows; one begins with an M, of a zero state."""
    generator = torch.Generator().manual_seed(0)
    S_ext = torch.randn(5, 2, K, V, generator=generator, dtype=torch.float64)
    M = torch.randn(3, 2, K, K, generator=generator, dtype=torch.float64) / K**0.5
    chains = [[], [(3, -1)], [(4, -1), (0, 2)], [(1, -1), (2, 0), (0, 1), (3, 2)], [(2, 1), (1, 0)]]
    lengths = torch.tensor([0, *map(len, chains)]).cumsum(0)
    s_row, m_row = zip(*chain.from_iterable(chains), strict=True)
    numbers = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths.tolist(), s_row, m_row))
    arguments = (S_ext.float().to(DEVICE), M.float().to(DEVICE), *numbers, reverse)
    torch.library.opcheck(fold, arguments)
    got, want = fold(*arguments).cpu(), folded(S_ext.float().double(), M.float().double(), chains, reverse)
    assert got.shape == want.shape and not got[0].any()
    assert max(relative_error(a, b) for a, b in zip(got[1:], want[1:], strict=True)) < 2e-6


def test_fold_without_transitions() -> None:
    """Two ranks: no document passes through a fragment, so there is no M."""
    S_ext = torch.randn(2, 1, 32, 32, device=DEVICE)
    rows = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 2], [1, 0], [-1, -1])]
    assert torch.equal(fold(S_ext, S_ext.new_empty(0, 1, 32, 32), *rows, False), S_ext.flip(0))
