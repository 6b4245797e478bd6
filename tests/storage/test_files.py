"""One function reads JSON, and says in a line what is wrong with a file."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from titan_linear.storage.files import Unreadable, progress, read_json


@pytest.mark.parametrize("rank, seconds, shown", [(0, 1, True), (1, 1, False), (0, 0.1, False)])
def test_progress_is_shown_by_one_rank_if_it_takes_time(rank, seconds, shown, monkeypatch, capsys):
    """Nine items, each of so many seconds."""
    monkeypatch.setattr("tqdm.std.time", count(0, seconds).__next__)
    monkeypatch.setenv("RANK", str(rank))
    assert list(progress(range(9), "verifying x")) == [*range(9)]
    assert ("verifying x" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
def test_json_is_read(begin, tmp_path):
    (tmp_path / "a.json").write_bytes(begin + b'{"a": [1, "\xc3\xa9"]}')
    assert read_json(tmp_path / "a.json", dict[str, Any], "") == {"a": [1, "é"]}


@pytest.mark.parametrize(
    "content, why",
    [
        (None, "No such file or directory"),
        (b"", "Invalid JSON: EOF"),
        (b"[" * 100_000, "Invalid JSON: recursion limit"),
        (b'{"a": ' * 201 + b"1" + b"}" * 201, "Invalid JSON: recursion limit"),
        (b'{"a": 1', "Invalid JSON: EOF"),
        (b"[1]", "Input should be an object"),
        (b"null", "Input should be an object"),
        (b'{"a": null}', "a: Input should be a valid integer"),
        (b'{"a": "\xff"}', "Invalid JSON: "),
        (b'{"\\ud800": 1}', "Invalid JSON: "),
        ('{"a": 1}'.encode("utf-16"), "Invalid JSON: "),
    ],
)
def test_what_is_no_json_is_said_in_a_line(content, why, tmp_path):
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Unreadable) as error:
        read_json(file, dict[str, int], "do this")
    line = str(error.value)
    assert (
        line.startswith(f"'{file}' cannot be read ({why}")
        and line.endswith("); do this")
        and "\n" not in line
    )


def test_a_name_that_is_too_long():
    with pytest.raises(Unreadable, match="File name too long"):
        read_json(Path("x" * 300), dict, "")
