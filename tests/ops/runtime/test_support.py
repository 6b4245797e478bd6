"""The table of what runs where: every row's reason, what "auto" takes, and what a run says of it at its start."""

import warnings

import pytest
import torch

from tests.ops.inputs import device_of
from tests.refusals import refused
from titan_linear.models.presets import MODELS
from titan_linear.ops import chunk_kda
from titan_linear.ops.registry import OPS, choose_implementations, start_lines
from titan_linear.ops.runtime import support
from titan_linear.ops.runtime.support import Choice, Target
from titan_linear.ops.torch import flash4
from titan_linear.ops.triton import configs
from titan_linear.ops.triton.configs import kernel_dims

BF16, CPU, GPU = torch.bfloat16, torch.device("cpu"), torch.device("cuda")
DIMS = {
    "chunk_kda": {"K": 128, "V": 128},
    "chunk_gated_delta_rule": {"K": 128, "V": 128},
    "chunk_ssd": {"K": 128, "V": 64},
    "chunk_simple_gla": {"K": 128, "V": 128},
    "chunk_rwkv7": {"K": 64, "V": 64},
    "causal_conv1d": {"W": 4},
    "cross_entropy": {},
    "swiglu": {},
    "expert_copies": {},
    "grouped_linear": {"I": 128, "O": 64},
    "attention": {"D": 128, "Dv": 128, "recurring": 1},
}
# the others' configurations are missing
ON_HOPPER_ALONE = ("chunk_ssd", "chunk_simple_gla", "chunk_rwkv7")
HOPPER = Target("cuda", (9, 0), BF16, {})


def said_of(requests, impl="auto", device=GPU, dtype=BF16):
    return start_lines(choose_implementations(requests, impl, device, dtype))


def kda(impl="auto", K=128, device=GPU, dtype=BF16):
    return support.choose(OPS["chunk_kda"], impl, device, dtype, K=K, V=128)


@pytest.fixture
def on_gpu_of(monkeypatch):
    """on_gpu_of(capability): device "cuda" is such a GPU."""

    def set_capability(own):
        monkeypatch.setattr(
            support, "capability", lambda device: own if device.type == "cuda" else None
        )
        monkeypatch.setattr(flash4, "installed", lambda: "flash-attn-4 is not installed")
        for cached in (support.choose, support._warn):
            cached.cache_clear()

    yield set_capability
    for cached in (support.choose, support._warn):
        cached.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_the_fastest_takes_its_best_case_and_the_last_takes_all(op):
    fastest = {"attention": "cudnn", "grouped_linear": "grouped_mm"}
    on_hopper = HOPPER._replace(dims=DIMS.get(op, {}))
    assert OPS[op].reason_against(fastest.get(op, "triton"), on_hopper) is None
    last = list(OPS[op].implementations)[-1]
    for device, capability in (("cpu", None), ("cuda", (7, 5)), ("mps", None)):
        assert (
            OPS[op].reason_against(
                last, Target(device, capability, torch.float64, {"K": 7, "V": 7, "W": 99})
            )
            is None
        )


DELTA_RULES = ("chunk_kda", "chunk_gated_delta_rule")
TRITON_OPS = (*DELTA_RULES, "causal_conv1d", "swiglu", "cross_entropy")


