"""Driver of chunked recurrences.

It runs the stages of one implementation, with KCP between two of them:

    forward    prepare → boundary → [exchange, fold] → scan, output
    backward   prepare again → boundary_backward → [exchange, fold, reversed] → backward

An implementation is a class with the methods of `Rule`. Without context parallelism the two
middle steps are left out, and the caller provides the initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_linear.ops.exchange.kcp import incoming_states
from titan_linear.ops.exchange.tree_kcp import fold_tree
from titan_linear.ops.exchange.ulysses import heads_to_tokens, tokens_to_heads
from titan_linear.ops.layout.boundaries import Boundaries
from titan_linear.ops.layout.build_context import tree_context
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.runtime.operators import check_first_derivative, kept
from titan_linear.ops.runtime.options import (
    AnyInputs,
    AnyOptions,
    Result,
    Sequences,
    States,
    boundaries_of,
    check_boundaries,
    check_cp,
    check_floats,
    state_dtype,
    swapped,
)
from titan_linear.ops.runtime.support import Check, Choice, Implementation, Op, one_dtype
from titan_linear.ops.torch.chunked import TorchRule
from titan_linear.ops.triton.configs import with_kernels


class Rule(Protocol):
    """Stages of one call, in the order in which the driver runs them."""

    def __init__(
        self,
        inputs: AnyInputs,
        options: AnyOptions,
        boundaries: Boundaries,
        differentiable: bool,
        kept: Sequence[Tensor] = (),
    ):
        """Prepare the chunks.

        Args:
            differentiable: whether `backward` will be called on this object.
            kept: for an object created in backward: `kept` of the object that ran forward.
        """

    # Tensors that forward's object passes to the one created in backward.
    kept: Sequence[Tensor]

    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        """Return S_ext [slots,HV,K,V] and M of each slot's entry.

        They are needed only where `chains.wanted` requests them. The entry's end state is M
        S + S_ext if S enters it. M is [slots,HV,K,K], or [slots,HV,K or 1] if it is
        diagonal. K and V of these tensors, and of the states computed from them, may be
        padded with zeros.
        """

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        """Return o [T,HV,V] and the final states [N,HV,K,V] (empty unless needed).

        Entries start from the initial states (None: zeros).
        """

    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        """Return dS_ext [slots,HV,K,V].

        This is the gradient of the state that enters each slot's entry if its end state had
        no gradient.
        """

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[AnyInputs, Tensor]:
        """Return gradients of the inputs and of the initial states.

        Inputs that were not given have None. The states' gradients are [N,HV,K,V], or empty
        unless needed.
        """


@dataclass(frozen=True, eq=False)
class Recurrence(Op):
    """An op that this driver runs."""

    # Names of the inputs [HV·…] that are the same for all tokens; the others are
    # [T, heads, ...].
    of_heads: tuple[str, ...]
    # Computes one token: (inputs of one token of each of N sequences, options, S
    # [N,HV,K,V]) -> o [N,HV,V] and the next states.
    step: Callable[[Any, Any, Tensor], tuple[Tensor, Tensor]]
    # Names of the op's arguments where they differ from the names of the inputs here.
    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, argument: str) -> str:
        return self.names.get(argument, argument)


def _triton_rule() -> Any:
    # Triton is available on Linux only.
    from titan_linear.ops.triton.rules import triton_rule

    return triton_rule


def rules(torch_rule: type[Rule], *needs: Check) -> dict[str, Implementation]:
    """Return the implementations of a recurrence; `needs` are the kernels' requirements."""
    return with_kernels(_triton_rule, lambda: torch_rule, *needs)


