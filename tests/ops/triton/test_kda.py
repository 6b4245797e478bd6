"""KDA's kernels, stage by stage, against the token recurrence in fp64: fp32, in the interpreter or on a GPU; and
bf16, beside what rounding the operands costs.

fp32 bounds: 1e-5 is a hundred roundings, and the recurrence's own condition is near 1 here. The gradients of A_log and
dt_bias sum terms of both signs: in fp32 their errors are relative to the sum of the terms' absolute values.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.ops.inputs import DEVICE
from tests.ops.triton.bfloat16 import interpret_bfloat16
from tests.ops.triton.kda_cases import (
    NAMES,
    error,
    make_inputs,
    reference_boundary,
    run_boundary,
    run_kernels,
    run_reference,
)
from tests.ops.triton.rounding import rounded_delta_rule
from tests.ops.triton.well_formed import check_stages
from titan_linear.ops.reference.delta_rule import l2norm
from titan_linear.ops.triton.kda import KDA

PACKED = [0, 1, 16, 79, 143]  # documents of 1, 15, 63 and 64 tokens

# T, H, HV, K, V, cu_seqlens, options
CASES = {
    "packed": (143, 1, 1, 32, 32, PACKED, {"safe": True}),
    "65 tokens, K > V": (65, 1, 1, 64, 32, [0, 65], {"safe": True}),
    "grouped heads, K < V": (70, 1, 2, 32, 64, [0, 3, 70], {"safe": True}),
    "at the safe bound": (130, 1, 1, 32, 32, [0, 130], {"safe": True, "fast": 5.0}),
    "slow": (130, 1, 1, 32, 32, [0, 130], {"safe": True, "fast": 1e-3}),
    "fast in one chunk": (130, 1, 1, 32, 32, [0, 130], {"fast": (1.0, 20.0, 1.0)}),
    "any gate": (130, 1, 1, 32, 32, [0, 1, 130], {"fast": 20.0}),
    "softplus": (70, 1, 2, 32, 32, [0, 70], {"gate": "softplus"}),
    "bounded": (70, 2, 2, 64, 32, [0, 5, 70], {"gate": "bounded", "lower_bound": -5.0, "safe": True}),
    "no states": (70, 1, 1, 32, 32, [0, 70], {"safe": True, "state": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_recurrence(name):
    T, H, HV, K, V, cu, options = CASES[name]
    options = dict(options)
    made = {name: options.pop(name) for name in ("fast", "state") if name in options}
    x = make_inputs(T, H, HV, K, V, len(cu) - 1, gate=options.get("gate", "none"), device=DEVICE, **made)
    ours, reference = run_kernels(x, cu, **options), run_reference(x, cu, **options)
    errors = {n: error(ours[n], reference[n], reference.get(f"size of {n}")) for n in NAMES if n in reference}
    assert not {name: e for name, e in errors.items() if not e <= 1e-5}


def test_bfloat16_costs_what_rounding_the_operands_costs(monkeypatch):
    """Keys that are alike, where it costs most (docs/kernels.md): q ~ N(1, 1), k ~ N(−50, 10), slow gates."""
    if DEVICE == "cpu":
        interpret_bfloat16(monkeypatch)
    x, cu = make_inputs(192, 1, 1, 64, 64, 1, fast=0.05, state=False), [0, 192]
    rng = torch.Generator().manual_seed(1)
    q, k = (a * torch.randn(192, 1, 64, generator=rng) + b for a, b in ((1, 1), (10, -50)))
    x |= {"q": l2norm(q), "k": l2norm(k)}
    x = {n: t.float() if n == "g" else t.bfloat16() for n, t in x.items()}
    exact = run_reference(x, cu)
    emulated = rounded_delta_rule(*(x[n] for n in ("q", "k", "v", "g", "beta", "do")), cu)
    ours = run_kernels({n: t.to(DEVICE) for n, t in x.items()}, cu, safe=True)
    errors = {n: (error(ours[n], exact[n]), error(emulated[n], exact[n])) for n in emulated}
    assert not {n: (found, cost) for n, (found, cost) in errors.items() if not found <= 1.25 * cost}


def test_every_element_is_written():
    x = make_inputs(143, 1, 2, 32, 32, 4, gate="softplus", device=DEVICE)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(4, device=DEVICE).isnan().all()
        out = run_kernels(x, PACKED, gate="softplus")
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


@pytest.mark.parametrize("indexed", [False, True])
def test_operators_are_well_formed(indexed):
    x = make_inputs(70, 1, 1, 32, 32, 1, gate="softplus", device=DEVICE)
    inputs = [x[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    check_stages(KDA, inputs, [0.2, 0.0, 1.0, 1.0, 1.0], indexed)
