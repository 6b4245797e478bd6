"""Experts: the routing formulas one token at a time, and loads that do not depend on how the work is split."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.models.ours import initialised
from tests.ops.inputs import tokens_of
from titan_linear.config import Config
from titan_linear.data import IGNORE
from titan_linear.losses import build_loss
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.config import MoEConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.draws import generator
from titan_linear.models.mlps.moe import MoE
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import MODELS
from titan_linear.ops import build_cp_context, experts
from titan_linear.ops.experts import grouped_linear
from titan_linear.ops.runtime.operators import contexts
from titan_linear.ops.runtime.support import Op, choose
from titan_linear.step.feed import StepTokens
from titan_linear.step.passes import Forward

DIM = 16
SOFTMAX = MoEConfig(8, 3, 12, shared_hidden_dim=20, shared_gate=True)
SIGMOID = MoEConfig(
    8,
    2,
    12,
    shared_hidden_dim=12,
    score="sigmoid",
    scale=2.5,
    selection_bias=True,
    groups=4,
    top_groups=2,
)
CONFIGS = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "neither normalised nor shared": MoEConfig(8, 3, 12, normalise=False),
}


def build(config):
    moe = MoE(DIM, config).double()
    with torch.no_grad():
        for name, p in moe.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator(0, name), dtype=torch.float64) * 0.3)
    return moe


def token_by_token(moe, x):
    """[T, dim] -> [T, dim], as the papers write it."""
    c, out = moe.config, []
    for x_t in x:
        logits = moe.router.weight @ x_t
        scores = (
            logits.exp() / logits.exp().sum() if c.score == "softmax" else 1 / (1 + (-logits).exp())
        )
        choice = scores.detach() + (
            0 if moe.router.selection_bias is None else moe.router.selection_bias
        )
        if c.groups > 1:
            groups = choice.view(c.groups, -1).sort(descending=True).values[:, :2].sum(1)
            kept = groups.sort(descending=True).indices[: c.top_groups].tolist()
            size = c.num_experts // c.groups
            choice = torch.tensor(
                [v if i // size in kept else -9e9 for i, v in enumerate(choice.tolist())]
            )
        chosen = choice.sort(descending=True).indices[: c.top_k].tolist()
        total = sum(scores[e] for e in chosen) if c.normalise else 1.0
        y = torch.zeros(DIM, dtype=x.dtype)
        for e in chosen:
            gate, up = moe.experts.gate_up_proj[e] @ x_t
            y = y + c.scale * scores[e] / total * (
                moe.experts.down_proj[e] @ (gate * gate.sigmoid() * up)
            )
        if moe.shared is not None:
            shared = moe.shared(x_t)
            y = y + (shared if moe.shared_gate is None else moe.shared_gate(x_t).sigmoid() * shared)
        out.append(y)
    return torch.stack(out)


def inputs(T):
    return torch.randn(T, DIM, generator=generator(1), dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_token_by_token(name):
    moe, x = build(CONFIGS[name]), inputs(37).requires_grad_()
    grads = []
    for forward in (
        lambda: moe(x.unsqueeze(0), BatchPlan(torch.arange(37)))[0][0],
        lambda: token_by_token(moe, x),
    ):
        y = forward()
        weights = [p for p in moe.parameters() if p.requires_grad]
        grads.append((y, *torch.autograd.grad(y.square().sum(), [x, *weights])))
    for a, b in zip(*grads):
        assert (a - b).abs().max() < 1e-12 * max(1, b.abs().max())


def test_of_equal_groups_the_first_are_chosen():
    router = build(SIGMOID).router
    router.selection_bias.data.zero_()
    assert router(torch.zeros(2, DIM, dtype=torch.float64))[0].tolist() == [[0, 1], [0, 1]]


def test_an_expert_without_tokens():
    weight = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    x = inputs(4).requires_grad_()
    y = grouped_linear(x, weight, torch.tensor([1, 0, 3]))
    assert torch.equal(y, torch.cat([x[:1] @ weight[0].T, x[1:] @ weight[2].T]))
    y.sum().backward()
    assert not weight.grad[1].any() and weight.grad[0].any() and x.grad.all()


def test_load_balance_loss_is_that_of_transformers():
    """Of one layer and one stream; ours is a sum over tokens."""
    # slow to import: not in workers
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe, x = build(replace(SOFTMAX, balance_coefficient=0.5)), inputs(37)
    ours = moe(x.unsqueeze(0), BatchPlan(torch.arange(37)))[1]
    theirs = 0.5 * 37 * load_balancing_loss_func((x @ moe.router.weight.T,), 8, 3)
    grads = [torch.autograd.grad(loss, moe.router.weight)[0] for loss in (ours, theirs)]
    assert abs(ours - theirs) < 1e-5 * theirs  # theirs takes parts of it in float32
    assert (grads[0] - grads[1]).norm() < 1e-5 * grads[1].norm()


def balance_on_rank(rank, world_size, layout):
    """The load-balance loss of two streams over the ranks, and its gradient."""
    import torch.distributed as dist

    moe, x = build(replace(SOFTMAX, balance_coefficient=0.5)), inputs(64)
    context = build_cp_context(
        torch.tensor([0, 20, 32, 64]), dist.group.WORLD, layout=layout, num_streams=2
    )
    mine = tokens_of(context)
    plan = BatchPlan(context.position_ids, cp_context=context, num_streams=2)
    loss = moe(x[mine].unsqueeze(0), plan)[1]
    (grad,) = torch.autograd.grad(loss, moe.router.weight)
    total = loss.detach().clone()
    dist.all_reduce(total)
    dist.all_reduce(grad)
    return total, grad


def test_load_balance_loss_of_each_stream_under_cp(layout, worlds):
    moe, x = build(replace(SOFTMAX, balance_coefficient=0.5)), inputs(64)
    alone = sum(moe(part.unsqueeze(0), BatchPlan(torch.arange(32)))[1] for part in x.split(32))
    together = moe(x.unsqueeze(0), BatchPlan(torch.arange(64), num_streams=2))[1]
    (grad,) = torch.autograd.grad(alone, moe.router.weight)
    assert abs(together - alone) < 1e-12
    for loss, split_grad in worlds(2).run(balance_on_rank, layout):
        assert abs(loss - alone) < 1e-12 and (split_grad - grad).abs().max() < 1e-12


def loads_on_rank(rank, world_size):
    from titan_linear.step.optimizer import StepNumbers
    from titan_linear.step.update import move_selection_biases

    moe, x = build(replace(SIGMOID, bias_update_rate=0.125)), inputs(64)
    before = moe.router.selection_bias.clone()
    for part in x.split(16)[rank::world_size]:  # two micro-steps
        moe(part.unsqueeze(0), BatchPlan(torch.arange(16)))
    with torch.no_grad():
        moe(x.unsqueeze(0), BatchPlan(torch.arange(64)))  # validation does not count
    counted = moe.loads.clone()
    # a step that is left out
    move_selection_biases(moe, StepNumbers(*torch.tensor([1.0, torch.inf, 0.0])))
    assert not moe.loads.any() and torch.equal(moe.router.selection_bias, before)
    moe.loads = counted
    move_selection_biases(moe, StepNumbers(*torch.tensor([1.0, 1.0, 0.0])))
    assert not moe.loads.any()
    return moe.router.selection_bias - before


def test_selection_bias_moves_towards_equal_loads(worlds):
    moe = build(SIGMOID)
    loads = torch.bincount(moe.router(inputs(64))[0].flatten(), minlength=8)
    expected = 0.125 * torch.sign(16 - loads)
    assert loads.sum() == 128 and expected.unique().numel() > 1
    for moved in worlds(2).run(loads_on_rank):
        assert torch.allclose(moved, expected.double(), atol=1e-12)


GPU = torch.device("cuda")


@pytest.mark.parametrize("hidden, dim", [(64, 128), (24, 8), (60, 128), (4, 8), (64, 36)])
def test_grouped_mm_is_chosen_for_sizes_that_it_takes(hidden, dim):
    """For two ranks' experts: at the start of a run, at both products, and as PyTorch says on the meta device."""
    config = replace(MODELS["qwen3.5"]["debug"], dim=dim, moe=MoEConfig(4, 2, 2 * hidden))
    at_start = choose(
        experts.GROUPED_LINEAR, "auto", GPU, torch.bfloat16, **config.ops(tp=2)["grouped_linear"]
    )
    products = []
    for I, O in ((dim, 2 * hidden), (hidden, dim)):
        products.append(
            choose(experts.GROUPED_LINEAR, "auto", GPU, torch.bfloat16, I=I, O=O).implementation
        )
        assert (products[-1] == "grouped_mm") == grouped_mm_takes(I, O)
    assert at_start.implementation == ("loop" if "loop" in products else "grouped_mm")
    assert ("no multiple of 8" in at_start.why) == ("loop" in products)


