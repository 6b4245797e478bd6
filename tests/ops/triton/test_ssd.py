"""The kernels of states that only decay, behind chunk_ssd and chunk_simple_gla, against the token-by-token oracles in
float64: outputs, states and gradients of all inputs, packed, in segments and on ranks; leaks between documents; what
they refuse.

    ./tests/run.sh tests/ops/triton/test_ssd.py                # in Triton's interpreter, or on a GPU if there is one
"""

import pytest
import torch

from tests.ops.inputs import (
    DEVICE,
    JUMPS,
    boundaries,
    call,
    check_neighbours,
    compare_four_ranks,
    decaying_inputs,
    errors,
    gradients,
    leaves,
    same,
)
from tests.ops.triton.bfloat16 import interpret_bfloat16
from tests.ops.triton.well_formed import check_stages
from titan_linear.ops.exchange import folds
from titan_linear.ops.triton import rules, ssd, tiles
from titan_linear.ops.triton.ssd import SSD

TOLERANCE = 2e-5  # float32 sums of up to 130 terms, through exponentials
UNIT = 2**-8
HALF_TOLERANCE = {"B": 3 * UNIT, "C": 3 * UNIT, "q": 3 * UNIT, "k": 3 * UNIT}
HALF_TOLERANCE |= dict.fromkeys(("A", "dt_bias", "D", "dt", "g"), 6 * UNIT)
OPS = pytest.mark.parametrize("op", ["ssd", "gla"])
SMALL = {"G": 1, "heads": 2, "N": 16, "P": 16}


def compare(op, x, cu=None, dtype=torch.float32, bounds=None, **options):
    wide = {"dt", "g"} if dtype != torch.float32 else set()  # as the mixer gives them
    x = {n: t.to(dtype if t.dim() > 2 and n not in wide else torch.float32) for n, t in x.items()}
    found = errors(op, x, cu, impl="triton", **options)
    least = TOLERANCE if dtype == torch.float32 else 1.5 * UNIT
    assert not {
        n: error for n, error in found.items() if not error < (bounds or {}).get(n, least)
    }, found


@OPS
@pytest.mark.parametrize("programs", [1, ssd.PROGRAMS])
def test_packed_documents_equal_the_definition(op, programs, monkeypatch):
    """Of one token, shorter than a chunk, empty, exactly one; a group's heads in one program, and in one program
    each."""
    monkeypatch.setattr(ssd, "PROGRAMS", programs)
    lengths = [1, 70, 0, 64, 3]
    compare(op, decaying_inputs(op, sum(lengths), G=2, heads=4, N=32, P=32), boundaries(lengths))


@OPS
def test_documents_in_segments(op, short_segments):
    """Of three, one, none and two segments; little of the state decays on the way."""
    lengths = [150, 64, 0, 65]
    compare(op, decaying_inputs(op, sum(lengths), bias=-5.0, **SMALL), boundaries(lengths))


@pytest.mark.parametrize(
    "dims",
    [
        dict(G=1, heads=4, N=128, P=64),
        dict(G=1, heads=2, N=16, P=128),
        dict(G=8, heads=8, N=64, P=16),
    ],
    ids=str,
)
def test_published_dims_equal_the_definition(dims):
    """Also a V that comes in slices of 64 to the gradients, in float32."""
    compare("ssd", decaying_inputs("ssd", 70, **dims), boundaries([68, 2]))


@pytest.mark.parametrize(
    "without, options",
    [
        ((), {"dt_limit": (0.2, 0.7)}),
        (("D",), {"dt_softplus": False}),
        (("dt_bias",), {"dt_limit": (1e-3, 0.1)}),
        (("D", "dt_bias"), {"dt_softplus": False, "dt_limit": (0.2, 0.7)}),
        ((), {"disable_recompute": True}),
    ],
    ids=str,
)
def test_options_of_time_steps_equal_the_definition(without, options):
    x = decaying_inputs("ssd", 70, **SMALL)
    compare("ssd", {n: t for n, t in x.items() if n not in without}, **options)


def test_slow_time_steps_are_not_raised():
    compare("ssd", decaying_inputs("ssd", 130, bias=-12.0, **SMALL))


def test_a_factor_for_each_channel():
    x = decaying_inputs("ssd", 70, **SMALL | {"P": 80})
    compare("ssd", x | {"D": torch.randn(2, 80, dtype=torch.float64)}, boundaries([66, 4]))


@pytest.mark.parametrize("jumps", JUMPS, ids=str)
def test_slow_decay_after_fast(jumps):
    x = decaying_inputs("gla", 128, **SMALL)
    x["g"][:] = -1e-3
    for token, g in jumps.items():
        x["g"][:, token] = g
    compare("gla", x)


