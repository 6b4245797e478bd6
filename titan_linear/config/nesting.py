"""How deep brackets may lie within each other in texts that parsers read.

A parser calls itself for each bracket, and how often it may depends on Python's recursion limit, which other code
changes. So depth is measured before a text is parsed.
"""

from __future__ import annotations

import re
from itertools import accumulate

NESTED = 50  # of configurations and chat templates

# Quoted texts and comments, of TOML and JSON. One that does not end hides the rest, which no parser reads.
_QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:[^"\\]+|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)


def check_nesting(text: str, most: int = NESTED) -> None:
    """Refuse a text whose brackets are nested more than `most` deep. ValueError, with the depth."""
    if sum(map(text.count, "[{(")) <= most:
        return
    brackets = re.findall(r"[][{}()]", _QUOTED.sub("", text))
    steps = (1 if bracket in "[{(" else -1 for bracket in brackets)
    check_depth(max(accumulate(steps), default=0), most)


def check_depth(depth: int, most: int = NESTED) -> None:
    if depth > most:
        raise ValueError(f"it is nested {depth:,} deep, and {most} is the most; nest it less")
