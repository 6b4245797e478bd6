"""Pages of docs/ that commands write from the sources."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def write(page: Path, text: str) -> int:
    """The main function of a command that writes this page; returns its exit code."""
    if sys.argv[1:]:
        print(f"error: {sys.argv[1]!r}: this takes no arguments; it writes {page}", file=sys.stderr)
        return 2
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
    return 0
