"""Depth is measured, so that what is refused does not depend on the interpreter's recursion limit."""

import inspect
import sys

import pytest

from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.config.nesting import NESTED, check_nesting
from titan_linear.data.corpus.chat import _Template
from titan_linear.data.corpus.sources import RECORD_NESTED, read_documents


@pytest.fixture(params=["lowered", "raised"])
def recursion_limit(request):
    """Python's, as other code may have set it."""
    before, used = sys.getrecursionlimit(), len(inspect.stack(0))
    sys.setrecursionlimit({"lowered": used + 500, "raised": 100_000}[request.param])
    yield
    sys.setrecursionlimit(before)


def brackets(depth, what="1"):
    return "[" * depth + what + "]" * depth


@pytest.mark.parametrize("depth", [NESTED - 2, NESTED - 1, 100_000])
def test_of_a_configuration(depth, recursion_limit, tmp_path):
    """A section and its keys are levels, too."""
    file = tmp_path / "run.toml"
    file.write_text(f"[model]\nkda = {brackets(depth)}\n")
    accepted = depth == NESTED - 2
    with refused("kda is not a key" if accepted else r"is not TOML: it is nested [\d,]+ deep"):
        load_config(["--job.config_file", str(file)])


@pytest.mark.parametrize("depth", [RECORD_NESTED, RECORD_NESTED + 1, 100_000])
def test_of_a_record(depth, recursion_limit, tmp_path):
    file = tmp_path / "a.jsonl"
    # brackets in a text count nothing
    text = '{"text": "[[\\"[[' + "[" * 300 + '", "other": ' + brackets(depth - 1) + "}\n"
    file.write_text(text)
    (document,) = read_documents("jsonl", file, "text", "text")
    accepted = depth <= RECORD_NESTED
    assert document.problem == (
        "" if accepted else f"it is nested {depth:,} deep, and 250 is the most; nest it less"
    )


@pytest.mark.parametrize("depth", [30, NESTED + 1, 10_000])
def test_of_a_chat_template(depth, recursion_limit):
    template = "[[((" * 20 + "{{ " + "(" * depth + "'((((('" + ")" * depth + " }}"
    if depth <= NESTED:
        assert _Template("default", template).names == set()
    else:
        with refused(f"'default' is not one: it is nested {depth:,} deep, and 50 is the most"):
            _Template("default", template)


@pytest.mark.parametrize(
    "text, depth",
    [
        ("", 0),
        ("[[1], [2], [3]]", 2),
        ("a = [ # [[[\n1]", 1),
        ("a = '[[[' \n b = [{}]", 2),
        ("a = '''\n[[['[[ ''' \n b = [{}]", 2),
        ('a = """\n[[[\\"""[["[[ """ \n b = [{}]', 2),
        ('{"a\\"[[": ["\\\\", [1]]}', 3),
        pytest.param('["' + '\\"' * 1_000_000, 1, id="no end"),
        ("]]]]", -1),
    ],
)
def test_what_quotes_and_comments_hide(text, depth):
    """A quote that does not end is read once."""
    check_nesting(text, max(depth, 0))
    if depth > 0:
        with refused(f"nested {depth} deep"):
            check_nesting(text, depth - 1)
