"""Runs on prefix trees beside the same documents packed apart, in float64; trees that are cut; what is refused."""

import json
import math
import random
import re
from collections import Counter
from itertools import pairwise, product
from types import MappingProxyType

import numpy as np
import pytest
import torch

from tests.keys import argv_of
from tests.losses.cases import CASES, KEYS, PAIRS, logprobs, taught
from tests.refusals import refused
from tests.training import EXPERT_SPLITS, OWN_FLAVORS, SPLITS, check_equal, train_on_rank
from titan_linear.commands.batch import documents
from titan_linear.config import load_config
from titan_linear.data import (
    IGNORE,
    ByteTokenizer,
    Targets,
    Texts,
    TreeStreams,
    build_tokenizer,
    load_corpus,
    open_corpus,
    split_corpus,
    write_corpus,
)
from titan_linear.data.corpus import writing
from titan_linear.data.corpus.columns import DocumentTokens
from titan_linear.data.corpus.tree_records import BACK
from titan_linear.data.streams.loader import micro_batch
from titan_linear.models.presets import OWN
from titan_linear.ops import build_cp_context
from titan_linear.ops.layout import fragments, prefix_trees
from titan_linear.ops.layout.prefix_trees import PrefixTrees
from titan_linear.proof import data, ops
from titan_linear.proof.subject import subject_of
from titan_linear.run.preflight import preflight
from titan_linear.step.branches import branches_of
from titan_linear.step.feed import _counts

NAMES = (
    "dp 2",
    "cp 2",
    "cp 4",
    "cp 2 zig-zag",
    "HSDP x cp",
    "tp 2 x cp 2 zig-zag",
    "accumulation",
    "cp 2 allgather contiguous",
    "cp 2 allgather zigzag",
    "cp 2 all heads",
)
BALANCE = "training.expert_balance_coefficient", "training.expert_bias_update_rate"
FAMILIES = {"rwkv7": "rwkv7-0.1B", "lfm2": "lfm2-350M", "falcon-h1": "falcon-0.5B"}


def node(rng, n, *children):
    weights = rng.choice([0, 0.5, 1, [rng.choice([0, 1e-3, 1, 2]) for _ in range(n)]])
    return {
        "tokens": rng.choices(range(256), k=n),
        "weights": weights,
        "children": [*children],
        **numbers(n, rng),
    }


def numbers(n, rng):
    """What losses read beside tokens."""
    columns = {name: logprobs(n, rng) for name in ("behaviour", "reference")}
    taught_to = {name: column for name, column in taught(n, rng).items() if name != "tokens"}
    return {"advantages": rng.gauss(0, 1), **columns, **taught_to}


def paths(tree, above=MappingProxyType({})):
    """The documents of a tree, as trees of one node."""
    n = len(tree["tokens"])
    of_tokens = {
        key: x if isinstance(x, list) else [x] * n for key, x in tree.items() if key != "children"
    }
    own = {key: above.get(key, []) + x for key, x in of_tokens.items()}
    below = [path for child in tree["children"] for path in paths(child, own)]
    return below or [own | {"children": []}]


