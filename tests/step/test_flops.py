"""FLOPs as stated, against a count of what the PyTorch implementation dispatches."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import flop_registry

from tests.dispatch import Inside
from tests.models.ours import initialised, labels_of, loss_of, positions
from titan_linear.models.config import Documents, ModelConfig, MoEConfig
from titan_linear.models.decoder import Block
from titan_linear.models.mixers import GDN, KDA, MLA, RWKV7, Attention, Lightning, Mamba2, ShortConv
from titan_linear.models.plan import BatchPlan, Later
from titan_linear.models.presets import preset
from titan_linear.step import flops
from titan_linear.step.flops import (
    forward_flops,
    known_peak,
    peak_tflops,
    token_flops,
    training_flops,
)

aten = torch.ops.aten
CHUNKED, PACKED = [64, 192, 128], [1, 70, 64, 150]  # documents of whole chunks, and of any length
DIM = 24
MIXERS = {
    "attention": Attention(heads=4, kv_heads=2, head_dim=8, qk_norm="head", output_gate=True),
    "plain attention": Attention(heads=2, kv_heads=2, head_dim=12),
    # the CPU pads v to the keys
    "mla": MLA(heads=4, kv_rank=16, nope_dim=8, shared_k_dim=4, v_dim=12),
    "mla, positions": MLA(
        heads=4, kv_rank=16, nope_dim=8, shared_k_dim=4, v_dim=12, rope_theta=1e4, head_gate=True
    ),
    "kda, whole gates": KDA(heads=2, v_heads=4, head_dim=8, v_head_dim=12, low_rank_gates=False),
    "kda": KDA(heads=2, v_heads=4, head_dim=8, v_head_dim=12),
    "kda, softplus gate": KDA(
        heads=2, v_heads=2, head_dim=8, v_head_dim=12, lower_bound=None, conv_size=3
    ),
    "gdn": GDN(heads=2, v_heads=4, head_dim=8, v_head_dim=12),
    "mamba2": Mamba2(heads=4, head_dim=12, state_dim=8, groups=2),
    "rwkv7": RWKV7(heads=4, head_dim=12, w_rank=4, a_rank=5, v_rank=6, g_rank=7),
    "lightning": Lightning(heads=4, head_dim=12),
    "short_conv": ShortConv(channels=16),
}
MOE = MoEConfig(num_experts=8, top_k=2, hidden_dim=16, shared_hidden_dim=20, shared_gate=True)
LATENT = replace(MOE, latent_dim=12)


class Products(Inside):
    """Counts the operations of products by operator."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def ran(self, op, args, kwargs, out):
        packet = aten.addmm if op.overloadpacket is aten.addmm_ else op.overloadpacket
        if packet is aten._scaled_dot_product_flash_attention_for_cpu:
            (B, H, T, D), Dv, causal = args[0].shape, args[2].shape[-1], args[4]
            assert causal
            self.counts["attention"] += 2 * B * H * (D + Dv) * T * (T + 1) // 2
        elif packet is aten.linalg_solve_triangular:
            *batch, C, columns = args[1].shape
            # the diagonal is one
            self.counts["solve"] += int(np.prod(batch)) * C * (C - 1) * columns
        elif packet in flop_registry:
            name = "convolution" if packet is aten.convolution else "products"
            self.counts[name] += flop_registry[packet](*args, **kwargs, out_val=out)

    @property
    def total(self):
        return sum(self.counts.values())


def model_of(mixer, **options):
    return ModelConfig(
        vocab_size=40, dim=DIM, pattern=(mixer,), num_layers=1, hidden_dim=32, **options
    )


def plan_of(lengths):
    bounds = np.cumsum([0, *lengths])
    cu = torch.from_numpy(bounds.astype(np.int32))
    return BatchPlan(positions(bounds.tolist()), cu_seqlens=cu), Documents.of(cu.numpy())


