"""Adapters, on one process: outputs and gradients of merged weights, and what backward no longer computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from tests.keys import argv_of
from tests.models import ours
from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.lora import described, without_adapters
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import MODELS
from titan_linear.ops import build_cp_context
from titan_linear.planner import machine, memory, timing
from titan_linear.run.model_checks import check_model
from titan_linear.run.origin import Origin
from titan_linear.step.flops import forward_flops, training_flops

RANK = 3  # of which no size of these models is a multiple
PRESETS = [name for name, flavors in MODELS.items() if "debug" in flavors]
TOKENS = torch.randint(256, (1, 70), generator=torch.Generator().manual_seed(0))


def adapted(name: str, *keys: str) -> ModelConfig:
    argv = ["--model.name", name, "--adapter.enable", "true", "--adapter.rank", str(RANK), *keys]
    return Origin.of(load_config(argv)).definition


def build(config: ModelConfig) -> Decoder:
    model = Decoder(config).double()
    initialise(model, 0)
    return model


def loss_of(model: Decoder, weights: dict[str, Tensor] | None = None) -> Tensor:
    context = build_cp_context(torch.tensor([0, 30, 70]), rank=0, world_size=1)
    plan = BatchPlan(context.position_ids, cp_context=context)
    return functional_call(
        model, weights or {}, (TOKENS, plan), {"loss": ours.loss_of(TOKENS), "balance_weight": 0.5}
    )


def merged(model: Decoder) -> dict[str, Tensor]:
    """W + s B A of each weight, by hand; the adapters' own are left out."""
    adapter = model.config.adapter
    lead = {name: names[0] for names in adapter.shared for name in names}
    weights = {}
    for name, p in model.named_parameters():
        stem = name.removesuffix("weight") if name.endswith("weight") else f"{name}_"
        of_lead = lead.get(name, name).removesuffix("weight") if name.endswith("weight") else stem
        if f"{stem}lora_B" in dict(model.named_parameters()):
            A, B = (model.get_parameter(f"{of_lead}lora_A"), model.get_parameter(f"{stem}lora_B"))
            if A.dim() == 3:  # of experts
                p = p + adapter.factor * torch.einsum("e...r,eri->e...i", B, A)
            else:
                p = p + adapter.factor * B @ A
        weights[name] = p
    return {name: p for name, p in weights.items() if "lora_" not in name}


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_those_of_merged_weights(name):
    """Of A and B of every kind of projection, and of experts; the base gets none."""
    model = build(adapted(name))
    base = Decoder(model.config.base).double()
    of_B = [p for n, p in model.named_parameters() if n.endswith("lora_B")]
    with torch.no_grad():
        for i, p in enumerate(of_B):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 8)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    want_loss = loss_of(base, merged(model))
    want = torch.autograd.grad(want_loss, list(trained.values()))
    loss = loss_of(model)
    loss.backward()
    assert abs(loss - want_loss) < 1e-12 * want_loss.detach()
    assert trained.keys() == {
        n for n, p in model.named_parameters() if "lora_" in n and p.grad is not None
    }
    assert all(p.grad is None for n, p in model.named_parameters() if n not in trained)
    errors = {
        n: float((p.grad - g).norm() / g.norm())
        for (n, p), g in zip(trained.items(), want, strict=True)
    }
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.parametrize("name", PRESETS)
def test_adapters_of_zeros_and_none_change_no_bit(name):
    model = build(adapted(name))
    want = loss_of(build(model.config.base))
    assert torch.equal(loss_of(model), want)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.normal_() if n.endswith("lora_B") else None
    with without_adapters(model):
        assert torch.equal(loss_of(model), want)
    assert not torch.equal(loss_of(model), want)


def test_the_range_of_what_is_drawn():
    """A has peft's, which is kaiming_uniform with a = √5: ± 1 / √inputs, and B begins at 0."""
    drawn = dict(build(adapted("gdn", "--adapter.rank", "32")).named_parameters())
    for name, p in drawn.items():
        if name.endswith("lora_A"):
            bound = nn.init.calculate_gain("leaky_relu", 5**0.5) * (3 / p.shape[-1]) ** 0.5
            assert bound == pytest.approx(p.shape[-1] ** -0.5, rel=1e-12)
            assert p.abs().max() <= bound and p.max() > 0.99 * bound and p.min() < -0.99 * bound
            assert p.detach().abs().mean().item() == pytest.approx(bound / 2, rel=0.05)
        assert not name.endswith("lora_B") or not p.any()


class Products(TorchDispatchMode):
    """FLOPs of matrix products, by whether one of their sizes is a multiple of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = {True: 0, False: 0}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            sizes = (*a.shape, b.shape[1])
            self.flops[any(n % RANK == 0 for n in sizes)] += (
                2 * a.shape[0] * a.shape[1] * b.shape[1]
            )
        return function(*args, **(kwargs or {}))


def backward_flops(model: Decoder) -> dict[bool, int]:
    loss = loss_of(model)
    with Products() as counted:
        loss.backward()
    return counted.flops


def test_backward_computes_no_gradient_of_the_base():
    """Per token and weight 2 FLOPs less than where it is trained, and 2 more of those that read the first layer's
    input, which is frozen too. The head's gradient is computed in forward."""
    model = build(adapted("gdn"))
    full = build(model.config.base)
    weights = {n: p.numel() for n, p in full.named_parameters() if n.endswith("proj.weight")}
    readers = sum(weights[f"layers.0.mixer.{name}_proj.weight"] for name in "qkvgab")
    want = backward_flops(full)[False] - 2 * TOKENS.numel() * (sum(weights.values()) + readers)
    assert backward_flops(model)[False] == want


