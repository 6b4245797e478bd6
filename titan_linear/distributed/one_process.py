"""Groups whose ranks live in one process, on one device or the CPU.

They run the code of many ranks; collectives are copies.

    def on_rank(group):                # each of 8 ranks runs it, in a thread of its own
        context = build_cp_context(cu_seqlens, group)
        o, _ = chunk_kda(..., cp_context=context)
        ...
    results = run_ranks(on_rank, 8)    # in rank order

Any degree works, without a launcher and without `torch.distributed.init_process_group`.
This serves tests, proofs, and looking into a rank with a debugger. Code that takes a group
receives a `LocalGroup`, and can look it up by name like any other group. The functions of
`torch.distributed` accept it too, except functions that ask for the default group.

Ranks take turns: one runs until it has to wait for the others. A run is therefore the same
each time, a breakpoint stops everything, and nothing has to be thread-safe. If all ranks
wait for each other, or call different collectives, an error reports at once which rank
waits for which. On a GPU all ranks share one device.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import gcd
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.ops.exchange.collectives import Ranks

T = TypeVar("T")
_turns: ContextVar[tuple[Turns, int]] = ContextVar(
    "turns of the ranks, and which one this thread is"
)
_numbers = count()


class RankFailed(RuntimeError):
    """An error that a rank of `run_ranks` raised; it is the cause of this one."""

    def __init__(self, rank: int, size: int, error: BaseException):
        super().__init__(f"rank {rank} of {size} in one process: {type(error).__name__}: {error}")
        self.rank = rank


class _Abandoned(BaseException):
    """Ends the threads of the other ranks after a failure."""


# --- Ranks as threads -----------------------------------------------------------------


def run_ranks(on_rank: Callable[[LocalGroup], T], size: int) -> list[T]:
    """Call on_rank(group) for each of `size` ranks, with one group of all of them.

    Returns:
        The results, in rank order.

    Raises:
        RankFailed: a rank raised an error; the others are ended where they wait.
    """
    with local_groups(size) as groups:
        return take_turns([partial(on_rank, group) for group in groups])


def take_turns(work: Sequence[Callable[[], T]]) -> list[T]:
    """Return the result of each rank's function.

    Ranks may use several groups (`local_groups`).

    The last rank runs in the caller's thread: torch 2.11 may crash if a thread other than
    the main one compiles. Raises `RankFailed`.
    """
    turns = Turns(len(work))
    results: list[Any] = [None] * len(work)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run(rank: int) -> None:
        _turns.set((turns, rank))
        error = None
        try:
            turns.wait(rank)
            if device is not None:
                torch.cuda.set_device(device)
            # Backward runs in this thread too: autograd's own threads, one per device, do
            # not take turns.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work[rank]()
        except BaseException as raised:
            error = raised
        turns.end(rank, error)

    # Start the threads, run the last rank here, and wait for all.
    *others, last = range(len(work))
    threads = []
    for rank in others:
        thread = threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        thread.start()
        threads.append(thread)
    turns.begin()
    copy_context().run(run, last)
    for thread in threads:
        thread.join()
    if turns.failed is not None:
        rank, error = turns.failed
        if isinstance(error, Exception):
            raise RankFailed(rank, len(work), error) from error
        # Re-raise Ctrl-C unchanged.
        raise error
    return results


class Turns:
    """Decides which of several threads runs: one at a time, until it waits or ends."""

    def __init__(self, size: int):
        self.wakes = [threading.Semaphore(0) for _ in range(size)]
        # Whether each rank can continue; None: the rank has ended.
        self.ready: list[Callable[[], bool] | None] = [lambda: True] * size
        # What each rank waits for, in words.
        self.awaits = [""] * size
        self.failed: tuple[int, BaseException] | None = None

    def begin(self) -> None:
        self._pass_on(-1)

    def pause(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()`, unless it is true already."""
        if not ready():
            self.ready[rank], self.awaits[rank] = ready, what
            self._pass_on(rank)
            self.wait(rank)
            self.awaits[rank] = ""

    def wait(self, rank: int) -> None:
        """Wait for this rank's turn."""
        self.wakes[rank].acquire()
        if self.failed is not None:
            raise _Abandoned

    def end(self, rank: int, error: BaseException | None) -> None:
        self.ready[rank], self.awaits[rank] = None, "has ended"
        if error is not None and self.failed is None:
            self.failed = rank, error
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Pass the turn to the next rank that can continue.

        After a failure, every rank continues to its end.
        """
        size = len(self.ready)
        # The other ranks in order, then this one.
        ranks = [r % size for r in range(rank + 1, rank + 1 + size)]
        left = [r for r in ranks if self.ready[r] is not None]
        able = left if self.failed is not None else [r for r in left if self.ready[r]()]
        # Deadlock: end all ranks with an error.
        if left and not able:
            said = "; ".join(f"rank {r} {what}" for r, what in enumerate(self.awaits) if what)
            self.failed = (left[0], RuntimeError(f"no rank can go on: {said}"))
            able = left
        if able:
            self.wakes[able[0]].release()


# --- Groups of these ranks ------------------------------------------------------------


@contextmanager
def local_groups(size: int) -> Iterator[list[LocalGroup]]:
    """Create a group of `size` ranks: each rank's view of it, in rank order.

    The groups are for calls inside `take_turns`.
    """
    shared = Shared(size, next(_numbers))
    groups = [LocalGroup(shared, rank) for rank in range(size)]
    registry = dist.distributed_c10d
    for group in groups:
        registry._register_process_group(group.group_name, group)
        # P2POp looks here.
        registry._world.pg_group_ranks[group] = {r: r for r in range(group.size())}
    try:
        yield groups
    finally:
        for group in groups:
            registry._unregister_process_group(group.group_name)
            del registry._world.pg_group_ranks[group]


@dataclass(frozen=True)
class Degrees:
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"dp {self.dp} × cp {self.cp} × tp {self.tp}{experts}"


@dataclass(frozen=True)
class LocalDims(Degrees):
    """Counterpart of `ParallelDims` for a rank that shares one process with all others.

    A rank may also be planned without the others. It then has no groups.
    """

    rank: int = 0
    # Groups by dimension.
    groups: Mapping[str, LocalGroup] = field(default_factory=dict)
    sharded = False
    replicas = 1
    # Meshes for tensors that lie on several processes.
    parameter_mesh = expert_parameter_mesh = None

    @property
    def copies(self) -> int:
        return self.cp * self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.copies

    @property
    def cp_group(self) -> LocalGroup:
        return self.groups["cp"]

    @property
    def tp_group(self) -> LocalGroup:
        return self.groups["tp"]

    @property
    # dp × cp
    def data_group(self) -> LocalGroup:
        return self.groups["data"]

    @property
    def tp_ranks(self) -> Ranks:
        return self._ranks("tp", self.tp)

    @property
    def ep_ranks(self) -> Ranks:
        return self._ranks("ep", self.ep)

    def _ranks(self, name: str, size: int) -> Ranks:
        group = self.groups.get(name)
        return Ranks("", size, 0) if group is None else Ranks(group.group_name, size, group.rank())


@dataclass
class _Meeting:
    """One collective: the input and the output of each rank that has come."""

    kind: str
    # (input, output, more) by rank
    of_ranks: dict[int, tuple[Tensor, Tensor, Any]] = field(default_factory=dict)
    # On GPUs: events after which the inputs are computed.
    events: list[torch.cuda.Event] = field(default_factory=list)
    done: torch.cuda.Event | bool = False


class Shared:
    """State that the ranks of a group share."""

    def __init__(self, size: int, number: int):
        self.size = size
        self.number = number
        self.meetings: dict[int, _Meeting] = {}
        # Messages by sender, receiver and tag.
        self.sent: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)


@dataclass(eq=False)
class LocalWork:
    """Stands in for `dist.Work`.

    `wait` lets other ranks run until `ready()`, then calls `then`.
    """

    ready: Callable[[], bool]
    what: str
    then: Callable[[], None]
    over: bool = False

    def is_completed(self) -> bool:
        return self.over or self.ready()

    def wait(self, timeout: object = None) -> bool:
        if not self.over:
            turns, rank = _turns.get()
            turns.pause(rank, self.ready, self.what)
            self.then()
            self.over = True
        return True


class LocalGroup(dist.ProcessGroup):
    """One rank's view of a group in this process; `torch.distributed` calls these methods."""

    def __init__(self, shared: Shared, rank: int):
        super().__init__(rank, shared.size)  # type: ignore[call-arg]  # its annotations lack this one
        self._shared = shared
        self._rank = rank
        self._count = 0
        # Number of ranks per node, which decides how data travels.
        self.node_size = gcd(shared.size, 8)
        # Each rank's view has its own name, so that looking up a group by name finds this
        # rank's view.
        self._name = f"one process, group {shared.number}, rank {rank}"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._shared.size

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "one process"

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any) -> LocalWork:
        (x,) = tensors
        return self.meet("all_reduce", x, x, opts.reduceOp)

    def all_gather_single(self, out: Tensor, x: Tensor, _: Any) -> LocalWork:
        return self.meet("all_gather", x, out)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> LocalWork:
        return self.meet("reduce_scatter", x, out, opts.reduceOp)

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        out_sizes: list[int],
        sizes: list[int],
        _: Any,
    ) -> LocalWork:
        return self.meet("all_to_all", x, out, (out_sizes, sizes))

    def barrier(self, opts: Any = None) -> LocalWork:
        nothing = torch.empty(0)
        return self.meet("barrier", nothing, nothing)

    # The same methods under the names that torch calls up to 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Messages between two ranks.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> LocalWork:
        # The sender may change it later.
        self._shared.sent[self._rank, to, tag].append(tensors[0].detach().clone())
        return LocalWork(lambda: True, "", lambda: None)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> LocalWork:
        mail = self._shared.sent[of, self._rank, tag]
        what = f"waits for what rank {of} is to send it"
        return LocalWork(lambda: bool(mail), what, lambda: _fill(tensors[0], mail.popleft()))

    def meet(self, kind: str, x: Tensor, out: Tensor, more: Any = None) -> LocalWork:
        """Join this rank's next collective; the last rank to come does the copies of all."""
        # Ranks must call the same collectives in the same order.
        shared = self._shared
        number = self._count
        self._count += 1
        meeting = shared.meetings.setdefault(number, _Meeting(kind))
        if meeting.kind != kind:
            others = ", ".join(map(str, meeting.of_ranks))
            said = (
                f"collective {number} of a group of {shared.size}: rank {self._rank} calls {kind}"
            )
            _fail(RuntimeError(f"{said} where rank(s) {others} called {meeting.kind}"))
        # Leave this rank's tensors; the last rank to come copies.
        meeting.of_ranks[self._rank] = x, out, more
        if x.is_cuda:
            meeting.events.append(torch.cuda.current_stream(x.device).record_event())
        if len(meeting.of_ranks) == shared.size:
            del shared.meetings[number]
            for event in meeting.events:
                event.wait()
            try:
                with torch.no_grad():
                    COPIES[kind]([meeting.of_ranks[r] for r in range(shared.size)])
            except Exception as error:
                _fail(error)
            meeting.done = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else True

        def then() -> None:
            if isinstance(meeting.done, torch.cuda.Event):
                meeting.done.wait()

        missing = [r for r in range(shared.size) if r not in meeting.of_ranks]
        what = f"waits in {kind} for rank(s) {', '.join(map(str, missing))}"
        return LocalWork(lambda: meeting.done is not False, what, then)


