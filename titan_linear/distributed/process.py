"""One process of a run: its parent, its device, its signals.

Groups of processes are in distributed/groups.py.

The launcher imports this file. Torch, which is slow to import, is therefore imported where
it is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    import torch

# argv → exit code
Command = Callable[[list[str]], int]

# Environment variable of the workers: the launcher's process id.
LAUNCHER = "TITAN_LINEAR_LAUNCHER"
# Environment variable of the workers of a run on one node: the port of their store.
STORE = "TITAN_LINEAR_STORE"
# Environment variable of the workers: the file in which they leave the signal that they
# agreed to stop for.
AGREED = "TITAN_LINEAR_AGREED"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

# Characters that a terminal obeys: control characters except tab, newline and the carriage
# return with which progress bars begin; and characters that reverse the direction of
# writing.
OBEYED = re.compile(r"(?<!^)\r(?!\n)|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# Exit codes of a worker: the user's mistake; a failure that would occur again (bad loss,
# save or disk, no GPU memory); a lost rank.
MISTAKE = 2
FAILED = 3
LOST = 4


def refusing(main: Command) -> Command:
    """Decorate a command's main to print one line, not a traceback, for expected errors.

    These are the user's mistakes, and what the system refuses.
    """

    @wraps(main)
    def command(argv: list[str]) -> int:
        try:
            return main(argv)
        except (BrokenPipeError, UnicodeEncodeError):
            # run_command handles the former; the latter is a fault of the program.
            raise
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return MISTAKE

    return command


def run_command(main: Command) -> NoReturn:
    """Run main(argv) and end with its code.

    The end is silent after Ctrl-C, or if nobody reads the output any more.
    """
    try:
        with redirect_stdout(_Escaping(sys.stdout)), redirect_stderr(_Escaping(sys.stderr)):
            try:
                code = main(sys.argv[1:])
            except SystemExit as exit:
                code = exit.code or 0
            sys.stdout.flush()
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    end(code)


def end(code: int) -> NoReturn:
    """End this process at once.

    At its usual end, the interpreter takes down objects that still have threads, such as
    autograd and groups to which a cache of PyTorch refers. A thread that runs at that time
    may abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        # Nobody may be reading any more.
        with suppress(OSError):
            stream.flush()
    os._exit(code)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Drop output that nobody reads any more inside this context; nothing else fails.

    `tee` is killed by the same Ctrl-C that asks for a last save, and terminals hang up.
    """
    out, err = (_Escaping(_Outliving(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield
        sys.stdout.flush()


class _Around:
    """A text stream that replaces another."""

    def __init__(self, stream: TextIO | _Around):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Escaping(_Around):
    """Shows, as escapes, what a terminal would obey and what the stream's encoding lacks.

    Samples, prompts and file names may contain anything. Each line is flushed as it ends,
    even to a file or a pipe.
    """

    def write(self, text: str) -> int:
        shown = OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        if "\n" in text:
            self.flush()
        return len(text)


def unescaped(stream: TextIO) -> Any:
    """Return the stream for text that is certain to be the program's own, colors included."""
    return stream.stream if isinstance(stream, _Escaping) else stream


class _Outliving(_Around):
    """A text stream to a reader that may go away."""

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, do: Callable[..., Any], *args: Any) -> Any:
        try:
            return do(*args)
        except OSError as error:
            # From a pipe, or from a terminal.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent dies (Linux).

    Workers and exports call this first.

    Args:
        parent: the parent's process id, so that a parent that died before this call is
            noticed too. Workers find the launcher's in the environment.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is None and under_launcher():
        parent = int(os.environ[LAUNCHER])
    if parent not in (None, os.getppid()):
        os._exit(1)


def under_launcher() -> bool:
    """Whether this is a worker of `python -m titan_linear.run.launch`.

    The launcher has done the checks and locked the folder.
    """
    return LAUNCHER in os.environ


def own_device() -> torch.device:
    """Make this process's GPU the current one and return it; the CPU if there are no GPUs.

    A lone process takes the first GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def ignore_warnings_of_torch() -> None:
    """Ignore warnings about torch's own code, and about lone processes.

    A lone process intentionally runs without torch.distributed.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def be_deterministic() -> None:
    """Allow only deterministic algorithms from here on."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class StopSignal:
    """Turns SIGTERM and SIGINT into requests inside `with`.

    All ranks can then agree on a step to stop at.
    """

    def __init__(self) -> None:
        # Number of the signal that this process received; 0: none.
        self.received = 0
        # Number of the signal that all ranks agreed to stop for; 0: none.
        self.agreed = 0
        self._arrived = 0
        self._reads, self._writes = socket.socketpair()
        for end in (self._reads, self._writes):
            end.setblocking(False)

    def arrived(self) -> int:
        """Return `received`, for other threads.

        It also works while the main thread waits in C++ for a device and cannot note the
        signal.
        """
        with suppress(BlockingIOError):
            for number in self._reads.recv(64):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._arrived = number
        return self.received or self._arrived

    def __enter__(self) -> StopSignal:
        # The interpreter's own handler in C writes to it at once.
        signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        self.previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self.previous.items():
            # Further signals must not interrupt a stop under way.
            signal.signal(number, signal.SIG_IGN if self.agreed else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number

    def report(self) -> None:
        """Tell the launcher, if there is one, which signal all ranks agreed to stop for."""
        if self.agreed and under_launcher():
            Path(os.environ[AGREED]).write_text(str(self.agreed))
