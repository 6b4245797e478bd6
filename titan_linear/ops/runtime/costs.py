"""What a call of an operator computes and sends, in terms that know no machine: `Spec.cost` gives one of these from the
call's outputs and, by name, its arguments. The planner multiplies them by rates; a call without one costs its bytes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

Outputs = tuple[Tensor, ...]


class Ring(NamedTuple):
    """Keys and values that pass through ranks which lie `stride` ranks of the group apart."""

    nbytes: int  # of this rank's, and in backward of their gradients in float32
    stride: int


class Gathered(NamedTuple):
    """Keys and values that come from other ranks slice by slice."""

    nbytes: int  # as of a ring
    share: float  # of what comes, in parts of this rank's own
    slices: int


class Attention(NamedTuple):
    """Of the pairs that the mask leaves."""

    heads: int
    D: int
    Dv: int
    backward: bool
    keys: Ring | Gathered | None = None  # None: all are here


class Recurrence(NamedTuple):
    """Of one operator over all chunks. Its rate has the operator's name."""

    tokens: int
    heads: int
    K: int
    V: int
    any_gate: bool = False  # gates are unbounded, which takes longer


class Segments(NamedTuple):
    """Documents are cut into this many segments, which are scanned side by side."""

    number: int


class Convolution(NamedTuple):
    elements: int


class Product(NamedTuple):
    """[m, k] @ [k, n] from float8."""

    m: int
    n: int
    k: int


class Grouped(NamedTuple):
    """[m, k] @ [k, n] in bfloat16, each group of rows with a matrix of its own."""

    m: int
    n: int
    k: int
    inside: int = 0  # bytes of a pass over rows that lie only inside the call


class Exchange(NamedTuple):
    kind: Literal["gather", "scatter", "sum", "heads", "halo"]
    nbytes: int = 0  # of a rank's input; a halo is small
    ranks: int = 0  # that share heads out: all, or a node's


class Incoming(NamedTuple):
    """States that enter a rank's fragments, by KCP."""

    tables: list[Tensor]  # `Chains`
    S_ext: Tensor
    M: Tensor


Cost = Attention | Recurrence | Segments | Convolution | Product | Grouped | Exchange | Incoming


def attention(
    outputs: Outputs, q: Tensor, v: Tensor, do: Tensor | None = None, **_: Any
) -> Attention:
    return Attention(q.shape[2], q.shape[3], v.shape[3], do is not None)


def travelling(k: Tensor, v: Tensor, do: Tensor | None = None, **_: Any) -> int:
    """Bytes of keys and values and, in backward, of their float32 gradients."""
    return (k.numel() + v.numel()) * (k.element_size() + (0 if do is None else 4))


def recurrence(outputs: Outputs, inputs: list[Tensor | None], **_: Any) -> Recurrence:
    """Of an operator whose `inputs` begin with q, k and v."""
    _, k, v, *_ = inputs
    return Recurrence(v.shape[0], v.shape[1], k.shape[2], v.shape[2])


def exchange(kind: str) -> Any:
    """The cost of an exchange of `x`."""
    return lambda outputs, x, world_size=0, **_: Exchange(kind, x.nbytes, world_size)
