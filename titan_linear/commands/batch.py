"""Show what a step trains on: its streams, their documents, and which tokens are learned.

titan-linear batch --job.config_file mine.toml
titan-linear batch --job.config_file outputs/debug/config.toml --step 40 --stream 79 --characters 0
titan-linear batch --job.config_file outputs/debug/config.toml --spike -1

--spike N takes line N of the run's spikes.jsonl (-1: the last) and shows that step's
micro-batches with their losses, the highest first. Keys are the run's, as for run_train.sh;
nothing is written into its folder.

For each document this prints its place in its stream, and its text with special tokens.
Each part has a line of its own: a part is either learned or only context. Questions are
context, and so is the first token of every document; if a document continues from the
stream before, that stream learns the token.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from titan_linear.commands import Parsed, command_parser
from titan_linear.config import load_config
from titan_linear.data import Stream, Streams, Tokenizer, build_tokenizer
from titan_linear.data.corpus.tree_records import BACK
from titan_linear.distributed.process import refusing
from titan_linear.run.data import RunData
from titan_linear.run.origin import Origin
from titan_linear.storage.files import Json
from titan_linear.storage.rundir import SPIKES, json_lines
from titan_linear.storage.step_folders import known_progress


@refusing
def main(argv: list[str]) -> int:
    for line in lines_of(argv):
        print(line)
    return 0


def lines_of(argv: list[str]) -> Iterator[str]:
    """Return the lines that the command prints."""
    args, keys = parse(argv)
    config = load_config(keys)
    tokenizer = build_tokenizer(Origin.of(config).tokenizer_path)
    # The newest checkpoint knows the state of the mixtures.
    saves = config.checkpoint.enable
    progress = known_progress(config.checkpoint_folder, -1) if saves else None
    spikes = Path(config.job.dump_folder) / SPIKES
    streams, _ = RunData(config, tokenizer).streams(progress)
    return shown(args, streams, tokenizer, config.training.global_batch_size, spikes)


def shown(
    args: argparse.Namespace, streams: Streams, tokenizer: Tokenizer, size: int, spikes: Path
) -> Iterator[str]:
    """Return the lines to print.

    Args:
        size: streams per step.
        spikes: the run's spikes.jsonl.
    """
    step = args.step
    losses = {}
    # A spike gives the step, and the order of its streams: the highest loss first.
    if args.spike is not None:
        spike = read_spike(spikes, args.spike)
        step = spike["step"]
        numbers = "  ".join(
            f"{key} {spike[key]}" for key in ("loss", "grad_norm", "mean", "sigma") if key in spike
        )
        yield f"step {step}: {spike['why']}  {numbers}"
        losses = {
            i: m["loss"] for m in sorted(spike["micro_batches"], key=_badness) for i in m["streams"]
        }
    # Show the chosen streams, all of which must be the step's.
    first = (step - 1) * size
    for i in args.stream or losses or range(first, first + size):
        if not first <= i < first + size:
            raise ValueError(
                f"--stream {i} is not of step {step}; its streams are {first} to {first + size - 1}"
            )
        name, _ = streams.source(i)
        source = f", source {name!r}" if name else ""
        loss = f", its micro-batch's loss {losses[i]}" if i in losses else ""
        yield f"\nstream {i}{source}{loss}"
        yield from documents(streams[i], tokenizer, args.characters)


def _badness(micro_batch: Json) -> float:
    loss = micro_batch["loss"]
    # Non-finite losses are written as text; they come first.
    return -loss if isinstance(loss, float) else float("-inf")


def documents(stream: Stream, tokenizer: Tokenizer, characters: int) -> Iterator[str]:
    """Return lines for each document of a stream, or node of a prefix tree.

    characters: number of characters shown of a part's beginning and of its end; 0: all.
    """
    # The last label lies in the next stream.
    targets = np.append(False, stream.columns["weights"][:-1] > 0)
    back = stream.columns.get(BACK, np.zeros_like(stream.tokens))
    for n, (start, end) in enumerate(pairwise(stream.cu_seqlens.tolist())):
        tokens = stream.tokens[start:end]
        learnt = targets[start:end]
        # A node of a tree continues from a token of another node.
        above = f", continues token {start - back[start]}" if back[start] else ""
        yield f"  document {n}: [{start}, {end}), {end - start} tokens, {learnt.sum()} learnt{above}"
        # One line for each part whose tokens are all learned, or all context.
        for begin, stop in pairwise([0, *(np.flatnonzero(np.diff(learnt)) + 1), end - start]):
            text = tokenizer.decode(tokens[begin:stop], special=True)
            if characters and len(text) > 2 * characters:
                text = f"{text[:characters]} … {text[-characters:]}"
            shown = json.dumps(text, ensure_ascii=False) if characters else text
            yield f"    {'learnt' if learnt[begin] else 'context'}: {shown}"


def read_spike(path: Path, number: int) -> Json:
    """Return line `number` of spikes.jsonl, counted from 1, or from the end if negative."""
    if not path.is_file():
        raise ValueError(
            f"--spike {number}: there is no '{path}': no loss of this run stood out; give --step"
        )
    spikes = json_lines(path, Json)
    if not 1 <= abs(number) <= len(spikes):
        raise ValueError(
            f"--spike {number} must be 1 to {len(spikes)}, a line of '{path}', or -1 to {-len(spikes)}"
        )
    return spikes[number - 1 if number > 0 else number]


def parse(argv: list[str]) -> Parsed:
    """Return this command's own options, and the run's keys."""
    parser = command_parser("titan-linear batch", __doc__, allow_abbrev=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=1, help="a step of the run (default: 1)")
    which.add_argument("--spike", type=int, help="line of spikes.jsonl, from 1; -1: the last")
    parser.add_argument(
        "--stream",
        type=int,
        action="append",
        help="show only this stream of the step; may be given several times",
    )
    parser.add_argument(
        "--characters",
        type=int,
        default=60,
        help="shown of a part's beginning and of its end; 0: all (default: 60)",
    )
    args, keys = parser.parse_known_args(argv)
    if args.step < 1:
        raise ValueError(f"--step {args.step} must be 1 or more")
    if args.characters < 0:
        raise ValueError(f"--characters {args.characters} must be 0 or more")
    return args, keys
