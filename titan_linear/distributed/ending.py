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

from titan_linear.distributed.process import FAILED, LOST, MISTAKE, under_launcher

FAILED_RANK = "failed"  # in the store: a rank that has ended, and said why
# seconds that a rank with nothing to say leaves to the one that does; torchrun counts in whole seconds
FIRST = 1.0
# errors of the disk, not of this program
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

# What gloo says if a rank has died, or did not come in time; the last, if a collective with it had timed out before.
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
GONE += ("Application timeout caused pair closure",)


class RunFailed(Exception):
    """Every rank raises it, and rank 0 says it in a line. It would come again: the exit code is FAILED."""


@dataclass
class Ending:
    """What a failing rank of a process group still does.

    store: of all ranks.
    finish: called once the error is printed, unless another rank is lost; it takes a bounded time and raises nothing.
    """

    store: dist.Store
    finish: Callable[[], None] = lambda: None

    def leave(self, error: BaseException) -> NoReturn:
        """Print the error, tell the other ranks, and end this process. Call it in `except`.

        No destructor and no exit handler runs: they wait for threads and devices, and these for other ranks.
        """
        code, _ = explain(error)
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
        if code != LOST:
            return isinstance(error, (SystemExit, RunFailed)) and os.environ["RANK"] != "0"
        with suppress(dist.DistError):  # the store is gone too
            return under_launcher() or self.store.check([FAILED_RANK])
        return False


def peer_is_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank has died or did not come."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code of a process that this error ends, and a line that says why; "" if it is a fault of the program."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeEncodeError):
        return MISTAKE, str(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return MISTAKE, str(error)
    if isinstance(error, RunFailed):
        return FAILED, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return FAILED, str(error).partition(". GPU")[0]  # without the allocator's statistics
    if isinstance(error, OSError) and error.errno in UNWRITABLE:  # metrics, telemetry or a trace
        where = f"'{error.filename}'" if error.filename else "the run's folder"
        remedy = "make room or mend the disk, and start again, from the newest checkpoint if any"
        return FAILED, f"writing in {where} failed: {error.strerror}; {remedy}"
    if peer_is_lost(error):
        return LOST, f"another rank is gone: {error}"
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return getattr(error, "code", 128 + signal.SIGINT) or 0, ""
    return 1, ""


def report(error: BaseException) -> int:
    """Print why this process ends, here and in torchrun's summary, and return the exit code. Call it in `except`."""
    code, line = explain(error)
    if isinstance(error, (SystemExit, KeyboardInterrupt)):  # it has been said, or was asked for
        return code
    alone = os.environ.get("WORLD_SIZE", "1") == "1" or isinstance(error, RunFailed)
    rank = "" if alone else f"rank {os.environ['RANK']}: "
    said = f"error: {rank}{line}\n" if line else rank + "".join(traceback.format_exception(error))
    print(said, end="", file=sys.stderr, flush=True)
    if code != LOST:  # which is no cause
        get_error_handler().record_exception(error)
    return code
