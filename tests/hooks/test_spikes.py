"""Steps whose loss stands out are written down, and can be looked at."""

import json

import numpy as np
import pytest

from tests.hooks.runs import arguments
from tests.steps import after_backward
from titan_linear.commands import batch
from titan_linear.config import load_config
from titan_linear.data import IGNORE, ByteTokenizer, Stream, write_corpus
from titan_linear.data.corpus.columns import DocumentTokens
from titan_linear.hooks.spikes import NonFinite, Outliers
from titan_linear.run.preflight import preflight
from titan_linear.train import Trainer


def test_outliers_and_numbers_that_are_not_finite_stand_out():
    judge = Outliers(4.0)
    assert all(judge.judge(2.0 + n % 2, 1.0) is None for n in range(40))  # mean 2.5, sigma 0.5
    assert judge.judge(4.5, 1.0) is None
    assert judge.judge(7.0, 3.0)["why"] == "outlier"
    assert (
        judge.judge(float("nan"), 1.0)["why"]
        == judge.judge(2.0, float("inf"))["why"]
        == "not finite"
    )
    assert Outliers(4.0).judge(1e9, 1.0) is None  # nothing to compare with
    off = Outliers(0.0)
    assert all(off.judge(2.0 if n < 50 else 99.0, 1.0) is None for n in range(60))
    assert off.judge(float("nan"), 1.0) is not None


def spiking(rank, world_size, argv):
    """Step 2's second micro-batch is an outlier, step 3 is not finite."""
    trainer = Trainer(load_config(argv))
    trainer.spikes.outliers.last.extend([2.0, 2.1] * 16)
    factors = iter([0.3, 0.3, 0.3, 9.0, float("nan"), 1.0])
    after_backward(trainer, lambda loss: loss * next(factors))
    for _ in range(2):
        trainer.train_step()
    with pytest.raises(NonFinite):
        trainer.train_step()


@pytest.fixture
def folder(tmp_path):
    for name in "ab":
        texts = (ByteTokenizer().encode(f"{name} text {n} " * (1 + n % 5)) for n in range(40))
        documents = (
            DocumentTokens(ids, {"weights": 1.5**n * (ids > 0)}) for n, ids in enumerate(texts)
        )
        write_corpus(tmp_path / name, documents, ByteTokenizer(), columns={"weights": "<f4"})
    return tmp_path


def test_streams_are_written_down_and_shown(folder, worlds, capsys):
    split = {"training.local_batch_size": 2, "parallelism.context_parallel_degree": 2}
    keys = arguments(folder, split, {"model.flavor": "debug"})
    preflight(load_config(keys), 2)
    worlds(2).run(spiking, keys)
    outlier, bad = map(json.loads, (folder / "run/spikes.jsonl").read_text().splitlines())
    assert (outlier["step"], outlier["why"], bad["step"], bad["why"]) == (
        2,
        "outlier",
        3,
        "not finite",
    )
    calm, spike = outlier["micro_batches"]
    assert (calm["streams"], spike["streams"]) == ([4, 5], [6, 7]) and spike["loss"] > 10 * calm[
        "loss"
    ]
    # drawn weights know no text
    assert spike["loss"] / 9 == pytest.approx(calm["loss"] / 0.3, rel=0.05)
    total = calm["weight"] + spike["weight"]
    mean = (calm["loss"] * calm["weight"] + spike["loss"] * spike["weight"]) / total
    assert (
        mean == pytest.approx(outlier["loss"], rel=1e-12)
        and bad["micro_batches"][0]["loss"] == "nan"
    )

    capsys.readouterr()
    assert batch.main([*keys, "--spike", "1"]) == 0
    shown = capsys.readouterr().out
    order = [shown.index(f"stream {i}, source ") for i in (6, 7, 4, 5)]
    assert order == sorted(order) and "document 0: [0, " in shown and " text " in shown
    assert batch.main([*keys, "--step", "2", "--stream", "5", "--characters", "0"]) == 0
    assert capsys.readouterr().out.count("stream ") == 1


def test_what_is_learnt_is_shown_with_its_special_tokens():
    """ "ab?yes" and its end: the answer and the end are learnt; of "xyz" all that follows its first token. The stream's
    last label is the next stream's first token."""
    tokens = np.array([*b"ab?yes", 256, *b"xyz"])
    labels = np.append(tokens[1:], ord("w"))
    labels[[0, 1, 6]] = IGNORE
    stream = Stream(
        tokens, labels, np.array([0, 7, 10]), np.arange(10), {"weights": labels != IGNORE}
    )
    assert list(batch.documents(stream, ByteTokenizer(), 60)) == [
        "  document 0: [0, 7), 7 tokens, 4 learnt",
        '    context: "ab?"',
        '    learnt: "yes<|endoftext|>"',
        "  document 1: [7, 10), 3 tokens, 2 learnt",
        '    context: "x"',
        '    learnt: "yz"',
    ]
    assert list(batch.documents(stream, ByteTokenizer(), 5))[2] == '    learnt: "yes<| … ext|>"'


@pytest.mark.parametrize(
    "own, message",
    [
        (["--step", "0"], "--step 0 must be 1 or more"),
        (["--step", "1", "--stream", "4"], "--stream 4 is not of step 1; its streams are 0 to 3"),
        (["--spike", "1"], "--spike 1: there is no "),
    ],
)
def test_unknown_steps_streams_and_spikes_are_refused(own, message, folder, capsys):
    assert batch.main([*arguments(folder), *own]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}") and not (folder / "run").exists()
