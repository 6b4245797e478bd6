"""AdamW's update in one pass, against torch's in float64."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.inputs import DEVICE
from titan_linear.config import Optimizer
from titan_linear.ops.triton.adamw import BLOCK, adamw
from titan_linear.step import optimizer as optimizer_of_runs
from titan_linear.step.optimizer import ComputeCopies, StepNumbers, build_optimizer, update

OPTIONS = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_torchs(dtype, betas):
    """Of tensors that do not fill their last block; the third step is skipped. Each of a step's ten roundings is of
    2⁻²⁴, and updates are no larger than the weights."""
    draw = torch.Generator().manual_seed(0)
    p = torch.randn(2 * BLOCK + 5, generator=draw).to(DEVICE)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    exact = nn.Parameter(p.double())
    options = OPTIONS | {"betas": betas}
    theirs = torch.optim.AdamW([exact], **options)
    clip = torch.tensor(0.25, device=DEVICE)
    for step, skipped in ((1, 0.0), (2, 0.0), (3, 1.0), (3, 0.0)):
        g = torch.randn(p.shape, generator=draw).to(DEVICE, dtype)
        copy = torch.zeros_like(p, dtype=torch.bfloat16)
        at, skips = (torch.tensor(float(x), device=DEVICE) for x in (step, skipped))
        adamw(p, copy, g, m, v, at, clip, skips, options)
        off = (copy - p * (1 - skipped)).abs()
        assert (off <= 2**-7 * p.abs()).all()  # Triton's interpreter cuts off instead of rounding
        if not skipped:
            exact.grad = 0.25 * g.double()
            theirs.step()
    state = theirs.state[exact]
    for ours, expected in ((p, exact), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert (ours - expected).norm() <= 3 * 10 * 2**-24 * expected.norm()


class NothingRead(TorchDispatchMode):
    """Inside, the host asks for no tensor's number, for which it would wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_large_tensors_beside_small_ones(micro_steps, monkeypatch):
    """A run's update of both, from gradients in bfloat16; with a step that is not finite, and other factors that clip.
    AdamW's updates hardly depend on a factor of all gradients: moments do."""
    monkeypatch.setattr(optimizer_of_runs, "is_large", lambda p: p.numel() > 7)
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(1, n, device=DEVICE)) for n in (BLOCK + 5, 7))
    theirs = [nn.Parameter(p.detach().double()) for p in model]
    optimizer, exact = (
        build_optimizer(model, Optimizer()),
        torch.optim.AdamW(theirs, lr=0.1, **of(Optimizer())),
    )
    copies = ComputeCopies(model, torch.bfloat16)
    for loss, norm in ((1.0, 4.0), (float("nan"), 4.0), (1.0, 64.0)):
        grads = [torch.zeros_like(p) for p in theirs]
        for _ in range(micro_steps):
            with copies:
                for p, copy in copies.copy_of.items():
                    # cut off by the interpreter, as above
                    assert ((copy - p).abs() <= 2**-7 * p.abs()).all()
                xs = [torch.randn_like(p) for p in model.parameters()]
                sum((x * p).sum() for x, p in zip(xs, model.parameters())).backward()
            grads = [g + x.bfloat16().double() for g, x in zip(grads, xs)]
        numbers = StepNumbers(*torch.tensor([loss, norm, 0.0], dtype=torch.float64, device=DEVICE))
        with NothingRead():
            update(optimizer, numbers, lr=0.1, max_norm=2.0, copies=copies)
        optimizer.zero_grad()
        if loss == 1.0:
            for p, g in zip(theirs, grads):
                p.grad = g * 2 / norm
            exact.step()
    for p, expected in zip(model, theirs):
        assert (p - expected).norm() <= 1e-6 * expected.norm()
        ours, want = optimizer.state[p], exact.state[expected]
        assert ours["step"] == want["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            assert (ours[name] - want[name]).norm() <= 1e-6 * want[name].norm()


def of(config):
    return {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
