"""The convolution's kernels against a dense fp64 convolution of each document alone."""

import os
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.ops.inputs import DEVICE, same
from titan_linear.ops import causal_conv1d
from titan_linear.ops.torch.delta_rule import l2norm
from titan_linear.ops.triton import conv1d as conv
from titan_linear.ops.triton.chunks import chunks_of

OF_V = 7  # channels of v, beside q and k of one and two heads


def reference(x, weight, bias, state, cu_seqlens, silu, norm_dim):
    """x [T, D], weight [D, W], state [N, D, W-1] -> y [T, D], final state, document by document. norm_dim: heads of all
    but the last OF_V channels are normalised."""
    ys, finals = [], []
    W = weight.shape[1]
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        past = state[n] if state is not None else x.new_zeros(x.shape[1], W - 1)
        full = torch.cat([past, x[start:end].t()], 1)  # [D, W - 1 + T]
        if end > start:
            z = F.conv1d(full[None], weight[:, None], bias, groups=x.shape[1])[0].t()
            ys.append(F.silu(z) if silu else z)
        finals.append(full[:, full.shape[1] - (W - 1) :])
    y = torch.cat(ys)
    if norm_dim:
        y = torch.cat(
            [l2norm(y[:, :-OF_V].unflatten(1, (-1, norm_dim))).flatten(1), y[:, -OF_V:]], 1
        )
    return y, torch.stack(finals)


def run_both(
    lengths,
    D,
    W,
    *,
    silu=True,
    has_bias=True,
    has_state=True,
    dtype=torch.float32,
    seed=0,
    norm_dim=None,
):
    """Outputs and gradients of every input: (ours, reference), by name."""
    gen = torch.Generator().manual_seed(seed)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    inputs = {"x": draw(cu[-1], D), "weight": draw(D, W)}
    inputs["bias"] = draw(D) if has_bias else None
    inputs["state"] = draw(len(lengths), D, W - 1) if has_state else None
    dy, dfinal = draw(cu[-1], D), draw(len(lengths), D, W - 1)

    def grads(fn, to):
        leaves = {
            k: v.to(**to).clone().requires_grad_() for k, v in inputs.items() if v is not None
        }
        y, final = fn(leaves["x"], leaves["weight"], leaves.get("bias"), leaves.get("state"))
        ((y * dy.to(**to)).sum() + (final * dfinal.to(**to)).sum()).backward()
        return {"y": y.detach(), "final": final.detach()} | {
            "d" + k: v.grad for k, v in leaves.items()
        }

    def ours(x, weight, bias, state):
        y, final = causal_conv1d(
            x[None],
            weight,
            bias,
            activation="silu" if silu else None,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=DEVICE),
            widths=[norm_dim, D - OF_V - norm_dim, OF_V] if norm_dim else [D],
            norm_dim=norm_dim,
            impl="triton",
        )
        return torch.cat(y, -1)[0], final

    return grads(ours, {"device": DEVICE, "dtype": dtype}), grads(
        lambda *a: reference(*a, cu, silu, norm_dim), {"device": "cpu", "dtype": torch.float64}
    )


