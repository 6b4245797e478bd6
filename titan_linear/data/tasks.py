"""Questions about a long text. A task is a function of a `Draw`, which returns a `Question`.

Questions are made offline, from a seed and, for some tasks, from a text.

niah_*, vt, cwe, fwe, qa_*
    The thirteen forms of RULER (Hsieh et al. 2024): needles, variables, words, documents.
mqar, copy, induction
    Pairs of words among pairs (Arora et al. 2023), a passage among words, pairs of words in
    a text.
"""

import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import NamedTuple, TypeVar

NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
# Leads of the words of a list.
LISTED = ("They are:", *repeat(",", 9))
CONSONANTS = "bcdfghjklmnpqrstvwxz"
# Values of one kind have the same length, so none is the beginning of another.
VALUES: dict[str, Callable[[random.Random], str]] = {
    "syllable": lambda rng: rng.choice(CONSONANTS) + rng.choice("aeiou") + rng.choice(CONSONANTS),
    "word": lambda rng: "".join(rng.choice(CONSONANTS) + rng.choice("aeiou") for _ in range(3)),
    "number": lambda rng: str(rng.randrange(10**6, 10**7)),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "name": lambda rng: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)),
}

Item = TypeVar("Item")


class Answer(NamedTuple):
    # The text before the answer.
    lead: str
    text: str
    # Wrong answers, beginning with values of the context.
    others: list[str]


class Draw:
    """Random values of a kind, different from all earlier values that matter to a question.

    Args:
        text: lines of the text that some tasks ask about.
        depth: share of the context before the needle that is asked for.
    """

    def __init__(self, rng: random.Random, text: Iterator[str], depth: float):
        self.rng = rng
        self.text = text
        self.depth = depth
        self.known = set[str]()

    def other(self, kind: str) -> str:
        """Return a value that does not matter to the question and may come again."""
        while (value := VALUES[kind](self.rng)) in self.known:
            pass
        return value

    def __call__(self, kind: str, count: int) -> list[str]:
        values = []
        for _ in range(count):
            values.append(self.other(kind))
            self.known.add(values[-1])
        return values

    def shuffled(self, items: list[Item]) -> list[Item]:
        return self.rng.sample(items, len(items))

    def depths(self, count: int) -> list[float]:
        """Return the depth and count − 1 others at equal distances."""
        return [self.depth, *((self.depth + i / count) % 1 for i in range(1, count))]

    def answers(
        self, kind: str, leads: Iterable[str], texts: list[str], values: list[str]
    ) -> list[Answer]:
        """Return each of the texts after its lead.

        The wrong answers to each are other values of the context, then some that are not in it.
        """
        return [
            Answer(
                lead,
                f" {text}",
                [f" {x}" for x in [*values, *(self.other(kind) for _ in range(8))] if x != text],
            )
            for lead, text in zip(leads, texts)
        ]


class Question(NamedTuple):
    head: str
    # Pieces of text, endless or up to the text's end. Needles are placed between them.
    context: Iterator[str]
    # Needles with their depth: the share of the context before each.
    needles: list[tuple[float, str]]
    question: str
    # Answers, one after the other.
    answers: list[Answer]
    # Strings that no piece of the context may contain.
    hidden: list[str]


def needles(
    draw: Draw,
    *,
    key: str = "word",
    value: str = "number",
    keys: int = 1,
    values: int = 1,
    asked: int = 1,
    among: str = "text",
) -> Question:
    """Hide values of several keys in a text, in noise or among other needles; ask for some.

    Each key has `values` values. The first `asked` keys are asked for.
    """
    names = draw(key, keys)
    of = [name for name in names for _ in range(values)]
    known = draw(value, keys * values)
    depths = draw.depths(len(known))
    # All values of a key are asked for, in their order.
    if values > 1:
        depths.sort()
    says = f"One of the special magic {value}s for {{}} is:".format
    pieces = (f"\n{says(draw.other(key))} {draw.other(value)}.\n" for _ in repeat(None))
    return Question(
        f"Some special magic {value}s are hidden in the following text. Remember them.\n",
        {"text": draw.text, "noise": repeat(NOISE), "needles": pieces}[among],
        [(at, f"\n{says(name)} {x}.\n") for at, name, x in zip(depths, of, known)],
        f"\nWhat are the special magic {value}s for {', '.join(names[:asked])} in the text above, in their order?\n",
        draw.answers(value, [f"\n{says(name)}" for name in of], known[: asked * values], known),
        known,
    )


def variables(draw: Draw) -> Question:
    """Ask for the five variables that get one value through one another.

    Five others have another value.
    """
    chains = []
    lines = []
    numbers = draw("number", 2)
    # Each chain assigns a value to its first variable, and each variable to the next.
    for value in numbers:
        chains.append(draw("name", 5))
        lines.append(
            [
                f"\nVAR {name} = {of}.\n"
                for name, of in zip(chains[-1], [value, *(f"VAR {x}" for x in chains[-1])])
            ]
        )
    return Question(
        "Remember the chains of variables in the following text.\n",
        repeat(NOISE),
        list(zip(sorted(draw.depths(10)), [line for pair in zip(*lines) for line in pair])),
        f"\nWhich variables have the value {numbers[0]} in the text above, in their order?\n",
        draw.answers("name", LISTED, *chains),
        [],
    )


