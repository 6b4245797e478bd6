"""The arguments that the ops share with FLA's functions of the same names: order, meaning, and what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.ops.inputs import boundaries, call, gradients, leaves, make_inputs, oracle, raw_gate_inputs, relative_error
from titan_linear.ops import causal_conv1d, chunk_gated_delta_rule, chunk_kda
from titan_linear.ops.reference.delta_rule import recurrent_delta_rule

# By position in FLA; what its **kwargs take is by keyword here.
POSITIONS = {
    chunk_kda: (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
        "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context"
    ),
    chunk_gated_delta_rule: (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
    ),
    causal_conv1d: (
        "x weight bias residual initial_state output_final_state activation backend cu_seqlens cu_seqlens_cpu "
        "chunk_indices cp_context"
    ),
}
TOLERANCE = 1e-9
OPS = pytest.mark.parametrize("op", ["kda", "gdn"])


@pytest.mark.parametrize("fn", POSITIONS, ids=lambda fn: fn.__name__)
def test_the_order_of_the_arguments(fn) -> None:
    parameters = inspect.signature(fn).parameters.values()
    assert " ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == POSITIONS[fn]
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)  # an argument that nobody knows is a TypeError


@OPS
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_beta_by_its_sigmoid(op: str, allow_neg_eigval: bool) -> None:
    x = leaves(raw_gate_inputs(op, 70) | {"initial_state": torch.randn(1, 4, 16, 24, dtype=torch.float64)})
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": allow_neg_eigval}
    got = gradients(list(call(op, x, output_final_state=True, **options)), x)
    want = gradients(list(oracle(op, x | {"beta": (2 if allow_neg_eigval else 1) * x["beta"].sigmoid()})), x)
    assert all(relative_error(a, b) < TOLERANCE for a, b in zip(got, want, strict=True))


@OPS
def test_beta_by_its_sigmoid_of_one_token(op: str) -> None:
    x = raw_gate_inputs(op, 1, B=2)
    got = call(op, x, output_final_state=True, use_beta_sigmoid_in_kernel=True)
    want = oracle(op, x | {"beta": x["beta"].sigmoid()})
    assert all(relative_error(a, b) < TOLERANCE for a, b in zip(got, want, strict=True))


@OPS
def test_states_with_v_first(op: str) -> None:
    cu = boundaries([5, 65])
    x = leaves(make_inputs(op, 70) | {"initial_state": torch.randn(2, 4, 16, 24, dtype=torch.float64)})
    y = leaves(x | {"initial_state": x["initial_state"].mT})
    want = gradients(list(call(op, x, cu_seqlens=cu, output_final_state=True)), x)
    o, final = call(op, y, cu_seqlens=cu, output_final_state=True, state_v_first=True)
    assert final.shape == (2, 4, 24, 16)
    got = gradients([o, final.mT], y)
    got[-1] = got[-1].mT  # initial_state is the last input
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_bounded_gate_without_a_rate() -> None:
    x = raw_gate_inputs("kda", 70)
    options = {"lower_bound": -5.0, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    want = call("kda", x | {"A_log": torch.zeros(4, dtype=torch.float64)}, **options)[0]
    del x["A_log"]
    assert torch.equal(call("kda", x, **options)[0], want)
    gate = -5 * torch.sigmoid(x["g"] + x["dt_bias"].view(4, 16))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"]))
    assert relative_error(want, recurrent_delta_rule(q, k, x["v"], gate, x["beta"])[0]) < TOLERANCE


@OPS
def test_boundaries_on_the_cpu(op: str) -> None:
    x, cu = make_inputs(op, 70), boundaries([5, 65])
    want = call(op, x, cu_seqlens=cu)[0]
    assert torch.equal(call(op, x, cu_seqlens=cu, cu_seqlens_cpu=cu, chunk_size=64)[0], want)


BAD = {
    "cu_seqlens_cpu": {"cu_seqlens_cpu": torch.tensor([0, 8])},
    "cu_seqlens_cpu ": {"cu_seqlens": torch.tensor([0, 8]), "cu_seqlens_cpu": torch.tensor([0, 4, 8])},
    "chunk_size = 32": {"chunk_size": 32},
    "allow_neg_eigval = True comes with": {"allow_neg_eigval": True},
    "dt_bias comes with": {"dt_bias": torch.zeros(64)},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message.strip()):
        call("kda", make_inputs("kda", 8), **BAD[message])


def test_what_fla_has_and_is_not_here_is_refused() -> None:
    x, gdn = make_inputs("kda", 8), make_inputs("gdn", 8)
    with pytest.raises(ValueError, match="return_intermediate_states = True is not supported"):
        call("kda", x, return_intermediate_states=True)
    with pytest.raises(ValueError, match="chunk_indices = a tensor"):
        call("gdn", gdn, chunk_indices=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="A_log"):
        call("gdn", gdn, use_gate_in_kernel=True)
    with pytest.raises(TypeError, match="head_first"):
        call("gdn", gdn, head_first=True)
    x = {"x": torch.zeros(1, 8, 6), "weight": torch.zeros(6, 4)}
    for name, value in {"residual": x["x"], "backend": "cuda", "chunk_indices": torch.zeros(1, 2)}.items():
        with pytest.raises(ValueError, match=name):
            causal_conv1d(**x, **{name: value})
    with pytest.raises(ValueError, match=r"pass initial_state\[..., 1:\]"):
        causal_conv1d(**x, initial_state=torch.zeros(1, 6, 4))
