"""What activation checkpointing keeps besides a layer's input: results of the ops that are costly to recompute.

A region, in training one layer, runs twice: in forward, and again in backward to recompute what its own backward needs.
Inside a region a kept function runs once; the second time it returns what it returned the first time. All else is
recomputed. What `activation_checkpoint.mode` = "selective" keeps (operators say so where they are defined, `kept_by`):

    the delta rule          o, and what its backward saves in any case: chunk matrices, or states of segments;
                            under context parallelism the states that came from other ranks, and M
    the convolution         its output (Triton's), and the halo from other ranks
    softmax attention       o and the log-sum-exp
    all-to-all over heads   what was received
    tensor parallelism      this rank's tokens of sums over ranks; gathered tokens are gathered again
    experts                 means over streams, which ranks sum, and how many rows are sent; the rows are sent again

So none of these kernels and exchanges runs a second time. Compiled code calls operators only: of the delta rule
it then keeps what its operators return, except the prepared chunks, which are prepared again. What it keeps are copies,
since compiled code may overwrite memory that it no longer needs.

"attention" keeps the results of softmax attention: its work grows with the square of a document's length, its results
do not. "full" keeps none of this. Both keep how many rows are sent to experts, a few integers: the host, which waits
for the device to read them, then waits in forward only.

torch's own selective checkpointing watches every operator of a region through a dispatch mode in Python, which costs
the host as much time as the operators do; and it keeps all outputs of an operator or none.

Kept functions run below autograd: inside an `autograd.Function`, under no_grad, or as an operator's implementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

MODES = ("selective", "attention", "full")  # of activation checkpointing, the one that keeps most first
_current: ContextVar[Run | None] = ContextVar("run of a region", default=None)
P = ParamSpec("P")
R = TypeVar("R")


class Region:
    """Results kept from a region's first run for its second, in the order of the calls."""

    def __init__(self, copied: bool, mode: str):
        self.copied, self.mode = copied, mode
        self.results: deque[tuple[Callable, list[Any], TreeSpec, list[int]]] = deque()

    def put(self, fn: Callable, result: Any) -> None:
        leaves, spec = tree_flatten(result)
        # Keep another tensor: autograd makes the result itself part of its graph.
        keep = torch.clone if self.copied else Tensor.detach
        leaves = [keep(x) if isinstance(x, Tensor) else x for x in leaves]
        self.results.append((fn, leaves, spec, _versions(leaves)))

    def take(self, fn: Callable) -> Any:
        if not self.results:
            raise RuntimeError("backward through a checkpointed layer runs once; what it kept is gone")
        kept_fn, leaves, spec, versions = self.results.popleft()
        assert kept_fn is fn, f"{fn.__name__} is called where {kept_fn.__name__} was"
        assert _versions(leaves) == versions, f"what {fn.__name__} gave was changed in place"
        return tree_unflatten(leaves, spec)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that are kept."""
        tensors = (x for _, leaves, *_ in self.results for x in leaves if isinstance(x, Tensor))
        return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def _versions(leaves: list[Any]) -> list[int]:
    return [x._version for x in leaves if isinstance(x, Tensor)]


class Run:
    """One of a region's two runs, as a context."""

    def __init__(self, region: Region, again: bool):
        self.region, self.again = region, again

    def __enter__(self) -> Run:
        self.token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self.token)


def contexts(copied: bool = False, mode: str = "selective") -> tuple[Run, Run]:
    """A region's forward and its recomputation: `context_fn` of `torch.utils.checkpoint.checkpoint`.

    copied: keep copies, for compiled code. mode: one of MODES.
    """
    region = Region(copied, mode)
    return Run(region, again=False), Run(region, again=True)


def kept(fn: Callable[P, R], *, modes: tuple[str, ...] = ("selective",)) -> Callable[P, R]:
    """`fn` with its result kept inside a region of one of these modes; elsewhere `fn` as it is. Kept functions that
    `fn` calls run as part of it: their own results are not kept."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or (here := _current.get()) is None or here.region.mode not in modes:
            return fn(*args, **kwargs)
        if here.again:
            return here.region.take(fn)
        token = _current.set(None)
        try:
            result = fn(*args, **kwargs)
        finally:
            _current.reset(token)
        here.region.put(fn, result)
        return result

    return run
