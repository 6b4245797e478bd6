"""Copies of tokens for experts, their products and weighted sums, against the same in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.ops.inputs import DEVICE
from titan_linear.ops.experts import (
    Copies,
    activate,
    by_expert,
    by_slot,
    collect,
    grouped_linear,
    router_logits,
    spread,
    top_k,
)
from titan_linear.ops.triton import experts as kernels

E = 6
# tokens, experts of each, width
CASES = [(7, 1, 5), (9, 3, 64), (5, 8, 200), (1, 22, 24), (0, 2, 8)]
CHOICES = {  # experts [N, k] of tokens; -1: elsewhere
    "some elsewhere": [[0, 2], [3, -1], [5, 0], [-1, -1], [2, 4]],
    "experts without tokens": [[1, 4], [4, 1], [1, 4]],
    "one expert": [[3], [3], [3], [3]],
    "one token": [[5, 0, 2]],
}
IMPLS = ["torch", "triton", pytest.param("triton", marks=pytest.mark.cuda, id="on a GPU")]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copies_of(experts):
    return Copies(*(t.to(DEVICE) for t in by_expert(experts, E, int((experts >= 0).sum()))))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("k, E", [(1, 2), (2, 6), (8, 256), (22, 24), (5, 5)])
def test_the_best_experts(k, E, impl):
    """Of equal ones the lowest come first; -inf and NaN, too, give k that differ."""
    scores = drawn(37, E).mul(2).round().add(0.0).to(DEVICE, torch.float32)
    scores[3], scores[4] = torch.nan, -torch.inf
    found = top_k(scores, k, impl).tolist()
    plain = [sorted(range(E), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()]
    assert found[:3] == plain[:3] and found[4:] == plain[4:] and sorted(found[3]) == list(range(k))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2**-9)]
)
def test_router_logits_round_once(dtype, bound, device):
    """Products of bfloat16 are exact: only their sums, in float32, round; and gradients once, to their
    dtype: by 2⁻⁸ at most, and 0.42 of that as a root mean square."""
    x, weight = (
        drawn(*shape).to(device, dtype).requires_grad_() for shape in ((40, 200), (6, 200))
    )
    logits = router_logits(x, weight)
    d = drawn(40, 6, seed=1).to(logits)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    exact = x.double() @ weight.double().T
    assert (logits - exact).norm() <= min(bound, 1e-6) * exact.norm()
    expected = d.double() @ weight.double(), d.double().T @ x.double()
    for a, b in zip(torch.autograd.grad(logits, (x, weight), d), expected, strict=True):
        assert a.dtype == dtype and (a - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("here", [1.0, 0.4, 0.0])
def test_sums_of_copies(here, impl):
    for (N, k, D), (dtype, bound) in [(c, b) for c in CASES for b in BOUNDS.items()]:
        draw = torch.Generator().manual_seed(N + k)
        experts = torch.randint(E, (N, k), generator=draw)
        copies = copies_of(experts.where(torch.rand(N, k, generator=draw) < here, -1))
        x = drawn(N, D).to(DEVICE, dtype).requires_grad_()
        rows = spread(x, copies, impl)
        y = rows * torch.linspace(1, 2, len(rows), device=DEVICE, dtype=dtype)[:, None]
        found = collect(y, copies, impl)
        (dx,) = torch.autograd.grad(found, x, x.detach().flip(0))
        n, j = (copies.slots >= 0).nonzero(as_tuple=True)
        factors = torch.linspace(1, 2, len(rows), device=DEVICE, dtype=torch.float64)[
            copies.slots[n, j]
        ]
        factor = torch.zeros(N, dtype=torch.float64, device=DEVICE).index_add(0, n, factors)[
            :, None
        ]
        assert torch.equal(rows[copies.slots[n, j]], x[n])
        for got, exact in ((found, x.double() * factor), (dx, x.double().flip(0) * factor)):
            assert (got - exact).norm() <= bound * max(1.0, exact.norm().item()), (N, k, D, dtype)


def leaves_of(experts, gated, low):
    """Tokens [N, 8], weights of their copies, matrices [E, ..] of both products, and a low-rank one, or None."""
    H = 16
    N, k = experts.shape
    shapes = {"x": (N, 8), "weights": (N, k), "up": (E, H * (1 + gated), 8), "down": (E, 8, H)}
    shapes |= {"A": (E, 4, H)} if low else {}
    return {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def mixture(experts, x, impl, gated):
    """The experts' outputs, and the low-rank ones, as a model computes them."""
    copies = copies_of(experts)
    counts = experts[experts >= 0].bincount(minlength=E).to(DEVICE)
    linear = partial(grouped_linear, counts=counts, impls=("auto", impl))
    h = activate(linear(spread(x["x"], copies, impl), x["up"]), x["weights"], copies, gated, impl)
    low = linear(h, x["A"]) if "A" in x else h.new_zeros(len(h), 0)
    return linear(h, x["down"], copies=copies), low


