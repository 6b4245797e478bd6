"""Rows written into other GPUs' memory: where the plan sends them, and that they bring what NCCL brings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from itertools import product
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton.language as tl

from tests.ops.cp.documents import EDGES
from tests.ops.inputs import DEVICE, boundaries, leaves, raw_gate_inputs, tokens_of
from tests.ops.triton.bfloat16 import interpret_bfloat16
from tests.ops.triton.test_numbers import run, to_device
from tests.worlds import World
from titan_linear.distributed.one_process import LocalGroup, run_ranks
from titan_linear.ops import build_cp_context, causal_conv1d
from titan_linear.ops.cp import halo, kcp, mapped
from titan_linear.ops.cp.context import CPContext
from titan_linear.ops.cp.mapped import Mapped, connect, disconnect, mapped_of
from titan_linear.ops.triton import puts as kernels
from titan_linear.ops.triton.puts import add_rows, filled_rows

GPUS = [pytest.param(n, marks=pytest.mark.cuda(n)) for n in (2, 4)]
LAYOUTS = ["contiguous", "zigzag"]


# --- Where rows go, on the CPU ---------------------------------------------------------------------------------------


def contexts(lengths: list[int], W: int, layout: str, streams: int) -> list[CPContext]:
    cu = boundaries(lengths * streams)
    describe = {"layout": layout, "num_streams": streams, "conv1d_kernel_size": 4, "world_size": W}
    return [build_cp_context(cu, rank=r, **describe) for r in range(W)]


def delivered(puts: list[torch.Tensor], counts: list[int], places: int) -> list[dict[tuple[int, int], tuple[int, int]]]:
    """Of each rank (source, place) -> (sender, row); no place is written twice."""
    memory: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in puts]
    for sender, (table, count) in enumerate(zip(puts, counts, strict=True)):
        for source, row, receiver, place in table[:count].tolist():
            assert place < places and (source, place) not in memory[receiver]
            memory[receiver][source, place] = sender, row
    return memory


LENGTHS = [*EDGES.values(), [16], [5, 11], [32]]  # the last: fragments shorter than a halo
CASES = list(product(LENGTHS, (2, 4, 8), LAYOUTS, (1, 2)))


def test_states_arrive_where_the_fold_reads_them() -> None:
    """The links name, of both kinds, what all-to-all would bring."""
    for case in CASES:
        ranks = contexts(*case)
        for name in ("forward_chains", "reverse_chains"):
            chains = [getattr(c, name) for c in ranks]
            places = len(chains[0].order)
            memory = delivered([c.puts for c in chains], [int(c.send_counts.sum()) for c in chains], places)
            for rank, (own, came) in enumerate(zip(chains, memory, strict=True)):
                by_nccl = received(chains, rank)
                links = int(own.chain_offsets[-1])
                for at, row, kind in [(own.s_place, own.s_row, 0), (own.m_place, own.m_row, 1)]:
                    pairs = zip(at[:links].tolist(), row[:links].tolist(), strict=True)
                    for place, n in pairs:
                        assert (place < 0) == (n < 0)
                        assert place < 0 or came[kind, place] == by_nccl[kind][n]


def received(chains: list, rank: int) -> list[list[tuple[int, int]]]:
    """(sender, slot) of each S_ext and of each M that all-to-all brings to this rank, in order."""
    kinds: list[list[tuple[int, int]]] = [[], []]
    for sender, of_sender in enumerate(chains):
        before = int(of_sender.send_counts[:rank].sum())
        own = int(of_sender.send_counts[rank].sum())
        for slot, kind in of_sender.sends[before : before + own].tolist():
            kinds[kind].append((sender, slot))
    return kinds


def test_halos_arrive_where_they_are_read() -> None:
    """Tokens in their places before each fragment; gradients, on the way back, once for each use of a token."""
    for lengths, W, layout, streams in CASES:
        ranks = contexts(lengths, W, layout, streams)
        routes, width = [c.halo for c in ranks], 3
        places = len(routes[0].filled)
        memory = delivered([r.puts for r in routes], [int(r.send_counts.sum()) for r in routes], places)
        back = delivered([r.puts_back for r in routes], [int(r.receive_counts.sum()) for r in routes], places * W)
        documents = ranks[0].documents
        tokens = [tokens_of(c).tolist() for c in ranks]
        for rank, context in enumerate(ranks):
            expected = {}
            for f in context.own_fragments:
                head = documents[np.searchsorted(documents, f.start, side="right") - 1]
                for t in range(max(int(head), f.start - width), f.start):
                    expected[f.slot * width + width + t - f.start] = t
            assert {place: tokens[r][row] for (_, place), (r, row) in memory[rank].items()} == expected
            assert routes[rank].filled.tolist() == [int(place in expected) for place in range(places)]
            count = int(routes[rank].send_counts.sum())
            named = zip(routes[rank].rows[:count].tolist(), routes[rank].places_back[:count].tolist(), strict=True)
            assert len(back[rank]) == count
            for row, place in named:
                sender, there = back[rank][0, place]
                assert memory[sender][0, there] == (rank, row)


def reason(rank: int, world_size: int) -> str:
    return connect(dist.group.WORLD, torch.device("cpu"))


def test_who_goes_on_with_nccl(worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without GPUs, of other nodes, or whose GPUs cannot reach each other, or look the same."""
    assert worlds(2).run(reason) == ["ranks are not on GPUs"] * 2

    class Group:
        size = staticmethod(lambda: 2)

    def hindrance(*where: tuple[str, int]) -> str:
        monkeypatch.setattr(dist, "all_gather_object", lambda found, *_: found.__setitem__(slice(None), where))
        return mapped._hindrance(Group, torch.device("cuda", 0))

    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other == 1)
    assert hindrance(("a", 0), ("b", 0)) == "ranks are of several nodes"
    assert hindrance(("a", 0), ("a", 0)) == "several ranks have the same GPU, or each sees its own only"
    assert hindrance(("a", 0), ("a", 2)) == "GPUs cannot read each other's memory"
    assert hindrance(("a", 0), ("a", 1)) == ""