def stated(mixer, documents):
    """Of the first layer's mixer."""
    with torch.device("meta"):
        module = mixer.first.build(model_of(mixer), 0)
    return documents.tokens * token_flops(module) + mixer.flops(documents)


@torch.no_grad()
def counted(model, lengths):
    """Of the mixer's forward."""
    decoder, (plan, documents) = initialised(model), plan_of(lengths)
    with Products() as products:
        decoder.layers[0].mixer(torch.randn(1, documents.tokens, DIM), plan)
    return products


@pytest.mark.parametrize("name", ["attention", "plain attention", "mla"])
def test_softmax_mixers_by_pairs(name):
    products, documents = counted(model_of(MIXERS[name]), PACKED), plan_of(PACKED)[1]
    assert products.total == stated(MIXERS[name], documents)
    ops = MIXERS[name].ops["attention"]
    assert (
        products.counts["attention"]
        == 2 * MIXERS[name].heads * (ops["D"] + ops["Dv"]) * documents.pairs
    )


@pytest.mark.parametrize("name", ["kda", "kda, softplus gate", "gdn"])
def test_linear_mixers_by_chunks(name):
    """PyTorch's implementation solves (I + A) X = B for K + V columns by substitution, where the statement has a
    product of the inverse with V; it convolves W−1 more tokens for each document but the first; and the chunk matrices
    of KDA leave out blocks above the diagonal: rows of 16 tokens meet 16, 32, 48, 64 columns. The rest is the same."""
    mixer, C = MIXERS[name], 64
    products, documents = counted(model_of(mixer), CHUNKED), plan_of(CHUNKED)[1]
    HV, K, V, NC = mixer.v_heads, mixer.head_dim, mixer.v_head_dim, documents.tokens // C
    solve, matrices = HV * NC * 2 * C * C * V, HV * NC * 4 * C * C * K
    left_out = matrices * (256 - 160) // 256 if isinstance(mixer, KDA) else 0
    channels, gaps = 2 * mixer.heads * K + HV * V, (len(CHUNKED) - 1) * (mixer.conv_size - 1)
    assert products.counts["solve"] == HV * NC * C * (C - 1) * (K + V)
    assert products.counts["convolution"] == 2 * mixer.conv_size * channels * (
        documents.tokens + gaps
    )
    expected = stated(mixer, documents) - solve - left_out
    assert (
        products.counts["products"] == expected - 2 * mixer.conv_size * channels * documents.tokens
    )


def test_mamba2_by_chunks():
    mixer, products, documents = (
        MIXERS["mamba2"],
        counted(model_of(MIXERS["mamba2"]), CHUNKED),
        plan_of(CHUNKED)[1],
    )
    gaps = (len(CHUNKED) - 1) * (mixer.conv_size - 1)
    assert (
        products.total == stated(mixer, documents) + 2 * mixer.conv_size * sum(mixer.widths) * gaps
    )