@pytest.mark.parametrize(
    "ops, name, change, reason",
    [
        (
            TRITON_OPS,
            "triton",
            {"device": "cpu", "capability": None},
            "needs tensors on a GPU, not on cpu",
        ),
        (
            TRITON_OPS,
            "triton",
            {"capability": (7, 5)},
            "no configurations for compute capability 7.5",
        ),
        (
            TRITON_OPS,
            "triton",
            {"dtype": torch.float64},
            "the dtype float64 is not one of bfloat16, float16, float32",
        ),
        (TRITON_OPS, "triton", {"dtype": None}, "differ in dtype"),
        (
            DELTA_RULES,
            "triton",
            {"capability": (8, 6), "dtype": torch.float32},
            "compute capability 8.6 and float32$",
        ),
        (
            ("chunk_gated_delta_rule",),
            "triton",
            {"capability": (10, 0)},
            "for compute capability 10.0$",
        ),
        (
            ("chunk_gated_delta_rule",),
            "triton",
            {"capability": (12, 0), "dims": {"K": 128, "V": 256}},
            r"compute capability 12.0 and K = 128, V = 256: .* 128 at most",
        ),
        (
            ("chunk_gated_delta_rule",),
            "triton",
            {"capability": (12, 0), "dims": {"K": 136, "V": 64}},
            r"compute capability 12.0 and K = 136, V = 64: .* 128 at most",
        ),
        (DELTA_RULES, "triton", {"dims": {"K": 264, "V": 128}}, "K = 264 is too large: K <= 256"),
        (DELTA_RULES, "triton", {"dims": {"K": 128, "V": 257}}, "V = 257 is too large: V <= 256"),
        (("causal_conv1d",), "triton", {"dims": {"W": 9}}, "W = 9 is too large: W <= 8"),
        (
            ("grouped_linear",),
            "grouped_mm",
            {"device": "cpu", "capability": None},
            "tensors on a GPU, not on cpu",
        ),
        (
            ("grouped_linear",),
            "grouped_mm",
            {"dtype": torch.float32},
            "the dtype float32 is not one of bfloat16",
        ),
        (
            ("grouped_linear",),
            "grouped_mm",
            {"dims": {"I": 60, "O": 64}},
            r"rows of 60 .* of 8 numbers \(16 bytes\)",
        ),
        (
            ("grouped_linear",),
            "grouped_mm",
            {"dims": {"I": 64, "O": 60}},
            r"rows of 60 .* of 8 numbers \(16 bytes\)",
        ),
        (("attention",), "cpu", {}, "needs tensors on the CPU, not on cuda"),
        (("attention",), "cudnn", {"device": "cpu", "capability": None}, "needs tensors on a GPU"),
        (("attention",), "cudnn", {"capability": (8, 9)}, "compute capability is not one of 9.0"),
        (
            ("attention",),
            "cudnn",
            {"dtype": torch.float32},
            "float32 is not one of bfloat16, float16",
        ),
        (
            ("attention",),
            "cudnn",
            {"dims": {"D": 192, "Dv": 128}},
            "heads of 192 channels are too wide",
        ),
        (
            ("attention",),
            "cudnn",
            {"dims": {"D": 128, "Dv": 192}},
            "heads of 192 channels are too wide",
        ),
        (
            ("attention",),
            "cudnn",
            {"dims": {"D": 128, "Dv": 128}},
            "a plan for every new pair of lengths",
        ),
        (
            ("attention",),
            "cudnn",
            {"dims": DIMS["attention"] | {"deterministic": 1}},
            "use_deterministic_algorithms",
        ),
        (("attention",), "flash", {"device": "mps", "capability": None}, "needs tensors on a GPU"),
        (("attention",), "flash", {"capability": (7, 5)}, "compute capability 7.5 is below 8.0"),
        (("attention",), "flash", {"dtype": torch.float64}, "float64 is not one of"),
        (
            ("attention",),
            "flash",
            {"dims": {"D": 320, "Dv": 128}},
            "D = 320 is too large: D <= 256",
        ),
        (("attention",), "flash", {"dims": {"D": 128, "Dv": 512}}, "Dv = 512 is too large"),
    ],
)
def test_the_reason_of_every_row(ops, name, change, reason):
    for op in ops:
        target = HOPPER._replace(dims=DIMS[op])._replace(**change)
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(OPS[op].reason_against(name, target))


def test_triton_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(configs, "find_spec", lambda name: None)
    assert (
        OPS["chunk_kda"].reason_against("triton", HOPPER._replace(dims=DIMS["chunk_kda"]))
        == "Triton is not installed"
    )


@pytest.mark.parametrize(
    "own", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
)
def test_other_generations_run_the_kernels_and_say_that_nobody_has_measured_them(on_gpu_of, own):
    on_gpu_of(own)
    choice = kda("auto")
    assert choice.implementation == "triton"
    assert ("not measured on this GPU" in choice.why) == (own != (9, 0))


