"""A block in bfloat16, its elementwise work fused by the compiler, against float64."""

import pytest
import torch

from tests.models.ours import initialised
from titan_linear.distributed.parallelize import set_dtype
from titan_linear.models.config import ModelConfig
from titan_linear.models.mixers import GDN, Attention
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import build_cp_context

T, DIM = 384, 256
MIXERS = {
    "gated norm": GDN(heads=2, v_heads=2, head_dim=64, v_head_dim=128),
    "QK-norm, RoPE": Attention(heads=4, kv_heads=2, head_dim=64, qk_norm="head", output_gate=True),
}


def plan_of(mixer, device, dtype):
    """Three documents. A wide plan has wide angles."""
    edges = torch.tensor([0, 100, 101, T], dtype=torch.int32)
    context = build_cp_context(edges, rank=0, world_size=1, conv1d_kernel_size=4, device=device)
    plan = BatchPlan(context.position_ids, cp_context=context)
    plan.prepare(
        [] if mixer.rotary is None else [mixer.rotary], torch.promote_types(dtype, torch.float32)
    )
    context.mark_dynamic()
    return plan


def block_of(mixer, device, dtype):
    """With weights that bfloat16 holds, whatever dtype they are in; gate parameters are in float32 or wider."""
    model = initialised(
        ModelConfig(vocab_size=8, dim=DIM, pattern=(mixer,), num_layers=1, hidden_dim=512)
    )
    for each in (torch.bfloat16, dtype):
        set_dtype(model, each)
    return model.layers[0].to(device)


def errors(mixer, device, backend):
    """Of a compiled block in bfloat16, relative in 2-norm: its output, the gradients of what it is given and of its
    weights; of the gate's parameters relative to the magnitudes of what they sum up, which has both signs."""
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(1, T, DIM, generator=draw).bfloat16() for _ in range(2))
    found, sizes = [], {}
    for where, dtype in ((device, torch.bfloat16), (torch.device("cpu"), torch.float64)):
        block, plan, exactly = (
            block_of(mixer, where, dtype),
            plan_of(mixer, where, dtype),
            dtype == torch.float64,
        )
        gates = listen(block.mixer) if exactly and hasattr(block.mixer, "A_log") else []
        forward = torch.compile(block.forward, backend=backend, fullgraph=device.type == "cuda")
        own, given = x.to(where, dtype).requires_grad_(), dy.to(where, dtype)
        y, *_ = (block if exactly else forward)(own, plan)
        dx, *others = torch.autograd.grad(y, [own, *block.parameters(), *gates], given)
        names = [name for name, _ in block.named_parameters()]
        if gates:
            sizes = magnitudes(block.mixer, gates[0], others.pop())
        tensors = {"y": y, "dx": dx} | dict(zip(names, others, strict=True))
        found.append({name: t.detach().cpu().double() for name, t in tensors.items()})
    ours, exact = found
    return {
        name: ((ours[name] - exact[name]).norm() / sizes.get(name, exact[name]).norm()).item()
        for name in exact
    }


def listen(mixer):
    """What the mixer will make its decays of, [1, T, HV], once it runs."""
    gates, compute = [], mixer._gates

    def heard(x):
        gate, *others = compute(x)
        gates.append(gate)
        return gate, *others

    mixer._gates = heard
    return gates


def magnitudes(mixer, gate, d_gate):
    """Σ_t |·| of the terms of dA_log = Σ_t dg_t g_t and ddt_bias = Σ_t dg_t g'_t, for g = -exp(A_log) softplus."""
    raw = gate + mixer.dt_bias
    d_A_log = d_gate * torch.nn.functional.softplus(raw) / torch.sigmoid(raw)
    return {"mixer.A_log": d_A_log.abs().sum((0, 1)), "mixer.dt_bias": d_gate.abs().sum((0, 1))}


@pytest.mark.cuda
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_compiled_block(mixer):
    """A rounding is 2^-9 at most. What the residual goes through has one; gradients of weights are at the end of a
    chain of products, four of them at most (0.9 to 4.0 roundings on an H200)."""
    torch._dynamo.reset()
    found = errors(MIXERS[mixer], torch.device("cuda"), "inductor")
    bounds = dict.fromkeys(("y", "dx", "mixer.A_log", "mixer.dt_bias"), 2**-8)
    assert not {
        name: error for name, error in found.items() if not error <= bounds.get(name, 2**-6)
    }
