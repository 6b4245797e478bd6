"""What chunk_ssd and chunk_simple_gla have of their own; what all recurrences share is in test_recurrences.py."""

import re

import pytest
import torch

from tests.ops.inputs import (
    FORWARD,
    GRADIENTS,
    STATES,
    boundaries,
    call,
    compare,
    decaying_inputs,
    oracle,
    relative_error,
)
from tests.refusals import refused
from titan_linear.ops import chunk_simple_gla, chunk_ssd

LENGTHS = [1, 15, 63, 64, 65, 2, 130]
OPS = pytest.mark.parametrize("op", ["ssd", "gla"])


@OPS
@pytest.mark.parametrize(
    "dims", [dict(G=1, heads=8, N=256), dict(G=2, P=80), dict(G=8, heads=8, N=64)], ids=str
)
def test_published_dims(op, dims):
    compare(op, decaying_inputs(op, 130, **dims), boundaries([70, 60]))


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (1e-3, 0.1), (0.2, 0.7)])
@pytest.mark.parametrize("dt_softplus", [True, False])
@pytest.mark.parametrize("without", [(), ("D",), ("dt_bias",), ("D", "dt_bias")])
def test_time_steps(dt_limit, dt_softplus, without):
    x = decaying_inputs("ssd", 130)
    x = {name: t for name, t in x.items() if name not in without}
    compare("ssd", x, boundaries([70, 60]), dt_limit=dt_limit, dt_softplus=dt_softplus)


def test_time_steps_below_those_of_initial_weights():
    """They are not raised to 1e-3 unless dt_limit says so; a gated norm would hide in its output that they were."""
    x = decaying_inputs("ssd", 130, bias=-12.0)
    assert torch.nn.functional.softplus(x["dt"] + x["dt_bias"]).max() < 1e-3
    compare("ssd", x)
    raised = call("ssd", x, return_final_states=True, dt_limit=(1e-3, float("inf")))[1]
    assert relative_error(raised, call("ssd", x, return_final_states=True)[1]) > 1


def test_a_factor_for_each_channel():
    compare("ssd", decaying_inputs("ssd", 70) | {"D": torch.randn(4, 24, dtype=torch.float64)})


def test_a_decay_that_is_the_same_for_all_tokens():
    x = decaying_inputs("gla", sum(LENGTHS), B=1)
    gamma = torch.linspace(-1, -0.01, 4, dtype=torch.float64).requires_grad_()
    x.pop("g")
    o = call("gla", x, g_gamma=gamma, cu_seqlens=boundaries(LENGTHS))[0]
    g = gamma.expand(1, sum(LENGTHS), 4)
    want = oracle("gla", x | {"g": g}, cu_seqlens=boundaries(LENGTHS))[0]
    assert relative_error(o, want) < FORWARD
    do = torch.randn_like(o)
    got, want = (torch.autograd.grad(y, gamma, do)[0] for y in (o, want))
    assert relative_error(got, want) < GRADIENTS


@OPS
def test_what_does_not_fit_is_refused(op):
    x = decaying_inputs(op, 8)
    for name in x:
        with refused(f"^{name} is torch.int64; give a float dtype"):
            call(op, x | {name: x[name].long()})
    with refused(f"^{STATES[op][0]} .* must be"):
        call(op, x, **{STATES[op][0]: torch.zeros(2, 4, 5, 5)})
    with refused("B must be 1"):
        call(op, decaying_inputs(op, 8, B=2), cu_seqlens=torch.tensor([0, 8]))


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"x": torch.zeros(1, 8, 3, 24)},
            "B (1, 8, 2, 16) and C (1, 8, 2, 16) must both be [b, T, G, N] = [1, 8, a div",
        ),
        ({"dt": torch.zeros(1, 8, 3)}, "dt (1, 8, 3) must be [b, T, heads] = [1, 8, 4]"),
        ({"A": torch.zeros(3)}, "A (3,) must be [heads] = [4]"),
        ({"D": torch.zeros(4, 3)}, "D (4, 3) must be [heads] = [4] or [heads, P] = [4, 24]"),
        (
            {"dt_limit": (0.1, 0.0)},
            "dt_limit = (0.1, 0.0) must be (the lower, the upper) limit of dt",
        ),
    ],
)
def test_what_does_not_fit_chunk_ssd(changed, message):
    with refused(re.escape(message)):
        chunk_ssd(**decaying_inputs("ssd", 8) | changed)


def test_one_kind_of_decay():
    x = decaying_inputs("gla", 8)
    for given in (x | {"g_gamma": torch.zeros(4)}, {n: x[n] for n in "qkv"}):
        with refused("give one of g"):
            chunk_simple_gla(**given)
