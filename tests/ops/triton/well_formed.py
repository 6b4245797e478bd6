"""PyTorch's own checks of a rule's operators: schemas, what they return without computing it, aliases."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.inputs import DEVICE
from titan_linear.ops.triton.chunks import chunks_of
from titan_linear.ops.triton.stages import Stages


def check_stages(stages: Stages, inputs: list[Tensor | None], numbers: list[float], indexed: bool) -> None:
    """Inputs are of one document. indexed: states by index, in and out."""
    cu, index = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, len(inputs[0])], [0]))
    chunks, (_, _, K), (_, HV, V) = list(chunks_of(cu, len(inputs[0]))), inputs[0].shape, inputs[2].shape
    states = [torch.ones(1, HV, K, V, device=DEVICE), index if indexed else None]
    prepared = [x for name, x in zip(stages.inputs._fields, inputs) if name in stages.prepared._fields]
    opcheck, do = torch.library.opcheck, torch.ones_like(inputs[2])
    opcheck(stages.prepare.overload, (prepared, chunks, numbers))
    tiles = stages.prepare(prepared, chunks, numbers)
    assert all(t.numel() for t in tiles)
    if stages.again:
        kept = [t for name, t in zip(stages.tiles._fields, tiles) if name in stages.kept]
        opcheck(stages.recompute.overload, (prepared, chunks, kept, numbers))
    tables = inputs, tiles, chunks
    opcheck(stages.scan.overload, (*tables, states, int(indexed), numbers))
    opcheck(stages.boundary.overload, (*tables, [index, None], numbers))
    opcheck(stages.boundary_bwd.overload, (do, *tables, [index, None], numbers))
    opcheck(stages.backward.overload, (do, *tables, states, states, indexed, numbers))
