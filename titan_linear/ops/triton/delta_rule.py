"""KDA and GDN in Triton behind the driver's interface (`ops/recurrence.py`, `Rule`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries, Segments, scan_programs, segment_length
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs, States
from titan_linear.ops.triton import gdn, kda
from titan_linear.ops.triton.chunks import Chunks, chunks_of
from titan_linear.ops.triton.configs import kernel_dims
from titan_linear.ops.triton.padded import Padded
from titan_linear.ops.triton.split_documents import SplitDocuments, segments_of


def triton_delta_rule(
    inputs: Inputs,
    options: DeltaRuleOptions,
    boundaries: Boundaries,
    differentiable: bool,
    kept: Sequence[Tensor] = (),
) -> TritonRule | SplitDocuments | Padded:
    """The kernels for these inputs: KDA's for a gate per channel, GDN's for a gate per head. Heads are padded to dims
    that the kernels have, and long documents are cut into segments where that fills the GPU. ops/runtime/support.py
    says what the kernels take. `differentiable` changes nothing here."""
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    if kernel_dims(*dims) != dims:
        return Padded(_of_kernel_dims, inputs, options, boundaries, kept)
    return _of_kernel_dims(inputs, options, boundaries, kept)


def _of_kernel_dims(
    inputs: Inputs, options: DeltaRuleOptions, boundaries: Boundaries, kept: Sequence[Tensor]
) -> TritonRule | SplitDocuments:
    rule = TritonKDA if inputs.g.dim() == 3 else TritonGDN
    tokens, HV, V = inputs.v.shape
    find = _segments(boundaries, tokens, scan_programs(HV, V)) if boundaries.may_split else None
    if find is not None:
        return SplitDocuments(rule, inputs, options, find, kept)
    if kept:
        return rule(inputs, options, Chunks(boundaries.cu_seqlens, *kept[:2]), kept[2:])
    return rule(inputs, options, _chunks(boundaries, tokens), ())


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
        return Chunks(boundaries.cu_seqlens, *boundaries.chunks[CHUNK])
    return chunks_of(boundaries.cu_seqlens, tokens)


class TritonRule(ABC):
    """One call's stages over chunks that the constructor prepares; see `Rule` in ops/recurrence.py."""

    def __init__(self, inputs: Inputs, options: DeltaRuleOptions, chunks: Chunks, kept: Sequence[Tensor]):
        """kept: what forward's object had as `kept`, but for the chunk tables; empty: all tiles are prepared."""
        self.inputs, self.chunks = inputs, chunks
        self.scale, self.numbers = options.scale, self._numbers(options)
        keys = (inputs.q, inputs.k, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias)
        self.tiles = self._prepare(keys, kept)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.chunks.chunk_index, self.chunks.chunk_offsets, *self._kept_tiles()

    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        return self.boundaries(chains.entries, chains.wanted)

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        rows = self.chunks.cu_seqlens.shape[0] - 1 if need_final else 0
        return self._scan((*_rows(initial), None, rows))

    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        return self.boundary_gradients(do, chains.entries, chains.wanted)

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[Inputs, Tensor]:
        states = (*_rows(initial), *_rows(d_final), need_d_initial)
        *grads, d_initial = self._backward(*self.inputs, do, *states, *self.tiles, *self.chunks, *self.numbers)
        given = (None if x is None else grad for x, grad in zip(self.inputs, grads, strict=True))
        return Inputs(*given), d_initial

    @abstractmethod
    def boundaries(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """entries [F] int32 -> S_ext [F, HV, K, V], M [F, HV, K, K]; wanted [F] int32 says what is written for each: 0
        nothing, 1 S_ext, 2 both; None: both for all."""

    @abstractmethod
    def boundary_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        """entries [F] int32 -> dS_ext [F, HV, K, V], unwritten where wanted [F] int32 is 0."""

    @abstractmethod
    def _numbers(self, options: DeltaRuleOptions) -> tuple[float | int | bool | None, ...]:
        """The last arguments of prepare, recompute and backward."""

    @abstractmethod
    def _prepare(self, keys: tuple[Tensor | None, ...], kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """q, k, g, beta, A_log, dt_bias -> tiles; those in `kept` are not computed again."""

    @abstractmethod
    def _kept_tiles(self) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _scan(self, states: tuple[Tensor | int | None, ...]) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, *arguments: Tensor | float | int | bool | None) -> tuple[Tensor, ...]: ...


def _rows(states: States | None) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous states, and the row of each entry among them."""
    return (None, None) if states is None else (states.values.contiguous(), states.index)


class TritonKDA(TritonRule):
    _backward = staticmethod(kda.kda_backward)

    def _numbers(self, options: DeltaRuleOptions) -> tuple[float | int | bool | None, ...]:
        gate = "none" if not options.gate_in_kernel else "softplus" if options.lower_bound is None else "bounded"
        bound = 0.0 if options.lower_bound is None else options.lower_bound
        return options.scale, bound, kda.GATES[gate], options.safe_gate, options.l2norm, options.beta_range

    def _prepare(self, keys: tuple[Tensor | None, ...], kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if kept:
            return *kda.kda_recompute(*keys, *self.chunks, *self.numbers), *kept
        return kda.kda_prepare(*keys, *self.chunks, *self.numbers)

    def _kept_tiles(self) -> tuple[Tensor, ...]:
        *_, Aqk, Gn = self.tiles
        return Aqk, Gn

    def _scan(self, states: tuple[Tensor | int | None, ...]) -> tuple[Tensor, Tensor]:
        return kda.kda_scan(self.inputs.v, *self.tiles, *self.chunks, *states)

    def boundaries(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return kda.kda_boundary(self.inputs.v, *self.tiles, *self.chunks, entries, wanted)

    def boundary_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return kda.kda_boundary_bwd(do, *self.tiles, *self.chunks, entries, wanted)


class TritonGDN(TritonRule):
    _backward = staticmethod(gdn.gdn_backward)

    def _numbers(self, options: DeltaRuleOptions) -> tuple[float | int | bool | None, ...]:
        return options.scale, options.l2norm, options.beta_range

    def _prepare(self, keys: tuple[Tensor | None, ...], kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if kept:
            return *kept, *gdn.gdn_recompute(*keys, *self.chunks, *self.numbers)
        return gdn.gdn_prepare(*keys, *self.chunks, *self.numbers)

    def _kept_tiles(self) -> tuple[Tensor, ...]:
        C, *_ = self.tiles
        return (C,)

    def _scan(self, states: tuple[Tensor | int | None, ...]) -> tuple[Tensor, Tensor]:
        return gdn.gdn_scan(*self.inputs[:3], *self.tiles, *self.chunks, *states, self.scale)

    def boundaries(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return gdn.gdn_boundary(self.inputs.k, self.inputs.v, *self.tiles, *self.chunks, entries, wanted)

    def boundary_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return gdn.gdn_boundary_bwd(
            self.inputs.q, self.inputs.k, do, *self.tiles, *self.chunks, entries, wanted, self.scale
        )
