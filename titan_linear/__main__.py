"""All commands of titan_linear: `titan-linear COMMAND …`.

`python -m titan_linear COMMAND …` does the same where the package is not installed.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, NoReturn

from titan_linear.distributed.process import MISTAKE, run_command


class Command(NamedTuple):
    # The module that has `main(argv)`, which returns the exit code.
    module: str
    does: str


COMMANDS = {
    "train": Command("titan_linear.commands.train", "start a run, or resume it"),
    "doctor": Command(
        "titan_linear.proof.doctor",
        "prove a run before it costs a week: its split, kernels and data",
    ),
    "plan": Command(
        "titan_linear.commands.plan", "a run's memory and time, and the best splits, without a GPU"
    ),
    "corpus": Command(
        "titan_linear.commands.corpus", "tokenise texts once; list, check and remove token caches"
    ),
    "batch": Command(
        "titan_linear.commands.batch", "what a step trains on, and which of its tokens are learnt"
    ),
    "convert": Command(
        "titan_linear.commands.convert", "checkpoints to Hugging Face folders, and back"
    ),
    "generate": Command(
        "titan_linear.commands.generate", "text from a run, a checkpoint or a Hugging Face folder"
    ),
    "score": Command(
        "titan_linear.commands.score",
        "log-probabilities of texts, as losses read them, or compared",
    ),
    "evaluate": Command(
        "titan_linear.commands.evaluate", "what weights remember of long texts, by length and depth"
    ),
    "lm-eval": Command(
        "titan_linear.commands.lm_eval", "lm-evaluation-harness on weights, under any split"
    ),
    "report": Command(
        "titan_linear.commands.report", "runs side by side: losses, rates, and the keys that differ"
    ),
}


def main(argv: list[str]) -> int:
    """Run the command that argv[0] names with the rest of argv, and return its exit code."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        print(
            f"error: {name!r} is not a command; use {near[0] if near else ', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return MISTAKE
    return import_module(COMMANDS[name].module).main(rest)


def help_text() -> str:
    lines = "\n".join(f"  {name:<10}{command.does}" for name, command in COMMANDS.items())
    return f"usage: titan-linear COMMAND ...\n\n{lines}\n\ntitan-linear COMMAND --help says more."


def entry() -> NoReturn:
    run_command(main)


if __name__ == "__main__":
    entry()
