from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.ops.attention_cases import CASES, against_reference, error, make, run
from tests.refusals import refused
from titan_linear.ops.attention import attention
from titan_linear.ops.runtime import support
from titan_linear.ops.torch import attention as blocks
from titan_linear.ops.torch import attention_kernels, flash4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", ["cpu", "tiled"])
def test_against_the_oracle(name, kernel, monkeypatch):
    monkeypatch.setattr(blocks, "block_kernel", lambda *shape: kernel)
    assert max(against_reference(CASES[name])) <= 1e-12
    assert max(against_reference(CASES[name], scale=0.7)) <= 1e-12
    for scale in (0, -1.0, torch.nan):
        with refused("must be above 0"):
            against_reference(CASES[name], scale=scale)


@pytest.mark.parametrize("kernel", ["cpu", "tiled"])
def test_half_precision(kernel, monkeypatch):
    """bf16 rounds p and o (and ds, o, do in gradients): at most 2 and 4 unit roundoffs of 2^-9, in RMS."""
    monkeypatch.setattr(blocks, "block_kernel", lambda *shape: kernel)
    for name in ("dense", "grouped", "packed", "decoding many"):
        o, *gradients = against_reference(CASES[name], dtype=torch.bfloat16)
        assert o <= 2 * 2**-9 and max(gradients) <= 4 * 2**-9, name


def spoilt(tensors, boundaries, value, **kwargs):
    """With a value everywhere in document i, of each: (o, dq, dk, dv) of document i as they are without it, and with
    it; every other document's stay bitwise the same."""
    kwargs["cu_seqlens"] = torch.tensor(boundaries)
    before = run(attention, *tensors, **kwargs)
    for a, b in pairwise(boundaries):
        others = torch.ones(boundaries[-1], dtype=torch.bool, device=tensors[0].device)
        others[a:b] = False
        *poisoned, do = (
            x.detach().masked_fill(~others[None, :, None, None], value) for x in tensors
        )
        after = run(attention, *(x.requires_grad_() for x in poisoned), do, **kwargs)
        assert all(torch.equal(x[:, others], y[:, others]) for x, y in zip(before, after)), (a, b)
        yield [x[:, a:b] for x in before], [y[:, a:b] for y in after]


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_each_other(causal):
    for _, own in spoilt(
        make(1, 64, 64, 4, 2, 8, 12), [0, 1, 2, 17, 40, 64], torch.nan, causal=causal
    ):
        assert not any(x.isfinite().any() for x in own)


def test_blocks_of_a_row_merge_exactly():
    """Keys in three blocks, in any order, with scores so far apart that one block has all the weight."""
    q, k, v, _ = make(2, 5, 30, 4, 2, 8, 12)
    k = torch.cat([k[:, :10], 60 * k[:, 10:20], k[:, 20:]], dim=1).detach()
    whole, lse_whole = blocks.attend(q, k, v, 1.0, False)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        o, lse = torch.zeros_like(whole), torch.full_like(lse_whole, -torch.inf)
        for i in order:
            rows = slice(10 * i, 10 * i + 10)
            blocks.merge_(o, lse, *blocks.attend(q, k[:, rows], v[:, rows], 1.0, False))
        assert error(o, whole) <= 1e-14 and error(lse, lse_whole) <= 1e-14


@pytest.mark.parametrize("kernel", ["cpu", "tiled"])
def test_gradients_that_autograd_expanded(kernel, monkeypatch):
    """sum() gives a gradient with strides of 0; only what needs a gradient gets one."""
    monkeypatch.setattr(blocks, "block_kernel", lambda *shape: kernel)
    q, k, v, do = make(2, 9, 33, 4, 2, 8, 12)
    expected = run(attention, q, k, v, torch.ones_like(do))
    attention(q, k.detach(), v).sum().backward()
    assert torch.equal(q.grad, expected[1]) and torch.equal(v.grad, expected[3]) and k.grad is None


def test_compiled_with_documents():
    q, k, v, _ = make(1, 64, 64, 2, 2, 8, 8)
    cu_seqlens = torch.tensor([0, 5, 64])
    compiled = torch.compile(lambda *x, cu: attention(*x, cu_seqlens=cu), backend="eager")
    assert torch.equal(compiled(q, k, v, cu=cu_seqlens), attention(q, k, v, cu_seqlens=cu_seqlens))


