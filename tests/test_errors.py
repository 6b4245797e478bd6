"""docs/errors.md has every message, each with what to do, and nothing of it destroys what is a user's."""

from __future__ import annotations

import re

from tools import errors

DESTROYS = re.compile(r"\b(delet|overwrit|eras|discard|rm -|unlink)", re.IGNORECASE)


def test_the_page_is_up_to_date() -> None:
    assert errors.PAGE.read_text(encoding="utf-8") == errors.page(), "python -m tools.errors writes it"


def test_every_message_says_what_to_do() -> None:
    found, silent = set(errors.messages()), []
    for where, text in found:
        try:
            errors.explained(where, text)
        except KeyError:
            silent.append((where, text))
    assert not silent and len(found) > 150
    known = {key for where, text in found for key in (text, f"{where}: {text}")}
    assert not set(errors.COMPOSED) - known  # what is no message any more


def test_no_remedy_destroys_anything() -> None:
    rows = [row for where, text in errors.messages() for row in errors.explained(where, text)]
    destroying = {remedy for _, remedy in rows if DESTROYS.search(remedy)}
    assert len(destroying) == 1 and "token cache's folder" in destroying.pop()
