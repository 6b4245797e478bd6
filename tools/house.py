"""How large this code is.

    python -m tools.house                      sizes by folder, rooms and imports

tokens      Python's NAME, OP, NUMBER and STRING (tokenize): independent of how code is laid out
statements  nodes of the syntax tree, docstrings left out
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_linear"
FOLDERS = ("titan_linear", "tools", "tests")
SIZES = ("files", "lines", "tokens", "statements")
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


# --- Sizes -----------------------------------------------------------------------------------------------------------


def tokens(text: str) -> int:
    """Count tokens. Trailing commas, which the formatter adds and removes, do not count."""
    every = tokenize.generate_tokens(io.StringIO(text).readline)
    counted = [token for token in every if token.type in COUNTED]
    trailing = sum(a.string == "," and b.string in ")]}" for a, b in pairwise(counted))
    return len(counted) - trailing


def statements(text: str) -> int:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    strings = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return len(nodes) - len(strings)


def room(file: Path) -> str:
    """titan_linear/ops/exchange/kcp.py → titan_linear/ops/exchange; titan_linear/train.py → titan_linear/train.py."""
    folder = file.relative_to(ROOT).parent
    return str(file.relative_to(ROOT)) if folder == Path("titan_linear") else str(folder)


def sizes(folder: str) -> dict[str, Counter]:
    """For each room below a folder of the repository: its files, lines, tokens, statements."""
    rooms: dict[str, Counter] = defaultdict(Counter)
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        rooms[room(file)].update(
            dict(zip(SIZES, (1, text.count("\n"), tokens(text), statements(text))))
        )
    return rooms


def words(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


# --- Imports ---------------------------------------------------------------------------------------------------------


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of the package of which the first imports from the second."""
    pairs = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titan_linear"):
                for name in node.names:
                    pairs.add((room(file), room(_file_of(node.module, name.name))))
    return {(a, b) for a, b in pairs if a != b}


def _file_of(module: str, name: str) -> Path:
    path = ROOT / module.replace(".", "/")
    candidates = (
        path / f"{name}.py",
        path / name / "__init__.py",
        path.with_suffix(".py"),
        path / "__init__.py",
    )
    return next(file for file in candidates if file.is_file())


def names_imported(file: Path) -> int:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return sum(len(n.names) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)))


def main() -> None:
    line = "{:40} {:>6} {:>7} {:>8} {:>10}"
    print(line.format("", *SIZES))
    for folder in FOLDERS:
        rooms = sizes(folder)
        for name, counts in rooms.items() if folder == "titan_linear" else ():
            print(line.format(name, *(counts[size] for size in SIZES)))
        print(
            line.format(
                f"{folder}, all",
                *(sum(counts[size] for counts in rooms.values()) for size in SIZES),
            )
        )
    between = arrows()
    print(f"rooms {len({r for pair in between for r in pair})}, arrows between them {len(between)}")
    print(f"names imported by train.py {names_imported(PACKAGE / 'train.py')}")
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    print(
        f"fmt: skip {sum(file.read_text(encoding='utf-8').count('# fmt: skip') for file in files)}"
    )
    print(f"words of Markdown {words(*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md'))}")


if __name__ == "__main__":
    main()
