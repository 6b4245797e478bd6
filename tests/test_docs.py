"""What README and docs/ show runs and exists: programs, configurations, files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import Worlds
from titan_linear.config import load_config
from titan_linear.planner.memory import parameters
from titan_linear.run.build import model_without_tokenizer

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


def test_the_model_of_ones_own(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    (file := tmp_path / "mine.toml").write_text(toml)
    model = model_without_tokenizer(load_config(["--job.config_file", str(file)]))
    assert toml.count("\n") == 12 and f"here {parameters(model) / 1e6:.0f}M parameters" in readme
    assert [mixer.name for mixer in model.layers] == 3 * ["kda", "kda", "kda", "attention"]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = [ROOT, ROOT / "docs", ROOT / "titan_linear", ROOT / "titan_linear/ops", ROOT / "titan_linear/ops/triton"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`titan_linear/step/passes.py`, `ops/kda.py`, `docs/data.md`, and in a folder of ours `models/mixers/`."""
    named = re.findall(
        r"`(\w+/[\w./-]*\.(?:py|md|sh|toml)|(?:titan_linear|models|ops|tests|docs)/[\w/]*/)`", page.read_text("utf-8")
    )
    assert [name for name in dict.fromkeys(named) if not any((place / name).exists() for place in PLACES)] == []
