"""Score texts with trained weights: the log-probability of each token of a document.

titan-linear score outputs/dpo/checkpoint/step-150 -o scores/ --training.dataset_path 'pairs.jsonl' …
titan-linear score Qwen3.5-2B -o teacher/ --top-k 64 --training.dataset jsonl --training.dataset_path 'data/*.jsonl' …
titan-linear score --compare scores/ others/

PATH is a run's folder or its checkpoint/, a step-N in it, or a Hugging Face folder. The
run's keys, and keys given here, determine which texts are scored (training.dataset_path,
training.seq_len) and under which split (parallelism.…). NGPU is the number of processes, as
in training. A token is predicted from the tokens before it in its document. Documents are
not cut if all of them fit into a stream.

The folder gets a column: `reference`, unless --as names another that losses read. With
--top-k it also gets the likeliest ids and their log-probabilities, teacher_ids and
teacher_logprobs. A run on the same texts reads it with loss.scores = "scores/". A command
that was stopped continues when it is run again. It recognizes the weights by their content,
for which a Hugging Face folder is read once more. It takes the disk space for all columns
at the start. --compare prints the largest differences between two such folders.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from titan_linear.commands import Parsed, command_parser
from titan_linear.config import Config, check_config, load_config
from titan_linear.data import PackedStreams, Streams, Targets, split_corpus, streams_of
from titan_linear.data.corpus.corpus import PLACE
from titan_linear.data.corpus.scores import Scores, begin, differences, keep, put, read_scores
from titan_linear.distributed.ending import report
from titan_linear.distributed.groups import on_rank_0, process_group
from titan_linear.distributed.process import refusing, run_command, under_launcher
from titan_linear.losses.distillation import MOST_IDS
from titan_linear.losses.loss import logprobs
from titan_linear.models.config import fingerprint
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.run.data import RunData
from titan_linear.run.launch import Node, run_workers, this_node
from titan_linear.run.model_checks import check_model
from titan_linear.run.origin import Origin
from titan_linear.run.reading import Reader, open_reader

# Seconds of scoring that a kill costs.
SAVED = 30.0


@refusing
def main(argv: list[str]) -> int:
    args, keys = parse(argv)
    # A worker scores. The first process checks everything, then starts the workers.
    if under_launcher():
        return joined(keys, partial(score_corpus, Path(args.output)))
    if args.compare:
        for name, (apart, token) in differences(*map(Path, args.compare)).items():
            print(f"{name}: largest difference {apart:.3g}, at token {token:,} of the corpus")
        return 0
    if not (args.path and args.output):
        raise ValueError(
            "give PATH, what scores, and -o, a folder for the scores; or --compare and two folders"
        )
    # Weights from elsewhere have no texts of their own to score.
    origin, node = checked(args.path, keys)
    config = origin.config
    texts_named = config.training.dataset != "stdlib" or "stdlib" in str(keys)
    if origin.folder and not texts_named:
        raise ValueError(
            f"{args.path} is not a run, whose texts would be scored; give --training.dataset and "
            "--training.dataset_path"
        )
    begin(Path(args.output), *scores_of(args, origin))
    return run_workers(config, node, "titan_linear.commands.score", ["--output", args.output])


def checked(path: str, keys: list[str]) -> tuple[Origin, Node]:
    """Return the origin that reads these weights, and this node; say what is read."""
    origin = Origin.reading(Path(path), keys)
    print(f"reading {origin.title}")
    node = this_node()
    world_size = node.count * node.processes
    check_config(origin.config, world_size)
    check_model(origin.model, origin.config, world_size, node.processes)
    return origin, node


def scores_of(args: argparse.Namespace, origin: Origin) -> tuple[Scores, int]:
    """Return the columns that the arguments ask for, and the corpus's number of tokens."""
    config = origin.config
    tokenizer = origin.tokenizer
    if args.top_k > (words := tokenizer.vocab_size):
        raise ValueError(
            f"--top-k {args.top_k} is above the {words} tokens of the tokenizer; give {words} at most"
        )
    streams = streams_to_score(RunData(config, tokenizer))
    corpus = streams.corpus
    print(corpus.summary)
    # Columns of the folder: dtype, and numbers per token (0: one number).
    columns = {args.column: ("<f4", 0)}
    if args.top_k:
        columns |= {"teacher_ids": ("<i4", args.top_k), "teacher_logprobs": ("<f4", args.top_k)}
    # The record by which a later start recognizes that it continues the same scores.
    scores = Scores(
        corpus=corpus.fingerprint,
        tokenizer=corpus.info["tokenizer"]["fingerprint"],
        by={
            "weights": origin.fingerprint,
            "model": fingerprint(origin.model),
            "temperature": str(args.temperature),
            "streams": f"{type(streams).__name__} {config.training.seq_len}",
        },
        columns=columns,
        next_stream=0,
        streams=len(streams),
    )
    return scores, corpus.num_tokens


