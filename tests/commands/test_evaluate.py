"""Evaluations: prompts that a reference answers, exact in length; scores of all, none and any split alike."""

import random
import re
import shlex
import string
from collections import Counter
from itertools import groupby, product, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import decoders, pre_tokenizers

from tests.bpe import byte_bpe
from tests.keys import argv_of
from tests.records import events_of, read_json, read_lines, write_json, write_texts
from tests.refusals import is_refused, refused
from tests.training import BASE, FLOAT64, OWN_FLAVORS, SMALL_HYBRID, SPLITS, train, trainer_of
from titan_linear.commands import evaluate, lm_eval, score
from titan_linear.config import load_config
from titan_linear.data import ByteTokenizer, build_tokenizer, load_corpus
from titan_linear.data.streams.prompts import NONE, TaskSample
from titan_linear.data.tasks import LOSS, TASKS, Draw
from titan_linear.models.mixers.attention import Attention
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import OWN
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.run.build import unallocated
from titan_linear.run.data import RunData
from titan_linear.run.evaluate import LABEL, examine, open_prompts, recall, tiles
from titan_linear.run.generate import Sampling, generate_tokens
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import check_evaluation
from titan_linear.run.reading import open_reader

WORDS = ["def", "self", "return", "import", "value", "None", "for", "name", "in", "list", "True"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    texts = (
        "\n".join(" ".join(rng.choice(WORDS, rng.integers(1, 25))) for _ in range(50))
        for _ in range(20)
    )
    write_texts(folder / "texts.jsonl", texts)
    more = {"training.dataset_path": folder / "texts.jsonl", "job.dump_folder": folder / "run"}
    return BASE | FLOAT64 | SMALL_HYBRID | more


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = [
        string.printable,
        " ".join(WORDS),
        "One of the special magic numbers for is: 0123456789.",
    ]
    spaces = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    for name, parts in (("bytes", {}), ("spaces", spaces)):
        (folder / name).mkdir()
        byte_bpe(texts, 400, ["<|endoftext|>"], **parts).save(str(folder / name / "tokenizer.json"))
    return {"": ByteTokenizer()} | {
        name: build_tokenizer(str(folder / name)) for name in ("bytes", "spaces")
    }


def prompts_of(keys, tokenizer, **more):
    config = load_config(argv_of(keys, evaluation__tasks=["niah_single_2"], **more))
    return open_prompts(RunData(config, tokenizer))


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
        part
        for part in text.split(" says: ")[0].split("\nDocument ")[1:]
        if quoted in part.partition("It refers")[0]
    )
    title, to = found[:6], re.search(r"refers to the document (\w+)", found)[1]
    return [to if "To which" in text else title]


def paired(text):
    facts = dict(re.findall(r"\n(\w+) (\w+)", text))
    return [facts[key] for key in re.findall(r"\n(\w+)(?= \w+(?:\n\w+ \w+)*$)", text)]


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
        rows = prompts.prompt(TaskSample(task, length, number / 2, number))
        tokens, part, others = rows["token"], rows["answer"], rows["others"]
        assert len(tokens) == length
        written = [tokenizer.decode(tokens[part == i]).strip() for i in range(part.max() + 1)]
        text = tokenizer.decode(tokens)
        asked = re.compile(r"\nWh|\nTo which").search(text)
        context = text[: asked.start()] if asked else text[: text.rindex(written[0])]
        found = REFERENCE[task](text)
        assert (
            found[-len(written) :] if task in ("mqar", "induction") else found[: len(written)]
        ) == written, name
        if task.startswith("niah"):
            assert all(context.count(answer) == 1 for answer in written)  # in its needle alone
        first = [np.flatnonzero((part == i) & (others[:, 0] != NONE)) for i in range(len(written))]
        for (at,) in first:  # at one token others are compared, which are different ones
            candidates = others[at][others[at] != NONE]
            assert len({*candidates, tokens[at]}) == len(candidates) + 1 > 1


