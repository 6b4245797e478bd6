"""The proofs of a run before it starts (`doctor.at_start`), in their own process, which leaves nothing on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prove(argv: list[str], world_size: int) -> None:
    """Run the doctor (`titan_linear.proof.doctor`) for a run of `world_size` processes.

    Raises:
        SystemExit: something does not hold; the console says what.
    """
    environment = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    command = [sys.executable, "-m", "titan_linear.proof.doctor", *argv]
    code = subprocess.run(command, env=environment | {"NGPU": str(world_size)}, check=False).returncode
    if code:
        print("doctor.at_start = true: the run is not started", file=sys.stderr, flush=True)
        raise SystemExit(code)
