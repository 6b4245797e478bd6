"""The driver of the chunked delta rule: it runs the stages of one implementation, with KCP between two of them.

    forward    prepare → boundary → [exchange, fold] → scan, output
    backward   prepare again → boundary_backward → [exchange, fold, reversed] → backward

An implementation is a class with the methods of `DeltaRule`. Without context parallelism the two middle steps are
left out, and the initial state is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from titan_linear.ops.exchange.kcp import incoming_states
from titan_linear.ops.exchange.ulysses import heads_to_tokens, tokens_to_heads
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime.kept import kept
from titan_linear.ops.runtime.operators import check_first_derivative
from titan_linear.ops.runtime.options import (
    DeltaRuleOptions,
    Inputs,
    States,
    boundaries_of,
    check_boundaries,
    check_cp,
    check_floats,
    state_dtype,
    swapped,
)
from titan_linear.ops.runtime.support import Choice, Op, one_dtype
from titan_linear.ops.torch.delta_rule import TorchDeltaRule, normalise, step
from titan_linear.ops.triton.configs import delta_rule_needs, with_kernels


def _triton() -> Any:
    from titan_linear.ops.triton.delta_rule import triton_delta_rule  # Triton is available on Linux only

    return triton_delta_rule


def delta_rule_op(name: str, family: str) -> Op:
    """family: of the kernels' configurations (ops/triton/configs.py)."""
    return Op(name, with_kernels(_triton, lambda: TorchDeltaRule, *delta_rule_needs(family)))


