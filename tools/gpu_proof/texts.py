"""Records that runs of a proof train on, made of the sources of Python's standard library."""

import json
import sysconfig
from itertools import pairwise
from pathlib import Path


def write_texts(folder: Path, count: int, length: int) -> None:
    """Write `count` records of each kind; a document has about `length` bytes.

    A file's beginning is the question and what follows it the right answer; the next file's text is a wrong one.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [file.read_bytes().decode("ascii", "ignore") for file in files]
    sources = [text for text in sources if len(text) > length][: count + 1]
    half = length // 2
    pairs = []
    trees = []
    completions = []
    for text, other in pairwise(sources):
        prompt = text[:half]
        chosen = text[half : 2 * half]
        rejected = other[half : 2 * half]
        if rejected == chosen:  # some files are copies of others
            continue
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        answers = [
            {"text": chosen, "advantages": 1.0},
            {"text": chosen[: half // 2], "advantages": 0.5},
            {"text": rejected, "advantages": -1.0},
        ]
        trees.append({"text": prompt, "weights": 0, "children": answers})
        completions.append({"prompt": prompt, "completion": chosen})
    documents = [{"text": text[:length]} for text in sources]
    kinds = {"documents": documents, "pairs": pairs, "trees": trees, "answers": completions}
    for name, records in kinds.items():
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