@dataclass(eq=False)  # not frozen, for the reason given at `Boundaries`
class RecurrenceCall:
    """Everything that one call of the driver needs except tensors with gradients."""

    inputs: type[AnyInputs]
    implementation: type[Rule]
    options: AnyOptions
    boundaries: Boundaries
    cp: CPContext | None  # None unless it has several ranks
    need_final: bool

    @property
    def group(self) -> str:
        """Name of the process group, or "" for a single rank."""
        return "" if self.cp is None else self.cp.ranks.group_name

    @property
    def starts(self) -> Tensor | None:
        """Row of each entry among the states that enter from other entries or ranks.

        None means that the caller provides the states.
        """
        if self.boundaries.tree is not None:
            return self.boundaries.tree.starts
        return None if self.cp is None else self.cp.tables.forward_chains.entry_slots


class Saved(NamedTuple):
    """Tensors that forward keeps for backward."""

    inputs: AnyInputs
    # The caller's states [N,HV,K,V], or with several ranks the states that enter each slot
    # [slots,HV,K,V].
    states: Tensor | None
    M: Tensor | None  # [slots,HV,K,K], or [slots,HV,K or 1]
    kept: tuple[Tensor, ...]  # `kept` of the rule

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.inputs, self.states, self.M, *self.kept)

    @staticmethod
    def of(kind: type[AnyInputs], tensors: Sequence[Tensor | None]) -> Saved:
        n = len(kind._fields)
        return Saved(kind(*tensors[:n]), tensors[n], tensors[n + 1], tuple(tensors[n + 2 :]))


