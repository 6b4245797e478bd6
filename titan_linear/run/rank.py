"""One process of a run, from its command line to its exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_linear.config import Config, load_config
from titan_linear.distributed.ending import Ending, explain, report
from titan_linear.distributed.groups import host_group, on_rank_0, process_group
from titan_linear.distributed.hangs import Watch, watched
from titan_linear.distributed.process import (
    be_deterministic,
    die_with_parent,
    ignore_warnings_of_torch,
    outliving_readers,
    under_launcher,
)
from titan_linear.run.clearance import cleared
from titan_linear.storage.rundir import CONFIG, RECORDERS

Train = Callable[[Config, Watch, Ending], None]


def run_rank(argv: list[str], train: Train) -> int:
    """Join the run's processes and train; return the exit code. What ends the run is said by `report`, or inside the
    process group by `Ending.leave`."""
    die_with_parent()
    ignore_warnings_of_torch()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # except while it trains (profiling.py)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the launcher blocks it
    with outliving_readers():
        try:
            _join(load_config(argv), train)
        except Exception as error:
            return report(error)
    return 0  # to torchrun anything else is a failure


def _join(config: Config, train: Train) -> None:
    if config.debug.deterministic:
        be_deterministic()
    folder = Path(config.job.dump_folder)
    with process_group(timedelta(seconds=config.comm.init_timeout_seconds)) as ending, ExitStack() as held:
        watch = held.enter_context(watched(folder / RECORDERS, ending.store, config.comm.train_timeout_seconds))
        if not under_launcher():  # torchrun: once joined, the others can wait while rank 0 checks and tokenises
            world_size = dist.get_world_size()
            node_size = int(os.environ["LOCAL_WORLD_SIZE"])
            clearance = cleared(config, sys.argv[1:], world_size, node_size)
            on_rank_0(lambda: held.enter_context(clearance), host_group())
        try:
            train(config, watch, ending)
        except torch.OutOfMemoryError as error:
            plan = f"titan-linear plan --gpus {dist.get_world_size()} --job.config_file {folder / CONFIG}"
            raise torch.OutOfMemoryError(f"{explain(error)[1]}; what a run needs: {plan}") from error