def streams_to_score(data: RunData) -> PackedStreams:
    """Return one pass over the corpus.

    Documents are not cut if all of them fit; documents of prefix trees never are.
    """
    if data.training.mixture:
        raise ValueError(
            "training.mixture: a corpus is scored at a time; give training.mixture = [], training.dataset and its path"
        )
    (corpus,) = data.corpora(validation=False)
    # Documents of one group (a pair, a tree) stay together, so the largest group must fit.
    seq_len = data.training.seq_len
    whole = np.diff(corpus.offsets).reshape(-1, corpus.group).sum(1).max() <= seq_len
    targets = Targets("token", (PLACE,), corpus.group * whole)
    return streams_of(
        split_corpus(corpus, 0.0, "train"), seq_len=seq_len, seed=0, repeat=False, targets=targets
    )


# --- In each process ----------------------------------------------------------------------


def joined(keys: list[str], work: Callable[[Config], None]) -> int:
    """Run this process's part of `work` in the default group and return the exit code.

    keys: the configuration, as arguments.
    """
    config = load_config(keys)
    try:
        with process_group(timedelta(seconds=config.comm.init_timeout_seconds)):
            work(config)
    except Exception as error:
        return report(error)
    return 0


def score_corpus(folder: Path, config: Config) -> None:
    reader = open_reader(config)
    score(folder, reader, streams_to_score(RunData(config, reader.tokenizer)))


def score(folder: Path, reader: Reader, streams: Streams) -> None:
    """Write the missing scores of the folder's columns."""
    begun = time.perf_counter()
    size = reader.config.training.local_batch_size
    # Resume from the first stream without scores; each round reads `each` streams.
    scores = on_rank_0(lambda: read_scores(folder), reader.session.host)
    each = reader.session.dims.dp * size
    end = len(streams)
    start = scores.next_stream // each
    count = -(-end // each)
    columns = partial(_columns, scores=scores, vocab_size=reader.tokenizer.vocab_size)
    saved = begun
    for n, of_all in enumerate(reader.read(streams, columns, start, size), start + 1):
        if dist.get_rank():
            continue
        # Rank 0 writes the numbers, and marks them as done every SAVED seconds.
        put(folder, scores, of_all)
        if n == count or time.perf_counter() - saved > SAVED:
            keep(folder, scores, min(n * each, end))
            saved = time.perf_counter()
            rate = (n - start) * each * streams.seq_len / (saved - begun)
            print(
                f"scored {min(n * each, end):,} of {end:,} streams, {rate:,.0f} tokens/s",
                flush=True,
            )


def _columns(
    logits: ChunkedLogits,
    labels: Tensor,
    columns: dict[str, Tensor],
    scores: Scores,
    vocab_size: int,
) -> tuple[Tensor, ...]:
    logits = replace(logits, x=logits.x / float(scores.by["temperature"]))
    _, k = scores.columns.get("teacher_ids", ("", 0))
    numbers = logits.top(labels, k, vocab_size) if k else (logprobs(logits, labels),)
    return columns[PLACE], *numbers


# --- Arguments ----------------------------------------------------------------------------


def path_and_keys(parser: argparse.ArgumentParser, argv: list[str]) -> Parsed:
    """Return the arguments, with PATH if it comes first, and the rest.

    argparse would take the value of a key for PATH.
    """
    has_path = bool(argv) and not argv[0].startswith("-")
    args, keys = parser.parse_known_args(argv[has_path:])
    args.path = argv[0] if has_path else ""
    return args, keys


def parse(argv: list[str]) -> Parsed:
    """Return the arguments of this command, and the arguments that are configuration keys."""
    parser = command_parser(
        "titan-linear score",
        __doc__,
        allow_abbrev=False,
        usage="titan-linear score PATH -o FOLDER …",
    )
    option = parser.add_argument
    option("-o", "--output", default="", help="folder for the scores")
    option("--as", dest="column", choices=("reference", "behaviour"), default="reference")
    option(
        "--top-k", type=int, default=0, help=f"likeliest tokens to keep, up to {MOST_IDS} (none)"
    )
    option("--temperature", type=float, default=1.0, help="of the softmax (default: 1)")
    option("--compare", nargs=2, metavar="FOLDER", default=[])
    args, keys = path_and_keys(parser, argv)
    if not (0 <= args.top_k <= MOST_IDS and 0 < args.temperature < float("inf")):
        raise ValueError(
            f"--top-k {args.top_k} must be 0 to {MOST_IDS}, --temperature {args.temperature:g} above 0"
        )
    return args, keys


if __name__ == "__main__":
    run_command(main)
