"""Costs of operator calls, in terms that do not depend on the machine.

`Spec.cost` returns one of these from the call's outputs and, by name, its arguments. The
planner multiplies them by rates. A call without a cost counts its bytes.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

Outputs = tuple[Tensor, ...]


class Ring(NamedTuple):
    """Keys and values that pass through ranks `stride` ranks of the group apart."""

    # Bytes of this rank's keys and values and, in backward, of their float32 gradients.
    nbytes: int
    stride: int


class Gathered(NamedTuple):
    """Keys and values that come from other ranks, slice by slice."""

    nbytes: int  # as in `Ring`
    share: float  # amount that arrives, relative to this rank's own keys and values
    slices: int


class AttentionCost(NamedTuple):
    """Softmax attention over the query-key pairs that the mask leaves."""

    heads: int
    D: int
    Dv: int
    backward: bool
    keys: Ring | Gathered | None = None  # how keys travel; None: all keys are on this rank


class RecurrenceCost(NamedTuple):
    """One operator over all chunks of a recurrence. Its rate has the operator's name."""

    tokens: int
    heads: int
    K: int
    V: int
    any_gate: bool = False  # whether gates are unbounded, which takes longer


class SegmentsCost(NamedTuple):
    """Number of segments of a document, which are scanned in parallel."""

    number: int


class ConvolutionCost(NamedTuple):
    elements: int


class ProductCost(NamedTuple):
    """A product [m, k] @ [k, n] in float8."""

    m: int
    n: int
    k: int


class GroupedCost(NamedTuple):
    """A product [m, k] @ [k, n] in bfloat16, with one matrix per group of rows."""

    m: int
    n: int
    k: int
    inside: int = 0  # bytes of a pass over rows that exist only inside the call


class ExchangeCost(NamedTuple):
    kind: Literal["gather", "scatter", "sum", "heads", "halo"]
    nbytes: int = 0  # bytes of a rank's input; 0 for a halo, which is small
    ranks: int = 0  # ranks that exchange heads: all ranks, or a node's


class Incoming(NamedTuple):
    """States that enter a rank's fragments, exchanged by KCP."""

    tables: list[Tensor]  # `Chains`
    S_ext: Tensor
    M: Tensor


Cost = (
    AttentionCost
    | RecurrenceCost
    | SegmentsCost
    | ConvolutionCost
    | ProductCost
    | GroupedCost
    | ExchangeCost
    | Incoming
)


def attention(
    outputs: Outputs, q: Tensor, v: Tensor, do: Tensor | None = None, **_: Any
) -> AttentionCost:
    return AttentionCost(q.shape[2], q.shape[3], v.shape[3], do is not None)


def travelling(k: Tensor, v: Tensor, do: Tensor | None = None, **_: Any) -> int:
    """Return the bytes of keys and values and, in backward, of their float32 gradients."""
    return (k.numel() + v.numel()) * (k.element_size() + (0 if do is None else 4))


def recurrence(outputs: Outputs, inputs: list[Tensor | None], **_: Any) -> RecurrenceCost:
    """Return the cost of an operator whose `inputs` begin with q, k and v."""
    _, k, v, *_ = inputs
    return RecurrenceCost(v.shape[0], v.shape[1], k.shape[2], v.shape[2])


def exchange(kind: str) -> Any:
    """Return a function that computes the cost of an exchange of `x`."""
    return lambda outputs, x, world_size=0, **_: ExchangeCost(kind, x.nbytes, world_size)