def test_the_choice_of_the_kernel(monkeypatch):
    monkeypatch.setattr(flash4, "installed", lambda: "left out")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)

    def choose(device, dtype, *shape):
        return blocks.block_kernel(torch.device(device), dtype, *shape)

    bf16 = torch.bfloat16
    assert choose("cpu", bf16, 64, 64, 7, 7) == "cpu"
    assert choose("cuda", bf16, 128, 128, 4096, 8192) == "cudnn"
    # a document's length: no plan for each
    assert choose("cuda", bf16, 128, 128, 4096, 1000) == "flash"
    assert (
        choose("cuda", bf16, 192, 128, 4096, 4096)
        == choose("cuda", bf16, 256, 256, 128, 128)
        == "cudnn"
    )
    assert choose("cuda", bf16, 192, 128, 4096, 8192) == "flash"  # measured for squares alone
    assert choose("cuda", bf16, 320, 128, 4096, 4096) == "tiled"
    assert choose("cuda", torch.float32, 128, 128, 4096, 1000) == "efficient"
    assert choose("cuda", torch.float64, 128, 128, 4096, 4096) == "tiled"
    torch.use_deterministic_algorithms(True)
    try:
        assert choose("cuda", bf16, 128, 128, 4096, 8192) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "argument, change",
    [
        ("q has shape", {"q": torch.zeros(1, 8, 4)}),
        ("q has shape", {"q": torch.zeros(1, 0, 4, 8)}),
        ("k has shape", {"k": torch.zeros(1, 8, 2, 6)}),
        ("v has shape", {"v": torch.zeros(1, 7, 2, 8)}),
        ("k is torch.float64", {"k": torch.zeros(1, 8, 2, 8, dtype=torch.float64)}),
        ("q has 3 heads", {"q": torch.zeros(1, 8, 3, 8)}),
        ("q has 9 tokens", {"q": torch.zeros(1, 9, 4, 8)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 7])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([1, 8])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 5, 3, 8])}),
        ("cu_seqlens", {"q": torch.zeros(1, 4, 4, 8), "cu_seqlens": torch.tensor([0, 8])}),
        ("first_key", {"q": torch.zeros(1, 1, 4, 8), "first_key": torch.zeros(1)}),
        (
            "first_key",
            {
                "q": torch.zeros(1, 1, 4, 8),
                "first_key": torch.tensor([0]),
                "cu_seqlens": torch.tensor([0, 8]),
            },
        ),
        ("impl", {"impl": "triton"}),
        ("method", {"method": "rings"}),
    ],
)
def test_errors_name_the_argument(argument, change):
    arguments = {
        "q": torch.zeros(1, 8, 4, 8),
        "k": torch.zeros(1, 8, 2, 8),
        "v": torch.zeros(1, 8, 2, 8),
        **change,
    }
    with refused(f"^{argument}"):
        attention(**arguments)


# --- on a device ------------------------------------------------------------------------------------------------

# kernel: a case in which it computes every block; widths of heads are swept by tests/ops/triton/test_shapes.py
ON_CUDA = {
    "flash4, one stream": ("flash4", (1, 1024, 1024, 4, 4, 128, 128, True, None)),
    "flash4, batch, grouped": ("flash4", (2, 333, 333, 8, 2, 64, 64, True, None)),
    "flash4, decoding": ("flash4", (2, 100, 333, 8, 2, 64, 64, True, None)),
    "flash4, cross": ("flash4", (1, 256, 1000, 4, 2, 128, 128, False, None)),
    "flash4, MLA": ("flash4", (1, 512, 512, 4, 4, 192, 128, True, [0, 100, 512])),
    "flash4, packed": (
        "flash4",
        (1, 640, 640, 8, 2, 128, 64, True, [0, 1, 2, 129, 256, 256, 257, 500, 640]),
    ),
    "flash4, packed, not causal": (
        "flash4",
        (1, 640, 640, 8, 2, 128, 128, False, [0, 1, 300, 640]),
    ),
    "cudnn, one stream": ("cudnn", (1, 1024, 1024, 4, 4, 128, 128, True, None)),
    "cudnn, batch, grouped": ("cudnn", (2, 512, 512, 8, 2, 64, 64, True, None)),
    "cudnn, narrow values": ("cudnn", (1, 512, 512, 4, 2, 128, 64, False, None)),
    "cudnn, cross": ("cudnn", (1, 256, 1024, 4, 2, 128, 128, False, None)),
    "cudnn, decoding": ("cudnn", (1, 256, 1024, 4, 2, 128, 128, True, None)),
    "cudnn, MLA": ("cudnn", (1, 512, 512, 4, 4, 192, 128, True, None)),
    "cudnn, few documents": ("cudnn", (1, 1024, 1024, 4, 2, 128, 128, True, [0, 256, 1024])),
    "flash, any length": ("flash", (2, 333, 333, 8, 2, 128, 128, True, None)),
    "flash, one query": ("flash", (2, 1, 333, 8, 2, 128, 128, True, None)),
    "flash, decoding": ("flash", (2, 100, 333, 8, 2, 64, 64, True, None)),
    "flash, MLA": ("flash", (1, 500, 500, 4, 4, 192, 128, True, None)),
    "flash, packed": (
        "flash",
        (1, 640, 640, 8, 2, 128, 64, True, [0, 1, 2, 129, 256, 256, 257, 500, 640]),
    ),
    "flash, packed, not causal": ("flash", (1, 640, 640, 8, 2, 128, 128, False, [0, 1, 300, 640])),
}


