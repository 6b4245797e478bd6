"""KDA, GDN and RWKV-7 in Triton behind the driver's interface (`ops/recurrence.py`, `Rule`), and what all share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries, Segments
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.segments import scan_programs, segment_length
from titan_linear.ops.runtime.options import AnyInputs, AnyOptions, DeltaRuleOptions, DPLRInputs, Inputs, States
from titan_linear.ops.triton import gdn, kda, rwkv7
from titan_linear.ops.triton.chunks import Chunks, chunks_of
from titan_linear.ops.triton.configs import kernel_dims
from titan_linear.ops.triton.padded import Padded
from titan_linear.ops.triton.split_documents import SplitDocuments, segments_of


def triton_delta_rule(
    inputs: Inputs | DPLRInputs,
    options: DeltaRuleOptions,
    boundaries: Boundaries,
    differentiable: bool,
    kept: Sequence[Tensor] = (),
) -> TritonRule | SplitDocuments | Padded:
    """The kernels for these inputs: RWKV-7's, KDA's for a gate per channel, GDN's for one per head. Heads are padded to
    dims that the kernels have, and long documents are cut into segments where that fills the GPU. `differentiable`
    changes nothing here."""
    given, rule = (inputs.q.shape[-1], inputs.v.shape[-1]), _rule(inputs)
    # at K = 32 in 16 bits, ptxas put the stack pointer in the place of a descriptor in RWKV-7's gradients
    dims = kernel_dims(*given, least=64 if rule is TritonRWKV7 and inputs.q.element_size() == 2 else 32)
    if dims != given:
        return Padded(triton_delta_rule, inputs, options, boundaries, differentiable, kept, dims)
    return whole_or_split(rule, inputs, options, boundaries, kept)


def whole_or_split(
    rule: type[TritonRule], inputs: AnyInputs, options: AnyOptions, boundaries: Boundaries, kept: Sequence[Tensor]
) -> TritonRule | SplitDocuments:
    """The rule, over entries or over segments of long ones."""
    tokens, HV, V = inputs.v.shape
    find = _segments(boundaries, tokens, scan_programs(HV, V)) if boundaries.may_split else None
    if find is not None:
        return SplitDocuments(rule, inputs, options, find, kept)
    if kept:
        chunk_index, chunk_offsets, *tiles = kept
        return rule(inputs, options, Chunks(boundaries.cu_seqlens, chunk_index, chunk_offsets), tiles)
    return rule(inputs, options, _chunks(boundaries, tokens), ())


def _rule(inputs: Inputs | DPLRInputs) -> type[TritonRule]:
    if isinstance(inputs, DPLRInputs):
        return TritonRWKV7
    return TritonKDA if inputs.g.dim() == 3 else TritonGDN


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


def given_states(states: States | None) -> list[Tensor | None]:
    """As operators take them: contiguous states, or None for zeros, and the row of each entry among them."""
    return [None, None] if states is None else [states.values.contiguous(), states.index]


class TritonRule(ABC):
    """One call's stages over chunks that the constructor prepares; see `Rule` in ops/recurrence.py."""

    kept_tiles: ClassVar[tuple[str, ...]]  # those that backward does not compute again
    backward_operator: ClassVar[Callable[..., tuple[Tensor, ...]]]
    inputs: AnyInputs
    tiles: Sequence[Tensor]
    chunks: list[Tensor]  # `Chunks`
    numbers: dict[str, Any]  # arguments of prepare, recompute and backward

    @abstractmethod
    def __init__(self, inputs: AnyInputs, options: AnyOptions, chunks: Chunks, kept: Sequence[Tensor]):
        """kept: forward's `kept_tiles`; empty: all tiles are prepared."""

    @property
    def kept(self) -> tuple[Tensor, ...]:
        _, chunk_index, chunk_offsets = self.chunks
        return chunk_index, chunk_offsets, *(getattr(self.tiles, name) for name in self.kept_tiles)

    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        return self.entry_transitions(chains.entries, chains.wanted)

    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        return self.entry_gradients(do, chains.entries, chains.wanted)

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[AnyInputs, Tensor]:
        tables = list(self.inputs), list(self.tiles), self.chunks, given_states(initial), given_states(d_final)
        *grads, d_initial = self.backward_operator(do, *tables, need_d_initial, **self.numbers)
        given = (None if x is None else grad for x, grad in zip(self.inputs, grads, strict=True))
        return type(self.inputs)(*given), d_initial

    @abstractmethod
    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]: ...

    def _entries(self, wanted: bool) -> int:
        """The number of entries, if states of theirs are wanted."""
        return self.chunks[0].shape[0] - 1 if wanted else 0

    @abstractmethod
    def entry_transitions(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """entries [F] int32 -> S_ext [F, HV, K, V], M [F, HV, K, K] or [F, HV, K or 1]; wanted [F] int32 says what is
        written for each: 0 nothing, 1 S_ext, 2 both; None: both for all."""

    @abstractmethod
    def entry_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        """entries [F] int32 -> dS_ext [F, HV, K, V], unwritten where wanted [F] int32 is 0."""


class TritonKDA(TritonRule):
    kept_tiles = ("Aqk", "Gn")  # the last ones
    backward_operator = staticmethod(kda.kda_backward)

    def __init__(self, inputs: Inputs, options: DeltaRuleOptions, chunks: Chunks, kept: Sequence[Tensor]):
        self.inputs, self.chunks = inputs, list(chunks)
        gate = "none" if not options.gate_in_kernel else "softplus" if options.lower_bound is None else "bounded"
        self.numbers = {
            "scale": options.scale,
            "lower_bound": options.lower_bound or 0.0,
            "gate": kda.GATES[gate],
            "safe_gate": options.safe_gate,
            "beta_range": options.beta_range,
        }
        prepare = kda.kda_recompute if kept else kda.kda_prepare
        made = prepare(list(inputs), self.chunks, **self.numbers)
        self.tiles = kda.Tiles(*made, *kept)

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        rows = self._entries(need_final)
        return kda.kda_scan(self.inputs.v, list(self.tiles), self.chunks, given_states(initial), rows)

    def entry_transitions(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return kda.kda_boundary(self.inputs.v, list(self.tiles), self.chunks, entries, wanted)

    def entry_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return kda.kda_boundary_bwd(do, list(self.tiles), self.chunks, entries, wanted)


class TritonGDN(TritonRule):
    kept_tiles = gdn.Tiles._fields
    backward_operator = staticmethod(gdn.gdn_backward)

    def __init__(self, inputs: Inputs, options: DeltaRuleOptions, chunks: Chunks, kept: Sequence[Tensor]):
        self.inputs, self.chunks, self.scale = inputs, list(chunks), options.scale
        self.numbers = {"scale": options.scale, "beta_range": options.beta_range}
        self.tiles = gdn.Tiles(*(kept or gdn.gdn_prepare(list(inputs), self.chunks, **self.numbers)))

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        q, k, v, *_ = self.inputs
        rows = self._entries(need_final)
        return gdn.gdn_scan(q, k, v, list(self.tiles), self.chunks, given_states(initial), rows, self.scale)

    def entry_transitions(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return gdn.gdn_boundary(self.inputs.k, self.inputs.v, list(self.tiles), self.chunks, entries, wanted)

    def entry_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        q, k, tiles = self.inputs.q, self.inputs.k, list(self.tiles)
        return gdn.gdn_boundary_bwd(do, q, k, tiles, self.chunks, entries, wanted, self.scale)


class TritonRWKV7(TritonRule):
    kept_tiles = ("inverse",)
    backward_operator = staticmethod(rwkv7.rwkv7_backward)

    def __init__(self, inputs: DPLRInputs, options: DeltaRuleOptions, chunks: Chunks, kept: Sequence[Tensor]):
        self.inputs, self.chunks = inputs, list(chunks)
        self.numbers = {"scale": options.scale, "lower_bound": options.lower_bound}
        if kept:
            (inverse,) = kept
            made = rwkv7.rwkv7_recompute(list(inputs), self.chunks, inverse, **self.numbers)
            self.tiles = rwkv7.Tiles(*made, inverse=inverse, O=None)
        else:
            self.tiles = rwkv7.Tiles(*rwkv7.rwkv7_prepare(list(inputs), self.chunks, **self.numbers))

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        rows = self._entries(need_final)
        return rwkv7.rwkv7_scan(self.inputs.v, list(self.tiles), self.chunks, given_states(initial), rows)

    def entry_transitions(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rwkv7.rwkv7_boundary(list(self.tiles), self.chunks, entries, wanted)

    def entry_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return rwkv7.rwkv7_boundary_bwd(do, list(self.tiles), self.chunks, entries, wanted)
