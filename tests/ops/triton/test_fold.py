"""The folds of S ← M S + S_ext against the same in float64."""

from functools import reduce
from itertools import chain, pairwise

import pytest
import torch

from tests.ops.inputs import DEVICE, relative_error
from titan_linear.ops.triton.fold import fold, fold_entries, fold_entries_back, fold_segments


def transitions(count, K, of):
    """M [count, 2, ...] in float32: matrices, diagonals, or one number for each; and as matrices in float64."""
    shape = {"matrix": (K, K), "diagonal": (K,), "number": (1,)}[of]
    M = torch.randn(count, 2, *shape, generator=torch.Generator().manual_seed(1)) / K ** (
        0.5 if of == "matrix" else 0
    )
    return M, M.double() if of == "matrix" else torch.diag_embed(M.double().expand(count, 2, K))


def folded(S_ext, M, chains, reverse):
    states = []
    for links in chains:
        S = torch.zeros_like(S_ext[0])
        for s_row, m_row in links:
            S = S_ext[s_row] + (0.0 if m_row < 0 else (M[m_row].mT if reverse else M[m_row]) @ S)
        states.append(S)
    return torch.stack(states)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "K, V, of",
    [
        (32, 64, "matrix"),
        (128, 32, "matrix"),
        (32, 96, "matrix"),
        (128, 80, "number"),
        (32, 16, "diagonal"),
    ],
)
def test_folds_of_chains_equal_products(K, V, of, reverse):
    """Chains of none, one, two and four links, in any order of rows; one begins with an M, of a zero state."""
    generator = torch.Generator().manual_seed(0)
    S_ext = torch.randn(5, 2, K, V, generator=generator, dtype=torch.float64)
    M, matrices = transitions(3, K, of)
    chains = [[], [(3, -1)], [(4, -1), (0, 2)], [(1, -1), (2, 0), (0, 1), (3, 2)], [(2, 1), (1, 0)]]
    lengths = torch.tensor([0, *map(len, chains)]).cumsum(0)
    s_row, m_row = zip(*chain.from_iterable(chains), strict=True)
    numbers = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths.tolist(), s_row, m_row)
    )
    arguments = (S_ext.float().to(DEVICE), M.to(DEVICE), *numbers, reverse)
    torch.library.opcheck(fold.overload, arguments)
    got, want = fold(*arguments).cpu(), folded(S_ext.float().double(), matrices, chains, reverse)
    assert got.shape == want.shape and not got[0].any()
    assert max(relative_error(a, b) for a, b in zip(got[1:], want[1:], strict=True)) < 2e-6


def test_fold_without_transitions():
    """Two ranks: no document passes through a fragment, so there is no M."""
    S_ext = torch.randn(2, 1, 32, 32, device=DEVICE)
    rows = [
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 2], [1, 0], [-1, -1])
    ]
    assert torch.equal(fold(S_ext, S_ext.new_empty(0, 1, 32, 32), *rows, False), S_ext.flip(0))


@pytest.mark.parametrize(
    "K, V, of", [(32, 64, "matrix"), (128, 32, "matrix"), (128, 80, "number"), (32, 64, "diagonal")]
)
def test_folds_of_segments_equal_products(monkeypatch, K, V, of):
    """Entries of one, three and two segments, in both directions: what enters and leaves segments, from states by index
    and from none, zeros for two surplus ones; what an entry makes of no state, and its transition."""
    generator, offsets = torch.Generator().manual_seed(0), [0, 1, 4, 6]
    S_ext = torch.randn(8, 2, K, V, generator=generator, dtype=torch.float64).float().double()
    given_M, M = transitions(8, K, of)
    start, index, entries = torch.randn(2, 2, K, V, generator=generator), [1, 0, -1], [2, 1]
    on_device = [
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (offsets, index, entries)
    ]
    x, given_M, given = (t.float().to(DEVICE) for t in (S_ext, given_M, start))
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
            got = fold_segments(x, given_M, *states, on_device[0], None, reverse).cpu()
            assert relative_error(got, entering) < 2e-6
        want = [
            reduce(lambda S, i: step[i] @ S + S_ext[i], walks[entry], torch.zeros_like(S_ext[0]))
            for entry in entries
        ]
        whole = [
            reduce(
                lambda S, i: M[i] @ S,
                range(*offsets[entry : entry + 2]),
                torch.eye(K, dtype=torch.float64),
            )
            for entry in entries
        ]
        found = fold_entries(x, given_M, on_device[0], on_device[2], None, reverse)
        of_entries = found[1] if of == "matrix" else torch.diag_embed(found[1].expand(-1, -1, K))
        for got, exact in zip((found[0], of_entries), (want, whole), strict=True):
            assert relative_error(got.cpu(), torch.stack(exact)) < 2e-6
        if reverse:
            assert torch.equal(fold_entries_back(x, given_M, on_device[0], on_device[2]), found[0])


@pytest.mark.parametrize("reverse", [False, True])
def test_segments_pass_on_what_is_wanted(reverse):
    """NaN in what a segment does not pass on, and in states that enter it, goes no further."""
    K, nan, generator = 32, torch.nan, torch.Generator().manual_seed(0)
    S_ext, M = (torch.randn(6, 1, K, 32, generator=generator).to(DEVICE) for _ in range(2))
    order, wanted = (
        list(range(6))[:: -1 if reverse else 1],
        torch.tensor([2, 1, 2, 0, 1, 2], dtype=torch.int32),
    )
    S_ext[wanted == 0], M[wanted < 2], S_ext[order[0]] = nan, nan, nan
    whole = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    got = fold_segments(S_ext, M, None, None, whole, wanted.to(DEVICE), reverse)
    S = torch.zeros_like(S_ext[0], dtype=torch.float64)
    for i in order:
        torch.testing.assert_close(got[i].double(), S, rtol=1e-5, atol=1e-5, equal_nan=True)
        passed = (
            (M[i].mT if reverse else M[i]).double() @ S if wanted[i] == 2 else torch.zeros_like(S)
        )
        S = passed + S_ext[i] if wanted[i] else torch.zeros_like(S)
    assert got[order[1]].isnan().all() and not got[order[3]].isnan().any()
    ends = torch.tensor([0, 1, 2, 6], dtype=torch.int32, device=DEVICE)
    entries = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    composed, _ = fold_entries(S_ext, M, ends, entries, wanted.to(DEVICE), reverse)
    last = (
        M[2].mT.double() @ S_ext[3].double() + S_ext[2]
        if reverse
        else M[5].double() @ S_ext[4].double() + S_ext[5]
    )
    if not reverse:
        torch.testing.assert_close(composed[0].double(), last, rtol=1e-5, atol=1e-5)
