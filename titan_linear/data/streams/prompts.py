"""Streams of prompts: each a document of exactly as many tokens as are asked for, its answers last, with labels there.

Streams are laid by the prompts' lengths alone; a prompt is made when its stream is read, from (seed, task, length,
number), the tokenizer and the text. So it does not depend on what else is evaluated, nor on where.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from titan_linear.data.corpus.tokenizer import Tokenizer
from titan_linear.data.streams.packing import IGNORE, Stream
from titan_linear.data.streams.split import Side
from titan_linear.data.tasks import LOSS, TASKS, Draw, Question

OTHERS = 3  # that an answer is compared with
PIECE = re.compile(r"[^\n]{1,80}\n?|\n")  # of a text
DECODED = 1 << 14  # tokens of a text that are decoded at a time
NONE = -1


class Sample(NamedTuple):
    task: str
    length: int  # tokens, answers included
    depth: float
    number: int


def rows_of(tokens: Sequence[int] | np.ndarray, answer: int = NONE, begin: int = 0) -> np.ndarray:
    """Of each token [n, 2 + OTHERS] int64: the token, which answer's it is, and those in its place where other answers
    part from this one; NONE elsewhere. The answer begins at `begin`."""
    rows = np.full((len(tokens), 2 + OTHERS), NONE)
    rows[:, 0] = tokens
    rows[begin:, 1] = answer
    return rows


@dataclass(eq=False)
class Prompts:
    """streams[i]: prompts that are whole in it. Threads may share them. prompt: gives the rows of a sample's."""

    samples: Sequence[Sample]
    prompt: Callable[[Sample], np.ndarray]
    seq_len: int

    def __post_init__(self) -> None:
        self.laid: list[list[int]] = []  # samples by stream
        left = 0
        for i in sorted(range(len(self.samples)), key=lambda i: -self.samples[i].length):
            length = self.samples[i].length
            if length > left:
                self.laid.append([])
                left = self.seq_len
            self.laid[-1].append(i)
            left -= length

    def __len__(self) -> int:
        return len(self.laid)

    def __getitem__(self, i: int) -> Stream:
        return self._stream(self.laid[i])

    def padding(self) -> Stream:
        return self._stream([])

    def _stream(self, samples: list[int]) -> Stream:
        prompts = [self.prompt(self.samples[i]) for i in samples]
        lengths = [*map(len, prompts), self.seq_len - sum(map(len, prompts))]
        rows = np.concatenate([*prompts, rows_of([0] * lengths[-1])])
        positions = np.concatenate([*map(np.arange, lengths)])
        tokens, answers = (
            rows[:, 0],
            np.c_[np.repeat([*samples, NONE], lengths), positions, rows[:, 1:]],
        )
        answers = np.roll(answers, -1, 0)  # of the labels; no prompt begins with an answer
        labels = np.where(answers[:, 2] == NONE, IGNORE, np.roll(tokens, -1))
        edges = np.unique(np.cumsum([0, *lengths])).astype(np.int32)
        columns = {"weights": np.float32(labels != IGNORE), "answers": answers}
        return Stream(tokens, labels, edges, positions, columns)


class Questions:
    """Prompts of tasks. side: has their texts. around: what a chat template has before and after a question."""

    def __init__(self, tokenizer: Tokenizer, side: Side, seed: int, around: tuple[str, str]):
        self.tokenizer, self.side, self.seed, self.around = tokenizer, side, seed, around
        self.encode = tokenizer.continuing().encode_batch

    def prompt(self, sample: Sample) -> np.ndarray:
        rng = random.Random(f"{self.seed} {sample.task} {sample.length} {sample.number}")
        if sample.task == LOSS:
            return rows_of(self._document(rng, sample.length), 0, 1)
        question = TASKS[sample.task](Draw(rng), self._text(rng), sample.depth)
        before, after = self.encode(
            [self.around[0] + question.head, question.question + self.around[1]]
        )
        answers = np.concatenate(
            [self._answer(i, *answer) for i, answer in enumerate(question.answers)]
        )
        context = self._context(question, sample, len(before) + len(after) + len(answers))
        return np.concatenate([rows_of(np.concatenate([before, *context, after])), answers])

    def _answer(self, number: int, lead: str, text: str, others: list[str]) -> np.ndarray:
        """Rows of what is before it, and its own."""
        before, *texts = self.encode([lead, text, *others])
        own, *rest = [tokens.tolist() for tokens in texts]
        place = next(i for i, tokens in enumerate(zip(own, *rest)) if len({*tokens}) > 1)
        there = [*dict.fromkeys(tokens[place] for tokens in rest if tokens[place] != own[place])][
            :OTHERS
        ]
        rows = rows_of(own, number)
        rows[place, 2 : 2 + len(there)] = there
        return np.concatenate([rows_of(before), rows])

    def _context(self, question: Question, sample: Sample, fixed: int) -> list[np.ndarray]:
        """The needles between pieces of the context, as many tokens as are left."""
        depths = sorted(question.needles)
        needles = self.encode([needle for _, needle in depths])
        count = sample.length - fixed - sum(map(len, needles))
        if count < 0:
            raise ValueError(
                f"evaluation.lengths: {sample.length} is too short for the task {sample.task!r}, which takes "
                f"{sample.length - count:,} tokens; give at least that"
            )
        pieces = [np.zeros(0, dtype=np.int64)]
        total = 0
        while total < count:
            texts = list(islice(question.context, 64))
            if not texts:
                raise ValueError(
                    f"evaluation.lengths: {sample.length:,} tokens are more than the text's {self.side.num_tokens:,}; "
                    "give a longer training.dataset_path, or more of it as validation.holdout"
                )
            more = self.encode(
                [text for text in texts if not any(hidden in text for hidden in question.hidden)]
            )
            pieces += more
            total += sum(map(len, more))
        between = np.cumsum([len(piece) for piece in pieces])
        between = between[between <= count]
        places = [between[np.abs(between - depth * count).argmin()] for depth, _ in depths]
        parts = np.split(np.concatenate(pieces)[:count], places)
        return [tokens for pair in zip(parts, [*needles, parts[0][:0]]) for tokens in pair]

    # --- The text ----------------------------------------------------------------------------------------------------

    def _documents(self, rng: random.Random) -> Iterator[np.ndarray]:
        """The tokens of each, from a random one on."""
        first, corpus = rng.randrange(self.side.num_bundles), self.side.corpus
        for i in range(self.side.num_bundles):
            for n in self.side.documents(np.array([(first + i) % self.side.num_bundles])):
                yield corpus.tokens[corpus.offsets[n] : corpus.offsets[n + 1]]

    def _text(self, rng: random.Random) -> Iterator[str]:
        """Lines, of which long ones are cut."""
        for tokens in self._documents(rng):
            for at in range(0, len(tokens), DECODED):
                text = self.tokenizer.decode(tokens[at : at + DECODED].tolist())
                yield from PIECE.findall(text)

    def _document(self, rng: random.Random, length: int) -> np.ndarray:
        for tokens in self._documents(rng):
            if len(tokens) >= length:
                return tokens[:length]
        raise ValueError(
            f"evaluation.lengths: no document of the text has {length:,} tokens, which the task 'loss' takes; give less"
        )
