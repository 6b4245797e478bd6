"""What one document holds reaches no other: NaN, Inf, or numbers so large that products overflow. "0 ×" is no mask."""

import pytest
import torch

from tests.ops.inputs import boundaries, call, device_of, leaves, make_inputs, raw_gate_inputs
from tests.ops.triton.bfloat16 import interpret_bfloat16
from titan_linear.ops import causal_conv1d

# the last is finite in float16; its square is not
NAN, INF, LARGE = float("nan"), float("inf"), 60000.0
TOKENS = ("q", "k", "v", "g", "beta")
# tokens of the document that is looked at: its last chunk has 6; and of those beside it
OWN, OTHERS = 70, 10


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if device_of("triton") == "cpu":
        interpret_bfloat16(monkeypatch)


def spoilt(x, own, value):
    """x [B, T, ...] with a value at the tokens that are not `own` [B, T]."""
    return torch.where(own.view(*own.shape, *[1] * (x.dim() - 2)), x, value)


def own_tokens(packed, device):
    """[B, T] bool: the second of three packed documents, or the first of two rows."""
    own = torch.zeros(
        (1, 2 * OTHERS + OWN) if packed else (2, OWN), dtype=torch.bool, device=device
    )
    own[0, OTHERS : OTHERS + OWN if packed else 0] = True
    own[0, :OWN] |= not packed
    return own


def documents(packed, device):
    return boundaries([OTHERS, OWN, OTHERS]).to(device) if packed else None


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batched"])
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_delta_rules(op, impl, dtype, raw, packed):
    """To the last bit. raw: norms and gates in the kernels."""
    device = device_of(impl)
    own = own_tokens(packed, device)
    B, T = own.shape
    dim = 32 if device == "cpu" else 128  # of Hopper's own kernels
    x = (raw_gate_inputs if raw else make_inputs)(op, T, B=B, H=1, HV=1, K=dim, V=dim)
    x = {name: t.to(device, dtype if name in TOKENS else torch.float32) for name, t in x.items()}
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(4)).to(x["v"])

    def results(value, *names):
        """The own document's last state, outputs and gradients of tokens; those of A_log and dt_bias are of all."""
        given = {
            name: spoilt(t, own, value) if name in names else t
            for name, t in (x | {"do": do}).items()
        }
        d_out, given = given.pop("do"), leaves(given)
        o, final = call(
            op, given, cu_seqlens=documents(packed, device), impl=impl, output_final_state=True
        )
        grads = torch.autograd.grad(o, [given[name] for name in TOKENS], d_out)
        return [final[1 if packed else 0].detach(), o[own].detach(), *(grad[own] for grad in grads)]

    want, every = results(None), (*TOKENS, "do")
    assert all(t.isfinite().all() for t in want)
    for value in (NAN, INF, -INF, LARGE):
        assert all(map(torch.equal, results(value, *every), want)), value


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batched"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("norm_dim", [None, 2])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_convolution(impl, norm_dim, dtype, packed):
    device = device_of(impl)
    own = own_tokens(packed, device)
    x, weight, dy = torch.randn(3, *own.shape, 8, generator=torch.Generator().manual_seed(0)).to(
        device, dtype
    )

    def results(value):
        given, d_out = (x, dy) if value is None else (spoilt(t, own, value) for t in (x, dy))
        given = given.clone().requires_grad_()
        cu = documents(packed, device)
        options = {"activation": "silu", "cu_seqlens": cu, "impl": impl, "output_final_state": True}
        y, final = causal_conv1d(
            given, weight[0, :4].T, widths=(4, 2, 2), norm_dim=norm_dim, **options
        )
        y = torch.cat(y, -1)
        return [
            final[1 if packed else 0].detach(),
            y[own].detach(),
            torch.autograd.grad(y, given, d_out)[0][own],
        ]

    want = results(None)
    for value in (NAN, INF, -INF, LARGE):
        assert all(map(torch.equal, results(value), want)), value
