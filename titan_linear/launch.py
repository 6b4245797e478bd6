"""Start a run, or this machine's part of it: `NGPU=4 python -m titan_linear.launch --training.steps 100`.

Everything that can be refused is refused here, before a process starts: the configuration, the run's folder, the
corpus, the tokenizer, the checkpoint; and each node writes its token cache. Then the nodes meet, and each starts its
workers (agent.py). `torchrun -m titan_linear.train` starts workers too, without what agent.py adds.

NGPU                      number of processes on this node
NNODES, NODE_RANK         number of nodes, and which this one is (default: 1, 0)
MASTER_ADDR, MASTER_PORT  where node 0 is (with several nodes; default port: 29500)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import nullcontext
from itertools import pairwise
from types import FrameType

from titan_linear.config import check_config, load_config
from titan_linear.process import MISTAKE, Node, outliving_readers, run_command
from titan_linear.rundir import check_resume, claimed, copied_configuration


def main(argv: list[str]) -> int:
    """Check, then run. Return the exit code: 0, 2 for a user's mistake, 130, 143, or a failed worker's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_now)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # meant for the workers, once there are any
    if asks_for_flavors(argv):
        from titan_linear.models.presets import flavors

        print(flavors())
        return 0
    try:
        config = load_config(argv)
        node = this_node()
        check_config(config, node.world_size)
        if warning := copied_configuration(config):
            print(warning, flush=True)
        # Node 0 holds the folder's lock for all nodes.
        with claimed(config) if node.rank == 0 else nullcontext():
            for change in check_resume(config):
                print(f"resuming with {change}", flush=True)
            from titan_linear.agent import run_workers  # slow to import; --help and misspelt keys do without
            from titan_linear.preflight import preflight

            preflight(config, node.world_size, node.processes)
            if config.doctor.at_start and node.rank == 0:
                from titan_linear.proof.start import prove

                prove(argv, node.world_size)
            with outliving_readers():
                return run_workers("titan_linear.train", argv, node, config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE


def asks_for_flavors(argv: list[str]) -> bool:
    return any(flag in ("-h", "--help") and what == "flavors" for flag, what in pairwise(argv))


def this_node() -> Node:
    """Read this node's place in the run from the environment.

    Raises:
        ValueError: a variable is missing or wrong.
    """
    processes, nodes = process_count(), _number("NNODES", "1", 1)
    if nodes == 1:
        return Node(processes)
    rank, port = _number("NODE_RANK", "", 0), _number("MASTER_PORT", "29500", 1)
    if rank >= nodes:
        raise ValueError(f"NODE_RANK = {rank} must be less than NNODES = {nodes}; nodes are numbered from 0")
    address = os.environ.get("MASTER_ADDR", "")
    try:
        socket.getaddrinfo(address or None, port)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ValueError(
            f"MASTER_ADDR = {address!r}, MASTER_PORT = {port} is no address ({error}); give node 0's"
        ) from None
    if not address:
        raise ValueError(f"NNODES = {nodes} needs MASTER_ADDR, the address of node 0; set it, the same on every node")
    return Node(processes, rank, nodes, address, port)


def _number(name: str, default: str, least: int) -> int:
    value = os.environ.get(name, "") or default
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} = {value!r} must be a number, {least} or more")
    return int(value)


def process_count() -> int:
    """Number of processes on this node: NGPU, else the number of GPUs present, else 2, on the CPU.

    Raises:
        ValueError: NGPU is not a positive number, or more than the GPUs present.
    """
    import torch

    present, asked = torch.cuda.device_count(), os.environ.get("NGPU", "")
    if not asked:
        return present or 2
    if not asked.isdecimal() or int(asked) < 1:
        raise ValueError(f"NGPU = {asked!r} must be a number of processes, 1 or more")
    if present and int(asked) > present:
        raise ValueError(f"NGPU = {asked} is more than the {present} GPUs present; use at most {present}")
    return int(asked)


def _exit_now(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    run_command(main)
