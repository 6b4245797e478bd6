"""The kernels' numbers in bfloat16 on a GPU, against the chunked float64 implementation (which equals the token
recurrence to 1e-9: tests/ops/test_delta_rule.py).

Errors are ‖x − exact‖ / ‖exact‖. On random inputs and fast gates they are the ones this project promises. On inputs
that amplify any rounding, a kernel may have 1.25 times the error of `rounding.py`, which rounds the same operands.
"""

import pytest
import torch
from torch.nn.functional import normalize

from tests.ops.inputs import (
    DEVICE,
    boundaries,
    call,
    leaves,
    make_inputs,
    new_memory_of_nan,
    raw_gate_inputs,
    relative_error,
    same,
)
from tests.ops.triton import rounding
from tests.ops.triton.bfloat16 import interpret_bfloat16
from tests.ops.triton.promised import PROMISED, run, to_device
from titan_linear.ops import chunk_gated_delta_rule, chunk_kda

LENGTHS = [1, 15, 63, 64, 65, 300]
GATE = {
    "usual": ("usual", {}),
    "-5": ("safe", {"safe_gate": True}),
    "-20": ("fast", {}),
    "softplus": ("usual", {}),
    "bounded": ("usual", {"lower_bound": -5.0}),
}


def errors(op, x, **options):
    """Of Triton's results for x, which is rounded to what the kernels get."""
    torch.manual_seed(0)
    shape = x["v"].shape
    N = len(options["cu_seqlens"]) - 1
    weights = [torch.randn(shape, device="cuda").bfloat16()]
    if options.get("output_final_state"):
        weights.append(torch.randn(N, shape[2], x["q"].shape[3], shape[3], device="cuda"))
    ours = run(op, x, weights, impl="triton", **options)
    options.pop("safe_gate", None)
    exact = run(op, {n: t.double() for n, t in x.items()}, weights, impl="torch", **options)
    assert all(t.isfinite().all() for t in ours.values())
    return {n: relative_error(ours[n], exact[n]) for n in ours}


@pytest.mark.cuda
@pytest.mark.parametrize("gate", GATE)
@pytest.mark.parametrize(
    "K, V, H",
    [
        (128, 128, 4),
        (128, 128, 2),
        (64, 64, 2),
        (32, 64, 4),
        (64, 128, 4),
        (256, 256, 4),
        (128, 256, 2),
        (96, 192, 4),
        (96, 96, 2),
        (40, 72, 4),
        (8, 8, 2),
        (136, 256, 4),
        (200, 200, 2),
    ],
)
def test_errors_are_within_the_promised_bounds(op, K, V, H, gate):
    """Documents of 1 to 300 tokens and one of 4096, states in and out; every gate both ops have, at and beyond safe."""
    name, options = GATE[gate]
    if op == "gdn":
        options = {}
    lengths = [*LENGTHS, 4096]
    make = raw_gate_inputs if gate in ("softplus", "bounded") else make_inputs
    x = make(op, sum(lengths), H=H, HV=4, K=K, V=V, gate=name)
    x["initial_state"] = torch.randn(len(lengths), 4, K, V, dtype=torch.float64)
    found = errors(
        op, to_device(x), cu_seqlens=boundaries(lengths).cuda(), output_final_state=True, **options
    )
    assert not {n: e for n, e in found.items() if not e <= PROMISED[n]}


@pytest.mark.cuda
@pytest.mark.parametrize("length", LENGTHS)
def test_each_length_alone_is_within_its_bounds(op, length):
    """Each length alone, in 64 heads: no long document in whose norm its error could hide."""
    x = make_inputs(op, length, H=64, HV=64, K=128, V=128)
    x["initial_state"] = torch.randn(1, 64, 128, 128, dtype=torch.float64)
    found = errors(
        op, to_device(x), cu_seqlens=boundaries([length]).cuda(), output_final_state=True
    )
    assert not {n: e for n, e in found.items() if not e <= PROMISED[n]}


