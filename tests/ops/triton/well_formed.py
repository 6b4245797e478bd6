"""PyTorch's own checks of a rule's operators: schemas, what they return without computing it, aliases."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.inputs import DEVICE
from titan_linear.ops.triton.chunks import chunks_of
from titan_linear.ops.triton.stages import Stages


def check_stages(
    stages: Stages, inputs: list[Tensor | None], numbers: list[float], indexed: bool
) -> None:
    """Inputs are of one document. indexed: states by index, in and out."""
    cu, index = (
        torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, len(inputs[0])], [0])
    )
    chunks, (_, _, K), (_, HV, V) = (
        list(chunks_of(cu, len(inputs[0]))),
        inputs[0].shape,
        inputs[2].shape,
    )
    states = [torch.ones(1, HV, K, V, device=DEVICE), index if indexed else None]
    none, do = [None, None], torch.ones_like(inputs[2])
    prepared = [
        x if name in stages.prepared else None for name, x in zip(stages.inputs._fields, inputs)
    ]
    untold = [*none, *none, *none, None], numbers, 0
    opcheck = torch.library.opcheck
    opcheck(
        stages.prepare.overload, (prepared, [None] * len(stages.tiles._fields), chunks, *untold)
    )
    tiles = stages.prepare(prepared, [None] * len(stages.tiles._fields), chunks, *untold)
    assert all(t.numel() for t in tiles)
    if stages.again:
        kept = [t if name in stages.kept else None for name, t in zip(stages.tiles._fields, tiles)]
        opcheck(stages.recompute.overload, (prepared, kept, chunks, *untold))
    tables = inputs, tiles, chunks
    opcheck(stages.scan.overload, (*tables, [*states, *none, *none, None], numbers, int(indexed)))
    opcheck(stages.boundary.overload, (*tables, [*none, *none, index, None, None], numbers, 1))
    opcheck(stages.boundary_bwd.overload, (*tables, [*none, *none, index, None, do], numbers, 1))
    opcheck(
        stages.backward.overload, (*tables, [*states, *states, *none, do], numbers, int(indexed))
    )
