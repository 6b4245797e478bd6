"""Writes docs/errors.md, every ValueError and its remedy, from the sources: `python -m tools.errors`.

A message says what is wrong and then what to do, after its first "; ", " must " or " needs ". For messages that are put
together from parts which the sources alone do not show, `COMPOSED` says what they become.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

from tools.pages import DOCS, ROOT, write

PAGE = DOCS / "errors.md"
RAISED = ("ValueError", "BadDocument", "Unlockable")
ANY = "…"  # what a message fills in

HEAD = """\
# Every refusal

A user's mistake (a wrong path, file, key or argument) is a `ValueError`; commands print it as one line, `error: …`, and
exit with 2. This page lists all of them, with what to do; `…` stands for what a message fills in.
`docs/troubleshooting.md` explains the most common. No remedy deletes or overwrites anything that this program did not
write itself: the only folders that one removes are token caches, which are written again from their texts.
`python -m tools.errors` writes this page.
"""

# The beginning of a source's path → its heading; the first that fits counts.
SECTIONS = {
    "titan_linear/config.py": "Keys",
    "titan_linear/launch.py": "Keys",
    "titan_linear/nodes.py": "Keys",
    "titan_linear/build.py": "Keys",
    "titan_linear/distributed": "Keys",
    "titan_linear/models/presets.py": "Keys",
    "titan_linear/preflight.py": "Runs and their folders",
    "titan_linear/rundir.py": "Runs and their folders",
    "titan_linear/checkpoint.py": "Checkpoints",
    "titan_linear/data": "Texts, tokenizers and corpora",
    "titan_linear/exports.py": "Hugging Face folders",
    "titan_linear/hf_io.py": "Hugging Face folders",
    "titan_linear/models": "Hugging Face folders",
    "titan_linear/generate.py": "Tools",
    "titan_linear/proof": "Tools",
    "tools": "Tools",
    "titan_linear/memory.py": "Tools",
    "titan_linear/timing.py": "Tools",
    "titan_linear/traces.py": "Tools",
    "titan_linear/ops": "Arguments of the ops",
}

# A message as it stands in the source (preceded by the source's path, if several have it) → the messages that it
# becomes, each with what to do.
_SKIP = (
    'training.on_bad_document = "skip" (tools.corpus: --on-bad-document skip) goes past such documents and counts them'
)
_BAD = f"correct the document; {_SKIP}"
_DAMAGED = (
    "restore it from a copy, or write the corpus again under another name; a token cache's folder, which is named, may "
    "be deleted: the next start writes it again"
)
_OTHERS = (
    "restore it from a copy, or use another step, one that is named; else start a new run in another job.dump_folder"
)
COMPOSED: dict[str, list[tuple[str, str]]] = {
    "…": [  # config.py
        ("FILE: … is not a key; did you mean …?", "take the key that is named; docs/keys.md has them all"),
        ("FILE: … is not a key: there is no …", "leave it out; the message names what there is instead"),
        ("FILE: … = … must be a section, […]", "must be a table of keys"),
        ("FILE: … = … must …", "give a value of the type, or in the range, that is named"),
    ],
    "… = … must be a number, … or more": [
        ("NNODES = …, NODE_RANK = …, MASTER_PORT = …", "must be a number; NODE_RANK from 0, the others from 1"),
    ],
    "titan_linear/ops/boundaries.py: … = …: must start at 0, never decrease…": [
        ("cu_seqlens = …: must start at 0, never decrease, and end at …, the number of tokens", "give such boundaries"),
    ],
    "titan_linear/ops/boundaries.py: … is … …; give N + 1 integers for N documents": [
        ("cu_seqlens is … (…)", "give N + 1 integers for N documents"),
    ],
    "command line: … is not a key…": [("command line: … is not a key; did you mean …?", "take the key that is named")],
    "command line: …: …": [("command line: --…: expected one argument", "give the key a value")],
    "… is smaller than that of the tokenizer …, …; set …": [
        ("model.vocab_size = … is smaller than that of the tokenizer …, …",
         "set it to at least that number; of a Hugging Face model, model.tokenizer_path to its tokenizer"),
    ],
    "titan_linear/build.py: …: …": [("KEY: …", "what the message after the key says, as in its row")],
    "titan_linear/data/sources.py: …: …": [
        ("…: no column … (it has: …)",
         "set training.dataset_text_field, or training.dataset_format (tools.corpus: --text-field, --format), to what "
         "it has"),
    ],
    f"…; {_SKIP}": [
        ("…, line …: not JSON in UTF-8: …", _BAD),
        ("…, line …: no field … (it has: …); set training.dataset_text_field (tools.corpus: --text-field)", _BAD),
        ("…: … is …, not text", _BAD),
        ("…: not UTF-8 at character …; repair it, or train on bytes", _BAD),
        ("…: 'messages' is no list of objects with a 'role'", _BAD),
        ("…: the chat template refuses it: …", _BAD),
        ("…: message …: the chat template writes this answer otherwise as a prompt, or once the conversation goes on",
         "put {% generation %} and {% endgeneration %} around answers in the chat template, or let conversations end "
         "in such an answer"),
        ("…: no answer to learn: …", _BAD),
    ],
    f"…; {_SKIP} (… in all)": [],  # the same messages as above
    "validation.holdout = … leaves no document for …, of …; …": [
        ("validation.holdout = … leaves no document for …, of …", "set it to what is named, or train on more texts"),
        ("validation.holdout = …: all are the same", "give validation.dataset_path, or train on more documents"),
    ],
    "config.json gives …; fetch it again": [
        (f"config.json gives {what}", "fetch it again")
        for what in (
            "attention heads = …, which must be a multiple of kv_heads = …",
            "… v_heads = …, which must be a multiple of heads = …",
            "kda lower_bound = …, which must be null or lie in [-5, 0)",
            "top_k = …, more than num_experts = …",
            "num_experts = … in groups = …, which must be of one size, two or more",
            "top_groups = …, more than groups = …",
            "top_k = …, more than the experts of top_groups = … groups of …",
        )
    ],
    "'…': …": [("'…/config.json': …", "what the message says of the key, as in its row")],
    "'…': … …": [("'…': the tensors are not those of this …: …", "give the folder of this model, or fetch it again")],
    "the tensors are not those of this …:\n  …": [],  # the row above has it
    "'…' holds neither model.safetensors.index.json nor model.safetensors; …": [
        ("'…' holds neither model.safetensors.index.json nor model.safetensors",
         "give the folder of a model with its weights; pickle files are never loaded: convert them to safetensors"),
    ],
    "model.…": [("model.impl = … cannot run …: …", "use 'auto' or 'torch'")],
    "… = … is not supported here; …": [("… = … is not supported here", "leave it out, or what the message says")],
    "checkpoint.load_step = …: there is no whole checkpoint of this step in '…'; …": [
        ("checkpoint.load_step = …: there is no whole checkpoint of this step in '…'",
         "use one of those that are named, or -1 for the newest"),
    ],
    "checkpoint file '…' …; …": [
        ("checkpoint file '…' was altered since it was saved (size or checksum)", _OTHERS),
        ("checkpoint file '…' is missing", _OTHERS),
        ("checkpoint file '…' cannot be read (…)", _OTHERS),
    ],
    "checkpoint file '…' is missing or damaged; …": [("checkpoint file '…' is missing or damaged", _OTHERS)],
    "job.dump_folder = '…' holds a run that cannot resume with other values of\n…\nrestore them, or start a new run in "
    "another job.dump_folder…": [
        ("job.dump_folder = '…' holds a run that cannot resume with other values of …",
         "restore them, or start a new run in another job.dump_folder; where the run left no checkpoint, "
         "job.start_anew = true begins again there and sets aside what it left"),
    ],
    **{
        f"{what}; …": [(what, _DAMAGED)]
        for what in (
            "… is missing", "… has … bytes instead of …", "… does not fit the other files",
            "…: document … has no tokens", "… was altered: bytes … to … do not have their checksum", "… is not JSON: …",
            "… does not say that it is a titan_linear corpus 1 or titan_linear corpus 2",
            "… was altered: it does not have its checksum",
        )
    },
}  # fmt: skip


def page() -> str:
    """The page's text."""
    parts, found = [HEAD], [*messages()]
    for heading in dict.fromkeys(SECTIONS.values()):
        rows = dict.fromkeys(
            row for where, text in found if section(where) == heading for row in explained(where, text)
        )
        parts.append(f"## {heading}\n\n| message | what to do |\n|---|---|")
        parts += [f"| `{cell(what)}` | {cell(remedy)} |" for what, remedy in rows]
        parts.append("")
    return "\n".join(parts)


