"""What is counted on the meta device against what layers compute and keep."""

import os
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from tests.dispatch import Inside
from tests.models.ours import initialised
from tests.ops.inputs import MAKERS, call, leaves
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.mixers import GDN, KDA, MLA, RWKV7, Attention, Mamba2
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.ops import build_cp_context
from titan_linear.ops.runtime.costs import RecurrenceCost
from titan_linear.ops.runtime.operators import SPECS, contexts
from titan_linear.ops.triton import ssd
from titan_linear.planner.counting import _OneKernelNorms, count
from titan_linear.planner.memory import MicroBatchShape, layers

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

T = 192
MIXERS = (
    KDA(heads=1, v_heads=2, head_dim=32, v_head_dim=32),
    GDN(heads=1, v_heads=2, head_dim=32, v_head_dim=32),
    Attention(heads=4, kv_heads=2, head_dim=32, qk_norm="head", output_gate=True),
    MLA(heads=4, kv_rank=16, nope_dim=16, shared_k_dim=8, v_dim=16),
)
PLAIN = MicroBatchShape(1024, 1, None, 1, "contiguous", "auto", "kcp", 1, 1, torch.bfloat16)
MODEL = replace(preset("hybrid", "debug"), dim=64, hidden_dim=96, pattern=MIXERS, num_layers=4)


def plan(device):
    cu_seqlens = torch.tensor([0, 100, T], dtype=torch.int32)
    context = build_cp_context(cu_seqlens, rank=0, world_size=1, device=torch.device(device))
    return BatchPlan(context.position_ids, cp_context=context)


def counted(layer):
    """By itself, in float32."""
    with torch.device("meta"):
        block = Decoder(MODEL).layers[layer]
        x = torch.empty(1, T, MODEL.dim, requires_grad=True)
    return count(block, x, plan("meta"))


RECURRENT = {
    "kda": (KDA(heads=2, v_heads=4, head_dim=64, v_head_dim=128), (4, 64, 128)),
    "kda, any gate": (
        KDA(heads=2, v_heads=4, head_dim=64, v_head_dim=128, lower_bound=None),
        (4, 64, 128),
    ),
    "gdn": (GDN(heads=2, v_heads=4, head_dim=64, v_head_dim=128), (4, 64, 128)),
    "mamba2": (Mamba2(heads=4, head_dim=64, state_dim=128), (4, 128, 64)),
    "rwkv7": (RWKV7(heads=4, head_dim=64, w_rank=8, a_rank=8, v_rank=8, g_rank=8), (4, 64, 64)),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_operators_of_recurrences_state_what_they_compute(kind):
    """Over segments too, into which four heads cut a document; `any` gates where the kernels look at each chunk's."""
    mixer, dims = RECURRENT[kind]
    model = ModelConfig(vocab_size=256, dim=64, pattern=(mixer,), num_layers=1, hidden_dim=96)
    (layer,) = layers(model, PLAIN._replace(seq_len=32768))
    calls = [*layer.forward.calls, *layer.backward.calls]
    costs = {call.name: call.cost for call in calls if isinstance(call.cost, RecurrenceCost)}
    assert len(costs) >= 4
    assert {cost[:4] for cost in costs.values()} == {(32768, *dims)}
    gated = {name for name, cost in costs.items() if cost.any_gate}
    assert gated == ({"kda_prepare", "kda_recompute", "kda_backward"} if "any" in kind else set())


@pytest.mark.parametrize("layer", range(4), ids=lambda i: MIXERS[i].name)
def test_what_layers_keep(layer):
    """By the kernels, interpreted, and by the CPU's attention."""
    model = initialised(MODEL).use("triton", torch.device("cpu"), torch.float32)
    block, kept = model.layers[layer], {}
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held: its address is not used again
        return tensor

    x, (forward, _) = torch.randn(1, T, MODEL.dim, requires_grad=True), contexts()
    with _OneKernelNorms(), saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, plan("cpu"))
    with forward:
        block(x, plan("cpu"))
    found = counted(layer)
    assert found.plain.kept == pytest.approx(
        sum(storage.nbytes() for storage in kept.values()), rel=0.05
    )
    assert found.plain.selective == pytest.approx(forward.region.nbytes, rel=0.05)
    assert found.input == x.nbytes


