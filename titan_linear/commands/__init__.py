"""Commands beside training, a file for each; the doctor is in proof/, and `titan-linear train` in launch.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def command_parser(prog: str, about: str | None, **options: Any) -> argparse.ArgumentParser:
    """Of a command, whose help begins with its module's docstring, as it stands there."""
    return argparse.ArgumentParser(
        prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """In Markdown."""
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def line(row: Sequence[object]) -> str:
    """One of a table in Markdown."""
    return f"| {' | '.join(map(str, row))} |"
