"""checkpoint.load_step: back once, whatever interrupts it, and on from there."""

from pathlib import Path

import pytest

from tests.records import write_json
from tests.refusals import refused
from titan_linear.storage import step_folders
from titan_linear.storage.step_folders import complete_steps, find_step, rewind


@pytest.fixture
def folder(tmp_path):
    """Whole checkpoints of steps 3, 6, 9 and 12."""
    make_steps(tmp_path, 3, 6, 9, 12)
    return tmp_path


def make_steps(folder, *steps):
    for step in steps:
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / "manifest.json").write_text("{}")


def start(folder, load_step):
    """What a run does with its checkpoints when it begins; the step that it resumes from."""
    step = find_step(folder, load_step)
    rewind(folder, step, load_step)
    return step


def test_later_steps_are_set_aside_at_once(folder):
    for step in (6, 9):
        (folder / f"step-{step}-hf").mkdir()  # what was exported of them
    assert start(folder, 6) == 6
    assert complete_steps(folder) == [3, 6] and (folder / "step-6-hf").exists()
    assert sorted(path.name for path in folder.glob("abandoned-*/*")) == [
        "step-12",
        "step-9",
        "step-9-hf",
    ]


def test_the_same_command_goes_on_from_the_newest(folder):
    assert [start(folder, 6), start(folder, 6)] == [6, 6]
    make_steps(folder, 9)
    assert [start(folder, 6), start(folder, 6)] == [9, 9]
    (folder / "step-6").rename(folder / "pruned")
    assert start(folder, 6) == 9


def test_back_to_the_newest_step_goes_on_from_there_too(folder):
    assert start(folder, 12) == 12 and not list(folder.glob("abandoned-*"))
    make_steps(folder, 15)
    assert start(folder, 12) == 15


@pytest.mark.parametrize("between", [-1, 9])
def test_another_start_in_between_lets_it_go_back_again(folder, between):
    assert start(folder, 6) == 6
    make_steps(folder, 9, 15)
    assert start(folder, between) == (15 if between == -1 else 9)
    assert start(folder, 6) == 6 and complete_steps(folder) == [3, 6]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(4))
def test_killed_at_any_moment(folder, moment, monkeypatch):
    """Before the first rename, between renames, before the note, before the note has its name."""
    whole, left = Path.rename, moment

    def rename(self, target):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return whole(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        if moment == 3:  # both steps have moved, and the note has its name
            patch.setattr(
                step_folders,
                "sync",
                lambda path: path if path != folder else (_ for _ in ()).throw(Killed),
            )
        with pytest.raises(Killed):
            start(folder, 6)
    assert start(folder, 6) == 6
    assert complete_steps(folder) == [3, 6] and len(list(folder.glob("abandoned-*/*"))) == 2
    make_steps(folder, 9)
    assert start(folder, 6) == 9


def test_a_note_that_is_none_is_named(folder):
    (folder / "rewound.json").write_text("{")
    with refused(r"rewound.json' cannot be read .*move it away"):
        start(folder, 6)
    write_json(folder / "rewound.json", {"load_step": 3})
    assert start(folder, 6) == 6
