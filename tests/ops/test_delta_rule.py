"""What chunked KDA and GDN have of their own; what all recurrences share is in test_recurrences.py."""

import math

import pytest
import torch

from tests.ops.inputs import (
    boundaries,
    call,
    compare,
    device_of,
    gradients,
    leaves,
    make_inputs,
    oracle,
    raw_gate_inputs,
    relative_error,
    same,
)
from tests.refusals import refused
from titan_linear.ops.reference.delta_rule import l2norm

LENGTHS = [1, 15, 63, 64, 65, 2, 130]


@pytest.mark.parametrize("gate", ["slow", "safe"])
def test_safe_gate(gate):
    compare("kda", make_inputs("kda", sum(LENGTHS), gate=gate), boundaries(LENGTHS), safe_gate=True)


@pytest.mark.parametrize("op, lower_bound", [("kda", None), ("kda", -5.0), ("gdn", None)])
def test_gate_and_norm_in_kernel(op, lower_bound):
    bounded = {} if lower_bound is None else {"lower_bound": lower_bound}
    compare(op, raw_gate_inputs(op, sum(LENGTHS)), boundaries(LENGTHS), **bounded)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_second_backward_through_what_was_kept(op, impl, short_segments):
    """T in segments in Triton, whose gradients of states are those of one backward. KDA's tiles are computed again by
    products of another size, which may round otherwise: 64 terms each, eight in a chain, over three segments."""
    x = make_inputs(op, 192, H=1, HV=1, K=16, V=16, gate="slow")
    x = leaves({name: t.float().to(device_of(impl)) for name, t in x.items()})
    first, second = (torch.randn_like(x["v"]) for _ in range(2))
    o, again = (call(op, x, disable_recompute=True, impl=impl)[0] for _ in range(2))
    torch.autograd.grad(o, list(x.values()), first, retain_graph=True)
    got, want = (torch.autograd.grad(y, list(x.values()), second) for y in (o, again))
    assert all(relative_error(a, b) < 3 * 8 * 64 * 2**-24 for a, b in zip(got, want, strict=True))


def test_a_token_has_the_dtype_of_its_inputs(op):
    """Decoding: a step of the recurrence."""
    x = {name: t.bfloat16() for name, t in make_inputs(op, 1).items()}
    (o, final), (want, _) = (
        call(op, x, output_final_state=True),
        oracle(op, {n: t.double() for n, t in x.items()}),
    )
    assert (
        o.dtype == torch.bfloat16
        and final.dtype == torch.float32
        and relative_error(o, want) < 2**-8
    )


@pytest.mark.parametrize("g", [-1e4, -1e6, -torch.inf])
def test_a_token_that_forgets_all(op, g):
    """Gates of the tokens behind it keep their digits, in float32 too."""
    x = make_inputs(op, 64, gate="slow")
    x["g"][:, 3] = g
    want = oracle(op, x)[0]
    assert relative_error(call(op, x)[0], want) < 1e-12
    assert relative_error(call(op, {n: t.float() for n, t in x.items()})[0], want) < 1e-5


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_tokens_that_forget_all(op, impl):
    """Sums of their gates have 24 bits: a token behind n of them is off by n times the last bit of 126, in base 2."""
    x = {name: t.float() for name, t in make_inputs(op, 64, K=32, V=32, gate="slow").items()}
    x["g"][:, 3:59] = -torch.inf
    want = oracle(op, {n: t.double() for n, t in x.items()})[0]
    got = call(op, {n: t.to(device_of(impl)) for n, t in x.items()}, impl=impl)[0]
    assert relative_error(got.cpu(), want) < 56 * 126 * 2**-23 * math.log(2)


def test_a_decoded_token_under_autocast(op):
    x = {name: t.float() for name, t in make_inputs(op, 1).items()}
    want = call(op, x, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = call(op, x, output_final_state=True)
    assert same(got, want)


def test_autocast_is_not_ours(op):
    x = leaves({name: t.float() for name, t in make_inputs(op, 70).items()})
    want = gradients([call(op, x)[0]], x)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients([call(op, x)[0]], x)
    assert same(got, want)


def test_hard_cases_stay_finite(op):
    """Nearly equal keys with β = 1 and slow decay: where inverses by series break."""
    x = make_inputs(op, 128, gate="slow")
    x["k"] = l2norm(x["k"][:, :1] + 1e-3 * x["k"])
    compare(op, x | {"beta": torch.ones_like(x["beta"])})


def test_a_scale_on_the_device_is_a_number(op):
    x = {name: t.float() for name, t in make_inputs(op, 8).items()}
    for impl in ("torch", "triton"):
        on = {name: t.to(device_of(impl)) for name, t in x.items()}
        scale = torch.tensor(0.25, device=on["q"].device)
        assert torch.equal(
            call(op, on, impl=impl, scale=scale)[0], call(op, on, impl=impl, scale=0.25)[0]
        )


def test_what_does_not_fit_is_refused():
    x, raw = make_inputs("kda", 8), raw_gate_inputs("kda", 8)
    state = {"initial_state": torch.zeros(1, 4, 16, 24)}
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        given = raw if name in raw.keys() - x.keys() else x | state
        with refused(f"{name} is torch.int64; give a float dtype"):
            call("kda", given | {name: given[name].long()})
    with refused("^v .* a multiple of H"):
        call("kda", x | {"v": x["v"][:, :, :3]})
    with refused("^lower_bound = "):
        call("kda", x, lower_bound=-5.0)
    with refused("^initial_state .* must be"):
        call("kda", x, initial_state=torch.zeros(2, 4, 16, 24))
    with refused("B must be 1"):
        call("kda", make_inputs("kda", 8, B=2), cu_seqlens=torch.tensor([0, 8]))
    with refused("^impl = "):
        call("kda", x, impl="cuda")