@pytest.mark.parametrize("own", [(8, 0), (9, 0), (12, 0)])
def test_every_preset_runs_on_the_kernels(on_gpu_of, own):
    on_gpu_of(own)
    for model in (model for sizes in MODELS.values() for model in sizes.values()):
        pairs = [(OPS[name], dims) for mixer in model.mixers for name, dims in mixer.ops.items()]
        for op, dims in ((op, dims) for op, dims in pairs if "triton" in op.implementations):
            expected = "torch" if op.name in ON_HOPPER_ALONE and own != (9, 0) else "triton"
            assert support.choose(op, "auto", GPU, BF16, **dims).implementation == expected, dims


@pytest.mark.parametrize(
    "K, V, computed",
    [
        (8, 8, (32, 32)),
        (32, 64, (32, 64)),
        (40, 72, (64, 96)),
        (96, 192, (128, 192)),
        (129, 250, (256, 256)),
    ],
)
def test_the_head_dims_that_kernels_compute(K, V, computed):
    assert kernel_dims(K, V) == computed


def test_auto_is_never_refused_and_says_what_it_costs(on_gpu_of):
    on_gpu_of((9, 0))
    assert kda("auto", K=320) == (
        "torch",
        "because K = 320 is too large: K <= 256; expect it to be many times slower",
    )
    assert (
        support.choose(OPS["causal_conv1d"], "auto", GPU, torch.float64, W=4).implementation
        == "torch"
    )
    assert kda("auto") == ("triton", "")
    assert kda("torch") == ("torch", "")  # asked for: nothing to say
    on_gpu_of((7, 5))
    assert "compute capability 7.5" in kda("auto", dtype=torch.float16).why
    assert kda("auto", K=320, device=CPU) == ("torch", "")


def test_the_warning_is_of_the_line_that_calls_the_op(on_gpu_of, monkeypatch):
    on_gpu_of((9, 0))
    q, g, beta = torch.ones(1, 2, 1, 4), -torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(support, "choose", lambda *_, **dims: Choice("torch", "on trial"))
        with pytest.warns(UserWarning, match="chunk_kda: torch, on trial") as caught:
            chunk_kda(q, q, q, g, beta)
    assert caught[0].filename == __file__


def test_a_call_that_falls_back_warns_once(on_gpu_of):
    on_gpu_of((9, 0))
    with pytest.warns(UserWarning, match="chunk_kda: torch, because K = 320"):
        assert OPS["chunk_kda"].implementation("auto", GPU, BF16, K=320, V=96) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OPS["chunk_kda"].implementation("auto", GPU, BF16, K=320, V=96)
        OPS["chunk_kda"].implementation("torch", GPU, BF16, K=288, V=96)


def test_what_is_named_and_not_supported_is_refused(on_gpu_of):
    on_gpu_of((9, 0))
    with refused(r"impl = 'triton' cannot run chunk_kda: K = 320 .* use 'auto' or 'torch'"):
        kda("triton", K=320)
    with refused("impl = 'cuda' is unknown"):
        kda("cuda")
    with refused(r"^model.impl = 'triton' cannot run causal_conv1d: the dtype float64"):
        choose_implementations({"causal_conv1d": {"W": 4}}, "triton", GPU, torch.float64)


