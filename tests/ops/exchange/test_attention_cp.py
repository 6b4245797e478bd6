import time
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.dispatch import AsPromised, Inside
from tests.ops.attention_cases import error, make, run
from tests.ops.inputs import tokens_of
from tests.refusals import refused
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops.attention import attention, choose_method, pairs_computed
from titan_linear.ops.exchange import allgather
from titan_linear.ops.exchange.collectives import group_named
from titan_linear.ops.exchange.ulysses import tokens_to_heads
from titan_linear.ops.layout.build_context import build_cp_context
from titan_linear.ops.layout.spans import ALL, SOME
from titan_linear.ops.reference.attention import attention as reference

HEADS = (4, 2, 6, 10)  # Hq, Hkv, D, Dv
LAYOUTS = ("contiguous", "zigzag")
METHODS = ("ring", "allgather", "ulysses")
NODES = ("ulysses+ring",)  # of two ranks each


def lengths(*sizes):
    return (0, *torch.tensor(sizes).cumsum(0).tolist())


# name: boundaries, num_streams. Rank edges at T/W and T/2W; every T is a multiple of 8.
STREAMS = {
    "one document": (lengths(64), 1),
    "before the edges": (lengths(15, 16, 16, 17), 1),
    "on the edges": (lengths(16, 16, 16, 16), 1),
    "after the edges": (lengths(17, 16, 16, 15), 1),
    "over three and more ranks": (lengths(5, 54, 5), 1),
    "one-token documents": (lengths(*[1] * 7, 20, *[1] * 10, 27), 1),
    "only one-token documents": (lengths(*[1] * 16), 1),
    "ranks of padding": (lengths(10, 4, 50), 1),
    "over the middle alone": (lengths(15, 1, 15, 2, 15, 1, 15), 1),
    "seed 001": ((0, 23, 41, 74, 106, 136, 161, 184, 205, 248, 256), 1),
    "FLA, three": (lengths(75, 100, 81), 1),
    "FLA, two": (lengths(128, 128), 1),
    "FLA, seven": (lengths(25, 38, 50, 62, 31, 25, 25), 1),
    "FLA, cp 4": (lengths(175, 81), 1),
    "two streams": (lengths(32, 9, 23), 2),
    "two streams, packed": (lengths(3, 29, 7, 15, 10), 2),
}


def nodes_of(method):
    return {"node_size": 2} if method in NODES else {}


def context(name, rank, world_size, layout, group=None, **more):
    boundaries, num_streams = STREAMS[name]
    kwargs = {"group": group} if group is not None else {"rank": rank, "world_size": world_size}
    return build_cp_context(
        torch.tensor(boundaries),
        layout=layout,
        num_streams=num_streams,
        **kwargs,
        **more,
    )


def inputs(name, seed=0, heads=HEADS):
    T = STREAMS[name][0][-1]
    Hq, Hkv, D, Dv = heads
    return make(1, T, T, Hq, Hkv, D, Dv, seed=seed)


def shard(x, cp):
    """This rank's tokens of x [1, T, ...]."""
    return torch.cat([x[:, a:b] for a, b in cp.fragments], dim=1)


def local_leaves(tensors, cp):
    q, k, v, do = (shard(x.detach(), cp) for x in tensors)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


@cache
def on_one_process(name, causal, heads=HEADS):
    return run(
        reference,
        *inputs(name, heads=heads),
        causal=causal,
        cu_seqlens=torch.tensor(STREAMS[name][0]),
    )


def errors_on_rank(
    rank, world_size, name, layout, method, causal, expected, group=None, heads=HEADS, **more
):
    """Relative errors of o, dq, dk, dv of this rank's tokens."""
    cp = context(name, rank, world_size, layout, group or dist.group.WORLD, **more)
    ours = run(
        attention,
        *local_leaves(inputs(name, heads=heads), cp),
        causal=causal,
        cp_context=cp,
        method=method,
    )
    return [error(x, shard(y, cp)) for x, y in zip(ours, expected)]