def grouped_mm_takes(I, O):
    x, weight = (
        torch.empty(*s, I, dtype=torch.bfloat16, device="meta").requires_grad_()
        for s in ([16], [4, O])
    )
    try:
        counts = torch.empty(4, dtype=torch.int64, device="meta")
        products = experts.GROUPED_LINEAR.load("grouped_mm")
        dy = torch.empty(products.linear(x, weight, counts).shape, dtype=x.dtype, device="meta")
        products.linear(dy, weight.mT, counts)
        products.outer(dy, x, counts)
    except RuntimeError as error:
        assert "multiple of 16 bytes" in str(error)
        return False
    return True


def test_the_sizes_of_experts_reach_the_choice(monkeypatch):
    asked, moe = [], build(SOFTMAX)
    taken = Op.implementation
    monkeypatch.setattr(
        Op, "implementation", lambda *of, **dims: (asked.append(dims), taken(*of, **dims))[1]
    )
    moe(inputs(4).unsqueeze(0), BatchPlan(torch.arange(4)))
    assert [dims for dims in asked if "I" in dims] == [{"I": DIM, "O": 24}, {"I": 12, "O": DIM}]


@pytest.mark.cuda
def test_grouped_product_on_cuda():
    """One kernel in bfloat16, against the loop in float64: errors of bfloat16's rounding."""
    torch.manual_seed(0)
    counts = torch.tensor([37, 0, 1, 200, 5, 13], device="cuda")
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(6, 96, 64, device="cuda", dtype=torch.bfloat16) / 8
    dy = torch.randn(256, 96, device="cuda", dtype=torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        a, w = (t.to(dtype).clone().requires_grad_() for t in (x, weight))
        y = grouped_linear(a, w, counts)
        y.backward(dy.to(dtype))
        results.append((y, a.grad, w.grad))
    for ours, exact in zip(*results):
        assert (ours.double() - exact).norm() < 2**-8 * exact.norm()
    assert not results[0][2][1].any()


@pytest.mark.parametrize("labelled", [0, 3, 40])
def test_the_load_balance_loss_is_a_mean_over_all_tokens(labelled):
    """Of a step of two micro-batches of which few tokens, or none, have a label: answers alone."""
    config = MODELS["qwen3.5"]["debug"]
    config = replace(config, moe=replace(config.moe, balance_coefficient=0.5))
    tokens = torch.randint(config.vocab_size, (2, 1, 40), generator=generator(0, "tokens"))
    plan = BatchPlan(torch.arange(40))
    labels = tokens.clone()
    labels[1], labels[0, :, labelled:] = IGNORE, IGNORE

    def gradients(model):
        model.zero_grad()
        for x, y in zip(tokens, labels, strict=True):
            batch = LocalBatch(x, y, {"weights": torch.ones(y.shape)}, (0,), plan=plan)
            Forward(
                model,
                batch,
                StepTokens(80, labelled),
                nullcontext(),
                build_loss("cross_entropy", Config().cross_entropy),
            ).backward()
        return [layer.mlp.router.weight.grad for layer in model.layers]

    model = initialised(config, dtype=torch.float64)
    together, means = gradients(model), []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda _, __, out: means.append(out[1] / 80))
    for batch in tokens:
        model(batch, plan)
    balance = torch.autograd.grad(sum(means), [layer.mlp.router.weight for layer in model.layers])
    without = Decoder(replace(config, moe=replace(config.moe, balance_coefficient=0.0))).double()
    without.load_state_dict(model.state_dict())
    for got, of_loss, of_balance in zip(together, gradients(without), balance, strict=True):
        assert of_balance.any() and (got - of_loss - of_balance).norm() < 1e-12 * of_balance.norm()


