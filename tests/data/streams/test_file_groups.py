"""Groups of text files: which tokens belong to which."""

from pathlib import Path

import pytest

from tests.data.conftest import packed, random_documents
from tests.records import write_texts
from tests.refusals import refused
from titan_linear.data import (
    ByteTokenizer,
    FileGroups,
    MixedStreams,
    Phase,
    Targets,
    Texts,
    WholeStreams,
    open_corpus,
)
from titan_linear.data.streams.file_groups import _fits

PATHS = [
    "/data/a.py",
    "/data/lib/b.py",
    "/data/lib/deep/c.py",
    "/data/books/d.jsonl",
    "/data/old/books/e.jsonl",
    "/data/books/more/f.jsonl",
    "/data/[x] y.txt",
]


@pytest.mark.parametrize(
    "glob, fitting",
    [
        ("*.py", "abc"),
        ("**/*.py", "abc"),
        ("lib/*.py", "b"),
        ("lib/**/*.py", "bc"),
        ("./lib/**", "bc"),
        ("books/*.jsonl", "de"),
        ("/data/books/*.jsonl", "d"),
        ("/**/books/*", "de"),
        ("data/?.py", "a"),
        ("/data/*/*", "bd"),
        ("books/**/*.jsonl", "def"),
        ("[x] y.txt", "["),
        ("d.jsonl", "d"),
        ("**", "abcdef["),
    ],
)
def test_globs_match_paths(glob, fitting):
    found = [
        Path(path).name[0]
        for path, fits in zip(PATHS, _fits(glob, PATHS, "name"), strict=True)
        if fits
    ]
    assert "".join(found) == fitting


@pytest.fixture
def texts(tmp_path):
    """Documents of one letter each; a file's name begins with what its documents are of. Some files have none."""
    lines = {
        "code/a.jsonl": "aaa",
        "code/b.jsonl": "",
        "books/c.jsonl": "c",
        "books/d.jsonl": "d-dd",
        "x.jsonl": "xx",
    }
    for n, (name, documents) in enumerate(lines.items()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lengths = [7 * n + 5 * k + 1 for k in range(len(documents))]
        # "-": empty
        text = [
            letter.strip("-") * length for letter, length in zip(documents, lengths, strict=True)
        ]
        write_texts(tmp_path / name, text)
    return tmp_path


@pytest.fixture
def streams(texts):
    corpus = open_corpus(
        Texts("jsonl", str(texts), ByteTokenizer()), cache_dir=texts / "cache", with_paths=True
    )
    return packed(corpus, seq_len=32, seed=3)


GROUPS = {"code": "code/*, x.jsonl", "books": "**/*s/*.jsonl"}
OF_LETTER = {"a": 0, "x": 0, "c": 1, "d": 1}


def check(groups, i, tokens, of_letter):
    """By the letters; an end token is its document's, which began before it unless it begins the stream."""
    found, before = groups.of_stream(i).tolist(), None
    for token, group in zip(tokens, found, strict=True):
        before = of_letter[chr(token)] if token < 256 else before
        assert before is None or group == before


def test_tokens_belong_to_the_group_of_their_file(streams):
    groups = FileGroups(streams, GROUPS, "other")
    for i in (0, 1, 2, 3, 50, 51):
        check(groups, i, streams[i].tokens.tolist(), OF_LETTER)
    assert groups.summary == "loss by source: code 86 tokens, books 110 tokens, other 0 tokens"
    whole = WholeStreams(streams.line.side, seq_len=48, seed=3, targets=Targets(group=1))
    for i in range(4):
        # padding
        check(
            FileGroups(whole, GROUPS, "other"), i, whole[i].tokens.tolist(), OF_LETTER | {"\0": 2}
        )
    # of two that fit, the first
    first = FileGroups(streams, {"all": "d.jsonl", "c": "c.jsonl"}, "rest")
    check(first, 2, streams[2].tokens.tolist(), {"d": 0, "c": 1, "a": 2, "x": 2})


def test_sources_of_a_mixture(streams, make_corpus):
    """One of them knows no files."""
    tokens = make_corpus(random_documents([30, 40, 50]))
    other = packed(tokens, seq_len=32, seed=3)
    mixed = MixedStreams({"t": other, "j": streams}, [Phase(0, {"t": 1.0, "j": 1.0})], seed=0)
    groups, seen = FileGroups(mixed, GROUPS, "other"), set()
    for i in range(8):
        seen.add(mixed.source(i)[0])
        if mixed.source(i)[0] == "t":
            assert groups.of_stream(i).tolist() == [2] * 32
        else:
            check(groups, i, mixed[i].tokens.tolist(), OF_LETTER)
    assert seen == {"t", "j"} and groups.summary.endswith("other 120 tokens")


@pytest.mark.parametrize(
    "patterns, message",
    [
        (
            {"code": "*.py"},
            r"metrics.loss_by_source, group 'code': files = '\*.py' fits none of 5 files .*; correct it",
        ),
        ({"code": "code/*, cod/*"}, r"files = 'cod/\*' fits none"),
        ({"code": ","}, r"files = '' fits none"),
        (
            {"all": "**", "code": "code/*"},
            r"group 'code': files = 'code/\*' fits only files of groups before it; put",
        ),
    ],
)
def test_patterns_that_are_refused(streams, patterns, message):
    with refused(message):
        FileGroups(streams, patterns, "other")


def test_a_corpus_that_knows_no_files(make_corpus):
    corpus = make_corpus(random_documents([30]))
    streams = packed(corpus, seq_len=8, seed=0)
    with refused(r"metrics.loss_by_source: .* does not know from .*titan-linear corpus"):
        FileGroups(streams, {"all": "**"}, "other")