def section(where: str) -> str:
    return next(heading for start, heading in SECTIONS.items() if where.startswith(start))


def explained(where: str, text: str) -> list[tuple[str, str]]:
    """(what is wrong, what to do) of a source's message. KeyError: the message does not say what to do."""
    for key in (f"{where}: {text}", text):
        if key in COMPOSED:
            return COMPOSED[key]
    for mark, kept in (("; ", ""), (" must ", "must "), (" needs ", "needs ")):
        what, found, remedy = text.partition(mark)
        if found and remedy.strip(f"{ANY} "):
            return [(what, kept + remedy)]
    raise KeyError(text)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def messages() -> Iterator[tuple[str, str]]:
    """(path of the source, message) of every ValueError that the sources make."""
    for file in sorted(file for folder in ("titan_linear", "tools") for file in (ROOT / folder).rglob("*.py")):
        where = file.relative_to(ROOT).as_posix()
        made = [node for node in ast.walk(ast.parse(file.read_text())) if _raises(node)]
        module = importlib.import_module(where.removesuffix(".py").replace("/", ".")) if made else None
        for node in sorted(made, key=lambda node: node.lineno):
            yield where, _text(node.args[0], module)


def _raises(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED


def _text(node: ast.expr, module: ModuleType) -> str:
    """The text of a literal, its parts joined; constants of the module itself are filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, module) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, module) + _text(node.right, module)
    if isinstance(node, ast.FormattedValue):
        node = node.value
    value = node.value if isinstance(node, ast.Constant) else getattr(module, getattr(node, "id", ""), None)
    return value if isinstance(value, str) else ANY


if __name__ == "__main__":
    sys.exit(write(PAGE, page()))
