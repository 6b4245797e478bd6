"""Tables of KCP (ops/exchange/kcp.py): who needs which fragment's state and transition.

A chain of fragments begins where a document begins, and its first fragment needs no M. M is
needed only for a fragment that one document enters, fills and leaves. Two contiguous ranks
never have such a fragment.

The shapes of the tables do not depend on the documents, so that compiled code sees a single
shape; unused rows are −1.
"""

from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

from titan_linear.ops.layout.fragments import Fragment, Fragments, RankGroup, owned
from titan_linear.ops.layout.tables import OnHost, padded, table

NOTHING, STATE, STATE_AND_M = range(3)  # parts of (S_ext, M) that are needed of a fragment


class Chains(NamedTuple):
    """This rank's part in one direction of the exchange of states.

    Forward, a slot provides the state that leaves it and receives the state that enters it.
    In reverse, it provides the gradient of the state that entered and receives the gradient
    of the state that left.
    """

    # [N+1] int32: the slot whose incoming state each entry starts from (in reverse, whose
    # gradient it ends with); −1: zeros. The extra row avoids tables with a single row.
    entry_slots: Tensor
    # [slots] int32: the entry whose boundary a slot provides: its last (in reverse its
    # first).
    entries: Tensor
    wanted: Tensor  # [slots] int32: NOTHING, STATE or STATE_AND_M
    # [slots + 1] int32: first link of each slot; a slot's links are folded in order.
    chain_offsets: Tensor
    s_row: Tensor  # [.] int32: for each link, the row of its S_ext among the received ones
    m_row: Tensor  # [.] int32: the same for its M; −1 for the first link of a chain
    slots: OnHost  # [slots, 2]: (entry, wanted) on the host
    crosses: OnHost  # [1]: whether a document crosses a cut, on any rank
    # [., 2]: (slot, 0 for S_ext or 1 for M) by receiver; for each receiver S_ext first.
    sends: OnHost
    send_counts: OnHost  # [W, 2]: numbers of S_ext and M for each receiver
    receive_counts: OnHost  # [W, 2]: numbers of S_ext and M from each sender
    links: OnHost  # [., 3]: the links as (slot, s_row, m_row) on the host
    most: OnHost  # [1]: largest number of S_ext and M that any rank folds, its own included
    # The following fields describe all ranks, for states that travel level by level.
    blocks: Tensor  # [.] int32: what blocks of ranks pass on (`blocks_wanted`)
    blocks_on_host: OnHost  # the same on the host
    node_size: OnHost  # [1]: ranks per node
    # [1]: whether every second slot's fragments run from the last rank to the first.
    zigzag: OnHost


def chains(fragments: Fragments, ranks: RankGroup, entries: ndarray, *, reverse: bool) -> Chains:
    """Build the tables of one direction.

    Args:
        entries: [slots, 2], the first and last entry of each fragment of this rank.
    """
    # The fragments that fold into each fragment, and the ones that this rank receives.
    rank = ranks.rank
    world_size = ranks.world_size
    chain = _walks(fragments, reverse)
    own = [i for i, f in enumerate(fragments) if f.rank == rank]
    slots = len(own)
    blocks = len(fragments) // len(own)
    needed = {j for i in own for j in chain[i]}
    # S_ext, and M of the fragments that have one, come by sender, in global order.
    received = [(fragments[j].rank, j) for j in sorted(needed)]
    received.sort(key=itemgetter(0))
    s_rows = {j: row for row, (_, j) in enumerate(received)}
    m_rows = {j: row for row, j in enumerate(j for j in s_rows if fragments[j].through)}
    # The links of each slot's chain, as rows of the received S_ext and M.
    in_order = sorted(own, key=lambda i: fragments[i].slot)
    rows = [(fragments[i].slot, s_rows[j], m_rows.get(j, -1)) for i in in_order for j in chain[i]]
    links = padded(rows, slots * blocks, 3)
    chain_offsets = np.cumsum([0, *(len(chain[i]) for i in in_order)])
    # What this rank sends, and what its own fragments must provide.
    sent = _sent(fragments, chain, own)
    parts = []
    for receiver, j in sent:
        for kind in range(1 + fragments[j].through):
            parts.append((receiver, kind, fragments[j].slot))
    sends = [(slot, kind) for _, kind, slot in sorted(parts, key=itemgetter(0, 1))]
    wanted = [_wanted(f, reverse) for f in owned(fragments, rank)]
    slot_table = np.stack([entries[:, 0 if reverse else 1], wanted], 1).astype(np.int32)
    # A chain of n links has n S_ext and n − 1 M.
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
        send_counts=_counts(fragments, sent, world_size),
        receive_counts=_counts(fragments, received, world_size),
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
    """Return, for each fragment, the fragments that fold into it, in the order of the fold.

    These are adjacent fragments, so each result is a range.
    """
    order = range(len(fragments))
    walks = [range(0)] * len(fragments)
    first = 0
    for i in reversed(order) if reverse else order:
        f = fragments[i]
        before = i + 1 if reverse else i - 1
        if f.leaves if reverse else f.enters:
            first = first if fragments[before].through else before
            walks[i] = range(first, i, -1 if reverse else 1)
    return walks


