"""Streams of prompts: documents of an exact length with labels on the answers at the end.

The layout of streams depends only on the prompts' lengths. A prompt is made when its stream
is read, from (seed, task, length, number), the tokenizer and the text. So it depends
neither on what else is evaluated nor on which rank evaluates it.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from titan_linear.data.corpus.tokenizer import Tokenizer
from titan_linear.data.streams.packing import IGNORE, Stream
from titan_linear.data.streams.split import Side
from titan_linear.data.tasks import LOSS, TASKS, Draw, Question

# Number of wrong answers that an answer is compared with.
OTHERS = 3
# A piece of a text: a line, or up to 80 characters of a longer one.
PIECE = re.compile(r"[^\n]{1,80}\n?|\n")
# Tokens of a text that are decoded at a time.
DECODED = 1 << 14
NONE = -1
# What a prompt says of each of its tokens; NONE where nothing applies.
TOKEN = np.dtype(
    [
        ("token", np.int64),
        # The index of the answer that holds the token.
        ("answer", np.int64),
        # The tokens that other answers have instead, where they first differ from this one.
        ("others", np.int64, OTHERS),
    ]
)


class TaskSample(NamedTuple):
    task: str
    length: int  # tokens, answers included
    depth: float
    number: int


def rows_of(tokens: Sequence[int] | ndarray, answer: int = NONE, begin: int = 0) -> ndarray:
    """Return a row for each token, [n] TOKEN. The answer begins at `begin`."""
    rows = np.full(len(tokens), NONE, TOKEN)
    rows["token"] = tokens
    rows["answer"][begin:] = answer
    return rows


@dataclass(eq=False)
class Prompts:
    """Streams of whole prompts. Threads may share them.

    Args:
        prompt: returns a sample's rows (`rows_of`).
    """

    samples: Sequence[TaskSample]
    prompt: Callable[[TaskSample], ndarray]
    seq_len: int

    def __post_init__(self) -> None:
        # The indices of each stream's samples. The longest samples come first.
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
        prompts = [self.prompt(self.samples[i]) for i in samples]
        # Padding is a last prompt without answers.
        prompts.append(rows_of([0] * (self.seq_len - sum(map(len, prompts)))))
        lengths = [len(prompt) for prompt in prompts]
        rows = np.concatenate(prompts)
        # Positions begin at 0 in each prompt.
        positions = np.concatenate([np.arange(length) for length in lengths])
        # Shift to the labels. No prompt begins with an answer, so nothing wraps around.
        labelled = np.roll(rows, -1)
        labels = np.where(labelled["answer"] == NONE, IGNORE, labelled["token"])
        columns = {
            "weights": np.float32(labels != IGNORE),
            "prompt": np.roll(np.repeat([*samples, NONE], lengths), -1),
            "position": np.roll(positions, -1),
            "answer": labelled["answer"],
            "others": labelled["others"],
        }
        edges = np.unique(np.cumsum([0, *lengths])).astype(np.int32)
        return Stream(rows["token"], labels, edges, positions, columns)


class Questions:
    """Prompts of tasks.

    Args:
        side: the documents that give tasks their texts.
        around: the text that a chat template places before and after a question.
    """

    def __init__(self, tokenizer: Tokenizer, side: Side, seed: int, around: tuple[str, str]):
        self.tokenizer = tokenizer
        self.side = side
        self.seed = seed
        self.around = around
        self.encode = tokenizer.continuing().encode_batch

    def prompt(self, sample: TaskSample) -> ndarray:
        rng = random.Random(f"{self.seed} {sample.task} {sample.length} {sample.number}")
        if sample.task == LOSS:
            return rows_of(self._document(rng, sample.length), 0, 1)
        question = TASKS[sample.task](Draw(rng, self._text(rng), sample.depth))
        # The question and the answers have fixed tokens; the context fills the rest of the
        # length.
        begin, end = self.around
        before, after = self.encode([begin + question.head, question.question + end])
        answers = [self._answer(i, *answer) for i, answer in enumerate(question.answers)]
        answers = np.concatenate(answers)
        context = self._context(question, sample, len(before) + len(after) + len(answers))
        return np.concatenate([rows_of(np.concatenate([before, *context, after])), answers])

    def _answer(self, number: int, lead: str, text: str, others: list[str]) -> ndarray:
        """Return the rows of an answer's lead and of its own tokens."""
        # Tokens of the lead, of the answer, and of the other answers.
        before, *texts = self.encode([lead, text, *others])
        # The first place where any of the other answers differs from this one.
        by_place = zip(*(tokens.tolist() for tokens in texts))
        place, (own, *others_there) = next(
            (i, tokens) for i, tokens in enumerate(by_place) if len({*tokens}) > 1
        )
        differing = [*dict.fromkeys(token for token in others_there if token != own)][:OTHERS]
        rows = rows_of(texts[0], number)
        rows["others"][place, : len(differing)] = differing
        return np.concatenate([rows_of(before), rows])

    def _context(self, question: Question, sample: TaskSample, fixed: int) -> list[ndarray]:
        """Return the needles between pieces of the context, with as many tokens as remain."""
        depths = sorted(question.needles)
        needles = self.encode([needle for _, needle in depths])
        count = sample.length - fixed - sum(map(len, needles))
        if count < 0:
            raise ValueError(
                f"evaluation.lengths: {sample.length} is too short for the task {sample.task!r}, which takes "
                f"{sample.length - count:,} tokens; give at least that"
            )
        # Read pieces of the context until there are enough tokens. Pieces that contain an
        # answer are left out.
        pieces = [np.zeros(0, dtype=np.int64)]
        total = 0
        while total < count:
            texts = list(islice(question.context, 64))
            if not texts:
                raise ValueError(
                    f"evaluation.lengths: {sample.length:,} tokens are more than the text's {self.side.num_tokens:,}; "
                    "give a longer training.dataset_path, or more of it as validation.holdout"
                )
            for hidden in question.hidden:
                texts = [text for text in texts if hidden not in text]
            more = self.encode(texts)
            pieces += more
            total += sum(map(len, more))
        # Insert each needle at the edge of a piece that is nearest to its depth.
        edges = np.cumsum([len(piece) for piece in pieces])
        edges = edges[edges <= count]
        places = [edges[np.abs(edges - depth * count).argmin()] for depth, _ in depths]
        first, *parts = np.split(np.concatenate(pieces)[:count], places)
        context = [first]
        for needle, part in zip(needles, parts):
            context += [needle, part]
        return context

    # --- The text ----------------------------------------------------------------------------------------------------

    def _documents(self, rng: random.Random) -> Iterator[ndarray]:
        """Yield the tokens of each document, beginning at a random bundle."""
        first = rng.randrange(self.side.num_bundles)
        corpus = self.side.corpus
        for i in range(self.side.num_bundles):
            for n in self.side.documents(np.array([(first + i) % self.side.num_bundles])):
                yield corpus.tokens[corpus.offsets[n] : corpus.offsets[n + 1]]

    def _text(self, rng: random.Random) -> Iterator[str]:
        """Yield the lines of the text; long lines are cut."""
        for tokens in self._documents(rng):
            for at in range(0, len(tokens), DECODED):
                text = self.tokenizer.decode(tokens[at : at + DECODED].tolist())
                yield from PIECE.findall(text)

    def _document(self, rng: random.Random, length: int) -> ndarray:
        for tokens in self._documents(rng):
            if len(tokens) >= length:
                return tokens[:length]
        raise ValueError(
            f"evaluation.lengths: no document of the text has {length:,} tokens, which the task 'loss' takes; give less"
        )