def all_errors(rank, world_size, layout, method, causal, expected):
    """The all-gather in slices, as where there is much to compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allgather, "LEAST", 1.0)
        return {
            name: errors_on_rank(
                rank, world_size, name, layout, method, causal, result, **nodes_of(method)
            )
            for name, result in expected.items()
        }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("method", METHODS + NODES)
@pytest.mark.parametrize("causal", [True, False])
def test_every_rank_equals_one_process(worlds, world_size, layout, method, causal):
    expected = {name: on_one_process(name, causal) for name in STREAMS}
    for rank, errors in enumerate(
        worlds(world_size).run(all_errors, layout, method, causal, expected)
    ):
        wrong = {name: e for name, e in errors.items() if not max(e) <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(
    "method, causal, heads, node_size",
    [
        ("allgather", True, HEADS, None),
        ("allgather", False, HEADS, None),
        ("ring", True, HEADS, None),
        ("ulysses", True, (8, 2, 6, 10), None),
        ("ulysses+ring", True, HEADS, 2),
        ("ulysses+ring", True, (8, 2, 6, 10), 4),
        ("ulysses+ring", False, HEADS, 4),
        ("ulysses+ring", True, HEADS, 1),
    ],
)
def test_eight_ranks_equal_one(layout, method, causal, heads, node_size):
    """All-to-all in nodes of four ranks, two and one, of which some share a key head; a ring of two, four and eight."""
    check_in_one_process(8, STREAMS, layout, method, causal, heads, node_size=node_size)


def test_sixty_four_ranks_share_heads(layout):
    check_in_one_process(64, ["FLA, three"], layout, "ulysses", True, (64, 2, 6, 10))


def test_many_nodes_on_a_ring(layout, monkeypatch):
    monkeypatch.setitem(STREAMS, "long", (lengths(700, 1, 300, 23), 1))
    where = {"node_size": 8, "attention": ("ulysses+ring",)}
    check_in_one_process(64, ["long"], layout, "ulysses+ring", True, (16, 4, 6, 10), **where)


def check_in_one_process(world_size, names, layout, method, causal, heads, **more):
    for name in names:
        case = (name, layout, method, causal, on_one_process(name, causal, heads))
        errors = run_ranks(
            lambda g, case=case: errors_on_rank(
                g.rank(), world_size, *case, group=g, heads=heads, **more
            ),
            world_size,
        )
        assert max(map(max, errors)) <= 1e-12, name


def run_as_promised(rank, world_size, layout, method, expected):
    with AsPromised():
        all_errors(rank, world_size, layout, method, True, expected)


@pytest.mark.parametrize("method", METHODS)
def test_operators_return_what_compiled_code_expects(worlds, layout, method):
    names = "one document", "seed 001", "two streams, packed"
    worlds(4).run(
        run_as_promised, layout, method, {name: on_one_process(name, True) for name in names}
    )


def poisoned_runs(rank, world_size, layout, method, name):
    """The tokens outside document i, before and after document i becomes NaN, for each i."""
    cp = context(name, rank, world_size, layout, dist.group.WORLD, **nodes_of(method))
    boundaries = STREAMS[name][0]
    before = run(attention, *local_leaves(inputs(name), cp), cp_context=cp, method=method)
    unchanged = []
    for a, b in pairwise(boundaries):
        tensors = [x.detach().clone() for x in inputs(name)]
        for x in tensors:
            x[:, a:b] = torch.nan
        after = run(attention, *local_leaves(tensors, cp), cp_context=cp, method=method)
        inside = torch.zeros(1, boundaries[-1], dtype=torch.bool)
        inside[:, a:b] = True
        others = ~shard(inside, cp)[0]
        unchanged.append(
            all(torch.equal(x[:, others], y[:, others]) for x, y in zip(before, after))
        )
        unchanged.append(not any(y[:, ~others].isfinite().any() for y in after))
    return unchanged


@pytest.mark.parametrize("method", METHODS + NODES)
def test_documents_do_not_see_each_other(worlds, layout, method):
    names = ("over three and more ranks", "after the edges", "two streams, packed")
    for name in names:
        for unchanged in worlds(4).run(poisoned_runs, layout, method, name):
            assert all(unchanged), name


def test_bytes_between_nodes():
    """Of one document over four nodes of eight: on the ring a node's last rank alone sends, in 31 hops; with nodes on
    the ring each does, in 3."""
    sent = {"ring": Counter(), "ulysses+ring": Counter()}

    def on_rank(group, method):
        def counted(tensors, to, tag):
            sent[method][group.rank()] += tensors[0].nbytes * (group.rank() // 8 != to // 8)
            return send(tensors, to, tag)

        send, group.send = group.send, counted
        cp = build_cp_context(torch.tensor([0, 128]), group, attention=(method,))
        attention(*make(1, 4, 4, 8, 8, 2, 2)[:3], cp_context=cp, method=method)

    for method in sent:
        run_ranks(lambda group, method=method: on_rank(group, method), 32)
    assert max(sent["ulysses+ring"].values()) * 31 == max(sent["ring"].values()) * 3 > 0


# --- rectangles and spans ----------------------------------------------------------------------------------------


def rows(table):
    return [row for row in table.tolist() if row[0] >= 0]


def with_owner(cp, hop):
    """This rank's causal rectangles with the keys that are `hop` ranks away."""
    return [((a, b), (c, d)) for h, a, b, c, d in rows(cp.rectangles.by_hop) if h == hop]


