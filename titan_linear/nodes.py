"""Where the nodes of a run meet: a rendezvous for torch's elastic agent, and the store that its workers use.

torch's own rendezvous handlers give ranks by address, use a second port, or do not notice restarts on other nodes.
"""

from __future__ import annotations

import signal
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from titan_linear.process import STOPPED, Node

PREPARE, RETURN = 24 * 3600.0, 1800.0  # seconds for the nodes to meet: after preparing their data, after a crash
LEAVE = 60.0  # seconds that node 0 waits for the others to leave
HEAR = 15.0  # seconds that a node waits to hear why it lost a rank: more than a worker's end and an agent's GRACE take


class Nodes(RendezvousHandler):
    """Where the nodes of a run meet before each start of its workers: a store on node 0.

    Starts are numbered from 0. A node that has already joined the current start, itself or through a predecessor that
    crashed, opens the next; the others notice (`num_nodes_waiting`), kill their workers and follow. A node may die
    after it has come: so that no other starts without it, each node says when it has seen all, and starts when all have
    said so.

    Keys of the store: `start`, the current one; `N/came/R` and `N/ready/R`, for start N and node R; `processes/R`;
    `closed` and `stopped`, if no other start follows; `left`, the number of nodes that have left.
    """

    use_agent_store = True

    def __init__(self, here: Node):
        self.here, self.start = here, -1
        self.store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        patience = RETURN if self.store else PREPARE
        self.store = self.store or _open_store(self.here)
        began, said = time.monotonic(), set()
        self._join()
        while missing := self._missing():
            if self.is_closed():
                raise RendezvousClosedError
            if self.num_nodes_waiting():
                self._join()
            waited, who = time.monotonic() - began, f"node {', '.join(map(str, missing))}"
            if waited > patience:
                raise RendezvousTimeoutError(f"{who} did not come in {patience / 60:.0f} minutes")
            if waited > 5 and not said.issuperset(missing):
                print(f"waiting for {who} of {self.here.count}", flush=True)
                said.update(missing)
            time.sleep(0.1)
        self._check_alike()
        return RendezvousInfo(
            PrefixStore(f"start-{self.start}", self.store), self.here.rank, self.here.count,
            RendezvousStoreInfo(self.here.address, self.store.port),
        )  # fmt: skip

    def _join(self) -> None:
        while True:
            self.start = self.store.add("start", 0)
            self.store.set(f"processes/{self.here.rank}", str(self.here.processes))
            if self.store.add(f"{self.start}/came/{self.here.rank}", 1) == 1:
                return
            self.store.compare_set("start", str(self.start), str(self.start + 1))

    def _missing(self) -> list[int]:
        """Nodes that have not come; if all have, those that have not said that they have seen so."""
        if missing := self._without("came"):
            return missing
        self.store.set(f"{self.start}/ready/{self.here.rank}", "")
        return self._without("ready")

    def _without(self, word: str) -> list[int]:
        """Nodes that have not set this key of the current start."""
        return [n for n in range(self.here.count) if not self.store.check([f"{self.start}/{word}/{n}"])]

    def _check_alike(self) -> None:
        for node in range(self.here.count):
            if (count := int(self.store.get(f"processes/{node}"))) != self.here.processes:
                raise ValueError(
                    f"NGPU = {self.here.processes} on node {self.here.rank} and {count} on node {node}; give every "
                    "node the same number of processes"
                )

    def num_nodes_waiting(self) -> int:
        """More than 0 if the workers have to be killed, for another start or because none follows.

        Raises:
            SignalException: another node was asked to stop, so this one stops too.
        """
        if self.store.add("stopped", 0):
            raise SignalException("stopped on another node", signal.SIGTERM)
        return self.store.add("start", 0) - self.start + self.store.add("closed", 0)

    def hear(self) -> None:
        """After the loss of another node's rank, wait for that node to say what follows, if it still lives.

        Raises:
            RendezvousClosedError: no other start follows.
            SignalException: that node was asked to stop.
        """
        deadline = time.monotonic() + HEAR
        while self.here.count > 1 and not self.num_nodes_waiting() and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.is_closed():
            raise RendezvousClosedError

    def is_closed(self) -> bool:
        return self.store.add("closed", 0) > 0

    def set_closed(self) -> None:
        self.store.add("closed", 1)

    def leave(self, code: int, *, at_once: bool) -> None:
        """Tell the others that this node ends, and how. Node 0, whose store the others' workers use, stays until they
        have ended."""
        try:
            if self.store is None or self.here.count == 1:
                return
            if code in STOPPED:
                self.store.add("stopped", 1)
            elif code:
                self.set_closed()
            self.store.add("left", 1)
            deadline = time.monotonic() + LEAVE
            while self.here.rank == 0 and not at_once and self.store.add("left", 0) < self.here.count:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.1)
        except (DistError, SignalException):
            pass  # node 0 is gone, or is asked to stop

    def get_backend(self) -> str:
        return "nodes"

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def _open_store(here: Node) -> TCPStore:
    timeout = timedelta(seconds=60)
    if here.rank == 0:
        try:
            return TCPStore(here.address, here.port, is_master=True, wait_for_workers=False, timeout=timeout)
        except DistError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"MASTER_ADDR = {here.address!r}, MASTER_PORT = {here.port} cannot be opened on node 0 ({reason}); "
                "give its own address, and a port that is free there"
            ) from None
    began, said = time.monotonic(), False
    while True:  # a signal ends this loop, but would not end PyTorch's own wait for a connection
        try:
            socket.create_connection((here.address, here.port), timeout=1).close()
            return TCPStore(here.address, here.port, is_master=False, timeout=timeout)
        except OSError as error:
            waited = time.monotonic() - began
            if waited > PREPARE:
                raise RendezvousTimeoutError(f"node 0 ({here.address}:{here.port}) does not answer: {error}") from None
            if waited > 5 and not said:
                print(f"waiting for node 0 at {here.address}:{here.port}", flush=True)
                said = True
            time.sleep(0.5)