def test_a_depth_is_told_where_one_needle_has_all_answers():
    rows = np.array([(0, 1, 0, True, -1, [-2, np.nan, np.nan])], LABEL)
    for task, make in TASKS.items():
        text = repeat("This line is longer than twenty characters.\n")
        question = make(Draw(random.Random(0), text, 0.5))
        depth = recall(TaskSample(task, 3, 0.5, 0), rows)["depth"]
        assert (depth == 0.5) == (len(question.answers) == 1 or len(question.needles) == 1), task


def test_needles_lie_at_even_depths(keys):
    prompts = prompts_of(keys, ByteTokenizer(), evaluation__samples=11)
    for sample in prompts.samples:
        text = ByteTokenizer().decode(prompts.prompt(sample)["token"])
        head, needle, *_ = re.split(r"(\nOne of the special.*\n)", text)
        before = len(head) - head.index("\n") - 1
        count = text.index("\nWhat are") - head.index("\n") - 1 - len(needle)
        assert abs(before - sample.depth * count) <= 81  # the longest piece
    assert np.allclose(np.diff([sample.depth for sample in prompts.samples]), 0.1)


# --- Scores ----------------------------------------------------------------------------------------------------------


def examined_by(rank, world_size, argv, know):
    """By a model that knows the next token, or to which all tokens are alike."""
    trainer = trainer_of(argv)
    prompts = open_prompts(RunData(trainer.config, trainer.origin.tokenizer))
    size = trainer.origin.tokenizer.vocab_size

    def model(tokens, plan, loss):
        x = torch.nn.functional.one_hot(tokens[0].roll(-1), size).double() * 99 * know
        return loss(ChunkedLogits(x, torch.eye(size, dtype=torch.float64), 0))

    trainer.session.model = model
    return examine(trainer.evaluation.reader, prompts)


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
    positions = [record["position"] for record in blind if record["task"] == LOSS]
    assert positions == [2**n for n in range(11)] * 2
    for best, none in zip(all_known, blind, strict=True):
        loss = "loss" if "chance" in none else "score"
        assert none[loss] == pytest.approx(np.log(257), rel=1e-12) and best[loss] < 1e-9
        if "chance" in none:
            assert (best["exact"], best["score"], none["exact"]) == (1, 1, 0) and none[
                "score"
            ] == none["chance"]


def examined(rank, world_size, argv):
    OWN["hybrid"] |= OWN_FLAVORS
    return evaluate.examined(load_config(argv))


SMALL_TASKS = {
    "evaluation.tasks": "['niah_single_1', 'mqar', 'induction', 'loss']",
    "evaluation.lengths": "[600, 353]",
}
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
    # two lengths in one stream
    argv = argv_of(keys | EVALUATED | SMALL_TASKS | split, training__seq_len=1024)
    records, *others = worlds(processes).run(examined, argv)
    assert not any(others)
    of_each = [
        sorted(of, key=lambda record: (record["task"], record["length"])) for of in (records, alone)
    ]
    for record, other in zip(*of_each, strict=True):
        near = {
            key: pytest.approx(x, rel=1e-9) if isinstance(x, float) else x
            for key, x in other.items()
        }
        assert record == near


