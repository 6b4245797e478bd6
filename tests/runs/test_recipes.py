"""Shipped configurations of post-training as they stand, on a folder like the one that they name: what they say comes
before, the run, and what they say comes after. Only lengths are small."""

import io
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.data.corpus.chat_tokenizer import PLAIN, make_tokenizer
from tests.records import read_lines, write_lines
from tests.refusals import exit_of, own_handlers
from tests.storage.peft_runs import make_base
from titan_linear.commands import convert, generate, score
from titan_linear.run import launch
from titan_linear.train import Trainer

ROOT = Path(__file__).parents[2]
SMALL = {
    "training.seq_len": 128,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
    "metrics.telemetry_freq": 0,
    "metrics.enable_tensorboard": "false",
}
QUESTIONS = [f"{n} and {n + 1}?" for n in range(40)]
ANSWERS = ["one", "the sum of two", "many", "it is odd"]


def train(rank, world_size, config):
    Trainer(config).train()


def score_corpus(rank, world_size, folder, config):
    score.score_corpus(folder, config)


@pytest.fixture
def recipe(tmp_path, monkeypatch, worlds, capfd):
    """recipe(name, *keys): what a run of the file prints. Launchers are this process, in a folder with two models."""
    for name in ("Qwen3.5-2B", "Qwen3.5-9B"):
        make_base("OLMo-Hybrid", tmp_path / name)
        make_tokenizer(tmp_path / name, PLAIN)
    (tmp_path / "chats").mkdir()
    chats = []
    for n, question in enumerate(QUESTIONS):
        answer = {"role": "assistant", "content": ANSWERS[n % 4]}
        chats.append({"messages": [{"role": "user", "content": question}, answer]})
    write_lines(tmp_path / "chats/chats.jsonl", chats)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NGPU", "1")

    def run_workers(config, *_):
        worlds(1).run(train, config.stored())
        return 0

    def run_scorers(config, node, module, more):
        worlds(1).run(score_corpus, Path(more[1]).absolute(), config.stored())
        return 0

    monkeypatch.setattr(launch, "run_workers", run_workers)
    monkeypatch.setattr(score, "run_workers", run_scorers)

    def run(name, *keys):
        small = [f"--{key}={value}" for key, value in SMALL.items()]
        argv = ["--job.config_file", str(ROOT / f"train_configs/{name}.toml"), *small, *keys]
        code, said = exit_of(launch.main, argv, capfd)
        assert not code, said
        return said

    with own_handlers():
        yield run


def scoring(name):
    """The arguments of the file's command that scores, for short streams."""
    text = (ROOT / f"train_configs/{name}.toml").read_text(encoding="utf-8")
    (command,) = re.findall(r"^# +titan-linear score (.*)$", re.sub(r" *\\\n#", "", text), re.M)
    return [*shlex.split(command), "--training.seq_len", "128"]


def steps(name):
    return read_lines(Path(f"outputs/{name}/metrics.jsonl"))


def test_lora_on_chats_to_a_merged_folder(recipe, capfd, monkeypatch):
    recipe("lora_chat")
    # Started again, the finished run says what to do with it.
    said = recipe("lora_chat")
    assert "generate outputs/lora_chat --chat" in said
    assert "convert merge outputs/lora_chat FOLDER" in said
    losses = [line["loss"] for line in steps("lora_chat") if "loss" in line]
    assert losses[-1] < losses[0]
    assert Path("outputs/lora_chat/checkpoint/step-4-hf/adapter_config.json").is_file()
    assert convert.main(["merge", "outputs/lora_chat", "merged"]) == 0
    capfd.readouterr()
    # The terminal ends after the first turn.
    monkeypatch.setattr("sys.stdin", io.StringIO())
    asked = ["--chat", "--prompt", QUESTIONS[0], "--max-new-tokens", "3", "--device", "cpu"]
    for folder in ("outputs/lora_chat", "merged"):
        assert generate.main([folder, *asked]) == 0
    assert capfd.readouterr().out


def test_a_round_of_grpo_from_files(recipe):
    """With the page's records; at first the policy is the one that wrote the answers: all ratios are 1."""
    page = (ROOT / "docs/post_training.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(code, "post_training.md", "exec"), names)
    Path("rollouts").mkdir()
    with Path("rollouts/1.jsonl").open("w") as file:
        for n, question in enumerate(QUESTIONS):
            file.writelines(names["records"](question, ANSWERS, [n % 2, 0.0, 1.0, 0.5]))
    advantages = torch.tensor([r["advantages"] for r in read_lines(Path("rollouts/1.jsonl"))])
    assert advantages.mean().abs() < 1e-6
    assert score.main(scoring("grpo")) == 0
    recipe("grpo")
    first, *_, last = steps("grpo")
    assert first["clipped"] == 0 and first["kl"] == 0 and first["entropy"] > 1
    assert abs(first["loss"]) < 1.5 and last["step"] == 4
    assert Path("outputs/grpo/checkpoint/step-4-hf/config.json").is_file()


def test_a_student_learns_of_its_teacher(recipe):
    """The teacher has the student's weights: they differ by rounding, and in training behind a stream's edge, where
    documents are cut."""
    assert score.main(scoring("distil")) == 0
    recipe("distil")
    first, *_, validated = steps("distil")
    assert abs(validated["validation_loss"]) < 1e-3 and 0 < first["loss"] < 0.1
    assert Path("outputs/distil/checkpoint/step-4-hf/config.json").is_file()
