"""Columns beside tokens: as records have them, and what of them is refused, by record and column."""

from __future__ import annotations

import numpy as np
import pytest

from tests.keys import argv_of
from tests.records import write_lines, write_table
from tests.refusals import refused
from titan_linear.config import check_config, load_config
from titan_linear.data import (
    ByteTokenizer,
    PackedStreams,
    Targets,
    Texts,
    WholeStreams,
    load_corpus,
    open_corpus,
    split_corpus,
    tokenise_corpus,
    write_corpus,
)
from titan_linear.run.data import RunData

RECORDS = r"training\.dataset_path = '/.*/records\.jsonl'"
COLUMNS = {"weights": "<f4", "reference": "<f4", "teacher_ids": "<i4", "teacher_logprobs": "<f4"}


def opened(path, dataset="jsonl", form="tokens", columns=("weights", "reference", "teacher_ids")):
    texts = Texts(
        dataset,
        str(path),
        ByteTokenizer(),
        dataset_format=form,
        columns={n: COLUMNS[n] for n in columns},
    )
    return open_corpus(texts)


@pytest.mark.parametrize("dataset", ["jsonl", "parquet"])
def test_a_stream_has_the_numbers_of_its_labels(tmp_path, dataset):
    """One for a document, or one or several for each token; 0 where there is no label; weights divided as asked."""
    records = [
        {"tokens": [5, 6, 7], "weights": [2.0, 0.5, 0.25], "reference": [-1.0, -2.0, -3.0]},
        {
            "tokens": [8, 9, 10, 11],
            "weights": [1.0, 0.0, 1e6, 3.0],
            "reference": [-4.0, -5.0, -6.0, -7.0],
        },
        {"tokens": [1, 2], "weights": [0.0, 0.0], "reference": [-8.0, -9.0]},
    ]
    records = [
        {**record, "teacher_ids": [[t, t + 1] for t in record["tokens"]]} for record in records
    ]
    file = tmp_path / f"records.{dataset}"
    write_lines(file, records) if dataset == "jsonl" else write_table(
        file, {name: [record[name] for record in records] for name in records[0]}
    )
    side = split_corpus(opened(file, dataset), 0.0, "train")

    def stream(normalise):
        targets = Targets(normalise, ("reference", "teacher_ids"))
        return PackedStreams(side, seq_len=10, seed=0, repeat=False, targets=targets)[0]

    got = stream("token")
    assert got.labels.tolist() == [6, 7, -100, -100, 10, 11, -100, -100, -100, -100]
    assert got.columns["weights"].tolist() == [0.5, 0.25, 0, 0, 1e6, 3, 0, 0, 0, 0]
    assert got.columns["reference"].tolist() == [-2, -3, 0, 0, -6, -7, 0, 0, 0, 0]
    assert got.columns["teacher_ids"][[0, 5, 9]].tolist() == [[6, 7], [11, 12], [0, 0]]
    assert stream("document").columns["weights"][:6].tolist() == [0.25, 0.125, 0, 0, 5e5, 1.5]
    assert stream("stream").columns["weights"][:6].tolist() == [0.125, 0.0625, 0, 0, 2.5e5, 0.75]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"weights": [1, 1]},
            r"'weights' has 2 rows, and the document 3 tokens with its end; give one each",
        ),
        ({"weights": [1, 1, 1, 1]}, r"'weights' has 4 rows"),
        (
            {"weights": [1, -1, 1]},
            r"'weights' must have finite numbers, and weights 0 or more",
        ),
        ({"reference": "many"}, r"'reference' is neither a number nor a list"),
        ({"reference": [[1], [1, 2], [1]]}, r"'reference' is neither a number nor a list"),
        ({"reference": [float("nan")] * 3}, r"'reference' must have finite numbers"),
        ({"weights": 1e39}, r"'weights' must have finite numbers"),
        ({"weights": 10**400}, r"'weights' is neither a number nor a list"),
        ({"teacher_ids": [[1], [2], [2.5]]}, r"'teacher_ids' has ids outside the vocabulary"),
        (
            {"reference": -8.5},
            r"'reference' is one number, the document's sum perhaps; give each token's log-prob",
        ),
        (
            {"reference": [-3, 2.5, -1]},
            r"'reference' has 2\.5, and log-probabilities are 0 or less",
        ),
        (
            {"teacher_ids": [[1], [2], [257]]},
            r"'teacher_ids' has ids outside the vocabulary, 0 to 256",
        ),
        (
            {"teacher_ids": [[1, 2]] * 3},
            r"'teacher_ids' has 2 numbers for a token, and 1 in documents before",
        ),
        ({"tokens": [1, 2, 300]}, r"'tokens' is not a list of numbers from 0 to 256"),
        ({"tokens": []}, r"'tokens' is not a list"),
    ],
)
def test_what_does_not_fit_names_its_record(tmp_path, record, problem):
    whole = {
        "tokens": [1, 2, 3],
        "weights": 1,
        "reference": [-3, -2, 0.1],
        "teacher_ids": [[1], [2], [3]],
    }
    file = write_lines(tmp_path / "records.jsonl", [whole, whole | record])
    with refused(rf"records\.jsonl, line 2: {problem}"):
        opened(file)