class Backward(Inside):
    """A backward operator's bytes as planned, and as allocated without those of its results."""

    found = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "titan_linear" or not op.name().endswith("_backward"):
            return super().__torch_dispatch__(op, types, args, kwargs)
        self.found = 0
        out = super().__torch_dispatch__(op, types, args, kwargs)
        self.found -= sum(t.nbytes for t in out)
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=True))
        self.planned = SPECS[op.name().removeprefix("titan_linear::")].temporary(**given)
        return out

    def ran(self, op, args, kwargs, out):
        if "empty" in op.name():
            self.found += out.nbytes


@pytest.mark.parametrize(
    "name, dims",
    [
        *((name, {"H": H, "HV": 2, "K": 64, "V": 64}) for name in ("kda", "gdn") for H in (1, 2)),
        *(("ssd", {"G": G, "heads": 2, "N": 64, "P": 128}) for G in (1, 2)),
    ],
    ids=str,
)
def test_what_backward_takes_and_frees(name, dims, monkeypatch):
    """With value heads of their own, and with shared queries and keys."""
    monkeypatch.setattr(ssd, "PROGRAMS", 1)
    x = leaves({n: t.float() for n, t in MAKERS[name](2 * T, **dims).items()})
    with Backward() as seen:
        call(name, x, impl="triton")[0].sum().backward()
    assert seen.planned == pytest.approx(seen.found, rel=0.02)


def test_products_are_those_of_the_flops():
    """Forward's are those that PyTorch counts, of attention's layer; backward's are twice as many."""
    found = counted(2)
    passes = (found.forward, found.backward)
    flops = [
        sum(2 * m * n * k * times for (m, n, k), times in work.products.items()) for work in passes
    ]
    model = initialised(MODEL)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.layers[2](torch.randn(1, T, MODEL.dim), plan("cpu"))
    of_products = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if op is torch.ops.aten.mm
    )
    assert flops == [of_products, 2 * of_products]


def test_products_in_float32_are_told_apart():
    """All those of a layer in float32, none of one in bfloat16."""
    assert counted(2).forward.wide_products == counted(2).forward.products
    _, _, attention, _ = layers(preset("nemotron-h", "debug"), PLAIN)
    assert not attention.forward.wide_products.total()


def test_what_is_fused():
    """Compiled, the residual x + y is read and written once; y comes from a product."""
    found = counted(2)
    assert 0 < found.forward.fused < 0.5 * found.forward.elementwise
    assert 0 < found.forward.groups < found.forward.operations


@pytest.mark.parametrize(
    "keys",
    [
        dict(cp=2, layout="zigzag"),
        dict(cp=4, softmax_method="ring"),
        dict(cp=2, softmax_method="ulysses", linear_method="ulysses"),
        dict(tp=2),
        dict(cp=2, tp=2),
        dict(streams=2),
        dict(mean=64),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["hybrid", "nemotron-h", "falcon-h1"])
def test_every_split_is_counted(name, keys):
    """Exchanges are seen, and work is shared."""
    model = preset(name, "debug")
    whole, part = layers(model, PLAIN), layers(model, PLAIN._replace(**keys))
    split = PLAIN._replace(**keys)
    shares = split.cp * split.tp / split.streams
    for one, other in zip(whole, part, strict=True):
        flops = [
            sum(m * n * k * t for (m, n, k), t in layer.forward.products.items())
            for layer in (one, other)
        ]
        assert flops[1] * shares == pytest.approx(flops[0], rel=0.1)
    names = {call.name for layer in part for call in layer.forward.calls}
    exchanges = {
        "kcp_incoming",
        "ring_forward",
        "allgather_forward",
        "exchange_heads",
        "gather_along",
    }
    assert bool(names & exchanges) == (shares > 1)
