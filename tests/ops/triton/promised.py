"""Errors of the kernels that the documentation promises, and runs that measure them."""

import torch

from tests.ops.inputs import DEVICE, call, leaves

FLOAT32 = ("g", "A_log", "dt_bias", "initial_state")
PROMISED = dict.fromkeys(("o", "final", "dq", "dk", "dv", "dinitial_state"), 5e-3) | dict.fromkeys(
    ("dg", "dbeta", "dA_log", "ddt_bias"), 1e-2
)


def to_device(x, dtype=torch.bfloat16):
    return {n: t.to(DEVICE, torch.float32 if n in FLOAT32 else dtype) for n, t in x.items()}


def run(op, x, weights, **options):
    """Outputs and, of Σ weights·outputs, every gradient."""
    x = leaves(x)
    outputs = [y for y in call(op, x, **options) if y is not None]
    loss = sum((y.double() * w.double()).sum() for y, w in zip(outputs, weights, strict=True))
    names = ["o", "final"][: len(outputs)] + [f"d{n}" for n in x]
    return dict(
        zip(
            names, [y.detach() for y in outputs] + list(torch.autograd.grad(loss, list(x.values())))
        )
    )