def counted(
    draw: Draw,
    *,
    counts: list[int],
    rare: int,
    order: str,
) -> Question:
    """Ask for the words that are most frequent in each line of words.

    Each line also has `rare` other words, which come once in all.
    """
    words = draw("word", len(counts))
    others = draw("word", rare)
    words = sorted(words) if len(set(counts)) == 1 else words
    often = [word for word, count in zip(words, counts) for _ in range(count)]

    # The wrong answers are the rare words of the first line; later lines draw new ones.
    def lines() -> Iterator[str]:
        yield " ".join(draw.shuffled(often + others)) + "\n"
        while True:
            yield " ".join(draw.shuffled(often + [draw.other("word") for _ in range(rare)])) + "\n"

    return Question(
        "Remember which of the following words come most often.\n",
        lines(),
        [],
        f"\nWhich {len(words)} words come most often in the list above, {order}?\n",
        draw.answers("word", LISTED, words, others),
        [],
    )


def documents(draw: Draw, *, hops: int) -> Question:
    """Ask for the title of the document that contains a sentence.

    With two hops, ask for the title of the document to which that document refers.
    """
    titles = draw("word", 3)

    def document(title: str, to: str) -> tuple[list[str], str]:
        lines = list(islice((line for line in draw.text if len(line) > 20), 3))
        return (
            lines,
            f"\nDocument {title}:\n{''.join(lines)}\nIt refers to the document {to}.\n"
            if lines
            else "",
        )

    # Quote the longest line of the first document that no other has.
    (lines, first), *others = (document(titles[i], titles[(i + 1) % 3]) for i in range(3))
    quoted = max(
        lines,
        key=lambda line: (not any(line in other for _, other in others), len(line)),
        default="",
    ).strip()
    asks = ("Which document says", "To which document does the document refer that says")[hops - 1]
    pieces = (document(draw.other("word"), draw.other("word"))[1] for _ in repeat(None))
    return Question(
        "Remember the following documents.\n",
        iter(lambda: next(pieces), ""),
        list(zip(draw.depths(3), [first, *(other for _, other in others)])),
        f"\n{asks}: {quoted}\n",
        draw.answers("word", ["The document"], [titles[hops - 1]], titles),
        [quoted],
    )


def pairs(
    draw: Draw,
    *,
    kind: str = "word",
    asked: int,
    count: int,
    among: str,
) -> Question:
    """Ask, in another order, for the words that followed some words."""
    keys = draw(kind, count)
    values = draw(kind, count)
    end = "\n" if among == "text" else ""
    pieces = (f"\n{draw.other(kind)} {draw.other(kind)}" for _ in repeat(None))
    order = draw.shuffled([*range(asked)])
    return Question(
        "",
        {"text": draw.text, "pairs": pieces}[among],
        [(at, f"\n{key} {value}{end}") for at, key, value in zip(draw.depths(count), keys, values)],
        "",
        draw.answers(kind, [f"\n{keys[i]}" for i in order], [values[i] for i in order], values),
        [],
    )


def passage(draw: Draw) -> Question:
    """Ask for what follows the first four words of a passage in a line of words."""
    words = draw("word", 20)
    return Question(
        "",
        (f" {draw.other('word')}" for _ in repeat(None)),
        [(draw.depth, "".join(f" {word}" for word in words))],
        "\n" + " ".join(words[:4]),
        draw.answers("word", repeat(""), words[4:], words),
        [],
    )


TASKS: dict[str, Callable[[Draw], Question]] = {
    "niah_single_1": partial(needles, among="noise"),
    "niah_single_2": needles,
    "niah_single_3": partial(needles, value="uuid"),
    "niah_multikey_1": partial(needles, keys=4),
    "niah_multikey_2": partial(needles, keys=4, among="needles"),
    "niah_multikey_3": partial(needles, keys=4, key="uuid", value="uuid", among="needles"),
    "niah_multivalue": partial(needles, values=4),
    "niah_multiquery": partial(needles, keys=4, asked=4),
    "vt": variables,
    "cwe": partial(counted, counts=[1] * 10, rare=10, order="in alphabetical order"),
    "fwe": partial(counted, counts=[8, 4, 2], rare=2, order="most often first"),
    "qa_1": partial(documents, hops=1),
    "qa_2": partial(documents, hops=2),
    "mqar": partial(pairs, kind="syllable", asked=8, count=8, among="pairs"),
    "copy": passage,
    "induction": partial(pairs, asked=1, count=4, among="text"),
}
# Tasks whose answers lie at all depths.
SPREAD = ("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "mqar")
# The loss of unchanged documents, by position.
LOSS = "loss"
