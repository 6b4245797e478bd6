"""What users are told."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


def refused(message: str) -> AbstractContextManager[pytest.ExceptionInfo]:
    """For what a user asks wrongly: a ValueError in whose text this pattern is found."""
    return pytest.raises(ValueError, match=message)


def is_refused(
    main: Callable[[list[str]], int], argv: list[str], capsys: pytest.CaptureFixture
) -> str:
    """A command's one line of error, and exit code 2; what follows "error: "."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ")


def exit_of(
    main: Callable[[list[str]], object], argv: list[str], capfd: pytest.CaptureFixture
) -> tuple[object, str]:
    """What a command returns or exits with, and all that it says."""
    capfd.readouterr()
    try:
        code = main(argv)
    except SystemExit as exit:
        code = exit.code
    return code, "".join(capfd.readouterr())


@contextmanager
def own_handlers() -> Iterator[None]:
    """For commands that set handlers of signals, in this process."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
