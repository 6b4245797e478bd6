"""The end of a failing rank.

It reports the error, lets an async save finish, tells the other ranks, and exits.

No collective runs on the way out of an exception. `destroy_process_group` is for a normal
end of all ranks: NCCL's waits for kernels that wait for the other ranks, and so does what
the interpreter would destroy at its end. The other ranks, whose hosts may wait for a
device, learn of the failure from the store (`Watch` in hangs.py) and leave too.
"""

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

# Key in the store: a rank that has ended, and reported why.
FAILED_RANK = "failed"
# Seconds that a rank without a message leaves to the rank that has one; torchrun counts in
# whole seconds.
FIRST = 1.0
# Errors of the disk rather than of this program.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

# Messages of gloo if a rank has died or did not come in time; the last one if an earlier
# collective with it timed out.
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
GONE += ("Application timeout caused pair closure",)


class RunFailed(Exception):
    """An error that every rank raises, and that rank 0 reports in one line.

    It would occur again after a restart: the exit code is FAILED.
    """


@dataclass
class Ending:
    """Last steps of a failing rank of a process group.

    Args:
        store: store of all ranks.
        finish: called once the error is printed, unless another rank is lost; it takes a
            bounded time and raises nothing.
    """

    store: dist.Store
    finish: Callable[[], None] = lambda: None

    def leave(self, error: BaseException) -> NoReturn:
        """Print the error, tell the other ranks, and end this process. Call it in `except`.

        No destructor and no exit handler runs: they wait for threads and devices, which
        wait for other ranks.
        """
        code, _ = explain(error)
        # Report, unless another process does, and let a save finish.
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
        """Whether another process reports why this rank ends."""
        if code != LOST:
            return isinstance(error, (SystemExit, RunFailed)) and os.environ["RANK"] != "0"
        # The store may be gone too.
        with suppress(dist.DistError):
            return under_launcher() or self.store.check([FAILED_RANK])
        return False


def peer_is_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank has died or did not come."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code of a process that this error ends, and a line that explains it.

    The line is "" if the error is a fault of the program.
    """
    # Mistakes of the user.
    if isinstance(error, ValueError) and not isinstance(error, UnicodeEncodeError):
        return MISTAKE, str(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return MISTAKE, str(error)
    # Failures that would occur again.
    if isinstance(error, RunFailed):
        return FAILED, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        # Leave out the allocator's statistics.
        return FAILED, str(error).partition(". GPU")[0]
    # Metrics, telemetry or a trace could not be written.
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        where = f"'{error.filename}'" if error.filename else "the run's folder"
        remedy = "make room or mend the disk, and start again, from the newest checkpoint if any"
        return FAILED, f"writing in {where} failed: {error.strerror}; {remedy}"
    # Losses of other ranks, and requested ends.
    if peer_is_lost(error):
        return LOST, f"another rank is gone: {error}"
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return getattr(error, "code", 128 + signal.SIGINT) or 0, ""
    return 1, ""


def report(error: BaseException) -> int:
    """Print why this process ends, here and in torchrun's summary.

    Call it in `except`.

    Returns:
        The exit code.
    """
    code, line = explain(error)
    # These errors have been reported, or the user asked for them.
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return code
    alone = os.environ.get("WORLD_SIZE", "1") == "1" or isinstance(error, RunFailed)
    rank = "" if alone else f"rank {os.environ['RANK']}: "
    said = f"error: {rank}{line}\n" if line else rank + "".join(traceback.format_exception(error))
    print(said, end="", file=sys.stderr, flush=True)
    # A lost rank is not the cause.
    if code != LOST:
        get_error_handler().record_exception(error)
    return code
