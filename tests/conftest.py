from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.caches import new_caches

os.environ.update(new_caches())

# Tensors of tests are small: threads that wait for the next one, spinning, would take as long again as the work does.
# before torch and numpy are imported, here and in processes
os.environ.setdefault("OMP_NUM_THREADS", "1")
# gigabytes, of the test that has them, in large pages
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

if not torch.cuda.is_available():
    # Before anything imports Triton; tests of compilation run without it, in a process of their own.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.interpreter import quicken
from tests.order import in_order
from tests.records import write_texts
from tests.state import isolated
from tests.worlds import Worlds

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share-gpus", action="store_true", help="tests of several GPUs, with those that there are"
    )
    parser.addoption(
        "--order",
        default="",
        help="of files: reversed, or random:SEED; as they are named by default",
    )
    parser.addoption(
        "--matrix-part",
        default="1/1",
        help="which part of the matrix (tests/matrix), 1/2 or 2/2 say",
    )
    parser.addoption(
        "--matrix-jobs", type=int, default=14, help="how many runs of the matrix at once"
    )
    parser.addoption(
        "--matrix-out", help="file that gets a line of JSON as each row of the matrix ends"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `cuda`, or `cuda(n)`, run where there are so many devices; elsewhere they are deselected.

    With --share-gpus one device is enough.
    """
    devices, share = torch.cuda.device_count(), config.getoption("--share-gpus")
    kept, left = [], []
    for item in items:
        marker = item.get_closest_marker("cuda")
        needed = 0 if marker is None else marker.args[0] if marker.args else 1
        if marker is not None and share:
            needed = 1
        (kept if needed <= devices else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = in_order(kept, config.getoption("--order"))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """worlds(n): the shared world of n gloo processes, forked at its first use; worlds(n, "nccl"): of n GPUs."""
    worlds = Worlds()
    yield worlds
    worlds.close(set(worlds.alive))


@pytest.fixture(scope="module", autouse=True)
def end_idle_worlds(worlds: Worlds) -> Iterator[None]:
    """Those that the tests of a file do not use: each process takes 4 ms of a second while it waits."""
    worlds.used.clear()
    yield
    worlds.close(set(worlds.alive) - worlds.used)


@pytest.fixture(scope="module", autouse=True)
def isolated_file() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(autouse=True)
def isolated_test(isolated_file: None) -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Documents of 1 to 200 bytes: many to a stream, some across several ranks."""
    from tests.training import OWN_FLAVORS
    from titan_linear.models.presets import OWN

    file, rng = tmp_path_factory.mktemp("corpus") / "corpus.jsonl", torch.Generator().manual_seed(0)
    words = [
        "def",
        "return",
        "self",
        "import",
        "class",
        "for",
        "in",
        "if",
        "else",
        "while",
        "None",
        "True",
        "lambda",
        "yield",
    ]

    def text():
        length = int(torch.randint(1, 200, (), generator=rng))
        picks = torch.randint(len(words), (60,), generator=rng).tolist()
        return " ".join(words[i] for i in picks)[:length]

    with pytest.MonkeyPatch.context() as patch:
        for flavor, model in OWN_FLAVORS.items():
            patch.setitem(OWN["hybrid"], flavor, model)
        yield write_texts(file, (text() for _ in range(400)))


@pytest.fixture(params=["contiguous", "zigzag"])
def layout(request: pytest.FixtureRequest) -> str:
    """How ranks share a stream."""
    return request.param
