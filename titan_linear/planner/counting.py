"""Count the work and the memory of a layer by running it on the meta device.

The meta device allocates nothing. A layer runs forward and backward as on a GPU: with the
operators of the kernels (their fake implementations), on one rank's tokens, with that
rank's parts of the parameters. Every call is recorded, with its inputs and outputs:

    products     matrix products, by their sizes
    calls        of our operators: attention, recurrence, convolution, exchanges between ranks
    elementwise  everything else

Compiled code fuses the elementwise operations between two products or operators: it reads
only the outputs of these, and writes only their inputs. Elementwise results that backward
needs are recomputed from the outputs of products and operators, so only these outputs are
kept (`distributed/compiling.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_linear.models.decoder import Block
from titan_linear.models.plan import BatchPlan
from titan_linear.ops.runtime.costs import Cost
from titan_linear.ops.runtime.operators import SPECS, Spec, contexts

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.bmm, aten.addmm)
Size = tuple[int, int, int]


@dataclass(frozen=True)
class OperatorCall:
    """A call of one of our operators: its arguments by name, and its outputs.

    Tensors are on the meta device.
    """

    name: str
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def spec(self) -> Spec:
        return SPECS[self.name]

    @cached_property
    def cost(self) -> Cost | None:
        return self.spec.cost and self.spec.cost(self.outputs, **self.arguments)

    @property
    def temporary(self) -> int:
        """Return the bytes that the call allocates and frees again.

        They are counted only for operators that need many.
        """
        return 0 if self.spec.temporary is None else self.spec.temporary(**self.arguments)


@dataclass
class PassCounts:
    """The work of one pass through a layer, forward or backward."""

    # [m, k] @ [k, n] as (m, n, k) → number of such products.
    products: Counter[Size] = field(default_factory=Counter)
    # The ones among them that are in float32 or wider.
    wide_products: Counter[Size] = field(default_factory=Counter)
    # Calls that compute these products; a batched product is one call.
    multiplications: int = 0
    calls: list[OperatorCall] = field(default_factory=list)
    # Bytes read and written where operations run one by one, and where they are compiled.
    elementwise: int = 0
    fused: int = 0
    # Number of elementwise operations, and of groups into which compiled code fuses them.
    operations: int = 0
    groups: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes that a layer takes, without its parameters and their gradients."""

    # Kept from forward to backward.
    kept: int
    # Kept with selective checkpointing, without the layer's input.
    selective: int
    # Likewise, if only the results of softmax attention are kept.
    attention: int
    # Peak in backward, beyond what is kept.
    working: int


@dataclass(frozen=True)
class LayerCounts:
    """The counts of a layer, for one rank's tokens of a micro-step."""

    forward: PassCounts
    backward: PassCounts
    # Bytes of the layer's input.
    input: int
    plain: Memory
    compiled: Memory


def count(block: Block, x: Tensor, plan: BatchPlan, values: Tensor | None = None) -> LayerCounts:
    """Count a layer's work and memory on a rank.

    x [1, T, dim] and the values that the layer takes (both with requires_grad), and `plan`,
    are on the meta device.
    """
    seen = _Seen(x)
    saved = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    # The first forward counts what selective checkpointing keeps.
    region, _ = contexts()
    with _OneKernelNorms(), region, saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, plan, None, values)
    selective = region.region.nbytes
    saved.clear()
    # Then record a forward and a backward, with the tensors that autograd saves.
    with _OneKernelNorms(), seen:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            y, *_ = block(x, plan, None, values)
        seen.turn(y)
        y.backward(torch.empty_like(y))
        seen.take(x.grad)
    # Parameters and the values' storage are not the layer's own memory.
    others = () if values is None else (values,)
    parameters = {p.untyped_storage()._cdata for p in (*block.parameters(), *others)}
    kept = sum(size for key, size in saved.items() if key not in parameters)
    leaves = (seen.leaves(saved) | {seen.key(x)}) - parameters
    for key in leaves:
        # A compiled backward pass holds all of them until it ends.
        seen.compiled_lives[key][1] = seen.place
    kept_compiled = sum(seen.nbytes(key) for key in leaves)
    # Outputs of operators that selective checkpointing keeps. The driver of an operator
    # keeps its own, except where layers are compiled.
    selected = [call for call in seen.forward.calls if "selective" in call.spec.kept_by]
    others = [call for call in selected if not call.spec.of_driver]
    attention = _bytes(call for call in selected if "attention" in call.spec.kept_by)
    working = max(seen.peak(parameters, seen.lives) - kept, 0)
    plain = Memory(kept, selective + _bytes(others), attention, working)
    working = max(seen.peak(parameters, seen.compiled_lives) - kept_compiled, 0)
    compiled = Memory(kept_compiled, _bytes(selected), attention, working)
    return LayerCounts(seen.forward, seen.backward, x.nbytes, plain, compiled)


def _bytes(calls: Iterable[OperatorCall]) -> int:
    return sum(x.nbytes for x in chain.from_iterable(call.outputs for call in calls))