def a_few(rng):
    """Trees of 33 to 64 tokens, whose documents have 33 to 64 too: one to a stream of 64, whether together or apart."""
    return [
        node(
            rng,
            33,
            node(rng, 1, node(rng, 1), node(rng, 5), node(rng, 2)),
            node(rng, 9),
            node(rng, 13),
        ),
        node(
            rng,
            34,
            node(
                rng,
                3,
                node(rng, 4, node(rng, 7, node(rng, 1), node(rng, 3)), node(rng, 1)),
                node(rng, 11),
            ),
        ),
        node(rng, 64),
        node(rng, 40, *(node(rng, 1 + n % 2) for n in range(16))),
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Trees, and their documents as trees without branches; and how many these are."""
    OWN["hybrid"] |= OWN_FLAVORS
    return written(tmp_path_factory.mktemp("trees"), a_few(random.Random(0)))


def written(folder, trees):
    apart = [path for tree in trees for path in paths(tree)]
    for name, records in (("together", trees), ("apart", apart)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder, len(apart)


def arguments(files, name, *overrides):
    folder, documents = files
    keys = KEYS | {
        "training.dataset_format": "tree",
        "training.dataset_path": folder / f"{name}.jsonl",
    }
    keys |= {"job.dump_folder": folder / "run"}
    if name == "apart":
        keys |= {"training.global_batch_size": documents, "training.local_batch_size": documents}
    for more in overrides:
        keys |= more
    return argv_of(keys)


@pytest.fixture(scope="module")
def apart(files, worlds):
    done = {}

    def get(keys):
        if str(keys) not in done:
            argv = arguments(files, "apart", keys)
            preflight(load_config(argv), world_size=1)
            done[str(keys)] = worlds(1).run(train_on_rank, argv)[0]
        return done[str(keys)]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_trees_equal_documents_apart(name, files, apart, worlds):
    processes, keys = SPLITS[name]
    for rank in worlds(processes).run(train_on_rank, arguments(files, "together", keys)):
        check_equal(rank, apart({}))


@pytest.mark.parametrize("name", ["dp 2", "cp 2 allgather contiguous"])
def test_a_compiled_run(name, files, apart, worlds):
    """A rank may have a part of one node alone."""
    own = {"model.name": "hybrid", "model.flavor": FAMILIES["lfm2"], "model.mtp_layers": 1}
    processes, keys = SPLITS[name]
    compiled = {
        "compile.enable": "true",
        "compile.backend": "aot_eager",
        "training.local_batch_size": 1,
    }
    for rank in worlds(processes).run(
        train_on_rank, arguments(files, "together", own, keys, compiled)
    ):
        check_equal(rank, apart(own))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_trees_equal_documents_apart(family, files, apart, worlds):
    own = {"model.name": "hybrid", "model.flavor": FAMILIES[family], "loss.normalise": "document"}
    processes, keys = SPLITS["cp 2 allgather zigzag"]
    for rank in worlds(processes).run(train_on_rank, arguments(files, "together", own, keys)):
        check_equal(rank, apart(own))


@pytest.fixture(scope="module")
def further(tmp_path_factory, worlds):
    """Arguments of a run on trees whose documents have 64 tokens, and what one on these as streams of their own gives.
    Some branch before the first token from which three further ones are predicted."""
    OWN["hybrid"] |= OWN_FLAVORS
    rng = random.Random(0)
    trees = [
        node(rng, 1, node(rng, 1, node(rng, 62), node(rng, 62))),
        node(rng, 40, node(rng, 24), node(rng, 4, node(rng, 20), node(rng, 20))),
        node(rng, 63, *(node(rng, 1) for _ in range(16))),
        node(rng, 2, node(rng, 61, node(rng, 1), node(rng, 1)), node(rng, 62)),
    ]
    files = written(tmp_path_factory.mktemp("further"), trees)
    own = {"model.mtp_layers": 3, "loss.mtp_weight": 0.5, "metrics.telemetry_freq": 1}
    packed = {"training.dataset_format": "tokens", "training.dataset_columns": '["weights"]'}
    (one,) = worlds(1).run(train_on_rank, arguments(files, "apart", own, packed))
    return arguments(files, "together", own, {"training.seq_len": 128}), one


@pytest.mark.parametrize("name", ["dp 2", "cp 4", "tp 2 x cp 2 zig-zag", "cp 2 all heads"])
def test_further_tokens_on_trees_equal_documents_apart(name, further, worlds):
    processes, keys = SPLITS[name]
    argv, one = further
    for rank in worlds(processes).run(train_on_rank, [*argv, *argv_of(keys)]):
        check_equal(rank, one)


@pytest.mark.parametrize("case", ["GRPO", "GRPO, the base as reference", "GSPO", "distillation"])
@pytest.mark.parametrize("name", ["dp 2", "cp 2 allgather zigzag"])
def test_losses_on_trees_equal_documents_apart(case, name, files, apart, worlds):
    processes, keys = SPLITS[name]
    own = CASES[case] | {"training.dataset_format": "tree", "metrics.telemetry_freq": 1}
    own |= {"metrics.loss_by_source": '[{name = "all", files = "*"}]'}
    for rank in worlds(processes).run(train_on_rank, arguments(files, "together", keys, own)):
        check_equal(rank, apart(own))


@pytest.mark.parametrize("name", ["ep 2, dp 2", "ep 2, dp 2 x cp 2"])
def test_experts_on_trees_equal_documents_apart(name, files, apart, worlds):
    """Beside latent attention. Balance is of the tokens computed, so it is left out."""
    processes, keys = EXPERT_SPLITS[name]
    own = {"model.flavor": "experts", **dict.fromkeys(BALANCE, 0)}
    for rank in worlds(processes).run(train_on_rank, arguments(files, "together", keys, own)):
        check_equal(rank, apart(own))


def groups(rng):
    """Four groups of three answers; each shares two chunks and part of a third with the others of its group."""
    for n in range(4):
        prompt = rng.choices(range(256), k=130 + n)
        for size in (33, 40, 45):
            tokens = prompt + rng.choices(range(256), k=size)
            of_prompt = {
                name: column[: len(prompt)]
                for name, column in numbers(len(prompt), rng).items()
                if name != "advantages"
            }
            own = numbers(size, rng)
            columns = {name: column + own[name] for name, column in of_prompt.items()}
            weights = [0] * len(prompt) + [rng.choice([0, 0.5, 1]) for _ in range(size - 1)] + [1]
            yield {
                "tokens": tokens,
                "weights": weights,
                "advantages": own["advantages"],
                "group": n,
                **columns,
            }


def preferences(rng):
    for _ in range(6):
        prompt, chosen, rejected = ("".join(rng.choices("abcdef", k=k)) for k in (130, 40, 35))
        reference = [logprobs(130 + k + 1, rng) for k in (40, 35)]
        yield {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "reference": reference,
            "weights": [1, 0.5],
        }


@pytest.mark.parametrize("case", ["GRPO", "GSPO", "DPO", "SimPO"])
def test_shared_prefixes_equal_documents_apart(case, tmp_path, worlds):
    """Each stream has a tree, or two documents."""
    OWN["hybrid"] |= OWN_FLAVORS
    pairs, records = case in ("DPO", "SimPO"), tmp_path / "records.jsonl"
    records.write_text(
        "\n".join(map(json.dumps, (preferences if pairs else groups)(random.Random(0))))
    )
    keys = (
        KEYS
        | CASES[case]
        | {"training.dataset_path": records, "training.seq_len": 400, "training.steps": 1}
    )
    keys["job.dump_folder"] = tmp_path / "run"
    runs = []
    for shared in (False, True):
        split = SPLITS["cp 2 allgather zigzag"] if shared else (1, {})
        batch = 4 if shared and not pairs else 6
        own = dict.fromkeys(("training.global_batch_size", "training.local_batch_size"), batch)
        sharing = {"training.share_prefixes": "true"} | (
            {} if pairs else {"training.group_field": "group"}
        )
        argv = argv_of(keys | split[1] | own | (sharing if shared else {}))
        runs.append(worlds(split[0]).run(train_on_rank, argv))
    for rank in runs[1]:
        check_equal(rank, runs[0][0])


def test_neighbours_share_whole_chunks(tmp_path):
    """Documents that are others' beginnings, and equal ones, keep a token of their own."""
    a, b = [1] * 200, [2] * 100
    records = [a, a, a[:64], a[:65], a[:150] + b, b, b[:50], a + b]
    path = tmp_path / "records.jsonl"
    corpus = corpus_of(
        path, [{"tokens": r} for r in records], dataset_format="tokens", share_prefixes=True
    )
    found = []
    for begin, end in pairwise(corpus.offsets.tolist()):
        of = PrefixTrees.behind(corpus.columns["back"][begin:end])
        for leaf in of.leaves:
            of_path = [range(*of.edges[n : n + 2]) for n in of.on_paths(leaf[None])[1]]
            found.append(corpus.tokens[begin:end][np.concatenate(of_path)].tolist())
    assert sorted(found) == sorted(records)
    # the first two share three chunks, and the fourth and fifth one
    assert corpus.num_documents == 6
    assert corpus.num_tokens == sum(map(len, records)) - 3 * 64 - 64


@pytest.mark.parametrize("kind", ["pairs", "pairs that share", "groups"])
def test_tokenising_is_stopped_anywhere(kind, tmp_path, monkeypatch):
    """Also between the documents of a record, or of a group."""
    monkeypatch.setattr(writing, "JOURNAL_SECONDS", 0)
    options = {"dataset_format": "tokens", "share_prefixes": True, "group_field": "group"}
    records = [{"tokens": [n % 5] * 70 + [n], "group": n // 10} for n in range(30)]
    if kind != "groups":
        options = {"dataset_format": "preference", "share_prefixes": kind == "pairs that share"}
        records = [{"prompt": "a" * 70, "chosen": f"{n}", "rejected": f"no {n}"} for n in range(10)]
    write, whole = writing._write_document, corpus_of(tmp_path / "whole.jsonl", records, **options)
    assert whole.num_documents == {"pairs": 20, "pairs that share": 10, "groups": 15}[kind]
    assert kind == "pairs" or whole.num_tokens < 0.75 * (30 * 71 if kind == "groups" else 10 * 145)
    for stop in (1, 2, 5):
        left = iter(range(stop))

        def stopped(*arguments, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return write(*arguments)

        path = tmp_path / f"{stop}.jsonl"
        monkeypatch.setattr(writing, "_write_document", stopped)
        with pytest.raises(KeyboardInterrupt):
            corpus_of(path, records, cache=tmp_path / f"{stop}", **options)
        monkeypatch.setattr(writing, "_write_document", write)
        assert (
            corpus_of(path, None, cache=tmp_path / f"{stop}", **options).fingerprint
            == whole.fingerprint
        )


@pytest.mark.parametrize(
    "column, values",
    [("advantages", [0.5, 0.25]), ("weights", [[1] * 80, [1] * 5 + [0.5] + [1] * 74])],
)
def test_what_shared_tokens_count_differently(column, values, tmp_path):
    records = [{"tokens": [1] * 79 + [n], column: value} for n, value in enumerate(values)]
    options = {"dataset_format": "tokens", "share_prefixes": True, "columns": {column: "<f4"}}
    at = 1 if column == "advantages" else 5
    with refused(
        rf"line 2 shares its first 64 tokens with .*line 1, and '{column}' of token {at} is 0\.\d+ here"
    ):
        corpus_of(tmp_path / "bad.jsonl", records, **options)
    assert (
        corpus_of(
            tmp_path / "bad.jsonl",
            [*records, {"tokens": [2], column: 1.0}],
            on_bad_document="skip",
            **options,
        ).num_documents
        == 2
    )


@pytest.mark.parametrize("counted", [(0, 1), (1, 0)])
def test_a_token_that_counts_in_one_document_alone(counted, tmp_path):
    records = [{"tokens": [1] * 79 + [n], "weights": [c] * 79 + [1]} for n, c in enumerate(counted)]
    options = {"dataset_format": "tokens", "share_prefixes": True, "columns": {"weights": "<f4"}}
    with refused(r"'weights' of token 1 is"):
        corpus_of(tmp_path / "bad.jsonl", records, **options)


@pytest.mark.parametrize("wrong", [[0], [50], [99], [0, 1, 70]])
@pytest.mark.parametrize("group_field", ["", "group"])
def test_records_that_disagree_with_most_are_skipped(wrong, group_field, tmp_path):
    """And counted, each by itself."""
    value = lambda n: 0.5 if n in wrong else 1.0  # noqa: E731
    records = [
        {"tokens": [1] * 79 + [n], "advantages": [value(n)] * 80, "group": 0} for n in range(100)
    ]
    options = {"dataset_format": "tokens", "share_prefixes": True, "group_field": group_field}
    options |= {"columns": {"advantages": "<f4"}, "on_bad_document": "skip"}
    corpus = corpus_of(tmp_path / "some.jsonl", records, **options)
    leaves = [n for n in range(100) if n not in wrong]
    assert sorted(corpus.tokens[corpus.tokens != 1]) == [n for n in leaves if n != 1]
    assert (corpus.columns["advantages"] == 1).all()
    source = corpus.info["source"]
    assert source["skipped_bad"] == sum(source["reasons"].values()) == len(wrong)
    lines = {f"line {n + 1}" for n in wrong}
    assert all(lines & set(re.findall(r"line \d+", bad)) for bad in source["bad"])


def test_a_pair_that_disagrees_is_skipped_whole(tmp_path):
    pair = {"chosen": "a" * 80 + "b", "rejected": "a" * 80 + "c", "prompt": ""}
    records = [pair | {"reference": [[-x] * 82, [-1] * 82]} for x in (1, 2, 1)]
    options = {"dataset_format": "preference", "share_prefixes": True, "on_bad_document": "skip"}
    columns = {"columns": {"reference": "<f4"}}
    corpus = corpus_of(tmp_path / "pairs.jsonl", records, **options, **columns)
    assert corpus.num_documents == 2 and corpus.info["source"]["skipped_bad"] == 1
    assert (corpus.columns["reference"] == -1).all()


def corpus_of(path, records, cache=None, **options):
    if records is not None:
        path.write_text("\n".join(map(json.dumps, records)))
    texts = Texts(
        "jsonl", str(path), build_tokenizer(None), **{"dataset_format": "tree", **options}
    )
    return open_corpus(texts, cache_dir=cache)


def targets_of(streams):
    """(the tokens before, the target) → the sum of its weights; the number of targets, and of tokens packed apart."""
    sums, computed, apart, before = Counter(), 0, 0, 0
    for i in range(len(streams)):
        stream, lengths = streams[i], streams.runs(i).lengths
        edges, past, above = stream.cu_seqlens.tolist(), {}, []
        for n, (start, end) in enumerate(pairwise(edges)):
            back = int(stream.columns["back"][start]) if start < lengths.sum() else 0
            above.append([*(past[start - back] if back else ())])
            for t in range(start, end):
                above[n].append(int(stream.tokens[t]))
                past[t] = tuple(above[n])
                assert stream.position_ids[t] == len(above[n]) - 1
        pairs = zip(range(len(stream.tokens)), stream.labels, stream.columns["weights"])
        batch = micro_batch(streams, i, 1, 0, 1)
        rows, further = (
            x.tolist()
            for x in branches_of(batch, build_cp_context(batch.cu_seqlens, rank=0, world_size=1))
        )
        branches = zip(
            rows,
            stream.tokens[further],
            stream.columns["weights"][np.array(further, dtype=int) - 1],
        )
        pairs = ((row, label, weight) for row, label, weight in pairs if label != IGNORE)
        for row, label, weight in (*pairs, *branches):
            if weight:
                sums[past[row], int(label)] += float(weight)
        weight, labels, tokens, _, pairs, _ = _counts(batch)
        assert pairs == (stream.position_ids + 1).sum()  # a token sees its path
        assert weight == pytest.approx(sum(sums.values()) - before)
        before, computed = before + weight, computed + labels
        apart += tokens - (len(stream.tokens) - lengths.sum())
    return sums, computed, apart


@pytest.mark.parametrize("normalise", ["token", "document"])
@pytest.mark.parametrize("seq_len", [256, 80])
def test_targets_are_those_of_the_documents(normalise, seq_len, tmp_path):
    """Of whole trees, and of those that are cut."""
    rng = random.Random(1)

    def grown(depth):
        return node(
            rng, rng.randint(1, 9), *(grown(depth - 1) for _ in range(rng.randint(0, depth)))
        )

    trees = [grown(4) for _ in range(9)]
    alone = [path for tree in trees for path in paths(tree)]
    found = []
    for name, records in (("together", trees), ("apart", alone)):
        side = split_corpus(corpus_of(tmp_path / f"{name}.jsonl", records), 0.0, "train")
        streams = TreeStreams(
            side, seq_len=seq_len, seed=0, repeat=False, targets=Targets(normalise)
        )
        found.append(targets_of(streams))
    (sums, computed, apart), (want, of_each, tokens) = found
    assert computed < of_each and apart == tokens == sum(len(record["tokens"]) for record in alone)
    assert sums.keys() == want.keys() and all(sums[key] == pytest.approx(want[key]) for key in want)


def test_a_cut_repeats_the_fewest_tokens(tmp_path):
    rng = random.Random(2)

    def grown(depth):
        return node(
            rng,
            rng.randint(1, 6),
            *(grown(depth - 1) for _ in range(rng.randint(0, 3) if depth else 0)),
        )

    trees = [grown(3) for _ in range(40)]
    side = split_corpus(corpus_of(tmp_path / "trees.jsonl", trees), 0.0, "train")
    for seq_len in (24, 30):
        units, _ = TreeStreams(side, seq_len=seq_len, seed=0, repeat=False)._laid(0)
        cut = [n for n in range(40) if (units[:, 0] == n).sum() > 1]
        assert len(cut) > 5 and units[:, 3].max() <= seq_len
        for n in cut:
            of_tree = units[units[:, 0] == n]
            assert [0, *of_tree[:, 2]] == [*of_tree[:, 1], len(paths(trees[n]))]
            assert of_tree[:, 3].sum() == fewest(trees[n], seq_len)


def test_a_tree_of_many_leaves_is_cut(tmp_path):
    """What looks at all pairs of leaves would not end in time."""
    root, leaves = 10, 100_000
    back = np.concatenate([[0], np.ones(root - 1), np.arange(1, leaves + 1)]).astype(np.int32)
    tokens = DocumentTokens(np.arange(len(back)) % 256, {BACK: back})
    write_corpus(tmp_path / "corpus", [tokens], ByteTokenizer(), columns={BACK: "<i4"})
    side = split_corpus(load_corpus(tmp_path / "corpus"), 0.0, "train")
    units, _ = TreeStreams(side, seq_len=root + 100, seed=0, repeat=False)._laid(0)
    firsts = np.arange(0, leaves, 100)
    assert units.tolist() == [[0, first, first + 100, root + 100] for first in firsts.tolist()]


@pytest.mark.parametrize("levels", [125, 126, 128, 5000])
def test_a_deep_tree_is_taken_or_refused_by_its_depth(levels, tmp_path):
    """Each level is an object in a list."""
    text = '{"text": "a", "children": [' * (levels - 1) + '{"text": "a", "children": []}'
    file = tmp_path / "deep.jsonl"
    file.write_text(text + "]}" * (levels - 1) + "\n")
    texts = Texts("jsonl", str(file), build_tokenizer(""), dataset_format="tree")
    if levels == 125:
        corpus = open_corpus(texts, cache_dir=tmp_path)
        assert corpus.num_tokens == levels + 1
    else:
        with refused(rf"deep.jsonl, line 1: it is nested {2 * levels:,} deep, and 250 is the most"):
            open_corpus(texts, cache_dir=tmp_path)


def fewest(tree, seq_len):
    """By trying all ways."""
    documents, best = places(tree, [0]), math.inf
    for cuts in product([False, True], repeat=len(documents) - 1):
        edges = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), len(documents)]
        sizes = [len(set().union(*documents[first:last])) for first, last in pairwise(edges)]
        if max(sizes) <= seq_len:
            best = min(best, sum(sizes))
    return best


def places(tree, counter, above=()):
    """The documents of a tree, as places of its tokens."""
    own = (*above, *range(counter[0], counter[0] + len(tree["tokens"])))
    counter[0] += len(tree["tokens"])
    return [path for child in tree["children"] for path in places(child, counter, own)] or [{*own}]


@pytest.mark.parametrize(
    "record, words",
    [
        ({"children": []}, "root: it must have either 'text' or 'tokens'"),
        (
            {"text": "a", "tokens": [1], "children": []},
            "root: it must have either 'text' or 'tokens'",
        ),
        (
            {"text": "a", "children": {"text": "b"}},
            "root is not an object, or its 'children' are not a list",
        ),
        ({"text": "a", "children": ["b"]}, "root.children[0] is not an object"),
        (
            {"text": "a", "children": [{"text": "", "children": [{"text": "b"}]}]},
            "root.children[0]: it is empty",
        ),
        (
            {"text": "a", "children": [{"text": "b"}, {"tokens": [999]}]},
            "root.children[1]: 'tokens' is not a list",
        ),
        ({"text": "ab", "weights": [1], "children": [{"text": "b"}]}, "root: 'weights' has 1 rows"),
        (
            {"text": "a", "children": [{"text": "b", "weights": -1}]},
            "root.children[0]: 'weights' must have finite numbers",
        ),
        ({"text": "a"}, "no field 'children'"),
    ],
)
def test_bad_tree_records_are_refused(record, words, tmp_path):
    with refused(rf"bad.jsonl, line 2: {re.escape(words)}"):
        corpus_of(tmp_path / "bad.jsonl", [{"text": "a", "children": []}, record])


@pytest.mark.parametrize(
    "child, words",
    [
        ({"text": "c"}, "root.children[1]: no 'advantages' for tokens that count"),
        ({"text": "c", "advantages": [1.0, 2.0, 3.0]}, "root.children[1]: 'advantages' has 3 rows"),
    ],
)
def test_columns_of_nodes(child, words, tmp_path):
    """A node whose tokens count nothing needs none; what others lack is named."""
    tree = {"text": "ab", "weights": 0, "children": [{"text": "d", "advantages": 0.5}]}
    corpus = corpus_of(tmp_path / "good.jsonl", [tree], columns={"advantages": "<f4"})
    assert corpus.columns["advantages"].tolist() == [0, 0, 0.5, 0.5]
    tree["children"].append(child)
    with refused(re.escape(words)):
        corpus_of(tmp_path / "bad.jsonl", [tree], columns={"advantages": "<f4"})


def test_trees_that_count_nothing_need_no_columns(tmp_path):
    """Before and behind those that have them; a tree that has other numbers is named."""
    none = {"tokens": [1, 2], "weights": 0, "children": []}
    records = [none, {"tokens": [3], "teacher_ids": [[5, 6]], "children": []}, none]
    columns = {"teacher_ids": "<i4"}
    corpus = corpus_of(tmp_path / "good.jsonl", records, columns=columns)
    assert corpus.columns["teacher_ids"].tolist() == [[0, 0], [0, 0], [5, 6], [0, 0], [0, 0]]
    for numbers, words in (
        ([5], "has 1 numbers for a token, and 2"),
        ([], "must have finite numbers"),
    ):
        bad = {"tokens": [4], "teacher_ids": [numbers], "children": []}
        with refused(rf"line 4: .*'teacher_ids' {words}"):
            corpus_of(tmp_path / "bad.jsonl", [*records, bad], columns=columns)


@pytest.mark.parametrize(
    "keys, words",
    [
        (
            {
                "parallelism.context_parallel_degree": 2,
                "parallelism.context_parallel_method": "ring",
            },
            "method = 'ring'",
        ),
        ({"loss.normalise": "stream"}, "loss.normalise = 'stream'"),
        (
            {"training.seq_len_schedule": "[{until_step = 1, seq_len = 32}]"},
            "training.seq_len_schedule",
        ),
        (
            {"training.share_prefixes": "true"},
            "training.share_prefixes is for records of documents",
        ),
        (
            {"training.group_field": "id"},
            "training.group_field = 'id' needs training.share_prefixes",
        ),
        (
            PAIRS | {"training.share_prefixes": "true", "training.group_field": "id"},
            "training.group_field = 'id': each pair is a tree of its own",
        ),
        (
            {"training.seq_len": 60},
            "together.jsonl, line 3: 64 tokens that must lie in one stream, and training.seq_len = 60",
        ),
    ],
)
def test_what_trees_are_not_for(keys, words, files):
    config = load_config(arguments(files, "together", keys))
    with refused(re.escape(words)):
        preflight(config, world_size=config.parallelism.context_parallel_degree)


def test_the_start_tells_what_travels(tmp_path, capsys):
    """The root goes on from the first rank to the second, where all branch: one fold. A state has K × V
    numbers and an M K × K."""
    OWN["hybrid"] |= OWN_FLAVORS
    files = written(
        tmp_path, [node(random.Random(0), 40, *(node(random.Random(0), 2) for _ in range(12)))]
    )
    split = SPLITS["cp 2"][1] | {"training.global_batch_size": 1, "training.local_batch_size": 1}
    preflight(load_config(arguments(files, "together", split)), world_size=2)
    heads = max(mixer.heads for mixer in OWN_FLAVORS["small"].pattern if mixer.linear)
    size = heads * (16 * 16 + 16 * 16) * 4 / 2**20
    said = f"prefix trees of stream 0: in a linear layer a rank sends 1 states ({size:.2g} MiB), folds: 1\n"
    assert said in capsys.readouterr().out


def test_batch_shows_nodes(tmp_path):
    tree = {
        "text": "ab",
        "children": [{"text": "c", "weights": 0}, {"text": "d"}, {"text": "e", "weights": [0, 1]}],
    }
    side = split_corpus(corpus_of(tmp_path / "one.jsonl", [tree]), 0.0, "train")
    (stream,) = streams = TreeStreams(side, seq_len=8, seed=0, repeat=False)
    assert not any(
        (streams.padding().labels != IGNORE) | (streams.padding().columns["weights"] != 0)
    )
    lines = [line.strip() for line in documents(stream, build_tokenizer(None), 0)]
    assert [line for line in lines if line.startswith("document")] == [
        "document 0: [0, 2), 2 tokens, 1 learnt",
        "document 1: [2, 4), 2 tokens, 0 learnt, continues token 1",
        "document 2: [4, 6), 2 tokens, 2 learnt, continues token 1",
        "document 3: [6, 8), 2 tokens, 1 learnt, continues token 1",
    ]


@pytest.mark.parametrize("split", [{}, SPLITS["cp 2 allgather zigzag"][1]])
def test_the_doctor_finds_leaves_that_continue_each_other(split, files, monkeypatch):
    """It finds that a leaf continues the one before it."""
    subject = subject_of(
        load_config(arguments(files, "together", split, {"training.dtype": "float32"}))
    )
    cases = [
        case for case in ops.cases(subject) if case.name in ("chunk_kda", "attention", "mixer gdn")
    ]
    assert len(cases) == 3 and all(f.holds for case in cases for f in ops.trees(subject, case))
    assert all(f.holds for check in (data.labels, data.targets, data.cut) for f in check(subject))

    def checked_nodes(edges, parents, num_streams):
        chained = torch.where(parents >= 0, torch.arange(len(parents)) - 1, -1)
        return prefix_trees.checked_nodes(edges, chained, num_streams)

    monkeypatch.setattr(fragments, "checked_nodes", checked_nodes)
    for case in cases:
        apart, leaves = ops.trees(subject, case)
        assert not apart.holds and leaves.figure > 1e-3
