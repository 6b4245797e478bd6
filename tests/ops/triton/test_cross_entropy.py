"""The kernels of the cross-entropy against the same in float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.inputs import DEVICE
from titan_linear.ops.cross_entropy import ELSEWHERE, IGNORE
from titan_linear.ops.triton.cross_entropy import row_logsumexp, softmax_gradient


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    """Of all sizes: the largest of a row would overflow without its maximum taken off."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    return x * torch.logspace(-2, 2, rows).unsqueeze(1)


@pytest.mark.parametrize("vocab", [11, 8192, 20000])
def test_values(vocab):
    x = logits_of(5, vocab)
    target = torch.tensor([0, vocab - 1, ELSEWHERE, IGNORE, vocab // 2])
    lse = x.double().logsumexp(-1)
    want = (x.double() - lse.unsqueeze(1)).exp()
    want[target >= 0, target[target >= 0]] -= 1
    want[target == IGNORE] = 0
    got = row_logsumexp(x.to(DEVICE))
    torch.testing.assert_close(got.cpu().double(), lse, rtol=1e-6, atol=1e-6)
    rounding = 2**-8 if DEVICE == "cuda" else 2**-7  # the interpreter cuts bits off
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, rounding)):  # exp turns 1e-7 of 400 into 4e-5
        d = softmax_gradient(x.to(DEVICE), got, target.to(DEVICE), dtype)
        torch.testing.assert_close(d.cpu().double(), want, rtol=bound, atol=1e-6)
        assert not d[3].any()


def test_what_is_not_finite_shows():
    x = logits_of(4, 100)
    x[0, 7], x[1, 99], x[2] = float("nan"), float("inf"), float("-inf")
    lse = row_logsumexp(x.to(DEVICE)).cpu()
    assert lse[0].isnan() and not lse[1:3].isfinite().any() and lse[3].isfinite()


def test_operators_are_well_formed():
    x, target = logits_of(3, 40).to(DEVICE), torch.tensor([1, IGNORE, 39], device=DEVICE)
    torch.library.opcheck(row_logsumexp.overload, (x,))
    torch.library.opcheck(softmax_gradient.overload, (x, row_logsumexp(x), target, torch.bfloat16))
