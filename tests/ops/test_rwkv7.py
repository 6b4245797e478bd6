"""What chunk_rwkv7 has of its own; test_recurrences.py has what all recurrences share."""

import math
import re

import pytest
import torch

from tests.ops.inputs import call, compare, rwkv7_inputs
from tests.refusals import refused
from titan_linear.ops.reference.delta_rule import l2norm


def test_reads_that_a_neumann_series_would_not_sum():
    """Nearly the same vector is removed wholly at each token, with hardly any decay."""
    x = rwkv7_inputs(128, gate="slow")
    removed = l2norm(x["a"][:, :1] + 1e-3 * x["k"])
    compare("rwkv7", x | {"a": -removed, "b": removed})


def test_transitions_that_are_no_contractions():
    """The product of RWKV-7's transitions may have a norm above 1: what it takes from channels differs among them."""
    x = rwkv7_inputs(64, H=1, K=4, V=4, gate="slow")
    x["b"] = x["b"] * torch.tensor([1.0, 0.05, 1.0, 0.05])
    eye = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4)
    silent = x | {"v": torch.zeros_like(x["v"])}
    norms = []
    for T in range(1, 64):
        part = {name: t[:, :T] for name, t in silent.items()}
        norms.append(
            torch.linalg.matrix_norm(
                call("rwkv7", part, initial_state=eye, output_final_state=True)[1], 2
            ).max()
        )
    assert max(norms) > 1
    compare("rwkv7", x)


def test_promises():
    """Of FLA's layer; they change nothing. float32 rounds to a decay below the bound."""
    x = rwkv7_inputs(130)
    x["w"] = 0.6 * x["w"]
    bound = -0.6065306597126334
    promised = {"safe_gate": True, "lower_bound": bound, "chunk_size": 64}
    for found, right in zip(
        call("rwkv7", x, output_final_state=True, **promised),
        call("rwkv7", x, output_final_state=True),
        strict=True,
    ):
        assert torch.equal(found, right)
    assert call("rwkv7", x)[1] is None
    saturated = {name: t.float() for name, t in x.items()}
    saturated["w"] = torch.full_like(saturated["w"], bound)
    call("rwkv7", saturated, **promised)


@pytest.mark.parametrize("T", [1, 130])
def test_raw_gates_of_rwkv7(T):
    """By a step and by chunks."""
    x = rwkv7_inputs(T)
    raw = torch.linspace(-9, 9, T * 32, dtype=torch.float64).view(1, T, 2, 16)
    for found, right in zip(
        call("rwkv7", x | {"w": raw}, use_gate_in_kernel=True),
        call("rwkv7", x | {"w": -math.exp(-0.5) * raw.sigmoid()}),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"k": torch.zeros(1, 8, 2, 3)}, "q (1, 8, 2, 16) and k (1, 8, 2, 3) must both be"),
        ({"v": torch.zeros(1, 8, 4, 3)}, "v (1, 8, 4, 3) must be [B, T, H, V] with the H = 2"),
        ({"b": torch.zeros(1, 8, 2, 3)}, "b (1, 8, 2, 3) must be [B, T, H, K] = [1, 8, 2, 16]"),
        ({"a": torch.zeros(1, 8, 2, 16).long()}, "a is torch.int64; give a float dtype"),
        (
            {"w": torch.full((1, 8, 2, 16), 0.5)},
            "w is in [0.5, 0.5]; give natural logs of decays, in [-2.0, 0]",
        ),
        ({"lower_bound": 0.0}, "lower_bound = 0.0: must be below 0"),
        ({"lower_bound": -0.1}, "; give natural logs of decays, in [-0.1, 0]"),
        ({"chunk_size": 16}, "chunk_size = 16: chunks have 64 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    with refused(re.escape(message)):
        call("rwkv7", rwkv7_inputs(8) | changed)


@pytest.mark.parametrize("value", [0.1, -2.1])
def test_what_chunk_rwkv7_does_not_promise(value):
    x = rwkv7_inputs(8)
    x["w"][0, 3] = value
    with refused(r"w is in \[.*\]; give natural logs of decays, in \[-2.0, 0\]"):
        call("rwkv7", x)
