"""Products in float8: rounding, products and gradients, which projections take part, splits, compiled layers, plans."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests.keys import argv_of
from tests.models.ours import loss_of
from tests.refusals import refused
from tests.training import (
    FLOAT64,
    SMALL_HYBRID,
    SPLITS,
    arguments,
    check_equal,
    train_on_rank,
    worst,
)
from titan_linear.config import check_config, load_config
from titan_linear.distributed.compiling import apply_compile
from titan_linear.models import float8
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.float8 import use_float8
from titan_linear.models.init import initialise
from titan_linear.models.layers import Projection, project, projection
from titan_linear.models.mixers import Attention
from titan_linear.models.mlps.dense import ReLU2, SwiGLU
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.ops import build_cp_context
from titan_linear.ops.float8 import emulated_linear, float8_linear, scaled_rows
from titan_linear.planner import machine, memory, timing
from titan_linear.proof import definitions
from titan_linear.run.build import unallocated
from titan_linear.run.model_checks import check_float8, check_float8_device
from titan_linear.run.preflight import preflight

ON = {"float8.enable": "true", "float8.emulate": "true"}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()
# of two that are as near, the one with an even last bit comes first
E4M3 = torch.cat([E4M3[::2], E4M3[1::2]])
TALL = torch.logspace(-20, 8, 61, base=2.0)[:, None]  # rows of sizes far apart


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x):
    """The definition, by search: rows of x [R, C] float64 with the largest power of two that keeps them within 448,
    then the nearest of all numbers of e4m3."""
    scale = torch.exp2(torch.floor(torch.log2(448 / x.abs().amax(1, keepdim=True))))
    nearest = ((x * scale).unsqueeze(-1) - E4M3).abs().argmin(-1)
    return E4M3[nearest] / scale


def product(x, w):
    return rounded(x.flatten(0, -2)) @ rounded(w).T


def test_rows_are_rounded_as_defined():
    x = draw(61, 128) * TALL
    numbers, scales = scaled_rows(x)
    assert torch.equal(numbers.double() * scales, rounded(x.double()))
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))  # powers of two
    assert bool(
        ((numbers.float().abs().amax(1) >= 224) & (numbers.float().abs().amax(1) <= 448)).all()
    )
    error, row = (numbers.double() * scales - x).abs(), x.abs().amax(1, keepdim=True)
    assert bool((error <= torch.maximum(x.abs() * 2**-4, row * 2**-17)).all())


@pytest.mark.parametrize("largest", [448.0, 448.0 * (1 + 2**-7), 224.0, 3.0, 2.0**-99, 2.0**100])
def test_largest_numbers_do_not_overflow(largest):
    numbers, scales = scaled_rows(torch.tensor([[largest, -largest, largest / 2]]))
    assert (numbers.float() * scales)[0].tolist() == pytest.approx(
        [largest, -largest, largest / 2], rel=2**-4
    )


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_are_zero_or_not_finite(bad):
    x, w = draw(4, 32).double(), draw(16, 32, seed=1).double()  # in which sums are exact
    x[1], x[2, 5] = 0, bad
    y = emulated_linear(x, w)
    assert (
        torch.equal(y[[0, 3]], emulated_linear(x[[0, 3]], w))
        and not y[1].any()
        and not y[2].isfinite().any()
    )
    w[3, 0] = bad
    assert emulated_linear(x[[0, 1, 3]], w).isfinite().all(0).tolist() == [
        n != 3 for n in range(16)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_against_float64(dtype):
    """Each factor is off by 2⁻⁴ of itself, or 2⁻¹⁷ of its row's largest."""
    x, w = (draw(61, 256) * TALL).to(dtype), draw(48, 256, seed=1).to(dtype)
    y = emulated_linear(x.view(1, 61, 256), w)
    assert y.dtype == dtype and y.shape == (1, 61, 48)
    a, b = (t.double().abs() for t in (x, w))
    da, db = (torch.maximum(t * 2**-4, t.amax(1, keepdim=True) * 2**-17) for t in (a, b))
    bound = da @ b.T + a @ db.T + da @ db.T + 2 * torch.finfo(dtype).eps * (a @ b.T)
    assert bool(((y[0].double() - x.double() @ w.double().T).abs() <= bound).all())


