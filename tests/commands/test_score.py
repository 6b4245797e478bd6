"""titan-linear score: the log-probabilities of whole logits, under splits, resumed; and the runs that read them."""

import errno
import math
import os
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.keys import argv_of
from tests.proof.sabotage import sabotaged
from tests.records import change_json, write_lines
from tests.refusals import is_refused, refused
from tests.training import OWN_FLAVORS, SPLITS, train_on_rank
from titan_linear.commands import score
from titan_linear.config import load_config
from titan_linear.data import ByteTokenizer
from titan_linear.data.corpus import scores
from titan_linear.data.corpus.corpus import Corpus, column_file, open_columns
from titan_linear.data.corpus.scores import (
    SCORES,
    Scores,
    content_of_scores,
    differences,
    open_scores,
    read_scores,
    with_scores,
)
from titan_linear.distributed.groups import host_group, on_rank_0
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import OWN
from titan_linear.run.data import RunData, check_content, content_of
from titan_linear.run.origin import Origin
from titan_linear.train import Trainer

TOP = 4


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Of pairs, the longest of which fills a stream."""
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    texts = lambda n: "".join(rng.choices("abcdef", k=n))  # noqa: E731
    records = [
        {"chosen": texts(rng.randint(1, 30)), "rejected": texts(rng.randint(1, 30))}
        for _ in range(20)
    ]
    records.append({"chosen": texts(50), "rejected": texts(12)})
    return {
        "model.name": "hybrid",
        "model.flavor": "small",
        "training.dataset": "jsonl",
        "training.dataset_format": "preference",
        "training.dataset_path": write_lines(folder / "pairs.jsonl", records),
        "training.dtype": "float64",
        "training.seq_len": 64,
        "training.loss_chunk_size": 48,
        "checkpoint.enable": "false",
        "metrics.enable_tensorboard": "false",
        "job.dump_folder": folder / "run",
    }


def scored(rank, world_size, argv):
    OWN["hybrid"] |= OWN_FLAVORS
    args, keys = score.parse(argv)
    config = load_config(keys)
    folder = Path(args.output)
    on_rank_0(
        lambda: scores.begin(folder, *score.scores_of(args, Origin.of(config))),
        host_group(),
    )
    score.score_corpus(folder, config)


def killed(rank, world_size, argv):
    """`scored`, in whose third micro-batch the process ends before its numbers are written."""
    left = iter(range(2))

    def put(was, *arguments):
        if next(left, None) is None:
            raise SystemExit
        was(*arguments)

    with sabotaged(score, "put", put), pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "SAVED", 0)
        with suppress(SystemExit):
            scored(rank, world_size, argv)


def exact(rank, world_size, argv):
    """Of each document: log p of its tokens but the first, and the likeliest."""
    OWN["hybrid"] |= OWN_FLAVORS
    config = load_config(argv)
    model, words, found = Trainer(config).model, Origin.of(config).tokenizer.vocab_size, {}
    (corpus,) = RunData(config, Origin.of(config).tokenizer).corpora()
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:]):
        tokens = torch.from_numpy(corpus.tokens[begin:end].astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None], BatchPlan(torch.arange(len(tokens))))[
                0, :-1
            ].log_softmax(-1)
        found[begin] = (
            logprobs.gather(1, tokens[1:, None])[:, 0].numpy(),
            *map(np.array, logprobs[:, :words].topk(TOP)),
        )
    return found


def columns(folder):
    kinds = {"reference": ("<f4", 0), "teacher_ids": ("<i4", TOP), "teacher_logprobs": ("<f4", TOP)}
    return open_columns(folder, kinds)


@pytest.mark.parametrize("name", ["one process", "dp 2", "cp 2 zig-zag", "tp 2 x cp 2 zig-zag"])
def test_scores_are_those_of_whole_logits(name, keys, tmp_path, worlds):
    processes, split = SPLITS.get(name, (1, {}))
    argv = ["--output", str(tmp_path / "scores"), "--top-k", str(TOP), *argv_of(keys | split)]
    worlds(processes).run(scored, argv)
    got = columns(tmp_path / "scores")
    for begin, (logprobs, best, ids) in (
        worlds(1).run(exact, argv_of(keys, loss__name="dpo", dpo__reference_free="true"))[0].items()
    ):
        rows = slice(begin + 1, begin + 1 + len(logprobs))
        np.testing.assert_allclose(got["reference"][rows], logprobs, rtol=1e-7)
        np.testing.assert_allclose(got["teacher_logprobs"][rows], best, rtol=1e-7)
        assert (got["teacher_ids"][rows] == ids).all() and got["reference"][begin] == 0


def test_it_goes_on_where_it_was_stopped_and_is_compared(keys, tmp_path, worlds):
    def run(name, *more):
        worlds(1).run(
            scored, ["--output", str(tmp_path / name), "--top-k", str(TOP), *more, *argv_of(keys)]
        )
        return tmp_path / name

    whole, half = run("whole"), run("half")
    assert differences(whole, half) == {name: (0.0, 0) for name in columns(whole)}
    column = np.memmap(half / column_file("reference"), "<f4", mode="r+")
    before = column.copy()
    column[:] = 7
    column.flush()
    change_json(half / SCORES, {"next_stream": 2})
    with refused(r"is scored to stream 2 of \d+; run the same titan-linear score again"):
        differences(whole, half)
    run("half")
    kept = columns(half)["reference"] == 7
    assert kept.any() and not kept.all() and (kept | (columns(half)["reference"] == before)).all()
    apart, token = differences(whole, half)["reference"]
    assert kept[token] and apart == (7 - before)[kept].max()
    with pytest.raises(
        AssertionError, match="holds scores of other weights, texts or columns; choose another"
    ):
        run("half", "--temperature", "2")


def test_what_is_noted_as_scored_is_written(keys, tmp_path, worlds):
    whole, half = (["--output", str(tmp_path / name), *argv_of(keys)] for name in ("whole", "half"))
    worlds(1).run(scored, whole)
    worlds(1).run(killed, half)
    assert read_scores(tmp_path / "half").next_stream == 2
    worlds(1).run(scored, half)
    assert differences(tmp_path / "whole", tmp_path / "half") == {"reference": (0.0, 0)}
    # Under another name, there is nothing to compare.
    named = ["--output", str(tmp_path / "named"), "--as", "behaviour", *argv_of(keys)]
    worlds(1).run(scored, named)
    with refused("whole has reference, and .*named has behaviour: no column is in both"):
        differences(tmp_path / "whole", tmp_path / "named")


N = 1000


def written(folder, n=N):
    """Scores of n tokens, all of one stream."""
    by = {"weights": "w", "temperature": "1.0"}
    kinds = {"reference": ("<f4", 0), "teacher_ids": ("<i4", 3)}
    made = Scores(corpus="a", tokenizer="b", by=by, columns=kinds, next_stream=0, streams=1)
    scores.begin(folder, made, n)
    scores.put(folder, made, [[np.arange(n), -np.ones(n), np.ones((n, 3))]])
    scores.keep(folder, made, 1)
    return folder


def corpus_like(tokens):
    """What scores are matched with."""
    info = {"fingerprint": "a", "tokenizer": {"fingerprint": "b"}}
    arrays = (np.zeros(tokens, "<u2"), np.array([0, tokens]), np.zeros(1, "<u8"))
    return Corpus(Path(), *arrays, info)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda data: data[:-4], "bytes instead of"),
        (lambda data: data + bytes(4), "bytes instead of"),
        (lambda data: b"\7" + data[1:], "was altered"),
        (lambda data: None, "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["reference", "teacher_ids"])
def test_damaged_scores_are_refused(name, damage, said, tmp_path):
    """Also where they were found whole before."""
    folder = written(tmp_path / "scores")
    assert (
        with_scores([corpus_like(N)], [folder], 1.0)[0].columns.keys()
        == open_scores(folder)[1].keys()
    )
    file = folder / column_file(name)
    data = damage(file.read_bytes())
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    with refused(rf"column-{name}\.bin .*{said}"):
        with_scores([corpus_like(N)], [folder], 1.0)


def test_scores_have_a_row_for_each_token(tmp_path):
    folder = written(tmp_path / "scores")
    for tokens in (N - 1, N + 1):
        with refused(rf"the column 'reference' has 1,000 rows for the {tokens:,} tokens"):
            with_scores([corpus_like(tokens)], [folder], 1.0)
    (corpus,) = with_scores([corpus_like(N)], [folder], 1.0)
    # the label of the last token
    assert corpus.column("reference", np.array([N])) == -1


@pytest.mark.parametrize(
    "kind",
    [
        {"reference": ["O", 0]},
        {"reference": ["<i8", 0]},
        {"reference": ["<f4", -1]},
        {"../reference": ["<f4", 0]},
        {"teacher_ids": ["<f4", 3]},
        {"reference": "<f4"},
    ],
)
def test_columns_that_there_are_not(kind, tmp_path):
    folder = written(tmp_path / "scores")
    change_json(folder / SCORES, {"columns": kind})
    with refused(r"scores\.json"):
        open_scores(folder)


def test_what_identifies_scores_is_their_content(tmp_path):
    first, same, other = (
        written(tmp_path / "a"),
        written(tmp_path / "b"),
        written(tmp_path / "c", 7),
    )
    assert content_of_scores(str(first)) == content_of_scores(str(same))
    assert content_of_scores(f"{first},{other}") != content_of_scores(str(first))
    assert content_of_scores(str(other)) != content_of_scores(str(first))
    assert content_of_scores("") == "none"


def test_a_run_keeps_its_scores(tmp_path):
    """A checkpoint knows them by their content; one of before does not know them."""
    written(tmp_path / "a"), written(tmp_path / "b", 7), written(tmp_path / "moved")

    def content(folder):
        config = load_config(["--loss.scores", str(folder)])
        streams = SimpleNamespace(fingerprints={"": "c"})
        return config, content_of(Origin.of(config), streams, None, "")

    _, known = content(tmp_path / "a")
    config, moved = content(tmp_path / "moved")
    check_content(config, known, moved)
    for other in (tmp_path / "b", ""):
        config, now = content(other)
        with refused(r"loss\.scores gives another set of scores than the run in"):
            check_content(config, known, now)
    check_content(config, known.model_copy(update={"scores": ""}), now)


def test_a_full_disk_is_an_error_before_anything_is_scored(tmp_path, monkeypatch):
    file = written(tmp_path / "whole", 100_000) / column_file("reference")
    assert file.stat().st_blocks * 512 >= file.stat().st_size  # it has its room

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*column-reference\.bin"):
        written(tmp_path / "full")
    assert not (tmp_path / "full" / SCORES).exists()


def test_scoring_does_not_continue_with_other_weights(keys, tmp_path):
    """Under the same path."""
    OWN["hybrid"] |= OWN_FLAVORS
    args, own = score.parse(["PATH", *argv_of(keys)])
    own += argv_of(
        {
            "checkpoint.enable": "true",
            "checkpoint.initial_load_in_hf": "true",
            "checkpoint.initial_load_path": tmp_path,
            "model.tokenizer_path": "bytes",
        }
    )

    def begin(*more):
        scores.begin(
            tmp_path / "scores", *score.scores_of(args, Origin.of(load_config([*own, *more])))
        )

    def export(value):
        save_file({"weight": torch.full((4,), value)}, tmp_path / "model.safetensors")

    export(1.0)
    begin()
    export(2.0)
    with refused("holds scores of other weights, texts or columns; choose another folder"):
        begin()
    export(1.0)
    begin()
    with refused("holds scores of other weights"):
        begin("--model.num_layers", "1")


def test_texts_must_be_named_for_a_folder_that_is_not_a_run(monkeypatch, capsys):
    def checked(path, keys):
        folder = {"checkpoint.enable": "true", "checkpoint.initial_load_in_hf": "true"}
        first = argv_of(folder | {"checkpoint.initial_load_path": path})
        return Origin.of(load_config([*first, *keys])), None

    began = []
    monkeypatch.setattr(score, "checked", checked)
    monkeypatch.setattr(score, "scores_of", lambda *_: ())
    monkeypatch.setattr(score, "begin", lambda *_: began.append(True))
    monkeypatch.setattr(score, "run_workers", lambda *_: 0)
    said = is_refused(score.main, ["Qwen", "-o", "s"], capsys)
    assert (
        "Qwen is not a run" in said
        and "give --training.dataset and --training.dataset_path" in said
    )
    for keys in (["--training.dataset", "stdlib"], ["--training.dataset=jsonl"]):
        assert score.main(["Qwen", "-o", "s", *keys]) == 0
    assert len(began) == 2


def test_the_base_as_reference_is_as_its_scores_are(keys, tmp_path, worlds):
    """But for the rounding of these to float32: β times that of at most 66 labels of a pair, below 8 nats each."""
    worlds(1).run(scored, ["--output", str(tmp_path), *argv_of(keys)])
    lora = {
        "loss.name": "dpo",
        "dpo.beta": 0.5,
        "adapter.enable": "true",
        "training.steps": 2,
        "optimizer.lr": 1e-3,
    }
    lora |= {"lr_scheduler.warmup_steps": 0, "training.global_batch_size": 2}
    more = {"loss.scores": tmp_path}, {"loss.reference": "base"}
    by_scores, by_base = (
        worlds(1).run(train_on_rank, argv_of(keys | lora | own))[0][0] for own in more
    )
    assert (
        by_base[0] == pytest.approx(math.log(2), abs=1e-15) and abs(by_base[1] - math.log(2)) > 1e-3
    )
    assert by_base == pytest.approx(by_scores, abs=0.5 * 66 * 8 * 2**-25)


def test_a_loss_reads_scores_of_its_own_texts_alone(keys, tmp_path, worlds):
    worlds(1).run(scored, ["--output", str(tmp_path), *argv_of(keys)])
    config = load_config(argv_of(keys, loss__name="dpo", loss__scores=tmp_path))
    (corpus,) = RunData(config, ByteTokenizer()).corpora()
    assert corpus.columns["reference"].any()
    other = write_lines(tmp_path / "other.jsonl", [{"chosen": "yes", "rejected": "no"}])
    config = load_config(argv_of(keys | {"training.dataset_path": other}, loss__scores=tmp_path))
    warmer = load_config(
        argv_of(keys, loss__name="distillation", loss__scores=tmp_path, distillation__temperature=2)
    )
    for mistaken, problem in (
        (config, "is of another corpus or tokenizer"),
        (
            warmer,
            "was scored with --temperature 1.0, and the loss reads log-probabilities at 2; score with that",
        ),
    ):
        with refused(rf"loss\.scores: .* {problem}"):
            RunData(mistaken, ByteTokenizer()).corpora()


def test_what_is_scored_is_one_corpus(keys):
    """Of a run that validates on texts of its own, too, which need not be like those to score."""
    validated = argv_of(keys, validation__enable="true", validation__dataset_path="nowhere.jsonl")
    assert len(score.streams_to_score(RunData(load_config(validated), ByteTokenizer())))
    mixed = keys | {"training.mixture": '[{name = "a", weight = 1, dataset = "stdlib"}]'}
    with pytest.raises(
        ValueError,
        match=r"training\.mixture: a corpus is scored at a time; give training\.mixture = ",
    ):
        score.streams_to_score(RunData(load_config(argv_of(mixed)), ByteTokenizer()))
    args, own = score.parse(["PATH", "--top-k", "7", *argv_of(keys)])
    with pytest.raises(
        ValueError, match=r"--top-k 7 is above the 4 tokens of the tokenizer; give 4"
    ):
        few = SimpleNamespace(config=load_config(own), tokenizer=SimpleNamespace(vocab_size=4))
        score.scores_of(args, few)


def test_scores_of_trees_are_those_of_their_documents(keys, tmp_path, worlds):
    """Of each node's tokens, which several documents hold, and of those that continue a branching point."""
    tree = {
        "text": "abcdab",
        "children": [{"text": "cd"}, {"text": "ef", "children": [{"text": "a"}, {"text": "bb"}]}],
    }
    documents = {"abcdabcd": [*range(9)], "abcdabefa": [*range(6), *range(9, 13)]}
    documents["abcdabefbb"] = [*range(6), 9, 10, *range(13, 16)]
    split, found = SPLITS["cp 2 allgather zigzag"], []
    for name, records in {
        "tree": [tree],
        "apart": [{"text": text, "children": []} for text in documents],
    }.items():
        own = keys | {
            "training.dataset_format": "tree",
            "training.dataset_path": write_lines(tmp_path / name, records),
        }
        processes, more = split if name == "tree" else (1, {})
        worlds(processes).run(
            scored, ["--output", str(tmp_path / f"of {name}"), *argv_of(own | more)]
        )
        columns_of = open_columns(tmp_path / f"of {name}", {"reference": ("<f4", 0)})
        found.append(columns_of["reference"])
    np.testing.assert_allclose(found[0][np.concatenate([*documents.values()])], found[1], rtol=1e-7)
