"""What the tools refuse, in a line; and that the mutants can be made."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser

from tests import mutants
from tests.refusals import is_refused
from titan_linear.commands import generate
from titan_linear.data import Document, build_tokenizer
from titan_linear.data.corpus.tokenise import tokenise
from tools import bench_cp, bench_ops


def test_each_mutant_has_its_place_and_tests():
    assert all(mutants.place(mutant) and mutants.tests_of(mutant) for mutant in mutants.MUTANTS)


@pytest.mark.parametrize("tool", [bench_ops, bench_cp], ids=lambda tool: tool.__name__)
def test_without_a_gpu(tool, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [tool.__name__])
    error = is_refused(lambda _: tool.main([]), [], capsys)
    assert error.startswith(f"{tool.__name__} times") and "here" in error


def test_torchrun_takes_no_option_of_a_tool_for_its_own():
    """Not even as the beginning of one, such as --node."""
    texts = [path.read_text("utf-8") for path in (mutants.ROOT / "tools").glob("*.py")]
    commands = [
        command
        for text in texts
        for command in re.findall(r"^    torchrun (.*?)[ \\]*$", text, re.MULTILINE)
    ]
    assert len(commands) > 5
    for command in commands:
        argv = shlex.split(command, comments=True)
        tool = argv[argv.index("-m") + 1 :]
        read = get_args_parser().parse_args(argv)
        assert [read.training_script, *read.training_script_args] == tool


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--device", "gpu"], "--device gpu cannot be used"),
        (["--device", "meta"], "--device meta is neither cpu nor cuda"),
        (["--temperature", "-1"], "temperature = -1.0 must be 0"),
        (["--temperature", "nan"], "temperature = nan must be 0"),
        (["--top-p", "0"], "top_p = 0.0 must be above 0"),
        (["--max-new-tokens", "-3"], "--max-new-tokens -3 must be 0 or more"),
    ],
)
def test_generate_refuses_bad_options(argv, message, capsys):
    assert is_refused(generate.main, ["outputs/none", "--prompt", "x", *argv], capsys).startswith(
        message
    )


def test_a_lone_surrogate_is_no_reason_to_train_on_the_bytes_that_one_trains_on():
    documents = [Document("a\ud800", "corpus.jsonl, line 1", 2)]
    ((_, problem),) = tokenise(build_tokenizer(None), documents, 0)
    assert problem == "not UTF-8 at character 1; repair it"
