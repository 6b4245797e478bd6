"""Plan a run's memory, time and best splits, before it runs and without a GPU.

    titan-linear plan --gpus 64 --job.config_file my.toml --tokens 100B
    titan-linear plan --gpus 8 --gpu H200 --model.name kda --model.flavor 1.3B --training.seq_len 131072
    titan-linear plan --gpus 8 --model.flavor hf --model.hf_assets_path Qwen3-Next-80B-A3B --training.seq_len 131072
    titan-linear plan --gpus 2 --rates mine.json --job.config_file my.toml

Give the run's keys as for run_train.sh. Dtypes are the ones that the run has on GPUs.
Neither the corpus nor the tokenizer has to be there (without a tokenizer, a preset has its
own vocabulary), and nothing is written. The command prints

    memory    of the GPU that holds most, by part and moment (planner/memory.py explains each),
              the fullest moment first; a tenth of the GPU is kept free
    time      of a step, by part, from rates measured on such a GPU (planner/timing.py); tokens
              per second, MFU
    splits    the fastest that fit, over all degrees, ways of activation checkpointing (every
              n-th layer among them) and local batch sizes, for the same step
    longest   the longest stream that would fit on the same number of GPUs

`--rates` is a file that tools/bench_rates.py wrote; `--gpu` names a file that comes with
the package. docs/planning.md explains what is modeled, and how accurate it is.
"""

import argparse
import os
import re
from collections import Counter
from pathlib import Path

from titan_linear.commands import Parsed, command_parser, table
from titan_linear.config import Training, load_config
from titan_linear.data import Tokenizer, build_tokenizer
from titan_linear.distributed.process import refusing
from titan_linear.models.config import ModelConfig
from titan_linear.ops.layout.levels import H200
from titan_linear.planner.machine import Machine, read_rates, shipped
from titan_linear.planner.memory import GIB, PARTS, SPARE, Mean, PlannedRank, parameters
from titan_linear.planner.splits import GPUs, PlannedSplit, check, fitting, longest, refuse
from titan_linear.planner.timing import PlannedStep, step
from titan_linear.run.console import model_name
from titan_linear.run.data import RunData
from titan_linear.run.origin import Origin
from titan_linear.storage.files import progress

# Number of splits to print.
BEST = 5
UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@refusing
def main(argv: list[str]) -> int:
    plan(*parse(argv))
    return 0


def parse(argv: list[str]) -> Parsed:
    """Return this command's own options, and the run's keys."""
    parser = command_parser("titan-linear plan", __doc__, allow_abbrev=False)
    option = parser.add_argument
    option("--gpus", type=int, default=8, help="number of GPUs of the run (default: 8)")
    option("--gpu", default="H200", help=f"{', '.join(shipped())} (default: H200)")
    option("--rates", default="", help="file written by tools.bench_rates, instead of --gpu")
    option("--node", type=int, default=8, help="GPUs per node (default: 8)")
    option(
        "--network",
        type=float,
        default=H200.between_nodes / 1e9,
        help="GB/s from each GPU to other nodes (default: 50)",
    )
    option("--attention", default="", help="kernel of softmax attention, one that the rates have")
    option(
        "--documents",
        default="one",
        help='"one" per stream, their mean tokens, or a tree: 14336+8*2048 (default: one)',
    )
    option(
        "--tokens", nargs="+", default=[], help="budget, to say how many days it takes: 100B, 2.5T"
    )
    args, keys = parser.parse_known_args(argv)
    return args, [key for key in keys if key != "--"]


def plan(args: argparse.Namespace, keys: list[str]) -> None:
    """Print the whole plan.

    Raises:
        ValueError: the run cannot be planned, or does not fit.
    """
    # Read and check the arguments.
    mean = mean_length(args.documents)
    budget = _tokens(" ".join(args.tokens))
    machine = machine_of(args)
    config = load_config(keys, cuda=True)
    origin = Origin.of(config)
    model = planned_model(origin)
    room = (1 - SPARE) * machine.rates.memory_gib * GIB
    rank = PlannedRank(config, model, args.gpus, mean)
    check(rank)
    check_corpus(origin)
    if config.training.seq_len_schedule:
        print(of_whole_length(config.training))
    if config.training.enable_cpu_offload:
        print(
            "training.enable_cpu_offload: times leave out the copies between GPU and host, and the optimizer's update "
            "on the host; a step takes longer than planned"
        )
    # Print the plan of the configuration that was given.
    print(describe(rank), memory_table(rank, machine), sep="\n\n", end="\n\n")
    needed = rank.needs
    if needed <= room:
        print(time_table(step(rank, machine), machine, budget), end="\n\n")
    # Print the best other splits, even if the given one does not fit.
    gpus = GPUs(machine, room)
    splits = sorted(progress(fitting(rank, gpus), "splits"), key=lambda split: split.order)
    if not splits:
        refuse(rank, gpus)
    print(splits_table(splits[:BEST], budget), longest(splits, room), sep="\n\n")
    if needed > room:
        raise ValueError(
            f"this configuration takes {needed / GIB:.1f} GiB, and a GPU has {room / GIB:.1f} for it; use one of the "
            "splits above"
        )


