"""Which rank needs the state and transition of which fragment, for KCP (ops/exchange/kcp.py).

A chain of fragments begins where the document begins, and its first fragment needs no M: only a fragment that one
document enters, fills and leaves has an M that any rank needs. With two contiguous ranks there is never one.

The shapes of the tables do not depend on the documents, so that compiled code sees one shape; rows beyond the last are
−1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

from titan_linear.ops.layout.fragments import Fragment, Fragments, RankGroup, owned
from titan_linear.ops.layout.tables import OnHost, padded, table

NOTHING, STATE, STATE_AND_M = range(3)  # what is needed of a fragment


class Chains(NamedTuple):
    """This rank's part in one direction. Forward, a slot gives the state that leaves it and gets the state that enters
    it; in reverse, it gives the gradient of the state that entered and gets that of the state that left."""

    # The slot whose incoming state an entry starts from (in reverse, with whose gradient it ends), −1: zeros. One row
    # more than there are entries, so that a table never has a single row.
    entry_slots: Tensor  # [N+1] int32
    # [slots] int32: the entry whose boundary a slot gives: its last (in reverse its first)
    entries: Tensor
    wanted: Tensor  # [slots] int32: NOTHING, STATE or STATE_AND_M
    # [slots + 1] int32: where each slot's links begin, which fold into it in order
    chain_offsets: Tensor
    s_row: Tensor  # [.] int32 for each link: the row of its S_ext among those received
    m_row: Tensor  # [.] int32: and of its M; −1 for a chain's first
    slots: OnHost  # [slots, 2] (entry, wanted) again
    crosses: OnHost  # [1] whether a document crosses a cut, on any rank
    # [., 2] (slot, 0 for S_ext or 1 for M) by receiver; for each receiver S_ext first
    sends: OnHost
    send_counts: OnHost  # [W, 2] numbers of S_ext and M for each receiver
    receive_counts: OnHost  # [W, 2] and from each sender
    links: OnHost  # [., 3] the links again, as (slot, s_row, m_row)
    most: OnHost  # [1] the largest number of S_ext and M that any one rank folds, its own included
    # Of all ranks, for states that travel level by level:
    blocks: Tensor  # [.] int32: what blocks of ranks pass on (`blocks_wanted`)
    blocks_on_host: OnHost  # the same
    node_size: OnHost  # [1] ranks per node
    zigzag: OnHost  # [1] whether every second slot's fragments run from the last rank to the first


def chains(fragments: Fragments, ranks: RankGroup, entries: ndarray, *, reverse: bool) -> Chains:
    """entries: [slots, 2] the first and last entry of each fragment of this rank."""
    rank, world_size = ranks.rank, ranks.world_size
    chain = _walks(fragments, reverse)
    own = [i for i, f in enumerate(fragments) if f.rank == rank]
    slots, blocks = len(own), len(fragments) // len(own)
    received = _received(fragments, chain, own, world_size)
    place = {
        (j, kind): n
        for kind in range(2)
        for n, j in enumerate(j for js in received for j in js[kind])
    }
    in_order = sorted(own, key=lambda i: fragments[i].slot)
    rows = [
        (fragments[i].slot, place[j, 0], place.get((j, 1), -1)) for i in in_order for j in chain[i]
    ]
    links = padded(rows, slots * blocks, 3)
    chain_offsets = np.cumsum([0, *(len(chain[i]) for i in in_order)])
    sent = _sent(fragments, chain, own, world_size)
    sends = [(fragments[j].slot, kind) for js in sent for kind in range(2) for j in js[kind]]
    wanted = [_wanted(f, reverse) for f in owned(fragments, rank)]
    slot_table = np.stack([entries[:, 0 if reverse else 1], wanted], 1).astype(np.int32)
    most = np.zeros(world_size, dtype=np.int64)
    np.add.at(most, [f.rank for f in fragments], [max(2 * len(walk) - 1, 0) for walk in chain])
    passing, zigzag = blocks_wanted(fragments, world_size, reverse=reverse)
    return table(
        Chains,
        entry_slots=_entry_slots(owned(fragments, rank), entries, reverse),
        entries=slot_table[:, 0],
        wanted=slot_table[:, 1],
        chain_offsets=chain_offsets.astype(np.int32),
        s_row=links[:, 1].astype(np.int32),
        m_row=links[:, 2].astype(np.int32),
        slots=slot_table,
        crosses=np.array([any(chain)]),
        sends=padded(sends, 2 * slots * blocks, 2),
        send_counts=np.array([[len(js) for js in kinds] for kinds in sent]),
        receive_counts=np.array([[len(js) for js in kinds] for kinds in received]),
        links=links,
        most=most.max(keepdims=True),
        blocks=passing,
        blocks_on_host=passing,
        node_size=np.array([ranks.node_size]),
        zigzag=np.array([zigzag]),
    )


def _entry_slots(fragments: Fragments, entries: ndarray, reverse: bool) -> ndarray:
    slots = np.full(entries[-1, 1] + 2, -1, dtype=np.int32)
    for slot, f in enumerate(fragments):
        if f.leaves if reverse else f.enters:
            slots[entries[slot, 1 if reverse else 0]] = slot
    return slots


def _wanted(f: Fragment, reverse: bool) -> int:
    if f.through:
        return STATE_AND_M
    return STATE if (f.enters if reverse else f.leaves) else NOTHING


def _walks(fragments: Fragments, reverse: bool) -> list[range]:
    """For each fragment, those that fold into it, in the order of the fold; they are adjacent, so a range."""
    order = range(len(fragments))
    walks, first = [range(0)] * len(fragments), 0
    for i in reversed(order) if reverse else order:
        f, before = fragments[i], i + 1 if reverse else i - 1
        if f.leaves if reverse else f.enters:
            first = first if fragments[before].through else before
            walks[i] = range(first, i, -1 if reverse else 1)
    return walks


Kinds = tuple[list[int], list[int]]  # fragments whose S_ext travels, and those whose M does


def _received(
    fragments: Fragments, chain: list[range], own: list[int], world_size: int
) -> list[Kinds]:
    """What this rank needs, by sender, in global order."""
    needed = sorted({j for i in own for j in chain[i]})
    received: list[Kinds] = [([], []) for _ in range(world_size)]
    for j in needed:
        _add(received[fragments[j].rank], j, fragments[j])
    return received


def _sent(fragments: Fragments, chain: list[range], own: list[int], world_size: int) -> list[Kinds]:
    """What others need from this rank, by receiver, in global order."""
    sent: list[Kinds] = [([], []) for _ in range(world_size)]
    for j in own:
        receivers = set()
        for step in (1, -1):  # fragments whose chains hold j lie next to j, without a gap
            i = j + step
            while 0 <= i < len(fragments) and j in chain[i]:
                receivers.add(fragments[i].rank)
                i += step
        for r in receivers:
            _add(sent[r], j, fragments[j])
    return sent


def _add(kinds: Kinds, j: int, f: Fragment) -> None:
    kinds[0].append(j)
    if f.through:
        kinds[1].append(j)


# --- What blocks of ranks pass on, where states travel level by level (layout/levels.py) -----------------------------


def block_sizes(world_size: int) -> list[int]:
    """Number of ranks of the blocks that a level may have, in the order of `blocks_wanted`."""
    return [n for n in range(1, world_size) if world_size % n == 0]


def blocks_wanted(fragments: Fragments, world_size: int, *, reverse: bool) -> tuple[ndarray, bool]:
    """[Σ W/n · slots] int32: for blocks of each of `block_sizes`, in rank order, and for each slot, whether the block
    passes on NOTHING, a STATE, or a STATE_AND_M: what a document carries from its last fragment into the next, and
    whether what enters the first fragment has a part in it; in reverse, from its first fragment into the one before.
    And whether the fragments of some slots run from the last rank to the first."""
    slots = len(fragments) // world_size
    through, passes, place = np.zeros((3, world_size, slots), dtype=np.int64)
    owner = tuple(np.array([(f.rank, f.slot) for f in fragments]).T)
    through[owner] = [f.through for f in fragments]
    passes[owner] = [f.enters if reverse else f.leaves for f in fragments]
    place[owner] = np.arange(len(fragments))
    # [slots] whether a slot's fragments run from the last rank to the first
    falls = place[0] > place[-1]
    tables = []
    for n in block_sizes(world_size):
        # [W/n, 2, slots], of each block's first rank and its last
        last = passes.reshape(-1, n, slots)[:, [0, -1]]
        passed = np.where(falls == reverse, last[:, 1], last[:, 0])
        whole = through.reshape(-1, n, slots).all(1)
        tables.append(np.where(whole, STATE_AND_M, np.where(passed, STATE, NOTHING)).ravel())
    return np.concatenate([np.zeros(0), *tables]).astype(np.int32), bool(falls.any())
