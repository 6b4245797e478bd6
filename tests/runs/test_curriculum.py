"""Streams that become longer: the same line of documents, the same run however it is split, resumed or compiled."""

import numpy as np
import pytest
import torch

from tests.records import read_lines
from tests.refusals import refused
from tests.training import FLOAT64, arguments
from titan_linear.config import check_config, load_config
from titan_linear.data import MixedStreams, PackedStreams, Phase, build_tokenizer
from titan_linear.run.data import RunData
from titan_linear.train import Trainer

SCHEDULE = "[{until_step = 2, seq_len = 16}, {until_step = 3, seq_len = 24}, {until_step = 4, seq_len = 32}]"
KEYS = {
    "model.name": "kda",
    "model.num_layers": 1,
    "training.steps": 5,
    "training.local_batch_size": 1,
    "training.seq_len": 48,
    "training.seq_len_schedule": SCHEDULE,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "metrics.log_freq": 1,
    "metrics.telemetry_freq": 1,
}
LENGTHS, G = [16, 16, 24, 32, 48], 4


def tokens(streams, indices):
    return np.concatenate([streams[i].tokens for i in indices])


def test_lengths_of_steps(corpus):
    t = load_config(arguments(corpus, KEYS)).training
    assert [t.seq_len_at(step) for step in range(1, 6)] == LENGTHS
    assert [t.tokens_at(step) for step in range(6)] == [
        G * sum(LENGTHS[:step]) for step in range(6)
    ]


def test_the_line_goes_on(corpus):
    """No token is left out, none comes twice; what documents are is what it is in streams of that length."""
    tokenizer = build_tokenizer(None)
    streams, _ = RunData(load_config(arguments(corpus, KEYS)), tokenizer).streams(None)
    alone, _ = RunData(
        load_config(
            arguments(corpus, KEYS, {"training.seq_len_schedule": "[]", "training.seq_len": 8})
        ),
        tokenizer,
    ).streams({})
    found = tokens(streams, range(G * 5))
    assert [len(streams[i].tokens) for i in range(G * 5)] == [n for n in LENGTHS for _ in range(G)]
    assert (found == tokens(alone, range(G * sum(LENGTHS) // 8))).all()
    for i in (0, 9, 19):  # of one length, where they begin
        begin, seq_len = streams.place(i)
        one = alone.of_lengths([type(streams.lengths[0])(0, seq_len)])
        if begin % seq_len == 0:
            same = one[begin // seq_len]
            assert (same.labels == streams[i].labels).all() and (
                same.cu_seqlens == streams[i].cu_seqlens
            ).all()


def test_a_mixture_goes_on_in_each_source(corpus):
    """Across a change of its weights too."""
    config = load_config(arguments(corpus, KEYS))
    one, _ = RunData(config, build_tokenizer(None)).streams(None)
    short = {
        name: PackedStreams(one.line.side, seq_len=8, seed=seed) for seed, name in enumerate("ab")
    }
    phases = [Phase(0, {"a": 1.0, "b": 3.0}), Phase(10, {"a": 1.0, "b": 1.0})]
    mixed = MixedStreams(short, phases, seed=0, lengths=one.lengths)
    own = {"a": [], "b": []}
    for i in range(G * 5):
        assert len(mixed[i].tokens) == LENGTHS[i // G]
        own[mixed.source(i)[0]].append(mixed[i].tokens)
    for name, found in own.items():
        found = np.concatenate(found)
        assert len(found) > 100 and (found == tokens(short[name], range(len(found) // 8))).all()


def train_on_rank(rank, world_size, argv):
    Trainer(load_config(argv)).train()
    torch.compiler.reset()


def test_a_run_is_the_same_split_resumed_and_compiled(corpus, worlds, tmp_path):
    cp2 = {"parallelism.context_parallel_degree": 2, "training.local_batch_size": 4}
    stop = {"training.steps": 2, "lr_scheduler.total_steps": 5}
    resumed, split = {"lr_scheduler.total_steps": 5}, tmp_path / "split"
    for folder, size, *keys in (
        (tmp_path / "alone", 1, FLOAT64),
        (split, 2, FLOAT64, stop),
        (split, 2, FLOAT64, resumed, cp2, {"training.steps": 3}),
        (split, 2, FLOAT64, resumed, {"compile.enable": "true", "compile.backend": "aot_eager"}),
    ):
        folder.mkdir(exist_ok=True)
        worlds(size).run(train_on_rank, arguments(corpus, KEYS, *keys, {"job.dump_folder": folder}))
    runs = [read_lines(folder / "metrics.jsonl") for folder in (tmp_path / "alone", split)]
    for one, other in zip(*runs, strict=True):
        assert one["seq_len"] == other["seq_len"] == LENGTHS[one["step"] - 1]
        assert one["tokens"] == other["tokens"] == G * sum(LENGTHS[: one["step"]])
        assert ("compiled_graphs" in other) == (one["step"] > 3) and "compiled_graphs" not in one
        assert (
            abs(other["loss"] / one["loss"] - 1) < 1e-9
            and abs(other["grad_norm"] / one["grad_norm"] - 1) < 1e-9
        )


@pytest.mark.parametrize(
    "schedule, message",
    [
        ("[{until_step = 2, seq_len = 64}]", r"seq_len = 64 is more than training.seq_len = 48"),
        (
            "[{until_step = 2, seq_len = 7}]",
            r"seq_len_schedule: seq_len = 7 cannot be cut into 2 .* for example 8",
        ),
        (
            "[{until_step = 2, seq_len = 8}, {until_step = 2, seq_len = 9}]",
            r"until_step = 2 comes after 2; ",
        ),
        ("[8]", r"must be a table, {until_step = …, seq_len = …}"),
    ],
)
def test_schedules_that_cannot_be_are_refused(schedule, message, corpus):
    keys = {"training.seq_len_schedule": schedule, "parallelism.context_parallel_degree": 2}
    with refused(message):
        check_config(load_config(arguments(corpus, KEYS, keys)), 2)
