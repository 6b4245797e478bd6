"""The stages of both rules as the driver may ask for them: strided inputs, β as logits, states and boundaries by
index."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.inputs import (
    DEVICE,
    boundaries,
    make_inputs,
    new_memory_of_nan,
    raw_gate_inputs,
    relative_error,
    same,
)
from titan_linear.ops.delta_rule import normed
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.runtime.options import (
    DecayInputs,
    DeltaRuleOptions,
    DPLRInputs,
    Inputs,
    States,
)
from titan_linear.ops.torch.delta_rule import TorchDeltaRule
from titan_linear.ops.triton import configs, gdn_hopper, kda_hopper, rwkv7_hopper, ssd_hopper
from titan_linear.ops.triton.chunks import chunks_of
from titan_linear.ops.triton.gdn import GDN
from titan_linear.ops.triton.kda import KDA
from titan_linear.ops.triton.rwkv7 import RWKV7
from titan_linear.ops.triton.stages import TritonRule

RULES = {"kda": partial(TritonRule, KDA), "gdn": partial(TritonRule, GDN)}
OPTIONS = DeltaRuleOptions(scale=0.2)
LENGTHS = [3, 66, 0]


def flat_inputs(op, make=make_inputs, **shape):
    """float32 q, k, v, g, beta, A_log, dt_bias without a batch dimension."""
    x = make(op, sum(LENGTHS), **{"H": 1, "HV": 1, "K": 32, "V": 32} | shape)
    tokens = [x[n][0].float().to(DEVICE) for n in ("q", "k", "v", "g", "beta")]
    return Inputs(
        *tokens, *(x[n].float().to(DEVICE) if n in x else None for n in ("A_log", "dt_bias"))
    )


def rule(op, inputs, options=OPTIONS):
    return RULES[op](
        inputs, options, chunks_of(boundaries(LENGTHS).to(DEVICE, torch.int32), sum(LENGTHS)), ()
    )


def numbers(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def listed(entries, wanted=None):
    return SimpleNamespace(
        entries=numbers(entries), wanted=None if wanted is None else numbers(wanted)
    )


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)


class Copies(TorchDispatchMode):
    """Counts the copies of tensors that this project's operators make."""

    def __init__(self):
        super().__init__()
        self.inside, self.count = False, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "titan_linear":
            # what contiguous() calls
            self.count += self.inside and op.overloadpacket.__name__ == "clone"
            return op(*args, **(kwargs or {}))
        self.inside = True
        with self:
            result = op.python(*args, **(kwargs or {}))
        self.inside = False
        return result


def test_views_of_one_projection_are_not_copied(op):
    """q, k, v of one tensor, as in the mixers, and so g, beta and do: the same numbers, bit by bit."""
    inputs = normed(flat_inputs(op, raw_gate_inputs, HV=2))
    do, options = randn(*inputs.v.shape), replace(OPTIONS, gate_in_kernel=True)

    def strided(*tensors):
        together = torch.cat([x.flatten(1) for x in tensors], 1).split(
            [x[0].numel() for x in tensors], 1
        )
        return [part.unflatten(1, x.shape[1:]) for part, x in zip(together, tensors, strict=True)]

    q, k, v, g, beta, *parameters = inputs
    views = Inputs(*strided(q, k, v), *strided(g, beta), *parameters)

    def results(tensors, do):
        r = rule(op, tensors, options)
        r = RULES[op](tensors, options, r.chunks, r.kept[2:])
        boundary = *r.boundary(listed([0])), r.boundary_backward(do, listed([0]))
        return [r.forward(None, False)[0], *boundary, *r.backward(do, None, None, False)[0]]

    with Copies() as copies:
        got = results(views, strided(do, do)[1])
    assert copies.count == 0 and all(x.is_contiguous() for x in got)
    assert same(got, results(inputs, do))


@pytest.mark.parametrize("beta_range", [1.0, 2.0])
def test_beta_from_logits(op, beta_range):
    inputs, options = flat_inputs(op, V=64), replace(OPTIONS, beta_range=beta_range)
    inputs = inputs._replace(beta=3 * randn(*inputs.beta.shape))
    do, d_final = randn(*inputs.v.shape), States(randn(len(LENGTHS), 1, 32, 64))
    wide = Inputs(*(None if x is None else x.double().cpu() for x in inputs))
    bounds = boundaries(LENGTHS)
    exact = TorchDeltaRule(wide, options, Boundaries(bounds, bounds), differentiable=True)
    results = []
    for r, x, d in (
        (rule(op, inputs, options), do, d_final),
        (exact, do.double().cpu(), States(d_final.values.double().cpu())),
    ):
        results.append([*r.forward(None, True), *r.backward(x, None, d, False)[0]])
    assert (
        max(relative_error(a.cpu(), b) for a, b in zip(*results, strict=True) if a is not None)
        < 2e-5
    )


