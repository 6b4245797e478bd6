"""Copies of tokens for experts and their weighted sums, against the same in float64."""

import pytest
import torch

from tests.ops.inputs import DEVICE
from titan_linear.ops.experts import Copies, by_expert, by_slot, collect, spread
from titan_linear.ops.triton.copies import collect_copies, collect_copies_backward

E = 6
CASES = [(7, 1, 5), (9, 3, 64), (5, 8, 200), (1, 22, 24), (0, 2, 8)]  # tokens, experts of each, width
IMPLS = ["torch", "triton", pytest.param("triton", marks=pytest.mark.cuda, id="on a GPU")]


def given(N, k, D, here, dtype):
    """x [N, D], copies, weights [N, k]: a share of copies is here."""
    draw = torch.Generator().manual_seed(N + k)
    experts = torch.randint(E, (N, k), generator=draw)
    experts = experts.where(torch.rand(N, k, generator=draw) < here, -1)
    x, weights = torch.randn(N, D, generator=draw), torch.rand(N, k, generator=draw)
    return x.to(dtype), by_expert(experts, E, int((experts >= 0).sum())), weights


def through(x, copies, weights, impl):
    """Copies, the sum of what becomes of them, and the gradients of x and weights."""
    leaves = [t for t in (x, weights) if t is not None]
    rows = spread(x, copies, impl)
    y = rows * torch.linspace(1, 2, len(rows), device=x.device, dtype=x.dtype)[:, None]
    found = collect(y, copies, weights, impl)
    return [rows, found, *torch.autograd.grad(found, leaves, x.detach().flip(0))]


def exact(x, slots, weights):
    leaves = [t for t in (x, weights) if t is not None]
    rows = int((slots >= 0).sum())
    n, j = (slots >= 0).nonzero(as_tuple=True)
    copies = x.new_zeros(rows, x.shape[1]).index_put((slots[n, j],), x[n])
    y = copies * torch.linspace(1, 2, rows, dtype=x.dtype)[:, None]
    weighed = y[slots[n, j]] if weights is None else y[slots[n, j]] * weights[n, j, None]
    found = torch.zeros_like(x).index_add(0, n, weighed)
    return [copies, found, *torch.autograd.grad(found, leaves, x.detach().flip(0))]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("here", [1.0, 0.4, 0.0])
def test_matches_float64(here, weighed, impl):
    bounds = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
    bounds |= {torch.float64: 1e-15} if impl == "torch" else {}
    for case in CASES:
        for dtype, bound in bounds.items():
            x, copies, weights = given(*case, here, dtype)
            wide = [t.double().requires_grad_() for t in (x, weights)]
            want = exact(wide[0], copies.slots, wide[1] if weighed else None)
            ours = [t.to(DEVICE).requires_grad_() for t in (x, weights.to(torch.promote_types(dtype, torch.float32)))]
            there = Copies(*(t.to(DEVICE) for t in copies))
            got = through(ours[0], there, ours[1] if weighed else None, impl)
            for a, b in zip(got, want, strict=True):
                assert (a.cpu().double() - b).norm() <= bound * max(1.0, b.norm().item()), (case, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_copies_that_are_not_there_are_not_read(impl):
    """Nor are their weights, whatever these are."""
    copies = by_slot(torch.tensor([[1, -1], [-1, 0]], device=DEVICE), 2)
    weights = torch.tensor([[2.0, torch.nan], [torch.inf, 3.0]], device=DEVICE)
    y = torch.tensor([[1.0], [10.0]], device=DEVICE, requires_grad=True)
    x = collect(y, copies, weights, impl)
    assert x.tolist() == [[20.0], [3.0]]
    assert torch.autograd.grad(x.sum(), y)[0].tolist() == [[3.0], [2.0]]


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled(impl):
    """The same gradients: torch 2.11 loses those of a tensor that a compiled function returns as it is."""
    x, copies, weights = given(9, 3, 64, 0.4, torch.float32)
    leaves = x.to(DEVICE).requires_grad_(), weights.to(DEVICE).requires_grad_()
    copies = Copies(*(t.to(DEVICE) for t in copies))

    def gradients(collected):
        return torch.autograd.grad(collected(*leaves).square().sum(), leaves)

    def collected(x, weights):
        return collect(spread(x, copies, impl).sin(), copies, weights, impl)

    compiled = gradients(torch.compile(collected, backend="eager"))
    assert all(map(torch.equal, compiled, gradients(collected)))


def test_copies_are_sorted_by_expert():
    copies = by_expert(torch.tensor([[2, 0], [0, -1], [1, 2]]), 3, 5)
    assert copies.slots.tolist() == [[3, 0], [1, -1], [2, 4]]
    assert copies.order.tolist() == by_slot(copies.slots, 5).order.tolist() == [1, 2, 4, 0, 5]
    assert copies.tokens.tolist() == [0, 1, 2, 0, 2]


def test_operators_are_well_formed():
    x, copies, weights = given(5, 3, 8, 0.5, torch.float32)
    x, weights, slots = (t.to(DEVICE) for t in (x, weights, copies.slots))
    y = torch.randn(len(copies.order), 8, device=DEVICE)
    torch.library.opcheck(collect_copies.overload, (y, slots, weights))
    torch.library.opcheck(collect_copies.overload, (y, slots, None))
    torch.library.opcheck(collect_copies_backward.overload, (x, slots, weights, y))
