"""Losses, mixers, hooks, sources of texts and families, by name; a user's module may add some.

A run names the module in `job.custom_import` (docs/extending.md). Our own entries are in the
same tables, which their rooms fill.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from importlib import import_module
from typing import Any, TypeVar

Entry = TypeVar("Entry", bound=Any)
# Name → entry, for each `chosen_by` of entries.
TABLES: defaultdict[str, dict[str, Any]] = defaultdict(dict)


def register(entry: Entry) -> Entry:
    """Add an entry to its table, under its name. Also a decorator of classes.

    Args:
        entry: a subclass of `LossFunction`, `MixerOptions` or `Hook`, or a `RecordSource` or
            a `Family`.

    Raises:
        ValueError: the name exists already.
    """
    table = TABLES[entry.chosen_by]
    if entry.name in table:
        raise ValueError(
            f"{entry.chosen_by} = {entry.name!r} exists already; register another name"
        )
    table[entry.name] = entry
    return entry


def import_custom(module: str) -> None:
    """Import a user's module, also from the working directory, as `python -m` does.

    Raises:
        ValueError: it cannot be imported.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        import_module(module)
    except Exception as error:
        raise ValueError(
            f"job.custom_import = {module!r} cannot be imported in {folder!r}: {type(error).__name__}: {error}; "
            f"start where the module lies, or install it (python -c 'import {module}' shows the traceback)"
        ) from error
