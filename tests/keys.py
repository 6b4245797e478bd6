"""Command lines of runs."""

from __future__ import annotations

from collections.abc import Mapping


def argv_of(keys: Mapping[str, object], **more: object) -> list[str]:
    """What gives these keys; in the names of `more` "__" stands for the dot."""
    given = keys | {name.replace("__", "."): value for name, value in more.items()}
    return [text for key, value in given.items() for text in (f"--{key}", str(value))]
