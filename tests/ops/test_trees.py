"""Prefix trees beside the same documents packed apart, in float64: recurrences, convolution, softmax attention."""

import re
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch

from tests.ops.inputs import (
    DEVICE,
    MAKERS,
    SMALL,
    boundaries,
    call,
    leaves,
    relative_error,
    tokens_of,
)
from tests.refusals import refused
from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops import attention, build_cp_context, causal_conv1d
from titan_linear.ops.attention import _chosen
from titan_linear.ops.layout.tree_tables import exchanged

TOLERANCE = 1e-12
PARAMETERS = {"A_log", "A", "D", "dt_bias", "weight", "bias"}
MANY = ("breadth_first", "random_1")
TREES = {  # lengths and parents of nodes, depth first but for one
    "siblings": ([50, 30, 16, 32], [-1, 0, 0, 0]),
    "documents_between": ([5, 20, 1, 9, 30, 31, 32], [-1, -1, 1, 1, -1, 4, -1]),
    "single_tokens": ([1, 1, 1, 1, 1, 1, 1, 1, 2, 6], [-1, 0, 1, 2, 2, 0, 5, 6, -1, 8]),
    "chain": ([20, 1, 2, 40, 1], [-1, 0, 1, 2, 3]),
    "over_ranks": ([70, 10, 150, 2, 24], [-1, 0, 1, 1, 0]),
    "breadth_first": ([40, 20, 30, 22, 16], [-1, 0, 0, 1, 2]),
}


def random_tree(seed):
    """Depth first: each node continues one on the path to the node before, or none."""
    rng = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(n, (), generator=rng))

    lengths, parents, path, children = [], [], [], {}
    while sum(lengths) < 256:
        while path and (len(path) == 12 or children[path[-1]] == 16 or draw(3) == 0):
            path.pop()
        parents.append(path[-1] if path else -1)
        if path:
            children[path[-1]] += 1
        path.append(len(lengths))
        children[len(lengths)] = 0
        lengths.append(min(1 if draw(3) == 0 else 1 + draw(24), 256 - sum(lengths)))
    return lengths, parents


TREES |= {f"random_{seed}": random_tree(seed) for seed in range(3)}


def paths(name):
    """Each document as rows of the tree."""
    lengths, parents = TREES[name]
    cu = boundaries(lengths).tolist()
    rows = []
    for node, parent in enumerate(parents):
        rows.append([*(rows[parent] if parent >= 0 else []), *range(cu[node], cu[node + 1])])
    return [rows[node] for node in range(len(parents)) if node not in parents]


def inputs_of(op, T):
    rng = torch.Generator().manual_seed(0)
    shapes = {
        "conv": {"x": (1, T, 6), "weight": (6, 4), "bias": (6,)},
        "attention": {"q": (1, T, 4, 8), "k": (1, T, 4, 8), "v": (1, T, 4, 6)},
    }
    if op in shapes:
        return {
            n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes[op].items()
        }
    return MAKERS[op](T, **SMALL[op])


def run_op(op, x, **options):
    method = options.pop("method", None)
    if op == "conv":
        return causal_conv1d(**x, activation="silu", **options)[0]
    if op == "attention":
        return attention(**x, **options, **({"method": method} if method else {}))
    return call(op, x, **options, **({"cp_method": method} if method else {}))[0]


@cache
def apart(op, name):
    """Output and gradients by tokens of the tree, from its documents packed apart; a token's output is that in the
    first document that has it."""
    lengths, documents = TREES[name][0], paths(name)
    x = leaves(inputs_of(op, sum(lengths)))
    rows = torch.tensor([*chain(*documents)])
    y = run_op(
        op,
        {n: t if n in PARAMETERS else t[:, rows] for n, t in x.items()},
        cu_seqlens=boundaries([len(d) for d in documents]),
    )
    first = torch.tensor([rows.tolist().index(t) for t in range(sum(lengths))])
    y = y[:, first]
    return [y.detach(), *torch.autograd.grad(y, list(x.values()), gradient_of(y))]