def of_whole_length(t: Training) -> str:
    steps = t.seq_len_schedule[-1].until_step
    return (
        f"training.seq_len_schedule is left out: all steps are planned at training.seq_len = {t.seq_len}; the first "
        f"{min(steps, t.steps):,} of {t.steps:,} are shorter, and take less time and memory"
    )


def planned_model(origin: Origin) -> ModelConfig:
    """Return the run's model.

    If its tokenizer's file is missing, the model's vocabulary is assumed to be large
    enough.
    """
    path = origin.tokenizer_path
    if tokenizer := _tokenizer_here(path):
        return origin.model_for(tokenizer)
    model = origin.definition
    print(
        f"model.tokenizer_path = {path!r} is not here: a vocabulary of {model.vocab_size} is assumed"
    )
    return model


def check_corpus(origin: Origin) -> None:
    """Check the size of the run's corpus, if its tokens are cached.

    Raises:
        ValueError: the corpus has fewer tokens than a step takes.
    """
    if tokenizer := _tokenizer_here(origin.tokenizer_path):
        data = RunData(origin.config, tokenizer)
        corpora = data.cached_corpora()
        if None not in corpora:
            data.check_size(sum(corpus.num_tokens for corpus in corpora))


def _tokenizer_here(path: str | None) -> Tokenizer | None:
    """Return the run's tokenizer; None: its file is missing."""
    return build_tokenizer(path) if not path or Path(os.path.expanduser(path)).exists() else None


def machine_of(args: argparse.Namespace) -> Machine:
    known = shipped()
    if not args.rates and args.gpu.upper() not in known:
        raise ValueError(
            f"--gpu {args.gpu!r} is unknown; use one of {', '.join(known)}, or --rates with a file of tools.bench_rates"
        )
    # Attention is planned with cuDNN's kernel, if it was measured.
    rates = read_rates(Path(args.rates) if args.rates else known[args.gpu.upper()])
    kernel = args.attention or next(
        name for name in ("cudnn", *rates.attention) if name in rates.attention
    )
    if kernel not in rates.attention:
        raise ValueError(
            f"--attention {kernel!r} is not in the rates; use one of {', '.join(rates.attention)}"
        )
    # The remaining options are numbers.
    for option in ("gpus", "node"):
        if (number := getattr(args, option)) < 1:
            raise ValueError(f"--{option} {number} must be 1 or more")
    if not args.network > 0:
        raise ValueError(f"--network {args.network:g} must be above 0")
    return Machine(rates, args.node, args.network * 1e9, kernel)


def mean_length(documents: str) -> Mean:
    """Return the mean length, or the tree, that --documents describes.

    Raises:
        ValueError: --documents is none of the three kinds.
    """
    if documents != "one" and not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*\*[1-9]\d*)*", documents):
        raise ValueError(
            f"--documents {documents!r} must be 'one', or the mean length of a document in tokens, or a tree such as "
            "14336+8*2048"
        )
    # A tree: its root has one node, each further level a number of nodes and their tokens.
    if "+" in documents:
        levels = [level.split("*") for level in f"1*{documents}".split("+")]
        return tuple((int(count), int(tokens)) for count, tokens in levels)
    return None if documents == "one" else int(documents)


def _tokens(text: str) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMBT]?)(?: TOKENS)?", text.upper().replace(",", ""))
    tokens = float(found[1]) * UNITS[found[2]] if found else 0
    if text and tokens < 1:
        raise ValueError(f"--tokens {text!r} must be a number of tokens, such as 100B or 2.5T")
    return tokens or None


# --- What is printed ----------------------------------------------------------------------


