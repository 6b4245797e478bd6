"""Trees of tables on their way to a device."""

import torch
from torch import Tensor

from tests.ops.inputs import boundaries
from titan_linear.ops import build_cp_context
from titan_linear.ops.layout import tables
from titan_linear.ops.layout.tables import to_device


def test_a_tree_moves_but_for_what_the_host_reads():
    """A context of all tables: the shapes and dtypes stay, fields of the host keep their values."""
    options = {
        "rank": 2,
        "world_size": 4,
        "layout": "zigzag",
        "conv1d_kernel_size": 4,
        "node_size": 2,
    }
    here = build_cp_context(boundaries([100, 412]), **options)
    (there,) = to_device([here], torch.device("meta"))
    for ours, theirs in ((here, there), (here.of_nodes, there.of_nodes)):
        for a, b in zip(ours.tables.forward_chains, theirs.tables.forward_chains, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
        assert {
            name for name, t in theirs.tables.forward_chains._asdict().items() if not t.is_meta
        } == {
            *("slots", "crosses", "sends", "send_counts", "receive_counts", "links", "most"),
            *("blocks_on_host", "node_size", "zigzag"),
        }
        assert torch.equal(ours.tables.forward_chains.links, theirs.tables.forward_chains.links)
        assert theirs.position_ids.is_meta and torch.equal(
            ours.cu_seqlens_cpu, theirs.cu_seqlens_cpu
        )
        assert (
            theirs.tables.boundaries.chunks[64].index.is_meta
            and ours.cut.fragments is theirs.cut.fragments
        )
        assert torch.equal(ours.rectangles.by_hop, theirs.rectangles.by_hop)
    assert there.gathered.spans.q.is_meta and torch.equal(
        here.gathered.keys.pieces, there.gathered.keys.pieces
    )


def test_one_buffer_brings_all(monkeypatch):
    """Values, dtypes and shapes of tensors of any size, contiguous or not, and aligned for vector loads; on a device
    that is the CPU under another name."""

    class Named:
        type = "other"

    to = Tensor.to
    monkeypatch.setattr(tables.Tensor, "to", lambda t, device, **_: to(t, "cpu", copy=True))
    tree = [
        torch.arange(7, dtype=torch.int32),
        torch.tensor([True]),
        torch.arange(12).view(3, 4).T,
        torch.empty(0),
    ]
    moved = to_device(tree, Named())
    for a, b in zip(tree, moved, strict=True):
        assert (
            torch.equal(a, b)
            and a.dtype == b.dtype
            and b.is_contiguous()
            and b.data_ptr() % 16 == 0
        )
    assert len({t.untyped_storage().data_ptr() for t in moved}) == 1