def test_memory_is_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has its name after it has none."""
    group, after = Group(0, 2), Group(0, 2)
    memory = SimpleNamespace(group=ref(group))
    monkeypatch.setitem(mapped._CONNECTED, "3", memory)
    for named, found in ((group, memory), (after, None)):
        monkeypatch.setattr(mapped, "group_named", lambda _, named=named: named)
        assert mapped_of("3") is found and mapped_of("4") is None


def test_what_fits() -> None:
    """Rows of whole 16 bytes, up to `MOST` bytes for all places."""
    takes, row, large = partial(Mapped.takes, None), torch.empty(1, 12), torch.empty(1, 2, mapped.MOST >> 4)
    assert takes(8, row) and takes(8, row, row) and not takes(8, row[:, 1:]) and not takes(8, row, row[:, 1:])
    assert takes(2, large) and not takes(3, large) and not takes(2, large, row)


class Trial:
    """Of rank 1 of 3, another of which compiles the kernel for a long time."""

    rank, size, device = 1, 3, torch.device("cpu")

    def __init__(self, wrong: int = -1):
        self.wrong, self.puts, self.met = wrong, 0, False

    def put(self, puts: torch.Tensor, count: int, row: torch.Tensor, *, places: int, tries: int) -> list[torch.Tensor]:
        assert puts.tolist() == [[0, 0, p, 1] for p in range(3)] and count == places == 3
        assert self.met or tries == 0  # others may come after so many looks
        self.puts += 1
        came = torch.cat([row + row.shape[1] * (p - 1) for p in range(3)])
        came[2, 5] += self.puts == self.wrong
        return [came]

    def barrier(self) -> None:
        self.met = True


def test_trial() -> None:
    """It is as patient with ranks that compile as the group's collectives, and finds one number that is wrong."""
    assert mapped._delivers(Trial())
    assert not any(mapped._delivers(Trial(wrong)) for wrong in (1, 2, 3, 4))


