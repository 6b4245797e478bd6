"""What a rank of tensor parallelism has, and that it says of what it is a part. Whole runs are in test_train.py."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.models.ours import loss_of
from tests.ops.inputs import chunked_cross_entropy
from titan_linear.distributed.one_process import run_ranks
from titan_linear.distributed.tensor_parallel import apply_tp, tensor_splits
from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.mixers import GDN, KDA, MLA, RWKV7, Attention, Lightning, Mamba2, ShortConv
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.cross_entropy import IGNORE
from titan_linear.ops.exchange.collectives import Ranks

MIXERS = {
    "kda": (KDA(heads=2, v_heads=4, head_dim=8, v_head_dim=12), ("heads", "v_heads")),
    "gdn": (GDN(heads=2, v_heads=4, head_dim=8, v_head_dim=12), ("heads", "v_heads")),
    "mamba2": (Mamba2(heads=4, head_dim=12, state_dim=8, groups=2), ("heads", "groups")),
    "rwkv7": (RWKV7(heads=4, head_dim=12, w_rank=4, a_rank=4, v_rank=4, g_rank=4), ("heads",)),
    "lightning": (Lightning(heads=4, head_dim=12), ("heads",)),
    "short_conv": (ShortConv(channels=12), ("channels",)),
    "mamba2, one group": (Mamba2(heads=4, head_dim=12, state_dim=8), ("heads",)),
    "attention": (
        Attention(heads=4, kv_heads=2, head_dim=8, qk_norm="head", output_gate=True),
        ("heads", "kv_heads"),
    ),
    "norms over the width": (
        Attention(heads=4, kv_heads=2, head_dim=8, qk_norm="width"),
        ("heads", "kv_heads"),
    ),
    "mla": (MLA(heads=4, kv_rank=16, nope_dim=8, shared_k_dim=4, v_dim=10), ("heads",)),
    "queries of a latent": (
        MLA(heads=4, kv_rank=16, nope_dim=8, shared_k_dim=4, v_dim=10, q_rank=6),
        ("heads",),
    ),
}
MOE = MoEConfig(
    num_experts=4,
    top_k=2,
    hidden_dim=6,
    shared_hidden_dim=10,
    shared_gate=True,
    selection_bias=True,
)


def shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe", [None, MOE])
@pytest.mark.parametrize("name", MIXERS)
def test_a_part_is_a_model_of_fewer_heads(name, moe, tied):
    """And of fewer hidden channels, and rows of the vocabulary: no parameter is forgotten."""
    mixer, counts = MIXERS[name]
    half = replace(mixer, **{count: getattr(mixer, count) // 2 for count in counts})
    less = moe and replace(moe, hidden_dim=3, shared_hidden_dim=5)
    config = ModelConfig(32, 16, (mixer,), 1, 24, moe=moe, tie_embeddings=tied)
    with torch.device("meta"):
        part, fewer = (
            Decoder(config),
            Decoder(ModelConfig(16, 16, (half,), 1, 12, moe=less, tie_embeddings=tied)),
        )
    whole = shapes(part)
    apply_tp(part, Ranks("", 2, 1))
    assert shapes(part) == shapes(fewer)
    assert {name for name in whole if whole[name] != shapes(part)[name]} == tensor_splits(
        part
    ).keys()
    assert (part.head.weight is part.embedding.weight) == tied


def test_a_part_holds_whole_heads():
    """Of the fused gate and up projections of experts a part of each."""
    mixer, _ = MIXERS["kda"]
    model = Decoder(ModelConfig(32, 16, (mixer,), 1, 24, moe=MOE))
    before = {
        name: torch.nn.init.normal_(p).detach().clone() for name, p in model.named_parameters()
    }
    apply_tp(model, Ranks("", 2, 1))
    after = dict(model.named_parameters())
    for name, part in (
        ("mixer.v_proj.weight", before["layers.0.mixer.v_proj.weight"][24:]),  # two heads of 12
        ("mixer.o_proj.weight", before["layers.0.mixer.o_proj.weight"][:, 24:]),
        ("mixer.dt_bias", before["layers.0.mixer.dt_bias"][16:]),
        ("mlp.experts.gate_up_proj", before["layers.0.mlp.experts.gate_up_proj"][:, :, 3:]),
    ):
        assert torch.equal(after[f"layers.0.{name}"], part)


def test_every_token_of_the_vocabulary_is_some_rank_s():
    """Embedding, logits and loss of each, those at the borders of the parts among them."""
    mixer, _ = MIXERS["attention"]
    torch.manual_seed(0)
    whole = Decoder(ModelConfig(32, 16, (mixer,), 1, 24)).double()
    for p in whole.parameters():
        torch.nn.init.normal_(p)
    tokens = torch.arange(32)[None]
    plan, labels = (
        BatchPlan(tokens[0], cu_seqlens=torch.tensor([0, 32], dtype=torch.int32)),
        tokens.flip(1),
    )

    def on_rank(group):
        part = copy.deepcopy(whole)
        apply_tp(part, Ranks(group.group_name, 2, group.rank()))
        with torch.no_grad():
            return part(tokens, plan), part(tokens, plan, loss=loss_of(labels))

    with torch.no_grad():
        logits, loss = whole(tokens, plan), whole(tokens, plan, loss=loss_of(labels))
    (first, one), (second, other) = run_ranks(on_rank, 2)
    torch.testing.assert_close(
        [first, second, one + other], [logits, logits, loss], rtol=1e-12, atol=1e-12
    )


def test_gradients_of_a_vocabulary_in_parts():
    """A label at each border, in both parts, and none."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(7, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, IGNORE, 6, 11, IGNORE, 3])
    chunked_cross_entropy(x, weight, labels, 3).backward()

    def on_rank(group):
        own = weight.detach().chunk(2)[group.rank()].requires_grad_()
        mine = x.detach().requires_grad_()
        loss = chunked_cross_entropy(mine, own, labels, 3, Ranks(group.group_name, 2, group.rank()))
        return torch.autograd.grad(loss, [mine, own])

    (dx, first), (more, second) = run_ranks(on_rank, 2)
    torch.testing.assert_close(
        [dx + more, torch.cat([first, second])], [x.grad, weight.grad], rtol=1e-12, atol=1e-14
    )
