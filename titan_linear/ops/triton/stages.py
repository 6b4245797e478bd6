"""The stages of a chunked recurrence in Triton: as operators, and behind the driver's interface (`ops/recurrence.py`,
`Rule`). The operators of a rule are

    NAME_prepare        inputs -> tiles                                         chunk-parallel
    NAME_recompute      (inputs, kept tiles) -> other tiles, again for backward; only if a rule keeps a part
    NAME_scan           (inputs, tiles, initial states) -> o, final states      sequential in a head
    NAME_boundary       (inputs, tiles, some entries) -> S_ext, M               for context parallelism and segments
    NAME_boundary_bwd   (do, inputs, tiles, some entries) -> dS_ext
    NAME_backward       (do, all of these) -> gradients

Inputs are flat packed streams [T, ...] of N entries (`tiles.py`: any stride between tokens). Operators take named
tuples as lists: inputs, tiles, `Chunks`, `States`, and a rule's numbers. Nothing here waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator, register_fake
from titan_linear.ops.runtime.options import AnyInputs, AnyOptions, Fields, States
from titan_linear.ops.triton.chunks import Chunks
from titan_linear.ops.triton.tiles import Pair, dense_heads, empty_states


class Given(NamedTuple):
    """What every stage is given; x, tiles and numbers are the rule's."""

    x: Any
    tiles: Any
    chunks: tuple[Tensor, Tensor, Tensor]  # `Chunks`
    numbers: Any


