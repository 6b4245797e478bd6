"""Evaluations: prompts that a reference answers, exact in length; scores of all, none and any split alike."""

import re
import string
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import decoders, pre_tokenizers

from tests.bpe import byte_bpe
from tests.keys import argv_of
from tests.records import write_texts
from tests.refusals import is_refused, refused
from tests.test_train import BASE, FLOAT64, OWN_FLAVORS, SMALL_HYBRID, SPLITS
from titan_linear import evaluate
from titan_linear.config import load_config
from titan_linear.data import ByteTokenizer, build_tokenizer
from titan_linear.data.streams.prompts import NONE, Sample
from titan_linear.data.tasks import LOSS, TASKS
from titan_linear.models.presets import OWN
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.run.evaluate import Examination, open_prompts
from titan_linear.run.preflight import check_evaluation
from titan_linear.train import Trainer

WORDS = ["def", "self", "return", "import", "value", "None", "for", "name", "in", "list", "True"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    texts = ("\n".join(" ".join(rng.choice(WORDS, rng.integers(1, 25))) for _ in range(50)) for _ in range(20))
    write_texts(folder / "texts.jsonl", texts)
    more = {"training.dataset_path": folder / "texts.jsonl", "job.dump_folder": folder / "run"}
    return BASE | FLOAT64 | SMALL_HYBRID | more


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = [string.printable, " ".join(WORDS), "One of the special magic numbers for is: 0123456789."]
    spaces = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    for name, parts in (("bytes", {}), ("spaces", spaces)):
        (folder / name).mkdir()
        byte_bpe(texts, 400, ["<|endoftext|>"], **parts).save(str(folder / name / "tokenizer.json"))
    return {"": ByteTokenizer()} | {name: build_tokenizer(str(folder / name)) for name in ("bytes", "spaces")}


def prompts_of(keys, tokenizer, tasks=("niah_single_2",), **more):
    return open_prompts(load_config(argv_of(keys, evaluation__tasks=list(tasks), **more)), tokenizer)


# --- The reference: answers as a reader finds them in the text --------------------------------------------------------


def needle(text):
    asked = re.search(r"special magic \w+ for (.*) in the text above", text)[1].split(", ")
    facts = re.findall(r"special magic \w+s for (\S+) is: (\S+)\.\n", text)
    return [value for name in asked for key, value in facts if key == name]


def variables(text):
    found = [re.search(r"have the value (\d+)", text)[1]]
    for name, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        found += [name] if of == found[-1] or of in found[1:] else []
    return found[1:]


def counted(text):
    listed, question = re.search(r"often\.\n(.*)\nWhich (.*)", text, re.S).groups()
    often = [word for word, _ in Counter(listed.split()[:-1]).most_common(int(question.split()[0]))]
    return sorted(often) if "alphabetical" in question else often


def titled(text):
    quoted = re.search(r" says: (.*)\n", text)[1]
    (found,) = (
        part for part in text.split(" says: ")[0].split("\nDocument ")[1:] if quoted in part.partition("It refers")[0]
    )
    title, to = found[:6], re.search(r"refers to the document (\w+)", found)[1]
    return [to if "To which" in text else title]


def paired(text):
    facts = dict(re.findall(r"\n(\w+) (\w+)", text))
    return [facts[key] for key in re.findall(r"\n(\w{6})(?= \w{6}(?:\n\w{6} \w{6})*$)", text)]


def follows(text):
    passage, asked = text.rpartition("\n")[::2]
    cue = " ".join(asked.split()[:4])
    return passage.partition(cue)[2].split()[:16]


REFERENCE = {name: needle for name in TASKS if name.startswith("niah")}
REFERENCE |= {"vt": variables, "cwe": counted, "fwe": counted, "qa_1": titled, "qa_2": titled}
REFERENCE |= {"mqar": paired, "induction": paired, "copy": follows}


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_the_answers(task, keys, tokenizers):
    for (name, tokenizer), length, number in product(tokenizers.items(), (1500, 3001), range(3)):
        prompts = prompts_of(keys, tokenizer)
        tokens, answers = prompts.prompt(Sample(task, length, number / 2, number))
        assert len(tokens) == length
        part = answers[:, 0]
        written = [tokenizer.decode(tokens[part == i]).strip() for i in range(part.max() + 1)]
        text = tokenizer.decode(tokens)
        asked = re.compile(r"\nWh|\nTo which").search(text)
        context = text[: asked.start()] if asked else text[: text.rindex(written[0])]
        found = REFERENCE[task](text)
        assert (found[-len(written) :] if task in ("mqar", "induction") else found[: len(written)]) == written, name
        if task.startswith("niah"):
            assert all(context.count(answer) == 1 for answer in written)  # in its needle alone
        first = [np.flatnonzero((part == i) & (answers[:, 1] != NONE)) for i in range(len(written))]
        for (at,) in first:  # at one token others are compared, which are different ones
            candidates = answers[at, 1:][answers[at, 1:] != NONE]
            assert len({*candidates, tokens[at]}) == len(candidates) + 1 > 1


def test_needles_lie_at_even_depths(keys):
    prompts = prompts_of(keys, ByteTokenizer(), evaluation__samples=11)
    for sample in prompts.samples:
        text = prompts.tokenizer.decode(prompts.prompt(sample).tokens)
        head, needle, *_ = re.split(r"(\nOne of the special.*\n)", text)
        before = len(head) - head.index("\n") - 1
        count = text.index("\nWhat are") - head.index("\n") - 1 - len(needle)
        assert abs(before - sample.depth * count) <= 81  # the longest piece
    assert np.allclose(np.diff([sample.depth for sample in prompts.samples]), 0.1)


# --- Scores ----------------------------------------------------------------------------------------------------------


def examined_by(rank, world_size, argv, know):
    """By a model that knows the next token, or to which all tokens are alike."""
    OWN["hybrid"] |= OWN_FLAVORS
    trainer = Trainer(load_config(argv))
    prompts = open_prompts(trainer.config, trainer.tokenizer)
    size = prompts.tokenizer.vocab_size

    def model(tokens, plan, loss, loss_chunk):
        x = torch.nn.functional.one_hot(tokens[0].roll(-1), size).double() * 99 * know
        return loss(ChunkedLogits(x, torch.eye(size, dtype=torch.float64), loss_chunk))

    of = trainer.evaluation
    return Examination(of.config, model, of.dims, of.sharding, of.precision, trainer.host, prompts).run()


EVALUATED = {
    "evaluation.tasks": f"{[*TASKS, LOSS]}",
    "evaluation.lengths": "[1500]",
    "evaluation.samples": 2,
    "training.global_batch_size": 4,
    "training.local_batch_size": 1,
}


def test_who_knows_has_all_and_who_does_not_has_chance(keys, worlds):
    argv = argv_of(keys | EVALUATED)
    (all_known,), (blind,) = (worlds(1).run(examined_by, argv, know) for know in (1, 0))
    for best, none in zip(all_known, blind, strict=True):
        loss = "loss" if "chance" in none else "score"
        assert none[loss] == pytest.approx(np.log(257), rel=1e-12) and best[loss] < 1e-9
        if "chance" in none:
            assert (best["exact"], best["score"], none["exact"]) == (1, 1, 0) and none["score"] == none["chance"]


def examined(rank, world_size, argv):
    OWN["hybrid"] |= OWN_FLAVORS
    return evaluate.examined(load_config(argv))


SMALL_TASKS = {"evaluation.tasks": "['niah_single_1', 'mqar', 'induction', 'loss']", "evaluation.lengths": "[600, 353]"}
SPLIT = {
    "one process": (1, {}),
    "dp 2": (2, {}),
    "cp 2 zig-zag": SPLITS["cp 2 zig-zag"],
    "cp 4": (4, {"parallelism.context_parallel_degree": 4}),
    "tp 2": (2, {"parallelism.tensor_parallel_degree": 2}),
}


@pytest.fixture(scope="module")
def alone(keys, worlds):
    """Each prompt in a stream of its own, in one process."""
    argv = argv_of(keys | EVALUATED | SMALL_TASKS, evaluation__lengths="[600]")
    shorter = argv_of(keys | EVALUATED | SMALL_TASKS, evaluation__lengths="[353]")
    return [record for of in (argv, shorter) for record in worlds(1).run(examined, of)[0]]


@pytest.mark.parametrize("name", SPLIT)
def test_scores_do_not_depend_on_the_split(name, keys, alone, worlds):
    processes, split = SPLIT[name]
    argv = argv_of(keys | EVALUATED | SMALL_TASKS | split, training__seq_len=1024)  # two lengths in one stream
    records, *others = worlds(processes).run(examined, argv)
    assert not any(others)
    of_each = [sorted(of, key=lambda record: (record["task"], record["length"])) for of in (records, alone)]
    for record, other in zip(*of_each, strict=True):
        near = {key: pytest.approx(x, rel=1e-9) if isinstance(x, float) else x for key, x in other.items()}
        assert record == near


@pytest.mark.parametrize(
    "more, said",
    [
        ({"evaluation.tasks": "['niah']"}, "evaluation.tasks: 'niah' is unknown; use some of niah_single_1, "),
        (
            {"evaluation.tasks": "['vt']", "evaluation.lengths": "[99]"},
            r"99 is too short for the task 'vt', which takes 4\d\d",
        ),
        ({"evaluation.tasks": "['loss']", "evaluation.lengths": "[9000]"}, "no document of the text has 9,000 tokens"),
        ({"evaluation.lengths": "[90000]"}, "90,000 tokens are more than the text's 63,555; give a longer"),
        (
            {"model.flavor": "softmax", "evaluation.lengths": "[65]"},
            "65 is above the 64 positions of the model; give less",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(more, said, keys):
    config = load_config(argv_of(keys | {"evaluation.tasks": "['niah_single_2']"} | more))
    with refused(said):
        check_evaluation(config, (OWN["hybrid"] | OWN_FLAVORS)[config.model.flavor], ByteTokenizer())


def test_sizes_are_read(capsys):
    assert [evaluate.size(text) for text in ("512", "4k", "1M")] == [512, 4096, 2**20]
    assert is_refused(evaluate.main, ["--tasks", "vt"], capsys).startswith("give PATH, what is evaluated")
