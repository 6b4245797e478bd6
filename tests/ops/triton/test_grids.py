"""Grids of launches: whatever grows with tokens, documents or heads is in the first dimension, the only one of CUDA's
that may be larger than 65,535."""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.inputs import DEVICE
from tests.ops.triton.ahead_of_time import OnTheChip
from titan_linear.ops.runtime.options import (
    DecayInputs,
    DecayOptions,
    DeltaRuleOptions,
    DPLRInputs,
    DPLROptions,
    Inputs,
)
from titan_linear.ops.triton import tiles
from titan_linear.ops.triton.chunks import chunks_of
from titan_linear.ops.triton.conv1d import conv1d
from titan_linear.ops.triton.fold import fold, fold_entries, fold_entries_back, fold_segments
from titan_linear.ops.triton.gdn import GDN
from titan_linear.ops.triton.kda import KDA
from titan_linear.ops.triton.rwkv7 import RWKV7
from titan_linear.ops.triton.ssd import SSD
from titan_linear.ops.triton.stages import TritonRule

DOCUMENTS, TOKENS, HEADS = 70_000, 5_000_000, 64
SEVERAL = 65_535  # programs, at most, in the second and third dimension


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def grids(monkeypatch):
    """Grids by kernel; nothing runs, and tensors on the meta device are as on a GPU."""
    noted = {}

    def launch(self, grid, *args, **kwargs):
        noted.setdefault(f"{self.jitted.fn.__module__}.{self.__name__}", []).append(grid)

    monkeypatch.setattr(tiles.Kernel, "_launch", launch)
    with OnTheChip():
        yield noted


def rule_of(name, dtype):
    """Stages, inputs and options."""
    keys, values = (meta(TOKENS, HEADS, dim, dtype=dtype) for dim in (128, 64))
    narrow = values if dtype == torch.bfloat16 else values[..., :32]
    numbers = meta(TOKENS, HEADS, dtype=torch.float32)
    delta_rule = Inputs(keys, keys, keys, keys.float(), numbers)
    shared = keys[:, : HEADS // 2]
    decaying = DecayInputs(shared, shared, values, numbers)
    return {
        "kda": (KDA, delta_rule, DeltaRuleOptions(1.0)),
        "kda, safe": (KDA, delta_rule, DeltaRuleOptions(1.0, safe_gate=True)),
        "gdn": (GDN, delta_rule._replace(g=numbers), DeltaRuleOptions(1.0)),
        "rwkv7": (RWKV7, DPLRInputs(*[narrow] * 5, narrow.float()), DPLROptions(1.0)),
        "ssd": (SSD, decaying, DecayOptions(1.0)),
    }[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["Gluon", "Triton"])
@pytest.mark.parametrize("rule", ["kda", "kda, safe", "gdn", "rwkv7", "ssd"])
def test_recurrences_take_many_documents(grids, rule, dtype):
    """All stages, of all entries and of listed ones. In bfloat16 with Hopper's own kernels where there are any."""
    stages, inputs, options = rule_of(rule, dtype)
    cu_seqlens = meta(DOCUMENTS + 1, dtype=torch.int32)
    chunks = chunks_of(cu_seqlens, TOKENS)
    listed = SimpleNamespace(entries=meta(DOCUMENTS, dtype=torch.int32), wanted=None)
    forward = TritonRule(stages, inputs, options, chunks, ())
    forward.forward(None, True)
    forward.boundary(listed)
    forward.boundary_backward(inputs.v, listed)
    _, _, *kept = forward.kept
    TritonRule(stages, inputs, options, chunks, kept).backward(inputs.v, None, None, False)
    assert len(grids) >= 5
    assert any("hopper" in name for name in grids) == (dtype == torch.bfloat16)
    assert not {name: grid for name, made in grids.items() for grid in made if len(grid) > 1}


def test_the_rest_takes_many_documents(grids):
    """Folds of segments and of chains, and the convolution's last states."""
    cu_seqlens = meta(DOCUMENTS + 1, dtype=torch.int32)
    S_ext, M = (meta(DOCUMENTS, HEADS, 64, 64, dtype=torch.float32) for _ in range(2))
    links = meta(DOCUMENTS, dtype=torch.int32)
    fold(S_ext, M, cu_seqlens, links, links, False)
    fold_segments(S_ext, M, None, None, cu_seqlens, None, False)
    fold_entries(S_ext, M, cu_seqlens, links, None, False)
    fold_entries_back(S_ext, M, cu_seqlens, links)
    x, chunks = meta(TOKENS, 512), chunks_of(cu_seqlens, TOKENS, 256)
    conv1d(
        x, meta(512, 4), None, None, None, cu_seqlens, chunks.chunk_index, [512], True, None, True
    )
    assert len(grids) == 6
    assert not {name: grid for name, made in grids.items() for grid in made if len(grid) > 1}


@pytest.mark.parametrize("grid", [(2**31,), (1, SEVERAL + 1), (1, 1, SEVERAL + 1)])
def test_grids_beyond_the_limits_are_not_launched(grid):
    x = torch.ones(1, device=DEVICE)
    with pytest.raises(AssertionError, match="sum_groups_kernel: the grid"):
        tiles.sum_groups_kernel[grid](x, x, 1, R=1, K=1, B=16)
