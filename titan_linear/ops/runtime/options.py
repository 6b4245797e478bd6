"""Arguments of an op's call: tensors and switches of a recurrence, states, and boundaries."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.boundaries import CHUNK, Boundaries
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.layout.documents import check_copy, check_shape, checked


class Inputs(NamedTuple):
    """Inputs of a delta rule, or their gradients.

    B is folded into T except in the first checks.
    """

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV, K] (KDA) or [T, HV] (GDN)
    beta: Tensor  # [T, HV]
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV·K] or [HV]


class DecayInputs(NamedTuple):
    """Inputs of a recurrence whose state only decays, or their gradients."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    # [T, HV]: log decays; or with A, time steps Δ: the log decay is Δ A, and v is
    # multiplied by Δ.
    g: Tensor
    A: Tensor | None = None  # [HV]
    D: Tensor | None = None  # [HV·V] or [HV]: D · v is added to o
    dt_bias: Tensor | None = None  # [HV]


class DPLRInputs(NamedTuple):
    """Inputs of a recurrence with a diagonal plus rank-one transition, or their gradients."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    a: Tensor  # [T, H, K], reads aᵀS from the state
    b: Tensor  # [T, H, K], where the result of this read is written
    gk: Tensor  # [T, H, K], log decays, or logits with `DPLROptions.rate`


AnyInputs = Inputs | DecayInputs | DPLRInputs
Fields = list[Tensor | None]  # a named tuple's fields in the form that operators take


Result = tuple[Tensor, Tensor | None]  # o, and the final states if requested


class States(NamedTuple):
    """States of entries, or gradients of states."""

    values: Tensor  # [S, HV, K, V], or the convolution's [S, D, W−1]
    # [≥ N] int32: the row of each entry, −1: zeros; None: row n belongs to entry n
    index: Tensor | None = None

    def of_entries(self, N: int) -> Tensor:
        """Return the state of each entry, [N, ...]."""
        if self.index is None:
            return self.values
        index = self.index[:N].long()
        none = (index < 0).view(-1, *[1] * (self.values.dim() - 1))
        return self.values[index.clamp(min=0)].masked_fill(none, 0.0)


class Sequences(NamedTuple):
    """Sequences of a recurrence's call.

    They are a batch's rows, packed documents, or this rank's part of them.
    """

    initial_state: Tensor | None  # [N, HV, K, V], one per sequence or document; None: zeros
    output_final_state: bool
    # [N + 1] int, boundaries of documents (B = 1), from 0 to T; not checked if on a GPU.
    cu_seqlens: Tensor | None
    # The same on the CPU, for implementations that loop over documents on the host.
    cu_seqlens_cpu: Tensor | None
    # Context parallelism: tensors are this rank's tokens; excludes cu_seqlens and states.
    cp_context: CPContext | None
    # "kcp" (states cross the ranks), or "ulysses" (an all-to-all over heads; the number of
    # ranks must divide the heads).
    cp_method: str
    # [N] int, prefix trees (layout/prefix_trees.py): the document that each document continues, or
    # −1; excludes states, as cp_context does.
    parents: Tensor | None
    state_v_first: bool = False  # states are [N, HV, V, K]


def state_dtype(inputs: AnyInputs) -> torch.dtype:
    """Return the dtype of states: float32, or float64 for float64 inputs."""
    return torch.promote_types(inputs.q.dtype, torch.float32)


@dataclass(frozen=True)
class DeltaRuleOptions:
    scale: float
    gate_in_kernel: bool = False  # g is raw: apply A_log and dt_bias
    # The gate is lower_bound·sigmoid(…); None: −exp(A_log)·softplus(…).
    lower_bound: float | None = None
    safe_gate: bool = False  # the caller promises g ≥ −5 per token
    # beta is raw, and β = beta_range·sigmoid(beta); None: beta is β.
    beta_range: float | None = None
    disable_recompute: bool = False  # keep the intermediates of forward for backward


@dataclass(frozen=True)
class DPLROptions:
    scale: float
    # gk holds logits, and the log decays are rate·sigmoid(gk); None: gk holds log decays.
    rate: float | None = None
    disable_recompute: bool = False


@dataclass(frozen=True)
class DecayOptions:
    scale: float
    dt_softplus: bool = False  # Δ = softplus(g + dt_bias)
    dt_limit: tuple[float, float] = (0.0, math.inf)  # Δ is clamped to this range
    disable_recompute: bool = False


class ConvolutionOptions(NamedTuple):
    silu: bool
    need_final: bool
    widths: list[int]  # widths of the parts of y
    norm_dim: int | None  # channels of a head of q and k, which are scaled to length 1


AnyOptions = DeltaRuleOptions | DPLROptions | DecayOptions


def scale_of(scale: float | None, q: Tensor) -> float:
    """Return the scale, K^−½ by default."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def beta_range(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> float | None:
    """Return `DeltaRuleOptions.beta_range`."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval = True comes with use_beta_sigmoid_in_kernel = True; without it give beta in (0, 2)"
        )
    return None if not use_beta_sigmoid_in_kernel else 2.0 if allow_neg_eigval else 1.0


def check_floats(**tensors: Tensor | None) -> None:
    """Raise ValueError for arguments whose dtype is not a float dtype."""
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; give a float dtype")


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size != CHUNK:
        raise ValueError(f"chunk_size = {chunk_size}: chunks have {CHUNK} tokens; leave it out")


def swapped(states: Tensor | None, v_first: bool) -> Tensor | None:
    """Transpose states if `v_first`: [N, HV, V, K] to [N, HV, K, V] or back."""
    return states.transpose(-1, -2).contiguous() if v_first and states is not None else states


def boundaries_of(
    x: Tensor, cu_seqlens: Tensor | None, cp: CPContext | None, cu_seqlens_cpu: Tensor | None = None
) -> Boundaries:
    """Return the boundaries of the entries in x [B, T, ...].

    Entries are this rank's entries (context parallelism), packed documents, or batch rows.
    """
    if cp is not None:
        return cp.stream if cp.ranks.world_size == 1 else cp.tables.boundaries
    if cu_seqlens is None:
        B, T = x.shape[:2]
        on_host, there = (
            torch.arange(B + 1, dtype=torch.int32, device=d) * T for d in ("cpu", x.device)
        )
        return Boundaries(there, on_host)
    on_host = cu_seqlens if cu_seqlens.device.type == "cpu" else cu_seqlens_cpu
    return Boundaries(cu_seqlens.to(x.device, torch.int32, non_blocking=True).contiguous(), on_host)


def check_boundaries(
    B: int, T: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> int:
    """Return N, the number of sequences or packed documents.

    There are B sequences in a batch, or N documents packed into T tokens. Raises ValueError
    for boundaries that do not fit. Values are checked only if they are on the CPU, so as
    not to wait for a device; compiled code has no values.
    """
    if cu_seqlens_cpu is not None:
        check_copy(cu_seqlens, cu_seqlens_cpu)
    if cu_seqlens is None:
        return B
    if B != 1:
        raise ValueError(f"cu_seqlens describes one packed stream: B must be 1, not {B}")
    check_shape("cu_seqlens", cu_seqlens)
    if not torch.compiler.is_compiling():
        for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
            if x is not None and x.device.type == "cpu":
                checked(name, x, T)
    return len(cu_seqlens) - 1


def refuse(remedy: str, **given: object) -> None:
    """Raise ValueError for arguments of FLA's functions that are not supported here.

    None and False are accepted.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} = {what} is not supported here; {remedy}")