class DeltaRule(Protocol):
    """The stages of one call, in the order in which the driver runs them."""

    def __init__(
        self,
        inputs: Inputs,
        options: DeltaRuleOptions,
        boundaries: Boundaries,
        differentiable: bool,
        kept: Sequence[torch.Tensor] = (),
    ):
        """Prepare the chunks. `differentiable`: `backward` will be called on this object. `kept`: for an object made in
        backward, the `kept` of forward's object."""

    kept: Sequence[torch.Tensor]  # what forward's object hands to the one made in backward

    def boundary(self, chains: Chains) -> tuple[torch.Tensor, torch.Tensor]:
        """S_ext [slots,HV,K,V] and M [slots,HV,K,K] of each slot's entry, where `chains.wanted` asks for them: the
        entry's end state is M S + S_ext if S enters it. K and V of these, and of what is computed from them, may be
        padded with zeros."""

    def forward(self, initial: States | None, need_final: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """o [T,HV,V] and the final states [N,HV,K,V] (empty unless needed), from the initial ones (None: zeros)."""

    def boundary_backward(self, do: torch.Tensor, chains: Chains) -> torch.Tensor:
        """dS_ext [slots,HV,K,V]: the gradient of the state that enters each slot's entry if its end state had none."""

    def backward(
        self, do: torch.Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[Inputs, torch.Tensor]:
        """Gradients of the inputs (None for those not given), and of the initial states [N,HV,K,V] (empty unless
        needed)."""


@dataclass(eq=False)  # not frozen, as `Boundaries`
class Call:
    """One call of the driver, without the tensors that have gradients."""

    implementation: type[DeltaRule]
    options: DeltaRuleOptions
    boundaries: Boundaries
    cp: CPContext | None  # None unless it has several ranks
    need_final: bool


class Saved(NamedTuple):
    """What forward keeps for backward."""

    inputs: Inputs
    states: torch.Tensor | None  # the caller's [N,HV,K,V], or with several ranks those that enter slots [slots,HV,K,V]
    M: torch.Tensor | None  # [slots,HV,K,K]
    kept: tuple[torch.Tensor, ...]  # what the rule keeps

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (*self.inputs, self.states, self.M, *self.kept)

    @staticmethod
    def of(tensors: Sequence[torch.Tensor | None]) -> Saved:
        n = len(Inputs._fields)
        return Saved(Inputs(*tensors[:n]), tensors[n], tensors[n + 1], tuple(tensors[n + 2 :]))


class _DeltaRule(torch.autograd.Function):
    """(q, k, v, g, beta, A_log, dt_bias [T, ...] or None, initial_state [N,HV,K,V] or None) -> (o, final states)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, initial_state: torch.Tensor | None, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = Inputs(*tensors)
        keep = call.options.disable_recompute and any(ctx.needs_input_grad)
        o, final, entering, M, of_rule, rule = _forward(call, inputs, initial_state, keep)
        ctx.call, ctx.rule = call, rule
        states = initial_state if call.cp is None else entering
        ctx.save_for_backward(*Saved(inputs, states, M, of_rule).tensors())
        ctx.set_materialize_grads(False)
        # Views: torch 2.11's compiler drops the gradient of an output that is itself an intermediate of this function.
        return o.view_as(o), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, d_final: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_first_derivative()
        call, (inputs, states, M, kept) = ctx.call, Saved.of(ctx.saved_tensors)
        rule = ctx.rule or call.implementation(inputs, call.options, call.boundaries, differentiable=True, kept=kept)
        ctx.rule = None  # what it holds serves one backward only
        do = torch.zeros_like(inputs.v) if do is None else do
        if call.cp is not None:
            dS_ext = rule.boundary_backward(do, call.cp.reverse_chains)
            d_leaving = incoming_states(dS_ext, M, call.cp.reverse_chains, call.cp.group_name, reverse=True)
            final = States(d_leaving, call.cp.leaves_slot)
        else:
            wanted = call.need_final and d_final is not None  # compiled code gives empty states an empty gradient
            final = States(d_final.to(state_dtype(inputs))) if wanted else None
        _, need_d_initial, *_ = ctx.needs_input_grad
        grads, d_initial = rule.backward(do, _initial(states, call, inputs), final, need_d_initial)
        return None, d_initial.to(states.dtype) if need_d_initial else None, *grads


_apply_torch = torch.compiler.disable(_DeltaRule.apply)  # it works on the host
Forward = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple[torch.Tensor, ...], DeltaRule | None
]


@kept
def _forward(call: Call, inputs: Inputs, initial_state: torch.Tensor | None, keep: bool) -> Forward:
    """o, final states, the states that enter from other ranks, M, what the rule keeps, and the rule if `keep`."""
    rule = call.implementation(inputs, call.options, call.boundaries, differentiable=keep)
    states, entering, M = initial_state, None, None
    if call.cp is not None:
        S_ext, M = rule.boundary(call.cp.forward_chains)
        states = entering = incoming_states(S_ext, M, call.cp.forward_chains, call.cp.group_name)
    o, final = rule.forward(_initial(states, call, inputs), call.need_final)
    return o.to(inputs.v.dtype), final, entering, M, tuple(rule.kept), rule if keep else None


def _initial(states: torch.Tensor | None, call: Call, inputs: Inputs) -> States | None:
    """The states from which entries start, in the dtype of states (`state_dtype`)."""
    if states is None:
        return None
    return States(states.to(state_dtype(inputs)), None if call.cp is None else call.cp.enters_slot)


def chunk_delta_rule(
    op: Op,
    given: Inputs,
    *,
    options: DeltaRuleOptions,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    cp_context: CPContext | None,
    cp_method: str,
    impl: str | Choice,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `chunk_kda` and `chunk_gated_delta_rule` share, once they have filled in `options`: checks, and the call.

    given: the caller's inputs, [B, T, ...].
    """
    _check(given, options)
    q, v = given.q, given.v
    if cp_method not in ("kcp", "ulysses"):
        raise ValueError(f"cp_method = {cp_method!r} is unknown; use 'kcp' or 'ulysses'")
    if cp_context is not None:
        check_cp("q", q, initial_state, output_final_state, cu_seqlens, cp_context)
    N = check_boundaries(*q.shape[:2], cu_seqlens, cu_seqlens_cpu)
    check_floats(initial_state=initial_state)
    _check_state(initial_state, N, v.shape[2], q.shape[3], v.shape[3], state_v_first)
    initial_state = swapped(initial_state, state_v_first)
    tokens, gates = given[:5], [None if x is None else x.flatten().contiguous() for x in given[5:]]
    several = cp_context is not None and cp_context.world_size > 1
    if several and cp_method == "ulysses":
        return _over_heads(op, Inputs(*tokens, *gates), options, cp_context, impl), None
    inputs = Inputs(*(x.flatten(0, 1) for x in tokens), *gates)
    rule = _implementation(op, inputs, impl)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, initial_state))
    if q.shape[1] == 1 and cu_seqlens is None and cp_context is None and not wants_grad:
        o, final = _decode(inputs, options, initial_state)
    else:
        boundaries = boundaries_of(q, cu_seqlens, cp_context, cu_seqlens_cpu)
        call = Call(rule, options, boundaries, cp_context if several else None, output_final_state)
        o, final = _apply(call, initial_state, *inputs)
    return o.unflatten(0, q.shape[:2]), swapped(final, state_v_first) if output_final_state else None