TAUGHT = {"teacher_ids": [[0, 0], [7, 8], [8, 7], [0, 0]], "weights": [1, 1, 1, 0]}
TAUGHT |= {"tokens": [1, 2, 3, 4], "teacher_logprobs": [[0, 0], [-0.1, -3], [-1, -1], [0, 0]]}


@pytest.mark.parametrize(
    "column, value, problem",
    [
        ("teacher_ids", [[0, 0], [7, 8], [7, 7], [0, 0]], "lists an id twice for a token"),
        (
            "teacher_logprobs",
            [[0, 0], [-0.1, -3], [-0.5, -0.8], [0, 0]],
            r"has probabilities that sum to 1\.056",
        ),
        (
            "teacher_logprobs",
            [[0, 0], [0.4, 0.3], [0.3, 0.1], [0, 0]],
            "is nowhere below 0, as probabilities are; give their logarithms",
        ),
        ("reference", [-1, 0.0003, 0.2, -1], "'reference' is nowhere below 0"),
    ],
)
def test_distributions_that_are_none(column, value, problem, tmp_path):
    """Of tokens that count: the first one, which nothing predicts, and one of weight 0 may have anything."""
    names = [*TAUGHT.keys() - {"tokens"}, *["reference"] * (column == "reference")]
    good = TAUGHT | {"reference": [0, 0, -0.2, 0]}
    file = write_lines(tmp_path / "good.jsonl", [good, good | {"reference": [0, 1e-5, 0, 0]}])
    corpus = opened(file, columns=names)
    assert corpus.columns["teacher_ids"][:4].tolist() == TAUGHT["teacher_ids"]
    file = write_lines(tmp_path / "records.jsonl", [good, good | {column: value}])
    with refused(rf"records\.jsonl, line 2: .*{problem}"):
        opened(file, columns=names)


@pytest.mark.parametrize(
    "columns, problem",
    [
        ({"reference": -np.ones(3)}, "has a column 'reference'; name it in columns"),
        ({"weights": [1, 0, 1], "teacher_ids": np.ones((3, 1))}, "has a column 'weights'"),
        ({}, "has no column 'teacher_ids', which columns names"),
        ({"teacher_ids": np.ones((4, 1))}, "'teacher_ids' has 4 rows, and the document 3 tokens"),
        (
            {"teacher_ids": np.ones((3, 2))},
            "'teacher_ids' has 2 numbers for a token, and 1 in documents before",
        ),
        ({"teacher_ids": [[1], [2.5], [3]]}, "'teacher_ids' has ids outside the vocabulary"),
        ({"teacher_ids": [[1], [2**32 + 1], [3]]}, "'teacher_ids' has ids outside the vocabulary"),
        ({"teacher_ids": [["a"], ["b"], ["c"]]}, "'teacher_ids' is neither a number nor a list"),
    ],
)
def test_columns_of_own_tokens(columns, problem, tmp_path):
    ids = np.arange(3)
    documents = [(ids, {"teacher_ids": np.ones((3, 1), dtype=np.int64)}), (ids, columns)]
    with refused(rf"document 1:? .*{problem}"):
        write_corpus(tmp_path / "c", documents, ByteTokenizer(), columns={"teacher_ids": "<i4"})
    with refused("columns: column 'weights', 'float32', 0 for each token, must be one of"):
        write_corpus(tmp_path / "c", documents, ByteTokenizer(), columns={"weights": "float32"})