def check_cp(
    name: str,
    x: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    cp: CPContext,
) -> None:
    """Raise ValueError for arguments that recurrent ops do not support with a cp_context.

    x [B, T, ...] is the op's argument `name`.
    """
    if cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens must not be passed with cp_context, which holds this rank's own"
        )
    if initial_state is not None or output_final_state:
        raise ValueError(
            "initial_state and output_final_state are not available with cp_context; leave them out"
        )
    if x.shape[:2] != (1, cp.cut.tokens):
        raise ValueError(
            f"{name} has [B, T] = {list(x.shape[:2])}; cp_context gives this rank [1, {cp.cut.tokens}]"
        )
    check_usable(cp, name, x)


def check_usable(cp: CPContext, name: str, x: Tensor) -> None:
    """Raise ValueError for a context that cannot be used with x, the argument `name`.

    Its tables are on another device than x, or it has several ranks but no group.
    """
    if cp.cu_seqlens.device != x.device:
        raise ValueError(
            f"{name} is on {x.device} and cp_context on {cp.cu_seqlens.device}; build it with device = {x.device}"
        )
    if cp.group is None and cp.ranks.world_size > 1:
        raise ValueError(
            f"cp_context has {cp.ranks.world_size} ranks and no group to communicate with; build it with a group"
        )
