"""How a rank ends that fails: it says why, lets an async save end, tells the other ranks, and is gone.

Nothing collective runs on the way out of an exception. `destroy_process_group` is for a normal end by all ranks:
NCCL's waits for kernels that wait for the other ranks, and so does what the interpreter would destroy at its end. The
other ranks, whose hosts may wait for a device, learn of it from the store (`Watch` in hangs.py) and leave too.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from titan_linear.process import FAILED, LOST, MISTAKE, under_launcher

FAILED_RANK = "failed"  # in the store: a rank that has ended, and said why
FIRST = 1.0  # seconds that a rank with nothing to say leaves to the one that does; torchrun counts in whole seconds
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # errors of the disk, not of this program

# What gloo says if a rank has died, or did not come in time.
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",  # another collective with the same rank had timed out
)


class RunFailed(Exception):
    """Ends the run with one line and the exit code FAILED: it would fail again.

    alike: every rank raises it, and rank 0 alone says it.
    """

    alike = False


@dataclass
class Ending:
    """What a failing rank of a process group still does.

    store: of all ranks.
    finish: called once the error is printed, unless another rank is lost; it takes a bounded time and raises nothing.
    """

    store: dist.Store
    finish: Callable[[], None] = lambda: None

    def leave(self, error: BaseException) -> NoReturn:
        """Print the error, tell the other ranks, and end this process with the error's exit code. Call it in `except`.

        No destructor and no exit handler runs: they wait for threads and devices, and these for other ranks.
        """
        code = exit_code(error)
        try:
            if self._others_say(error, code):
                time.sleep(FIRST)
            else:
                report(error)
            if code != LOST:
                self.finish()
            self.store.set(FAILED_RANK, os.environ["RANK"])
            sys.stdout.flush()
        finally:
            os._exit(code)

    def _others_say(self, error: BaseException, code: int) -> bool:
        """Whether another process says why this rank ends."""
        if code == LOST:
            return under_launcher() or self._has_failed()
        alike = isinstance(error, SystemExit) or (isinstance(error, RunFailed) and error.alike)
        return alike and os.environ["RANK"] != "0"

    def _has_failed(self) -> bool:
        with suppress(dist.DistError):  # the store is gone
            return self.store.check([FAILED_RANK])
        return False


def is_gone(error: BaseException) -> bool:
    """Whether a collective failed because another rank has died or did not come."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


def exit_code(error: BaseException) -> int:
    """The exit code of a process that this error ends."""
    if isinstance(error, SystemExit):
        return error.code or 0
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, ValueError):
        return MISTAKE
    if isinstance(error, (RunFailed, torch.OutOfMemoryError)) or _unwritable(error):
        return FAILED
    return LOST if is_gone(error) else 1


def report(error: BaseException) -> int:
    """Print why this process ends, in a line if the program is not to blame, and return the exit code.

    torchrun's summary shows it too. Call it in `except`.
    """
    code = exit_code(error)
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return code
    alone = os.environ.get("WORLD_SIZE", "1") == "1" or (isinstance(error, RunFailed) and error.alike)
    rank = "" if alone else f"rank {os.environ['RANK']}: "
    if code in (MISTAKE, FAILED, LOST):
        print(f"error: {rank}{_line(error, code)}", file=sys.stderr, flush=True)
    else:
        print(rank + "".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
    get_error_handler().record_exception(error)
    return code


def _line(error: BaseException, code: int) -> str:
    if code == LOST:
        return f"another rank is gone: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(error)
    if _unwritable(error):
        where = f"'{error.filename}'" if error.filename else "the run's folder"
        return (
            f"writing in {where} failed: {error.strerror}; make room or mend the disk, and start again, from the "
            "newest checkpoint if any"
        )
    return str(error)


def out_of_memory(error: torch.OutOfMemoryError) -> str:
    """What was asked for, without the allocator's statistics."""
    return str(error).partition(". GPU")[0]


def _unwritable(error: BaseException) -> bool:
    """Whether this is a failed write of metrics, telemetry or traces; saves raise errors of their own."""
    return isinstance(error, OSError) and error.errno in UNWRITABLE
