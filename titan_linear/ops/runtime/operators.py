"""Operators, and which of their results activation checkpointing keeps.

A region, in training one layer, runs twice: in forward, and again in backward to recompute
what its own backward needs. Inside a region a kept function runs once; the second time it
returns the result of the first. Everything else is recomputed. `activation_checkpoint.mode`
= "selective" keeps (operators declare it where they are defined, by `kept_by`):

    recurrences             o, and what backward saves in any case: chunk matrices, or
                            states of segments; under context parallelism also the states
                            received from other ranks, and M
    the convolution         its output (Triton's), and the halo from other ranks
    softmax attention       o and the log-sum-exp
    all-to-all over heads   the received tensor
    tensor parallelism      this rank's tokens of sums over ranks; gathered tokens are
                            gathered again
    experts                 the experts chosen, their hidden rows before the activation,
                            and the sums of their outputs; means over streams, which ranks
                            sum, and how many rows are sent; the rows are sent again

So none of these kernels and exchanges runs a second time. Compiled code calls operators
only. For recurrences it keeps the results of the operators, except chunks that are prepared
again (`Spec.prepares`). It keeps copies, since compiled code may overwrite memory that it
no longer needs.

"attention" keeps the results of softmax attention, whose work grows with the square of a
document's length while its results do not. "full" keeps none of the above. Both keep how
many rows are sent to experts, a few integers: the host waits for the device to read them,
and then waits in forward only.

torch's own selective checkpointing watches every operator of a region through a dispatch
mode in Python, which costs the host as much time as the operators do; and it keeps all
outputs of an operator or none.

Kept functions run below autograd: inside an `autograd.Function`, under no_grad, or as an
operator's implementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from titan_linear.ops.runtime.costs import Cost

# Modes of activation checkpointing; the first keeps the most.
MODES = "selective", "attention", "full"
_current: ContextVar[RegionPass | None] = ContextVar("run of a region", default=None)
P = ParamSpec("P")
R = TypeVar("R")


class Region:
    """Results kept from a region's first run for its second, in the order of the calls."""

    def __init__(self, copied: bool, mode: str):
        self.copied = copied
        self.mode = mode
        self.results: deque[tuple[Callable, list[Any], TreeSpec, list[int]]] = deque()

    def put(self, fn: Callable, result: Any) -> None:
        leaves, spec = tree_flatten(result)
        # Keep a different tensor object: autograd makes the result itself part of its
        # graph.
        keep = torch.clone if self.copied else Tensor.detach
        leaves = [keep(x) if isinstance(x, Tensor) else x for x in leaves]
        self.results.append((fn, leaves, spec, _versions(leaves)))

    def take(self, fn: Callable) -> Any:
        if not self.results:
            raise RuntimeError(
                "backward through a checkpointed layer runs once; what it kept is gone"
            )
        kept_fn, leaves, spec, versions = self.results.popleft()
        assert kept_fn is fn, f"{fn.__name__} is called where {kept_fn.__name__} was"
        assert _versions(leaves) == versions, f"what {fn.__name__} gave was changed in place"
        return tree_unflatten(leaves, spec)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that are kept."""
        tensors = (x for _, leaves, *_ in self.results for x in leaves if isinstance(x, Tensor))
        return sum(
            {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values()
        )


def _versions(leaves: list[Any]) -> list[int]:
    return [x._version for x in leaves if isinstance(x, Tensor)]


@dataclass(eq=False)
class RegionPass:
    """One of a region's two runs, as a context manager."""

    region: Region
    again: bool

    def __enter__(self) -> RegionPass:
        self.token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self.token)


def contexts(copied: bool = False, mode: str = "selective") -> tuple[RegionPass, RegionPass]:
    """Return a region's forward and its recomputation.

    This is the `context_fn` of `torch.utils.checkpoint.checkpoint`.

    Args:
        copied: keep copies, for compiled code.
        mode: one of MODES.
    """
    region = Region(copied, mode)
    return RegionPass(region, again=False), RegionPass(region, again=True)


