"""The order in which files of tests run: `--order`."""

import random
from pathlib import Path

import pytest


def in_order(items: list[pytest.Item], order: str) -> list[pytest.Item]:
    """The tests file by file: files in this order, a file's tests in their own."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    paths = list(files)
    kind, _, seed = order.partition(":")
    if kind == "reversed":
        paths.reverse()
    elif kind == "random" and seed.isdigit():
        random.Random(int(seed)).shuffle(paths)
    elif kind:
        raise pytest.UsageError(f"--order {order} must be reversed or random:SEED")
    return [item for path in paths for item in files[path]]
