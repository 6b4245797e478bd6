"""Choice of the rule that the driver of recurrences (`ops/recurrence.py`) uses for given
inputs: which kernels, whether heads are padded for them, and whether long documents are cut
into segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries, Segments
from titan_linear.ops.layout.segments import scan_programs, segment_length
from titan_linear.ops.runtime.options import AnyInputs, AnyOptions, DecayInputs, DPLRInputs
from titan_linear.ops.triton.chunks import Chunks, chunks_of
from titan_linear.ops.triton.configs import kernel_dims
from titan_linear.ops.triton.gdn import GDN
from titan_linear.ops.triton.kda import KDA
from titan_linear.ops.triton.padded import Padded
from titan_linear.ops.triton.rwkv7 import RWKV7
from titan_linear.ops.triton.split_documents import SplitDocuments, segments_of
from titan_linear.ops.triton.ssd import SSD
from titan_linear.ops.triton.stages import Stages, TritonRule


def triton_rule(
    inputs: AnyInputs,
    options: AnyOptions,
    boundaries: Boundaries,
    differentiable: bool,
    kept: Sequence[Tensor] = (),
) -> TritonRule | SplitDocuments | Padded:
    """Return the rule for `inputs`. `differentiable` has no effect here."""
    stages = _stages(inputs)
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    if stages is not SSD:
        # At K = 32 in 16 bits, ptxas overwrote a descriptor with the stack pointer in
        # RWKV-7's gradients.
        filled = kernel_dims(
            *dims, least=64 if stages is RWKV7 and inputs.q.element_size() == 2 else 32
        )
        # Pad heads that the kernels do not support.
        if filled != dims:
            return Padded(triton_rule, inputs, options, boundaries, differentiable, kept, filled)
    tokens, HV, V = inputs.v.shape
    # Cut long documents where programs are too few.
    find = _segments(boundaries, tokens, scan_programs(HV, V)) if boundaries.may_split else None
    if find is not None:
        return SplitDocuments(partial(TritonRule, stages), inputs, options, find, kept)
    if kept:
        chunk_index, chunk_offsets, *tiles = kept
        return TritonRule(
            stages,
            inputs,
            options,
            Chunks(boundaries.cu_seqlens, chunk_index, chunk_offsets),
            tiles,
        )
    return TritonRule(stages, inputs, options, _chunks(boundaries, tokens), ())


def _stages(inputs: AnyInputs) -> Stages:
    if isinstance(inputs, DecayInputs):
        return SSD
    if isinstance(inputs, DPLRInputs):
        return RWKV7
    return KDA if inputs.g.dim() == 3 else GDN


def _segments(boundaries: Boundaries, tokens: int, programs: int) -> Callable[[], Segments] | None:
    """Return a function that gives the segments of long entries, from the batch's plan or
    built on the device; None if no entry is cut."""
    if programs in boundaries.segments:
        planned = boundaries.segments[programs]
        return None if planned is None else lambda: planned
    # Compiled code would have another form for each number of entries, and other rounding.
    assert not boundaries.segments, f"no segments are planned for a scan of {programs} programs"
    length = segment_length(tokens, len(boundaries), programs, boundaries.joined)
    return None if length is None else lambda: boundaries.derived(segments_of, tokens, length)


def _chunks(boundaries: Boundaries, tokens: int) -> Chunks:
    """Return the chunks from the batch's plan, or build them on the device."""
    if CHUNK in boundaries.chunks:
        table = boundaries.chunks[CHUNK]
        return Chunks(boundaries.cu_seqlens, table.index, table.offsets)
    return chunks_of(boundaries.cu_seqlens, tokens)
