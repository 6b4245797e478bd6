"""Commands, a file for each.

The doctor is in proof/, and what `titan-linear train` starts is in run/launch.py.
"""

import argparse
from collections.abc import Sequence
from typing import Any

# A command's own options, and arguments that are keys of the configuration.
Parsed = tuple[argparse.Namespace, list[str]]


def command_parser(prog: str, about: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a command's parser, whose help begins with the module's docstring, unchanged."""
    return argparse.ArgumentParser(
        prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def line(row: Sequence[object]) -> str:
    """Return one line of a table in Markdown."""
    return f"| {' | '.join(map(str, row))} |"