def test_the_lines_of_a_start(on_gpu_of):
    on_gpu_of((9, 0))
    requests = {
        "chunk_kda": {"K": 320, "V": 96},
        "causal_conv1d": {"W": 4},
        "attention": {"D": 128, "Dv": 128},
    }
    assert said_of(requests) == [
        "ops chunk_kda: torch, causal_conv1d: triton, attention: flash",
        "  chunk_kda: torch, because K = 320 is too large: K <= 256; expect it to be many times slower",
        "  attention: flash, and cudnn for whole streams and fragments of them; because flash-attn-4 is not installed; "
        "packed documents take half as long again without it (docs/performance.md)",
    ]
    assert said_of({"chunk_ssd": {"K": 128, "V": 56}}) == [
        "ops chunk_ssd: torch",
        "  chunk_ssd: torch, because its kernels take K = 16, 32, 64, 128 or 256 and V in steps of 16, not K = 128, "
        "V = 56; expect it to be many times slower",
    ]
    on_gpu_of((8, 0))
    assert said_of({"attention": {"D": 128, "Dv": 128}}) == ["ops attention: flash"]
    on_gpu_of((9, 0))
    assert said_of({"attention": {"D": 128, "Dv": 128}}, "triton", dtype=torch.float32) == [
        "ops attention: efficient"
    ]
    assert said_of({"attention": {"D": 320, "Dv": 320}}, "triton") == [
        "ops attention: tiled",
        "  attention: tiled, because D = 320 is too large: D <= 256; expect it to be several times slower",
    ]
    assert said_of(requests, device=CPU, dtype=torch.float32) == [
        "ops chunk_kda: torch, causal_conv1d: torch, attention: cpu"
    ]


def test_a_start_says_what_the_rest_of_the_layer_and_the_loss_run_on(on_gpu_of):
    on_gpu_of((9, 0))
    requests = {op: DIMS[op] for op in ("swiglu", "grouped_linear", "cross_entropy")}
    for impl, names in (
        ("auto", ("triton", "grouped_mm", "triton")),
        ("torch", ("torch", "grouped_mm", "torch")),
    ):
        choices = choose_implementations(requests, impl, GPU, BF16)
        assert [choice.implementation for choice in choices.values()] == list(names)
        assert len(start_lines(choices)) == 1
    assert said_of(requests, dtype=torch.float32)[1:] == [
        "  grouped_linear: loop, because the dtype float32 is not one of bfloat16; every layer with experts waits for "
        "the GPU"
    ]
    on_gpu_of((7, 5))
    why = "because its kernels have no configurations for compute capability 7.5, only for 8.0, 9.0, 10.0, 12.0;"
    assert said_of(requests) == [
        "ops swiglu: torch, grouped_linear: grouped_mm, cross_entropy: torch",
        f"  swiglu: torch, {why} expect it to be slower",
        f"  cross_entropy: torch, {why} expect it to be slower",
    ]


def test_what_a_start_says_is_no_warning_in_the_first_step(on_gpu_of):
    on_gpu_of((9, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decided = choose_implementations({"swiglu": {}}, "auto", GPU, torch.float64)["swiglu"]
        assert OPS["swiglu"].implementation(decided, GPU, torch.float64) == "torch" and not caught
        OPS["swiglu"].implementation("auto", GPU, torch.float64)
        assert len(caught) == 1


def test_flash_attention_4_is_taken_where_its_numbers_are_right(on_gpu_of, monkeypatch):
    on_gpu_of((9, 0))
    monkeypatch.setattr(flash4, "installed", lambda: None)
    monkeypatch.setattr(flash4, "problem", lambda dtype, D, Dv: "wrong" if D == 192 else None)
    requests = {"attention": {"D": 128, "Dv": 128}}
    assert said_of(requests) == ["ops attention: flash4"]
    assert support.choose(OPS["attention"], "auto", GPU, BF16, D=192, Dv=128, recurring=0) == (
        "flash",
        "because wrong; packed documents take half as long again without it (docs/performance.md)",
    )


def test_the_table_is_walked_through_once():
    misses = []
    for _ in range(2):
        OPS["chunk_kda"].implementation("auto", CPU, BF16, K=128, V=128)
        misses.append(support.choose.cache_info().misses)
    assert misses[0] == misses[1]


def test_tensors_of_several_dtypes():
    q = torch.zeros(1, 2, 1, 32, device=device_of("triton"))
    v, g, beta = q.to(BF16), q, q[..., 0]
    assert chunk_kda(q, q, v, g, beta)[0].dtype == BF16
    with refused("differ in dtype"):
        chunk_kda(q, q, v, g, beta, impl="triton")