@pytest.mark.parametrize(
    "more, said",
    [
        (
            {"evaluation.tasks": "['niah']"},
            "evaluation.tasks: 'niah' is unknown; use some of niah_single_1, ",
        ),
        (
            {"evaluation.tasks": "['vt']", "evaluation.lengths": "[99]"},
            r"99 is too short for the task 'vt', which takes 4\d\d",
        ),
        (
            {"evaluation.tasks": "['loss']", "evaluation.lengths": "[9000]"},
            "no document of the text has 9,000 tokens",
        ),
        (
            {"evaluation.lengths": "[90000]"},
            "90,000 tokens are more than the text's 63,555; give a longer",
        ),
        (
            {"model.flavor": "softmax", "evaluation.lengths": "[65]"},
            "65 is above the 64 positions of the model; give less",
        ),
        (
            {
                "model.flavor": "wide-norms",
                "evaluation.lengths": "[129]",
                "model.hf_assets_path": "FOLDER",
            },
            "129 is above the 128 positions of the model; give less, or extend them by rope_scaling",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(more, said, keys, tmp_path):
    """Above the positions of a RoPE's factor, or of a folder."""
    write_json(tmp_path / "config.json", {"max_position_embeddings": 128})
    more = {key: tmp_path if value == "FOLDER" else value for key, value in more.items()}
    config = load_config(argv_of(keys | {"evaluation.tasks": "['niah_single_2']"} | more))
    with refused(said):
        model = (OWN["hybrid"] | OWN_FLAVORS)[config.model.flavor]
        data = RunData(config, ByteTokenizer())
        check_evaluation(data, model, Origin.of(config).assets)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, capsys):
    write_json(
        tmp_path / "config.json",
        read_json(Path("titan_linear/models/families/configs/bamba.json"))["debug"],
    )
    said = is_refused(evaluate.main, [str(tmp_path), "--tasks", "mqar"], capsys)
    assert f"{tmp_path}/tokenizer.json does not exist; give a Hugging Face tokenizer.json" in said


def test_sizes_are_read(capsys):
    assert [evaluate.size(text) for text in ("512", "4k", "1M")] == [512, 4096, 2**20]
    assert is_refused(evaluate.main, ["--tasks", "vt"], capsys).startswith(
        "give PATH, what is evaluated"
    )
    assert is_refused(score.main, ["a", "--temperature", "nan"], capsys).endswith(
        "--temperature nan above 0\n"
    )


def test_where_results_go_is_tried_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "checked", lambda path, keys: (Origin.of(load_config([])), None))
    monkeypatch.setattr(evaluate, "check_evaluation", lambda *_: None)
    monkeypatch.setattr(evaluate, "run_workers", lambda *_: 0)
    assert evaluate.main(["a", "-o", str(tmp_path / "new")]) == 0
    file = tmp_path / "new" / "evaluation.jsonl"
    assert is_refused(evaluate.main, ["a", "-o", str(file)], capsys).endswith(f"'{file}'\n")


def test_a_run_shows_what_its_checkpoint_does(keys, tmp_path, worlds):
    """By step; in TensorBoard by length, and as an image of tiles by depth and length."""
    more = {
        "job.dump_folder": tmp_path,
        "checkpoint.enable": "true",
        "metrics.enable_tensorboard": "true",
    }
    of_run = keys | EVALUATED | SMALL_TASKS | more | {"evaluation.freq": 2, "training.steps": 3}
    worlds(2).run(train, argv_of(of_run, parallelism__context_parallel_degree=2))
    lines = read_lines(tmp_path / "evaluation.jsonl")
    assert [step for step, _ in groupby(line.pop("step") for line in lines)] == [2, 3]
    saved = {
        "checkpoint.initial_load_path": tmp_path / "checkpoint/step-3",
        "job.dump_folder": tmp_path / "again",
    }
    records = worlds(1).run(examined, argv_of(of_run | saved))[0]
    for line, record in zip(lines[len(records) :], records, strict=True):
        assert line == {
            key: pytest.approx(x, rel=1e-9) if isinstance(x, float) else x
            for key, x in record.items()
        }
    events = events_of(tmp_path)
    first = [line["loss"] for line in lines[:4] if line["length"] == 600]
    shown = events.Scalars("evaluation_loss/niah_single_1_600")
    assert [event.step for event in shown] == [2, 3] and shown[0].value == pytest.approx(
        np.mean(first), rel=1e-6
    )
    image = events.Images("evaluation/niah_single_1")[0]
    assert (image.width, image.height) == (32, 32)  # of two lengths and depths


def said(rank, world_size, argv, change):
    """Answers are the model's own, or differ from them in the last token."""
    OWN["hybrid"] |= OWN_FLAVORS
    reader = open_reader(load_config(argv))
    prompts = open_prompts(RunData(reader.config, reader.tokenizer))

    def prompt(sample):
        rows = asked(sample)
        before = rows["token"][: np.argmax(rows["answer"] != NONE)].tolist()
        options = {
            "max_new_tokens": sample.length - len(before),
            "sampling": Sampling(),
            "device": torch.device("cpu"),
        }
        (new,) = generate_tokens(reader.session.model, [before], **options, vocab_size=257)
        rows["token"][len(before) :] = new
        rows["token"][-1] = (new[-1] + change) % 256
        return rows

    asked, prompts.prompt = prompts.prompt, prompt
    return examine(reader, prompts)


def test_exact_is_what_greedy_decoding_writes(keys, worlds):
    argv = argv_of(keys | EVALUATED, evaluation__tasks="['induction']", evaluation__lengths="[400]")
    for change, exact in ((0, 1), (1, 0)):
        assert [record["exact"] for record in worlds(1).run(said, argv, change)[0]] == [exact] * 2


def likely(rank, world_size, argv, requests):
    OWN["hybrid"] |= OWN_FLAVORS
    reader = open_reader(load_config(argv))
    return lm_eval.likelihoods(requests, reader), [
        whole(reader.session.model, *of) for of in requests if world_size == 1
    ]


def whole(model, tokens, begin):
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), BatchPlan(torch.arange(len(tokens))))[
            0, begin - 1 : -1
        ]
    after = torch.tensor(tokens[begin:])
    return logits.log_softmax(-1).gather(1, after[:, None]).sum().item(), bool(
        (logits.argmax(-1) == after).all()
    )