class _Seen(TorchDispatchMode):
    """Records every call of a layer's forward and backward.

    A tensor's identity is its storage (`key`), which is kept alive.
    """

    def __init__(self, x: Tensor):
        super().__init__()
        self.forward = PassCounts()
        self.backward = PassCounts()
        # `place` is incremented at each product and operator.
        self.work = self.forward
        self.place = 0
        self.storages: dict[int, torch.UntypedStorage] = {}
        # Elementwise result → the tensors that it is computed from.
        self.made_of: dict[int, set[int]] = {}
        # In backward: the results in `made_of` that forward computed.
        self.of_forward: set[int] = set()
        # Work that is counted already: once per place, or once per pass.
        self.done: set[tuple[str, int, int]] = set()
        # First and last place at which a tensor is needed, uncompiled and compiled.
        self.lives: dict[int, list[int]] = {self.key(x): [0, 0]}
        self.compiled_lives: dict[int, list[int]] = {self.key(x): [0, 0]}
        # Temporary bytes by place.
        self.temporaries: Counter[int] = Counter()
        self.turned = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs))
        outputs = _tensors(out)
        # One of our operators.
        if function.namespace == "titan_linear":
            names = (argument.name for argument in function._schema.arguments)
            call = OperatorCall(function._opname, dict(zip(names, args)), tuple(outputs))
            self.work.calls.append(call)
            self._anchor(inputs, outputs, call.temporary)
        # A matrix product: [m, k] @ [k, n] or a batch of them.
        elif function.overloadpacket in PRODUCTS:
            a, b = inputs[-2:]
            size = (a.shape[-2], b.shape[-1], a.shape[-1])
            times = a.shape[0] if a.dim() == 3 else 1
            self.work.products[size] += times
            self.work.wide_products[size] += times if a.dtype.itemsize > 2 else 0
            self.work.multiplications += 1
            self._anchor(inputs, outputs)
        # An elementwise operation, unless it only returns views.
        elif written := self._written(function, inputs, outputs):
            self._elementwise(inputs, written)
        return out

    def turn(self, y: Tensor) -> None:
        """Switch from forward, which has returned y, to backward."""
        self.take(y)
        self.place += 1
        self.work = self.backward
        self.of_forward = set(self.made_of)
        self.turned = self.place

    def take(self, x: Tensor) -> None:
        """Record that a product, an operator or code outside the layer reads x.

        In compiled code an elementwise x is written here.
        """
        key = self.key(x)
        # Outputs of products and operators are in memory anyway.
        if key not in self.made_of:
            self._live(self.compiled_lives, key)
            return
        # An elementwise result is written once per pass. Backward's copy has the negative
        # key.
        if self._first("written", key, self.turned):
            self.work.fused += x.nbytes
            self._live(self.compiled_lives, -key if self.turned else key)
        # Backward recomputes forward's results, and so reads what they are computed from.
        if key in self.of_forward:
            self._read(x)

    def key(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        self.storages[storage._cdata] = storage
        return storage._cdata

    def nbytes(self, key: int) -> int:
        return self.storages[abs(key)].nbytes()

    def leaves(self, keys: Iterable[int]) -> set[int]:
        """Trace tensors back through elementwise operations, to the tensors these start
        from.

        The results are outputs of products and operators, and inputs.
        """
        ways = set(keys)
        traced = set()
        while ways:
            key = ways.pop()
            traced.add(key)
            ways |= self.made_of.get(key, set()) - traced
        return traced - set(self.made_of)

    def peak(self, parameters: set[int], lives: dict[int, list[int]]) -> int:
        """Return the most bytes alive at any place of backward, without parameters."""
        # Sum the allocations and frees at each place, then look for the largest total.
        changes: Counter[int] = Counter()
        for key, (first, last) in lives.items():
            if key not in parameters and last >= self.turned:
                changes[max(first, self.turned)] += self.nbytes(key)
                changes[last + 1] -= self.nbytes(key)
        now = 0
        most = 0
        for place in range(self.turned, self.place + 2):
            now += changes[place]
            most = max(most, now + self.temporaries[place])
        return most

    def _live(self, lives: dict[int, list[int]], key: int) -> None:
        lives.setdefault(key, [self.place, self.place])[1] = self.place

    def _anchor(self, inputs: list[Tensor], outputs: list[Tensor], temporary: int = 0) -> None:
        self.place += 1
        self.temporaries[self.place] = temporary
        for x in inputs:
            self._live(self.lives, self.key(x))
            self.take(x)
        for x in outputs:
            self._live(self.lives, self.key(x))
            self._live(self.compiled_lives, self.key(x))

    def _written(self, function: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        """Return the tensors that an elementwise operation has written; none if it returns
        views.
        """
        if function._schema.is_mutable:
            return outputs
        old = set(map(self.key, inputs))
        return [x for x in outputs if self.key(x) not in old]

    def _elementwise(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        keys = set(map(self.key, inputs))
        self.work.elementwise += sum(x.nbytes for x in (*inputs, *outputs))
        self.work.operations += 1
        self.work.groups += self._first("group", 0, self.place)
        for x in inputs:
            self._read(x)
        for x in outputs:
            self.made_of.setdefault(self.key(x), set()).update(keys - {self.key(x)})
        for x in (*inputs, *outputs):
            self._live(self.lives, self.key(x))

    def _read(self, x: Tensor) -> None:
        """Record that an elementwise operation reads x.

        In compiled code, a tensor is read once per place. An elementwise result of forward
        is recomputed in backward from its leaves. A result of this pass is still in
        registers, and is not read.
        """
        key = self.key(x)
        if key in self.made_of and key not in self.of_forward:
            return
        for leaf in self.leaves([key]):
            self._live(self.compiled_lives, leaf)
            if self._first("read", leaf, self.place):
                # Of x itself, which may be a view, only its own bytes are read.
                most = x.nbytes if leaf == key else math.inf
                self.work.fused += min(self.nbytes(leaf), most)

    def _first(self, what: str, key: int, where: int) -> bool:
        before = len(self.done)
        self.done.add((what, key, where))
        return len(self.done) > before


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type == "meta"]


class _OneKernelNorms(TorchFunctionMode):
    """Run RMSNorm as one operation that saves its input, as on a GPU.

    The meta device would decompose it.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        if function is F.rms_norm:
            return _Norm.apply(args[0], kwargs["weight"])
        return function(*args, **(kwargs or {}))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return dy * x, weight.clone()
