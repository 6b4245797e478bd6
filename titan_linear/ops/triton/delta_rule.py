"""KDA and GDN in Triton behind the driver's interface (`ops/delta_rule.py`, `DeltaRule`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from titan_linear.ops.options import DeltaRuleOptions, Entries
from titan_linear.ops.triton import gdn, kda
from titan_linear.ops.triton.segments import Segmented, segment_length

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_delta_rule(
    inputs: Sequence[torch.Tensor | None],
    options: DeltaRuleOptions,
    entries: Entries,
    differentiable: bool,
    kept: Sequence[torch.Tensor] = (),
) -> _TritonRule | Segmented:
    """The kernels for these inputs: KDA's for a gate per channel, GDN's for a gate per head; long documents in segments
    where that fills the GPU.

    Raises:
        ValueError: a dtype or head dim that the kernels do not have.
    """
    q, k, v = inputs[:3]
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
    rule = TritonKDA if inputs[3].dim() == 3 else TritonGDN
    length = None if entries.fixed else segment_length(len(q), len(entries), *v.shape[1:])
    if length is None:
        return rule(inputs, options, entries, kept)
    return Segmented(rule, inputs, options, entries, kept, length)


class _TritonRule(ABC):
    """What the two share. Boundaries are computed for the listed entries alone, M for those that need it."""

    def boundary(
        self, entries: Sequence[int], need_m: Sequence[bool]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for with_m in set(need_m):
            listed = [e for e, need in zip(entries, need_m, strict=True) if need == with_m]
            S_ext, M = self.boundary_of(self._list(listed), with_m)
            found |= {e: (S_ext[i], M[i] if with_m else None) for i, e in enumerate(listed)}
        return [found[e] for e in entries]

    def boundary_backward(self, do: torch.Tensor, entries: Sequence[int]) -> list[torch.Tensor]:
        return list(self.boundary_backward_of(do, self._list(entries))) if entries else []

    def _list(self, entries: Sequence[int]) -> torch.Tensor:
        return torch.tensor(entries, dtype=torch.int32).to(self.cu_seqlens.device, non_blocking=True)

    @abstractmethod
    def boundary_of(self, entries: torch.Tensor, need_m: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """entries [F] int32 -> S_ext [F, HV, K, V], and if need_m M [F, HV, K, K]."""

    @abstractmethod
    def boundary_backward_of(self, do: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """entries [F] int32 -> dS_ext [F, HV, K, V]."""


class TritonKDA(_TritonRule):
    def __init__(
        self,
        inputs: Sequence[torch.Tensor | None],
        options: DeltaRuleOptions,
        entries: Entries,
        kept: Sequence[torch.Tensor],
    ):
        *tokens, A_log, dt_bias = inputs
        self.q, self.k, self.v, self.g, self.beta = (x.contiguous().unsqueeze(0) for x in tokens)  # [1, T, ...]
        if options.gate_in_kernel and dt_bias is None:
            dt_bias = A_log.new_zeros(self.g.shape[2] * self.g.shape[3])
        gate = "none" if not options.gate_in_kernel else "softplus" if options.lower_bound is None else "bounded"
        self.has_bias, self.gated = inputs[6] is not None, options.gate_in_kernel
        self.options = {
            "scale": options.scale, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": options.lower_bound,
            "gate": gate, "safe_gate": options.safe_gate, "l2norm": options.l2norm,
        }  # fmt: skip
        self.cu_seqlens = entries.on(self.q.device)
        keys = self.q, self.k, self.g, self.beta
        if kept:
            self.prepared = kda.recompute(*keys, *kept, self.cu_seqlens, **self.options)
        else:
            self.prepared = kda.prepare(*keys, self.cu_seqlens, **self.options)
        self.kept = (self.prepared.Aqk, self.prepared.Gn)

    def forward(self, initial_state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        o, final = kda.scan(self.prepared, self.v, self.cu_seqlens, initial_state)
        return o[0], final

    def backward(
        self, do: torch.Tensor, initial_state: torch.Tensor | None, d_final: torch.Tensor | None
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        *grads, d_initial, dA_log, ddt_bias = kda.backward(
            self.prepared, self.q, self.k, self.v, self.g, self.beta, do.contiguous().unsqueeze(0), self.cu_seqlens,
            initial_state, d_final, **self.options,
        )  # fmt: skip
        A_log, dt_bias = self.options["A_log"], self.options["dt_bias"]
        gates = [dA_log.to(A_log.dtype) if self.gated else None, ddt_bias.to(dt_bias.dtype) if self.has_bias else None]
        return [*(x[0] for x in grads), *gates], d_initial

    def boundary_of(self, entries: torch.Tensor, need_m: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return kda.boundary(self.prepared, self.v, self.cu_seqlens, entries, need_m)

    def boundary_backward_of(self, do: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        return kda.boundary_bwd(self.prepared, do.contiguous().unsqueeze(0), self.cu_seqlens, entries)


class TritonGDN(_TritonRule):
    def __init__(
        self,
        inputs: Sequence[torch.Tensor | None],
        options: DeltaRuleOptions,
        entries: Entries,
        kept: Sequence[torch.Tensor],
    ):
        self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias = inputs
        self.scale, self.cu_seqlens = options.scale, entries.on(self.q.device)
        keys = self.q, self.k, self.g, self.beta, self.A_log, self.dt_bias
        if kept:
            self.table, offsets, C = kept
            A, self.gates, self.norms = gdn.gdn_recompute(
                *keys, self.table, self.cu_seqlens, self.scale, options.l2norm
            )
        else:
            self.table, offsets, C, self.gates, self.norms, A = gdn.gdn_prepare(
                *keys, self.cu_seqlens, self.scale, options.l2norm
            )
        self.kept = (self.table, offsets, C)
        self.chunks = (offsets, C, self.gates, self.norms)
        self.products = (offsets, C, A, self.gates, self.norms)

    def forward(self, initial_state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return gdn.gdn_scan(self.q, self.k, self.v, *self.products, initial_state, self.cu_seqlens, self.scale, True)

    def backward(
        self, do: torch.Tensor, initial_state: torch.Tensor | None, d_final: torch.Tensor | None
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        q, k, do = self.q, self.k, do.contiguous()
        h, y = gdn.gdn_states(k, self.v, *self.chunks, initial_state, self.cu_seqlens)
        dh, dv, d_initial = gdn.gdn_reverse(q, k, do, *self.products, d_final, self.cu_seqlens, self.scale)
        dq, dk, dg, dbeta, dA_log, ddt_bias = gdn.gdn_gradients(
            q, k, do, h, y, dh, dv, self.table, self.gates, self.norms, self.g, self.beta, self.A_log, self.dt_bias,
            initial_state, d_final, self.cu_seqlens, self.scale,
        )  # fmt: skip
        gates = [dA_log if self.A_log is not None else None, ddt_bias if self.dt_bias is not None else None]
        return [dq, dk, dv, dg, dbeta, *gates], d_initial

    def boundary_of(self, entries: torch.Tensor, need_m: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return gdn.gdn_boundary(self.k, self.v, *self.chunks, entries, self.cu_seqlens, need_m)

    def boundary_backward_of(self, do: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        do = do.contiguous()
        return gdn.gdn_boundary_bwd(self.q, self.k, do, *self.products, entries, self.cu_seqlens, self.scale)
