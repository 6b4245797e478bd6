"""The kernels of the cross-entropy against the same in float64."""

import pytest
import torch

from tests.ops.inputs import DEVICE
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops.cross_entropy import ELSEWHERE, IGNORE, ChunkedLogits, cross_entropy
from titan_linear.ops.exchange.collectives import Ranks
from titan_linear.ops.triton.cross_entropy import logits_gradient, row_statistics


def logits_of(rows, vocab):
    """Of all sizes: the largest of a row would overflow without its maximum taken off."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    return x * torch.logspace(-2, 2, rows).unsqueeze(1)


@pytest.mark.parametrize("vocab", [11, 8192, 20000])
@pytest.mark.parametrize("more", [False, True])
def test_values(vocab, more):
    x = logits_of(5, vocab)
    target = torch.tensor([0, vocab - 1, ELSEWHERE, IGNORE, vocab // 2])
    a, b, c = (
        torch.tensor(values)
        for values in ([1, 0.5, 1, 3, 1e6], [0.25, 0, 1, 4, 2], [-1.0, 2, 7, 5, -1e6])
    )
    statistics = row_statistics(x.to(DEVICE), more)
    exact = (
        x.double().logsumexp(-1),
        x.double().mean(-1),
        (x.double().softmax(-1) * x.double()).sum(-1),
    )
    torch.testing.assert_close(
        statistics.cpu().double(), torch.stack(exact[: 3 if more else 1]), rtol=2e-6, atol=1e-5
    )
    lse = statistics[0]
    want = a.unsqueeze(1) * (x.double() - exact[0].unsqueeze(1)).exp()
    want[target >= 0, target[target >= 0]] += c[target >= 0]
    want += more * b.unsqueeze(1)
    want[target == IGNORE] = 0
    rounding = 2**-8 if DEVICE == "cuda" else 2**-7  # the interpreter cuts bits off
    # exp turns 1e-7 of 400 into 4e-5
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, rounding)):
        more_of = b.to(DEVICE) if more else None
        logits = x.to(DEVICE, copy=True)
        d = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
        logits_gradient(d, logits, lse, target.to(DEVICE), a.to(DEVICE), more_of, c.to(DEVICE))
        torch.testing.assert_close(d.cpu().double(), want, rtol=bound, atol=1e-6)
        assert not d[3].any()


def test_what_is_not_finite_shows():
    x = logits_of(4, 100)
    x[0, 7], x[1, 99], x[2] = float("nan"), float("inf"), float("-inf")
    lse = row_statistics(x.to(DEVICE), False)[0].cpu()
    assert lse[0].isnan() and not lse[1:3].isfinite().any() and lse[3].isfinite()


def test_operators_are_well_formed():
    x, target = logits_of(3, 40).to(DEVICE), torch.tensor([1, IGNORE, 39], device=DEVICE)
    torch.library.opcheck(row_statistics.overload, (x, True))
    lse = row_statistics(x, False)[0]
    d = torch.empty_like(x, dtype=torch.bfloat16)
    torch.library.opcheck(logits_gradient.overload, (d, x, lse, target, lse, None, lse))


def test_what_is_without_a_label_has_no_gradient_in_any_part_of_the_vocabulary():
    """Though the derivative of its term is not a number."""
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(12, 8)
    labels, factors = torch.tensor([1, IGNORE]), torch.tensor([1, torch.inf])

    def on_rank(group):
        own = weight.chunk(2)[group.rank()]
        head = ChunkedLogits(x, own, 2, Ranks(group.group_name, 2, group.rank()), impl="triton")
        loss = head.sum(labels, lambda rows, tokens: factors[tokens] * cross_entropy(rows, tokens))
        return torch.autograd.grad(loss, x)[0]

    for dx in run_ranks(on_rank, 2):
        assert dx[0].all() and not dx[1].any()


def test_several_ids_of_a_token():
    """Beside autograd in float64, where some tokens have no label."""
    generator = torch.Generator().manual_seed(0)
    x, weight, factors = (
        torch.randn(n, m, generator=generator) for n, m in ((5, 8), (12, 8), (5, 3))
    )
    ids = torch.tensor([[3, 0, 7], [IGNORE, 1, 2], [4, 5, 4], [IGNORE, 3, 3], [0, 11, 6]])
    labelled = ids[:, 0] != IGNORE

    def gradients(dtype, device, loss):
        leaves = [x.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_()]
        return [grad.cpu().double() for grad in torch.autograd.grad(loss(*leaves), leaves)]

    def exact(x, weight):
        picked = (x @ weight.T).log_softmax(1).gather(1, ids.clamp(min=0))
        return (picked.exp() * factors)[labelled].sum()

    def chunked(x, weight):
        head = ChunkedLogits(x, weight, 2, impl="triton")
        of = factors.to(x.device)
        return head.sum(
            ids.to(x.device), lambda rows, tokens: (rows.logprobs.exp() * of[tokens]).sum(1)
        )

    for got, want in zip(
        gradients(torch.float32, DEVICE, chunked), gradients(torch.float64, "cpu", exact)
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
