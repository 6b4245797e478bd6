"""docs/keys.md says what config.py says."""

from __future__ import annotations

from titan_linear.config import KEYS
from tools import keys


def test_the_page_is_up_to_date() -> None:
    text = keys.page()
    assert keys.PAGE.read_text(encoding="utf-8") == text, "python -m tools.keys writes it"
    assert all(f"| `{dotted.partition('.')[2]}` |" in text for dotted in KEYS)
