"""SwiGLU against the same in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.ops.inputs import DEVICE
from titan_linear.ops.swiglu import swiglu
from titan_linear.ops.triton.activations import activate, activate_backward


def run(fn, *shape, dtype, given):
    """y and the gradients of gate_up [.., 2 H] and weight [D, H], in dtype, of inputs rounded to the dtype given."""
    generator = torch.Generator().manual_seed(0)
    *rows, H, D = shape
    gate_up, weight, dy = (
        torch.randn(*s, generator=generator) for s in ((*rows, 2 * H), (D, H), (*rows, D))
    )
    device = "cpu" if getattr(fn, "func", fn) is exact else DEVICE
    gate_up, weight, dy = (x.to(given).to(device, dtype) for x in (3 * gate_up, weight, dy))
    leaves = gate_up.requires_grad_(), weight.requires_grad_()
    y = fn(*leaves)
    return [x.detach().cpu().double() for x in (y, *torch.autograd.grad(y, leaves, dy))]


def exact(gate_up, weight, factor):
    gate, up = gate_up.chunk(2, -1)
    return F.linear(F.silu(factor * gate) * up, weight)


def error(x, y):
    return ((x - y).norm() / y.norm()).item()


@pytest.mark.parametrize(
    "shape, factor", [((1, 1, 8, 8), 1.0), ((2, 37, 40, 16), 0.3), ((1, 9, 300, 8), 1.0)]
)
@pytest.mark.parametrize(
    "impl", ["torch", "triton", pytest.param("triton", marks=pytest.mark.cuda, id="on a GPU")]
)
def test_swiglu_matches_float64(shape, factor, impl):
    ours = partial(swiglu, impl=impl, gate_factor=factor)
    definition = partial(exact, factor=factor)

    # bfloat16: a rounding of what the products read, and one of their result; Triton's interpreter cuts off instead
    cut_off = impl == "triton" and DEVICE == "cpu"
    bounds = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if cut_off else 2**-8}
    bounds |= {torch.float64: 1e-14} if impl == "torch" else {}
    for dtype, bound in bounds.items():
        got, want = (
            run(fn, *shape, dtype=d, given=dtype)
            for fn, d in ((ours, dtype), (definition, torch.float64))
        )
        errors = [error(x, y) for x, y in zip(got, want)]
        assert max(errors) <= bound, (dtype, errors)


def test_large_and_not_finite():
    gate_up = torch.tensor([[100.0, -100.0, torch.inf, torch.nan, 1, 1, 1, 1]], device=DEVICE)
    y = activate(gate_up, None, True).cpu()[0]
    assert y[:2].tolist() == [100.0, 0.0] and y[2] == torch.inf and y[3].isnan()


def test_operators_are_well_formed():
    gate_up, dy = torch.randn(2, 3, 8, device=DEVICE), torch.randn(2, 3, 4, device=DEVICE)
    torch.library.opcheck(activate.overload, (gate_up, None, True, 0.5))
    torch.library.opcheck(activate_backward.overload, (gate_up, None, dy, True, 0.5))
