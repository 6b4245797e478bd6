"""What the ops do for tensors on a GPU alone, on the CPU: PyTorch's functions that only GPUs have are stood in for by
the same in wider numbers, which refuse what those refuse."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.ops.attention_cases import CASES, against_reference, make, run
from tests.ops.inputs import boundaries
from titan_linear.ops import cross_entropy as losses
from titan_linear.ops import experts
from titan_linear.ops.attention import attention
from titan_linear.ops.exchange import folds
from titan_linear.ops.float8 import emulated_linear, float8_linear
from titan_linear.ops.layout.spans import CUDNN_MULTIPLE, FEW, Spans
from titan_linear.ops.runtime.options import boundaries_of, check_boundaries
from titan_linear.ops.torch import attention as blocks
from titan_linear.ops.torch import attention_kernels, flash4

# --- Products whose result is wider than their operands --------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors say that they are on a GPU. The list has the names of the wide products that were computed."""
    taken, mm, addmm = [], torch.mm, torch.addmm

    def wide_mm(a, b, out_dtype=None, **out):
        if out_dtype is None:
            return mm(a, b, **out)
        taken.append("mm")
        promised = mm(a.to("meta"), b.to("meta"), out_dtype=out_dtype)
        assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
        y = mm(a.to(out_dtype), b.to(out_dtype))
        assert promised.dtype == y.dtype and promised.shape == y.shape
        return y

    def wide_addmm(x, a, b, out_dtype, out):
        taken.append("addmm")
        assert out is x and x.dtype == out_dtype == torch.float32
        assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
        assert addmm(*(t.to("meta") for t in (x, a, b)), out_dtype=out_dtype).shape == x.shape
        return x.add_(mm(a.to(out_dtype), b.to(out_dtype)))

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    return taken


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_and_gradients(dtype):
    """Of two hidden states over one vocabulary, a chunk of tokens at a time."""
    x, more, weight = (
        draw(10, 8, dtype=dtype),
        draw(10, 8, dtype=dtype, seed=1),
        draw(12, 8, dtype=dtype),
    )
    for leaf in (x, more, weight):
        leaf.requires_grad_()
    ids = torch.tensor([3, losses.IGNORE, 0, 11, 5, 5, 2, 7, losses.IGNORE, 1])
    others = losses.Sum(more, ids.view(-1, 1), losses.cross_entropy)
    logits = losses.ChunkedLogits(x, weight, 4, more=(others,))
    total = logits.sum(ids, losses.cross_entropy)
    return total.detach(), *torch.autograd.grad(total, (x, more, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_multiply_into_wider_numbers(dtype, request):
    """As on a CPU, which converts the operands first."""
    expected = loss_and_gradients(dtype)
    taken = request.getfixturevalue("on_gpu")
    assert all(map(torch.equal, loss_and_gradients(dtype), expected))
    assert set(taken) == ({"mm", "addmm"} if dtype == torch.bfloat16 else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routers_multiply_into_wider_numbers(dtype, request):
    x, weight, d = (
        draw(10, 8, dtype=dtype),
        draw(4, 8, dtype=dtype, seed=1),
        draw(10, 4, dtype=torch.float32),
    )

    def results():
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = experts.router_logits(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, d)

    expected = results()
    taken = request.getfixturevalue("on_gpu")
    assert all(map(torch.equal, results(), expected)) and expected[0].dtype == torch.float32
    assert len(taken) == (2 if dtype == torch.bfloat16 else 0)


def test_products_of_groups_in_one_kernel():
    """PyTorch's kernel for groups, which on a CPU is a loop of its own, is what this project's loop is, empty groups
    included: the layouts of its operands and the ends of groups."""
    counts = torch.tensor([3, 0, 9, 4])
    x, weight, dy = draw(16, 24), draw(4, 8, 24, seed=1), draw(16, 8, seed=2)
    grouped, loop = (experts.GROUPED_LINEAR.load(name) for name in ("grouped_mm", "loop"))
    for ours, by_loop in (
        (grouped.linear(x, weight, counts), loop.linear(x, weight, counts)),
        (grouped.linear(dy, weight.mT, counts), loop.linear(dy, weight.mT, counts)),
        (grouped.outer(dy, x, counts), loop.outer(dy, x, counts)),
    ):
        assert (ours.float() - by_loop.float()).norm() <= 2**-8 * by_loop.float().norm()


def test_products_in_float8():
    """PyTorch's product of rows with scales, which a CPU has too, and the emulation."""
    x, weight = draw(5, 32), draw(16, 32, seed=1)
    ours, want = float8_linear(x, weight), emulated_linear(x.double(), weight.double())
    assert ours.dtype == torch.bfloat16 and ours.shape == want.shape
    assert (ours.double() - want).norm() <= 2**-8 * want.norm()


# --- Blocks of softmax attention -------------------------------------------------------------------------------------


def explicit(q, k, v, scale, causal, to_the_end):
    """Scores [.., Tq, Tk], and probabilities, of heads first: q [.., Tq, D], in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT * scale
    Tq, Tk = scores.shape[-2:]
    if causal:
        later = torch.ones(Tq, Tk).triu(1 + (Tk - Tq if to_the_end else 0)).bool()
        scores = scores.masked_fill(later, -torch.inf)
    lse = scores.logsumexp(-1)
    return lse, (scores - lse.unsqueeze(-1)).exp()


def forward(q, k, v, scale, causal, to_the_end=False):
    """o and lse of heads first, k and v with a head for each of the queries' or fewer."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    lse, p = explicit(q, k, v, scale, causal, to_the_end)
    return (p @ v.double()).to(q.dtype), lse.float()


def backward(do, q, k, v, o, lse, scale, causal, to_the_end=False):
    """dq, dk, dv from o and lse of all blocks."""
    groups, dtype = q.shape[-3] // k.shape[-3], q.dtype
    do, q, k, v, o = (x.double() for x in (do, q, k, v, o))
    k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    own, p = explicit(q, k, v, scale, causal, to_the_end)
    p = p * (own - lse.double()).exp().unsqueeze(-1)
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    grads = ds @ k, *(x.unflatten(-3, (-1, groups)).sum(-3) for x in (ds.mT @ q, p.mT @ do))
    return [x.to(dtype) for x in grads]


def aligned(multiple, *tensors):
    """What CUDA kernels ask for, and PyTorch's functions, called by name, do not check."""
    for x in tensors:
        assert x.stride(-1) == 1 and x.shape[-1] % multiple == 0
        assert not any(s % multiple for s in x.stride()[:-1])


def cudnn(q, k, v, bias, with_lse, dropout, causal, mask, scale):
    aligned(8, q, k, v)
    o, lse = forward(q, k, v, scale, causal)
    return o, lse.unsqueeze(-1)


def cudnn_backward(
    do, q, k, v, o, lse, seed, offset, bias, cu_q, cu_k, Tq, Tk, dropout, causal, scale
):
    aligned(8, do, q, k, v, o)
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    assert (Tq, Tk) == (q.shape[2], k.shape[2])
    return backward(do, q, k, v, o, lse.squeeze(-1), scale, causal)


def efficient(q, k, v, bias, with_lse, dropout, causal, scale):
    aligned(4, q, k, v)
    assert q.shape[1] == k.shape[1]
    o, lse = forward(q, k, v, scale, causal)
    return o, F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def efficient_backward(do, q, k, v, bias, o, lse, seed, offset, dropout, wanted, causal, scale):
    aligned(4, do, q, k, v, o)
    Tq = q.shape[2]
    assert lse.shape[-1] % 32 == 0 and lse[..., Tq:].isinf().all() and len(wanted) == 4
    return *backward(do, q, k, v, o, lse[..., :Tq], scale, causal), None


def by_document(function, varlen, tensors, *how):
    """Results of packed documents, [T, H, D] and lse [H, T], from heads first."""
    cu_q, cu_k, longest_q, longest_k = varlen
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (longest_q, longest_k) == (cu_q.diff().max(), cu_k.diff().max())
    parts = []
    for i in range(len(cu_q) - 1):
        q, k = (slice(cu[i], cu[i + 1]) for cu in (cu_q, cu_k))
        own = [
            x[:, q] if x.dim() == 2 else x[k if of_keys else q].transpose(0, 1)
            for x, of_keys in tensors
        ]
        parts.append(function(*own, *how, True))
    together = []
    for of_each in zip(*parts, strict=True):
        lse = of_each[0].dim() == 2
        together.append(torch.cat(of_each, 1) if lse else torch.cat(of_each, 1).transpose(0, 1))
    return together


def flash(q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, causal, mask, scale):
    aligned(8, q, k, v)
    tensors = (q, False), (k, True), (v, True)
    return by_document(forward, (cu_q, cu_k, longest_q, longest_k), tensors, scale, causal)


def flash_backward(
    do, q, k, v, o, lse, cu_q, cu_k, longest_q, longest_k, dropout, causal, seed, unused, scale
):
    aligned(8, do, q, k, v, o)
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    tensors = (do, False), (q, False), (k, True), (v, True), (o, False), (lse, False)
    return by_document(backward, (cu_q, cu_k, longest_q, longest_k), tensors, scale, causal)


class FlashAttention4:
    """Its interface; without boundaries of documents a batch, whose mask is aligned to the end too."""

    @staticmethod
    def _flash_attn_fwd(q, k, v, softmax_scale, causal, return_lse, **boundaries):
        aligned(8, q, k, v)
        if boundaries:
            return flash(q, k, v, *boundaries.values(), 0.0, causal, False, softmax_scale)
        o, lse = forward(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, causal, True)
        return o.transpose(1, 2), lse

    @staticmethod
    def _flash_attn_bwd(q, k, v, o, do, lse, scale, causal, deterministic, **boundaries):
        aligned(8, do, q, k, v, o)
        if boundaries:
            return flash_backward(
                do, q, k, v, o, lse, *boundaries.values(), 0.0, causal, None, None, scale
            )
        tensors = (x.transpose(1, 2) for x in (do, q, k, v, o))
        return [x.transpose(1, 2) for x in backward(*tensors, lse, scale, causal, True)]


ATEN = {
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
}


@pytest.fixture
def attention_on_gpu(monkeypatch):
    """attention_on_gpu(kernel): blocks are computed by this kernel of GPUs, whose functions are stood in for."""
    monkeypatch.setattr(attention_kernels, "aten", SimpleNamespace(**ATEN))
    monkeypatch.setattr(flash4, "_interface", lambda: FlashAttention4)
    return lambda kernel: monkeypatch.setattr(blocks, "block_kernel", lambda *shape: kernel)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "kernel, dtype",
    [
        ("flash4", torch.bfloat16),
        ("flash", torch.bfloat16),
        ("cudnn", torch.bfloat16),
        ("efficient", torch.float32),
    ],
)
def test_kernels_of_attention_on_gpus(attention_on_gpu, kernel, dtype, name):
    """Layouts, paddings, grouped heads, log-sum-exps and boundaries that go to each kernel and come from it."""
    attention_on_gpu(kernel)
    unit = torch.finfo(dtype).eps / 2
    o, *gradients = against_reference(CASES[name], dtype=dtype)
    assert o <= 4 * unit and max(gradients) <= 8 * unit


@pytest.mark.parametrize("D, Dv", [(128, 128), (192, 128), (64, 40)])
def test_flash_attention_4_is_used_if_its_numbers_are_right(attention_on_gpu, monkeypatch, D, Dv):
    """On a small case of packed documents, with grouped heads where a width is shared."""
    flash4.problem.cache_clear()
    assert flash4.problem(torch.bfloat16, D, Dv, "cpu") is None
    right, by_numbers = (
        FlashAttention4._flash_attn_bwd,
        "gives wrong numbers on a small case: {'dk'",
    )

    def wrong(*given, **boundaries):
        dq, dk, dv = right(*given, **boundaries)
        return dq, 1.5 * dk, dv

    def unknown(*_, **__):
        raise RuntimeError("no such architecture")

    for function, said in ((wrong, by_numbers), (unknown, "RuntimeError: no such architecture")):
        monkeypatch.setattr(FlashAttention4, "_flash_attn_bwd", staticmethod(function))
        flash4.problem.cache_clear()
        assert said in flash4.problem(torch.bfloat16, D, Dv, "cpu")
    flash4.problem.cache_clear()


@pytest.mark.parametrize("kernel", ["tiled", "flash"])
def test_blocks_of_prefix_trees_merge_by_the_kernel(request, monkeypatch, attention_on_gpu, kernel):
    """Spans of which two also see keys of the first: in half precision by the kernel, within roundings of what a CPU
    merges, o and log-sum-exp."""
    from titan_linear.ops.triton import merge

    attention_on_gpu(kernel)
    q, k, v, _ = (x.detach() for x in make(1, 64, 64, 4, 2, 8, 8, dtype=torch.bfloat16))
    edges = torch.tensor([0, 20, 37, 64], dtype=torch.int32)
    below = torch.tensor([[20, 37, 0, 20], [37, 64, 0, 9]])
    longest = torch.tensor([27])
    spans = Spans(edges, edges, edges, edges, longest, longest, below)
    expected = blocks.attend_spans(q, k, v, 0.3, True, spans)
    merges, merge_ = [], merge.merge_
    monkeypatch.setattr(merge, "merge_", lambda *block: merges.append(0) or merge_(*block))
    request.getfixturevalue("on_gpu")
    ours = blocks.attend_spans(q, k, v, 0.3, True, spans)
    assert len(merges) == 2
    assert all(map(torch.allclose, ours, expected, (2**-7, 1e-6), (2**-7, 1e-6)))


@pytest.mark.parametrize(
    "spans, length, kernel",
    [
        (2, CUDNN_MULTIPLE, "cudnn"),
        (FEW, CUDNN_MULTIPLE, "cudnn"),
        (FEW + 1, CUDNN_MULTIPLE, "flash"),
        (2, CUDNN_MULTIPLE + 8, "flash"),
    ],
)
def test_packed_spans_whose_lengths_recur_are_taken_by_cudnn(
    monkeypatch, attention_on_gpu, spans, length, kernel
):
    """Few spans, of whole multiples; else by the kernel for any lengths."""
    asked, choose = [], blocks.block_kernel

    def chosen(device, dtype, *shape):
        asked.append(choose(torch.device("cuda"), dtype, *shape))
        return asked[-1]

    attention_on_gpu("flash")
    monkeypatch.setattr(flash4, "installed", lambda: "left out")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(blocks, "block_kernel", chosen)
    tensors = make(1, spans * length, spans * length, 2, 2, 8, 8, dtype=torch.bfloat16)
    run(attention, *tensors, cu_seqlens=torch.arange(spans + 1) * length)
    assert set(asked) == {kernel}


# --- States between ranks, and tables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "K, V, dtype, folded",
    [
        (16, 16, torch.float32, True),
        (256, 80, torch.float32, True),
        (64, 64, torch.float64, False),
        (48, 64, torch.float32, False),
        (512, 64, torch.float32, False),
        (64, 40, torch.float32, False),
    ],
)
def test_folds_by_kernels_are_those_that_kernels_compute(request, K, V, dtype, folded):
    """On a GPU, of float32 states whose K is one of a tile, and V a multiple of 16; else in float64."""
    S_ext = torch.zeros(2, 3, 1, K, V, dtype=dtype)
    assert not folds.by_kernels(S_ext)
    request.getfixturevalue("on_gpu")
    assert folds.by_kernels(S_ext) == folded


def test_boundaries_on_a_device_are_not_read():
    """The host would wait for them; a copy on the host is checked instead. Those of a batch's rows are made there."""
    there = torch.empty(3, dtype=torch.int32, device="meta")
    assert check_boundaries(1, 10, there, None) == 2
    with pytest.raises(ValueError, match="cu_seqlens_cpu"):
        check_boundaries(1, 10, there, torch.tensor([0, 4, 9], dtype=torch.int32))
    x = torch.empty(2, 5, 1, 8, device="meta")
    rows = boundaries_of(x, None, None, None)
    assert rows.cu_seqlens.is_meta and rows.cu_seqlens_cpu.tolist() == [0, 5, 10]
    packed = boundaries_of(x, boundaries([4, 6]), None, None)
    assert packed.cu_seqlens.is_meta and packed.cu_seqlens_cpu.tolist() == [0, 4, 10]