def readable(number: float) -> str:
    """Return a size as --tokens takes it: 354M, 1.34B, 100B, 2.5T."""
    # Round first: 999.9M becomes 1B.
    rounded = float(f"{number:.3g}")
    unit = max((u for u in UNITS if UNITS[u] <= rounded), key=UNITS.__getitem__, default="")
    return f"{rounded / UNITS[unit]:.3g}{unit}"


def describe(rank: PlannedRank) -> str:
    config = rank.config
    t = rank.training
    sharers = rank.parallelism.copies
    name = model_name(Origin.of(config))
    size = parameters(rank.model)
    return (
        f"{name}: {size:,} parameters ({readable(size)}), {rank.model.composition}\n"
        f"{t.local_batch_size} x {t.seq_len:,} tokens in a micro-step on {sharers} GPU{'s' if sharers > 1 else ''}; "
        f"parameters {t.dtype}, compute {t.mixed_precision_param}, reductions {t.mixed_precision_reduce}; activation "
        f"checkpointing {config.activation_checkpoint.name}; layers {'' if config.compile.enable else 'not '}compiled"
    )


def memory_table(rank: PlannedRank, machine: Machine) -> str:
    moments = rank.moments()
    gpus = rank.gpus
    size = machine.rates.memory_gib
    fullest = max(moments, key=lambda name: sum(moments[name].values()))
    # The moment that holds most comes first.
    at = {fullest: moments[fullest], **moments}
    rows = [(part, *(f"{parts[part] / GIB:.2f}" for parts in at.values())) for part in PARTS]
    rows.append(("sum", *(f"{sum(parts.values()) / GIB:.2f}" for parts in at.values())))
    verdict = "fits" if rank.needs <= (1 - SPARE) * size * GIB else "does not fit"
    # Bytes that each kind of layer keeps, with the number of such layers.
    names = (layer.name for layer in rank.model.layers)
    each = Counter(zip(names, rank.saved()[0], strict=True))
    kept = ", ".join(
        f"{number} {name} {number * value / GIB:.2f}" for (name, value), number in each.items()
    )
    # With offload, the host's memory is planned too.
    host = rank.host_memory() / GIB
    ranks = min(gpus, machine.node_size)
    offloaded = f"\nin the host's memory: {host:.2f} GiB for each GPU, {ranks * host:.2f} on a node of {ranks}"
    return (
        table(
            (f"memory of {'the GPU' if gpus == 1 else f'one of {gpus} GPUs'}, GiB, at", *at), rows
        )
        + f"\n{verdict} in {machine.rates.gpu} ({size:.0f} GiB, of which {SPARE * size:.2f} are kept free for "
        f"fragmentation and buffers, which are not modelled); activations of layers: {kept}"
        + offloaded
        * bool(host)
    )


def time_table(planned: PlannedStep, machine: Machine, budget: float | None) -> str:
    rows = [(part, f"{1e3 * seconds:.1f}") for part, seconds in planned.parts.items()]
    rows.append(("step", f"{1e3 * planned.seconds:.1f}"))
    line = (
        f"{planned.tokens_per_second:,.0f} tokens/s, {planned.tokens_per_second / planned.gpus:,.0f} a GPU; MFU "
        f"{planned.mfu:.1%} of {planned.peak_tflops:.0f} TFLOP/s; exposed communication "
        f"{planned.parts['communication'] / planned.seconds:.1%}"
    )
    if budget is not None:
        line += f"; {_days(planned, budget):.1f} days for {readable(budget)} tokens"
    if planned.parts["attention"]:
        line += f"; attention by {machine.attention}"
    return table(("time of a step, ms", machine.rates.gpu), rows) + f"\n{line}"


def splits_table(splits: list[PlannedSplit], budget: float | None) -> str:
    head = ["split", "checkpointing", "local batch", "GiB", "ms a step", "tokens/s/GPU", "MFU"]
    rows = []
    for rank, planned in splits:
        row = [
            rank.degrees,
            rank.config.activation_checkpoint.name,
            rank.training.local_batch_size,
            f"{rank.needs / GIB:.1f}",
            f"{1e3 * planned.seconds:.0f}",
            f"{planned.tokens_per_second / rank.gpus:,.0f}",
            f"{planned.mfu:.1%}",
        ]
        if budget:
            row.append(f"{_days(planned, budget):.1f}")
        rows.append(row)
    if budget:
        head.append("days")
    return table(head, rows)


def _days(planned: PlannedStep, budget: float) -> float:
    return budget / planned.tokens_per_second / 86400
