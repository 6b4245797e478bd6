"""A Python with verl, which needs another transformers than the tests', and a model for it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.models import hf_models

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
# verl imports uvicorn and fastapi without naming them.
PACKAGES = ("verl==0.9.1", "uvicorn", "fastapi")
# An environment that was made before, to be used again.
PYTHON = "TITAN_LINEAR_VERL_PYTHON"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = 80


def make(folder: Path) -> Path:
    """An environment with verl, and all other packages of this one; it needs a package index."""
    if made := os.environ.get(PYTHON):
        return Path(made)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    places = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inside = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    parent = Path(inside.stdout.strip()) / "parent.pth"
    parent.write_text("\n".join(dict.fromkeys(places)) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"verl cannot be installed: {done.stderr[-500:]}")
    return python


def announce(folder: Path) -> None:
    """Metadata of this checkout, by which verl finds the engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (info := folder / "titan_linear-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: titan_linear\nVersion: 0.1.0\n")
    group = project["entry-points"]["verl.plugins"]
    lines = [f"{name} = {value}" for name, value in group.items()]
    (info / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines, ""]))


def run(python: Path, case: str, folder: Path, out: Path, *keys: str) -> list:
    """What each of two ranks finds in a case of `program.py`."""
    out.mkdir()
    announce(out)
    env = {
        **os.environ,
        "PYTHONPATH": f"{out}{os.pathsep}{ROOT}",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.verl.program", case, folder, out, *keys]
    done = subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return [torch.load(out / f"{case}-{rank}.pt", weights_only=False) for rank in range(2)]


def save_model(folder: Path) -> None:
    """A tiny Qwen3.5 with a tokenizer of words, a chat template, texts and a rollout."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**hf_models.QWEN, intermediate_size=48, tie_word_embeddings=False)
    hf_models.save(hf_models.randomise(Qwen3_5ForCausalLM(config)), folder)
    special = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{n}" for n in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    draw = torch.Generator().manual_seed(1)
    save_texts(folder / "train.parquet", draw)
    torch.save(rollout(draw), folder / "rollout.pt")


def text(draw: torch.Generator, least: int, most: int) -> str:
    length = int(torch.randint(least, most, (), generator=draw))
    return " ".join(f"w{n}" for n in torch.randint(WORDS, (length,), generator=draw).tolist())


def save_texts(path: Path, draw: torch.Generator) -> None:
    rows = []
    for _ in range(24):
        turns = [("user", text(draw, 1, 9)), ("assistant", text(draw, 2, 19))]
        rows.append([{"role": role, "content": content} for role, content in turns])
    pq.write_table(pa.table({"messages": rows}), path)


def rollout(draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Four sequences as verl's trainer has them: prompts padded left, responses right."""
    prompts, responses = 7, 21
    lengths = [(7, 21), (1, 5), (4, 1), (6, 13)]
    mask = torch.zeros(4, prompts + responses, dtype=torch.int64)
    for row, (prompt, response) in enumerate(lengths):
        mask[row, prompts - prompt : prompts + response] = 1
    ids = torch.randint(5, WORDS, mask.shape, generator=draw) * mask
    response_mask = mask[:, prompts:]
    numbers = torch.randn(2, 4, responses, generator=draw, dtype=torch.float64)
    return {
        "prompts": ids[:, :prompts],
        "responses": ids[:, prompts:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "old_log_probs": (-4.4 + 0.3 * numbers[0]) * response_mask,
        "advantages": numbers[1] * response_mask,
    }


if __name__ == "__main__":
    save_model(Path(sys.argv[1]))
