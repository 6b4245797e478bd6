"""Every key has a test that its name finds."""

import ast
import re
from pathlib import Path

from titan_linear.config import KEYS

TESTS = Path(__file__).parents[1]


def names_in(tree):
    """Names with a dot: in texts, as attributes, and as arguments with "__". Keys that only stand in a list do not
    count, because the list's test says the same of all of them."""
    sequences = [n for n in ast.walk(tree) if isinstance(n, (ast.List, ast.Tuple, ast.Set))]
    listed = {id(x) for sequence in sequences for x in sequence.elts}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in listed or node.value not in KEYS:
                yield from re.findall(r"\b[a-z_0-9]+\.[a-z_0-9]+\b", node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg.replace("__", ".")
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
            yield f"{owner}.{node.attr}"


def untested(texts):
    found = {name for text in texts for name in names_in(ast.parse(text))}
    return [key for key in KEYS if key not in found]


def test_each_key_is_named_by_a_test():
    files = [file for file in TESTS.rglob("test_*.py") if file != Path(__file__)]
    files.append(TESTS / "losses/cases.py")
    assert untested(file.read_text() for file in files) == []


def test_a_list_of_keys_tests_none_of_them():
    texts = [
        "keys = ['job.description', 'adapter.rank']",
        "run(['--adapter.alpha=1'])",
        "c.dpo.beta",
    ]
    missing = untested([*texts, "run(float8__enable=True)"])
    assert {"job.description", "adapter.rank"} <= {*missing}
    assert {*KEYS} - {*missing} == {"adapter.alpha", "dpo.beta", "float8.enable"}