@OPS
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_documents_in_pieces(op, pieces, monkeypatch):
    """Of many chunks, fewer than pieces, and none; little of the state decays on the way."""
    lengths = [300, 0, 70, 1, 64]
    monkeypatch.setattr(ssd, "SHORTEST", 1)
    monkeypatch.setattr(ssd, "PROGRAMS", pieces * len(lengths) * SMALL["heads"])
    assert ssd._pieces(sum(lengths), len(lengths), SMALL["heads"]) == pieces
    compare(op, decaying_inputs(op, sum(lengths), bias=-5.0, **SMALL), boundaries(lengths))


@pytest.mark.parametrize(
    "dtype, N, P", [(torch.bfloat16, 64, 32), (torch.bfloat16, 256, 80), (torch.float16, 64, 32)]
)
@pytest.mark.parametrize("pieces", [1, 8])
@OPS
def test_half_precision_is_within_its_bounds(op, pieces, dtype, N, P, monkeypatch):
    """Documents of one token, shorter than a chunk and longer; o within 1.5 units of 2^-8, dB and dC within 3, and what
    decays depend on within 6."""
    if DEVICE == "cpu":
        interpret_bfloat16(monkeypatch)
    monkeypatch.setattr(ssd, "PROGRAMS", 1 if pieces == 1 else 256)
    monkeypatch.setattr(ssd, "SHORTEST", 1)
    lengths = [1, 20, 109]
    x = decaying_inputs(op, sum(lengths), G=1, heads=4, N=N, P=P)
    compare(op, x, boundaries(lengths), dtype, HALF_TOLERANCE)


@OPS
def test_neighbours_of_what_is_not_finite(op, monkeypatch):
    lengths = [5, 70, 1]
    monkeypatch.setattr(ssd, "SHORTEST", 1)  # in pieces
    base = {n: t.float() for n, t in decaying_inputs(op, sum(lengths), **SMALL).items()}
    check_neighbours(op, base, lengths, [1], impl="triton")


@pytest.mark.parametrize("segments", [False, True])
@OPS
def test_four_ranks_equal_one(op, layout, segments, monkeypatch):
    """Four of them: one document goes through two, and a rank has several; little of the state decays on the way. Also
    cut into segments, with kernels that fold."""
    if segments:
        monkeypatch.setattr(rules, "segment_length", lambda *_: 64)
        monkeypatch.setattr(folds, "by_kernels", lambda _: True)
    x = decaying_inputs(op, 320, bias=-5.0, **SMALL)
    compare_four_ranks(op, x, boundaries([10, 280, 30]), layout, TOLERANCE)


def test_views_of_one_projection_are_not_copied(monkeypatch):
    """x, B and C as the mixer gives them: the same numbers, bit by bit."""
    x = {n: t.float().to(DEVICE) for n, t in decaying_inputs("ssd", 70, **SMALL).items()}
    parts = [x["x"].flatten(2), x["B"].flatten(2), x["C"].flatten(2)]
    views = torch.cat(parts, 2).split([t.shape[2] for t in parts], 2)
    strided = x | {
        n: view.unflatten(2, x[n].shape[2:]) for n, view in zip(("x", "B", "C"), views, strict=True)
    }
    assert not any(strided[n].is_contiguous() for n in ("x", "B", "C"))
    want = gradients([call("ssd", own := leaves(x), impl="triton")[0]], own)
    monkeypatch.setattr(tiles, "dense_heads", lambda t: t)
    own = {n: t.requires_grad_() for n, t in strided.items()}
    got = gradients([call("ssd", own, impl="triton")[0]], own)
    assert same(got, want)


@pytest.mark.parametrize("indexed", [False, True])
def test_operators_are_well_formed(indexed):
    x = {n: t.float().to(DEVICE) for n, t in decaying_inputs("ssd", 70, **SMALL).items()}
    tokens = [x[n][0] for n in ("C", "B", "x", "dt")]
    check_stages(SSD, [*tokens, x["A"], x["D"], x["dt_bias"]], [1.0, 1.0, 0.0, 1.0, 2.0], indexed)


def test_dims_that_the_kernels_do_not_take():
    for dims in ({"N": 24}, {"P": 24}, {"N": 512}, {"P": 144}):
        x = {n: t.float().to(DEVICE) for n, t in decaying_inputs("ssd", 4, **SMALL | dims).items()}
        with pytest.raises(ValueError, match="impl = 'triton' cannot run chunk_ssd: "):
            call("ssd", x, impl="triton")
