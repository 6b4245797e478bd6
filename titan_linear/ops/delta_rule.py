"""The driver of the chunked delta rule: stages of one implementation, with KCP between two of them.

    forward    prepare → boundary → [exchange, fold] → scan, output
    backward   prepare again → boundary_backward → [exchange, fold, reversed] → backward

An implementation is a class with the methods of `DeltaRule`. Without a CPContext the two middle steps
fall away and the state comes from the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.kcp import contributes, incoming_states
from titan_linear.ops.cp.ulysses import heads_to_tokens, tokens_to_heads
from titan_linear.ops.options import DeltaRuleOptions, Entries, check_cp, entries_of, select
from titan_linear.ops.torch.delta_rule import TorchDeltaRule, normalise, step


def _triton() -> Any:
    from titan_linear.ops.triton.delta_rule import triton_delta_rule  # Triton is there on Linux only

    return triton_delta_rule


IMPLEMENTATIONS = {"torch": lambda: TorchDeltaRule, "triton": _triton}

Tensors = Sequence[torch.Tensor | None]


class DeltaRule(Protocol):
    """One call's stages, in the order in which the driver asks for them. Tokens come as [T, ...], B folded into T."""

    def __init__(
        self, inputs: Tensors, options: DeltaRuleOptions, entries: Entries, differentiable: bool, kept: Tensors = ()
    ):
        """Prepare q, k, v, g, beta, A_log, dt_bias. `differentiable`: `backward` will be called on this object; in a
        backward pass `kept` is what forward's object kept."""

    kept: Tensors  # what backward's object is given again

    def boundary(
        self, entries: Sequence[int], need_m: Sequence[bool]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(S_ext [HV,K,V], M [HV,K,K] or None) of each listed entry: its end state is M S + S_ext if S enters."""

    def forward(self, initial_state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """o [T,HV,V] and the final states [N,HV,K,V], from the initial ones (None: zeros)."""

    def boundary_backward(self, do: torch.Tensor, entries: Sequence[int]) -> list[torch.Tensor]:
        """dS_ext [HV,K,V] of each listed entry: its incoming state's gradient if its outgoing state had none."""

    def backward(
        self, do: torch.Tensor, initial_state: torch.Tensor | None, d_final: torch.Tensor | None
    ) -> tuple[Tensors, torch.Tensor]:
        """Gradients of the seven inputs (None for those not given), and of the initial states [N,HV,K,V]."""


class _DeltaRule(torch.autograd.Function):
    """(q, k, v, g, beta, A_log, dt_bias [T, ...] or None, initial_state [N,HV,K,V] or None) -> (o, final states)."""

    @staticmethod
    def forward(
        ctx: Any,
        implementation: type[DeltaRule],
        options: DeltaRuleOptions,
        entries: Entries,
        cp: CPContext | None,
        initial_state: torch.Tensor | None,
        *inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keep = options.disable_recompute and any(ctx.needs_input_grad)
        rule = implementation(inputs, options, entries, differentiable=keep)
        like, transitions = _state_like(inputs), {}
        if cp is None:
            state = None if initial_state is None else initial_state.to(like.dtype)
        else:
            initial_state, transitions = _kcp_forward(rule, cp, like)
            state = _spread(initial_state, cp, like, end=0)
        o, final = rule.forward(state)
        ctx.call, ctx.rule, ctx.slots = (
            (implementation, options, entries, cp),
            rule if keep else None,
            tuple(transitions),
        )
        ctx.save_for_backward(initial_state, *inputs, *transitions.values(), *rule.kept)
        ctx.set_materialize_grads(False)
        # Views: torch 2.11's compiler drops the gradient of an output that is itself an intermediate of this function.
        return o.to(inputs[2].dtype).view_as(o), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, d_final: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        implementation, options, entries, cp = ctx.call
        initial_state, *saved = ctx.saved_tensors
        inputs, transitions, kept = saved[:7], dict(zip(ctx.slots, saved[7:])), saved[7 + len(ctx.slots) :]
        rule = ctx.rule or implementation(inputs, options, entries, differentiable=True, kept=kept)
        like, state = _state_like(inputs), initial_state
        do = torch.zeros_like(inputs[2]) if do is None else do
        if cp is not None:
            state = _spread(initial_state, cp, like, end=0)
            d_final = _spread(_kcp_backward(rule, cp, do, transitions, like), cp, like, end=1)
        state, d_final = (None if x is None else x.to(like.dtype) for x in (state, d_final))
        grads, d_initial = rule.backward(do, state, d_final)
        return None, None, None, None, d_initial.to(initial_state.dtype) if ctx.needs_input_grad[4] else None, *grads


def _state_like(inputs: Tensors) -> torch.Tensor:
    """An unallocated state [HV, K, V] of the dtype that states have: float32, or float64 for float64 inputs."""
    q, v = inputs[0], inputs[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty((), dtype=dtype, device=q.device).expand(v.shape[1], q.shape[-1], v.shape[-1])


def _spread(states: torch.Tensor, cp: CPContext, like: torch.Tensor, end: int) -> torch.Tensor:
    """States of all entries [N,HV,K,V] from one per fragment: that of its first entry, or (end=1) of its last."""
    out = like.new_zeros(len(cp.cu_seqlens_cpu) - 1, *like.shape)
    for entry, state in zip(cp.entries, states, strict=True):
        out[entry[end]] = state
    return out


def _kcp_forward(rule: Any, cp: CPContext, like: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The state that enters each local fragment [slots,HV,K,V], and M by slot where a document passes through."""
    slots = [s for s in range(len(cp.local)) if contributes(cp, s)]
    need_m = [cp.local[s].through for s in slots]
    pairs = rule.boundary([cp.entries[s][1] for s in slots], need_m)
    states = {s: S_ext for s, (S_ext, _) in zip(slots, pairs, strict=True)}
    transitions = {s: M for s, (_, M) in zip(slots, pairs, strict=True) if M is not None}
    return incoming_states(cp, states, transitions, like), transitions


def _kcp_backward(
    rule: Any, cp: CPContext, do: torch.Tensor, transitions: dict[int, torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """The gradient of the state that leaves each local fragment, [slots,HV,K,V]."""
    slots = [s for s in range(len(cp.local)) if contributes(cp, s, reverse=True)]
    states = rule.boundary_backward(do, [cp.entries[s][0] for s in slots])
    return incoming_states(cp, dict(zip(slots, states, strict=True)), transitions, like, reverse=True)


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    options: DeltaRuleOptions,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    cp_context: CPContext | None,
    cp_method: str,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `chunk_kda` and `chunk_gated_delta_rule` share, once they have filled in `options`: checks, and the call."""
    _check(q, k, v, g, beta, A_log, options, initial_state, cu_seqlens)
    if cp_method not in ("kcp", "ulysses"):
        raise ValueError(f"cp_method = {cp_method!r} is unknown; use 'kcp' or 'ulysses'")
    if cp_context is not None:
        check_cp("q", q, initial_state, output_final_state, cu_seqlens, cp_context)
    if cp_context is not None and cp_method == "ulysses":
        inputs = _to_heads(cp_context, q, k, v, g, beta, A_log, dt_bias)
        o, _ = chunk_delta_rule(
            *inputs, options=options, initial_state=None, output_final_state=False, cp_context=None,
            cp_method=cp_method, cu_seqlens=torch.tensor(cp_context.documents), impl=impl,
        )  # fmt: skip
        return heads_to_tokens(o, cp_context), None
    implementation = IMPLEMENTATIONS[select(impl, q.device)]()
    tokens = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    if q.shape[1] == 1 and cu_seqlens is None and cp_context is None and not torch.is_grad_enabled():
        o, final = _decode([*tokens, A_log, dt_bias], options, initial_state)
        return o.to(v.dtype).unsqueeze(1), final if output_final_state else None
    entries = entries_of(q, cu_seqlens, cp_context)
    o, final = _DeltaRule.apply(
        implementation, options, entries, cp_context, initial_state, *tokens, A_log, dt_bias
    )  # fmt: skip
    return o.unflatten(0, q.shape[:2]), final if output_final_state else None


def _decode(
    inputs: Sequence[torch.Tensor | None], options: DeltaRuleOptions, initial_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every sequence: a step of the recurrence itself, where a chunk would be padding but for one row."""
    like = _state_like(inputs)
    S = like.new_zeros(len(inputs[0]), *like.shape) if initial_state is None else initial_state.to(like.dtype)
    q, *others = normalise(*inputs, options)
    return step(q * options.scale, *others, S)


def _to_heads(cp: CPContext, *inputs: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All tokens of this rank's heads, and these heads' part of A_log and dt_bias: no recurrence crosses a rank."""
    *tokens, A_log, dt_bias = inputs
    part = [None if x is None else x.view(cp.world_size, -1)[cp.rank] for x in (A_log, dt_bias)]
    return [*(tokens_to_heads(x, cp) for x in tokens), *part]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    options: DeltaRuleOptions,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Shapes and switches that do not fit are a ValueError that says what would."""
    if q.dim() != 4 or k.shape != q.shape:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, H, K]")
    B, T, H, K = q.shape
    if v.dim() != 4 or v.shape[:2] != (B, T) or v.shape[2] % H:
        raise ValueError(f"v {tuple(v.shape)} must be [B, T, HV, V] = [{B}, {T}, a multiple of H = {H}, V]")
    HV, V = v.shape[2:]
    if g.shape not in ((B, T, HV), (B, T, HV, K)) or beta.shape != (B, T, HV):
        raise ValueError(f"g {tuple(g.shape)} and beta {tuple(beta.shape)} must be those of B, T, HV = {B}, {T}, {HV}")
    if options.gate_in_kernel != (A_log is not None):
        raise ValueError("use_gate_in_kernel = True and A_log [HV] go together: give both or neither")
    if A_log is not None and A_log.numel() != HV:
        raise ValueError(f"A_log {tuple(A_log.shape)} must be [HV] = [{HV}]")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens describes one packed stream: B must be 1, not {B}")
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None and initial_state.shape != (N, HV, K, V):
        raise ValueError(f"initial_state {tuple(initial_state.shape)} must be [N, HV, K, V] = [{N}, {HV}, {K}, {V}]")