@pytest.mark.parametrize("mode, times", [("selective", 4), ("full", 6)])
def test_selective_checkpointing_computes_products_once(mode, times, monkeypatch):
    """Two in forward, which "full" computes again, and two for the gradients of rows."""
    given, products = [], experts.GROUPED_LINEAR.load("loop")
    counting = products._replace(linear=lambda *x: given.append(x) or products.linear(*x))
    loop = experts.GROUPED_LINEAR.implementations["loop"]._replace(load=lambda: counting)
    monkeypatch.setattr(experts, "GROUPED_LINEAR", Op("grouped_linear", {"loop": loop}))
    moe, x = build(MoEConfig(4, 2, 8)), inputs(3).unsqueeze(0).requires_grad_()
    checkpoint(
        lambda x: moe(x, None).y, x, use_reentrant=False, context_fn=partial(contexts, mode=mode)
    ).sum().backward()
    assert len(given) == times


def test_a_compiled_layer_with_a_shared_expert():
    """A CPU's graph with gradients once read all rows as the first."""
    layer, x = build(MoEConfig(8, 2, 8, shared_hidden_dim=8)), inputs(64).unsqueeze(0)
    compiled = torch.compile(lambda x: layer(x, None).y)
    torch.testing.assert_close(compiled(x), layer(x, None).y, rtol=0, atol=1e-9)