def test_states_by_index(op):
    """As if they lay in tensors of all entries, bit by bit; of what is not asked for nothing is computed."""
    r = rule(op, flat_inputs(op))
    state_index, final_index = [1, -1, 0], [1, 0, -1]
    initial, d_final, do = randn(2, 1, 32, 32), randn(2, 1, 32, 32), randn(sum(LENGTHS), 1, 32)

    def of_all(states, index):
        return States(
            torch.stack([torch.zeros_like(states[0]) if i < 0 else states[i] for i in index])
        )

    o, final = r.forward(of_all(initial, state_index), True)
    grads, d_initial = r.backward(
        do, of_all(initial, state_index), of_all(d_final, final_index), True
    )
    entering, leaving = States(initial, numbers(state_index)), States(d_final, numbers(final_index))
    got_o, got_final = r.forward(entering, True)
    got_grads, got_d_initial = r.backward(do, entering, leaving, True)
    assert torch.equal(got_o, o) and torch.equal(got_final, final)
    assert torch.equal(got_d_initial, d_initial[[2, 0]])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got_grads, grads, strict=True))
    assert r.forward(entering, False)[1].numel() == 0
    assert r.backward(do, entering, leaving, False)[1].numel() == 0


def test_only_wanted_boundaries_are_computed(op):
    r, do, entries = rule(op, flat_inputs(op, V=64)), randn(sum(LENGTHS), 1, 64), [1, 2, 0]
    every, some = r.boundary(listed(entries)), r.boundary(listed(entries, [1, 0, 2]))
    assert torch.equal(some[0][[0, 2]], every[0][[0, 2]]) and torch.equal(some[1][2], every[1][2])
    gradients = (
        r.boundary_backward(do, listed(entries)),
        r.boundary_backward(do, listed(entries, [1, 0, 1])),
    )
    assert torch.equal(gradients[1][[0, 2]], gradients[0][[0, 2]])
    with new_memory_of_nan():
        S_ext, M = r.boundary(listed(entries, [1, 0, 2]))
        assert S_ext[1].isnan().all() and M[:2].isnan().all()
        assert r.boundary_backward(do, listed(entries, [1, 0, 1]))[1].isnan().all()


@pytest.mark.parametrize(
    "dtype, H, K, V, own, rules",
    [
        (torch.bfloat16, 4, 128, 128, (9, 0), "kda gdn"),
        (torch.float16, 4, 128, 128, (9, 0), "gdn"),
        (torch.bfloat16, 2, 128, 128, (9, 0), "gdn"),
        (torch.bfloat16, 4, 128, 192, (9, 0), ""),
        (torch.bfloat16, 2, 128, 64, (9, 0), "gdn ssd"),
        (torch.float16, 1, 128, 64, (9, 0), "gdn ssd"),
        (torch.bfloat16, 4, 128, 64, (9, 0), "gdn"),
        (torch.float32, 2, 128, 64, (9, 0), ""),
        (torch.bfloat16, 4, 64, 64, (9, 0), "rwkv7"),
        (torch.float16, 4, 64, 64, (9, 0), ""),
        (torch.bfloat16, 4, 64, 32, (9, 0), ""),
        (torch.bfloat16, 4, 32, 32, (9, 0), ""),
        (torch.bfloat16, 4, 64, 64, (8, 0), ""),
        (torch.bfloat16, 4, 128, 128, (12, 0), ""),
    ],
)
def test_where_kernels_are_hoppers_own(monkeypatch, dtype, H, K, V, own, rules):
    """As docs/kernels.md says; all else is Triton's."""
    monkeypatch.setattr(configs, "architecture", lambda device: own)
    keys, values = (
        torch.empty(1, H, K, dtype=dtype, device="meta"),
        torch.empty(1, 4, V, dtype=dtype, device="meta"),
    )
    dplr = DPLRInputs(keys, keys, values, keys, keys, keys.float())
    decaying = DecayInputs(keys, keys, values, keys, D=torch.empty(4))
    fits = {
        "kda": kda_hopper.fits(Inputs(keys, keys, values, None, None)),
        "gdn": gdn_hopper.fits(keys, V),
        "rwkv7": rwkv7_hopper.fits(dplr),
        "ssd": ssd_hopper.fits(decaying),
    }
    assert {rule for rule in fits if fits[rule]} == set(rules.split())
    assert gdn_hopper.prepares(keys) == (own == (9, 0) and K > 32 and dtype != torch.float32)
    x = Inputs(keys, keys, values[..., :64], keys.float(), None)
    raw = x._replace(g=keys.bfloat16())
    taken = own == (9, 0) and K == 128 and dtype == torch.bfloat16
    assert kda_hopper.prepares(x, 1.0, 0) == kda_hopper.prepares(raw, 1.0, 2) == taken
    assert not any(
        kda_hopper.prepares(x, safe, gate)
        for safe, gate in ((0.0, 0), (0.0, 2), (1.0, 1), (1.0, 2))
    )
    assert not kda_hopper.prepares(raw, 1.0, 0)
    assert not rwkv7_hopper.fits(dplr._replace(gk=keys.half()))
    assert not ssd_hopper.fits(decaying._replace(D=torch.empty(4 * V)))
    # but for the states
    exponents = RWKV7.room(dplr) - 2 * values.numel() * K // 64 * values.element_size()
    assert exponents == (0 if "rwkv7" in rules else 4 * keys.numel())
