"""chunk_dplr_delta_rule and chunk_rwkv7 against their token-by-token oracle in float64."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ops.inputs import JUMPS, boundaries, call, dplr_inputs, gradients, leaves, oracle, relative_error
from tests.ops.layout.documents import EDGES
from titan_linear.ops.reference.delta_rule import l2norm

FORWARD, GRADIENTS = 1e-12, 1e-9
LENGTHS = [1, 15, 63, 64, 65, 2, 130]


def compare(x: dict[str, torch.Tensor], *, cu: torch.Tensor | None = None, **options) -> None:
    """Outputs, final states and the gradients of all inputs, from random initial states."""
    B, _, H, K = x["q"].shape
    rng, N = torch.Generator().manual_seed(3), B if cu is None else len(cu) - 1
    x = leaves(x | {"initial_state": torch.randn(N, H, K, x["v"].shape[3], generator=rng, dtype=torch.float64)})
    got = gradients(list(call("dplr", x, cu_seqlens=cu, output_final_state=True, **options)), x)
    want = gradients(list(oracle("dplr", x, cu_seqlens=cu, **options)), x)
    for name, found, right in zip([*("o", "final"), *x], got, want, strict=True):
        assert relative_error(found, right) < (FORWARD if name in ("o", "final") else GRADIENTS), name


@pytest.mark.parametrize("gate", ["slow", "usual", "safe", "fast"])
def test_packed_documents(gate: str) -> None:
    compare(dplr_inputs(sum(LENGTHS), gate=gate), cu=boundaries(LENGTHS), safe_gate=gate == "safe")


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
def test_document_lists_of_context_parallelism(lengths: list[int]) -> None:
    compare(dplr_inputs(sum(lengths), K=8, V=6, gate="slow"), cu=boundaries(lengths))


@pytest.mark.parametrize("T", [1, 63, 128, 131])
def test_batch(T: int) -> None:
    compare(dplr_inputs(T, B=2), scale=0.3)


def test_disable_recompute() -> None:
    compare(dplr_inputs(130), disable_recompute=True)


def test_reads_that_a_neumann_series_would_not_sum() -> None:
    """Nearly the same vector is removed wholly at each token, with hardly any decay."""
    x = dplr_inputs(128, gate="slow")
    removed = l2norm(x["a"][:, :1] + 1e-3 * x["k"])
    compare(x | {"a": -removed, "b": removed})


def test_transitions_that_are_no_contractions() -> None:
    """The product of RWKV-7's transitions may have a norm above 1: what it takes from channels differs among them."""
    x = dplr_inputs(64, H=1, K=4, V=4, gate="slow")
    x["b"] = x["b"] * torch.tensor([1.0, 0.05, 1.0, 0.05])
    eye = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4)
    silent = x | {"v": torch.zeros_like(x["v"])}
    norms = []
    for T in range(1, 64):
        part = {name: t[:, :T] for name, t in silent.items()}
        norms.append(
            torch.linalg.matrix_norm(call("dplr", part, initial_state=eye, output_final_state=True)[1], 2).max()
        )
    assert max(norms) > 1
    compare(x)


def test_a_stretch_continues_from_its_state_and_then_token_by_token() -> None:
    x = dplr_inputs(80, B=2)
    want, end = call("dplr", x, output_final_state=True)
    parts, state = [], None
    for part in (slice(0, 77), *(slice(t, t + 1) for t in (77, 78, 79))):
        own = {name: t[:, part] for name, t in x.items()}
        o, state = call("dplr", own, initial_state=state, output_final_state=True)
        parts.append(o)
    assert relative_error(torch.cat(parts, 1), want) < FORWARD and relative_error(state, end) < FORWARD


def test_rwkv7() -> None:
    """Its names and defaults."""
    x = dplr_inputs(130)
    want = call("dplr", x, scale=1.0, safe_gate=True, output_final_state=True)
    named = {{"q": "r", "gk": "w"}.get(name, name): t for name, t in x.items()}
    for found, right in zip(call("rwkv7", named), want, strict=True):
        assert torch.equal(found, right)
    assert call("rwkv7", named, output_final_state=False)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """The error is that of rounding inputs and outputs."""
    cu = boundaries(LENGTHS)
    x = leaves({n: t.to(dtype) for n, t in dplr_inputs(sum(LENGTHS)).items()})
    o, final = call("dplr", x, cu_seqlens=cu, output_final_state=True)
    assert o.dtype == dtype and final.dtype == torch.float32
    exact = leaves({n: t.double() for n, t in x.items()})
    want = gradients(list(oracle("dplr", exact, cu_seqlens=cu)), exact)
    bound = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for found, right in zip(gradients([o, final], x), want, strict=True):
        assert relative_error(found, right) < bound


@pytest.mark.parametrize("jumps", JUMPS, ids=str)
def test_slow_decay_after_fast(jumps: dict[int, float]) -> None:
    x = {name: t.float() for name, t in dplr_inputs(128, gate="slow").items()}
    for token, g in jumps.items():
        x["gk"][:, token] = g
    want = oracle("dplr", {n: t.double() for n, t in x.items()})[0]
    assert (call("dplr", x)[0] - want).abs().max() < 1e-6 * want.abs().max()


def test_neighbours_of_what_is_not_finite() -> None:
    lengths = [5, 70, 1, 52]
    cu, base = boundaries(lengths), dplr_inputs(sum(lengths))
    before = gradients([call("dplr", x := leaves(base), cu_seqlens=cu)[0]], x)
    for i in range(len(lengths)):
        inside = slice(int(cu[i]), int(cu[i + 1]))
        changed = {n: t.clone() for n, t in base.items()}
        for t in changed.values():
            t[:, inside] = torch.nan
        after = gradients([call("dplr", x := leaves(changed), cu_seqlens=cu)[0]], x)
        for name, found, right in zip(["o", *x], after, before, strict=True):
            found, right = (torch.cat([t[:, : inside.start], t[:, inside.stop :]], 1) for t in (found, right))
            assert torch.equal(found, right), (name, i)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(1, 8, 2, 3)}, "q (1, 8, 2, 16) and k (1, 8, 2, 3) must both be"),
        ({"v": torch.zeros(1, 8, 4, 3)}, "v (1, 8, 4, 3) must be [B, T, H, V] with the H = 2"),
        ({"b": torch.zeros(1, 8, 2, 3)}, "b (1, 8, 2, 3) must be [B, T, H, K] = [1, 8, 2, 16]"),
        ({"a": torch.zeros(1, 8, 2, 16).long()}, "a is torch.int64; give a float dtype"),
        ({"gk": torch.full((1, 8, 2, 16), 0.5)}, "gk is in [0.5, 0.5]; give natural logs of decays, in [-inf, 0]"),
        ({"chunk_size": 16}, "chunk_size = 16: chunks have 64 tokens"),
        ({"impl": "triton"}, "impl = 'triton' cannot run chunk_dplr_delta_rule: it has no kernels"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call("dplr", dplr_inputs(8) | changed)


@pytest.mark.parametrize("value", [0.1, -2.1])
def test_what_chunk_rwkv7_does_not_promise(value: float) -> None:
    x = dplr_inputs(8)
    named = {{"q": "r", "gk": "w"}.get(name, name): t for name, t in x.items()}
    named["w"][0, 3] = value
    with pytest.raises(ValueError, match=r"w is in \[.*\]; give natural logs of decays, in \[-2.0, 0\]"):
        call("rwkv7", named)