class Stages(ABC):
    """One rule's operators, and launches of its kernels, which fill the tensors that they are given."""

    name: ClassVar[str]
    inputs: ClassVar[type[AnyInputs]]
    prepared: ClassVar[type[Any]]  # those inputs that tiles are prepared from
    tiles: ClassVar[type[Any]]
    numbers: ClassVar[type[Any]]  # floats
    kept: ClassVar[tuple[str, ...]]  # tiles that backward does not compute again
    again: ClassVar[tuple[str, ...]] = ()  # those that it does, if by an operator of its own

    def __init__(self) -> None:
        whole, by_gates = self.kept == self.tiles._fields, self._cost_by_gates
        cost = by_gates if self.prepared is self.inputs else None  # from gates alone: its bytes
        self.prepare = self._operator(self._prepare, self._empty, cost, prepares=None if whole else "forward")
        if self.again:
            self.recompute = self._operator(self._recompute, self._empty_again, by_gates, prepares="backward")
        self.scan = self._operator(self._scan, self._scanned, kept_by=("selective",))
        self.boundary = self._operator(self._boundary, self._transitions, kept_by=("selective",))
        self.boundary_bwd = self._operator(self._boundary_bwd, self._entering)
        self.backward = self._operator(self._backward, self._gradients, by_gates, temporary=self._room)

    def _operator(
        self,
        fn: Callable[..., Any],
        fake: Callable[..., Any],
        cost: Callable[..., costs.Cost] | None = costs.recurrence,
        **spec: Any,
    ) -> Callable[..., Any]:
        made = operator(fn, name=self.name + fn.__name__, cost=cost, of_driver=True, **spec)
        register_fake(made)(fake)
        return made

    def _given(self, inputs: Fields, tiles: Fields, chunks: Fields, numbers: list[float]) -> Given:
        return Given(self.inputs(*inputs), self.tiles(*tiles), tuple(chunks), self.numbers(*numbers))

    # --- What a rule states

    @abstractmethod
    def numbers_of(self, x: AnyInputs, options: AnyOptions) -> Any: ...

    @abstractmethod
    def empty_tiles(self, x: Any, NT: int, kept: Fields | None, numbers: Any) -> Any:
        """Tiles of NT chunks, to be prepared from x; for backward, given `kept`, those that it needs for that."""

    @abstractmethod
    def launch_prepare(self, given: Given) -> None: ...

    @abstractmethod
    def launch_scan(self, given: Given, initial: Pair, o: Tensor, final_state: Tensor | None) -> None: ...

    def transition(self, K: int) -> tuple[int, ...]:
        """The shape of a head's M."""
        return K, K

    def any_gate(self, numbers: Any) -> bool:
        """Whether gates are unbounded, so that chunks and gradients take longer."""
        return False

    @abstractmethod
    def launch_boundary(self, given: Given, listed: Pair, S_ext: Tensor, M: Tensor) -> None: ...

    @abstractmethod
    def launch_boundary_bwd(self, do: Tensor, given: Given, listed: Pair, dS_ext: Tensor) -> None: ...

    @abstractmethod
    def launch_backward(
        self, do: Tensor, given: Given, initial: Pair, d_final: Pair, d_initial: Tensor | None
    ) -> Sequence[Tensor | None]:
        """-> the gradients of the inputs, each dense and in its input's dtype."""

    @abstractmethod
    def room(self, x: Any) -> int:
        """Bytes that backward allocates and frees again."""

    # --- Operators, and what they return without computing it

    def _unprepared(self, inputs: Fields, chunks: Fields, kept: Fields | None, numbers: list[float]) -> Given:
        x, (_, chunk_index, _), n = self.prepared(*inputs), chunks, self.numbers(*numbers)
        return Given(x, self.empty_tiles(x, chunk_index.shape[0], kept, n), tuple(chunks), n)

    def _empty(self, inputs: Fields, chunks: Fields, numbers: list[float]) -> list[Tensor]:
        return list(self._unprepared(inputs, chunks, None, numbers).tiles)

    def _prepare(self, inputs: Fields, chunks: Fields, numbers: list[float]) -> list[Tensor]:
        given = self._unprepared(inputs, chunks, None, numbers)
        self.launch_prepare(given)
        return list(given.tiles)

    def _empty_again(self, inputs: Fields, chunks: Fields, kept: Fields, numbers: list[float]) -> list[Tensor]:
        tiles = self._unprepared(inputs, chunks, kept, numbers).tiles
        return [getattr(tiles, name) for name in self.again]

    def _recompute(self, inputs: Fields, chunks: Fields, kept: Fields, numbers: list[float]) -> list[Tensor]:
        given = self._unprepared(inputs, chunks, kept, numbers)
        self.launch_prepare(given)
        return [getattr(given.tiles, name) for name in self.again]

    def _scanned(
        self, inputs: Fields, tiles: Fields, chunks: Fields, initial: Fields, final_rows: int, numbers: list[float]
    ) -> tuple[Tensor, Tensor]:
        q, _, v, *_ = inputs
        return v.new_empty(v.shape), empty_states(v, final_rows, q.shape[2])

    def _scan(
        self, inputs: Fields, tiles: Fields, chunks: Fields, initial: Fields, final_rows: int, numbers: list[float]
    ) -> tuple[Tensor, Tensor]:
        """-> o, final_state [final_rows, HV, K, V] fp32 (0 rows: none is written)."""
        o, final_state = self._scanned(inputs, tiles, chunks, initial, final_rows, numbers)
        given = self._given(inputs, tiles, chunks, numbers)
        self.launch_scan(given, tuple(initial), o, final_state if final_rows else None)
        return o, final_state

    def _transitions(
        self, inputs: Fields, tiles: Fields, chunks: Fields, listed: Fields, numbers: list[float]
    ) -> tuple[Tensor, Tensor]:
        q, _, v, *_ = inputs
        K, F = q.shape[2], listed[0].shape[0]
        return empty_states(v, F, K), v.new_empty(F, v.shape[1], *self.transition(K), dtype=torch.float32)

    def _boundary(
        self, inputs: Fields, tiles: Fields, chunks: Fields, listed: Fields, numbers: list[float]
    ) -> tuple[Tensor, Tensor]:
        """-> S_ext [F, HV, K, V], each listed entry's last state from a zero state, and M, its transition; fp32."""
        S_ext, M = self._transitions(inputs, tiles, chunks, listed, numbers)
        self.launch_boundary(self._given(inputs, tiles, chunks, numbers), tuple(listed), S_ext, M)
        return S_ext, M

    def _entering(
        self, do: Tensor, inputs: Fields, tiles: Fields, chunks: Fields, listed: Fields, numbers: list[float]
    ) -> Tensor:
        return empty_states(do, listed[0].shape[0], inputs[0].shape[2])

    def _boundary_bwd(
        self, do: Tensor, inputs: Fields, tiles: Fields, chunks: Fields, listed: Fields, numbers: list[float]
    ) -> Tensor:
        """-> dS_ext [F, HV, K, V] fp32: the gradient of each listed entry's incoming state if its last state has none;
        unwritten where it is not wanted."""
        dS_ext = self._entering(do, inputs, tiles, chunks, listed, numbers)
        self.launch_boundary_bwd(do, self._given(inputs, tiles, chunks, numbers), tuple(listed), dS_ext)
        return dS_ext

    def _gradients(
        self,
        do: Tensor,
        inputs: Fields,
        tiles: Fields,
        chunks: Fields,
        initial: Fields,
        d_final: Fields,
        need_d_initial: bool,
        numbers: list[float],
    ) -> list[Tensor]:
        grads = (do.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)
        return [*grads, do.new_empty(initial[0].shape if need_d_initial else 0, dtype=torch.float32)]

    def _backward(
        self,
        do: Tensor,
        inputs: Fields,
        tiles: Fields,
        chunks: Fields,
        initial: Fields,
        d_final: Fields,
        need_d_initial: bool,
        numbers: list[float],
    ) -> list[Tensor]:
        """-> the gradients of the inputs (empty if not given), and of the initial states, fp32 in their shape (empty
        unless needed; rows that belong to no entry stay unwritten)."""
        d_initial = do.new_empty(initial[0].shape if need_d_initial else 0, dtype=torch.float32)
        given = self._given(inputs, tiles, chunks, numbers)
        states = tuple(initial), tuple(d_final), d_initial if need_d_initial else None
        grads = self.launch_backward(dense_heads(do), given, *states)
        return [do.new_empty(0) if d is None else d for d in (*grads, d_initial)]

    def _cost_by_gates(
        self, outputs: costs.Outputs, inputs: Fields, numbers: list[float], **_: Any
    ) -> costs.Recurrence:
        return costs.recurrence(outputs, inputs)._replace(any_gate=self.any_gate(self.numbers(*numbers)))

    def _room(self, inputs: Fields, **_: Any) -> int:
        return self.room(self.inputs(*inputs))


