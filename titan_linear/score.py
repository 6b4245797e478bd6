"""Score texts with trained weights: the log-probability of each token after those before it in its document.

titan-linear score outputs/dpo/checkpoint/step-150 -o scores/ --training.dataset_path 'pairs.jsonl' …
titan-linear score Qwen3.5-2B -o teacher/ --top-k 64 --training.dataset_path 'data/*.jsonl' --training.seq_len 32768
titan-linear score --compare scores/ others/

PATH is a run's folder or its checkpoint/, a step-N in it, or a Hugging Face folder. Keys, the run's own and those that
are given here, say what is scored and under which split, of NGPU processes as in training: training.dataset_path,
training.seq_len, parallelism.…. Documents are whole in a stream, if all of them fit.

The folder gets a column, `reference` unless --as names another that losses read, and with --top-k the likeliest ids and
their log-probabilities, teacher_ids and teacher_logprobs. A run reads it with loss.scores = "scores/", on the same
texts. If it is stopped, the same command goes on. --compare prints the largest differences of two such folders.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.commands import command_parser
from titan_linear.config import Config, changed, check_config, load_config
from titan_linear.data import Batch, Corpus, PackedStreams, Streams, Targets, Tokenizer, WholeStreams, split_corpus
from titan_linear.data.corpus.scores import Scores, begin, differences, put
from titan_linear.data.streams.loader import micro_batch
from titan_linear.distributed.ending import report
from titan_linear.distributed.groups import host_group, on_rank_0, process_group
from titan_linear.distributed.process import own_device, refusing, under_launcher
from titan_linear.launch import run_workers, this_node
from titan_linear.losses.loss import logprobs
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits
from titan_linear.run.build import (
    build_dims,
    build_model,
    build_sharding,
    mixed_precision,
    model_config,
    open_tokenizer,
)
from titan_linear.run.data import open_corpora
from titan_linear.run.preflight import check_model
from titan_linear.run.start import build_checkpointer, set_first_weights
from titan_linear.step.feed import MicroBatch
from titan_linear.storage.hf_io import CONFIG as HF_CONFIG
from titan_linear.storage.rundir import config_path
from titan_linear.storage.step_folders import weights_path

SAVED = 30.0  # seconds of scoring that a kill costs


@refusing
def main(argv: list[str]) -> int:
    args, keys = parse(argv)
    if under_launcher():
        return work(args, load_config(keys))
    if args.compare:
        for name, (apart, token) in differences(*map(Path, args.compare)).items():
            print(f"{name}: largest difference {apart:.3g}, at token {token:,} of the corpus")
        return 0
    if not (args.path and args.output):
        raise ValueError("give PATH, what scores, and -o, a folder for the scores; or --compare and two folders")
    config = config_for(Path(args.path), keys)
    node = this_node()
    check_config(config, node.count * node.processes)
    tokenizer = open_tokenizer(config)
    check_model(model_config(config, tokenizer), config, node.count * node.processes, node.processes)
    corpus = corpus_of(config, tokenizer)
    begin(Path(args.output), scores_of(args, config, corpus, streams_of(config, corpus)), corpus.num_tokens)
    return run_workers(config, node, "titan_linear.score", argv_of(args))


def config_for(path: Path, keys: list[str]) -> Config:
    """The configuration of the run that made these weights, with these keys changed; its weights are loaded first."""
    if (path / HF_CONFIG).is_file():
        first = ["--model.flavor", "hf", "--checkpoint.initial_load_in_hf", "true"]
    else:
        path = weights_path(path, key="PATH")
        first = ["--job.config_file", str(config_path(path)), "--checkpoint.initial_load_in_hf", "false"]
    first += ["--checkpoint.enable", "true", "--checkpoint.initial_load_path", str(path)]
    return changed(load_config([*first, *keys]), {"loss.scores": ""})


def corpus_of(config: Config, tokenizer: Tokenizer) -> Corpus:
    if config.training.mixture:
        raise ValueError("training.mixture: a corpus is scored at a time; give training.dataset and its path instead")
    return open_corpora(config, tokenizer)[0]


def streams_of(config: Config, corpus: Corpus) -> Streams:
    """One pass over the corpus; documents are whole if all fit."""
    side = split_corpus(corpus, 0.0, "train")
    whole = int(np.diff(corpus.offsets).reshape(-1, corpus.group).sum(1).max()) <= config.training.seq_len
    make, group = (WholeStreams, corpus.group) if whole else (PackedStreams, 0)
    return make(side, seq_len=config.training.seq_len, seed=0, repeat=False, targets=Targets(group=group))


def scores_of(args: argparse.Namespace, config: Config, corpus: Corpus, streams: Streams) -> Scores:
    columns = {args.column: ("<f4", 0)}
    if args.top_k:
        columns |= {"teacher_ids": ("<i4", args.top_k), "teacher_logprobs": ("<f4", args.top_k)}
    return Scores(
        corpus=corpus.fingerprint,
        tokenizer=corpus.info["tokenizer"]["fingerprint"],
        by={
            "weights": config.checkpoint.initial_load_path,
            "temperature": str(args.temperature),
            "streams": f"{type(streams).__name__} {config.training.seq_len}",
        },
        columns=columns,
        next_stream=0,
        streams=len(streams),
    )


# --- In each process --------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace, config: Config) -> int:
    try:
        with process_group(timedelta(seconds=config.comm.init_timeout_seconds)):
            Scorer(args, config).run()
    except Exception as error:
        return report(error)
    return 0


class Scorer:
    """This rank's part of the scoring."""

    def __init__(self, args: argparse.Namespace, config: Config):
        self.args, self.config, self.folder = args, config, Path(args.output)
        self.device, self.host = own_device(), host_group()
        tokenizer = open_tokenizer(config)
        corpus = corpus_of(config, tokenizer)
        self.dims = build_dims(config, self.device)
        self.model = build_model(config, model_config(config, tokenizer), self.dims, self.device)
        set_first_weights(config, self.model, build_checkpointer(config))
        self.streams = streams_of(config, corpus)
        self.cut = build_sharding(config, self.model.config, self.dims, self.device)
        self.precision = mixed_precision(config, self.model, self.dims)
        scores = scores_of(args, config, corpus, self.streams)
        self.scores = on_rank_0(lambda: begin(self.folder, scores, corpus.num_tokens), self.host)

    @torch.no_grad()
    def run(self) -> None:
        L = self.config.training.local_batch_size
        each, first = self.dims.dp * L, dist.get_rank() == 0
        rows, begun, saved = [], time.perf_counter(), time.perf_counter()
        start = self.scores.next_stream // each
        count = -(-len(self.streams) // each)
        for n in range(start, count):
            own = self._score(micro_batch(self.streams, n, L, self.dims.dp_rank, self.dims.dp, len(self.streams)))
            of_all = [None] * dist.get_world_size() if first else None
            dist.gather_object(own, of_all, group=self.host)
            rows += [row for row in of_all or [] if row is not None]
            if first and (n + 1 == count or time.perf_counter() - saved > SAVED):
                end = min((n + 1) * each, len(self.streams))
                put(self.folder, self.scores, rows, end)
                rows, saved = [], time.perf_counter()
                rate = (end - start * each) * self.config.training.seq_len / (saved - begun)
                print(f"scored {end:,} of {len(self.streams):,} streams, {rate:,.0f} tokens/s", flush=True)

    def _score(self, batch: Batch) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """The places in the corpus of this rank's labels, and their columns; None: another rank has the same."""
        places = np.zeros(batch.tokens.shape[1], dtype=np.int64)
        for j, stream in enumerate(i for i in batch.streams if i < len(self.streams)):
            starts, lengths = self.streams.runs(stream)
            of_tokens = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
            places[j * self.streams.seq_len :][: len(of_tokens)] = of_tokens + 1  # of labels
        micro = self.cut(replace(batch, columns={"place": torch.from_numpy(places)[None]}))
        with self.precision:
            columns = partial(self._columns, micro=micro)
            found = self.model(micro.tokens, micro.plan, loss=columns, loss_chunk=self.config.training.loss_chunk_size)
        if self.dims.tp_ranks.rank:
            return None
        valid = (micro.labels[0] != IGNORE).cpu().numpy()
        columns = {name: x.cpu().numpy()[valid] for name, x in zip(self.scores.columns, found)}
        return micro.columns["place"][0].cpu().numpy()[valid], columns

    def _columns(self, logits: ChunkedLogits, micro: MicroBatch) -> tuple[Tensor, ...]:
        logits = replace(logits, x=logits.x / self.args.temperature)
        top = logits.top(self.args.top_k) if self.args.top_k else ()
        return logprobs(logits, micro.labels.flatten()), *top


# --- Arguments --------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and those that are keys of the configuration."""
    parser = command_parser(
        "titan-linear score", __doc__, allow_abbrev=False, usage="titan-linear score PATH -o FOLDER …"
    )
    parser.add_argument("-o", "--output", default="", help="folder for the scores")
    parser.add_argument("--as", dest="column", choices=("reference", "behaviour"), default="reference")
    parser.add_argument("--top-k", type=int, default=0, help="likeliest tokens to keep, up to 256 (default: none)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the softmax (default: 1)")
    parser.add_argument("--compare", nargs=2, metavar="FOLDER", default=[])
    path = argv[:1] if argv and not argv[0].startswith("-") else []  # argparse would take the value of a key for it
    args, keys = parser.parse_known_args(argv[len(path) :])
    args.path = "".join(path)
    if not 0 <= args.top_k <= 256 or args.temperature <= 0:
        raise ValueError(f"--top-k {args.top_k} must be 0 to 256, and --temperature {args.temperature:g} above 0")
    return args, keys


def argv_of(args: argparse.Namespace) -> list[str]:
    """For a worker."""
    given = {"--output": args.output, "--as": args.column, "--top-k": args.top_k, "--temperature": args.temperature}
    return [str(text) for pair in given.items() for text in pair]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