def gradient_of(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def check(op, name, world_size=1, layout="contiguous", method=None):
    lengths, parents = TREES[name]
    want = apart(op, name)
    whole = inputs_of(op, sum(lengths))

    def on_rank(group=None):
        trees = {"cu_seqlens": boundaries(lengths), "parents": torch.tensor(parents)}
        context = build_cp_context(**trees, layout=layout, group=group) if group else None
        mine = tokens_of(context) if group else torch.arange(sum(lengths))
        given = {"cp_context": context, "method": method} if group else trees
        x = leaves({n: t if n in PARAMETERS else t[:, mine] for n, t in whole.items()})
        y = run_op(op, x, **given)
        return mine, [
            y.detach(),
            *torch.autograd.grad(y, list(x.values()), gradient_of(want[0])[:, mine]),
        ]

    ranks = run_ranks(on_rank, world_size) if world_size > 1 else [on_rank()]
    order = torch.cat([mine for mine, _ in ranks]).argsort()
    for n, right, *got in zip(["y", *whole], want, *(results for _, results in ranks), strict=True):
        found = sum(got) if n in PARAMETERS else torch.cat(got, 1)[:, order]
        assert relative_error(found, right) < TOLERANCE, (n, relative_error(found, right))


OPS = pytest.mark.parametrize("op", [*MAKERS, "conv", "attention"])


@OPS
@pytest.mark.parametrize("name", TREES)
def test_one_rank(op, name):
    check(op, name)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@OPS
def test_ranks(op, layout, world_size):
    for name in ("over_ranks", "random_0") if world_size == 8 else TREES:
        if op in ("kda", "attention") or name in ("siblings", "single_tokens", "random_1"):
            check(op, name, world_size, layout, "allgather" if op == "attention" else None)


@pytest.mark.parametrize("op", ["rwkv7", "attention"])
def test_shared_heads(op):
    check(op, "over_ranks", 2, "zigzag", "ulysses")


@pytest.mark.parametrize("op", ["kda", "ssd", "conv"])
def test_kernels(op):
    """In float32, beside PyTorch's operations."""
    lengths, parents = TREES["siblings"]
    context = build_cp_context(
        boundaries(lengths),
        parents=torch.tensor(parents),
        rank=0,
        world_size=1,
        device=torch.device(DEVICE),
    )
    sizes = {
        "kda": {"H": 1, "HV": 1, "V": 16, "gate": "slow"},
        "ssd": {"G": 1, "heads": 1, "P": 16, "bias": -7.0},
    }
    x = MAKERS[op](sum(lengths), **sizes[op]) if op in sizes else inputs_of(op, sum(lengths))

    def results(impl):
        own = leaves({n: t.float().to(DEVICE) for n, t in x.items()})
        y = run_op(op, own, cp_context=context, impl=impl)
        return [y.detach(), *torch.autograd.grad(y, list(own.values()), gradient_of(y).to(y))]

    for got, right in zip(results("triton"), results("torch"), strict=True):
        assert relative_error(got.cpu(), right.cpu()) < 2e-6


@pytest.mark.parametrize("name", ["siblings", "single_tokens", "over_ranks"])
def test_half_precision(name):
    """Parts of a row, and their sums, are rounded to bf16: within the bounds of one block (test_attention.py)."""
    lengths, parents = TREES[name]
    trees = {"cu_seqlens": boundaries(lengths), "parents": torch.tensor(parents)}
    half = {n: x.bfloat16() for n, x in inputs_of("attention", sum(lengths)).items()}

    def results(dtype):
        x = leaves({n: x.to(dtype) for n, x in half.items()})
        y = run_op("attention", x, **trees)
        return [
            y.detach(),
            *torch.autograd.grad(y, list(x.values()), gradient_of(y).bfloat16().to(dtype)),
        ]

    o, *gradients = map(relative_error, results(torch.bfloat16), results(torch.float64))
    assert o <= 2 * 2**-9 and max(gradients) <= 4 * 2**-9


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", TREES)
def test_only_points_with_children_on_other_ranks_travel(name, layout):
    """And there are at most as many folds as these, and one."""
    lengths, parents = TREES[name]
    cu = boundaries(lengths)
    for W in (2, 4):
        trees = {
            "cu_seqlens": cu,
            "parents": torch.tensor(parents),
            "world_size": W,
            "layout": layout,
        }
        contexts = [build_cp_context(**trees, rank=rank) for rank in range(W)]
        owner = torch.cat(
            [torch.full_like(tokens_of(cp), rank) for rank, cp in enumerate(contexts)]
        )
        owner = owner[torch.cat([tokens_of(cp) for cp in contexts]).argsort()].tolist()
        before = {
            a: cu[parent + 1].item() - 1 for a, parent in zip(cu.tolist(), parents) if parent >= 0
        }
        roots = [a for a, parent in zip(cu.tolist(), parents) if parent < 0]
        points, size = set(), sum(lengths) // len(contexts[0].cut.fragments)
        for t in range(cu[-1]):
            path = [t]
            while path[-1] not in roots:
                path.append(before.get(path[-1], path[-1] - 1))
            ends = [u for u, v in zip(path[1:], path) if v in before or v % size == 0]
            points |= {u for u in ends if owner[u] != owner[t]}
        sent = max(sum(owner[u] == rank for u in points) for rank in range(W))
        for cp in contexts:
            states, folds = exchanged(cp.tables.boundaries.tree)
            assert states == sent and folds <= len(points) + 1


@pytest.mark.parametrize("name", TREES)
def test_keys_are_at_most_twice_those_of_the_documents_apart(name):
    """Each run that is no leaf ends before one, whose path is longer. Where few rectangles lie below them, none
    is copied."""
    lengths, parents = TREES[name]
    context = build_cp_context(
        boundaries(lengths), parents=torch.tensor(parents), rank=0, world_size=1
    )
    of = context.stream.paths
    assert (of.rows is None) == (name not in MANY) == bool(of.spans.below.any())
    assert of.rows is None or len(of.rows) <= 2 * sum(map(len, paths(name)))


@pytest.mark.parametrize("parents", [[-1, -1], [-1, 0]])
def test_compiled_code_chooses_a_method_in_one_graph(parents):
    context = build_cp_context(
        boundaries([64, 64]), parents=torch.tensor(parents), rank=0, world_size=2
    )
    choose = torch.compile(_chosen, fullgraph=True, backend="eager")
    assert (
        choose(context, *(x[:, :, :3] for x in inputs_of("attention", 64).values())) == "allgather"
    )


def test_segments_of_entries_that_states_enter_or_leave_are_computed():
    """Those of a node in one segment, too, unless it is a tree of its own."""
    cu = boundaries([8192, 64, 64, 8192])
    where = {"rank": 0, "world_size": 1, "programs": (2,)}
    parents = torch.tensor([-1, 0, -1, -1])
    segments = build_cp_context(cu, parents=parents, **where).stream.segments[2]
    small, alone = segments.offsets[1:3].tolist()
    assert (
        segments.wanted.tolist() == [2 * (n != alone) for n in range(len(segments.wanted))]
        and small == alone - 1
    )


@pytest.mark.parametrize("op", ["gdn", "conv", "attention"])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_in_its_leaf(op, world_size, value):
    """What one leaf holds changes no bit of the outputs of others and of its ancestors, nor of gradients of others."""
    lengths, parents = TREES["siblings"]
    cu, x = boundaries(lengths), inputs_of(op, sum(lengths))
    leaf = slice(int(cu[1]), int(cu[2]))

    def on_rank(changed, group=None):
        where = {"group": group} if group else {"rank": 0, "world_size": 1}
        context = build_cp_context(cu, parents=torch.tensor(parents), **where)
        mine = tokens_of(context)
        own = leaves({n: t if n in PARAMETERS else t[:, mine] for n, t in changed.items()})
        y = run_op(
            op, own, cp_context=context, method="allgather" if op == "attention" and group else None
        )
        tokens = [t for n, t in own.items() if n not in PARAMETERS]
        grads = torch.autograd.grad(y, tokens, torch.ones_like(y))
        return y.detach(), [grad[:, mine >= leaf.stop] for grad in grads], mine

    def outputs(changed):
        ranks = (
            run_ranks(lambda group: on_rank(changed, group), world_size)
            if world_size > 1
            else [on_rank(changed)]
        )
        y = torch.cat([y for y, _, _ in ranks], 1)
        y[:, leaf] = 0
        return [y, *(torch.cat(grads, 1) for grads in zip(*(grads for _, grads, _ in ranks)))]

    poisoned = {n: t.clone() for n, t in x.items()}
    for n in x:
        if n not in PARAMETERS:
            poisoned[n][:, leaf] = value
    assert all(map(torch.equal, outputs(x), outputs(poisoned)))


@pytest.mark.parametrize(
    "parents, words",
    [
        ([-1, 1, 0], "parents[1] = 1 must be −1, or a segment before 1"),
        ([-1, 2, 0], "parents[1] = 2"),
        ([-2, 0, 0], "parents[0] = -2"),
        ([-1, 0], "parents (int64 [2]) must be integers [N] = [3]"),
        ([-1.0, 0.0, 0.0], " [3]) must be integers [N] = [3]"),
    ],
)
@pytest.mark.parametrize("given_as", [list, torch.tensor])
def test_parents_that_are_no_tree(parents, words, given_as):
    cu_seqlens, parents = boundaries([4, 4, 8]), given_as(parents)
    with refused(re.escape(words)):
        build_cp_context(cu_seqlens, rank=0, world_size=1, parents=parents)


@pytest.mark.parametrize("given_as", [list, tuple, np.array])
def test_parents_need_not_be_a_tensor(given_as):
    cu_seqlens, parents, where = boundaries([4, 4, 8]), [-1, 0, 0], {"rank": 0, "world_size": 1}
    context = build_cp_context(cu_seqlens, parents=given_as(parents), **where)
    assert context.position_ids.tolist() == [*range(8), *range(4, 12)]
    x = inputs_of("kda", 16)
    o, want = (
        run_op("kda", x, cu_seqlens=cu_seqlens, parents=each)
        for each in (given_as(parents), torch.tensor(parents))
    )
    assert torch.equal(o, want)


def test_other_refusals():
    x = inputs_of("kda", 16)
    with refused("parents comes with cu_seqlens alone"):
        run_op("kda", x, parents=torch.tensor([-1, 0]))
    where = {"rank": 0, "world_size": 1, "parents": torch.tensor([-1, 0])}
    with refused("a segment before 1 in its stream"):
        build_cp_context(boundaries([8, 8]), num_streams=2, **where)
    with refused("segments without tokens"):
        build_cp_context(torch.tensor([0, 8, 8, 16]), **where)
    context = build_cp_context(boundaries([8, 8]), **where)
    with refused("causal = False"):
        attention(**inputs_of("attention", 16), causal=False, cp_context=context)
    with refused("method = 'ring': .* parents, which no ring knows"):
        _ = build_cp_context(boundaries([8, 8]), **where | {"world_size": 2}).rectangles
