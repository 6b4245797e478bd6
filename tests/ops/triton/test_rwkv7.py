"""The kernels behind chunk_rwkv7 against the token-by-token oracle in float64: outputs, states and gradients of all
inputs, packed, in segments and on ranks; leaks between documents; what they refuse.

    ./tests/run.sh tests/ops/triton/test_rwkv7.py              # in Triton's interpreter, or on a GPU if there is one
    ./tests/run.sh tests/ops/triton/test_rwkv7.py -m cuda      # long documents in bfloat16, on a GPU
"""

import pytest
import torch

from tests.ops.inputs import (
    DEVICE,
    boundaries,
    call,
    compare_four_ranks,
    dplr_inputs,
    errors,
    leaves,
    same,
)
from tests.ops.triton.bfloat16 import interpret_bfloat16
from tests.ops.triton.well_formed import check_stages
from titan_linear.ops.reference.delta_rule import l2norm
from titan_linear.ops.triton.rwkv7 import RWKV7

TOLERANCE = 2e-5  # float32 sums of up to 130 terms, through exponentials
UNIT = 2**-8
# The others: 1.5 units. With hardly any decay, the roundings of operands add up to 1.6 in da and db, as they do in
# float64 arithmetic with operands rounded to bfloat16.
HALF_TOLERANCE = {"w": 3 * UNIT, "a": 2 * UNIT, "b": 2 * UNIT}
NAMES = {"q": "r", "gk": "w"}
LENGTHS = [1, 70, 0, 64, 3]


RAW = {"use_gate_in_kernel": True}


def rwkv7_inputs(T, *, decay=0.6065, K=32, **dims):
    """decay: the largest −w of a token."""
    x = dplr_inputs(T, **{"H": 1, "K": K, "V": K} | dims)
    return {NAMES.get(name, name): t for name, t in (x | {"gk": decay * x["gk"]}).items()}


def compare(x, lengths, dtype=torch.float32, **options):
    found = errors(
        "rwkv7",
        {name: t.to(dtype) for name, t in x.items()},
        boundaries(lengths),
        impl="triton",
        **options,
    )
    bounds = dict.fromkeys(found, TOLERANCE)
    if dtype != torch.float32:
        bounds = dict.fromkeys(found, 1.5 * UNIT) | HALF_TOLERANCE
    assert not {name: error for name, error in found.items() if not error < bounds[name]}, found


@pytest.mark.parametrize(
    "decay, dims, options",
    [
        (1e-3, {}, {}),
        (0.6065, {"H": 2}, {}),
        (2.0, {}, {}),
        (0.6065, {}, {"disable_recompute": True}),
        (0.6065, {"K": 16, "V": 24}, {}),
        (9.0, {}, RAW),
        (9.0, {"K": 16, "V": 24}, RAW),
    ],
    ids=str,
)
def test_packed_documents_equal_the_definition(decay, dims, options):
    """Of one token, shorter than a chunk, empty, exactly one; also heads that are filled up."""
    compare(rwkv7_inputs(sum(LENGTHS), decay=decay, **dims), LENGTHS, **options)


def test_the_fastest_decay_at_every_token():
    x = rwkv7_inputs(130)
    compare(x | {"w": torch.full_like(x["w"], -2.0)}, [130])


def test_reads_that_a_neumann_series_would_not_sum():
    """Nearly the same vector is removed wholly at each token, with hardly any decay."""
    x = rwkv7_inputs(130, decay=1e-3)
    removed = l2norm(x["a"][:, :1] + 1e-3 * x["k"])
    compare(x | {"a": -removed, "b": removed}, [130])


@pytest.mark.parametrize(
    "dtype, decay, options",
    [(torch.bfloat16, 0.6065, {}), (torch.float16, 0.6065, {}), (torch.bfloat16, 9.0, RAW)],
    ids=str,
)
def test_half_precision_is_within_its_bounds(dtype, decay, options, monkeypatch):
    """RWKV-7's heads; documents of one token, shorter than a chunk and longer."""
    if DEVICE == "cpu":
        interpret_bfloat16(monkeypatch)
    lengths = [1, 20, 130]
    compare(rwkv7_inputs(sum(lengths), decay=decay, K=64), lengths, dtype, **options)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "decay, options", [(1e-3, {}), (0.6065, {}), (2.0, {}), (9.0, RAW)], ids=str
)
def test_long_documents_are_within_their_bounds(decay, options):
    lengths = [1, 63, 4096, 65]
    compare(rwkv7_inputs(sum(lengths), decay=decay, K=64, H=4), lengths, torch.bfloat16, **options)


def test_documents_in_segments(short_segments):
    lengths = [0, 10, 64, 129]
    compare(rwkv7_inputs(sum(lengths), decay=1e-3), lengths)


def test_four_ranks_equal_one(layout):
    """Four of them: one document goes through two, and a rank has several; little of the state decays on the way."""
    compare_four_ranks(
        "rwkv7", rwkv7_inputs(320, decay=1e-3), boundaries([10, 280, 30]), layout, TOLERANCE
    )


def test_neighbours_of_what_is_not_finite():
    """Whatever a document holds, the others' outputs and gradients are what they are without it; and a second run gives
    the same bits."""
    lengths = [5, 70, 1]
    cu, base = boundaries(lengths), {n: t.float() for n, t in rwkv7_inputs(sum(lengths)).items()}

    def results(given, document):
        x = leaves({name: t.to(DEVICE) for name, t in given.items()})
        o, _ = call("rwkv7", x, cu_seqlens=cu.to(DEVICE), impl="triton")
        do = torch.ones_like(o)
        do[:, cu[document] : cu[document + 1]] = given["v"][:, cu[document] : cu[document + 1]].to(
            do
        )
        return [o.detach(), *torch.autograd.grad(o, list(x.values()), do)]

    before = results(base, 0)
    assert same(results(base, 0), before)
    for document, value in ((0, 6e4), (1, torch.nan), (1, torch.inf), (2, torch.inf)):
        inside = slice(int(cu[document]), int(cu[document + 1]))
        changed = {name: t.clone() for name, t in base.items()}
        for name, t in changed.items():
            t[:, inside] = value if name != "w" else -2.0 if value == 6e4 else torch.nan
        for name, a, b in zip(
            ["o", *base], results(changed, document), results(base, document), strict=True
        ):
            a, b = (torch.cat([t[:, : inside.start], t[:, inside.stop :]], 1) for t in (a, b))
            assert torch.equal(a, b), (name, document, value)


@pytest.mark.parametrize("indexed", [False, True])
def test_operators_are_well_formed(indexed):
    inputs = [t[0].float().to(DEVICE) for t in dplr_inputs(70, H=1, K=32, V=32).values()]
    check_stages(RWKV7, inputs, [1.0, 0.0], indexed)


def test_dims_that_the_kernels_do_not_take():
    x = {name: t.float().to(DEVICE) for name, t in rwkv7_inputs(4, K=96).items()}
    with pytest.raises(
        ValueError, match="impl = 'triton' cannot run chunk_rwkv7: K = 96 is too large: K <= 64"
    ):
        call("rwkv7", x, impl="triton")