class Two(nn.Module):
    """Products of every kind: joined, alone, and after an activation."""

    float8 = (("one", "two"),)

    def __init__(self):
        super().__init__()
        self.one, self.two = projection(32, 16), projection(32, 48)

    def forward(self, x):
        return project(x, self.one, self.two)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(float8, "SMALLEST", 16)


def in_float8(module):
    """As a layer of a model."""
    model = nn.Module()
    model.layers = nn.ModuleList([module])
    use_float8(model, [], emulate=True)
    return module


def gradients(module, x, dy):
    x = x.clone().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def of_two(module, x, dy):
    w = torch.cat([module.one.weight, module.two.weight]).detach()
    return [product(x, w), product(dy, w.T), *(dy.T @ x).split([16, 48])]


def of_swiglu(module, x, dy):
    gate, up, down = (p.detach() for p in module.parameters())
    w = torch.cat([gate, up])
    gate_up = product(x, w).requires_grad_()
    a, b = gate_up.chunk(2, -1)
    h = F.silu(a) * b
    (d,) = torch.autograd.grad(h, gate_up, product(dy, down.T))
    return [product(h.detach(), down), product(d, w.T), *(d.T @ x).chunk(2), dy.T @ h.detach()]


def of_relu2(module, x, dy):
    up, down = (p.detach() for p in module.parameters())
    given = product(x, up).requires_grad_()
    h = F.relu(given).square()
    (d,) = torch.autograd.grad(h, given, product(dy, down.T))
    return [product(h.detach(), down), product(d, up.T), d.T @ x, dy.T @ h.detach()]


CASES = {"joined": (Two, 64, of_two), "SwiGLU": (lambda: SwiGLU(32, 48), 32, of_swiglu)}
CASES["squared ReLU"] = (lambda: ReLU2(32, 48), 32, of_relu2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name, compiled):
    """dx from e4m3, dW from the hidden states as they are."""
    build, width, oracle = CASES[name]
    torch.manual_seed(0)
    module = in_float8(build().double())
    x, dy = draw(40, 32).double(), draw(40, width, seed=1).double()
    want = oracle(module, x, dy)
    torch.compiler.reset()
    forward = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    for got, exact in zip(gradients(forward, x, dy), want, strict=True):
        assert ((got - exact).norm() / exact.norm()).item() < 1e-12
    with torch.no_grad():
        assert torch.allclose(forward(x), want[0], rtol=1e-12)


BRANCH = {"mixer.q_proj + mixer.k_proj + mixer.v_proj", "mixer.o_proj"}
SWIGLU = {"mlp.gate_proj + mlp.up_proj", "mlp.down_proj"}
IN_FLOAT8 = {
    "kda/340M": set(),
    "kda/1.3B": BRANCH | SWIGLU,
    "gdn/1.3B": BRANCH | SWIGLU,
    "hybrid/1.3B": BRANCH | SWIGLU | {"mixer.q_proj"},  # 1024 keys and values
    "qwen3.5/9B": BRANCH | SWIGLU | {"mixer.q_proj"},
    "qwen3.5/397B-A17B": BRANCH | {"mixer.q_proj", "mlp.shared.gate_proj + mlp.shared.up_proj"},
    "olmo-hybrid/7B": BRANCH | SWIGLU | {f"mixer.{x}_proj" for x in "qkv"},
    "kimi-linear/48B-A3B": BRANCH
    | SWIGLU
    | {"mixer.q_proj", "mlp.shared.gate_proj + mlp.shared.up_proj"},
    "ling-3/tiny": set(),
    "ling-3/flash": BRANCH | SWIGLU | {"mixer.q_proj"},
    "nemotron-h/8B": {"mixer.o_proj", "mixer.q_proj", "mlp.up_proj", "mlp.down_proj"},
    "granite-h/micro": SWIGLU | {"mixer.o_proj", "mixer.q_proj"},
    "falcon-h1/7B": SWIGLU | {"mixer.o_proj"},
    "lfm2/1.2B": SWIGLU | {"mixer.o_proj", "mixer.q_proj"},
    "minimax/text-01": {"mixer.o_proj", "mixer.q_proj"},
    "rwkv7/1.5B": {*(f"mixer.{x}_proj" for x in "rkvo"), "mlp.up_proj", "mlp.down_proj"},
}


