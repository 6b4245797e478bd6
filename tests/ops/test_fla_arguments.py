"""The arguments that the ops share with FLA's functions of the same names: order, meaning, and what is refused."""

import inspect
import re

import pytest
import torch

from tests.ops.inputs import (
    boundaries,
    call,
    gradients,
    leaves,
    make_inputs,
    oracle,
    raw_gate_inputs,
    relative_error,
    same,
)
from tests.refusals import refused
from titan_linear.ops import (
    attention,
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_rwkv7,
    chunk_simple_gla,
)
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
    chunk_simple_gla: (
        "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"
    ),
    chunk_rwkv7: (
        "r w k v a b scale initial_state output_final_state cu_seqlens cu_seqlens_cpu safe_gate chunk_size "
        "disable_recompute cp_context lower_bound"
    ),
}
TOLERANCE = 1e-9


@pytest.mark.parametrize("fn", POSITIONS, ids=lambda fn: fn.__name__)
def test_the_order_of_the_arguments(fn):
    parameters = inspect.signature(fn).parameters.values()
    assert (
        " ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == POSITIONS[fn]
    )
    # an argument that nobody knows is a TypeError
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_beta_by_its_sigmoid(op, allow_neg_eigval):
    x = leaves(
        raw_gate_inputs(op, 70) | {"initial_state": torch.randn(1, 4, 16, 24, dtype=torch.float64)}
    )
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": allow_neg_eigval}
    got = gradients(list(call(op, x, output_final_state=True, **options)), x)
    want = gradients(
        list(oracle(op, x | {"beta": (2 if allow_neg_eigval else 1) * x["beta"].sigmoid()})), x
    )
    assert all(relative_error(a, b) < TOLERANCE for a, b in zip(got, want, strict=True))


def test_beta_by_its_sigmoid_of_one_token(op):
    x = raw_gate_inputs(op, 1, B=2)
    got = call(op, x, output_final_state=True, use_beta_sigmoid_in_kernel=True)
    want = oracle(op, x | {"beta": x["beta"].sigmoid()})
    assert all(relative_error(a, b) < TOLERANCE for a, b in zip(got, want, strict=True))


def test_states_with_v_first(op):
    cu = boundaries([5, 65])
    x = leaves(
        make_inputs(op, 70) | {"initial_state": torch.randn(2, 4, 16, 24, dtype=torch.float64)}
    )
    y = leaves(x | {"initial_state": x["initial_state"].mT})
    want = gradients(list(call(op, x, cu_seqlens=cu, output_final_state=True)), x)
    o, final = call(op, y, cu_seqlens=cu, output_final_state=True, state_v_first=True)
    assert final.shape == (2, 4, 24, 16)
    got = gradients([o, final.mT], y)
    got[-1] = got[-1].mT  # initial_state is the last input
    assert same(got, want)


def test_a_state_in_another_order_is_named_as_it_was_given(op):
    x = make_inputs(op, 8, H=1, HV=2, K=16, V=32)
    for shape, v_first, want in (
        ((1, 2, 16, 32), True, r"\[N, HV, V, K\] = \[1, 2, 32, 16\]"),
        ((1, 2, 32, 16), False, r"\[N, HV, K, V\] = \[1, 2, 16, 32\]"),
        ((32,), True, r"\[N, HV, V, K\] = \[1, 2, 32, 16\]"),
    ):
        with refused(rf"^initial_state {re.escape(str(shape))} must be {want}"):
            call(op, x, initial_state=torch.zeros(shape), state_v_first=v_first)


