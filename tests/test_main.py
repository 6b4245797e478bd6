"""`titan-linear COMMAND …`: one entry for all commands."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.refusals import exit_of, is_refused, own_handlers
from titan_linear.__main__ import COMMANDS, main
from titan_linear.run import launch

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name, capfd):
    with own_handlers():
        code, said = exit_of(main, [name, "--help"], capfd)
    assert code == 0 and ("run_train.sh" if name == "train" else f"titan-linear {name}") in said


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(
        f"\n  {name} " in said and command.does in said for name, command in COMMANDS.items()
    )


def test_a_misspelt_command_is_refused(capsys):
    assert is_refused(main, ["planner"], capsys) == "'planner' is not a command; use plan\n"
    assert is_refused(main, ["deploy"], capsys).startswith(
        "'deploy' is not a command; use train, doctor, "
    )


def test_train_asks_for_a_file_or_texts(capsys, monkeypatch):
    said = is_refused(main, ["train", "--training.steps", "7"], capsys)
    assert said.startswith("job.config_file is missing: without a file this would train model.name")
    assert "'stdlib' for 7 steps, in job.dump_folder = 'outputs'; give one, --job.config" in said
    # A misspelt key is named first; keys can be printed and texts given without a file.
    said = is_refused(main, ["train", "--training.step=7"], capsys)
    assert "--training.step=7 is not a key" in said
    started = []
    monkeypatch.setattr(launch, "main", lambda argv: started.append(argv) or 0)
    for option in ("--job.config_file=x", "--training.dataset=stdlib", "--print-config", "--help"):
        assert main(["train", option]) == 0
    assert len(started) == 4


def test_the_installed_script_is_this_entry():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    module, _, function = scripts["titan-linear"].partition(":")
    assert callable(getattr(import_module(module), function))