def pairs_of_blocks(ranks, causal):
    """How often the squares and rectangles of all ranks cover each (query, key), as a [T, T] count in global tokens."""
    T = ranks[0].cut.stream_tokens
    tokens = [tokens_of(cp) for cp in ranks]
    count = torch.zeros(T, T, dtype=torch.int64)
    for cp in ranks:
        for a, b in pairwise(cp.cu_seqlens.tolist()):
            square = torch.ones(b - a, b - a, dtype=torch.int64)
            mine = tokens[cp.ranks.rank][a:b]
            count[mine[:, None], mine[None, :]] += square.tril() if causal else square
        rectangles = cp.rectangles if causal else cp.full_rectangles
        for hop, a, b, c, d in rows(rectangles.by_hop):
            keys = tokens[(cp.ranks.rank - hop) % cp.ranks.world_size][c:d]
            assert b > a and len(keys)
            count[tokens[cp.ranks.rank][a:b][:, None], keys[None, :]] += 1
    return count


def pairs_of_spans(ranks, causal):
    """The same of their spans, whose rows arrive as the routes say."""
    T, W, count = ranks[0].cut.stream_tokens, len(ranks), 0
    plans, tokens = (
        [cp.gathered if causal else cp.full_gathered for cp in ranks],
        [tokens_of(cp) for cp in ranks],
    )
    sent = [
        torch.cat([tokens[r][a:b] for a, b in p.keys.sent.tolist()]).split(p.keys.leaving.tolist())
        if p.keys.travel != ALL
        else None
        for r, p in enumerate(plans)
    ]
    for r, (spans, keys, _) in enumerate(plans):
        q = tokens[r]
        came = torch.cat(tokens if keys.travel == ALL else [sent[s][r] for s in range(W)])
        assert keys.travel == ALL or [len(sent[s][r]) for s in range(W)] == keys.coming.tolist()
        k = torch.cat([torch.cat([tokens[r], came])[a:b] for a, b in keys.pieces.tolist()])
        needed = {*k.tolist()} - {*tokens[r].tolist()}
        # what is sent is what is needed
        assert keys.travel == ALL or sorted(needed) == sorted(came.tolist())
        assert torch.equal(spans.q, spans.q_cpu) and torch.equal(spans.k, spans.k_cpu)
        assert (spans.q[0], spans.q[-1], spans.k[0], spans.k[-1]) == (0, len(q), 0, len(k))
        assert (spans.longest_q, spans.longest_k) == (spans.q.diff().max(), spans.k.diff().max())
        here = torch.zeros(T, T, dtype=torch.int64)
        for i, j in spans.rows():
            pairs = torch.ones(len(q[i]), len(k[j]), dtype=torch.int64)
            here[q[i][:, None], k[j][None, :]] += (
                pairs.tril(pairs.shape[1] - pairs.shape[0]) if causal else pairs
            )
        assert all(p.pairs[r] == here.sum() for p in plans)
        count += here
    return count


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairs", [pairs_of_blocks, pairs_of_spans])
def test_each_visible_pair_is_covered_once(layout, causal, pairs):
    for name, (boundaries, num_streams) in STREAMS.items():
        world_size = 8 if boundaries[-1] // num_streams % 16 == 0 else 4
        ranks = [context(name, r, world_size, layout) for r in range(world_size)]
        T = boundaries[-1]
        document = torch.bucketize(torch.arange(T), torch.tensor(boundaries[1:]), right=True)
        visible = (document[:, None] == document[None, :]).long()
        visible = visible.tril() if causal else visible
        assert torch.equal(pairs(ranks, causal), visible), name


