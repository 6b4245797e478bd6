"""KDA and GDN in Triton behind the driver's interface (`ops/delta_rule.py`, `DeltaRule`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from titan_linear.ops.options import DeltaRuleOptions, Entries
from titan_linear.ops.triton import gdn, kda
from titan_linear.ops.triton.chunks import Chunks, chunks_of
from titan_linear.ops.triton.split_documents import SplitDocuments, segment_length

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_delta_rule(
    inputs: Sequence[Tensor | None],
    options: DeltaRuleOptions,
    entries: Entries,
    differentiable: bool,
    kept: Sequence[Tensor] = (),
) -> TritonRule | SplitDocuments:
    """The kernels for these inputs: KDA's for a gate per channel, GDN's for a gate per head; long documents in segments
    where that fills the GPU.

    Raises:
        ValueError: a dtype or head dim that the kernels do not have.
    """
    q, k, v, g, *_ = inputs
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: impl = 'triton' takes one of "
            f"{', '.join(map(str, DTYPES))} for all three; use impl = 'torch' for others"
        )
    for name, dim in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if dim not in HEAD_DIMS:
            raise ValueError(
                f"{name} = {dim}: impl = 'triton' has head dims {HEAD_DIMS}; use impl = 'torch' for others"
            )
    rule, cu_seqlens = TritonKDA if g.dim() == 3 else TritonGDN, entries.on(q.device)
    length = None if entries.fixed else segment_length(len(q), len(entries), *v.shape[1:])
    if length is not None:
        return SplitDocuments(rule, inputs, options, cu_seqlens, kept, length)
    chunks = Chunks(cu_seqlens, *kept[:2]) if kept else chunks_of(cu_seqlens, len(q))
    return rule(inputs, options, chunks, kept[2:])


class TritonRule(ABC):
    """One call's stages over chunks that the constructor prepares.

    States are [N, HV, K, V], or rows of them by index ([N] int32): entry n starts from row state_index[n] of the
    initial states and ends in row final_index[n] of the final ones. -1 reads as zeros and is not written. Gradients
    have the rows of what they are gradients of.
    """

    def __init__(
        self, inputs: Sequence[Tensor | None], options: DeltaRuleOptions, chunks: Chunks, kept: Sequence[Tensor]
    ):
        """kept: what this object's `kept` was in forward, but for the chunks."""
        self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias = inputs
        self.chunks = chunks
        self.numbers = self._numbers(options)
        self.tiles = self._prepare((self.q, self.k, self.g, self.beta, self.A_log, self.dt_bias), kept)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.chunks.chunk_index, self.chunks.chunk_offsets, *self._kept_tiles()

    def forward(
        self,
        initial_state: Tensor | None,
        output_final_state: bool = True,
        state_index: Tensor | None = None,
        final_index: Tensor | None = None,
        final_rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """o [T, HV, V]; the final states, with final_index `final_rows` of them, or None."""
        rows = self.chunks.cu_seqlens.shape[0] - 1 if final_index is None else final_rows
        states = (_dense(initial_state), state_index, final_index, rows if output_final_state else 0)
        o, final_state = self._scan(states)
        return o, final_state if output_final_state else None

    def backward(
        self,
        do: Tensor,
        initial_state: Tensor | None,
        d_final: Tensor | None,
        need_d_initial: bool = True,
        state_index: Tensor | None = None,
        final_index: Tensor | None = None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Gradients of the seven inputs (None for those not given); of the initial states, or None."""
        inputs = (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias)
        need_d_initial = need_d_initial and initial_state is not None
        states = (_dense(initial_state), state_index, _dense(d_final), final_index, need_d_initial)
        *grads, d_initial = self._backward(*inputs, do, *states, *self.tiles, *self.chunks, *self.numbers)
        grads = [None if x is None else grad for x, grad in zip(inputs, grads, strict=True)]
        return grads, d_initial if need_d_initial else None

    def boundary(self, entries: Sequence[int], need_m: Sequence[bool]) -> list[tuple[Tensor, Tensor | None]]:
        if not entries:
            return []
        S_ext, M = self.boundaries(self._listed(entries), self._listed([1 + need for need in need_m]))
        return [(S_ext[i], M[i] if need else None) for i, need in enumerate(need_m)]

    def boundary_backward(self, do: Tensor, entries: Sequence[int]) -> list[Tensor]:
        return list(self.boundary_gradients(do, self._listed(entries))) if entries else []

    def _listed(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.q.device, non_blocking=True)

    @abstractmethod
    def boundaries(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """entries [F] int32 -> S_ext [F, HV, K, V], M [F, HV, K, K]; wanted [F] int32: 0 leaves both of an entry
        unwritten, 1 its M, 2 neither; None: all 2."""

    @abstractmethod
    def boundary_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        """entries [F] int32 -> dS_ext [F, HV, K, V], unwritten where wanted [F] int32 is 0."""

    @abstractmethod
    def _numbers(self, options: DeltaRuleOptions) -> tuple[float | int | bool | None, ...]:
        """The last arguments of prepare, recompute and backward."""

    @abstractmethod
    def _prepare(self, keys: tuple[Tensor | None, ...], kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """q, k, g, beta, A_log, dt_bias -> tiles, those in `kept` not anew."""

    @abstractmethod
    def _kept_tiles(self) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _scan(self, states: tuple[Tensor | int | None, ...]) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, *arguments: Tensor | float | int | bool | None) -> tuple[Tensor, ...]: ...


def _dense(states: Tensor | None) -> Tensor | None:
    return None if states is None else states.contiguous()


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
        return kda.kda_scan(self.v, *self.tiles, *self.chunks, *states)

    def boundaries(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return kda.kda_boundary(self.v, *self.tiles, *self.chunks, entries, wanted)

    def boundary_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return kda.kda_boundary_bwd(do, *self.tiles, *self.chunks, entries, wanted)


class TritonGDN(TritonRule):
    _backward = staticmethod(gdn.gdn_backward)

    def _numbers(self, options: DeltaRuleOptions) -> tuple[float | int | bool | None, ...]:
        self.scale = options.scale
        return options.scale, options.l2norm, options.beta_range

    def _prepare(self, keys: tuple[Tensor | None, ...], kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if kept:
            return *kept, *gdn.gdn_recompute(*keys, *self.chunks, *self.numbers)
        return gdn.gdn_prepare(*keys, *self.chunks, *self.numbers)

    def _kept_tiles(self) -> tuple[Tensor, ...]:
        C, *_ = self.tiles
        return (C,)

    def _scan(self, states: tuple[Tensor | int | None, ...]) -> tuple[Tensor, Tensor]:
        return gdn.gdn_scan(self.q, self.k, self.v, *self.tiles, *self.chunks, *states, self.scale)

    def boundaries(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return gdn.gdn_boundary(self.k, self.v, *self.tiles, *self.chunks, entries, wanted)

    def boundary_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        return gdn.gdn_boundary_bwd(self.q, self.k, do, *self.tiles, *self.chunks, entries, wanted, self.scale)