def _fail(error: Exception) -> NoReturn:
    """End all ranks with this error.

    Raised here directly, the error would not get past torch.distributed, whose error
    handler looks up the group.
    """
    turns, rank = _turns.get()
    turns.failed = turns.failed or (rank, error)
    raise _Abandoned


# --- Copies of each collective, given (input, output, more) of each rank, in rank order

Given = list[tuple[Tensor, Tensor, Any]]


def _fill(out: Tensor, x: Tensor) -> None:
    out.detach().copy_(x.view_as(out))


def _all_gather(ranks: Given) -> None:
    whole = torch.cat([x.flatten() for x, *_ in ranks])
    for _, out, _ in ranks:
        _fill(out, whole)


def _all_reduce(ranks: Given) -> None:
    total = _reduced(ranks)
    for _, out, _ in ranks:
        _fill(out, total)


def _reduce_scatter(ranks: Given) -> None:
    for part, (_, out, _) in zip(_reduced(ranks).flatten().chunk(len(ranks)), ranks, strict=True):
        _fill(out, part)


def _reduced(ranks: Given) -> Tensor:
    op = ranks[0][2]
    first, *others = (x for x, *_ in ranks)
    # In rank order.
    if op == dist.ReduceOp.SUM:
        return sum(others, first.clone())
    if op == dist.ReduceOp.MAX:
        return torch.stack([first, *others]).amax(0)
    raise NotImplementedError(
        f"a group in one process sums and takes maxima; it does not know {op}"
    )


def _all_to_all(ranks: Given) -> None:
    """Copy rows of the inputs, ordered by receiver, to outputs, ordered by sender."""
    W = len(ranks)
    # By sender, each one's rows for every receiver.
    parts = [x.split(sizes or [len(x) // W] * W) for x, _, (_, sizes) in ranks]
    for r, (_, out, (sizes, _)) in enumerate(ranks):
        came = [of_sender[r] for of_sender in parts]
        expected = list(sizes or [len(out) // W] * W)
        sent = list(map(len, came))
        assert sent == expected, f"rank {r} expects rows {expected} by sender, and {sent} come"
        _fill(out, torch.cat(came))


COPIES: dict[str, Callable[[Given], None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": lambda ranks: None,
}
