"""The chunked loss against cross-entropy on whole logits, in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.inputs import chunked_cross_entropy
from titan_linear.ops.cross_entropy import (
    IGNORE,
    ChunkedLogits,
    cross_entropy,
    largest,
    tokens_at_once,
)


@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_value_and_gradients(chunk):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (20,), generator=rng)
    labels[::3] = IGNORE
    labels[1], labels[2] = 0, 10  # the first and the last of the vocabulary
    want = F.cross_entropy(x @ weight.T, labels, ignore_index=IGNORE, reduction="sum")
    terms = torch.full((20,), torch.nan, dtype=torch.float64)
    got = ChunkedLogits(x, weight, chunk, token_losses=terms).sum(labels, cross_entropy)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        terms, F.cross_entropy(x @ weight.T, labels, reduction="none"), rtol=1e-12, atol=1e-14
    )
    gradients = [torch.autograd.grad(loss / 3, [x, weight]) for loss in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_compiled_it_has_the_same_gradients():
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    labels = torch.arange(8)
    compiled = torch.compile(chunked_cross_entropy, backend="aot_eager")
    losses = [loss(x, weight, labels, 4) for loss in (chunked_cross_entropy, compiled)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, [x, weight]) for loss in losses))


@pytest.mark.parametrize("rows", [257, 32_000, 65_536, 131_072, 248_320])
def test_chunks_of_a_small_vocabulary_are_larger(rows):
    """The largest power of two whose float32 logits are at most a GiB, unless 2,048 have more."""
    tokens = tokens_at_once(0, rows)
    assert tokens == 2048 or 4 * tokens * rows <= 2**30 < 4 * 2 * tokens * rows
    assert tokens >= 2048 and tokens_at_once(48, rows) == 48


def test_nothing_to_predict_is_zero():
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    loss = chunked_cross_entropy(x, weight, torch.full((5,), IGNORE), 2)
    loss.backward()
    assert loss == 0 and not x.grad.any() and not weight.grad.any()


def test_without_gradients_none_are_computed():
    """Under no_grad nothing as large as the weight is made, though x and weight ask for gradients; the value stays."""
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(64, 4, requires_grad=True)
    labels = torch.arange(8)
    with torch.no_grad(), Largest() as made:
        loss = chunked_cross_entropy(x, weight, labels, 2)
    assert made.seen < weight.numel()
    assert torch.equal(loss, chunked_cross_entropy(x, weight, labels, 2).detach())


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor made by anything but a view."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [
                t.numel()
                for t in torch.utils._pytree.tree_leaves(out)
                if isinstance(t, torch.Tensor)
            ]
            self.seen = max([self.seen, *sizes])
        return out


def test_logits_of_the_stream_never_exist_at_once():
    """The largest tensor made in forward and backward is the weight's gradient, not [T, vocab]."""
    T, D, vocab, chunk = 512, 4, 64, 16
    x, weight = torch.randn(T, D, requires_grad=True), torch.randn(vocab, D, requires_grad=True)

    with Largest() as made:
        chunked_cross_entropy(x, weight, torch.zeros(T, dtype=torch.int64), chunk).backward()
    assert made.seen == max(T * D, chunk * vocab, vocab * D)


@pytest.mark.parametrize("m", [1000, 4 * 3 * 128, 1000 * 16 + 5, 2000])
def test_the_largest_numbers(m):
    """Of few blocks, of many, and with some behind the last whole one, where the largest of a row is."""
    x = torch.rand(5, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, -1] = 2.0
    x[1] = float("-inf")
    x[1, m // 2 : m // 2 + 3] = torch.arange(3.0, dtype=torch.float64)
    for got, want in zip(largest(x, 3), x.topk(3)):
        assert torch.equal(got, want)
