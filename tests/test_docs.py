"""The programs in docs/ run, and say what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.worlds import Worlds

ROOT = Path(__file__).parents[1]


def program(page: str) -> dict[str, Any]:
    """The names that the page's first Python program defines."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    names = {"__name__": page}
    exec(compile(code, page, "exec"), names)
    return names


def _two_ranks(rank: int, world_size: int) -> dict[str, float]:
    return program("ops.md")["main"]()


def test_the_ops_on_two_ranks(worlds: Worlds) -> None:
    for found in worlds(2).run(_two_ranks):
        assert list(found) == ["convolution", "KDA", "attention"]
        assert max(found.values()) < 64 * 2**-24, found  # products of 64 numbers in float32