def _apply(call: Call, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return (_apply_torch if call.implementation is TorchDeltaRule else _DeltaRule.apply)(call, *tensors)


def _implementation(op: Op, inputs: Inputs, impl: str | Choice) -> type[DeltaRule]:
    q, k, v = inputs[:3]
    return op.load(op.implementation(impl, q.device, one_dtype(q, k, v), K=q.shape[-1], V=v.shape[-1]))


def _over_heads(op: Op, given: Inputs, options: DeltaRuleOptions, cp: CPContext, impl: str | Choice) -> torch.Tensor:
    """o by an all-to-all over heads: the rule takes all tokens of this rank's heads, and these heads' part of A_log and
    dt_bias, so that no recurrence crosses ranks."""
    tokens = [tokens_to_heads(x, cp) for x in given[:5]]
    gates = [None if x is None else x.view(cp.world_size, -1)[cp.rank] for x in given[5:]]
    inputs = Inputs(*(x.flatten(0, 1) for x in tokens), *gates)
    o, _ = _apply(Call(_implementation(op, inputs, impl), options, cp.stream, None, False), None, *inputs)
    return heads_to_tokens(o.unsqueeze(0), cp)


def _decode(
    inputs: Inputs, options: DeltaRuleOptions, initial_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every sequence: a step of the recurrence itself, since a chunk would be padding but for one row."""
    dtype, (N, HV, V), K = state_dtype(inputs), inputs.v.shape, inputs.q.shape[2]
    S = inputs.q.new_zeros(N, HV, K, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    with torch.autocast(inputs.q.device.type, enabled=False):
        q, *others = normalise(inputs, options)
        o, S = step(q * options.scale, *others, S)
    return o.to(inputs.v.dtype), S


def _check(given: Inputs, options: DeltaRuleOptions) -> None:
    """Raise ValueError for shapes and switches that do not fit; the message says what would."""
    q, k, v, g, beta, A_log, dt_bias = given
    if q.dim() != 4 or k.shape != q.shape or 0 in q.shape:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, H, K], none of them 0")
    B, T, H, K = q.shape
    if v.dim() != 4 or 0 in v.shape or v.shape[:2] != (B, T) or v.shape[2] % H:
        raise ValueError(f"v {tuple(v.shape)} must be [B, T, HV, V] = [{B}, {T}, a multiple of H = {H}, V]")
    HV = v.shape[2]
    for name, x, shape in (("g", g, (B, T, HV) if g.dim() == 3 else (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if x.shape != shape:
            raise ValueError(f"{name} {tuple(x.shape)} must be {shape} for B, T, HV, K = {B}, {T}, {HV}, {K}")
    check_floats(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
    if options.gate_in_kernel != (A_log is not None):
        raise ValueError("use_gate_in_kernel = True and A_log [HV] go together; give both or neither")
    if A_log is not None and A_log.numel() != HV:
        raise ValueError(f"A_log {tuple(A_log.shape)} must be [HV] = [{HV}]")
    if dt_bias is not None and not options.gate_in_kernel:
        raise ValueError("dt_bias comes with use_gate_in_kernel = True; give both or neither")


def _check_state(states: torch.Tensor | None, N: int, HV: int, K: int, V: int, v_first: bool) -> None:
    dims, shape = ("V, K", (N, HV, V, K)) if v_first else ("K, V", (N, HV, K, V))
    if states is not None and states.shape != shape:
        raise ValueError(f"initial_state {tuple(states.shape)} must be [N, HV, {dims}] = {list(shape)}")