def test_likelihoods_of_a_harness_are_those_of_whole_logits(keys, worlds):
    """In its order, on every rank; of no tokens 0."""
    rng = np.random.default_rng(0)
    requests = [
        (rng.integers(0, 256, n).tolist(), begin)
        for n, begin in ((9, 8), (7, 7), (70, 1), (33, 20), (1, 1), (70, 69), (2, 1))
    ]
    argv = argv_of(keys, training__local_batch_size=1)
    ((alone, exact),) = worlds(1).run(likely, argv, requests)
    cp, tp = (
        [*argv, f"--parallelism.{name}_parallel_degree", "2"] for name in ("context", "tensor")
    )
    for found in (
        alone,
        *(of for split in (cp, tp) for of, _ in worlds(2).run(likely, split, requests)),
    ):
        assert [logprob for logprob, _ in found] == pytest.approx(
            [logprob for logprob, _ in exact], rel=1e-9
        )
        assert [greedy for _, greedy in found] == [greedy for _, greedy in exact]


def test_requests_without_tokens_are_likely(keys, worlds):
    ((found, _),) = worlds(1).run(likely, argv_of(keys), [([5], 1), ([5, 6], 2)])
    assert found == [(0.0, True)] * 2


def test_options_and_keys_are_told_apart():
    argv = [
        "PATH",
        "--tasks",
        "a,b",
        "--parallelism.context_parallel_degree",
        "4",
        "--limit",
        "2",
        "--training.seq_len=64",
        "-x",
    ]
    assert lm_eval.parted(argv) == (argv[:3] + argv[5:7], argv[3:5] + argv[7:])


def test_prompts_are_written_to_train_on_their_answers(keys, tmp_path, capsys):
    """Each is asked in an order that the context does not tell."""
    folder = tmp_path / "mqar"
    options = ["--write", str(folder), "--tasks", "mqar", "--lengths", "300", "400"]
    assert evaluate.main([*options, *argv_of(keys | EVALUATED | {"model.flavor": "debug"})]) == 0
    assert "4 prompts in" in capsys.readouterr().out
    corpus, decode = load_corpus(folder), ByteTokenizer().decode
    assert np.diff(corpus.offsets).tolist() == [300, 300, 400, 400]
    for places in np.split(np.arange(corpus.num_tokens), corpus.offsets[1:-1]):
        text = decode(corpus.tokens[places])
        asked = decode(corpus.tokens[places[corpus.column("weights", places) == 1]]).split()
        told = re.findall(r"\n\w+ (\w+)", text)[:-8]
        assert asked == paired(text)[-8:] and asked != [value for value in told if value in asked]