def test_the_ring_joins_rectangles():
    """One document, zigzag: one block a hop, either all queries with half the keys or half with all."""
    cp = context("one document", 1, 4, "zigzag")
    assert with_owner(cp, 1) == [((0, 16), (0, 8))]
    assert with_owner(cp, 0) == [((8, 16), (0, 8))]
    assert with_owner(cp, 2) == [((8, 16), (0, 16))]


def test_hops_end_where_documents_do():
    """Keys travel no farther than a query needs them; on the edges nothing travels."""
    assert context("on the edges", 0, 4, "contiguous").rectangles.hops.item() == 0
    assert context("after the edges", 0, 4, "contiguous").rectangles.hops.item() == 1
    assert context("over three and more ranks", 0, 4, "contiguous").rectangles.hops.item() == 3
    for layout in LAYOUTS:
        for name in STREAMS:
            ranks = [context(name, r, 4, layout) for r in range(4)]
            needed = max(h for cp in ranks for h in range(4) if h == 0 or with_owner(cp, h))
            assert all(cp.rectangles.hops.item() == needed for cp in ranks)


# --- communication ----------------------------------------------------------------------------------------------


class PeakBytes(Inside):
    """The most bytes that tensors of numbers (not tables of indices) made inside held at once."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def ran(self, op, args, kwargs, out):
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.held() > self.peak:
            time.sleep(0.01)  # gloo's threads let go of what has travelled a moment after it came
            self.peak = max(self.peak, self.held())

    def held(self):
        self.storages = {
            key: value for key, value in self.storages.items() if not value[0].expired()
        }
        return sum(size for _, size in self.storages.values())


def peak_bytes(rank, world_size, method, heads=1, of=4, dtype=torch.float64):
    """Forward and backward of 64 tokens a rank, all one document; all-gather in slices of so many heads."""
    cp = build_cp_context(torch.tensor([0, 64 * world_size]), dist.group.WORLD)
    q, k, v, do = (x.detach().to(dtype) for x in make(1, 64, 64, of, of, 16, 16, seed=rank))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with PeakBytes() as memory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(allgather, "heads_of_slice", lambda *_: heads)
        attention(q, k, v, cp_context=cp, method=method).backward(do)
    return memory.peak


def test_memory_of_the_ring_does_not_grow_with_the_ranks(worlds):
    """At fixed T/W two ranks hold two buffers of dK|dV and more ranks three; the all-gather, to compare, grows by
    slices of a quarter of the heads: K|V of two, and dK|dV of one."""
    two, four = (max(worlds(n).run(peak_bytes, "ring")) for n in (2, 4))
    buffer = 64 * 4 * (16 + 16) * 8
    assert two > 4 * buffer  # it sees the buffers
    assert four <= two + buffer
    two, four = (max(worlds(n).run(peak_bytes, "allgather")) for n in (2, 4))
    assert four >= two + 1.5 * buffer


def test_bytes_of_slices_are_what_they_take(worlds):
    """Of eight heads in twos and fours: what the latter take more, with their queries."""
    two, four = (max(worlds(4).run(peak_bytes, "allgather", n, 8, torch.bfloat16)) for n in (2, 4))
    said = [allgather.slice_bytes(256, n, 8, 32, torch.bfloat16) for n in (2, 4)]
    assert 0.7 < (four - two) / (said[1] - said[0]) <= 1


def test_slices_of_the_all_gather():
    """Of 32 heads of 128 in a stream of 32k tokens over four ranks: one where documents are short."""
    q = v = torch.empty(1, 8192, 32, 128, device="meta")
    for documents, slices in (([32768], 4), ([32768 // 2] * 2, 3), ([3277] * 9 + [3275], 1)):
        cp = build_cp_context(torch.tensor(lengths(*documents)), rank=0, world_size=4)
        assert allgather.worthwhile(cp.gathered.pairs, q, v) == slices


def test_slices_keep_within_a_limit():
    """Of a stream that is short, of one of 256k tokens with 30 heads of 128, and longer ones, down to one head."""

    def heads(tokens, Hkv, slices=4):
        found = allgather.heads_at_once(tokens, Hkv, 256, torch.bfloat16, slices)
        assert (
            found == 1
            or allgather.slice_bytes(tokens, found, Hkv, 256, torch.bfloat16)
            <= allgather.GATHER_LIMIT
        )
        return found

    assert [heads(1024, 32, n) for n in (4, 3, 1)] == [8, 16, 32] and heads(1024, 1) == 1
    assert [heads(2**n, 30) for n in (17, 18, 19, 20, 21)] == [10, 5, 2, 1, 1]
    assert heads(2**18, 30, slices=1) == 5


def test_the_all_gather_sends_what_is_needed(monkeypatch):
    """Of packed documents, forward and backward, in float64."""
    sent, original = Counter(), allgather.start_all_to_all
    Hq, Hkv, D, Dv = 2, 1, 6, 10

    def counted(x, send_sizes, receive_sizes, group):
        sent[group_named(group).rank()] += x.nbytes
        return original(x, send_sizes, receive_sizes, group)

    def on_rank(group):
        documents = lengths(*[11, 19, 32, 25, 41, 14, 28, 22, 50, 14])
        cp = build_cp_context(torch.tensor(documents), group)
        q, k, v, do = make(1, 64, 64, Hq, Hkv, D, Dv, seed=0)
        attention(q, k, v, cp_context=cp, method="allgather").backward(do)
        keys = cp.gathered.keys
        assert keys.travel == SOME
        return [int(x.sum()) for x in (keys.leaving, keys.coming)]

    monkeypatch.setattr(allgather, "start_all_to_all", counted)
    for rank, (leaving, coming) in enumerate(run_ranks(on_rank, 4)):
        # K|V leave twice, and dK|dV of what came
        assert sent[rank] == 8 * Hkv * (D + Dv) * (2 * leaving + coming)


def sent_messages(rank, world_size, name, layout):
    """Calls of batch_isend_irecv in forward, and in forward and backward."""
    cp = context(name, rank, world_size, layout, dist.group.WORLD)
    calls, original = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: calls.append(ops) or original(ops)
    try:
        q, k, v, do = local_leaves(inputs(name), cp)
        o = attention(q, k, v, cp_context=cp, method="ring")
        forward = len(calls)
        o.backward(do)
        return forward, len(calls)
    finally:
        dist.batch_isend_irecv = original


def test_what_the_ring_sends(worlds):
    """K|V: W − 1 hops in each direction. dK|dV: as many, the last one home. Nothing where nothing is needed."""
    assert worlds(4).run(sent_messages, "one document", "zigzag") == [(3, 9)] * 4
    assert worlds(4).run(sent_messages, "after the edges", "contiguous") == [(1, 3)] * 4
    assert worlds(4).run(sent_messages, "on the edges", "contiguous") == [(0, 0)] * 4


def bf16_errors(rank, world_size, layout, method, expected):
    cp = context("FLA, three", rank, world_size, layout, dist.group.WORLD)
    q, k, v, do = local_leaves([x.bfloat16() for x in inputs("FLA, three")], cp)
    ours = run(attention, q, k, v, do, cp_context=cp, method=method)
    return [error(x, shard(y, cp)) for x, y in zip(ours, expected)]


@pytest.mark.parametrize("method", METHODS)
def test_half_precision(worlds, method):
    """One rounding more than on one device: each block's o is rounded to bf16 before the merge."""
    q, k, v, do = (x.detach().bfloat16() for x in inputs("FLA, three"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = run(reference, *leaves, do, cu_seqlens=torch.tensor(STREAMS["FLA, three"][0]))
    for o, *gradients in worlds(4).run(bf16_errors, "zigzag", method, expected):
        assert o <= 3 * 2**-9 and max(gradients) <= 5 * 2**-9


# --- choices and errors -----------------------------------------------------------------------------------------


def test_the_work_of_each_method():
    ranks = [context("one document", r, 4, "contiguous") for r in range(4)]
    ring, gathered, heads = ([pairs_computed(cp, method) for cp in ranks] for method in METHODS)
    of_two = [context("one document", r, 4, "contiguous", node_size=2) for r in range(4)]
    assert [pairs_computed(cp, "ulysses+ring") for cp in of_two] == [264, 264, 776, 776]
    assert ring == gathered == [136, 392, 648, 904] and heads == [520.0] * 4


def test_auto_depends_on_shapes_alone():
    def choose(T, Hq, Hkv, W=4, node=1):
        return choose_method(W, node, T, Hq, Hkv, 256, torch.bfloat16)

    assert choose(131072, 32, 32) == choose(1048576, 32, 4) == "ulysses"
    assert choose(131072, 30, 30) == "allgather"
    # in slices that fit: the ring is uneven
    assert choose(262144, 30, 30) == choose(1048576, 30, 30) == "allgather"
    assert choose(2097152, 30, 30) == choose(2097152, 30, 30, W=16, node=8) == "ring"
    # no ring knows trees
    assert choose_method(4, 2, 2097152, 30, 30, 256, torch.bfloat16, trees=True) == "allgather"
    assert (
        choose(2097152, 30, 30, W=16, node=2)
        == choose(2097152, 16, 2, W=64, node=8)
        == "ulysses+ring"
    )
    # of a key head 2 and 4 ranks
    assert choose(131072, 32, 8, W=16) == choose(131072, 32, 8, W=32) == "ulysses"
    # it sends less: K|V of 2 heads, not 16 + 4 of a fourth
    assert choose(131072, 16, 2, W=4) == "allgather"


def errors_raised(rank, world_size):
    cp = context("one document", rank, world_size, "contiguous", dist.group.WORLD)
    T = cp.cut.tokens
    one, three = torch.zeros(1, T, 1, 8), torch.zeros(1, T, 3, 8)
    attempts = {
        "ulysses": lambda: attention(three, three, three, cp_context=cp, method="ulysses"),
        "among 2 ranks": lambda: attention(
            three, three, three, cp_context=cp, method="ulysses+ring"
        ),
        "split 3 heads": lambda: tokens_to_heads(three, cp),
        "^cu_seqlens must not": lambda: attention(
            one, one, one, cp_context=cp, cu_seqlens=torch.tensor([0, T])
        ),
        "q has 31 tokens": lambda: attention(one[:, 1:], one[:, 1:], one[:, 1:], cp_context=cp),
        "^cp_context needs": lambda: attention(one[:, 1:], one, one, cp_context=cp),
        "no group": lambda: attention(
            one, one, one, cp_context=context("one document", rank, world_size, "contiguous")
        ),
    }
    for word, attempt in attempts.items():
        with refused(word):
            attempt()


def test_errors_name_the_argument(worlds):
    worlds(2).run(errors_raised)


def test_a_context_of_one_rank_needs_no_group():
    cp = context("FLA, seven", 0, 1, "zigzag")
    for method in (*METHODS, "ulysses+ring"):
        ours = run(attention, *local_leaves(inputs("FLA, seven"), cp), cp_context=cp, method=method)
        assert all(error(x, y) <= 1e-12 for x, y in zip(ours, on_one_process("FLA, seven", True)))
