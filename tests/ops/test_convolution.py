"""The causal convolution against the tap-by-tap oracle in float64."""

import pytest
import torch

from tests.ops.inputs import boundaries, gradients, leaves, relative_error
from tests.ops.layout.documents import EDGES, FLA_CONV
from tests.refusals import refused
from titan_linear.ops import causal_conv1d
from titan_linear.ops.reference.convolution import direct_causal_conv1d

LENGTHS = [1, 2, 3, 40, 1, 17]


def make(T, B=1, D=6, W=4, N=None):
    rng = torch.Generator().manual_seed(0)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,)} | (
        {"initial_state": (N, D, W - 1)} if N else {}
    )
    return leaves(
        {n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    )


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W", [1, 2, 4])
def test_packed_documents_with_states(W, activation):
    cu = boundaries(LENGTHS)
    x = make(sum(LENGTHS), W=W, N=len(LENGTHS))
    options = {"activation": activation, "cu_seqlens": cu}
    got = gradients(list(causal_conv1d(**x, **options, output_final_state=True)), x)
    want = gradients(list(direct_causal_conv1d(**x, **options)), x)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and (b.numel() == 0 or relative_error(a, b) < 1e-12)


@pytest.mark.parametrize("lengths", [*EDGES.values(), *FLA_CONV], ids=str)
def test_document_lists_of_context_parallelism(lengths):
    x, cu = make(sum(lengths)), boundaries(lengths)
    got = gradients([causal_conv1d(**x, cu_seqlens=cu, activation="silu")[0]], x)
    want = gradients([direct_causal_conv1d(**x, cu_seqlens=cu, activation="silu")[0]], x)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-12


def test_batch_and_no_bias():
    x = make(9, B=3)
    del x["bias"]
    (got, none), (want, _) = causal_conv1d(**x), direct_causal_conv1d(**x)
    assert none is None
    assert relative_error(got, want) < 1e-12


def test_in_parts():
    x = make(9, B=3)
    y, parts = causal_conv1d(**x)[0], causal_conv1d(**x, widths=(1, 3, 2))[0]
    assert [part.shape[-1] for part in parts] == [1, 3, 2] and torch.equal(torch.cat(parts, -1), y)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_heads_of_q_and_k_are_normalised(activation):
    cu, x = boundaries(LENGTHS), make(sum(LENGTHS), D=17)
    options = {"activation": activation, "cu_seqlens": cu, "widths": (3, 9, 5), "norm_dim": 3}
    got = gradients([torch.cat(causal_conv1d(**x, **options)[0], -1)], x)
    want = gradients([direct_causal_conv1d(**x, **options)[0]], x)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-12
    lengths = got[0][..., :12].unflatten(-1, (-1, 3)).norm(dim=-1)
    assert lengths.min() > 0.99 and lengths.max() <= 1


def test_autocast_is_not_ours():
    x = {name: t.float() for name, t in make(9).items()}
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = causal_conv1d(**x)
    assert torch.equal(y, causal_conv1d(**x)[0])


def test_what_does_not_fit_is_refused():
    x = make(8)
    with refused(r"x \(8, 6\) must be \[B, T, D\]"):
        causal_conv1d(**x | {"x": x["x"][0]})
    with refused(r"bias \(1,\) must be \[D\] = \[6\]"):
        causal_conv1d(**x | {"bias": x["bias"][:1]})
    with refused("^activation = "):
        causal_conv1d(**x, activation="gelu")
    with refused("^weight .* must be"):
        causal_conv1d(**(x | {"weight": x["weight"][:3]}))
    with refused("^initial_state .* must be"):
        causal_conv1d(**x, initial_state=torch.zeros(1, 6, 2))
    for widths in ((6, 1), (2, 2, 1, 1), (6, 0), ()):
        with refused(r"widths = .* whose sum is D = 6"):
            causal_conv1d(**x, widths=widths)
    for widths, dim in (((2, 2, 2), 4), ((3, 3), 3), (None, 3), ((2, 2, 2), 0)):
        with refused(rf"norm_dim = {dim} needs widths of q, k and v"):
            causal_conv1d(**x, widths=widths, norm_dim=dim)