@pytest.mark.parametrize("name", ["gdn", "kimi-linear"])
def test_model_flops_of_frozen_weights(name):
    """4 per token and parameter that it meets, where 6 are of adapters and trained ones, and of the reference."""
    config, documents = adapted(name), Documents.of(np.array([0, 30, 70]))
    moe, sizes = (
        config.moe,
        {n: (p.numel(), p.dim(), p.requires_grad) for n, p in Decoder(config).named_parameters()},
    )
    share = {n: moe.top_k / moe.num_experts if ".experts." in n else 1 for n in sizes}
    frozen = sum(
        n * share[x]
        for x, (n, dim, own) in sizes.items()
        if dim > 1 and not own and x != "embedding.weight"
    )
    added = sum(n * share[x] for x, (n, _, own) in sizes.items() if own)
    want = training_flops(config.base, documents) + 70 * (6 * added - 2 * frozen)
    assert training_flops(config, documents) == want
    again = adapted(name, "--loss.name", "dpo", "--loss.reference", "base")
    assert training_flops(again, documents) == want + forward_flops(config.base, documents)


def test_what_no_adapter_reaches_is_said():
    config = adapted("gdn", "--adapter.targets", '["mixer"]', "--adapter.train_extra", '["*norm"]')
    _, of_mixers, norms, rest = described(Decoder(config)).splitlines()
    total = sum(p.numel() for p in Decoder(config.base).parameters())
    mlp = config.num_layers * config.dim * config.hidden_dim
    assert (
        of_mixers.startswith("adapted: ") and "mixer.a_proj" in of_mixers and "head.norm" in norms
    )
    assert f"mlp.up_proj {mlp / total:.2%}" in rest and "mixer.A_log" in rest


def test_the_plan_knows_what_is_frozen():
    """2 bytes per parameter of the base over the ranks, 4 of adapters and 8 of their moments."""
    keys = {
        "model.name": "qwen3.5",
        "model.flavor": "27B",
        "training.mixed_precision_param": "bfloat16",
    }
    keys |= {
        "adapter.enable": "true",
        "parallelism.context_parallel_degree": 4,
        "training.seq_len": 4096,
    }
    config = load_config(argv_of(keys))
    model = Origin.of(config).definition
    base = memory.parameters(model.base)
    added = memory.parameters(model) - base
    parts = memory.PlannedRank(config, model, gpus=4).memory()
    for part, bytes in (("parameters", 2 * base + 4 * added), ("optimizer", 8 * added)):
        assert bytes / 4 <= parts[part] < 1.001 * bytes / 4
    h200 = machine.Machine(machine.read_rates(machine.shipped()["H200"]), 8, 50e9, "cudnn")
    full = config.changed({"adapter.enable": False})
    lora, whole = (
        timing.step(memory.PlannedRank(c, Origin.of(c).definition, 4), h200) for c in (config, full)
    )
    assert 0.6 < lora.flops / whole.flops < 0.75 and lora.seconds < whole.seconds


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            ("--adapter.targets", '["qkv_proj"]'),
            r"adapter.targets: 'qkv_proj' fits none of the model's .*mixer.q_proj",
        ),
        (("--adapter.targets", '["*norm"]'), r"adapter.targets: '\*norm' fits none"),
        (
            ("--adapter.train_extra", '["gamma"]'),
            r"adapter.train_extra: 'gamma' fits none of .*mixer.A_log",
        ),
        (
            ("--adapter.rank", "129"),
            r"adapter.rank = 129 is above the \d+ channels that layers\S+ reads; use at most",
        ),
        (
            ("--training.expert_bias_update_rate", "0.1"),
            r"expert_bias_update_rate moves a bias of the base",
        ),
        (
            (
                "--loss.name",
                "dpo",
                "--loss.reference",
                "base",
                "--adapter.train_extra",
                '["*norm"]',
            ),
            r"loss.reference = 'base' is the model as it was, and adapter.train_extra changes",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(keys, message):
    with refused(message):
        adapted("kimi-linear", *keys)


def test_a_rank_that_experts_on_a_gpu_do_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)

    def check(rank: int, dtype: str = "bfloat16", targets: str = "[]") -> None:
        keys = {
            "model.name": "qwen3.5",
            "adapter.enable": "true",
            "adapter.rank": rank,
            "adapter.targets": targets,
        }
        config = load_config(argv_of(keys | {"training.mixed_precision_param": dtype}))
        check_model(Origin.of(config).definition, config, 1, 1)

    with refused(r"adapter.rank = 12: layers\.0\.mlp\.experts\.gate_up_proj .* of 8; use 16, or"):
        check(12)
    check(16)
    check(12, "float32")
    check(12, targets='["!experts"]')


def test_rank_0_is_refused():
    with refused(r"adapter.rank = 0"):
        load_config(["--adapter.enable", "true", "--adapter.rank", "0"])


def test_patterns_select():
    keys = (
        "--adapter.targets",
        '["layers.0.mixer", "o_proj"]',
        "--adapter.train_extra",
        '["*norm", "A_log"]',
    )
    names = {n for n, p in Decoder(adapted("hybrid", *keys)).named_parameters() if p.requires_grad}
    assert {n.rpartition(".lora")[0] for n in names if "layers.1" in n and "lora" in n} == {
        "layers.1.mixer.o_proj"
    }
    assert not any(n.startswith("layers.0.mlp.") for n in names)
    assert {"head.norm.weight", "layers.1.mlp_norm.weight", "layers.0.mixer.A_log"} <= names
