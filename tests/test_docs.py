"""What README and docs/ show runs and exists: programs, configurations, files."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.test_train import arguments, train_on_rank
from tests.worlds import Worlds
from titan_linear.commands import plan
from titan_linear.config import load_config
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import MIXERS
from titan_linear.models.presets import preset, resized
from titan_linear.planner.memory import parameters
from titan_linear.proof import doctor
from titan_linear.run.build import model_without_tokenizer
from titan_linear.run.generate import decode, prefill
from titan_linear.run.preflight import preflight

ROOT = Path(__file__).parents[1]


def program(page: str) -> dict[str, Any]:
    """The names that the page's first Python program defines, as a module."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    module = sys.modules[page] = ModuleType(page)
    exec(compile(code, page, "exec"), vars(module))
    return vars(module)


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


# --- A mixer of one's own ---------------------------------------------------------------------------------------------

MINE = ['--model.pattern=["gla", "attention"]', "--model.num_layers=2", "--model.gla={heads = 4, head_dim = 16}"]


def mixer_of_the_page(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    names = program("adding_a_mixer.md")
    patch.setitem(MIXERS, "gla", names["GLA"])
    return names


def _train(rank: int, world_size: int, argv: list[str], cache: str) -> tuple[list[float], list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        mixer_of_the_page(patch)
        losses, norms, _ = train_on_rank(rank, world_size, argv, cache)
        return losses, norms


def test_a_mixer_of_ones_own_trains_alike_on_every_split(
    corpus: Path, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer_of_the_page(monkeypatch)
    argv = [*arguments(corpus, {"training.dtype": "float64", "training.steps": 3}), *MINE]
    preflight(load_config(argv), world_size=1)
    cp = ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_layout=zigzag"]
    splits = (["--training.local_batch_size=2"], cp, ["--parallelism.tensor_parallel_degree=2"])
    found = [worlds(2).run(_train, [*argv, *split], str(corpus.parent))[0] for split in splits]
    for losses, norms in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-9) and norms == pytest.approx(found[0][1], rel=1e-9)
    with pytest.raises(ValueError, match=r"gla layers cannot split the 4 heads .* = 8 ranks; use a degree"):
        preflight(load_config([*argv, "--parallelism.context_parallel_degree=8"]), world_size=8)


def test_a_mixer_of_ones_own_is_proved_and_planned(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    mixer_of_the_page(monkeypatch)
    monkeypatch.setenv("NGPU", "2")
    argv = [*arguments(corpus, {"training.seq_len": 128}), *MINE, "--parallelism.context_parallel_degree=2"]
    assert doctor.main(argv) == 0, capsys.readouterr().out
    assert plan.main(["--gpus", "2", *argv]) == 0
    assert "activations of layers: 1 gla" in capsys.readouterr().out


def test_a_mixer_of_ones_own_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, with an initial state; and token by token with a cache as at once."""
    names = mixer_of_the_page(monkeypatch)
    rng, cu_seqlens = torch.Generator().manual_seed(0), [0, 3, 100, 110, 250, 333]
    q, k, v = (torch.randn(1, 333, 2, n, generator=rng).double() for n in (5, 5, 7))
    g, state = -torch.rand(1, 333, 2, generator=rng).double(), torch.randn(1, 2, 5, 7, generator=rng).double()
    o, last = names["recurrence"](q, k, v, g, torch.tensor(cu_seqlens), state)
    S = state
    for t in range(333):
        S = torch.zeros_like(S) if t in cu_seqlens[1:] else S
        S = g[:, t].exp()[..., None, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        assert torch.allclose(o[:, t], torch.einsum("bhk,bhkv->bhv", q[:, t], S), atol=1e-12)
    assert torch.allclose(last, S, atol=1e-12)
    model = resized(preset("hybrid", "debug"), load_config(MINE).model.model_dump())
    decoder = Decoder(replace(model, pattern=model.pattern[:1]))
    initialise(decoder, seed=0)
    prompt = list(range(70))
    whole = prefill(decoder, [prompt], chunk=128, device=torch.device("cpu"))
    parts = prefill(decoder, [prompt[:-1]], chunk=32, device=torch.device("cpu"))
    parts = decode(decoder, parts, torch.tensor(prompt[-1:]))
    assert torch.allclose(whole.logits, parts.logits, atol=1e-5)