def _sent(fragments: Fragments, chain: list[range], own: list[int]) -> list[tuple[int, int]]:
    """Return what other ranks need from this rank: (receiver, fragment), in global order."""
    sent = []
    for j in own:
        receivers = set()
        # Fragments whose chains contain j are next to j, without a gap.
        for step in (1, -1):
            i = j + step
            while 0 <= i < len(fragments) and j in chain[i]:
                receivers.add(fragments[i].rank)
                i += step
        for receiver in receivers:
            sent.append((receiver, j))
    return sent


def _counts(fragments: Fragments, moved: list[tuple[int, int]], world_size: int) -> ndarray:
    """Return the numbers of S_ext and M [W, 2] among (rank, fragment)."""
    counts = np.zeros((world_size, 2), dtype=np.int64)
    for rank, j in moved:
        counts[rank] += 1, fragments[j].through
    return counts


# --- What blocks of ranks pass on, where states travel level by level (layout/levels.py) --


def block_sizes(world_size: int) -> list[int]:
    """Return the numbers of ranks of the blocks in `blocks_wanted`, in its order."""
    return [n for n in range(1, world_size) if world_size % n == 0]


def blocks_wanted(fragments: Fragments, world_size: int, *, reverse: bool) -> tuple[ndarray, bool]:
    """Return what blocks of ranks pass on, and whether any fragments run from the last rank
    down.

    A block passes on a STATE if a document continues from its last fragment into the next,
    and a STATE_AND_M if that state also depends on what enters the first fragment. In
    reverse it passes on from its first fragment into the one before.

    Returns:
        [Σ W/n · slots] int32, NOTHING, STATE or STATE_AND_M: for blocks of each of
            `block_sizes`, in rank order, and for each slot; and whether the fragments of
            some slots run from the last rank to the first.
    """
    # Arrange the fragments' properties by rank and slot.
    slots = len(fragments) // world_size
    through, passes, place = np.zeros((3, world_size, slots), dtype=np.int64)
    owner = tuple(np.array([(f.rank, f.slot) for f in fragments]).T)
    through[owner] = [f.through for f in fragments]
    passes[owner] = [f.enters if reverse else f.leaves for f in fragments]
    place[owner] = np.arange(len(fragments))
    # [slots]: whether a slot's fragments run from the last rank to the first.
    falls = place[0] > place[-1]
    tables = []
    for n in block_sizes(world_size):
        # [W/n, 2, slots]: values of each block's first and last rank.
        last = passes.reshape(-1, n, slots)[:, [0, -1]]
        passed = np.where(falls == reverse, last[:, 1], last[:, 0])
        whole = through.reshape(-1, n, slots).all(1)
        tables.append(np.where(whole, STATE_AND_M, np.where(passed, STATE, NOTHING)).ravel())
    return np.concatenate([np.zeros(0), *tables]).astype(np.int32), bool(falls.any())