# --- What the kernels do: in the interpreter, or on one GPU -----------------------------------------------------------


class Group:
    """What `Mapped` asks of one."""

    def __init__(self, rank: int, size: int):
        self.own, self.size, self.maps = rank, lambda: size, 0

    def rank(self) -> int:
        return self.own


class InTurn:
    """Ranks of this process with memory in common, which take turns: none could wait for another."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch):
        self.size, self.memory, self.current = size, [], None
        self.looks = 0  # of the last rank that the interpreter ran
        self.emptied = False
        monkeypatch.setattr(mapped, "_mapped", self.map)
        monkeypatch.setattr(dist, "barrier", lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(self, "emptied", True))
        if DEVICE == "cpu":
            monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
            monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
            monkeypatch.setattr(kernels, "_raise", lambda to, n: tl.store(to.to(tl.pointer_type(tl.int32)), n))
            monkeypatch.setattr(kernels, "_look", self.look)
        self.groups = [Group(rank, size) for rank in range(size)]  # held here alone
        self.ranks = [Mapped(group, torch.device(DEVICE, 0)) for group in self.groups]

    def look(self, at: tl.tensor) -> tl.tensor:
        self.looks += 1
        return tl.load(at.to(tl.pointer_type(tl.int32)))

    def map(
        self, shape: tuple[int], dtype: torch.dtype, group: Group, device: torch.device
    ) -> tuple[torch.Tensor, SimpleNamespace]:
        if group.maps == len(self.memory):
            self.memory.append([torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.size)])
        every = self.memory[group.maps]
        assert self.emptied or group.maps == 0  # the driver has what torch's allocator does not keep
        group.maps, self.emptied = group.maps + 1, False
        return every[group.rank()], SimpleNamespace(buffer_ptrs=[x.data_ptr() for x in every])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


HALF = {"dtype": torch.bfloat16}
SOURCES: list[Callable[[], list[torch.Tensor]]] = [
    lambda: [random(4, 5, 36)],
    lambda: [random(4, 2, 16, 8), random(4, 2, 16, 16)],
    lambda: [random(4, 8, **HALF)],
    lambda: [random(4, 50, **HALF)[:, 2:42]],
    lambda: [random(4, 41, **HALF)[:, :40]],  # not of whole words from row to row
    lambda: [random(4, 42, **HALF)[:, 1:41]],
    lambda: [random(40, 4).T],
    lambda: [random(4, 40_000)],  # more memory, and many blocks
    lambda: [random(4, 8)],
]


def test_ranks_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes, of one source and two, whose rows lie anywhere, is there until the exchange after the next one. A
    rank looks for the others until all have come, or as often as it may."""
    world, places = InTurn(3, monkeypatch), 7
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    draw, before = torch.Generator().manual_seed(0), []
    for i, make in enumerate(SOURCES):
        given, sent, came = [make() for _ in world.ranks], [], []
        tables: list[list[tuple[int, int, int, int]]] = [[] for _ in world.ranks]
        for kind in range(len(given[0])):
            for target in torch.randperm(3 * places, generator=draw)[:6].tolist():
                sender, row = (int(torch.randint(n, (), generator=draw)) for n in (2, 4))  # the last sends nothing
                tables[sender].append((kind, row, target // places, target % places))
                sent.append((target // places, kind, target % places, given[sender][kind][row]))
        for rank, table, own in zip(world.ranks, tables, given, strict=True):
            puts, world.looks = torch.tensor([*table, (-1, -1, -1, -1)], dtype=torch.int32, device=DEVICE), 0
            came.append(rank.put(puts, len(table), *own, places=places, tries=5))
            assert rank.counters.tolist() == [0, i + 1]
            assert DEVICE == "cuda" or world.looks == (5 if rank is not world.ranks[-1] else 1)
        assert all(torch.equal(numbers, torch.full_like(numbers, i + 1)) for numbers in world.memory[0])
        assert all(len(x) == places for of_rank in came for x in of_rank)
        for r, kind, place, row in sent:
            assert torch.equal(came[r][kind][place], row)
        for x, copy in before:
            assert torch.equal(x, copy)
        before = [(x, x.clone()) for of_rank in came for x in of_rank]


def states(ctx: CPContext, group: str, reverse: bool = False) -> torch.Tensor:
    draw = torch.Generator().manual_seed(ctx.rank)
    S_ext, M = (torch.randn(ctx.slots, 2, 16, n, generator=draw).to(DEVICE) for n in (32, 16))
    return kcp.incoming_states(S_ext, M, ctx.reverse_chains if reverse else ctx.forward_chains, group, reverse=reverse)


def halos(ctx: CPContext, group: str) -> torch.Tensor:
    x = torch.randn(ctx.tokens, 8, generator=torch.Generator().manual_seed(ctx.rank)).to(DEVICE)
    return halo.fetch_halo(x, list(ctx.halo), ctx.slots, 3, group)


def gradient(ctx: CPContext, group: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(ctx.rank)
    dx, d_halo = (torch.randn(*shape, generator=draw).to(DEVICE) for shape in ((ctx.tokens, 8), (ctx.slots, 8, 3)))
    halo.return_halo(dx, d_halo.mT, list(ctx.halo), group)  # as the convolution gives it
    return dx


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[5, 11, 16], [8]])  # of the second fragments are shorter than a halo
def test_operators_in_turn(monkeypatch: pytest.MonkeyPatch, lengths: list[int], layout: str) -> None:
    """They give what they give where copies carry their messages: in a rank's third turn, when its half has what the
    others wrote in their first."""
    world, cu = InTurn(4, monkeypatch), boundaries(lengths * 2)
    monkeypatch.setattr(Mapped, "put", partialmethod(Mapped.put, tries=0))
    for module in (halo, kcp):
        monkeypatch.setattr(module, "mapped_of", lambda _: world.current)
    if DEVICE == "cpu":
        monkeypatch.setattr(kcp, "_on_tensor_cores", lambda _: True)
        monkeypatch.setattr(halo, "_add_rows", add_rows)
    described = {"layout": layout, "num_streams": 2, "conv1d_kernel_size": 4, "device": DEVICE}
    contexts = [build_cp_context(cu, rank=r, world_size=4, **described) for r in range(4)]
    operators = states, partial(states, reverse=True), halos, gradient

    def by_copies(group: LocalGroup) -> list[torch.Tensor]:
        ctx = build_cp_context(cu, group, **described)
        return [op(ctx, group.group_name) for op in operators]

    for i, (op, *expected) in enumerate(zip(operators, *run_ranks(by_copies, 4), strict=True)):
        for turn in range(3):
            for rank, ctx, want in zip(world.ranks, contexts, expected, strict=True):
                world.current = rank
                got = op(ctx, "")
                assert rank.exchanges == 3 * i + turn + 1
                assert turn < 2 or torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is named twice gets both, one after the other; rows that nobody filled are zeros."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        interpret_bfloat16(monkeypatch)
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 1500, generator=rng).to(DEVICE, dtype) for n in (9, 6))
    rows = torch.tensor([3, 8, 3, 0], device=DEVICE)
    places = torch.tensor([5, 0, 2, 2], dtype=torch.int32, device=DEVICE)
    for found in (None, places):
        ours, expected = x.clone(), x.clone()
        for i in range(3):
            expected[rows[i]] += y[i if found is None else found[i]]
        add_rows(ours, y, rows, found, 3)
        assert torch.equal(ours, expected)
    filled = torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    assert torch.equal(filled_rows(y, filled), y * filled[:, None])


# --- On GPUs ---------------------------------------------------------------------------------------------------------


def exchanges(rank: int, world_size: int) -> list[str]:
    """Three hundred, of changing sizes, of one source and two, on two streams, ranks late in turn; what came wrong."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert connect(dist.group.WORLD, device) == ""
    memory, draw, wrong = mapped_of(dist.group.WORLD.group_name), torch.Generator().manual_seed(0), []
    other = torch.cuda.Stream()
    for i in range(300):
        rows, width, second = (int(torch.randint(1, n, (), generator=draw)) for n in (9, 3000, 3000))
        to = torch.randint(world_size, (world_size, rows), generator=draw)  # of each rank's rows
        two, stream = i % 3 == 0, other if i % 5 == 0 else torch.cuda.current_stream()
        given = [torch.randn(world_size, rows, 4 * w, generator=draw) for w in ((width, second) if two else (width,))]
        puts = [
            (source, n, int(to[rank, n]), rank * rows + n) for source in range(len(given)) for n in range(rows)
        ]  # fmt: skip
        table = torch.tensor(puts, dtype=torch.int32, device=device)
        own = [x[rank].to(device) for x in given]
        if (rank + i) % (2 * world_size) == 0:
            torch.cuda._sleep(1_000_000)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            came = memory.put(table, len(puts), *own, places=world_size * rows)
            came = [x.clone() for x in came]
        torch.cuda.current_stream().wait_stream(stream)
        mine = (to == rank).flatten()
        for x, whole in zip(came, given, strict=True):
            if not torch.equal(x.cpu()[mine], whole.flatten(0, 1)[mine]):
                wrong.append(f"exchange {i}")
    disconnect(dist.group.WORLD)
    return wrong


@pytest.mark.parametrize("processes", GPUS)
def test_exchanges(worlds: Callable[..., World], processes: int) -> None:
    assert worlds(processes, "nccl").run(exchanges) == [[]] * processes


def both_ways(rank: int, world_size: int) -> list[str]:
    """Outputs and gradients of the ops, by NCCL and in mapped memory; which are not the same bits."""
    device, wrong = torch.device("cuda", torch.cuda.current_device()), []
    for layout in LAYOUTS:
        for lengths in ([4096], [1, 15, 63, 64, 65, 1000, 3, 2885], [2, 4091, 3]):
            cu = boundaries(lengths)
            ctx = build_cp_context(cu.cuda(), dist.group.WORLD, layout=layout, cu_seqlens_cpu=cu)
            mine = tokens_of(ctx).cuda()
            for op in ("kda", "gdn", "conv"):
                disconnect(dist.group.WORLD)
                by_nccl = results(op, ctx, mine)
                assert connect(dist.group.WORLD, device) == ""
                memory = mapped_of(dist.group.WORLD.group_name)
                before = memory.exchanges
                for _ in range(3):  # both halves, and one again
                    ours = results(op, ctx, mine)
                    wrong += [f"{layout} {lengths} {op} {n}" for n in ours if not torch.equal(ours[n], by_nccl[n])]
                assert memory.exchanges >= before + 3 * 2  # forward and backward, not by NCCL again
    disconnect(dist.group.WORLD)
    return wrong


def results(op: str, ctx: CPContext, mine: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens, draw = ctx.stream_tokens, torch.Generator("cuda").manual_seed(7)
    if op != "conv":
        x = to_device(raw_gate_inputs(op, tokens, H=2, HV=4, K=128, V=128, gate="usual"))
        do = torch.randn(x["v"].shape, device="cuda", generator=draw).bfloat16()
        local = {n: t if n in ("A_log", "dt_bias") else t[:, mine] for n, t in x.items()}
        return run(op, local, [do[:, mine]], cp_context=ctx, impl="triton")
    x, do = (torch.randn(1, tokens, 256, device="cuda", generator=draw).bfloat16() for _ in range(2))
    weight = torch.randn(256, 4, device="cuda", generator=draw).bfloat16()
    given = leaves({"x": x[:, mine], "weight": weight})
    y = causal_conv1d(**given, activation="silu", cp_context=ctx, impl="triton")[0]
    return {"y": y.detach()} | dict(zip(given, torch.autograd.grad(y, list(given.values()), do[:, mine]), strict=True))


@pytest.mark.parametrize("processes", GPUS)
def test_what_nccl_brings(worlds: Callable[..., World], processes: int) -> None:
    """The same bits: a fold reads them in the same order."""
    assert worlds(processes, "nccl").run(both_ways) == [[]] * processes
