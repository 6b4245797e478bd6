"""The cases of the bench of ops, on the CPU; it times them on GPUs."""

from __future__ import annotations

import argparse

import pytest
import torch

from tools.bench_ops import OPS, Case, head_counts


@pytest.mark.parametrize("op", OPS)
def test_the_ops_take_their_cases(op):
    """Every input has a gradient, with grouped heads too."""
    case = Case(op, 40, 2, 4, 16, 32)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    y = case.function(cu_seqlens=torch.tensor([0, 13, 40], dtype=torch.int32))(**x)
    assert y.shape == ((1, 40, 4 * 16) if op == "conv" else (1, 40, 4, 32))
    grads = torch.autograd.grad(y, list(x.values()), torch.ones_like(y))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    if op in ("kda", "gdn"):
        assert x["g"].dtype == torch.float32


def test_heads_are_read_as_one_number_or_two():
    assert (head_counts("64"), head_counts("16/32")) == ((64, 64), (16, 32))
    for text in ("0", "a", "16/24", "/4"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number of heads"):
            head_counts(text)
