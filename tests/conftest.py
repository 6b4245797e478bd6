from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton; tests of compilation run without it, in a process of their own.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.worlds import World

torch.set_num_threads(2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `cuda` run where there is a device and are deselected (not skipped) elsewhere."""
    if torch.cuda.is_available():
        return
    on_device = [item for item in items if item.get_closest_marker("cuda")]
    if on_device:
        config.hook.pytest_deselected(items=on_device)
        items[:] = [item for item in items if item not in on_device]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """worlds(n): the shared world of n gloo processes, spawned at its first use."""
    alive: dict[int, World] = {}

    def get(world_size: int) -> World:
        if world_size not in alive or alive[world_size].broken:
            alive[world_size] = World(world_size)
        return alive[world_size]

    yield get
    for world in alive.values():
        world.close()
