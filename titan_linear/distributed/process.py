"""One process of a run: its parent, its device, its signals. Groups of processes are in distributed/groups.py.

The launcher imports this: torch, which is slow to import, is imported where it is used.
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

Command = Callable[[list[str]], int]  # argv → exit code

LAUNCHER = "TITAN_LINEAR_LAUNCHER"  # environment variable of the workers: the launcher's process id
STORE = "TITAN_LINEAR_STORE"  # likewise, of a run on one node: the port of their store
# likewise: the file in which they leave what signal they agreed to stop for
AGREED = "TITAN_LINEAR_AGREED"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

# What a terminal obeys: control characters but tab, newline and the carriage return with which progress bars begin, and
# those that reverse the direction of writing.
OBEYED = re.compile(r"(?<!^)\r(?!\n)|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# Exit codes of a worker.
# a user's mistake; a bad loss, save or disk, or no GPU memory; a lost rank
MISTAKE, FAILED, LOST = 2, 3, 4


def refusing(main: Command) -> Command:
    """Decorate a command's main: a user's mistake, and what the system refuses, prints one line, not a traceback."""

    @wraps(main)
    def command(argv: list[str]) -> int:
        try:
            return main(argv)
        except (BrokenPipeError, UnicodeEncodeError):
            raise  # to run_command; a fault of the program
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return MISTAKE

    return command


def run_command(main: Command) -> NoReturn:
    """End with the code of main(argv); silently after Ctrl-C, or if nobody reads its output any more."""
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
    """End this process at once. At its usual end the interpreter takes down what still has threads, as autograd has and
    groups to which a cache of PyTorch's refers; a thread that runs then may abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Inside `with`, output that nobody reads any more is dropped, and nothing else fails.

    `tee` dies of the same Ctrl-C that asks for a last save, and terminals hang up.
    """
    out, err = (_Escaping(_Outliving(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield
        sys.stdout.flush()


class _Around:
    """A text stream in place of another."""

    def __init__(self, stream: TextIO | _Around):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Escaping(_Around):
    """Shows what a terminal would obey, and what the stream's encoding does not have, as escapes: samples, prompts and
    the names of files may hold anything. A line is shown as it ends, to a file or a pipe too."""

    def write(self, text: str) -> int:
        shown = OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        if "\n" in text:
            self.flush()
        return len(text)


def unescaped(stream: TextIO) -> Any:
    """The stream to write to what is certain to be the program's own, colours included."""
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
            if error.errno not in (errno.EPIPE, errno.EIO):  # from a pipe, from a terminal
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies (Linux). Workers and exports call it first.

    parent: its process id, so that a parent that died before this call is noticed too; workers find theirs, the
        launcher's, in the environment.
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
    """Whether this is a worker of `python -m titan_linear.launch`, which has done the checks and locked the folder."""
    return LAUNCHER in os.environ


def own_device() -> torch.device:
    """Make this process's GPU the current one and return it; the CPU if there are no GPUs. A lone process takes the
    first GPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def ignore_warnings_of_torch() -> None:
    """Those about torch's own code, and that a lone process does without torch.distributed, as is intended."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def be_deterministic() -> None:
    """Allow only deterministic algorithms from here on."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class StopSignal:
    """Inside `with`, SIGTERM and SIGINT are requests, noted here, so that all ranks can agree on a step to stop at."""

    def __init__(self) -> None:
        self.received = 0  # number of the signal that this process received; 0: none
        self.agreed = 0  # number of the signal that all ranks agreed to stop for; 0: none
        self._arrived = 0
        self._reads, self._writes = socket.socketpair()
        for end in (self._reads, self._writes):
            end.setblocking(False)

    def arrived(self) -> int:
        """`received`, also while the main thread waits in C++ for a device and cannot note it; for other threads."""
        with suppress(BlockingIOError):
            for number in self._reads.recv(64):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._arrived = number
        return self.received or self._arrived

    def __enter__(self) -> StopSignal:
        # Written to by the interpreter's own handler in C, at once.
        signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        self.previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self.previous.items():
            # nothing cuts short a stop under way
            signal.signal(number, signal.SIG_IGN if self.agreed else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number

    def report(self) -> None:
        """Tell the launcher, if there is one, what signal all ranks agreed to stop for."""
        if self.agreed and under_launcher():
            Path(os.environ[AGREED]).write_text(str(self.agreed))