class TritonRule:
    """One call's stages over chunks; see `Rule` in ops/recurrence.py. kept: forward's tiles, or none: prepare all."""

    def __init__(self, stages: Stages, inputs: AnyInputs, options: AnyOptions, chunks: Chunks, kept: Sequence[Tensor]):
        self.stages, self.inputs, self.chunks = stages, inputs, list(chunks)
        self.numbers = numbers = [float(n or 0) for n in stages.numbers_of(inputs, options)]
        prepared = [getattr(inputs, name) for name in stages.prepared._fields]
        names, made = stages.kept, kept
        if not kept:
            names, made = stages.tiles._fields, stages.prepare(prepared, self.chunks, numbers)
        elif stages.again:
            again = stages.recompute(prepared, self.chunks, list(kept), numbers)
            names, made = stages.kept + stages.again, [*kept, *again]
        self.tiles = stages.tiles(**dict.fromkeys(stages.tiles._fields) | dict(zip(names, made, strict=True)))

    @property
    def kept(self) -> tuple[Tensor, ...]:
        _, chunk_index, chunk_offsets = self.chunks
        return chunk_index, chunk_offsets, *(getattr(self.tiles, name) for name in self.stages.kept)

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        rows = self.chunks[0].shape[0] - 1 if need_final else 0
        return self.stages.scan(*self._tables(), _fields(initial), rows, self.numbers)

    def boundary(self, chains: Chains) -> tuple[Tensor, Tensor]:
        return self.entry_transitions(chains.entries, chains.wanted)

    def boundary_backward(self, do: Tensor, chains: Chains) -> Tensor:
        return self.entry_gradients(do, chains.entries, chains.wanted)

    def entry_transitions(self, entries: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """entries [F] int32 -> S_ext [F, HV, K, V] and M; see `ALL`."""
        return self.stages.boundary(*self._tables(), [entries, wanted], self.numbers)

    def entry_gradients(self, do: Tensor, entries: Tensor, wanted: Tensor | None = None) -> Tensor:
        """entries [F] int32 -> dS_ext [F, HV, K, V]."""
        return self.stages.boundary_bwd(do, *self._tables(), [entries, wanted], self.numbers)

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[AnyInputs, Tensor]:
        states = _fields(initial), _fields(d_final)
        *grads, d_initial = self.stages.backward(do, *self._tables(), *states, need_d_initial, self.numbers)
        given = (None if x is None else d for x, d in zip(self.inputs, grads, strict=True))
        return type(self.inputs)(*given), d_initial

    def _tables(self) -> tuple[Fields, Fields, Fields]:
        return list(self.inputs), list(self.tiles), self.chunks


def _fields(states: States | None) -> Fields:
    """As operators take them: contiguous states, or None for zeros, and the row of each entry among them."""
    return [None, None] if states is None else [states.values.contiguous(), states.index]
