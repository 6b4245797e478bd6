"""Documents longer than training.max_length are cut or left out, with their columns, and counted."""

import numpy as np
import pytest

from tests.keys import argv_of
from tests.records import write_lines
from tests.refusals import refused
from titan_linear.config import check_config, load_config
from titan_linear.data import ByteTokenizer, Texts, open_corpus


def corpus_of(folder, records, **options):
    file = write_lines(folder / "a.jsonl", records)
    options = {"dataset_format": "completion", **options}
    texts = Texts("jsonl", str(file), ByteTokenizer(), **options)
    return open_corpus(texts, cache_dir=folder / "cache")


def documents_in(corpus):
    """Each document's text, and what is trained on."""
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:]):
        ids = corpus.tokens[begin:end]
        learnt = corpus.column("weights", np.arange(begin, end)) > 0
        yield ByteTokenizer().decode(ids), ByteTokenizer().decode(ids[learnt])


LONG, SHORT = {"prompt": "abcd", "completion": "efgh"}, {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    "truncation, documents",
    [
        ("right", [("abcdef", "ef"), ("ab", "b")]),
        # The ninth token ends the document.
        ("left", [("defgh", "efgh"), ("ab", "b")]),
        ("skip", [("ab", "b")]),
    ],
)
def test_longer_documents_are_cut_or_left_out(truncation, documents, tmp_path):
    for _ in range(2):  # tokenised, and from the cache
        corpus = corpus_of(tmp_path, [LONG, SHORT], max_length=6, truncation=truncation)
        assert list(documents_in(corpus)) == documents
        assert "\n1 records are longer than training.max_length" in corpus.summary
        assert "empty" not in corpus.summary
    assert "max_length" not in corpus_of(tmp_path, [LONG, SHORT], max_length=9).summary


def test_columns_are_cut_with_their_tokens(tmp_path):
    record = {"tokens": [1, 2, 3, 4, 5], "advantages": [0.1, 0.2, 0.3, 0.4, 0.5]}
    for truncation, kept in (("right", slice(3)), ("left", slice(-3, None))):
        corpus = corpus_of(
            tmp_path,
            [record],
            dataset_format="tokens",
            columns={"advantages": "<f4"},
            max_length=3,
            truncation=truncation,
        )
        assert corpus.tokens.tolist() == record["tokens"][kept]
        assert corpus.columns["advantages"].tolist() == pytest.approx(record["advantages"][kept])


def test_pairs_are_cut_on_either_side(tmp_path):
    pair = {"prompt": "ab", "chosen": "cdef", "rejected": "g"}
    corpus = corpus_of(tmp_path, [pair], dataset_format="preference", max_length=4)
    assert [text for text, _ in documents_in(corpus)] == ["abcd", "abg"]


@pytest.mark.parametrize(
    "record, form",
    [
        (LONG, "completion"),
        ({"prompt": "ab", "chosen": "cdx", "rejected": "cdy"}, "preference"),
    ],
)
def test_records_of_which_nothing_to_learn_is_left_are_bad(record, form, tmp_path):
    with refused("line 1: nothing to learn is left in the 4 tokens of training.max_length"):
        corpus_of(tmp_path, [record], dataset_format=form, max_length=4)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"training.truncation": "left"}, "truncation = 'left' needs training.max_length"),
        (
            {
                "training.max_length": 8,
                "training.dataset": "tokens",
                "training.dataset_path": "corpus",
            },
            "max_length = 8 is for documents that are tokenised, .* training.dataset = 'tokens'",
        ),
    ],
)
def test_keys_without_effect_are_refused(keys, message):
    with refused(message):
        check_config(load_config(argv_of(keys)), 1)
