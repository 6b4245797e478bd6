"""A run beside the same model elsewhere: the same initial weights, streams, optimizer and schedule; two curves.

    export CONFIG_FILE=train_configs/reference_340m.toml
    ./run_train.sh --model.name kda --job.dump_folder outputs/kda                               # ours
    python -m tools.reference_run fla outputs/kda_fla -- --job.config_file $CONFIG_FILE --model.name kda
    ./run_train.sh --model.name hybrid --job.dump_folder outputs/hybrid
    ./run_train.sh --model.name hybrid --job.dump_folder outputs/hybrid_float32 --compile.enable false \\
        --training.mixed_precision_param float32 --activation_checkpoint.mode selective
    python -m tools.reference_run draw docs/results --add kda outputs/kda outputs/kda_fla
    python -m tools.reference_run draw docs/results --add hybrid outputs/hybrid outputs/hybrid_float32

`fla` trains FLA's own model (kda, gdn) from our initial weights as its users do (tools/peers.py), on one GPU, and
writes metrics.jsonl as a run does.

`draw` copies the numbers of two runs, step by step, to FOLDER/NAME.csv, draws every such file's losses into
FOLDER/loss.svg (matplotlib: pip install "titan_linear[bench]"), and prints a table of the runs (the mean loss of their
last 50 steps, the last validation, medians of the others) and the gap between each pair's losses.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn

from titan_linear.commands import command_parser, table
from titan_linear.config import Config, check_config, hf_weights, load_config
from titan_linear.data import build_tokenizer
from titan_linear.distributed.process import own_device, refusing, run_command
from titan_linear.hooks.report import clock_and_power, peak_memory_gib
from titan_linear.models.init import initialise
from titan_linear.run.build import allocated, model_config, tokenizer_path
from titan_linear.run.export import export
from titan_linear.step.flops import peak_tflops, training_flops
from titan_linear.step.update import rate_at
from titan_linear.storage.hf_writing import gather
from titan_linear.storage.rundir import METRICS
from tools.peers import Loss, Peer, fla_has, fla_loss, fla_model, split_keys

LAST = 50  # steps at a curve's end of which the mean is compared
NUMBERS = {  # of a step → their heading and format in the table
    "loss": ("loss", ".4f"),
    "validation_loss": ("validation", ".4f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "memory_gib": ("memory, GiB", ".1f"),
    "sm_clock_mhz": ("MHz", ".0f"),
    "power_watts": ("W", ".0f"),
}

# --- The other model -------------------------------------------------------------------------------------------------


def initial_weights(config: Config, folder: Path) -> None:
    """Write the weights that a run of this configuration draws, as a Hugging Face folder, if it is not there yet."""
    if folder.exists():
        return
    tokenizer = build_tokenizer(tokenizer_path(config))
    model = allocated(model_config(config, tokenizer), torch.float32, torch.device("cpu"))
    initialise(model, config.debug.seed)
    export(folder, config, model.config, tokenizer, gather(model), dtype="float32")


def train_peer(
    config: Config,
    folder: Path,
    build: Callable[[Path, torch.device], nn.Module],
    loss: Loss,
) -> None:
    """Train another model on a run's streams, from the run's initial weights.

    Args:
        build: Hugging Face folder and device → the model, float32.
        loss: the sum of a batch's cross-entropies.
    """
    device = own_device()
    t = config.training
    initial_weights(config, folder / "initial-hf")
    peer = Peer(config, build(folder / "initial-hf", device), loss, device)
    with (folder / METRICS).open("w", encoding="utf-8") as file:
        while peer.step < t.steps:
            line = timed_step(peer)
            print(json.dumps(line), file=file, flush=True)
            print(f"step {peer.step}/{t.steps}  loss {line['loss']:.4f}  grad {line['grad_norm']:.3g}")


def timed_step(peer: Peer) -> dict[str, float]:
    """Do a step; its line of metrics.jsonl."""
    config, t = peer.config, peer.config.training
    then = time.perf_counter()
    numbers = peer.train_step().wait()
    seconds = time.perf_counter() - then
    documents, peer.documents = peer.documents, []
    line = {
        "step": peer.step,
        "loss": numbers.loss,
        "grad_norm": numbers.grad_norm,
        "lr": rate_at(config, peer.step),
        "tokens": peer.step * t.global_batch_size * t.seq_len,
        "tokens_per_second": t.global_batch_size * t.seq_len / seconds,
        "memory_gib": peak_memory_gib(),
        **clock_and_power(peer.device),
    }
    if peak := peak_tflops(config, peer.device):
        model = model_config(config, build_tokenizer(tokenizer_path(config)))
        line["mfu"] = sum(training_flops(model, each) for each in documents) / seconds / 1e12 / peak
    return line


def train_fla(args: argparse.Namespace, keys: list[str]) -> None:
    config = load_config(keys)
    check_config(config, 1)
    model = model_config(config, build_tokenizer(tokenizer_path(config)))
    if not fla_has(model):
        raise ValueError(f"model.name = {config.model.name!r} is none of FLA's; use kda or gdn")
    if hf_weights(config) or config.checkpoint.initial_load_path:
        raise ValueError("checkpoint.initial_load_path is set; leave it out: both models begin from drawn weights")

    def build(weights: Path, device: torch.device) -> nn.Module:
        return fla_model(
            model,
            device,
            weights=weights,
            compiled=args.compiled,
            checkpointing=config.activation_checkpoint.mode == "full",
        )

    train_peer(config, args.folder, build, fla_loss)


# --- Curves ----------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> dict[int, dict[str, float]]:
    """step → its numbers in a run's folder, those of a validation after it included."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        numbers = json.loads(line)
        steps[numbers["step"]].update(numbers)
    return steps