def test_rwkv7_by_chunks():
    """In the first layer. PyTorch's implementation solves for K + V columns where the statement has a product with V; a
    chunk's rows that only write meet the state too; the four matrices leave out blocks above the diagonal, as KDA's do;
    the token shift is a convolution."""
    mixer, C = MIXERS["rwkv7"], 64
    products, documents = counted(model_of(mixer), CHUNKED), plan_of(CHUNKED)[1]
    H, K, NC = mixer.heads, mixer.head_dim, documents.tokens // C
    assert products.counts["solve"] == H * NC * C * (C - 1) * 2 * K
    extra = H * NC * (2 * C * K * K - 2 * C * C * K - 8 * C * C * K * (256 - 160) // 256)
    assert products.counts["products"] == stated(mixer, documents) + extra


@torch.no_grad()
@pytest.mark.parametrize(
    "moe", [None, MOE, replace(MOE, shared_hidden_dim=0, shared_gate=False), LATENT]
)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_mlps_and_experts(moe, activation):
    moe = moe and replace(moe, activation=activation)
    config, (plan, documents) = (
        model_of(MIXERS["gdn"], moe=moe, activation=activation),
        plan_of(PACKED),
    )
    decoder = initialised(config)
    with Products() as products:
        decoder.layers[0].mlp(torch.randn(1, documents.tokens, DIM), plan)
    assert products.total == documents.tokens * token_flops(decoder.layers[0].mlp)


@pytest.mark.parametrize("depth", [0, 2])
def test_backward_is_twice_forward(depth):
    """Of a whole model's loss, head included; attention's kernel computes scores again, which does not count."""
    config, (plan, documents) = model_of(MIXERS["attention"], mtp_layers=depth), plan_of(PACKED)
    decoder, tokens = initialised(config), torch.arange(documents.tokens) % 40
    labels = labels_of(tokens, np.cumsum([0, *PACKED]).tolist())
    if depth:
        plan.later = Later(
            *(torch.stack([x] * depth) for x in (tokens, labels, torch.ones(len(tokens))))
        )
    with Products() as products, torch.autograd.set_multithreading_enabled(False):
        decoder(tokens[None], plan, loss=loss_of(labels)).backward()
    attended = products.counts.pop("attention")
    assert products.total == training_flops(config, documents) - 3 * attended


@pytest.mark.parametrize(
    "name, flavor", [("hybrid", "1.3B"), ("qwen3.5", "35B-A3B"), ("kimi-linear", "48B-A3B")]
)
def test_projections_are_the_parameters_that_a_token_meets(name, flavor):
    """Twice their number, but for norms, gates and the convolution."""
    config = preset(name, flavor)
    with torch.device("meta"):
        blocks = {layer: Block(config, layer) for layer in range(config.num_layers)}
    met = config.vocab_size * config.dim
    for layer, block in blocks.items():
        met += sum(
            p.numel() for n, p in block.named_parameters() if p.dim() > 1 and "experts" not in n
        )
        if config.has_experts(layer):
            met += config.moe.top_k * sum(p[0].numel() for p in block.mlp.experts.parameters())
    tokens = Documents(tokens=1, pairs=0, chunk_pairs=0)
    states = sum(
        6 * m.v_heads * m.head_dim * m.v_head_dim
        for m in chain(*(x.mixers for x in config.layers))
        if m.linear
    )
    assert forward_flops(config, tokens) == 2 * met + states


def test_sums_over_documents_are_exact():
    cu = np.cumsum([0, 1, 63, 64, 65, 0, 1000]).astype(np.int32)
    pairs = sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(cu.tolist()))
    chunks = [min(64, b - i) for a, b in pairwise(cu.tolist()) for i in range(a, b, 64)]
    assert Documents.of(cu) == (1193, pairs, sum(n * n for n in chunks))
    million = Documents.of(np.array([0, 2**20], dtype=np.int32))
    assert million.pairs == 2**20 * (2**20 + 1) // 2 and million.chunk_pairs == 2**26


def test_counting_is_nothing_to_the_host():
    """10,000 documents take as many calls as one."""
    model, calls = preset("hybrid", "1.3B"), Counter()
    for documents in (1, 10_000):
        cu = np.linspace(0, 2**20, documents + 1).astype(np.int32)
        sys.setprofile(lambda _, event, __, n=documents: calls.update({n: event.endswith("call")}))
        training_flops(model, Documents.of(cu))
        sys.setprofile(None)
    assert 0 < calls[1] == calls[10_000] < 10_000


# --- The peak --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert known_peak(name) == peak


def test_the_peak_of_a_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert peak_tflops(0.0, "bfloat16", gpu) == 989
    assert peak_tflops(0.0, "float32", gpu) is None
    assert peak_tflops(0.0, "bfloat16", cpu) is None
    assert peak_tflops(0.5, "float32", cpu) == 0.5
    assert flops.no_peak("float32", gpu).startswith(
        "no MFU: the peak of NVIDIA H200 in float32 is not known; metrics.peak_"
    )
    assert "the CPU in float32" in flops.no_peak("float32", cpu)
