"""Operators, and what activation checkpointing keeps of them.

A region, in training one layer, runs twice: in forward, and again in backward to recompute what its own backward needs.
Inside a region a kept function runs once; the second time it returns what it returned the first time. All else is
recomputed. What `activation_checkpoint.mode` = "selective" keeps (operators say so where they are defined, `kept_by`):

    recurrences             o, and what its backward saves in any case: chunk matrices, or states of segments;
                            under context parallelism the states that came from other ranks, and M
    the convolution         its output (Triton's), and the halo from other ranks
    softmax attention       o and the log-sum-exp
    all-to-all over heads   what was received
    tensor parallelism      this rank's tokens of sums over ranks; gathered tokens are gathered again
    experts                 which are chosen, their hidden rows before the activation, and the sums of what they give;
                            means over streams, which ranks sum, and how many rows are sent; the rows are sent again

So none of these kernels and exchanges runs a second time. Compiled code calls operators only: of recurrences
it then keeps what its operators return, except chunks that are prepared again (`Spec.prepares`). What it keeps are
copies, since compiled code may overwrite memory that it no longer needs.

"attention" keeps the results of softmax attention: its work grows with the square of a document's length, its results
do not. "full" keeps none of this. Both keep how many rows are sent to experts, a few integers: the host, which waits
for the device to read them, then waits in forward only.

torch's own selective checkpointing watches every operator of a region through a dispatch mode in Python, which costs
the host as much time as the operators do; and it keeps all outputs of an operator or none.

Kept functions run below autograd: inside an `autograd.Function`, under no_grad, or as an operator's implementation.
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

# of activation checkpointing, the one that keeps most first
MODES = ("selective", "attention", "full")
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
        if (
            torch.compiler.is_compiling()
            or (here := _current.get()) is None
            or here.region.mode not in modes
        ):
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


# --- Operators, registered with PyTorch's dispatcher ------------------------------------------------------------------
#
# Calls that nothing observes bypass it. `torch.library.custom_op` wraps each call in layers of Python: 30 µs with
# torch 2.11 where the dispatcher takes 10. A forward and backward pass calls a dozen operators, and with small shapes
# the kernels wait for the host.

LIBRARY = torch.library.Library("titan_linear", "FRAGMENT")


@dataclass(frozen=True)
class Spec:
    """What activation checkpointing and the planner need to know of an operator."""

    kept_by: tuple[str, ...] = ()  # modes of checkpointing that keep its results
    # outputs, and arguments by name → it; None: the bytes of both
    cost: Callable[..., Cost] | None = None
    # The recurrences' driver calls it. Unless compiled, checkpointing keeps what the driver's call gives as a whole.
    of_driver: bool = False
    # "forward": gives what backward computes again, by the same operator or by one of its own, "backward". The compiler
    # would find that both calls are the same, and keep all that the first one gave.
    prepares: Literal["forward", "backward"] | None = None
    # its arguments by name → bytes that it allocates and frees again
    temporary: Callable[..., int] | None = None


SPECS: dict[str, Spec] = {}  # by the operator's name


def operator(
    fn: Callable[..., Any] | None = None,
    *,
    fake: Callable[..., Any],
    name: str | None = None,
    mutates: Sequence[str] = (),
    **spec: Any,
) -> Callable[..., Any]:
    """Register `fn` as torch.ops.titan_linear.<name>, by default its own, and return a function that calls it, whose
    `.overload` is the operator. The schema comes from fn's annotations; `fn` mutates only the arguments named in
    `mutates`, and its first argument is a tensor, or a list that holds one, given by position. fake: what makes the
    outputs without computing them, from the same arguments; spec: fields of `Spec`.

    The operator runs on any device and has no gradient of its own: `register_autograd` gives it one, and
    `autograd.Function`s may call it.
    """
    if fn is None:
        return partial(operator, fake=fake, mutates=mutates, **spec)
    name = name or fn.__name__
    schema = torch.library.infer_schema(fn, mutates_args=mutates)
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    SPECS[name] = Spec(**spec)
    modes = SPECS[name].kept_by
    implementation = kept(fn, modes=modes) if modes else fn
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.titan_linear, name).default
    torch.library.register_fake(overload, fake, lib=LIBRARY)
    overload.python = fn  # for callers that look inside: dispatch modes see an operator as one call

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
    """Whether a call must go through the dispatcher: for the compiler, autograd, a dispatch mode or the profiler, or
    because x is a tensor without numbers."""
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or x.is_meta
        or _get_current_dispatch_mode() is not None
        or torch.autograd._profiler_enabled()
    )


def check_first_derivative() -> None:
    """Raise RuntimeError under create_graph. Backward passes that autograd does not see into call this: it would treat
    their results as constants."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "titan_linear's ops have no second derivatives; leave out create_graph = True"
        )


def register_autograd(
    op: Any, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    """As `torch.library.register_autograd`."""
    torch.library.register_autograd(op.overload, backward, setup_context=setup_context, lib=LIBRARY)
