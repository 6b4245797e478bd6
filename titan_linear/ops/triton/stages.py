"""Stages of a chunked recurrence in Triton, as operators and behind the driver's interface
(`Rule` in `ops/recurrence.py`). The operators of a rule are

    NAME_prepare        -> tiles                                                chunk-parallel
    NAME_recompute      -> tiles that forward did not keep; only if a rule keeps a part
    NAME_scan           -> o [T, HV, V], last states                            sequential in a head
    NAME_boundary       -> S_ext, M: for context parallelism and segments
    NAME_boundary_bwd   -> dS_ext
    NAME_backward       -> gradients of the inputs (empty if not given), and of the
                           initial states, in their rows

All operators take the fields of `Given`, as lists. Inputs are flat packed streams [T, ...]
of N entries with any stride between tokens (`tiles.py`). No operator waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from titan_linear.ops.layout.boundaries import Segments
from titan_linear.ops.layout.chains import Chains
from titan_linear.ops.runtime import costs
from titan_linear.ops.runtime.operators import operator
from titan_linear.ops.runtime.options import AnyInputs, AnyOptions, Fields, States
from titan_linear.ops.triton.chunks import ALL, Chunks
from titan_linear.ops.triton.tiles import NONE, Pair, dense_heads, empty_states


class Given(NamedTuple):
    """Arguments of every stage. The rule defines the types of x, tiles and numbers."""

    x: Any
    tiles: Any  # each is None until it is prepared
    chunks: tuple[Tensor, ...]  # `Chunks`
    numbers: Any
    initial: Pair  # initial states of the entries
    d_final: Pair  # gradients of their final states
    listed: Pair  # entries whose boundary states are written (`ALL`)
    do: Tensor | None
    rows: int  # number of states or state gradients to write, [rows, HV, K, V] fp32

    @property
    def all_entries(self) -> int:
        return len(self.chunks[0]) - 1

    @property
    def listed_entries(self) -> int:
        entries, _ = self.listed
        return self.all_entries if entries is None else len(entries)


class Ends(NamedTuple):
    """Fields of `Given` that only some stages need."""

    initial: Pair = NONE
    d_final: Pair = NONE
    listed: Pair = ALL
    do: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors in the form that operators take; `of` undoes it."""
        return [*self.initial, *self.d_final, *self.listed, self.do]

    @staticmethod
    def of(tensors: Fields) -> Ends:
        initial, row, d_final, d_row, entries, wanted, do = tensors
        return Ends((initial, row), (d_final, d_row), (entries, wanted), do)


NO_ENDS = Ends()
Launch = Callable[[Given], list[Tensor]]
Operator = Callable[..., list[Tensor]]