class _Recurrence(torch.autograd.Function):
    """Function of (initial_state [N,HV,K,V] or None, fields of `call.inputs`).

    It returns (o, final states).
    """

    @staticmethod
    def forward(
        ctx: Any, call: RecurrenceCall, initial_state: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs = call.inputs(*tensors)
        keep = call.options.disable_recompute and any(ctx.needs_input_grad)
        ran = _forward(call, inputs, initial_state, keep)
        ctx.call = call
        ctx.rule = ran.rule
        states = initial_state if call.starts is None else ran.entering
        ctx.save_for_backward(*Saved(inputs, states, ran.M, ran.kept).tensors())
        ctx.set_materialize_grads(False)
        # Return views: torch 2.11's compiler drops the gradient of an output that is itself
        # an intermediate of this function.
        return ran.o.view_as(ran.o), ran.final.view_as(ran.final)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        call = ctx.call
        inputs, states, M, kept = Saved.of(call.inputs, ctx.saved_tensors)
        # Prepare the chunks again, unless forward kept its rule.
        rule = ctx.rule or call.implementation(
            inputs, call.options, call.boundaries, differentiable=True, kept=kept
        )
        ctx.rule = None  # its tensors serve a single backward
        do = torch.zeros_like(inputs.v) if do is None else do
        # Find the gradients of the states that leave entries: from child entries, from
        # other ranks, or from the caller.
        if tree := call.boundaries.tree:
            dS_ext = rule.boundary_backward(do, tree.children)
            final = States(fold_tree(dS_ext, M, list(tree.fold), call.group, True), tree.ends)
        elif call.cp is not None:
            chains = call.cp.tables.reverse_chains
            dS_ext = rule.boundary_backward(do, chains)
            d_leaving = incoming_states(dS_ext, M, chains, call.group, reverse=True)
            final = States(d_leaving, chains.entry_slots)
        else:
            # Compiled code passes an empty gradient for empty final states, so ask
            # `need_final`.
            wanted = call.need_final and d_final is not None
            final = States(d_final.to(state_dtype(inputs))) if wanted else None
        _, need_d_initial, *_ = ctx.needs_input_grad
        grads, d_initial = rule.backward(do, _initial(states, call, inputs), final, need_d_initial)
        return None, d_initial.to(states.dtype) if need_d_initial else None, *grads


_apply_on_host = torch.compiler.disable(_Recurrence.apply)


def _function(rule: type[Rule]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that applies `_Recurrence`.

    The compiler skips rules that work on the host.
    """
    on_host = isinstance(rule, type) and issubclass(rule, TorchRule)
    return _apply_on_host if on_host else _Recurrence.apply


class Ran(NamedTuple):
    """Results of forward, and what backward needs of it."""

    o: Tensor
    final: Tensor
    entering: Tensor | None  # states that enter from parent entries or from other ranks
    M: Tensor | None
    kept: tuple[Tensor, ...]  # `kept` of the rule
    rule: Rule | None  # unless backward prepares again


@kept
def _forward(
    call: RecurrenceCall, inputs: AnyInputs, initial_state: Tensor | None, keep: bool
) -> Ran:
    """Run forward up to the final states. `keep` returns the rule too."""
    rule = call.implementation(inputs, call.options, call.boundaries, differentiable=keep)
    states = initial_state
    entering = None
    M = None
    # States enter from parent entries, from other ranks, or from the caller.
    if tree := call.boundaries.tree:
        S_ext, M = rule.boundary(tree.points)
        states = entering = fold_tree(S_ext, M, list(tree.fold), call.group, False)
    elif call.cp is not None:
        chains = call.cp.tables.forward_chains
        S_ext, M = rule.boundary(chains)
        states = entering = incoming_states(S_ext, M, chains, call.group)
    o, final = rule.forward(_initial(states, call, inputs), call.need_final)
    return Ran(o.to(inputs.v.dtype), final, entering, M, tuple(rule.kept), rule if keep else None)


def _initial(states: Tensor | None, call: RecurrenceCall, inputs: AnyInputs) -> States | None:
    """Return the states from which entries start, in the dtype of `state_dtype`."""
    if states is None:
        return None
    return States(states.to(state_dtype(inputs)), call.starts)


def run(
    recurrence: Recurrence,
    arguments: AnyInputs,
    options: AnyOptions,
    sequences: Sequences,
    impl: str | Choice,
) -> Result:
    """Run a recurrence: the part that the public functions share.

    The public functions check the shapes of their inputs and fill in `options` before they
    call this.

    Args:
        arguments: the caller's inputs, [B, T, ...].
    """
    # Check the arguments that all recurrences have.
    check_floats(**{recurrence.named(name): x for name, x in arguments._asdict().items()})
    q = arguments.q
    v = arguments.v
    cu_seqlens, cp_context = tree_context(
        sequences.parents, sequences.cu_seqlens, sequences.cp_context, q.device
    )
    if sequences.cp_method not in ("kcp", "ulysses"):
        raise ValueError(f"cp_method = {sequences.cp_method!r} is unknown; use 'kcp' or 'ulysses'")
    initial_state = sequences.initial_state
    output_final_state = sequences.output_final_state
    if cp_context is not None:
        check_cp(
            recurrence.named("q"), q, initial_state, output_final_state, cu_seqlens, cp_context
        )
    B, T, _, K = q.shape
    N = check_boundaries(B, T, cu_seqlens, sequences.cu_seqlens_cpu)
    name = recurrence.named("initial_state")
    check_floats(**{name: initial_state})
    _check_state(name, initial_state, N, v.shape[2], K, v.shape[3], sequences.state_v_first)
    initial_state = swapped(initial_state, sequences.state_v_first)
    # Ulysses: exchange tokens for heads, and run the whole stream.
    several = cp_context is not None and cp_context.ranks.world_size > 1
    if several and sequences.cp_method == "ulysses":
        return _over_heads(recurrence, arguments, options, cp_context, impl), None
    # Fold the batch into the tokens, and choose the implementation.
    inputs = _each(
        arguments, recurrence, lambda x: x.flatten(0, 1), lambda x: x.flatten().contiguous()
    )
    rule = _implementation(recurrence, inputs, impl)
    wants_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*inputs, initial_state)
    )
    # One token per sequence is one step of the recurrence; all else runs in chunks.
    if q.shape[1] == 1 and cu_seqlens is None and cp_context is None and not wants_grad:
        o, final = _decode(recurrence, inputs, options, initial_state)
    else:
        boundaries = boundaries_of(q, cu_seqlens, cp_context, sequences.cu_seqlens_cpu)
        cp = cp_context if several else None
        call = RecurrenceCall(type(inputs), rule, options, boundaries, cp, output_final_state)
        o, final = _function(rule)(call, initial_state, *inputs)
    o = o.unflatten(0, q.shape[:2])
    return o, swapped(final, sequences.state_v_first) if output_final_state else None


def _each(
    inputs: AnyInputs,
    recurrence: Recurrence,
    of_tokens: Callable[[Tensor], Tensor],
    of_heads: Callable[[Tensor], Tensor],
) -> AnyInputs:
    """Apply one function to inputs per token and another to inputs per head.

    None stays None.
    """
    changed = {
        name: (of_heads if name in recurrence.of_heads else of_tokens)(x)
        for name, x in inputs._asdict().items()
        if x is not None
    }
    return inputs._replace(**changed)


def _implementation(recurrence: Recurrence, inputs: AnyInputs, impl: str | Choice) -> type[Rule]:
    q, k, v = inputs[:3]
    dims = {"K": q.shape[-1], "V": v.shape[-1]}
    return recurrence.load(recurrence.implementation(impl, q.device, one_dtype(q, k, v), **dims))


def _over_heads(
    recurrence: Recurrence,
    arguments: AnyInputs,
    options: AnyOptions,
    cp: CPContext,
    impl: str | Choice,
) -> Tensor:
    """Compute o by an all-to-all over heads.

    The rule processes all tokens of this rank's heads, with these heads' part of the inputs
    that are the same for all tokens, so that no state crosses ranks.
    """
    inputs = _each(
        arguments,
        recurrence,
        lambda x: tokens_to_heads(x, cp).flatten(0, 1),
        lambda x: x.reshape(cp.ranks.world_size, -1)[cp.ranks.rank],
    )
    rule = _implementation(recurrence, inputs, impl)
    call = RecurrenceCall(type(inputs), rule, options, cp.stream, cp=None, need_final=False)
    o, _ = _function(rule)(call, None, *inputs)
    return heads_to_tokens(o.unsqueeze(0), cp)


def _decode(
    recurrence: Recurrence, inputs: AnyInputs, options: AnyOptions, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Process one token of every sequence by a single step of the recurrence.

    A chunk would be padding except for one row.
    """
    dtype = state_dtype(inputs)
    N, HV, V = inputs.v.shape
    K = inputs.q.shape[2]
    S = (
        inputs.q.new_zeros(N, HV, K, V, dtype=dtype)
        if initial_state is None
        else initial_state.to(dtype)
    )
    with torch.autocast(inputs.q.device.type, enabled=False):
        o, S = recurrence.step(inputs, options, S)
    return o.to(inputs.v.dtype), S


def check_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """Return (B, T, HV, K, V).

    Raises ValueError unless q, k are [B, T, H, K] and v is [B, T, HV, V], HV a multiple of
    H.
    """
    if q.dim() != 4 or k.shape != q.shape or 0 in q.shape:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, H, K], none of them 0"
        )
    B, T, H, K = q.shape
    if v.dim() != 4 or 0 in v.shape or v.shape[:2] != (B, T) or v.shape[2] % H:
        raise ValueError(
            f"v {tuple(v.shape)} must be [B, T, HV, V] = [{B}, {T}, a multiple of H = {H}, V]"
        )
    return B, T, v.shape[2], K, v.shape[3]


def _check_state(
    name: str,
    states: Tensor | None,
    N: int,
    HV: int,
    K: int,
    V: int,
    v_first: bool,
) -> None:
    dims, shape = ("V, K", (N, HV, V, K)) if v_first else ("K, V", (N, HV, K, V))
    if states is not None and states.shape != shape:
        raise ValueError(f"{name} {tuple(states.shape)} must be [N, HV, {dims}] = {list(shape)}")
