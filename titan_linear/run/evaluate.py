"""What a model remembers: prompts are packed as documents, and their answers scored in one forward under any split.

    exact    1 if greedy decoding would write the answer: each of its tokens is the likeliest after those before it
    score    1 if the answer is likelier than others in its place, at the token where they part; chance: 1 / candidates
    loss     −log p of the answer, nats per token

A prompt's numbers are means over its answers, and those of the answers before stand in the prompt. So no state is kept,
and nothing is decoded: a model that writes the answer is one that finds each of its tokens likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Config, Evaluation
from titan_linear.data import Prompts, Sample, Side, Tokenizer, split_corpus
from titan_linear.data.corpus.chat import Conversations
from titan_linear.data.streams.loader import micro_batch
from titan_linear.data.tasks import LOSS
from titan_linear.distributed.groups import gathered
from titan_linear.distributed.mesh import ParallelDims
from titan_linear.models.decoder import Decoder
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.run.data import open_corpora
from titan_linear.step.feed import BatchSharding, MicroBatch
from titan_linear.storage.files import open_own
from titan_linear.storage.rundir import EVALUATION, json_line

Record = dict[str, Any]
MARK = "the question"  # in its place, until it is made
NUMBERS = ("score", "chance", "exact", "loss")


def samples_of(e: Evaluation) -> list[Sample]:
    """Of each task and length as many as evaluation.samples, at even depths."""
    depths = np.linspace(0, 1, e.samples).tolist() if e.samples > 1 else [0.5]
    return [
        Sample(task, length, depth, number)
        for task in e.tasks
        for length in e.lengths
        for number, depth in enumerate(depths)
    ]


def open_prompts(config: Config, tokenizer: Tokenizer) -> Prompts:
    """Of the configuration."""
    e, side = config.evaluation, text_of(config, tokenizer)
    around = ("", "")
    if e.chat:
        asked = Conversations(tokenizer, "evaluation.chat = true").prompt([{"role": "user", "content": MARK}])
        before, _, after = tokenizer.decode(asked, special=True).partition(MARK)
        around = before, after
    return Prompts(samples_of(e), tokenizer, side, stream_length(config, max(e.lengths)), config.debug.seed, around)


def stream_length(config: Config, longest: int) -> int:
    """One that the ranks can cut, at least that of training."""
    even = 2 * config.parallelism.context_parallel_degree * config.parallelism.tensor_parallel_degree
    return -(-max(config.training.seq_len, longest) // even) * even


def text_of(config: Config, tokenizer: Tokenizer) -> Side:
    """The documents to validate on, else those to train on; of a mixture, its first source's."""
    v = config.validation
    corpora = open_corpora(config, tokenizer)
    if v.enable and not v.dataset_path:
        return split_corpus(corpora[0], v.holdout, "validation")
    return split_corpus(corpora[-1 if v.enable else 0], 0.0, "train")


def records_of(sample: Sample, rows: np.ndarray) -> list[Record]:
    """What a prompt has shown. rows: those of `_answered`."""
    return by_position(sample, rows) if sample.task == LOSS else [recall(sample, rows)]


@dataclass(frozen=True, eq=False)
class Examination:
    """Every rank calls it, however the model is split."""

    config: Config
    model: Decoder
    dims: ParallelDims
    sharding: BatchSharding
    precision: AbstractContextManager[object]
    host: dist.ProcessGroup
    prompts: Prompts
    show: Callable[[Sample, np.ndarray], list[Any]] = records_of

    @torch.no_grad()
    def run(self, ask: Callable[[], None] = lambda: None) -> list[Any]:
        """On rank 0 what each prompt has shown, elsewhere nothing. ask: called before each batch; it may raise."""
        shown: dict[int, list[Any]] = {}
        for n in range(-(-len(self.prompts) // self.dims.dp)):
            ask()
            rows = self._rows(micro_batch(self.prompts, n, 1, self.dims.dp_rank, self.dims.dp, len(self.prompts)))
            if of_all := gathered(rows, self.host):
                rows = np.concatenate(of_all)
                rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
                for of in np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1):
                    i = int(of[0, 0])
                    shown[i] = self.show(self.prompts.samples[i], of)
        return [record for i in sorted(shown) for record in shown[i]]

    def _rows(self, batch: Any) -> np.ndarray:
        """Of this rank's labels; none if another rank has the same."""
        micro = self.sharding(batch)
        with self.precision:
            rows = self.model(
                micro.tokens,
                micro.plan,
                loss=partial(_answered, micro=micro, vocab_size=self.prompts.tokenizer.vocab_size),
                loss_chunk=self.config.training.loss_chunk_size,
            )
        return rows[: 0 if self.dims.tp_ranks.rank else len(rows)].cpu().numpy()


def _answered(logits: ChunkedLogits, micro: MicroBatch, vocab_size: int) -> Tensor:
    """Of each label [n, 5 + others] float64: prompt, position, which answer, whether it is the likeliest token, its
    log p, and those of the tokens in its place (NaN: none)."""
    answers, labels = micro.columns["answers"][0], micro.labels[0]
    rows = labels != IGNORE
    rows[0] = True  # no kernel runs on no rows
    few = replace(logits, x=logits.x[rows], more=(), token_losses=None)
    ids = torch.cat([labels[rows, None], answers[rows, 2:]], 1)
    logprobs, likeliest, _ = few.top(ids, 1, vocab_size)
    whose = answers[rows, 0], micro.plan.position_ids[rows] + 1, answers[rows, 1], likeliest[:, 0] == ids[:, 0]
    of = torch.cat([torch.stack(whose, 1), logprobs.masked_fill(ids < 0, torch.nan).double()], 1)
    return of[ids[:, 0] != IGNORE]


def recall(sample: Sample, rows: np.ndarray) -> Record:
    answers = np.split(rows, np.flatnonzero(np.diff(rows[:, 2])) + 1)
    chosen, chance = [], []
    for row in rows[~np.isnan(rows[:, 5])]:
        own, *others = row[4:][~np.isnan(row[4:])]
        ties = sum(other == own for other in others)
        chosen.append((own >= max(others)) / (1 + ties))
        chance.append(1 / (1 + len(others)))
    return {
        "task": sample.task,
        "length": sample.length,
        "depth": sample.depth,
        "exact": float(np.mean([answer[:, 3].all() for answer in answers])),
        "score": float(np.mean(chosen)),
        "chance": float(np.mean(chance)),
        "loss": float(-rows[:, 4].mean()),
    }


def means(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Of records alike in these keys, the means of their numbers."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        grouped.setdefault(tuple(record.get(key) for key in keys), []).append(record)
    return {
        of: {name: float(np.mean([record[name] for record in some])) for name in NUMBERS if name in some[0]}
        for of, some in grouped.items()
    }


def write_down(records: Iterable[Record], step: int, folder: Path) -> None:
    with open_own(folder / EVALUATION, "a") as file:
        file.writelines(json_line({"step": step, **record}) for record in records)


def by_position(sample: Sample, rows: np.ndarray) -> list[Record]:
    """Of the positions 1, 2–3, 4–7, …, keyed by the first."""
    bins = np.log2(rows[:, 1]).astype(int)
    losses = {2 ** int(i): float(-rows[bins == i, 4].mean()) for i in np.unique(bins)}
    own = {"task": sample.task, "length": sample.length, "depth": None}
    return [{**own, "position": position, "score": loss} for position, loss in losses.items()]
