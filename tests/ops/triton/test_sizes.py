"""What kernels do from a size on: more entries, channels or columns than one program takes at a time."""

import pytest
import torch

from tests.ops.inputs import DEVICE, boundaries
from titan_linear.ops.layout import segments
from titan_linear.ops.triton.activations import activate, activate_backward
from titan_linear.ops.triton.chunks import chunk_table
from titan_linear.ops.triton.experts import collect, spread
from titan_linear.ops.triton.split_documents import segment_table
from titan_linear.ops.triton.tiles import sum_groups


def test_tables_of_many_documents_are_those_of_the_host():
    """Of more than the 256 that a program reads at a time: chunks and segments, and surplus rows at the end."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 200, (300,), generator=draw).tolist()
    cu_seqlens, tokens, surplus = boundaries(lengths).int(), sum(lengths), 5
    want = segments.chunk_table(cu_seqlens.numpy(), 64)
    rows = len(want.index)
    index, offsets = (x.cpu() for x in chunk_table(cu_seqlens.to(DEVICE), 64, rows + surplus))
    assert torch.equal(index[:rows], want.index) and torch.equal(offsets, want.offsets)
    assert index[rows:, 0].tolist() == [-1] * surplus
    edges, first = (x.cpu() for x in segment_table(cu_seqlens.to(DEVICE), tokens, 128))
    cut = segments.segments_of_length(cu_seqlens.numpy(), 128)
    known = len(cut.cu_seqlens)
    assert torch.equal(edges[:known], cut.cu_seqlens) and torch.equal(first, cut.offsets)
    assert (edges[known:] == tokens).all() and len(edges) > known


@pytest.mark.parametrize("gated", [True, False])
def test_activations_of_more_channels_than_a_block(gated):
    """Two blocks of 512, the second partly full."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(5, 700 * (1 + gated), generator=draw, requires_grad=True)
    dx = torch.randn(5, 700, generator=draw)
    if gated:
        gate, up = y.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    else:
        want = y.relu().square()
    (dy,) = torch.autograd.grad(want, y, dx)
    ours = activate(y.detach().to(DEVICE), None, gated).cpu()
    ours_dy, again = activate_backward(y.detach().to(DEVICE), None, dx.to(DEVICE), gated)
    for a, b in ((ours, want), (again.cpu(), want), (ours_dy.cpu(), dy)):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)


def test_copies_of_more_channels_than_a_block():
    """Two blocks of 1,024, the second partly full."""
    x = torch.randn(3, 1100, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([[3, 0], [1, -1], [2, 4]])
    rows = spread(x.to(DEVICE), slots.to(DEVICE), 5).cpu()
    assert torch.equal(rows[slots[slots >= 0]], x.repeat_interleave(2, 0)[slots.flatten() >= 0])
    sums = collect(rows.to(DEVICE), slots.to(DEVICE)).cpu()
    assert torch.equal(sums, x * torch.tensor([[2.0], [1.0], [2.0]]))


def test_sums_over_groups_of_more_numbers_than_a_program():
    x = torch.randn(9, 6, 128, generator=torch.Generator().manual_seed(0))
    ours = sum_groups(x.to(DEVICE), torch.empty(9, 3, 128, device=DEVICE)).cpu()
    torch.testing.assert_close(ours, x.unflatten(1, (3, 2)).sum(2))