@pytest.mark.parametrize("name", IN_FLOAT8)
def test_projections_in_float8(name):
    model = unallocated(preset(*name.split("/")), torch.float32)
    products = use_float8(model, [])
    assert {" + ".join(n.split(".", 2)[2] for n in names) for names in products} == IN_FLOAT8[name]
    assert {n for names in products for n in names} == {
        n
        for n, m in model.named_modules()
        if isinstance(m, Projection) and m.product is not F.linear
    }


def test_filters():
    model = unallocated(preset("hybrid", "1.3B"), torch.float32)
    products = use_float8(model, ["layers.0.", "up_proj"])
    kinds = Counter(n.split(".", 2)[2] for names in products for n in names)
    assert kinds == {
        "mixer.q_proj": 23,
        "mixer.k_proj": 17,
        "mixer.v_proj": 17,
        "mixer.o_proj": 23,
        "mlp.down_proj": 23,
    }


def train_small(rank, world_size, argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "SMALLEST", 32)
        return train_on_rank(rank, world_size, argv)


EQUAL = ("cp 4", "HSDP x cp", "full activation checkpointing")


def test_splits_equal_one_process(corpus, worlds):
    """In float64, where differences of 1e-12 move hardly any number to another of e4m3."""
    keys = SMALL_HYBRID | FLOAT64 | ON | {"training.steps": 3}
    plain = worlds(1).run(train_on_rank, arguments(corpus, keys))[0]  # all are too small
    want = worlds(1).run(train_small, arguments(corpus, keys))[0]
    assert 1e-5 < worst(want[0], plain[0]) < 0.02
    for processes, split in (SPLITS[name] for name in EQUAL):
        got = worlds(processes).run(train_small, arguments(corpus, keys, split))[0]
        check_equal(got, want)


@pytest.mark.usefixtures("small")
def test_a_layer_is_one_graph():
    pattern = (Attention(heads=2, kv_heads=1, head_dim=32, rope_theta=None),)
    model = Decoder(
        ModelConfig(vocab_size=64, dim=32, num_layers=2, hidden_dim=32, pattern=pattern)
    )
    initialise(model.use("torch", torch.device("cpu"), torch.float32), seed=0)
    assert len(use_float8(model, [], emulate=True)) == 2 * 6
    torch.compiler.reset()
    counters.clear()
    apply_compile(model, "aot_eager")
    context = build_cp_context(torch.tensor([0, 20, 64], dtype=torch.int32), rank=0, world_size=1)
    tokens = torch.arange(64)[None]
    model(
        tokens, BatchPlan(context.position_ids, cp_context=context), loss=loss_of(tokens)
    ).backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


# --- What is refused -------------------------------------------------------------------------------------------------


def config_of(**keys):
    given = {"model.name": "hybrid", "model.flavor": "1.3B", "float8.enable": "true"}
    return load_config(argv_of(given, **keys), cuda=True)


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"parallelism__tensor_parallel_degree": 2},
            r"tensor_parallel_degree = 2 leaves ranks parts of them",
        ),
        (
            {"float8__enable": "false", "float8__emulate": "true"},
            "float8.emulate = true has no effect with",
        ),
        (
            {"float8__enable": "false", "float8__filter_fqns": '["o_proj"]'},
            r"float8.filter_fqns = \[.o_proj.\] has no",
        ),
    ],
)
def test_keys_that_contradict_it_are_refused(keys, message):
    with refused(message):
        check_config(config_of(**keys), world_size=2)


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"model__flavor": "340M"},
            r"of model.flavor = '340M' \(dim 1024\) has a weight of 2048 × 2048 or more, and",
        ),
        (
            {"float8__filter_fqns": '["head"]'},
            r"'head' is in the name of no projection in float8; remove it",
        ),
        (
            {"float8__filter_fqns": '["layers."]'},
            r"no product outside float8.filter_fqns \(dim 2048\)",
        ),
    ],
)
def test_models_without_such_products_are_refused(keys, message):
    config = config_of(**keys)
    with refused(message):
        check_float8(preset("hybrid", config.model.flavor), config.model, config.float8)


