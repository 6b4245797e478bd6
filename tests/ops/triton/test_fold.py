"""The folds of S ← M S + S_ext against the same in float64."""

from __future__ import annotations

from functools import reduce
from itertools import chain, pairwise

import pytest
import torch

from tests.ops.inputs import DEVICE, relative_error
from titan_linear.ops.triton.fold import fold, fold_entries, fold_entries_back, fold_segments


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
    torch.library.opcheck(fold.overload, arguments)
    got, want = fold(*arguments).cpu(), folded(S_ext.float().double(), M.float().double(), chains, reverse)
    assert got.shape == want.shape and not got[0].any()
    assert max(relative_error(a, b) for a, b in zip(got[1:], want[1:], strict=True)) < 2e-6


def test_fold_without_transitions() -> None:
    """Two ranks: no document passes through a fragment, so there is no M."""
    S_ext = torch.randn(2, 1, 32, 32, device=DEVICE)
    rows = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 2], [1, 0], [-1, -1])]
    assert torch.equal(fold(S_ext, S_ext.new_empty(0, 1, 32, 32), *rows, False), S_ext.flip(0))


@pytest.mark.parametrize(("K", "V"), [(32, 64), (128, 32)])
def test_segments(monkeypatch: pytest.MonkeyPatch, K: int, V: int) -> None:
    """Entries of one, three and two segments, in both directions: what enters and leaves segments, from states by index
    and from none, zeros for two surplus ones; what an entry makes of no state, and its transition."""
    generator, offsets = torch.Generator().manual_seed(0), [0, 1, 4, 6]
    S_ext = torch.randn(8, 2, K, V, generator=generator, dtype=torch.float64).float().double()
    M = (torch.randn(8, 2, K, K, generator=generator, dtype=torch.float64) / K**0.5).float().double()
    start, index, entries = torch.randn(2, 2, K, V, generator=generator), [1, 0, -1], [2, 1]
    on_device = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (offsets, index, entries)]
    x, transitions, given = (t.float().to(DEVICE) for t in (S_ext, M, start))
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    for reverse in (False, True):
        walks = [list(range(*span))[:: -1 if reverse else 1] for span in pairwise(offsets)]
        step = [m.mT if reverse else m for m in M]
        for first in (start.double(), None):
            entering = torch.zeros_like(S_ext)
            for walk, row in zip(walks, index, strict=True):
                S = torch.zeros_like(S_ext[0]) if first is None or row < 0 else first[row]
                for i in walk:
                    entering[i], S = S, step[i] @ S + S_ext[i]
            states = (None, None) if first is None else (given, on_device[1])
            got = fold_segments(x, transitions, *states, on_device[0], reverse).cpu()
            assert relative_error(got, entering) < 2e-6
        want = [
            reduce(lambda S, i: step[i] @ S + S_ext[i], walks[entry], torch.zeros_like(S_ext[0])) for entry in entries
        ]
        whole = [reduce(lambda S, i: step[i] @ S, walks[entry], torch.eye(K, dtype=torch.float64)) for entry in entries]
        found = (fold_entries_back if reverse else fold_entries)(x, transitions, on_device[0], on_device[2])
        found = (found,) if reverse else found
        for got, exact in zip(found, (want, whole)):
            assert relative_error(got.cpu(), torch.stack(exact)) < 2e-6
