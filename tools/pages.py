"""Pages of docs/ that commands write from the sources."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def write(page: Path, text: str) -> int:
    """A command's main; its exit code."""
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
    return 0