@pytest.mark.parametrize(
    "capability, keys, message",
    [
        (None, {}, r"8.9 or more, not a CPU; set it to false, or float8.emulate = true"),
        ((8, 0), {}, r"8.9 or more, not 8.0; set it to false"),
        (
            (9, 0),
            {"training__mixed_precision_param": "float32"},
            r"is for training.mixed_precision_param = 'bfloat16'",
        ),
    ],
)
def test_devices_without_it_are_refused(capability, keys, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr("titan_linear.run.model_checks.capability", lambda device: capability)
    config = config_of(**keys)
    dtype = config.training.mixed_precision_param
    with refused(message):
        check_float8_device(config.float8, dtype)
    check_float8_device(config_of(float8__emulate="true", **keys).float8, dtype)


def test_a_small_model_is_refused_before_the_run(corpus):
    with refused(r"float8.enable = true: no product of model.flavor = 'debug'"):
        preflight(load_config(arguments(corpus, ON)), world_size=1)


def test_the_doctor_proves_products():
    config = config_of(float8__emulate="true")
    subject = SimpleNamespace(
        run=config, config=config, device=torch.device("cpu"), dtype=torch.bfloat16
    )
    assert [found.holds for found in definitions.float8(subject)] == [True, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definitions, "float8_linear", lambda x, w, emulate: x @ w.T)  # not rounded
        assert [found.holds for found in definitions.float8(subject)] == [False, False]


# --- Plans -----------------------------------------------------------------------------------------------------------


def test_plans(monkeypatch):
    """Products take less time, rounding some, and memory stays; without measured rates there is no plan of time."""
    model = preset("hybrid", "1.3B").first_layers(4)
    keys = {"compile__enable": "true", "training__seq_len": 8192, "training__global_batch_size": 1}
    h200 = machine.read_rates(machine.SHIPPED / "h200.json")
    fast = replace(h200, float8=[(2048, 2 * h200.products[-1][1])])
    plans = {}
    for name, float8_keys in {
        "bfloat16": {"float8__enable": "false"},
        "float8": {},
        "without the second layer": {"float8__filter_fqns": '["layers.1."]'},
    }.items():
        config = config_of(**keys, **float8_keys)
        rank = memory.PlannedRank(config, model, 1)
        of_gpus = machine.Machine(fast, 8, 5e10, "flash4")
        plans[name] = timing.step(rank, of_gpus), rank.memory()
    steps = {name: step.parts for name, (step, _) in plans.items()}
    assert (
        steps["float8"]["products"]
        < steps["without the second layer"]["products"]
        < steps["bfloat16"]["products"]
    )
    assert steps["float8"]["elementwise"] > steps["bfloat16"]["elementwise"]
    assert plans["float8"][1]["activations"] == plans["bfloat16"][1]["activations"]
    with refused(r"rates of NVIDIA H200 do not say how fast products in float8 are"):
        rank = memory.PlannedRank(config_of(**keys), model, 1)
        timing.step(rank, replace(of_gpus, rates=replace(h200, float8=None)))


# --- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_gpu_computes_the_same(compiled):
    """As the emulation does with the same numbers; Hopper drops 2⁻¹³ of a sum with every 32 terms."""
    run = torch.compile(float8_linear, fullgraph=True) if compiled else float8_linear
    x, w = (draw(n, 2048, seed=n).bfloat16().cuda() for n in (1000, 4096))
    # hidden states, their gradients, one token that is decoded
    for a, b in ((x, w), (x @ w.T, w.T), (x[3:4], w)):
        want = emulated_linear(a.double(), b.double())
        bound = 2**-8 + a.shape[1] / 32 * 2**-13
        assert ((run(a, b).double() - want).norm() / want.norm()).item() < bound
    x[1], x[2, 5] = 0, torch.inf
    y = run(x, w)
    assert not y[1].any() and not y[2].isfinite().any() and bool(y[[0, 3]].isfinite().all())
