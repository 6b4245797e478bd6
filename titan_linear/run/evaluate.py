"""Recall over long contexts, evaluated without decoding.

Prompts are packed as documents, and their answers are scored in one forward pass, under any
split.

    exact    1 if greedy decoding would write the answer: each of its tokens is the likeliest after
             those before it
    score    1 if the answer is likelier than other candidates, at the token where they differ;
             chance: 1 / candidates
    loss     −log p of the answer, nats per token

A prompt's numbers are means over its answers. Earlier answers stand in the prompt, so no
state is kept and nothing is decoded: greedy decoding writes an answer exactly if each of
its tokens is likeliest.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_linear.config import Evaluation
from titan_linear.data import Prompts, Questions, TaskSample
from titan_linear.data.corpus.chat import Conversations
from titan_linear.data.streams.prompts import OTHERS
from titan_linear.data.tasks import LOSS, SPREAD
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.run.data import RunData
from titan_linear.run.reading import Reader
from titan_linear.storage.rundir import EVALUATION, append_lines

Record = dict[str, Any]
# Stands for a question in a chat template. No template contains it, and a template that
# alters texts alters it.
MARK = "\ufdd0" + "Is \"a\" < 'B' & 1?\n\n" * 999 + "\ufdd1"
NUMBERS = ("score", "chance", "exact", "loss")
# What a forward pass finds of each label: whether it is the likeliest token, its log p, and
# the log p of the other candidates (NaN where there is none).
LABEL = np.dtype(
    [
        ("prompt", np.int64),
        ("position", np.int64),
        ("answer", np.int64),
        ("likeliest", np.bool_),
        ("logprob", np.float64),
        ("others", np.float64, OTHERS),
    ]
)


def samples_of(e: Evaluation) -> list[TaskSample]:
    """Return `evaluation.samples` samples of each task and length, at evenly spaced depths."""
    depths = np.linspace(0, 1, e.samples).tolist() if e.samples > 1 else [0.5]
    return [
        TaskSample(task, length, depth, number)
        for task in e.tasks
        for length in e.lengths
        for number, depth in enumerate(depths)
    ]


def open_prompts(data: RunData) -> Prompts:
    """Open the prompts that the configuration asks for."""
    e = data.evaluation
    side = data.validation_text()
    around = ("", "")
    # Split the template at the mark for a question.
    if e.chat:
        chat = Conversations(data.tokenizer, "evaluation.chat = true")
        around = tuple(chat.text([{"role": "user", "content": MARK}]).split(MARK))
        if len(around) != 2:
            raise ValueError(
                "evaluation.chat = true: the chat template drops, alters or repeats a user's message; "
                "set it to false, or model.tokenizer_path to a folder with another template"
            )
    questions = Questions(data.tokenizer, side, data.seed, around)
    # Streams are at least as long as in training.
    seq_len = data.parallelism.even_length(max(data.training.seq_len, *e.lengths))
    return Prompts(samples_of(e), questions.prompt, seq_len)


def records_of(sample: TaskSample, rows: np.ndarray) -> list[Record]:
    """Return the records of one prompt.

    Args:
        rows: of the prompt's labels, [n] LABEL.
    """
    return by_position(sample, rows) if sample.task == LOSS else [recall(sample, rows)]


def examine(
    reader: Reader,
    prompts: Prompts,
    ask: Callable[[], None] = lambda: None,
    show: Callable[[TaskSample, np.ndarray], list[Any]] = records_of,
) -> list[Any]:
    """Score all prompts; rank 0 returns their records, other ranks an empty list.

    Args:
        ask: called after each batch; it may raise.
        show: makes a prompt's records from its rows.
    """
    shown: dict[int, list[Any]] = {}
    for of_all in reader.read(prompts, partial(_answered, vocab_size=reader.tokenizer.vocab_size)):
        ask()
        if of_all:
            # Group the labels of all ranks by prompt, in the order of positions.
            fields = [np.concatenate(of_ranks) for of_ranks in zip(*of_all)]
            rows = np.rec.fromarrays(fields, LABEL)
            rows = rows[np.lexsort((rows["position"], rows["prompt"]))]
            for of in _groups(rows, "prompt"):
                i = int(of["prompt"][0])
                shown[i] = show(prompts.samples[i], of)
    return [record for i in sorted(shown) for record in shown[i]]


def _groups(rows: np.ndarray, field: str) -> list[np.ndarray]:
    """Split rows where the field changes."""
    return np.split(rows, np.flatnonzero(np.diff(rows[field])) + 1)


def _answered(
    logits: ChunkedLogits, labels: Tensor, columns: dict[str, Tensor], vocab_size: int
) -> tuple[Tensor, ...]:
    """Return the fields of LABEL, in order."""
    ids = torch.cat([labels[:, None], columns["others"]], 1)
    logprobs, likeliest, _ = logits.top(ids, 1, vocab_size)
    logprobs = logprobs.masked_fill(ids < 0, torch.nan).double()
    place = columns["prompt"], columns["position"], columns["answer"]
    return *place, likeliest[:, 0] == labels, logprobs[:, 0], logprobs[:, 1:]


def recall(sample: TaskSample, rows: np.ndarray) -> Record:
    # One part for each answer; candidates are compared at one token of each.
    answers = _groups(rows, "answer")
    compared = rows[~np.isnan(rows["others"][:, 0])]
    own = compared["logprob"][:, None]
    others = compared["others"]
    chosen = (own >= others) | np.isnan(others)
    ties = (own == others).sum(1)
    candidates = 1 + (~np.isnan(others)).sum(1)
    return {
        "task": sample.task,
        "length": sample.length,
        "depth": None if sample.task in SPREAD else sample.depth,
        "exact": float(np.mean([answer["likeliest"].all() for answer in answers])),
        "score": float(np.mean(chosen.all(1) / (1 + ties))),
        "chance": float(np.mean(1 / candidates)),
        "loss": float(-rows["logprob"].mean()),
    }


def means(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return the means of records' numbers, grouped by these keys."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        grouped.setdefault(tuple(record.get(key) for key in keys), []).append(record)
    return {
        of: {
            # In a file, a number that is not finite is text.
            name: float(np.mean([float(record[name]) for record in some]))
            for name in NUMBERS
            if name in some[0]
        }
        for of, some in grouped.items()
    }


def tiles(records: Iterable[Record]) -> tuple[list[int], list[float], np.ndarray]:
    """Return lengths, depths, and scores by both [depths, lengths]; NaN without a prompt."""
    of = means(records, "length", "depth")
    lengths, depths = (sorted({*places}) for places in zip(*of))
    return (
        lengths,
        depths,
        np.array([[of.get((n, d), {}).get("score", np.nan) for n in lengths] for d in depths]),
    )


def write_down(records: Iterable[Record], step: int, folder: Path) -> None:
    append_lines(folder / EVALUATION, ({"step": step, **record} for record in records))


def by_position(sample: TaskSample, rows: np.ndarray) -> list[Record]:
    """Return the mean loss at positions 1, 2–3, 4–7, …

    Each record has its range's first position.
    """
    bins = np.log2(rows["position"]).astype(int)
    losses = {2 ** int(i): float(-rows["logprob"][bins == i].mean()) for i in np.unique(bins)}
    own = {"task": sample.task, "length": sample.length, "depth": None}
    return [{**own, "position": position, "score": loss} for position, loss in losses.items()]
