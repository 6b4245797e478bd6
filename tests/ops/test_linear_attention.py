"""chunk_ssd and chunk_simple_gla against their token-by-token oracles in float64."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ops.inputs import JUMPS, STATES, boundaries, call, decaying_inputs, gradients, leaves, oracle, relative_error
from tests.ops.layout.documents import EDGES
from titan_linear.ops import chunk_simple_gla, chunk_ssd

FORWARD, GRADIENTS = 1e-12, 1e-9
LENGTHS = [1, 15, 63, 64, 65, 2, 130]
OPS = pytest.mark.parametrize("op", ["ssd", "gla"])


def compare(op: str, x: dict[str, torch.Tensor], *, cu: torch.Tensor | None = None, **options) -> None:
    """Outputs, final states and the gradients of all inputs, from random initial states."""
    of_values, of_keys = ("x", "B") if op == "ssd" else ("v", "k")
    (heads, P), N = x[of_values].shape[2:], x[of_keys].shape[3]
    entries, shape = len(x[of_values]) if cu is None else len(cu) - 1, (P, N) if op == "ssd" else (N, P)
    rng = torch.Generator().manual_seed(3)
    initial, need_final = STATES[op]
    x = leaves(x | {initial: torch.randn(entries, heads, *shape, generator=rng, dtype=torch.float64)})
    got = gradients(list(call(op, x, cu_seqlens=cu, **{need_final: True}, **options)), x)
    want = gradients(list(oracle(op, x, cu_seqlens=cu, **options)), x)
    for name, a, b in zip([*("o", "final"), *x], got, want, strict=True):
        assert relative_error(a, b) < (FORWARD if name in ("o", "final") else GRADIENTS), name


@OPS
def test_packed_documents(op: str) -> None:
    compare(op, decaying_inputs(op, sum(LENGTHS)), cu=boundaries(LENGTHS))


@OPS
@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
def test_document_lists_of_context_parallelism(op: str, lengths: list[int]) -> None:
    compare(op, decaying_inputs(op, sum(lengths), G=1, heads=2, N=8, P=6, bias=-7.0), cu=boundaries(lengths))


@OPS
@pytest.mark.parametrize("T", [1, 63, 128, 131])
def test_batch(op: str, T: int) -> None:
    compare(op, decaying_inputs(op, T, B=2))


@OPS
@pytest.mark.parametrize("dims", [dict(G=1, heads=8, N=256), dict(G=2, P=80), dict(G=8, heads=8, N=64)], ids=str)
def test_published_dims(op: str, dims: dict[str, int]) -> None:
    compare(op, decaying_inputs(op, 130, **dims), cu=boundaries([70, 60]))


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (1e-3, 0.1), (0.2, 0.7)])
@pytest.mark.parametrize("dt_softplus", [True, False])
@pytest.mark.parametrize("without", [(), ("D",), ("dt_bias",), ("D", "dt_bias")])
def test_time_steps(dt_limit: tuple[float, float], dt_softplus: bool, without: tuple[str, ...]) -> None:
    x = decaying_inputs("ssd", 130)
    x = {name: t for name, t in x.items() if name not in without}
    compare("ssd", x, cu=boundaries([70, 60]), dt_limit=dt_limit, dt_softplus=dt_softplus)


def test_time_steps_below_those_of_initial_weights() -> None:
    """They are not raised to 1e-3 unless dt_limit says so; a gated norm would hide in its output that they were."""
    x = decaying_inputs("ssd", 130, bias=-12.0)
    assert torch.nn.functional.softplus(x["dt"] + x["dt_bias"]).max() < 1e-3
    compare("ssd", x)
    raised = call("ssd", x, return_final_states=True, dt_limit=(1e-3, float("inf")))[1]
    assert relative_error(raised, call("ssd", x, return_final_states=True)[1]) > 1


def test_a_factor_for_each_channel() -> None:
    compare("ssd", decaying_inputs("ssd", 70) | {"D": torch.randn(4, 24, dtype=torch.float64)})


def test_a_decay_that_is_the_same_for_all_tokens() -> None:
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
def test_a_stretch_continues_from_its_state_and_then_token_by_token(op: str) -> None:
    """Tokens one by one are steps of the recurrence."""
    initial, need_final = STATES[op]
    x = decaying_inputs(op, 80, B=2)
    tokens = {name: t for name, t in x.items() if t.dim() > 2}
    of_heads = {name: t for name, t in x.items() if t.dim() <= 2}
    want, end = call(op, x, **{need_final: True})
    parts, state = [], None
    for part in (slice(0, 77), *(slice(t, t + 1) for t in (77, 78, 79))):
        x = {name: t[:, part] for name, t in tokens.items()} | of_heads
        o, state = call(op, x, **{initial: state, need_final: True})
        parts.append(o)
    assert relative_error(torch.cat(parts, 1), want) < FORWARD and relative_error(state, end) < FORWARD


@OPS
def test_disable_recompute(op: str) -> None:
    compare(op, decaying_inputs(op, 130), disable_recompute=True)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(op: str, dtype: torch.dtype) -> None:
    """The error is that of rounding inputs and outputs: the computation in between is float32 or wider."""
    cu, need_final = boundaries(LENGTHS), STATES[op][1]
    x = leaves({n: t.to(dtype) if t.dim() > 2 else t.float() for n, t in decaying_inputs(op, sum(LENGTHS)).items()})
    o, final = call(op, x, cu_seqlens=cu, **{need_final: True})
    assert o.dtype == dtype and final.dtype == torch.float32
    exact = leaves({n: t.double() for n, t in x.items()})
    want = gradients(list(oracle(op, exact, cu_seqlens=cu)), exact)
    bound = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for a, b in zip(gradients([o, final], x), want, strict=True):
        assert relative_error(a, b) < bound


@pytest.mark.parametrize("jumps", JUMPS, ids=str)
def test_slow_decay_after_fast(jumps: dict[int, float]) -> None:
    """In float32 a sum of decays that spans a fast one does not take part in those that follow it."""
    x = {name: t.float() for name, t in decaying_inputs("gla", 128).items()}
    x["g"][:] = -1e-3
    for token, g in jumps.items():
        x["g"][:, token] = g
    want = oracle("gla", {n: t.double() for n, t in x.items()})[0]
    assert (call("gla", x)[0] - want).abs().max() < 1e-6 * want.abs().max()


@OPS
def test_neighbours_of_what_is_not_finite(op: str) -> None:
    """Whatever a document holds, the others' outputs and gradients are what they are without it."""
    lengths = [5, 70, 1, 52]
    cu = boundaries(lengths)
    base = decaying_inputs(op, sum(lengths))
    tokens = [name for name, t in base.items() if t.dim() > 2]
    before = gradients([call(op, x := leaves(base), cu_seqlens=cu)[0]], x)
    for i in range(len(lengths)):
        inside = slice(int(cu[i]), int(cu[i + 1]))
        for value in (torch.nan, torch.inf, 6e4):
            changed = {n: t.clone() for n, t in base.items()}
            for name in tokens:
                changed[name][:, inside] = value
            after = gradients([call(op, x := leaves(changed), cu_seqlens=cu)[0]], x)
            for name, a, b in zip(["o", *x], after, before, strict=True):
                if name in ("o", *tokens):
                    a, b = (torch.cat([t[:, : inside.start], t[:, inside.stop :]], 1) for t in (a, b))
                    assert torch.equal(a, b), (name, i, value)


@OPS
def test_what_does_not_fit_is_refused(op: str) -> None:
    x = decaying_inputs(op, 8)
    for name in x:
        with pytest.raises(ValueError, match=f"^{name} is torch.int64; give a float dtype"):
            call(op, x | {name: x[name].long()})
    with pytest.raises(ValueError, match=f"^{STATES[op][0]} .* must be"):
        call(op, x, **{STATES[op][0]: torch.zeros(2, 4, 5, 5)})
    with pytest.raises(ValueError, match="B must be 1"):
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
        ({"dt_limit": (0.1, 0.0)}, "dt_limit = (0.1, 0.0) must be (the lower, the upper) limit of dt"),
    ],
)
def test_what_does_not_fit_chunk_ssd(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_ssd(**decaying_inputs("ssd", 8) | changed)


def test_one_kind_of_decay() -> None:
    x = decaying_inputs("gla", 8)
    for given in (x | {"g_gamma": torch.zeros(4)}, {n: x[n] for n in "qkv"}):
        with pytest.raises(ValueError, match="give one of g"):
            chunk_simple_gla(**given)