def distinct_names(folders: list[Path]) -> list[str]:
    """The last part of each of two paths, or as many as tell them apart."""
    paths = [folder.absolute().parts for folder in folders]
    for n in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-n:]) for parts in paths]
        if names[0] != names[1]:
            return names
    raise ValueError(f"--add: both runs are {folders[0]}; give two")


def write_pair(path: Path, folders: list[Path]) -> None:
    """The numbers of two runs' common steps, in columns "RUN NUMBER" named after their folders."""
    names = distinct_names(folders)
    runs = list(map(read_run, folders))
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *(f"{name} {number}" for name in names for number in NUMBERS)])
        for step in sorted(runs[0].keys() & runs[1]):
            values = [run[step].get(number) for run in runs for number in NUMBERS]
            rows.writerow([step, *("" if value is None else f"{value:.6g}" for value in values)])


def read_pair(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Run → number → step → value, where there is one."""
    runs: dict[str, dict[str, dict[int, float]]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for column in list(rows[0])[1:]:
        run, number = column.rsplit(" ", 1)
        runs[run][number] = {int(row["step"]): float(row[column]) for row in rows if row[column]}
    return runs


def summary(number: str, values: list[float]) -> float:
    if number == "loss":
        return mean(values[-LAST:])
    return values[-1] if number == "validation_loss" else median(values)


def table_of(paths: list[Path]) -> str:
    """A row for each run of these pairs."""
    headings = [heading for heading, _ in NUMBERS.values()]
    rows = []
    for run, numbers in (item for path in paths for item in read_pair(path).items()):
        summaries = {number: summary(number, list(values.values())) for number, values in numbers.items() if values}
        cells = [format(summaries[key], form) if key in summaries else "–" for key, (_, form) in NUMBERS.items()]
        rows.append([run, *cells])
    return table(["run", *headings], rows)


def compare(path: Path) -> str:
    """A line about a pair's ends."""
    first, second = (summary("loss", list(numbers["loss"].values())) for numbers in read_pair(path).values())
    return f"{path.stem}: the mean losses of the last {LAST} steps differ by {abs(first / second - 1):.2%}"


def draw(folder: Path) -> None:
    """Draw every pair of the folder into loss.svg."""
    from matplotlib.figure import Figure  # an extra

    paths = sorted(folder.glob("*.csv"))
    figure = Figure(figsize=(4.5 * len(paths), 3.5), layout="constrained")
    for path, axes in zip(paths, figure.subplots(1, len(paths), sharey=True, squeeze=False)[0], strict=True):
        for (name, numbers), style in zip(read_pair(path).items(), ("-", "--"), strict=True):
            losses = numbers["loss"]
            axes.plot(list(losses), list(losses.values()), style, linewidth=1, label=name)
        axes.set(title=path.stem, xlabel="step", ylabel="loss, nats per token")
        axes.legend()
    figure.savefig(folder / "loss.svg", metadata={"Date": None})


def draw_results(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.add:
        name, *runs = args.add
        write_pair(args.folder / f"{name}.csv", list(map(Path, runs)))
    draw(args.folder)
    paths = sorted(args.folder.glob("*.csv"))
    print(table_of(paths), *map(compare, paths), sep="\n")


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("python -m tools.reference_run", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fla = commands.add_parser("fla", help="train FLA's model; the run's keys follow after --")
    fla.add_argument("folder", type=Path, help="where metrics go")
    fla.add_argument("--compiled", action="store_true", help="compile each layer")
    drawing = commands.add_parser("draw", help="draw and compare pairs of curves")
    drawing.add_argument("folder", type=Path, help="folder of the pairs' data")
    drawing.add_argument("--add", nargs=3, metavar=("NAME", "RUN", "RUN"), help="first copy a pair from two runs")
    return parser.parse_args(argv)


@refusing
def main(argv: list[str]) -> int:
    arguments, keys = split_keys(argv)
    args = parse(arguments)
    if args.command == "fla":
        train_fla(args, keys)
    else:
        draw_results(args)
    return 0


if __name__ == "__main__":
    run_command(main)
