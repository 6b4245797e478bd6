"""The rule that the driver of recurrences (`ops/recurrence.py`) takes for given inputs: whose kernels, over heads that
are filled up where kernels need it, and over documents or segments of long ones."""

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
    """`differentiable` changes nothing here."""
    stages, dims = _stages(inputs), (inputs.q.shape[-1], inputs.v.shape[-1])
    if stages is not SSD:
        # at K = 32 in 16 bits, ptxas put the stack pointer in the place of a descriptor in RWKV-7's gradients
        filled = kernel_dims(
            *dims, least=64 if stages is RWKV7 and inputs.q.element_size() == 2 else 32
        )
        if filled != dims:
            return Padded(triton_rule, inputs, options, boundaries, differentiable, kept, filled)
    tokens, HV, V = inputs.v.shape
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
    """What gives the segments of long entries, from the batch's plan or found on the device; None: all stay whole."""
    if programs in boundaries.segments:
        planned = boundaries.segments[programs]
        return None if planned is None else lambda: planned
    length = segment_length(tokens, len(boundaries), programs, boundaries.joined)
    return None if length is None else lambda: boundaries.derived(segments_of, tokens, length)


def _chunks(boundaries: Boundaries, tokens: int) -> Chunks:
    """The chunks, from the batch's plan or found on the device."""
    if CHUNK in boundaries.chunks:
        table = boundaries.chunks[CHUNK]
        return Chunks(boundaries.cu_seqlens, table.index, table.offsets)
    return chunks_of(boundaries.cu_seqlens, tokens)