@pytest.mark.cuda
@pytest.mark.parametrize("K, V", [(64, 32), (128, 128), (256, 256), (96, 192), (128, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_within_their_bounds(op, dtype, K, V):
    """float16 has bfloat16's bounds; float32's products are exact to about 2^-21, and a chunk sums a few hundred."""
    lengths = [*LENGTHS, 1000]
    x = make_inputs(op, sum(lengths), H=2, HV=4, K=K, V=V)
    x["initial_state"] = torch.randn(len(lengths), 4, K, V, dtype=torch.float64)
    found = errors(
        op, to_device(x, dtype), cu_seqlens=boundaries(lengths).cuda(), output_final_state=True
    )
    bounds = PROMISED if dtype == torch.float16 else dict.fromkeys(PROMISED, 2e-5)
    assert not {n: e for n, e in found.items() if not e <= bounds[n]}


@pytest.mark.cuda
@pytest.mark.parametrize("gate", ["usual", "-5"])
def test_a_long_document_is_within_its_bounds(op, gate):
    T = 131072
    name, options = GATE[gate]
    x = to_device(make_inputs(op, T, H=2, HV=2, K=128, V=128, gate=name))
    found = errors(op, x, cu_seqlens=boundaries([T]).cuda(), **(options if op == "kda" else {}))
    assert not {n: e for n, e in found.items() if not e <= PROMISED[n]}


def hard_inputs(op, kind, T, K, H=4):
    """Slow decay; nearly collinear keys with β near 1; one key repeated; q and k far from zero mean; keys that are
    alike with slow gates (q ~ N(1, 1), k ~ N(−50, 10): the case of docs/kernels.md)."""
    x = make_inputs(
        op, T, H=H, HV=H, K=K, V=K, gate="slow" if kind in ("slow", "repeated") else "usual"
    )
    if kind in ("slow", "repeated"):
        x["g"] = torch.full_like(x["g"], -1e-3)
    if kind == "collinear":
        x["k"] = normalize(x["k"][:, :1] + 0.1 * x["k"], dim=-1)
        x["beta"] = 1 - 0.05 * x["beta"]
        x["g"] = 0.05 * x["g"]
    if kind == "repeated":
        x["k"] = x["k"][:, :4].repeat(1, T // 4 + 1, 1, 1)[:, :T].contiguous()
    if kind == "mean":
        x["q"], x["k"] = (normalize(x[n] + 3 * K**-0.5, dim=-1) for n in "qk")
    if kind == "alike":
        rng = torch.Generator().manual_seed(1)
        for name, spread, mean in (("q", 1, 1), ("k", 10, -50)):
            normal = torch.randn(x[name].shape, generator=rng, dtype=torch.float64)
            x[name] = normalize(spread * normal + mean, dim=-1)
        x["g"] = 0.05 * x["g"]
    return x


@pytest.mark.parametrize("kind", ["usual", "collinear"])
def test_the_rounding_reference_without_rounding(op, kind, monkeypatch):
    """It is the delta rule, forward and backward: what it is off with rounding is rounding."""
    x, cu = hard_inputs(op, kind, 150, 16), boundaries([1, 63, 86])
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    exact = run(op, x, [do], impl="torch", cu_seqlens=cu)
    arguments = [x[n][0] for n in ("q", "k", "v", "g", "beta")] + [do[0]]
    assert (
        1e-3
        < relative_error(
            rounding.rounded_delta_rule(*arguments, cu.tolist())["o"][None], exact["o"]
        )
        < 0.1
    )
    for name in ("rounded", "stored"):
        monkeypatch.setattr(rounding, name, lambda t: t)
    plain = rounding.rounded_delta_rule(*arguments, cu.tolist())
    assert plain.keys() == exact.keys()
    assert max(relative_error(plain[n][None], exact[n]) for n in exact) < 1e-10


def check_hard_case(x, lengths, **options):
    x, cu = to_device(x), boundaries(lengths)
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(5)).to(
        DEVICE, torch.bfloat16
    )
    op = "kda" if x["g"].dim() == 4 else "gdn"
    exact = run(op, {n: t.double() for n, t in x.items()}, [do], impl="torch", cu_seqlens=cu)
    reference = rounding.rounded_delta_rule(
        *(x[n][0] for n in ("q", "k", "v", "g", "beta")), do[0], cu.tolist()
    )
    ours = run(op, x, [do], impl="triton", cu_seqlens=cu.to(DEVICE), **options)
    found = {
        n: (relative_error(ours[n], exact[n]), relative_error(reference[n][None], exact[n]))
        for n in exact
    }
    assert not {
        n: (error, cost) for n, (error, cost) in found.items() if not error <= 1.25 * cost
    }, options


@pytest.mark.cuda
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("kind", ["slow", "collinear", "repeated", "mean", "alike"])
def test_hard_inputs_are_within_their_bounds(op, kind, K):
    lengths = [1, 15, 63, 64, 65, 1000]
    for options in [{}, {"safe_gate": True}][: 2 if op == "kda" else 1]:
        check_hard_case(hard_inputs(op, kind, sum(lengths), K), lengths, **options)


def test_keys_that_are_alike(op, monkeypatch):
    """Where rounding costs most, in the interpreter too."""
    if DEVICE == "cpu":
        interpret_bfloat16(monkeypatch)
    check_hard_case(
        hard_inputs(op, "alike", 192, 64, H=1),
        [192],
        **({"safe_gate": True} if op == "kda" else {}),
    )


@pytest.mark.cuda
def test_runs_are_bitwise_equal_and_write_everything(op):
    lengths = [*LENGTHS, 1000]
    x = to_device(raw_gate_inputs(op, sum(lengths), H=2, HV=4, K=128, V=128))
    x["initial_state"] = torch.randn(len(lengths), 4, 128, 128, device="cuda")
    cu = boundaries(lengths).to("cuda", torch.int32)
    weights = [torch.randn(x["v"].shape, device="cuda"), torch.randn_like(x["initial_state"])]
    with new_memory_of_nan():
        first, second = (
            run(op, x, weights, impl="triton", cu_seqlens=cu, output_final_state=True)
            for _ in range(2)
        )
    assert all(t.isfinite().all() for t in first.values())
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.cuda
def test_nothing_waits_for_the_device(op):
    x = leaves(to_device(raw_gate_inputs(op, 200, H=2, HV=4, K=64, V=64)))
    cu = boundaries([70, 130]).to("cuda", torch.int32)
    fn = chunk_kda if op == "kda" else chunk_gated_delta_rule
    flags = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            o, final = fn(**x, cu_seqlens=cu, output_final_state=True, **flags)
            torch.autograd.grad(
                [o, final], list(x.values()), [torch.ones_like(o), torch.ones_like(final)]
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_more_elements_than_32_bits_count(op):
    """T·H·K > 2³¹: the last document's outputs and gradients are those it has alone, bit by bit."""
    H, K, short = 64, 128, 1000
    lengths = [2**31 // (H * K) - 300, short]
    T = sum(lengths)
    assert T * H * K > 2**31
    x = {n: torch.randn(1, T, H, K, device="cuda", dtype=torch.bfloat16) for n in "qkv"}
    x |= {n: normalize(x[n], dim=-1) for n in "qk"}
    x["g"] = (
        -torch.rand(1, T, H, K, device="cuda").bfloat16()
        if op == "kda"
        else -torch.rand(1, T, H, device="cuda")
    )
    x["beta"] = torch.rand(1, T, H, device="cuda", dtype=torch.bfloat16)
    do = torch.randn(1, T, H, K, device="cuda", dtype=torch.bfloat16)
    flags = {"safe_gate": True} if op == "kda" else {}

    def results(x, do, lengths):
        x = leaves(x)
        o = call(op, x, cu_seqlens=boundaries(lengths).cuda(), impl="triton", **flags)[0]
        return [
            t[:, -short:].clone()
            for t in (o.detach(), *torch.autograd.grad(o, list(x.values()), do))
        ]

    alone = results(
        {n: t[:, -short:].contiguous() for n, t in x.items()}, do[:, -short:].contiguous(), [short]
    )
    assert same(alone, results(x, do, lengths))