def check(pair, tolerance):
    for name, expected in pair[1].items():
        if expected.numel():
            error = (pair[0][name].cpu().double() - expected).norm() / expected.norm()
            assert error < tolerance, (name, float(error))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs per document at small sizes."""
    if DEVICE == "cpu":
        monkeypatch.setattr(conv, "BT", 16)
        monkeypatch.setattr(conv, "FORWARD_CONFIG", conv.FORWARD_CONFIG | {"BD": 16, "R": 4})
        monkeypatch.setattr(conv, "BACKWARD_CONFIG", conv.BACKWARD_CONFIG | {"BD": 16, "R": 4})


@pytest.mark.parametrize("W", [1, 2, 4, 8])
def test_every_output_and_gradient_matches_fp64(W):
    check(run_both([1, 2, 37, 0, 16, 3], D=24, W=W), 1e-6)


@pytest.mark.parametrize("options", [{"silu": False}, {"has_bias": False}, {"has_state": False}])
def test_optional_parts(options):
    check(run_both([5, 33], D=20, W=4, **options), 1e-6)


@pytest.mark.parametrize("K", [4, 6, 96, 128])
@pytest.mark.parametrize(
    "options", [{}, {"silu": False}, {"has_state": False, "has_bias": False}], ids=str
)
def test_heads_of_q_and_k_are_normalised(K, options):
    """Heads that share a block, with and without idle places in it, and heads that widen it."""
    check(run_both([1, 2, 37, 0, 16, 3], D=3 * K + OF_V, W=4, norm_dim=K, **options), 1e-6)


def test_half_precision_rounds_once():
    check(run_both([40, 7], D=16, W=4, dtype=torch.float16), 1e-3)
    check(run_both([40, 7], D=31, W=4, dtype=torch.float16, norm_dim=8), 1e-3)


def test_batch_rows_are_documents():
    gen = torch.Generator().manual_seed(2)
    x, w = (
        torch.randn(3, 19, 16, generator=gen).to(DEVICE),
        torch.randn(16, 4, generator=gen).to(DEVICE),
    )
    rows = [causal_conv1d(x[i : i + 1], w, activation="swish", impl="triton")[0] for i in range(3)]
    assert torch.equal(causal_conv1d(x, w, activation="swish", impl="triton")[0], torch.cat(rows))


def test_strided_input_and_opcheck():
    gen = torch.Generator().manual_seed(3)
    wide = torch.randn(18, 48, generator=gen).to(DEVICE).requires_grad_()
    w = torch.randn(16, 4, generator=gen).to(DEVICE).requires_grad_()
    state = torch.randn(2, 16, 3, generator=gen).to(DEVICE).requires_grad_()
    cu = torch.tensor([0, 11, 18], dtype=torch.int32, device=DEVICE)
    x, rest = wide[:, 16:32], (cu, chunks_of(cu, 18, conv.BT).chunk_index, [6, 4, 6], True, 2, True)
    given, dense = (conv.conv1d(y, w, None, state, None, *rest) for y in (x, x.contiguous()))
    assert all(map(torch.equal, given, dense))
    index = torch.tensor([1, -1], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(
        conv.conv1d.overload, (x.detach().requires_grad_(), w, None, state, index, *rest)
    )


@pytest.mark.parametrize("widths", [(16, 16, 32), (24, 7, 3), (5, 40)])
def test_parts_are_those_of_the_whole(widths):
    """Bit for bit, with gradients in tensors of their own, of rows any stride apart."""
    gen, D = torch.Generator().manual_seed(5), sum(widths)
    cu, x, w, bias = (
        torch.tensor([0, 21, 40], dtype=torch.int32),
        *(torch.randn(*s, generator=gen) for s in ((1, 40, D), (D, 4), (D,))),
    )
    dy = torch.randn(1, 40, D, generator=gen).to(DEVICE)
    found = []
    for parts in (None, widths):
        leaves = [t.to(DEVICE).requires_grad_() for t in (x, w, bias)]
        y, _ = causal_conv1d(
            *leaves, activation="silu", cu_seqlens=cu.to(DEVICE), widths=parts, impl="triton"
        )
        grads = (
            [g.contiguous() if i else g for i, g in enumerate(dy.split(widths, -1))]
            if parts
            else [dy]
        )
        found.append([torch.cat(y, -1) if parts else y, *torch.autograd.grad(y, leaves, grads)])
    assert same(*found)


def test_states_by_index():
    """Each entry's row of the initial states, or none: as states [N, D, W-1] with zeros, bit for bit."""
    gen, lengths = torch.Generator().manual_seed(4), [5, 0, 33, 2]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)
    index = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    x, w, halo = (
        torch.randn(*s, generator=gen).to(DEVICE) for s in ((40, 16), (16, 4), (3, 16, 3))
    )
    dy, d_final = (
        torch.randn(40, 16, generator=gen).to(DEVICE),
        torch.randn(4, 16, 3, generator=gen).to(DEVICE),
    )
    spread = torch.stack([halo[2], torch.zeros_like(halo[0]), halo[0], torch.zeros_like(halo[0])])
    found = []
    for state, rows in ((halo, index), (spread, None)):
        leaves = [t.clone().requires_grad_() for t in (x, w, state)]
        rest = chunks_of(cu, 40, conv.BT).chunk_index, [16], True, None, True
        out = conv.conv1d(*leaves[:2], None, leaves[2], rows, cu, *rest)
        out = out[0], out[3]
        found.append((*out, *torch.autograd.grad(out, leaves, (dy, d_final))))
    (*ours, d_halo), (*theirs, d_spread) = found
    assert same(ours, theirs)
    assert torch.equal(
        d_halo, torch.stack([d_spread[2], torch.zeros_like(d_spread[0]), d_spread[0]])
    )


@pytest.mark.parametrize(
    "x_dtype, width, activation, word",
    [(torch.float64, 4, None, "float64"), (None, 9, None, "W <= 8"), (None, 4, "relu", "relu")],
)
def test_unsupported_is_an_error(x_dtype, width, activation, word):
    x, weight = (
        torch.zeros(1, 4, 8, dtype=x_dtype, device=DEVICE),
        torch.zeros(8, width, device=DEVICE),
    )
    with pytest.raises(ValueError, match=word):
        causal_conv1d(x, weight, activation=activation, impl="triton")


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)]
)
def test_on_the_device(dtype, tolerance):
    pair = run_both([1, 700, 3, 1300, 44], D=1000, W=4, dtype=dtype)
    check(pair, tolerance)
    again, _ = run_both([1, 700, 3, 1300, 44], D=1000, W=4, dtype=dtype)
    assert all(torch.equal(pair[0][k], again[k]) for k in again)


@pytest.mark.cuda
@pytest.mark.parametrize("K", [32, 96, 128, 256])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 2e-6)]
)
def test_normalised_on_the_device(dtype, tolerance, K):
    lengths, shape = (
        [1, 700, 3, 1300, 44],
        {"D": 9 * K + OF_V, "W": 4, "dtype": dtype, "norm_dim": K},
    )
    pair = run_both(lengths, **shape)
    check(pair, tolerance)
    again, _ = run_both(lengths, **shape)
    assert all(torch.equal(pair[0][k], again[k]) for k in again)