def kept(fn: Callable[P, R], *, modes: tuple[str, ...] = ("selective",)) -> Callable[P, R]:
    """Wrap `fn` so that regions of these modes keep its result; elsewhere nothing changes.

    Kept functions that `fn` calls run as part of it: their own results are not kept.
    """

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if (
            torch.compiler.is_compiling()
            or (here := _current.get()) is None
            or here.region.mode not in modes
        ):
            return fn(*args, **kwargs)
        # The second run takes the first run's result; the first run computes and keeps it.
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


# --- Operators, registered with PyTorch's dispatcher --------------------------------------
#
# Calls that nothing observes bypass the dispatcher. `torch.library.custom_op` wraps each
# call in layers of Python: 30 µs with torch 2.11, where the dispatcher takes 10 µs. A
# forward and backward pass calls a dozen operators, and with small shapes the kernels wait
# for the host.

LIBRARY = torch.library.Library("titan_linear", "FRAGMENT")


@dataclass(frozen=True)
class Spec:
    """Properties of an operator that activation checkpointing and the planner read."""

    kept_by: tuple[str, ...] = ()  # modes of checkpointing that keep its results
    # Returns its cost from the outputs and, by name, the arguments; None: the bytes of
    # both.
    cost: Callable[..., Cost] | None = None
    # Whether the recurrences' driver calls it. Outside compiled code, checkpointing keeps
    # the driver's result as a whole instead.
    of_driver: bool = False
    # "forward": its outputs are computed again in backward, by the same operator or by a
    # separate one, which is marked "backward". Otherwise the compiler would see that both
    # calls are the same, and keep all outputs of the first.
    prepares: Literal["forward", "backward"] | None = None
    # Returns the bytes that it allocates and frees again, from its arguments by name.
    temporary: Callable[..., int] | None = None


SPECS: dict[str, Spec] = {}  # operator's name -> its properties


def operator(
    fn: Callable[..., Any] | None = None,
    *,
    fake: Callable[..., Any],
    name: str | None = None,
    mutates: Sequence[str] = (),
    **spec: Any,
) -> Callable[..., Any]:
    """Register `fn` as torch.ops.titan_linear.<name>, and return a function that calls it.

    The function's `.overload` is the operator. The operator runs on any device and has no
    gradient of its own: `register_autograd` adds one, and `autograd.Function`s may call it.

    Args:
        fn: the implementation. Its annotations define the schema. Its first argument is a
            tensor, or a list that holds one, given by position.
        fake: takes the same arguments and returns the outputs without computing them.
        name: name of the operator; default: the name of `fn`.
        mutates: names of the arguments that `fn` mutates.
        spec: fields of `Spec`.
    """
    if fn is None:
        return partial(operator, fake=fake, mutates=mutates, **spec)
    name = name or fn.__name__
    # Register the operator, its implementation, and its fake.
    schema = torch.library.infer_schema(fn, mutates_args=mutates)
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    SPECS[name] = Spec(**spec)
    modes = SPECS[name].kept_by
    implementation = kept(fn, modes=modes) if modes else fn
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.titan_linear, name).default
    torch.library.register_fake(overload, fake, lib=LIBRARY)
    # For callers that look inside: dispatch modes see an operator as one call.
    overload.python = fn

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if type(first) is list:
            first = next(x for x in first if x is not None)
        return (overload if _watched(first) else implementation)(*args, **kwargs)

    registered: Any = call
    registered.overload = overload
    return registered


def _watched(x: Tensor) -> bool:
    """Whether a call must go through the dispatcher.

    This is so for the compiler, autograd, a dispatch mode or the profiler, or if x is a
    tensor without data.
    """
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or x.is_meta
        or _get_current_dispatch_mode() is not None
        or torch.autograd._profiler_enabled()
    )


def check_first_derivative() -> None:
    """Raise RuntimeError under create_graph.

    Backward passes that autograd cannot trace call this: autograd would treat their results
    as constants.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "titan_linear's ops have no second derivatives; leave out create_graph = True"
        )


def register_autograd(
    op: Any, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    """Register a gradient as `torch.library.register_autograd` does."""
    torch.library.register_autograd(op.overload, backward, setup_context=setup_context, lib=LIBRARY)
