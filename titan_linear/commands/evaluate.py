"""Evaluate what trained weights remember of long texts, by length and depth.

titan-linear evaluate outputs/debug --tasks niah_single_2 mqar --lengths 1k 2k
titan-linear evaluate --write corpora/mqar --tasks mqar --lengths 256 1k --evaluation.samples 1000 --debug.seed 1
titan-linear evaluate Qwen3.5-2B --tasks niah_multikey_1 vt --lengths 4k 1m \\
    --training.dataset text --training.dataset_path 'books/*'

PATH is a run's folder or its checkpoint/, a step-N in it, or a Hugging Face folder. The
run's keys, and keys given here, determine the texts and the split. NGPU is the number of
processes, as in training. Tasks and scores: docs/telemetry.md. FOLDER/evaluation.jsonl gets
a line for each prompt. --write makes prompts to train on instead: a folder
(training.dataset = "tokens") whose labels are the answers. Give it another seed than the
evaluation's.
"""

import argparse
import re
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from titan_linear.commands import Parsed, command_parser, table
from titan_linear.commands.score import checked, joined, path_and_keys
from titan_linear.config import COLUMNS, Config, load_config
from titan_linear.data import write_corpus
from titan_linear.data.corpus.columns import WEIGHTS, DocumentTokens
from titan_linear.data.streams.prompts import NONE
from titan_linear.distributed.process import refusing, run_command, under_launcher
from titan_linear.run.data import RunData
from titan_linear.run.evaluate import NUMBERS, Record, examine, means, open_prompts, write_down
from titan_linear.run.launch import run_workers
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import check_evaluation
from titan_linear.run.reading import open_reader

SIZES = {"k": 1 << 10, "m": 1 << 20}


@refusing
def main(argv: list[str]) -> int:
    args, keys = parse(argv)
    # A worker evaluates. The first process checks everything, then starts the workers.
    if under_launcher():
        return joined(keys, partial(evaluate, args.output))
    if args.write:
        write_prompts(args.write, load_config(keys))
        return 0
    origin, node = checked(args.path, keys)
    checked_data(origin)
    if args.output:
        # An output that cannot be written is refused here, not after hours.
        write_down([], 0, Path(args.output))
    return run_workers(
        origin.config, node, "titan_linear.commands.evaluate", ["--output", args.output]
    )


def checked_data(origin: Origin) -> RunData:
    """Return the data of an evaluation, once it is checked."""
    data = RunData(origin.config, origin.tokenizer)
    check_evaluation(data, origin.model, origin.assets)
    return data


def write_prompts(folder: str, config: Config) -> None:
    """Write a corpus whose labels are the answers of the prompts."""
    data = checked_data(Origin.of(config))
    prompts = open_prompts(data)
    made = map(prompts.prompt, prompts.samples)
    documents = (
        # Only tokens of answers have weight.
        DocumentTokens(rows["token"], {WEIGHTS: np.float32(rows["answer"] != NONE)})
        for rows in made
    )
    write_corpus(folder, documents, data.tokenizer, columns={WEIGHTS: COLUMNS[WEIGHTS]})
    print(f"{len(prompts.samples):,} prompts in '{folder}'")


def evaluate(output: str, config: Config) -> None:
    records = examined(config)
    if dist.get_rank() == 0:
        shown(records, output, step_of(config.checkpoint.initial_load_path))


def examined(config: Config) -> list[Record]:
    """Return the scores of each prompt, on rank 0."""
    reader = open_reader(config)
    return examine(reader, open_prompts(RunData(config, reader.tokenizer)))


def step_of(path: str) -> int:
    """Return the checkpoint's step; 0 for a folder from elsewhere."""
    found = re.search(r"step-(\d+)$", path)
    return int(found[1]) if found else 0


def shown(records: list[Record], output: str, step: int) -> None:
    keys = ("task", "length", "position")
    rows = [(*of, *map(numbers.get, NUMBERS)) for of, numbers in means(records, *keys).items()]
    print(
        table(
            (*keys, *NUMBERS),
            [[f"{x:.3f}" if isinstance(x, float) else x or "" for x in row] for row in rows],
        )
    )
    if output:
        write_down(records, step, Path(output))


def parse(argv: list[str]) -> Parsed:
    """Return the arguments of this command, and the arguments that are configuration keys."""
    parser = command_parser(
        "titan-linear evaluate",
        __doc__,
        allow_abbrev=False,
        usage="titan-linear evaluate PATH --tasks … --lengths …",
    )
    option = parser.add_argument
    option("--tasks", nargs="+", default=[], help="evaluation.tasks")
    option(
        "--lengths",
        nargs="+",
        type=size,
        default=[],
        help="evaluation.lengths: 512, 4k or 1m tokens",
    )
    option("--write", default="", metavar="FOLDER", help="only make prompts, to train on")
    option("-o", "--output", default="", help="folder for evaluation.jsonl (default: none)")
    args, keys = path_and_keys(parser, argv)
    if not (args.path or args.write or under_launcher()):
        # These options are short forms of configuration keys.
        raise ValueError(
            "give PATH, what is evaluated: a run's folder, a checkpoint or a Hugging Face folder"
        )
    for name in ("tasks", "lengths"):
        if given := getattr(args, name):
            keys += [f"--evaluation.{name}", str(given)]
    return args, keys


def size(text: str) -> int:
    """ "4k" → 4096."""
    if not re.fullmatch(r"[1-9][0-9]*[kKmM]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write 512, 4k or 1m")
    return int(text.rstrip("kKmM")) * SIZES.get(text[-1].lower(), 1)


if __name__ == "__main__":
    run_command(main)