def test_own_tokens_that_count_nothing_may_lack_columns(tmp_path):
    none = (np.arange(2), {"weights": np.zeros(2)})
    whole = (np.arange(2), {"weights": np.ones(2), "reference": -np.ones(2)})
    kinds = {"weights": "<f4", "reference": "<f4"}
    write_corpus(tmp_path / "c", [none, whole, none], ByteTokenizer(), columns=kinds)
    assert load_corpus(tmp_path / "c").columns["reference"].tolist() == [0, 0, -1, -1, 0, 0]
    wrong = (np.arange(2), {"weights": np.ones(2), "reference": np.full(2, 0.3)})
    with refused("document 1: its column 'reference' is nowhere below 0"):
        write_corpus(tmp_path / "d", [whole, wrong], ByteTokenizer(), columns=kinds)


def test_a_column_that_records_lack(tmp_path):
    file = write_lines(tmp_path / "records.jsonl", [{"tokens": [1, 2, 3]}])
    with refused(
        r"line 1: no field 'weights', which training\.dataset_columns or group_field names"
    ):
        opened(file)


def test_a_records_weights_multiply_those_of_its_answers(tmp_path):
    file = write_lines(
        tmp_path / "records.jsonl",
        [{"prompt": "ab", "completion": "c", "weights": [2, 3, 0.5, 0.25]}],
    )
    corpus = opened(file, form="completion", columns=("weights",))
    assert corpus.columns["weights"].tolist() == [0, 0, 0.5, 0.25]


PAIR = {"prompt": "a", "chosen": "bc", "rejected": "d"}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, r"no field 'rejected'"),
        (PAIR | {"rejected": None}, r"'chosen' and 'rejected' are no two texts, nor messages"),
        (PAIR | {"rejected": ""}, r"no answer to learn"),
        (
            PAIR | {"chosen": [{"role": "user"}]},
            r"'chosen' and 'rejected' are no two texts, nor messages",
        ),
        (PAIR | {"reference": 1}, r"'reference' is not a list of 2, one for each of its documents"),
        (PAIR | {"reference": [[1], 1]}, r"'reference' has 1 rows"),
    ],
)
def test_pairs_that_are_none(tmp_path, record, problem):
    columns = [name for name in ("reference",) if name in record]
    file = write_lines(tmp_path / "pairs.jsonl", [record])
    with refused(problem):
        opened(file, form="preference", columns=columns)


