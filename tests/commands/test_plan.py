"""The planner as a command, and what it plans beside what was measured."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.records import write_json
from tests.refusals import is_refused, refused
from titan_linear.commands import plan
from titan_linear.config import load_config
from titan_linear.data import build_tokenizer
from titan_linear.models.config import ModelConfig
from titan_linear.models.mixers import Mamba2
from titan_linear.models.presets import preset
from titan_linear.ops import build_cp_context
from titan_linear.ops.layout.levels import H200
from titan_linear.ops.runtime.options import boundaries_of
from titan_linear.planner import splits
from titan_linear.planner.machine import Machine, read_rates, shipped
from titan_linear.planner.memory import (
    MicroBatchShape,
    PlannedRank,
    checkpointings,
    context,
    documents_of,
    layers,
    parameters,
)
from titan_linear.planner.timing import Clock, share_of, step
from titan_linear.run.data import RunData
from titan_linear.run.origin import Origin
from tools import bench_rates, check_plan

ROOT = Path(__file__).parents[2]
RUN = ["--training.seq_len", "4096", "--compile.enable", "true"]


def machine(network=50e9, node_size=8, **rates):
    return Machine(replace(read_rates(shipped()["H200"]), **rates), node_size, network, "cudnn")


def test_the_command_prints_memory_time_and_splits(capsys, tmp_path):
    folder = tmp_path / "run"
    argv = [
        "--gpus",
        "2",
        "--tokens",
        "1B",
        *RUN,
        "--job.dump_folder",
        str(folder),
        "--model.name",
        "kda",
    ]
    argv += ["--model.flavor", "340M", "--training.global_batch_size", "2"]
    assert plan.main(argv) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("kda/340M: 354,")
        and " parameters (354M), " in out.partition("\n")[0]
        and "\n1 x 4,096 tokens in a micro-step" in out
        and "| parameters |" in out
        and "days for 1B tokens" in out
    )
    assert (
        "| dp_shard 2 | none |" in out
        and ", checkpointing full\n" in out.partition("longest stream that fits: ")[2]
    )
    assert "attention by" not in out  # there is no softmax layer
    assert not folder.exists()


def test_sizes_are_written_as_people_do():
    sizes = {1: "1", 999: "999", 1536: "1.54K", 578_316: "578K", 999_960_000: "1B", 2.5e12: "2.5T"}
    assert {number: plan.readable(number) for number in sizes} == sizes


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--gpus", "3", "--parallelism.context_parallel_degree", "2"],
            "processes (NGPU; titan-linear plan: --gpus)",
        ),
        (["--gpus", "0"], "--gpus 0 must be 1 or more"),
        (["--node", "0"], "--node 0 must be 1 or more"),
        (["--gpus", "3"], "training.global_batch_size = 8 is not a multiple of"),
        (["--gpu", "abacus"], "--gpu 'abacus' is unknown; use one of H100, H200, or"),
        (
            ["--rates", "none.json"],
            "'none.json' cannot be read (No such file or directory); python -m",
        ),
        (["--tokens", "many"], "--tokens 'many' must be a number of tokens"),
        (["--tokens", "0"], "--tokens '0' must be a number of tokens"),
        (["--documents", "few"], "--documents 'few' must be 'one', or"),
        (["--attention", "abacus"], "--attention 'abacus' is not in the rates; use one of"),
        (["--network", "0"], "--network 0 must be above 0"),
        (["--network", "nan"], "--network nan must be above 0"),
        (["--documents", "9+2"], "--documents '9+2' must be 'one', or"),
        (["--documents", "²"], "--documents '²' must be 'one', or"),
        (["--model.flavor", "7T"], "model.flavor = '7T' is unknown"),
        (["--training.seq_ln", "7"], "command line: --training.seq_ln is not a key"),
    ],
)
def test_what_is_refused(argv, message, capsys):
    assert message in is_refused(plan.main, argv, capsys)


def test_a_corpus_of_less_than_a_step_is_refused(tmp_path, capsys):
    """Where its tokens are at hand; and lengths that change are said."""
    texts = tmp_path / "corpus.jsonl"
    texts.write_text(json.dumps({"text": "few"}) + "\n", encoding="utf-8")
    argv = [
        "--gpus",
        "1",
        *RUN,
        "--training.dataset",
        "jsonl",
        "--training.dataset_path",
        str(texts),
    ]
    config = load_config(
        [*argv[2:], "--training.seq_len_schedule", "[{until_step = 10, seq_len = 1024}]"], cuda=True
    )
    plan.check_corpus(Origin.of(config))  # not tokenised
    RunData(config, build_tokenizer(None)).corpora()
    assert is_refused(plan.main, argv, capsys).startswith(
        "training.dataset_path: the corpus has 4 tokens, and a step"
    )
    assert (
        "planned at training.seq_len = 4096; the first 10 of 1,000 are shorter"
        in plan.of_whole_length(config.training)
    )


@pytest.mark.parametrize("beyond", [True, False])
def test_the_longest_stream_is_at_least_the_run_s(beyond, monkeypatch):
    """Where nobody looks further, and where a split fits as it is and not as longer ones are tried."""
    config, model = (
        load_config([*RUN, "--training.global_batch_size=1"], cuda=True),
        preset("kda", "debug"),
    )
    monkeypatch.setattr(splits, "LONGEST", 2048 if beyond else 8192)
    rank = PlannedRank(config, model, 1)
    split = splits.PlannedSplit(rank, step(rank, machine()))
    monkeypatch.setattr(PlannedRank, "memory", lambda _: {"activations": 2.0})
    said = splits.longest([split], room=1.0)
    assert said == "longest stream that fits: 4,096 tokens, with one GPU, checkpointing none"


def test_splits_of_three_gpus(capsys):
    """Degrees are divisors of their number, not powers of two alone."""
    argv = [
        "--gpus",
        "3",
        *RUN,
        "--parallelism.context_parallel_degree",
        "3",
        "--training.seq_len",
        "3072",
    ]
    assert plan.main(argv) == 0
    out = capsys.readouterr().out
    assert "| cp 3 (contiguous) |" in out and "longest stream that fits" in out


def test_what_does_not_fit(capsys, tmp_path):
    """A GPU too small for one layer; one on which other settings fit."""
    rates = json.loads(shipped()["H200"].read_text(encoding="utf-8"))
    file, one = (
        tmp_path / "rates.json",
        [*RUN, "--training.seq_len", "65536", "--training.global_batch_size", "1"],
    )
    for size, message in (
        (0.01, "nothing fits: 3 layers on 1 GPUs, each with 0.0 GiB"),
        (0.9, "this configuration takes"),
    ):
        file.write_text(json.dumps(rates | {"memory_gib": size}), encoding="utf-8")
        assert plan.main(["--gpus", "1", "--rates", str(file), *one]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"error: {message}") and said.err.count("\n") == 1
        assert "tokens/s, " not in said.out  # no speed of what does not fit


@pytest.mark.parametrize("gpu", shipped())
def test_each_gpu_that_comes_with_the_package(gpu, capsys):
    assert plan.main(["--gpus", "8", "--gpu", gpu, *RUN, "--tokens", "1,000.5", "B", "tokens"]) == 0
    out = capsys.readouterr().out
    assert f"NVIDIA {gpu}" in out and "days for 1T tokens" in out


# that a shipped configuration is for, if not eight
GPUS = {"debug": 2, "reference_340m": 1, "recall_4m": 1, "dpo": 4}


SIZED = [
    path
    for path in sorted(ROOT.glob("train_configs/*.toml"))
    if '"hf"' not in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("config", SIZED, ids=lambda path: path.stem)
def test_the_shipped_configurations_as_they_are(config, capsys):
    """No GPU, no corpus and no tokenizer is here, and the types are those of GPUs."""
    absent = ["--model.tokenizer_path", "none/tokenizer.json", "--training.dataset", "jsonl"]
    absent += ["--training.dataset_path", "none.jsonl", "--training.mixture", "[]"]
    run, gpus = (
        load_config(["--job.config_file", str(config), *absent], cuda=True),
        GPUS.get(config.stem, 8),
    )
    rank = PlannedRank(run, plan.planned_model(Origin.of(run)), gpus)
    splits.check(rank)
    assert "compute bfloat16" in plan.describe(rank)
    assert "\nfits in NVIDIA H200" in plan.memory_table(rank, machine())
    assert "'none/tokenizer.json' is not here: a vocabulary of" in capsys.readouterr().out


def test_predictions_beside_what_was_measured():
    """Memory within 8%, time within 15%; docs/planning.md says how far."""
    compared = check_plan.predictions()
    for row, speed, needed in compared:
        if row.memory_gib is not None:
            assert needed == pytest.approx(row.memory_gib, rel=0.08), row.setting
        if row.tokens_per_second is not None:
            assert 1 / speed == pytest.approx(1 / row.tokens_per_second, rel=0.15), row.setting
    assert len(compared) >= 8
    assert check_plan.checked().count("\n") == len(compared) + 1
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = [f" {speed:,.0f} tokens/s" in readme for _, speed, _ in compared]
    assert sum(quoted) == 3, "what a run costs: print it again"
    time = max(
        abs(row.tokens_per_second / speed - 1)
        for row, speed, _ in compared
        if row.tokens_per_second
    )
    memory = max(abs(needed / row.memory_gib - 1) for row, _, needed in compared if row.memory_gib)
    assert f"Memory is within {memory:.0%}, time within {time:.0%}. " in page


@pytest.mark.parametrize("mean", [None, 100, ((1, 100), (2, 50), (3, 20))])
def test_pairs_that_a_rank_attends(layout, mean):
    """Each token sees those of its document up to itself; the last rank has most. Of a tree, that is its path."""
    batch = MicroBatchShape.of(
        load_config(["--training.seq_len", "2048"], cuda=True), mean
    )._replace(cp=4, layout=layout)
    trees = documents_of(2048, 1, mean)
    where = {"parents": torch.from_numpy(trees.parents), "world_size": 4, "layout": layout}
    ranks = [
        build_cp_context(torch.from_numpy(trees.edges), rank=rank, **where) for rank in range(4)
    ]
    pairs = [int((context.position_ids + 1).sum()) for context in ranks]
    assert context(batch).gathered.pairs.tolist() == pairs
    assert Clock(machine(), batch, compiled=True).longest == int(ranks[-1].cu_seqlens.diff().max())
    assert mean is not None or pairs[-1] == max(pairs)
    assert not isinstance(mean, tuple) or trees.edges.tolist()[:8] == [
        0,
        100,
        150,
        170,
        190,
        210,
        260,
        280,
    ]
    with refused("its tree has 320 tokens, and training.seq_len = 256"):
        documents_of(256, 1, ((1, 100), (2, 50), (3, 20)))


def test_both_layouts_are_tried_where_there_is_softmax_attention():
    """Which is faster is for the plan to say."""

    def layouts(name):
        keys = [*RUN, "--model.name", name, "--training.global_batch_size", "2"]
        rank = PlannedRank(load_config(keys, cuda=True), preset(name, "debug"), 2)
        tried = splits.candidates(rank, 8, 1)
        found = [split.parallelism for split in tried]
        return {(p.context_parallel_degree, p.context_parallel_layout) for p in found}

    assert layouts("hybrid") == {(1, "contiguous"), (2, "contiguous"), (2, "zigzag")}
    assert layouts("kda") == {(1, "contiguous"), (2, "contiguous")}


def test_time_of_parts():
    """Recomputation, accumulation, a slow network and the host show where they should."""
    run, model = [*RUN, "--training.global_batch_size", "16"], preset("kda", "340M")

    def parts(*keys, gpus=16, on=None, model=model):
        config = load_config([*run, "--model.name=kda", "--model.flavor=340M", *keys], cuda=True)
        return step(PlannedRank(config, model, gpus), on or machine()).parts

    plain, again = parts(), parts("--activation_checkpoint.mode=full")
    assert (
        again["products"] == pytest.approx(plain["products"] * 4 / 3)
        and again["head"] == plain["head"]
    )
    selective = parts("--activation_checkpoint.mode=selective")
    assert plain["recurrence"] < selective["recurrence"] < again["recurrence"]
    further = parts(model=replace(model, mtp_layers=1))
    # and a layer more, with the product that joins its inputs
    assert further["head"] == 2 * plain["head"]
    assert 1 + 1 / 24 < further["products"] / plain["products"] < 1 + 1.25 / 24
    twice, once = parts("--loss.name=dpo"), parts("--loss.name=policy")  # at its level of tokens
    assert twice["products"] == plain["products"] and once["head"] == plain["head"]
    # one product of three, logits written and read
    assert 1 / 4 < twice["head"] / plain["head"] - 1 < 1 / 3 + 0.15
    fourth = parts(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=4"
    )
    assert fourth["products"] == pytest.approx(plain["products"] * (1 + 1 / 12))  # of 24 layers six
    assert parts(gpus=4)["products"] == pytest.approx(4 * plain["products"])
    one, muon, shared = (
        parts(gpus=1),
        *(parts("--optimizer.name=muon", gpus=gpus) for gpus in (1, 16)),
    )
    assert (
        muon["optimizer"] - one["optimizer"] == pytest.approx(0.109, rel=0.01)
        and not muon["communication"]
    )
    assert shared["optimizer"] - plain["optimizer"] == pytest.approx(0.109 / 16, rel=0.01)
    assert plain["communication"] < shared["communication"] < 2 * plain["communication"]
    slow = parts(on=machine(network=1e8))
    assert (
        slow["communication"] > 10 * plain["communication"]
        and slow["products"] == plain["products"]
    )
    host = machine(host=1.0)
    assert parts(on=host)["launches"] > 100 > plain["launches"]


def test_time_of_experts():
    """Of the router's products, and those of 262,144 rows, 8 for each of 32,768 tokens. Among two ranks a token's
    copies are on 2 (1 − 1/2⁸) of them, from which forward and backward copy, send and add up; recomputation copies."""
    keys = [
        *RUN,
        "--model.name=qwen3.5",
        "--model.flavor=35B-A3B",
        "--model.num_layers=1",
        "--training.seq_len=32768",
    ]

    def parts(*more, **rates):
        config = load_config([*keys, *more, "--training.global_batch_size=2"], cuda=True)
        return step(
            PlannedRank(config, plan.planned_model(Origin.of(config)), 2), machine(**rates)
        ).parts

    slow, fast = (
        parts("--activation_checkpoint.mode=none", grouped=[(1, rate)]) for rate in (100, 200)
    )
    flops = 3 * 2 * 2048 * (262144 * 3 * 512 + 32768 * 256)
    assert slow["products"] - fast["products"] == pytest.approx(flops / 200e12, rel=1e-3)
    apart = "--parallelism.expert_parallel_degree=2"
    rows = 32768 * 2 * (1 - 1 / 2**8) * 2048 * 2
    for mode, times in (("none", 4), ("full", 5)):
        mode = f"--activation_checkpoint.mode={mode}"
        slow, fast = (parts(mode, apart, fused=rate)["communication"] for rate in (1e12, 2e12))
        assert slow - fast == pytest.approx(times * 2 * rows / 2e12, rel=1e-3)


def test_memory_of_what_losses_read():
    """Numbers beside 4,096 tokens, 4 bytes each; and those of a layer more."""

    model = preset("kda", "debug")

    def planned(*keys, model=model):
        config = load_config([*RUN, "--training.global_batch_size=1", *keys], cuda=True)
        return PlannedRank(config, model, 1).moments()["head"]

    plain = planned()
    for keys, numbers in (
        (["dpo"], 1),  # reference
        (["policy"], 2),
        (["policy", "--policy.kl=0.1"], 3),
        (["distillation"], 3 * 256),  # ids, as columns and beside labels, and log-probabilities
    ):
        more = planned("--loss.name", *keys)
        assert more["activations"] - plain["activations"] == 4 * 4096 * numbers
    deeper = replace(model, mtp_layers=1)
    further = planned(model=deeper)
    assert further["parameters"] - plain["parameters"] == 4 * (
        parameters(deeper) - parameters(model)
    )
    # its norm's input, output and gradient
    assert further["head"] - plain["head"] == 4096 * model.dim * (4 + 2 * 2)
    assert further["activations"] > plain["activations"] * (1 + 1 / model.num_layers)


def test_recurrences_take_whole_slices_of_columns():
    assert (
        share_of(128, 65) == share_of(128, 80) == share_of(128, 128) == 2 * share_of(128, 64) == 1
    )


@pytest.mark.parametrize(
    "heads, groups, scan, backward", [(128, 1, 0.93, 3.10), (64, 8, 0.57, 2.00)]
)
def test_time_of_mamba2_as_measured(heads, groups, scan, backward):
    """On an H200, 32k tokens of one document, in ms."""
    mixer = Mamba2(heads=heads, head_dim=64, state_dim=128, groups=groups)
    model = ModelConfig(vocab_size=1024, dim=256, pattern=(mixer,), num_layers=1, hidden_dim=256)
    batch = MicroBatchShape.of(load_config(["--training.seq_len=32768"], cuda=True))
    clock = Clock(machine(), batch, True)
    (layer,) = layers(model, batch)
    for work, convolution, ms in (
        (layer.forward, "conv1d", scan),
        (layer.backward, "conv1d_backward", backward),
    ):
        seconds = clock.of(work, work.calls).parts["recurrence"]
        seconds -= clock.rates.operators[convolution][0] * 32768 * sum(mixer.widths) * 1e-9
        assert seconds == pytest.approx(1e-3 * ms, rel=0.01)


def test_the_number_of_layers_recomputed_follows_from_the_room():
    """Where there is room for every fourth layer recomputed, neither all layers are nor every third."""
    model = preset("kda", "340M")
    config = load_config(
        [*RUN, "--training.seq_len=32768", "--model.name=kda", "--model.flavor=340M"], cuda=True
    )

    def chosen(room):
        rank = PlannedRank(config, model, 1)
        split = splits.with_checkpointing(rank, splits.GPUs(machine(), room))
        return split and split.rank.config

    (none, *nth, full), _ = checkpointings(model)
    assert [ac.selective_ac_option for ac in nth] == ["13", "9", "7", "5", "4", "3", "2"]
    fourth = config.model_copy(update={"activation_checkpoint": nth[4]})
    room = PlannedRank(fourth, model, 1).needs
    assert chosen(room) == fourth and chosen(math.inf).activation_checkpoint == none
    least = config.model_copy(update={"activation_checkpoint": full})
    least = PlannedRank(least, model, 1).needs
    assert chosen(least).activation_checkpoint == full and chosen(least - 1) is None


def test_replicas_add_up_once_a_step_where_they_wait():
    """Eight micro-steps or one; in bfloat16, of half the bytes, in each."""
    run = [*RUN, "--model.name=kda", "--model.flavor=340M", "--training.global_batch_size=16"]
    run.append("--parallelism.data_parallel_replicate_degree=2")
    network = machine(network=1e7, node_size=1)  # which backward hides nothing of

    def communication(local, *keys):
        config = load_config([*run, f"--training.local_batch_size={local}", *keys], cuda=True)
        return step(PlannedRank(config, preset("kda", "340M"), 2), network).parts["communication"]

    narrow = "--training.mixed_precision_reduce=bfloat16"
    assert communication(1) == pytest.approx(communication(8), rel=0.02)
    assert communication(1, narrow) == pytest.approx(4 * communication(8), rel=0.02)


def test_times_with_offload_are_of_the_gpu_alone(capsys):
    """The plan says so; memory moves to the host."""
    keys = ["--gpus", "1", *RUN, "--model.name=kda", "--model.flavor=340M"]
    keys.append("--training.global_batch_size=1")
    said = {}
    for offload in ("false", "true"):
        assert plan.main([*keys, f"--training.enable_cpu_offload={offload}"]) == 0
        said[offload] = capsys.readouterr().out
    line = "training.enable_cpu_offload: times leave out the copies between GPU and host"
    assert said["true"].startswith(line) and line not in said["false"]
    assert "in the host's memory" in said["true"]


@pytest.mark.parametrize(
    "change, why",
    [
        ({"attention": {}}, "attention: Dictionary should have at least 1 item"),
        ({"attention": {"cudnn": {}}}, "attention.cudnn: Dictionary should have at least 1 item"),
        (
            {"attention": {"cudnn": {"128": [0, 0]}}},
            "attention.cudnn.128.0: Input should be greater than 0",
        ),
        ({"memory_gib": "x"}, "memory_gib: Input should be a valid number"),
        ({"memory_gib": -5}, "memory_gib: Input should be greater than 0"),
        ({"copy": math.inf}, "copy: Input should be a finite number"),
        ({"gap": -1}, "gap: Input should be greater than or equal to 0"),
        ({"products": [[0, 1.0]]}, "products.0.0: Input should be greater than 0"),
        ({"operators": {}}, "operators: conv1d and conv1d_backward are missing"),
        ({"operators": {"conv1d": [1]}}, "operators.conv1d.1: Field required"),
        ({"node": {"latency": 1}}, "node.all_gather: Field required"),
    ],
)
def test_damaged_rates_are_refused(change, why, tmp_path):
    rates = json.loads(shipped()["H200"].read_text()) | change
    write_json(tmp_path / "r.json", rates)
    with refused(rf"cannot be read \({re.escape(why)}.*\); python -m tools.bench_rates"):
        read_rates(tmp_path / "r.json")


def test_runs_choose_levels_by_the_rates_of_plans():
    node = machine().rates.node
    assert (node.latency, node.all_to_all, plan.parse([])[0].network * 1e9) == H200


def test_groups_over_several_nodes():
    """A ring takes all links of a node; what ranks send directly takes their own."""
    node, two, many = (machine().group(ranks, 1) for ranks in (8, 16, 1024))
    alone, pairs = machine().group(128, 8), machine().group(2, 4)
    assert pairs == node
    assert two.all_gather == node.all_gather and alone.all_gather == 50e9  # of 8 links, and of one
    assert two.neighbour == 50e9 and two.all_to_all == pytest.approx(50e9 * 15 / 8)
    assert many.message == two.message > node.message


def test_rates_of_one_gpu_know_no_links():
    alone = machine(node=None)
    batch = MicroBatchShape.of(load_config(RUN, cuda=True))
    assert Clock(alone, batch, True).of
    with refused("do not say how fast GPUs exchange data; torchrun"):
        Clock(alone, batch._replace(cp=2), True)


@pytest.mark.parametrize("may_split", [True, False])
def test_rates_are_of_whole_documents_where_they_say_so(may_split):
    bench = bench_rates.Bench(torch.device("cpu"))
    context = bench_rates.one_document(bench, may_split)
    assert boundaries_of(bench.randn(1, bench.tokens), None, context).may_split == may_split


def test_rates_measured_here(tmp_path, capsys):
    """On whatever is here: the file is one that the planner reads."""
    file = tmp_path / "rates.json"
    assert bench_rates.main(["--out", str(file)]) == 0
    rates = read_rates(file)
    assert all(each > 0 for each, _ in rates.operators.values())
    assert {
        "kda_scan",
        "kda_scan any",
        "gdn_backward",
        "ssd_scan",
        "rwkv7_backward",
    } <= rates.operators.keys()
    assert bench_rates.main(["--out", str(tmp_path / "none" / "rates.json")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    argv = [
        "--gpus",
        "1",
        "--rates",
        str(file),
        "--training.seq_len",
        "256",
        "--training.enable_cpu_offload",
        "true",
    ]
    assert plan.main(argv) == 0 and "\nin the host's memory: 0.0" in capsys.readouterr().out
