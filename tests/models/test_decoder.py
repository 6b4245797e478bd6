"""The decoder: sizes, initial weights, documents that do not see each other, generation against one forward."""

import math
from dataclasses import replace
from functools import partialmethod

import pytest
import torch

from tests.dispatch import AddsInAnyOrder
from tests.models.ours import initialised, loss_of
from tests.refusals import refused
from titan_linear.models.config import MoEConfig
from titan_linear.models.init import count_parameters
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import MODELS, preset
from titan_linear.ops import build_cp_context
from titan_linear.ops.runtime.support import Op


def build(seed=0):
    model = initialised(preset("hybrid", "debug"), seed, dtype=torch.float64)
    return model


@pytest.mark.parametrize(
    "name, flavor, millions",
    [
        ("kda", "340M", 354.2),
        ("gdn", "340M", 367.0),
        ("hybrid", "340M", 344.7),
        ("kda", "1.3B", 1325.4),
        ("gdn", "1.3B", 1401.6),
        ("hybrid", "1.3B", 1293.6),
        ("hybrid", "debug", 0.578),
    ],
)
def test_parameter_counts(name, flavor, millions):
    assert count_parameters(preset(name, flavor)) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("name", [name for name, flavors in MODELS.items() if "debug" in flavors])
def test_gradients_are_added_up_in_one_order(name):
    """In float32 or wider, and the same on every run: nothing that compiled code would turn into atomic additions."""
    model = initialised(preset(name, "debug"))
    tokens = torch.randint(
        model.config.vocab_size, (1, 70), generator=torch.Generator().manual_seed(0)
    )
    context = build_cp_context(torch.tensor([0, 30, 70]), rank=0, world_size=1)
    plan = BatchPlan(context.position_ids, cp_context=context)
    with AddsInAnyOrder() as sums:
        model(tokens, plan, loss=loss_of(tokens)).backward()
    assert not sums.found


def test_unknown_presets_are_refused():
    with refused(r"model.name = 'mamba'.*hybrid"):
        preset("mamba", "debug")
    with refused(r"model.flavor = '7B'.*340M"):
        preset("hybrid", "7B")


def test_initial_weights():
    """As published: normal matrices, unit norms, decays within their ranges; a function of seed and name alone."""
    model, again, other = build(), build(), build(seed=1)
    for (name, p), q, r in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q)
        constant = "norm" in name or name.endswith(".bias") or name == "layers.0.mixer.A_log"
        assert torch.equal(p, r) == constant, name
        if p.dim() == 2:
            assert (
                p.std().item() == pytest.approx(0.02, rel=0.25) and abs(p.mean().item()) < 0.004
            ), name
    kda, gdn = model.layers[0].mixer, model.layers[1].mixer
    assert not kda.A_log.any()  # the bounded gate
    assert (gdn.A_log.exp() > 0).all() and (gdn.A_log.exp() <= 16).all()
    for mixer in (kda, gdn):
        dt = torch.nn.functional.softplus(mixer.dt_bias)
        assert dt.min() >= 1e-3 * (1 - 1e-6) and dt.max() <= 0.1 * (1 + 1e-6)


def test_the_ops_that_a_model_calls():
    """Those that a run says at its start are those that run, decided before the first step."""
    dense = preset("hybrid", "debug")
    moe = MoEConfig(num_experts=2, top_k=1, hidden_dim=16)
    of_experts = {"expert_copies", "grouped_linear"}
    models = [
        (dense, {"swiglu"}),
        (replace(dense, moe=moe), of_experts),
        (replace(dense, moe=replace(moe, shared_hidden_dim=16)), {*of_experts, "swiglu"}),
        (replace(dense, moe=moe, dense_layers=(0,)), {*of_experts, "swiglu"}),
    ]
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for config, own in models:
        model = initialised(config.first_layers(2))
        ops = set(model.config.ops())
        assert ops == {
            "chunk_kda",
            "chunk_gated_delta_rule",
            "causal_conv1d",
            "cross_entropy",
            *own,
        }
        chosen = model.use("auto", torch.device("cpu"), torch.float32).implementations
        called = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Op, "implementation", partialmethod(_noted, called, Op.implementation))
            model(tokens, BatchPlan(torch.arange(8)), loss=loss_of(tokens))
        assert called == set(chosen.items()) and set(chosen) == ops


def _noted(op, called, taken, impl, *on, **dims):
    called.add((op.name, impl))
    return taken(op, impl, *on, **dims)


def test_documents_do_not_touch_each_other():
    model, cu = build(), torch.tensor([0, 3, 70, 71, 100])
    positions = torch.cat([torch.arange(n) for n in cu.diff().tolist()])
    tokens = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(0))
    before = model(tokens, BatchPlan(positions, cu_seqlens=cu))
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        changed = tokens.clone()
        changed[:, a:b] = (changed[:, a:b] + 1) % 256
        difference = (model(changed, BatchPlan(positions, cu_seqlens=cu)) - before).abs()
        assert difference[:, a:b].max() > 0
        difference[:, a:b] = 0
        assert difference.max() == 0.0


def test_the_head_of_labels_is_the_loss_of_the_logits():
    model = build()
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    plan = BatchPlan(torch.arange(40))
    want = torch.nn.functional.cross_entropy(model(tokens, plan)[0], labels[0], reduction="sum")
    model.head.chunk = 16
    assert model(tokens, plan, loss=loss_of(labels)).item() == pytest.approx(want.item(), rel=1e-12)
    assert want.item() / 40 == pytest.approx(math.log(320), rel=0.02)  # it knows nothing yet
