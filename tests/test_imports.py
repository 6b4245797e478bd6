"""Imports flow one way: upward never, and not in a circle. Imports inside functions count."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tools.house import repeated_classes

ROOT = Path(__file__).parents[1]

# From the bottom. A module imports from lower layers, and from its own room: a file or a folder named here.
LAYERS = (
    ("ops", "config"),
    ("models", "transformers"),
    ("distributed",),
    ("storage",),
    ("data", "losses"),
    ("step",),
    ("run",),
    ("hooks", "verl"),
    ("planner", "proof"),
    ("commands",),
    ("train",),
    ("__main__", "launch"),
    ("tools",),
)
FORBIDDEN = {"tools": {"train", "run.launch"}, "commands": {"train"}, "train": {"ops"}}
EXCEPT = {
    ("tools.bench_train", "train"),  # measures the trainer itself
}
PACKAGE = "titan_linear"


def modules(root):
    """Dotted name → file, of the package and the tools."""
    files = [file for folder in (PACKAGE, "tools") for file in (root / folder).rglob("*.py")]
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def imports(name, file, known):
    """The modules of ours that a module imports, anywhere in it."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {
                f"{source}.{a.name}" if f"{source}.{a.name}" in known else source
                for a in node.names
            }
    return {other for other in found if other in known} - {name}


def _short(*names):
    return tuple(name.removeprefix(f"{PACKAGE}.") for name in names)


def room(name):
    """titan_linear.ops.exchange.kcp → ops; tools.house → tools."""
    parts = name.split(".")
    return parts[0] if parts[0] != PACKAGE else parts[1] if len(parts) > 1 else ""


def problems(root):
    known = modules(root)
    graph = {name: imports(name, file, known) for name, file in known.items()}
    # "": the package's own file
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer} | {"": -1}
    said = [f"{name} has no layer" for name in graph if room(name) not in level]
    for name, others in graph.items():
        for other in sorted(others):
            here, there = room(name), room(other)
            if here != there and level.get(there, 0) >= level.get(here, len(LAYERS)):
                said.append(f"{name} imports {other}, which is not below it")
            from_here, target = _short(name, other)
            if {there, target} & FORBIDDEN.get(here, set()) and (from_here, target) not in EXCEPT:
                said.append(f"{name} imports {other}, which is not for it")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        said.append("a circle: " + " → ".join(reversed(error.args[1])))
    return said


# Folders of tests that are of no one folder of the package: the matrix of runs on GPUs, whole runs, and tools/.
OTHER_TESTS = {"matrix", "runs", "tools"}


def test_tests_mirror_the_package():
    tests = {file.relative_to(ROOT / "tests"): file for file in (ROOT / "tests").rglob("*.py")}
    folders = {str(name.parent) for name in tests if name.name.startswith("test_")} - OTHER_TESTS
    assert [folder for folder in folders if not (ROOT / PACKAGE / folder).is_dir()] == []
    # What several files need is in modules without tests.
    sources = {
        (str(name), node.module)
        for name, file in tests.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert [pair for pair in sources if ".test_" in (pair[1] or "")] == []


def test_no_public_class_name_repeats():
    trees = [ast.parse(file.read_text()) for file in (ROOT / PACKAGE).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    assert repeated_classes(nodes) == []
    assert repeated_classes([*nodes, ast.parse("class Decoder: ...").body[0]]) == ["Decoder"]


def test_only_proofs_know_the_definitions():
    known = modules(ROOT)
    reference = f"{PACKAGE}.ops.reference"
    users = {
        room(name)
        for name, file in known.items()
        if any(x.startswith(reference) for x in imports(name, file, known))
    }
    assert users <= {"ops", "proof", "tools"} and "proof" in users


def test_imports_flow_one_way():
    assert problems(ROOT) == []
    assert len(modules(ROOT)) > 50


@pytest.mark.parametrize(
    "files, problem",
    [
        (
            {"titan_linear/ops/a.py": "import titan_linear.data"},
            "titan_linear.ops.a imports titan_linear.data, which",
        ),
        (
            {"titan_linear/models/a.py": "def f():\n    from titan_linear import step"},
            "titan_linear.models.a imports titan_linear.step, which is not below it",
        ),
        (
            {"titan_linear/run/launch.py": "from titan_linear.train import x"},
            "run.launch imports titan_linear.train, which",
        ),
        (
            {"tools/a.py": "from titan_linear.train import x"},
            "tools.a imports titan_linear.train, which is not for",
        ),
        (
            {"titan_linear/run/launch.py": "", "tools/a.py": "from titan_linear.run import launch"},
            "tools.a imports titan_linear.run.launch, which is not for",
        ),
        (
            {"titan_linear/train.py": "from titan_linear.ops import x"},
            "train imports titan_linear.ops, which is not",
        ),
        (
            {
                "titan_linear/ops/a.py": "from .b import x",
                "titan_linear/ops/b.py": "from . import a",
            },
            "a circle: ",
        ),
        ({"titan_linear/new.py": ""}, "titan_linear.new has no layer"),
    ],
)
def test_what_flows_another_way_is_found(files, problem, tmp_path):
    house = {
        "titan_linear/__init__.py": "",
        "titan_linear/data/__init__.py": "",
        "titan_linear/step/__init__.py": "import math",
        "titan_linear/ops/__init__.py": "x = 1",
        "titan_linear/train.py": "import titan_linear.step",
        "tools/b.py": "from titan_linear import data",
    }
    for tree, expected in ((house, 0), (files, 1)):
        for name, text in tree.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        said = problems(tmp_path)
        assert len(said) == expected, said
    assert problem in said[0]
