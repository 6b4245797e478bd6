"""Streams of prompts: each a document of exactly as many tokens as are asked for, its answers last, with labels there.

Streams are laid by the prompts' lengths alone; a prompt is made when its stream is read, from (seed, task, length,
number), the tokenizer and the text. So it does not depend on what else is evaluated, nor on where.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from titan_linear.data.corpus.tokenizer import Tokenizer
from titan_linear.data.streams.packing import IGNORE, Stream, document_lengths
from titan_linear.data.streams.split import Side
from titan_linear.data.tasks import LOSS, TASKS, Draw, Question

OTHERS = 3  # that an answer is compared with
PIECE = re.compile(r"[^\n]{1,80}\n?|\n")  # of a text
NONE = -1


class Sample(NamedTuple):
    task: str
    length: int  # tokens, answers included
    depth: float
    number: int


class Prompt(NamedTuple):
    tokens: np.ndarray  # [length] int64
    answers: (
        np.ndarray
    )  # [length, 1 + OTHERS] int64, of tokens: which answer's, and the tokens in its place where other
    # answers part from this one; NONE elsewhere


@dataclass(eq=False)
class Prompts:
    """streams[i]: prompts that are whole in it. Threads may share them.

    side: what texts are taken from. around: what a chat template has before and after a question.
    """

    samples: Sequence[Sample]
    tokenizer: Tokenizer
    side: Side
    seq_len: int
    seed: int
    around: tuple[str, str] = ("", "")
    laid: list[list[int]] = field(init=False)  # by stream
    continuing: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.continuing = self.tokenizer.continuing()
        self.laid: list[list[int]] = []
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
        lengths = [self.samples[i].length for i in samples]
        padded = [*lengths, self.seq_len - sum(lengths)]
        tokens = np.zeros(self.seq_len + 1, dtype=np.int64)
        answers = np.full((self.seq_len + 1, 3 + OTHERS), NONE)
        at = 0
        for i, length in zip(samples, lengths):
            tokens[at : at + length], answers[at : at + length, 2:] = self.prompt(self.samples[i])
            answers[at : at + length, 0] = i
            answers[at : at + length, 1] = np.arange(length)
            at += length
        labels = np.where(answers[1:, 2] == NONE, IGNORE, tokens[1:])
        edges = np.unique(np.cumsum([0, *padded])).astype(np.int32)
        positions = np.concatenate([np.arange(length) for length in padded])
        columns = {"weights": (labels != IGNORE).astype(np.float32), "answers": answers[1:]}
        return Stream(tokens[:-1], labels, edges, positions, columns)

    def prompt(self, sample: Sample) -> Prompt:
        rng = random.Random(f"{self.seed} {sample.task} {sample.length} {sample.number}")
        if sample.task == LOSS:
            answers = np.full((sample.length, 1 + OTHERS), NONE)
            answers[1:, 0] = 0
            return Prompt(self._document(rng, sample.length), answers)
        question = TASKS[sample.task](Draw(rng), self._text(rng), sample.depth)
        before, after = self._encode([self.around[0] + question.head, question.question + self.around[1]])
        ends = [answer for of in question.answers for answer in self._answer(*of)]
        fixed = len(before) + len(after) + sum(len(part) for part, _ in ends)
        answers = np.full((sample.length, 1 + OTHERS), NONE)
        context = self._context(question, sample, fixed)
        tokens = np.concatenate([before, *context, after, *(part for part, _ in ends)])
        at = sample.length - sum(len(part) for part, _ in ends)
        for i, (part, others) in enumerate(ends):
            if others is not None:
                place, *ids = others
                answers[at : at + len(part), 0] = i // 2
                answers[at + place, 1 : 1 + len(ids)] = ids
            at += len(part)
        return Prompt(tokens, answers)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        return [tokens.astype(np.int64) for tokens in self.continuing.encode_batch(texts)]

    def _answer(self, lead: str, text: str, others: list[str]) -> list[tuple[np.ndarray, list[int] | None]]:
        """Its tokens, where those of others part from them, and their tokens there; and the tokens before it."""
        before, *texts = self._encode([lead, text, *others])
        own, *rest = [tokens.tolist() for tokens in texts]
        place = next(i for i, tokens in enumerate(zip(own, *rest)) if len({*tokens}) > 1)
        there = dict.fromkeys(tokens[place] for tokens in rest if tokens[place] != own[place])
        return [(before, None), (texts[0], [place, *islice(there, OTHERS)])]

    def _context(self, question: Question, sample: Sample, fixed: int) -> list[np.ndarray]:
        """The needles between pieces of the context, as many tokens as are left."""
        needles = self._encode([needle for _, needle in question.needles])
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
                raise self._too_short(sample.length)
            texts = [text for text in texts if not any(hidden in text for hidden in question.hidden)]
            pieces += self._encode(texts)
            total += sum(map(len, pieces[-len(texts) :] if texts else []))
        between = np.cumsum([len(piece) for piece in pieces])
        between = between[between <= count]
        context = np.concatenate(pieces)[:count]
        parts, at = [], 0
        for depth, needle in sorted(zip([depth for depth, _ in question.needles], needles), key=lambda pair: pair[0]):
            place = int(between[np.abs(between - depth * count).argmin()])
            parts += [context[at:place], needle]
            at = place
        return [*parts, context[at:]]

    # --- The text ----------------------------------------------------------------------------------------------------

    def _documents(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        """All of them, from a random one on: first token and length of each."""
        first, corpus = rng.randrange(self.side.num_bundles), self.side.corpus
        for i in range(self.side.num_bundles):
            found = self.side.documents(np.array([(first + i) % self.side.num_bundles]))
            yield from zip(corpus.offsets[found].tolist(), document_lengths(corpus, found).tolist())

    def _text(self, rng: random.Random) -> Iterator[str]:
        """Lines, of which long ones are cut."""
        for begin, length in self._documents(rng):
            for at in range(begin, begin + length, 1 << 14):
                tokens = self.side.corpus.tokens[at : min(at + (1 << 14), begin + length)]
                yield from PIECE.findall(self.tokenizer.decode(tokens.tolist()))

    def _document(self, rng: random.Random, length: int) -> np.ndarray:
        for begin, tokens in self._documents(rng):
            if tokens >= length:
                return self.side.corpus.tokens[begin : begin + length].astype(np.int64)
        raise ValueError(
            f"evaluation.lengths: no document of the text has {length:,} tokens, which the task 'loss' takes; give less"
        )

    def _too_short(self, length: int) -> ValueError:
        return ValueError(
            f"evaluation.lengths: {length:,} tokens are more than the text's {self.side.num_tokens:,}; give a longer "
            "training.dataset_path, or more of it as validation.holdout"
        )