def one_by_one(experts, x, gated):
    """As `mixture`, copy by copy."""
    y, low = torch.zeros_like(x["x"]), []
    for e in range(E):
        for n, j in (experts == e).nonzero().tolist():
            a = x["up"][e] @ x["x"][n]
            h = F.silu(a[:16]) * a[16:] if gated else F.relu(a).square()
            h = h * x["weights"][n, j]
            y = y.index_add(0, torch.tensor([n], device=y.device), (x["down"][e] @ h)[None])
            low.append(x["A"][e] @ h if "A" in x else y.new_zeros(0))
    return y, torch.stack(low) if low else y.new_zeros(0, 4)


def results(leaves, outputs):
    """Outputs and all gradients."""
    loss = sum((out * drawn(*out.shape, seed=9).to(out.device, out.dtype)).sum() for out in outputs)
    return [
        *outputs,
        *torch.autograd.grad(loss, leaves.values(), allow_unused=True, materialize_grads=True),
    ]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_mixtures_are_exact_within_rounding(name, gated, impl):
    """With and without adapters: exact in float64, in others within rounding."""
    bounds = BOUNDS | ({torch.float64: 1e-14} if impl == "torch" else {})
    experts = torch.tensor(CHOICES[name])
    for low in (False, True):
        exact = leaves_of(experts, gated, low)
        for dtype, bound in bounds.items():
            ours = {n: t.to(DEVICE, dtype).requires_grad_() for n, t in exact.items()}
            weights = (
                ours["weights"]
                .detach()
                .to(torch.promote_types(dtype, torch.float32))
                .requires_grad_()
            )
            ours["weights"] = weights
            wide = {n: t.detach().double().requires_grad_() for n, t in ours.items()}
            expected = results(wide, one_by_one(experts, wide, gated))
            for a, b in zip(
                results(ours, mixture(experts, ours, impl, gated)), expected, strict=True
            ):
                # roundings of two products, h and the sum
                assert (a - b).norm() <= 4 * bound * b.norm(), (dtype, low)


@pytest.mark.parametrize("impl", IMPLS)
def test_copies_that_are_not_there_are_not_read(impl):
    """Nor are their weights, whatever these are."""
    experts = torch.tensor(CHOICES["some elsewhere"])
    x = {
        n: t.to(DEVICE).float().requires_grad_() for n, t in leaves_of(experts, True, False).items()
    }
    there = (experts >= 0).to(DEVICE)
    garbage = x | {"weights": x["weights"].detach().where(there, torch.nan).requires_grad_()}
    found = (results(leaves, mixture(experts, leaves, impl, True)) for leaves in (x, garbage))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_gradients_are_the_same(impl):
    """The same gradients: torch 2.11 loses those of a tensor that a compiled function returns as it is."""
    experts = torch.tensor(CHOICES["some elsewhere"])
    ours = {
        n: t.to(DEVICE).float().requires_grad_() for n, t in leaves_of(experts, True, True).items()
    }
    copies = copies_of(experts)

    def collected(x):
        return collect(spread(x["x"], copies, impl).sin(), copies, impl), *mixture(
            experts, x, impl, True
        )

    compiled = torch.compile(collected, backend="aot_eager")
    assert all(map(torch.equal, results(ours, compiled(ours)), results(ours, collected(ours))))


def test_copies_are_sorted_by_expert():
    copies = by_expert(torch.tensor([[2, 0], [0, -1], [1, 2]]), 3, 5)
    assert copies.slots.tolist() == [[3, 0], [1, -1], [2, 4]]
    assert copies.order.tolist() == by_slot(copies.slots, 5).order.tolist() == [1, 2, 4, 0, 5]


def test_operators_are_well_formed():
    copies = copies_of(torch.tensor(CHOICES["some elsewhere"]))
    y = drawn(len(copies.order), 8).float().to(DEVICE)
    torch.library.opcheck(kernels.collect.overload, (y, copies.slots))
    torch.library.opcheck(kernels.spread.overload, (y[:5], copies.slots, len(y)))
    weights = drawn(len(y)).float().to(DEVICE)
    torch.library.opcheck(kernels.activate.overload, (y, weights, True))
    torch.library.opcheck(kernels.activate_backward.overload, (y, weights, y, False))
