"""A run beside the same model elsewhere: the same initial weights, streams, optimizer and schedule; two curves.

    export CONFIG_FILE=train_configs/reference_340m.toml
    ./run_train.sh --model.name kda --job.dump_folder outputs/kda                               # ours
    python -m tools.reference_run fla outputs/kda_fla -- --job.config_file $CONFIG_FILE --model.name kda
    python -m tools.reference_run compare outputs/kda outputs/kda_fla
    titan-linear report outputs/kda outputs/kda_fla --html kda.html

`fla` trains FLA's own model (kda, gdn) from our initial weights as its users do (tools/peers.py), on one GPU, and
writes config.toml and metrics.jsonl as a run does; `compare` says how far apart the losses of any two runs end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from titan_linear.commands import command_parser
from titan_linear.config import Config, check_config, config_to_toml, load_config
from titan_linear.distributed.process import own_device, refusing, run_command
from titan_linear.hooks.report import clock_and_power, peak_memory_gib
from titan_linear.run.build import allocated, rate_at
from titan_linear.run.export import export
from titan_linear.run.origin import Origin
from titan_linear.step.flops import peak_tflops, training_flops
from titan_linear.storage.hf_writing import gather
from titan_linear.storage.rundir import CONFIG, METRICS, json_lines
from tools.harness import split_keys
from tools.peers import Loss, Peer, fla_has, fla_loss, fla_model

LAST = 50  # steps at a curve's end of which the means are compared

# --- The other model -------------------------------------------------------------------------------------------------


def initial_weights(config: Config, folder: Path) -> None:
    """Write the weights that a run of this configuration draws, as a Hugging Face folder, if it is not there yet."""
    if folder.exists():
        return
    origin = Origin.of(config)
    model = allocated(origin.model, torch.float32, torch.device("cpu"))
    origin.load(model)
    export(folder, origin, gather(model), dtype="float32")


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
    (folder / CONFIG).write_text(config_to_toml(config), encoding="utf-8")
    peer = Peer(config, build(folder / "initial-hf", device), loss, device)
    with (folder / METRICS).open("w", encoding="utf-8") as file:
        while peer.done < t.steps:
            line = timed_step(peer)
            print(json.dumps(line), file=file, flush=True)
            loss = line["loss"]
            norm = line["grad_norm"]
            print(f"step {peer.done}/{t.steps}  loss {loss:.4f}  grad {norm:.3g}")


def timed_step(peer: Peer) -> dict[str, float]:
    """Do a step; its line of metrics.jsonl."""
    config = peer.config
    t = peer.config.training
    # The device's work is included.
    then = time.perf_counter()
    numbers = peer.train_step().wait()
    seconds = time.perf_counter() - then
    tokens = t.global_batch_size * t.seq_len
    line = {
        "step": peer.done,
        "loss": numbers.loss,
        "grad_norm": numbers.grad_norm,
        "lr": rate_at(config, peer.done),
        "tokens": peer.done * tokens,
        "tokens_per_second": tokens / seconds,
        "memory_gib": peak_memory_gib(),
        **clock_and_power(peer.device),
    }
    if peak := peak_tflops(config.metrics.peak_tflops, t.mixed_precision_param, peer.device):
        model = Origin.of(config).model
        line["mfu"] = training_flops(model, peer.documents) / seconds / 1e12 / peak
    return line


def train_fla(args: argparse.Namespace, keys: list[str]) -> None:
    # Refuse what FLA cannot train, or not from the same weights.
    config = load_config(keys)
    check_config(config, 1)
    model = Origin.of(config).model
    if not fla_has(model):
        raise ValueError(f"model.name = {config.model.name!r} is none of FLA's; use kda or gdn")
    if config.checkpoint.initial_load_path:
        raise ValueError(
            "checkpoint.initial_load_path is set; leave it out: both models begin from drawn weights"
        )

    build = partial(
        fla_model,
        model,
        compiled=args.compiled,
        checkpointing=config.activation_checkpoint.mode == "full",
    )
    train_peer(config, args.folder, build, fla_loss)


# --- Curves ----------------------------------------------------------------------------------------------------------


def compared(runs: list[Path]) -> str:
    """How far apart two runs end, by the steps that both have."""
    # Losses of each run by step.
    losses: list[dict[float, float]] = []
    for run in runs:
        lines = json_lines(run / METRICS, dict[str, float])
        losses.append({line["step"]: line["loss"] for line in lines if "loss" in line})
    steps = sorted(losses[0].keys() & losses[1])[-LAST:]
    ours = mean(losses[0][step] for step in steps)
    theirs = mean(losses[1][step] for step in steps)
    apart = abs(ours / theirs - 1)
    return f"mean losses of the last {len(steps)} steps: {ours:.4f} and {theirs:.4f}, {apart:.2%} apart"


# --- The command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("python -m tools.reference_run", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fla = commands.add_parser("fla", help="train FLA's model; the run's keys follow after --")
    fla.add_argument("folder", type=Path, help="where metrics go")
    fla.add_argument("--compiled", action="store_true", help="compile each layer")
    comparison = commands.add_parser("compare", help="how far apart two runs' losses end")
    comparison.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folder of a run")
    return parser.parse_args(argv)


@refusing
def main(argv: list[str]) -> int:
    arguments, keys = split_keys(argv)
    args = parse(arguments)
    if args.command == "fla":
        train_fla(args, keys)
    else:
        print(compared(args.runs))
    return 0


if __name__ == "__main__":
    run_command(main)