def test_the_bounded_gate_without_a_rate():
    x = raw_gate_inputs("kda", 70)
    options = {"lower_bound": -5.0, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    want = call("kda", x | {"A_log": torch.zeros(4, dtype=torch.float64)}, **options)[0]
    del x["A_log"]
    assert torch.equal(call("kda", x, **options)[0], want)
    gate = -5 * torch.sigmoid(x["g"] + x["dt_bias"].view(4, 16))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"]))
    assert relative_error(want, recurrent_delta_rule(q, k, x["v"], gate, x["beta"])[0]) < TOLERANCE


def test_boundaries_on_the_cpu(op):
    x, cu = make_inputs(op, 70), boundaries([5, 65])
    want = call(op, x, cu_seqlens=cu)[0]
    assert torch.equal(call(op, x, cu_seqlens=cu, cu_seqlens_cpu=cu, chunk_size=64)[0], want)


def on_70_tokens(op, **options):
    """An op's function of 70 tokens, which takes boundaries."""
    if op == "conv":
        return causal_conv1d(torch.ones(1, 70, 6), torch.ones(6, 4), **options)[0]
    if op == "attention":
        return attention(*(torch.ones(1, 70, 1, 8) for _ in range(3)), **options)
    return call(op, make_inputs(op, 70, H=1, HV=1, K=8, V=8), **options)[0]


BAD_BOUNDARIES = {
    "ends early": (
        [0, 40],
        r"= \[0, 40\]: must start at 0, never decrease, and end at 70, the number of tokens",
    ),
    "ends late": ([0, 90], r"= \[0, 90\]: .* end at 70"),
    "starts late": ([5, 70], r"= \[5, 70\]: must start at 0"),
    "decreases": ([0, 40, 30, 70], r"= \[0, 40, 30, 70\]: .* never decrease"),
    "not integers": ([0.0, 70.0], r"is torch.float32 \(2,\); give N \+ 1 integers"),
    "none": ([0], r"is torch.int64 \(1,\); give N \+ 1 integers"),
    "a matrix": ([[0, 70]], r"is torch.int64 \(1, 2\); give N \+ 1 integers"),
}


@pytest.mark.parametrize("case", BAD_BOUNDARIES)
@pytest.mark.parametrize("op", ["kda", "gdn", "conv", "attention"])
def test_boundaries_that_do_not_fit_are_refused(op, case):
    values, message = BAD_BOUNDARIES[case]
    cu = torch.tensor(values)
    with refused(f"^cu_seqlens {message}"):
        on_70_tokens(op, cu_seqlens=cu)
    if op != "attention":  # which knows no cu_seqlens_cpu
        with refused(f"^cu_seqlens(_cpu)? {message}"):
            on_70_tokens(
                op,
                cu_seqlens=torch.zeros(cu.shape, dtype=torch.int64, device="meta"),
                cu_seqlens_cpu=cu,
            )
        with refused(r"^cu_seqlens_cpu = \[0, 30, 70\] must have the values .* \[0, 40, 70\]"):
            on_70_tokens(
                op, cu_seqlens=torch.tensor([0, 40, 70]), cu_seqlens_cpu=torch.tensor([0, 30, 70])
            )


@pytest.mark.parametrize("op", ["kda", "gdn", "conv"])
def test_of_boundaries_on_a_device_the_shape_is_checked(op):
    for cu in (torch.zeros(2, device="meta"), torch.zeros(1, 2, dtype=torch.int32, device="meta")):
        with refused(r"^cu_seqlens is torch\..*; give N \+ 1 integers"):
            on_70_tokens(op, cu_seqlens=cu)


@pytest.mark.parametrize("op", ["kda", "gdn", "conv", "attention"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_boundaries_of_any_integer_dtype_and_empty_documents(op, dtype):
    empty = torch.tensor([0, 0, 40, 40, 70, 70], dtype=dtype)
    assert torch.equal(
        on_70_tokens(op, cu_seqlens=empty), on_70_tokens(op, cu_seqlens=boundaries([40, 30]))
    )


BAD = {
    "cu_seqlens_cpu is a copy": {"cu_seqlens_cpu": torch.tensor([0, 8])},
    r"cu_seqlens_cpu \(3,\)": {
        "cu_seqlens": torch.tensor([0, 8]),
        "cu_seqlens_cpu": torch.tensor([0, 4, 8]),
    },
    "chunk_size = 32": {"chunk_size": 32},
    "allow_neg_eigval = True comes with": {"allow_neg_eigval": True},
    "dt_bias comes with": {"dt_bias": torch.zeros(64)},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message):
    with refused(f"^{message}"):
        call("kda", make_inputs("kda", 8), **BAD[message])


def test_what_fla_has_and_is_not_here_is_refused():
    x, gdn = make_inputs("kda", 8), make_inputs("gdn", 8)
    with refused("return_intermediate_states = True is not supported"):
        call("kda", x, return_intermediate_states=True)
    with refused("chunk_indices = a tensor"):
        call("gdn", gdn, chunk_indices=torch.zeros(1, 2))
    with refused("and A_log .* go together"):
        call("gdn", gdn, use_gate_in_kernel=True)
    with pytest.raises(TypeError, match="head_first"):
        call("gdn", gdn, head_first=True)
    x = {"x": torch.zeros(1, 8, 6), "weight": torch.zeros(6, 4)}
    for name, value in {
        "residual": x["x"],
        "backend": "cuda",
        "chunk_indices": torch.zeros(1, 2),
    }.items():
        with refused(f"^{name} = "):
            causal_conv1d(**x, **{name: value})
    with refused(r"pass initial_state\[..., 1:\]"):
        causal_conv1d(**x, initial_state=torch.zeros(1, 6, 4))


def test_importing_all_binds_functions_alone():
    names = {}
    exec("from titan_linear.ops import *", names)
    assert "torch" not in names and names["chunk_kda"] is chunk_kda
