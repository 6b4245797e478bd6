"""Commands beside training, a file for each; the doctor is in proof/, and `titan-linear train` in launch.py."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """In Markdown."""
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def line(row: Sequence[object]) -> str:
    """One of a table in Markdown."""
    return f"| {' | '.join(map(str, row))} |"