def test_pairs_stay_together_on_their_side_and_in_their_stream(tmp_path):
    """In every epoch each pair comes once, the chosen text first; a stream holds as many as fit."""
    pairs = [{"chosen": "c" * (n % 7 + 1), "rejected": f"r{n}"} for n in range(40)]
    corpus = opened(write_lines(tmp_path / "pairs.jsonl", pairs), form="preference", columns=())
    sides = [split_corpus(corpus, 0.3, split) for split in ("train", "validation")]
    kept = [side.documents(np.arange(side.num_bundles)) for side in sides]
    assert sorted(np.concatenate(kept)) == list(range(80)) and all(
        len(documents) for documents in kept
    )
    for side, documents in zip(sides, kept):
        assert (documents.reshape(-1, 2) % 2 == [0, 1]).all()
        assert side.num_tokens == np.diff(corpus.offsets)[documents].sum()
    streams = WholeStreams(sides[0], seq_len=32, seed=1, targets=Targets(group=2))
    seen, i = [], 0
    while len(seen) < 2 * len(kept[0]):  # two epochs
        starts, lengths, *_ = streams.runs(i)
        seen += (np.searchsorted(corpus.offsets, starts, side="right") - 1).tolist()
        assert (
            lengths.sum() <= 32
            and streams[i].columns["document"][lengths.sum() - 2] == len(starts) - 1
        )
        i += 1
    fresh = WholeStreams(sides[0], seq_len=32, seed=1, targets=Targets(group=2))
    assert fresh.streams_in(2) == i
    for epoch in (seen[: len(kept[0])], seen[len(kept[0]) :]):
        assert (
            sorted(epoch) == kept[0].tolist() and (np.reshape(epoch, (-1, 2)) % 2 == [0, 1]).all()
        )
    with refused(r"training\.seq_len = 8: document \d+ of .* has \d+ tokens with its other one"):
        WholeStreams(sides[0], seq_len=8, seed=1, targets=Targets(group=2))[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"loss.name": "dpo"},
            rf"loss\.name = 'dpo' takes pairs of documents .*, and {RECORDS} holds single documents; change one",
        ),
        (
            {"loss.name": "dpo", "training.seq_len_schedule": "[{until_step = 2, seq_len = 1024}]"},
            r"cuts documents",
        ),
        (
            {"loss.name": "policy"},
            rf"loss\.name = 'policy' reads the column 'advantages', and {RECORDS} has none; name the rec",
        ),
        (
            {"loss.reference": "base"},
            r"loss\.reference = 'base': cross_entropy, by its keys, reads no reference; remove",
        ),
        (
            {"loss.name": "policy", "training.dataset_columns": '["advantages", "behaviour"]'},
            rf"the column 'advantages' of {RECORDS} has 2 for each token; give 1$",
        ),
        (
            {
                "loss.name": "distillation",
                "training.dataset_columns": '["teacher_ids", "teacher_logprobs"]',
            },
            r"the column 'teacher_logprobs' of .* has 4 for each token; give 1 to 256, as many ids as log-",
        ),
    ],
)
def test_a_loss_without_what_it_reads(tmp_path, keys, message):
    record = {"tokens": [1, 2, 3], "advantages": [[1, 2]] * 3, "behaviour": [-5] * 3}
    record |= {"teacher_ids": [[*range(5)]] * 3, "teacher_logprobs": [[-3] * 4] * 3}
    file = write_lines(tmp_path / "records.jsonl", [record])
    given = {
        "training.dataset": "jsonl",
        "training.dataset_format": "tokens",
        "training.dataset_path": file,
    }
    with refused(message):
        RunData(load_config(argv_of(given | keys)), ByteTokenizer()).streams(None)


@pytest.mark.parametrize("dataset", ["jsonl", "tokens"])
def test_a_corpus_is_named_as_its_user_knows_it(dataset, tmp_path):
    """By the texts' path, not by the folder of their cache; one of tokens by its folder."""
    path = write_lines(tmp_path / "records.jsonl", [{"tokens": [1, 2, 3]}])
    texts = Texts("jsonl", str(path), ByteTokenizer(), dataset_format="tokens")
    if dataset == "tokens":
        path = tokenise_corpus(tmp_path / "corpus", texts).folder
        texts = Texts("tokens", str(path), ByteTokenizer())
    named = str(path) if dataset == "tokens" else f"training.dataset_path = '{path}'"
    assert open_corpus(texts).name == named


def test_records_without_a_weight_above_0_are_named_by_their_path(tmp_path):
    file = write_lines(tmp_path / "records.jsonl", [{"tokens": [1, 2, 3], "weights": 0}])
    texts = Texts(
        "jsonl", str(file), ByteTokenizer(), dataset_format="tokens", columns={"weights": "<f4"}
    )
    with refused(f"^training.dataset_path = '{file}': no token has a weight above 0; give some$"):
        open_corpus(texts)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"training.dataset_columns": '["weights"]'},
            r"training\.dataset_columns = .* is for training\.dataset",
        ),
        (
            {"training.dataset_columns": '["size"]', "training.dataset": "jsonl"},
            r"no loss reads 'size'",
        ),
        (
            {"dpo.beta": 0.5},
            r"dpo\.beta = 0\.5 has no effect with loss\.name = \"cross_entropy\"; set that to \"dpo\"",
        ),
        (
            {"loss.reference": "base"},
            r"loss\.reference = \"base\" has no effect with adapter\.enable = false; set that",
        ),
    ],
)
def test_keys_that_contradict_each_other(keys, message):
    paths = {"training.dataset_path": "x"} if keys.get("training.dataset") else {}
    with refused(message):
        check_config(load_config(argv_of(keys | paths)), 1)
