"""What commands say of a mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def is_refused(main: Callable[[list[str]], int], argv: list[str], capsys: pytest.CaptureFixture) -> str:
    """A command's one line of error, and exit code 2; what follows "error: "."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ")
