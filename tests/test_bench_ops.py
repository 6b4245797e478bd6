"""The cases of the bench of ops, on the CPU; it times them on GPUs."""

from __future__ import annotations

import argparse

import pytest
import torch

from titan_linear.ops.triton.configs import config
from tools.bench_ops import OPS, Case, can_run, candidates, head_counts


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("raw", [False, True])
def test_the_ops_take_their_cases(op, raw, monkeypatch):
    """Every input has a gradient, with grouped heads too."""
    case = Case(op, 40, 2, 4, 16, 32, raw)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    y = OPS[op].fn(**x, **case.options, cu_seqlens=torch.tensor([0, 13, 40], dtype=torch.int32))[0]
    assert y.shape == ((1, 40, 4 * 16) if op == "conv" else (1, 40, 4, 32))
    grads = torch.autograd.grad(y, list(x.values()), torch.ones_like(y))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    if op in ("kda", "gdn"):
        assert x["g"].dtype == (torch.bfloat16 if raw else torch.float32)


def test_which_peers_can_run_a_case():
    equal, grouped = Case("kda", 64, 16, 16, 128, 128), Case("kda", 64, 16, 64, 128, 128)
    assert (
        can_run("cuDNN", equal) and not can_run("cuDNN", grouped) and can_run("FlashQLA", grouped)
    )
    other = Case("gdn", 64, 16, 16, 96, 192), Case("gdn", 64, 16, 16, 128, 128, raw=True)
    for case in other:
        assert can_run("FLA", case) and not can_run("FlashQLA", case) and not can_run("cuDNN", case)


def test_candidates_have_the_place_of_the_shipped_one():
    """Only while they are timed, only for these dims, and only for this kernel."""
    x = torch.empty(1, dtype=torch.bfloat16)
    before = {
        dim: (config("gdn scan", x, dim), config("gdn reverse", x, dim)) for dim in (128, 256)
    }
    tried = candidates(Case("gdn", 64, 1, 1, 64, 128), "gdn scan", "BV=16,8", "num_warps=2,1")
    for chosen in ((16, 2), (16, 1), (8, 2), (8, 1)):
        changes = dict(zip(("BV", "num_warps"), chosen))
        assert next(tried) == (str(changes), OPS["gdn"].fn)
        assert config("gdn scan", x, 128) == before[128][0] | changes
        assert (
            config("gdn reverse", x, 128) == before[128][1]
            and config("gdn scan", x, 256) == before[256][0]
        )
    assert next(tried, None) is None and config("gdn scan", x, 128) == before[128][0]


def test_heads():
    assert (head_counts("64"), head_counts("16/32")) == ((64, 64), (16, 32))
    for text in ("0", "a", "16/24", "/4"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number of heads"):
            head_counts(text)
