"""KDA's kernels against the token recurrence in fp64: in the interpreter in fp32, on a GPU in bf16 too.

fp32 bounds: 1e-5 is a hundred roundings, and the recurrence's own condition is near 1 here. The gradients of A_log and
dt_bias sum terms of both signs: in fp32 their errors are relative to the sum of the terms' absolute values.
bf16 bounds are the ones this project promises, relative to the gradients themselves.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.ops.triton.kda_cases import (
    NAMES,
    make_inputs,
    reference_boundary,
    run_boundary,
    run_kernels,
    run_reference,
)
from tests.ops.triton.kda_reference import error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = dict.fromkeys(NAMES, 1e-5)
BF16 = dict.fromkeys(("o", "ht", "dq", "dk", "dv", "dh0"), 5e-3) | dict.fromkeys(
    ("dg", "dbeta", "dA_log", "ddt_bias"), 1e-2
)
PACKED = [0, 1, 16, 79, 143]  # documents of 1, 15, 63 and 64 tokens

# T, H, HV, K, V, cu_seqlens, options
CASES = {
    "packed": (143, 1, 1, 32, 32, PACKED, {"safe": True}),
    "65 tokens, K > V": (65, 1, 1, 64, 32, [0, 65], {"safe": True}),
    "grouped heads, K < V": (70, 1, 2, 32, 64, [0, 3, 70], {"safe": True}),
    "at the safe bound": (130, 1, 1, 32, 32, [0, 130], {"safe": True, "fast": 5.0}),
    "slow": (130, 1, 1, 32, 32, [0, 130], {"safe": True, "fast": 1e-3}),
    "any gate": (130, 1, 1, 32, 32, [0, 1, 130], {"fast": 20.0}),
    "softplus": (70, 1, 2, 32, 32, [0, 70], {"gate": "softplus", "norm": True}),
    "bounded": (70, 2, 2, 64, 32, [0, 5, 70], {"gate": "bounded", "norm": True, "lower_bound": -5.0, "safe": True}),
    "no states": (70, 1, 1, 32, 32, [0, 70], {"safe": True, "state": False}),
}
WIDE = {
    f"K={K} V={V} {'safe' if safe else 'any gate'}": (700, 2, 2, K, V, [0, 1, 130, 700], {"safe": safe, "fast": fast})
    for K, V in [(128, 128), (64, 64), (32, 32), (64, 128), (128, 64), (128, 256), (256, 256)]
    for safe, fast in [(True, 5.0), (True, 1e-3), (False, 20.0)]
}


def compare(case, dtype: torch.dtype, bounds: dict[str, float], seed: int = 0) -> None:
    T, H, HV, K, V, cu, options = case
    options = dict(options)
    made = {name: options.pop(name) for name in ("fast", "state") if name in options}
    x = make_inputs(
        T, H, HV, K, V, len(cu) - 1, dtype=dtype, gate=options.get("gate", "none"), seed=seed, device=DEVICE, **made
    )
    ours, reference = run_kernels(x, cu, **options), run_reference(x, cu, **options)
    sizes = reference if dtype == torch.float32 else {}
    errors = {n: error(ours[n], reference[n], sizes.get(f"size of {n}")) for n in NAMES if n in reference}
    assert not {name: e for name, e in errors.items() if not e <= bounds[name]}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_recurrence_in_fp32(name):
    compare(CASES[name], torch.float32, FP32)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES | WIDE)
def test_matches_the_recurrence_in_half_precision(name, dtype):
    compare((CASES | WIDE)[name], dtype, BF16)


@pytest.mark.cuda
def test_two_runs_are_bitwise_equal():
    x = make_inputs(700, 2, 2, 128, 128, 2, dtype=torch.bfloat16, device=DEVICE)
    first, second = (run_kernels(x, [0, 130, 700], safe=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_element_is_written():
    x = make_inputs(143, 1, 2, 32, 32, 4, gate="softplus", device=DEVICE)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(4, device=DEVICE).isnan().all()
        out = run_kernels(x, PACKED, gate="softplus", norm=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in out.values())


def test_documents_share_nothing():
    x = make_inputs(143, 1, 1, 32, 32, 4, device=DEVICE)
    before = run_kernels(x, PACKED, safe=True)
    x["v"][20:30] += 1.0
    x["g"][20:30] -= 1.0  # inside the third document, tokens 16 … 78
    after = run_kernels(x, PACKED, safe=True)
    outside = torch.tensor([*range(16), *range(79, 143)], device=DEVICE)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(before[name][outside], after[name][outside]), name
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("K, V", [(32, 64), (64, 32)])
def test_boundary(K, V):
    cu, entries = [0, 70, 75, 200], [2, 0]
    x = make_inputs(200, 1, 2, K, V, 3, device=DEVICE, fast=0.05)
    ours, reference = run_boundary(x, cu, entries, safe=True), reference_boundary(x, cu, entries)
    errors = {name: error(ours[name], reference[name]) for name in reference}
    assert max(errors.values()) < 1e-5, errors


def test_custom_ops_are_well_formed():
    x = {n: t[None] for n, t in make_inputs(70, 1, 1, 32, 32, 1, device=DEVICE, state=False).items()}
    cu = torch.tensor([0, 70], dtype=torch.int32, device=DEVICE)
    entries = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    inputs, ops = (x["q"], x["k"], x["g"], x["beta"], None, None), torch.ops.titan_linear
    prepare = (*inputs, cu, 0.2, 0.0, 0, True, False)
    first, chunks, *tiles = ops.kda_prepare(*prepare)
    backward = (
        x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, cu, first, chunks, *tiles, x["do"], None, None,
        0.2, 0.0, 0, True, False,
    )  # fmt: skip
    calls = {
        ops.kda_prepare: prepare,
        ops.kda_recompute: prepare,
        ops.kda_scan: (x["v"], cu, first, *tiles, None),
        ops.kda_boundary: (x["v"], cu, first, *tiles, entries, True),
        ops.kda_boundary_bwd: (x["do"], cu, first, *tiles, entries),
        ops.kda_backward: backward,
    }
    for op, args in calls.items():
        torch.library.opcheck(op.default, args)