class Stages(ABC):
    """One rule's operators, and the launches of its kernels, which fill preallocated
    tensors."""

    name: ClassVar[str]
    inputs: ClassVar[type[AnyInputs]]
    prepared: ClassVar[tuple[str, ...]]  # inputs that `prepare` reads
    tiles: ClassVar[type[Any]]
    numbers: ClassVar[type[Any]]  # a NamedTuple of floats
    kept: ClassVar[tuple[str, ...]]  # tiles kept for backward
    again: ClassVar[tuple[str, ...]] = ()  # tiles that `recompute` makes

    def __init__(self) -> None:
        by_gates = self._cost_by_gates
        # A `prepare` that reads gates alone costs only the bytes that it moves.
        cost = by_gates if self.prepared == self.inputs._fields else None
        prepares = None if self.kept == self.tiles._fields else "forward"
        self.prepare = self._operator(self._prepare, self._new_tiles, cost, prepares=prepares)
        if self.again:
            empty = partial(self._new_tiles, again=True)
            self.recompute = self._operator(self._recompute, empty, by_gates, prepares="backward")
        # The stages that carry states, and the gradients.
        self.scan = self._operator(self._scan, self._scanned, kept_by=("selective",))
        self.boundary = self._operator(self._boundary, self._transitions, kept_by=("selective",))
        self.boundary_bwd = self._operator(self._boundary_bwd, self._states)
        self.backward = self._operator(
            self._backward, self._gradients, by_gates, temporary=self._room
        )

    def _operator(
        self,
        run: Launch,
        empty: Launch,
        cost: Callable[..., costs.Cost] | None = costs.recurrence,
        **spec: Any,
    ) -> Operator:
        """Make an operator of `run`; `empty` allocates the outputs that `run` returns."""

        def stage(
            inputs: Fields,
            tiles: Fields,
            chunks: Fields,
            ends: Fields,
            numbers: list[float],
            rows: int,
        ) -> list[Tensor]:
            return run(self._given(inputs, tiles, chunks, ends, numbers, rows))

        def fake(*given: Any) -> list[Tensor]:
            return empty(self._given(*given))

        return operator(
            stage, fake=fake, name=self.name + run.__name__, cost=cost, of_driver=True, **spec
        )

    def _given(
        self,
        inputs: Fields,
        tiles: Fields,
        chunks: Fields,
        ends: Fields,
        numbers: list[float],
        rows: int,
    ) -> Given:
        return Given(
            x=self.inputs(*inputs),
            tiles=self.tiles(*tiles),
            chunks=tuple(chunks),
            numbers=self.numbers(*numbers),
            rows=rows,
            **Ends.of(ends)._asdict(),
        )

    # --- Defined by each rule

    @abstractmethod
    def numbers_of(self, x: AnyInputs, options: AnyOptions) -> Any: ...

    @abstractmethod
    def tile_shapes(self, x: Any, numbers: Any) -> Any:
        """Return tiles, each as its dtype and its shape in one chunk, (dtype, *shape)."""

    @abstractmethod
    def launch_prepare(self, given: Given, tiles: Any) -> None:
        """Fill `tiles`. Tiles that `given` already has need not be computed."""

    @abstractmethod
    def launch_scan(self, given: Given, **outputs: Tensor | None) -> None:
        """Scan entries from first to last and fill `outputs`.

        With `o`, `final_state` receives the last states of the entries. With `M`,
        `final_state` receives the last states of the listed entries from zero states, and
        `M` their transitions [rows, HV, ...] fp32. Other outputs are the tensors that the
        rule's backward needs.
        """

    @abstractmethod
    def launch_reverse(self, given: Given, d_initial: Pair, **outputs: Tensor) -> None:
        """Scan entries from last to first. d_initial receives the gradients of the (listed)
        entries' initial states; `outputs` are the tensors that the rule's backward needs."""

    def transition(self, K: int) -> tuple[int, ...]:
        """Return the shape of a head's transition M."""
        return K, K

    def any_gate(self, numbers: Any) -> bool:
        """Return whether gates are unbounded, which makes chunks and gradients slower."""
        return False

    @abstractmethod
    def launch_backward(self, given: Given, d_initial: Tensor | None) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, each dense and in its input's dtype.

        d_initial has the rows of the initial states; rows that belong to no entry stay
        unwritten.
        """

    @abstractmethod
    def room(self, x: Any) -> int:
        """Return the number of bytes that backward allocates and frees again."""

    # --- The operators, and the allocation of their outputs

    def _new_tiles(self, given: Given, again: bool = False) -> list[Tensor]:
        _, chunk_index, _ = given.chunks
        NT = chunk_index.shape[0]
        shapes = self.tile_shapes(given.x, given.numbers)
        chosen = [getattr(shapes, name) for name in self.again] if again else shapes
        return [chunk_index.new_empty(NT, *shape, dtype=dtype) for dtype, *shape in chosen]

    def _prepare(self, given: Given) -> list[Tensor]:
        tiles = self._new_tiles(given)
        self.launch_prepare(given, self.tiles(*tiles))
        return tiles

    def _recompute(self, given: Given) -> list[Tensor]:
        tiles = self._new_tiles(given, again=True)
        made = dict(zip(self.again, tiles, strict=True))
        self.launch_prepare(given, given.tiles._replace(**made))
        return tiles

    def _states(self, given: Given) -> list[Tensor]:
        return [empty_states(given.x.v, given.rows, given.x.q.shape[2])]

    def _scanned(self, given: Given) -> list[Tensor]:
        return [given.x.v.new_empty(given.x.v.shape), *self._states(given)]

    def _scan(self, given: Given) -> list[Tensor]:
        o, final_state = self._scanned(given)
        self.launch_scan(given, o=o, final_state=final_state if given.rows else None)
        return [o, final_state]

    def _transitions(self, given: Given) -> list[Tensor]:
        (S_ext,) = self._states(given)
        return [S_ext, S_ext.new_empty(*S_ext.shape[:2], *self.transition(S_ext.shape[2]))]

    def _boundary(self, given: Given) -> list[Tensor]:
        S_ext, M = self._transitions(given)
        self.launch_scan(given, final_state=S_ext, M=M)
        return [S_ext, M]

    def _boundary_bwd(self, given: Given) -> list[Tensor]:
        (dS_ext,) = self._states(given)
        self.launch_reverse(given, (dS_ext, None))
        return [dS_ext]

    def _gradients(self, given: Given) -> list[Tensor]:
        grads = (given.do.new_empty(0) if x is None else x.new_empty(x.shape) for x in given.x)
        return [*grads, *self._states(given)]

    def _backward(self, given: Given) -> list[Tensor]:
        (d_initial,) = self._states(given)
        # Kernels read do with dense heads.
        given = given._replace(do=dense_heads(given.do))
        grads = self.launch_backward(given, d_initial if given.rows else None)
        return [given.do.new_empty(0) if d is None else d for d in (*grads, d_initial)]

    def _cost_by_gates(
        self, outputs: costs.Outputs, inputs: Fields, numbers: list[float], **_: Any
    ) -> costs.RecurrenceCost:
        return costs.recurrence(outputs, inputs)._replace(
            any_gate=self.any_gate(self.numbers(*numbers))
        )

    def _room(self, inputs: Fields, **_: Any) -> int:
        return self.room(self.inputs(*inputs))


class TritonRule:
    """Stages of one call, over chunks; see `Rule` in ops/recurrence.py.

    kept: the tiles that forward kept; if it is empty, all tiles are prepared.
    """

    def __init__(
        self,
        stages: Stages,
        inputs: AnyInputs,
        options: AnyOptions,
        chunks: Chunks,
        kept: Sequence[Tensor],
    ):
        self.stages = stages
        self.inputs = inputs
        self.chunks = chunks
        self.numbers = [float(n or 0) for n in stages.numbers_of(inputs, options)]
        # Start from the kept tiles, and compute the rest.
        none = stages.tiles(*[None] * len(stages.tiles._fields))
        self.tiles = none._replace(**dict(zip(stages.kept, kept)))
        prepared = [x if name in stages.prepared else None for name, x in inputs._asdict().items()]
        if not kept:
            self.tiles = stages.tiles(*self._run(stages.prepare, inputs=prepared))
        elif stages.again:
            made = self._run(stages.recompute, inputs=prepared)
            self.tiles = self.tiles._replace(**dict(zip(stages.again, made, strict=True)))

    @property
    def kept(self) -> tuple[Tensor, ...]:
        _, *tables = self.chunks
        return *tables, *(getattr(self.tiles, name) for name in self.stages.kept)

    def forward(self, initial: States | None, need_final: bool) -> tuple[Tensor, Tensor]:
        rows = self.chunks.cu_seqlens.shape[0] - 1 if need_final else 0
        o, final = self._run(self.stages.scan, Ends(initial=_pair(initial)), rows)
        return o, final

    def boundary(self, listed: Chains | Segments) -> tuple[Tensor, Tensor]:
        ends = Ends(listed=(listed.entries, listed.wanted))
        S_ext, M = self._run(self.stages.boundary, ends, listed.entries.shape[0])
        return S_ext, M

    def boundary_backward(self, do: Tensor, listed: Chains | Segments) -> Tensor:
        ends = Ends(listed=(listed.entries, listed.wanted), do=do)
        (dS_ext,) = self._run(self.stages.boundary_bwd, ends, listed.entries.shape[0])
        return dS_ext

    def backward(
        self, do: Tensor, initial: States | None, d_final: States | None, need_d_initial: bool
    ) -> tuple[AnyInputs, Tensor]:
        rows = initial.values.shape[0] if need_d_initial else 0
        ends = Ends(initial=_pair(initial), d_final=_pair(d_final), do=do)
        *grads, d_initial = self._run(self.stages.backward, ends, rows)
        given = (None if x is None else d for x, d in zip(self.inputs, grads, strict=True))
        return type(self.inputs)(*given), d_initial

    def _run(
        self,
        stage: Operator,
        ends: Ends = NO_ENDS,
        rows: int = 0,
        inputs: Fields | None = None,
    ) -> list[Tensor]:
        return stage(
            inputs or list(self.inputs),
            list(self.tiles),
            list(self.chunks),
            ends.tensors(),
            self.numbers,
            rows,
        )


def _pair(states: States | None) -> Pair:
    """Return states as kernels read them: contiguous values (None: zeros), and each entry's
    row."""
    return NONE if states is None else (states.values.contiguous(), states.index)