def test_a_user_asks_by_the_chat_template(keys, tokenizers, tmp_path):
    """The answer follows what begins the assistant's turn; the length stays."""
    with refused("evaluation.chat = true takes a chat template, and the tokenizer has none"):
        prompts_of(keys, tokenizers["bytes"], evaluation__chat="true")
    byte_bpe([string.printable], 300, ["<|user|>", "<|bot|>"]).save(
        str(tmp_path / "tokenizer.json")
    )
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|bot|>"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = build_tokenizer(str(tmp_path))
    rows = prompts_of(keys, tokenizer, evaluation__chat="true").prompt(
        TaskSample("niah_single_1", 900, 0.5, 0)
    )
    text = tokenizer.decode(rows["token"][rows["answer"] == NONE], special=True)
    assert (
        len(rows) == 900 and text.startswith("<|user|>Some special") and text.count("<|bot|>") == 1
    )
    assert re.search(
        r"in their order\?\n<\|bot\|>\nOne of the special magic numbers for \w+ is:$", text
    )


CHAT = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|bot|>"


@pytest.fixture
def chatting(keys, tmp_path):
    """A function from a chat template to a prompt's text."""
    byte_bpe([string.printable], 300, ["<|user|>", "<|bot|>"]).save(
        str(tmp_path / "tokenizer.json")
    )

    def text_of(template):
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = build_tokenizer(str(tmp_path))
        prompts = prompts_of(keys, tokenizer, evaluation__chat="true")
        rows = prompts.prompt(TaskSample("niah_single_1", 900, 0.5, 0))
        return tokenizer.decode(rows["token"], special=True)

    return text_of


def test_a_question_is_the_users_whatever_else_a_template_says(chatting):
    system = "Think about the question, then answer the question."
    for content in ("m.content", "m.content | trim"):
        text = chatting(system + CHAT.replace("m.content", content))
        assert text.startswith(f"{system}<|user|>Some special magic numbers are hidden")
        assert "in the text above, in their order?\n<|bot|>" in text


@pytest.mark.parametrize(
    "content",
    [
        "'asked'",
        "m.content + m.content",
        "m.content | upper",
        "m.content | tojson",
        "m.content | e",
        "m.content[:2000]",
        "m.content | replace('\n', ' ')",
    ],
)
def test_a_template_that_changes_questions_is_refused(content, chatting):
    with refused("evaluation.chat = true: the chat template drops, alters or repeats"):
        chatting(CHAT.replace("m.content", content))


def test_models_that_are_compared_have_one_size_and_positions():
    """Softmax attention alone has none without rotary positions."""
    recipe = Path("train_configs/recall_4m.toml")
    comments = re.sub(r"\n# {14}", " ", recipe.read_text().partition("\n[job]")[0])
    keys = dict(re.findall(r"\n#   (\w+) +(--model.*)", comments))
    sizes = []
    for of_model in keys.values():
        config = load_config([f"--job.config_file={recipe}", *shlex.split(of_model)])
        model = Origin.of(config).model_for(ByteTokenizer())
        assert any(not isinstance(mixer, Attention) or mixer.rotary for mixer in model.mixers)
        sizes.append(sum(p.numel() for p in unallocated(model, torch.float32).parameters()))
    assert len(sizes) == 6 and max(sizes) < 1.02 * min(sizes)


def test_an_answer_is_compared_with_what_there_is():
    """One other or three, of which one is as likely."""
    one = (0, 1, 0, True, -1, [-2, np.nan, np.nan])
    three = (0, 2, 1, False, -1, [-3, -1, -2])
    rows = np.array([one, three], LABEL)
    found = recall(TaskSample("mqar", 3, 0.5, 0), rows)
    assert (found["score"], found["chance"], found["exact"], found["loss"]) == (0.75, 0.375, 0.5, 1)


def test_tiles_have_depths_down_and_lengths_across():
    records = [
        {"length": n, "depth": depth, "score": n * depth}
        for n in (64, 128, 256)
        for depth in (0.0, 1.0)
    ]
    lengths, depths, scores = tiles(records)
    assert (lengths, depths, scores.tolist()) == (
        [64, 128, 256],
        [0, 1],
        [[0, 0, 0], [64, 128, 256]],
    )


def test_tiles_lack_what_was_not_asked():
    records = [{"length": 64, "depth": depth, "score": depth} for depth in (0.0, 0.5)]
    lengths, depths, scores = tiles([*records, {"length": 128, "depth": 0.0, "score": "nan"}])
    assert (lengths, depths) == ([64, 128], [0, 0.5])
    np.testing.assert_array_equal(scores, [[0, np.nan], [0.5, np.nan]])
