"""Sizes of this code, and how easy it is to read.

    python -m tools.house                      sizes by folder, rooms, imports, and readability

Tokens are Python's NAME, OP, NUMBER and STRING (tokenize): independent of how code is laid out.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_linear"
FOLDERS = ("titan_linear", "tools", "tests")
SIZES = ("files", "lines", "tokens")
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


# --- Sizes -----------------------------------------------------------------------------------------------------------


def tokens(text: str) -> int:
    """Count tokens. Trailing commas, which the formatter adds and removes, do not count."""
    every = tokenize.generate_tokens(io.StringIO(text).readline)
    counted = [token for token in every if token.type in COUNTED]
    trailing = sum(a.string == "," and b.string in ")]}" for a, b in pairwise(counted))
    return len(counted) - trailing


def room(file: Path) -> str:
    """titan_linear/ops/exchange/kcp.py → titan_linear/ops/exchange; titan_linear/train.py → titan_linear/train.py."""
    folder = file.relative_to(ROOT).parent
    return str(file.relative_to(ROOT)) if folder == Path("titan_linear") else str(folder)


def sizes(folder: str) -> dict[str, Counter]:
    """For each room below a folder of the repository: its files, lines and tokens."""
    rooms: dict[str, Counter] = defaultdict(Counter)
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        rooms[room(file)].update(files=1, lines=text.count("\n"), tokens=tokens(text))
    return rooms


# --- Imports ---------------------------------------------------------------------------------------------------------


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of the package of which the first imports from the second."""
    pairs = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titan_linear"):
                for name in node.names:
                    pairs.add((room(file), room(_file_of(node.module, name.name))))
    return {pair for pair in pairs if len({*pair}) == 2}


def _file_of(module: str, name: str) -> Path:
    path = ROOT / f"{module}.{name}".replace(".", "/")
    # The name is a folder, a module, or something in one of these.
    while not path.is_dir():
        file = path.with_suffix(".py")
        if file.is_file():
            return file
        path = path.parent
    return path / "__init__.py"


# --- Readability -----------------------------------------------------------------------------------------------------

# Phrases that a reader has to decode.
PHRASES = re.compile(
    r"\b(that of|those of|those that|goes on|is no|are none|as it is|parted|hears of|says what)\b"
    r'|"""(Of|What) '
)


def density(files: list[Path]) -> tuple[float, float]:
    """Tokens per line, and comment lines per 1,000 lines. Blank lines do not count."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    lines = list(filter(None, map(str.strip, text.splitlines())))
    comments = sum(line.startswith("#") for line in lines)
    return tokens(text) / len(lines), 1000 * comments / len(lines)


def repeated_classes(nodes: list[ast.AST]) -> list[str]:
    """Public names that several classes have."""
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, n in names.items() if n > 1 and not name.startswith("_"))


def takes_config(node: ast.AST) -> bool:
    """Whether this is a function that takes a run's whole configuration."""
    function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return function and ": Config" in re.findall(r": \w+", ast.unparse(node.args))


def asks_for_adapter(node: ast.AST) -> bool:
    """Whether this is a condition on adapters."""
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    conditional = isinstance(node, (ast.If, ast.IfExp, ast.comprehension))
    return conditional and any("adapter" in ast.unparse(test) for test in tests)


def readability() -> list[str]:
    files = sorted(PACKAGE.rglob("*.py"))
    host = [file for file in files if "triton" not in file.parts]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [file.read_text(encoding="utf-8") for file in [*files, *pages]]
    per_line, comments = density(host)
    repeated = repeated_classes(nodes)
    return [
        f"package without ops/triton: {per_line:.2f} tokens a line, {comments:.1f} comment lines per 1,000",
        f"public class names defined twice {len(repeated)}: {', '.join(repeated)}",
        f"functions that take the whole Config {sum(map(takes_config, nodes))}",
        f"conditions on adapters {sum(map(asks_for_adapter, nodes))}",
        f"phrases to rewrite {sum(len(PHRASES.findall(text)) for text in texts)}",
    ]


def main() -> None:
    line = "{:40} {:>6} {:>7} {:>8}"
    print(line.format("", *SIZES))
    for folder in FOLDERS:
        total: Counter = Counter()
        for name, counts in sizes(folder).items():
            total += counts
            if folder == PACKAGE.name:
                print(line.format(name, *map(counts.get, SIZES)))
        print(line.format(f"{folder}, all", *map(total.get, SIZES)))
    between = arrows()
    rooms = set().union(*between)
    print(f"rooms {len(rooms)}, arrows between them {len(between)}")
    print(*readability(), sep="\n")


if __name__ == "__main__":
    main()