@pytest.fixture
def only(monkeypatch):
    """only(kernel): FlashAttention-4 is used for it alone."""

    def choose(kernel):
        if kernel == "flash4":
            if why := flash4.installed():
                pytest.skip(why)
        else:
            monkeypatch.setattr(flash4, "installed", lambda: "left out")
        support.choose.cache_clear()

    yield choose
    support.choose.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_cuda(name, dtype, monkeypatch, only):
    """2 unit roundoffs for o and 4 for gradients, as on the CPU; and no other kernel took a block."""
    kernel, case = ON_CUDA[name]
    only(kernel)
    chosen, choose = set(), blocks.block_kernel
    monkeypatch.setattr(
        blocks, "block_kernel", lambda *shape: chosen.add(choose(*shape)) or choose(*shape)
    )
    o, *gradients = against_reference(case, dtype=dtype, device="cuda")
    unit = torch.finfo(dtype).eps / 2
    assert chosen == {kernel} and o <= 2 * unit and max(gradients) <= 4 * unit


@pytest.mark.cuda
@pytest.mark.parametrize("kernel, poison", [("flash4", 1e4), ("flash", torch.nan)])
def test_documents_do_not_see_each_other_on_cuda(kernel, poison, only):
    """As on the CPU, in the kernels that take all documents in one call; FlashAttention-4 multiplies what is masked by
    zero (docs/kernels.md)."""
    only(kernel)
    tensors = make(1, 640, 640, 4, 2, 128, 128, dtype=torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        for before, after in spoilt(tensors, [0, 1, 130, 257, 400, 640], poison):
            assert not any(map(torch.equal, before[::3], after[::3]))  # o and dv
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_full_precision_on_cuda(name):
    assert max(against_reference(CASES[name], torch.float64, "cuda")) <= 1e-12
    assert max(against_reference(CASES[name], torch.float32, "cuda")) <= 2e-6


@pytest.mark.cuda
@pytest.mark.parametrize(
    "kernel, dtype, extra",
    [
        ("flash4", torch.bfloat16, 1),
        ("cudnn", torch.bfloat16, 0),
        ("flash", torch.bfloat16, 1),
        ("efficient", torch.float32, 1),
        ("tiled", torch.float64, 0),
    ],
)
def test_memory_on_cuda_is_linear(kernel, dtype, extra, only):
    """Twice the tokens take at most 2.1 times the memory, forward and backward, in every kernel."""
    only(kernel)
    peaks, D = [], 64
    for T in (1024 + extra, 8192 + extra, 16384 + extra):  # the first has what a kernel makes once
        assert blocks.block_kernel(torch.device("cuda"), dtype, D, D, T, T) == kernel
        q, k, v = (
            torch.randn(1, T, 4, D, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] <= 2.1 * peaks[1], (kernel, peaks)


@pytest.mark.parametrize("mode, inside", [("default", 0), ("warn", 2), ("error", 2)])
def test_flash_repeats_where_deterministic_algorithms_only_warn(mode, inside, monkeypatch):
    """torch's backward takes its deterministic algorithm in mode 2 alone (attention_backward.cu)."""
    seen = []

    def backward(do, q, k, v, *_, **__):
        seen.append(torch.get_deterministic_debug_mode())
        return q, k, v

    monkeypatch.setattr(
        attention_kernels, "aten", SimpleNamespace(_flash_attention_backward=backward)
    )
    q, k, v, lse = (
        torch.zeros(1, 8, 2, 8),
        torch.ones(1, 8, 2, 8),
        torch.ones(1, 8, 2, 8),
        torch.zeros(1, 2, 8),
    )
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        attention_kernels._flash_backward(q, q, k, v, q, lse, 1.0, True)
        seen.append(torch.get_deterministic_debug_mode())
    finally:
        torch.set_deterministic_debug_mode(before)
    assert seen == [inside, {"default": 0, "warn": 1, "error": 2}[mode]]


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["warn", "error"])
@pytest.mark.parametrize("kernel", ["flash4", "flash"])
def test_repeatable_on_cuda_under_deterministic_algorithms(mode, kernel, only):
    only(kernel)
    torch.set_deterministic_debug_mode(mode)
    try:
        tensors = make(1, 1024, 1024, 8, 2, 128, 128, dtype=torch.bfloat16, device="cuda")
        first, second = (run(attention, *tensors) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second))
    finally:
        torch.set_deterministic_debug_mode("default")
