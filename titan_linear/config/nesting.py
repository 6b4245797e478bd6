"""Limit on the nesting of brackets in texts that parsers read.

A parser calls itself for each bracket, and the depth that it can reach depends on Python's
recursion limit, which other code changes. So depth is measured before a text is parsed.
"""

import re
from itertools import accumulate

# Limit for configurations and chat templates.
NESTED = 50

# Quoted texts and comments of TOML and JSON. An unfinished one hides the rest, which no
# parser reads.
_QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:[^"\\]+|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)


def check_nesting(text: str, most: int = NESTED) -> None:
    """Raise ValueError, with the depth, if brackets are nested more than `most` deep."""
    if sum(map(text.count, "[{(")) <= most:
        return
    # Count only brackets outside of quoted texts and comments.
    brackets = re.findall(r"[][{}()]", _QUOTED.sub("", text))
    steps = (1 if bracket in "[{(" else -1 for bracket in brackets)
    check_depth(max(accumulate(steps), default=0), most)


def check_depth(depth: int, most: int = NESTED) -> None:
    if depth > most:
        raise ValueError(f"it is nested {depth:,} deep, and {most} is the most; nest it less")
