"""A run beside the same model elsewhere: the same initial weights, streams, optimizer and schedule; two curves.

    export CONFIG_FILE=train_configs/reference_340m.toml
    ./run_train.sh --model.name kda --job.dump_folder outputs/kda                               # ours
    python -m tools.reference_run fla outputs/kda_fla -- --job.config_file $CONFIG_FILE --model.name kda
    python -m tools.reference_run compare outputs/kda outputs/kda_fla
    titan-linear report outputs/kda outputs/kda_fla --html kda.html

`fla` trains FLA's own model (kda, gdn) from our initial weights as its users do, in one process on one device, and
writes config.toml and metrics.jsonl as a run does. AdamW and its parameter groups, the learning rate and clipping are
the run's; parameters are float32, autocast computes in the run's type. `compare` says how far apart the losses of any
two runs end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from titan_linear.commands import command_parser
from titan_linear.config import Config, Training, check_config, config_to_toml, load_config
from titan_linear.data import IGNORE, Batch, build_tokenizer
from titan_linear.distributed.one_process import LocalDims
from titan_linear.distributed.process import own_device, refusing, run_command
from titan_linear.hooks.report import clock_and_power, peak_memory_gib
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.ops.layout.tables import to_device
from titan_linear.run.build import DTYPES, allocated, rate_at
from titan_linear.run.data import RunData
from titan_linear.run.export import export
from titan_linear.run.origin import Origin
from titan_linear.run.start import build_loader
from titan_linear.step.flops import peak_tflops, training_flops
from titan_linear.step.optimizer import HostCopy, StepNumbers, build_optimizer
from titan_linear.storage.hf_writing import find_family, gather
from titan_linear.storage.rundir import CONFIG, METRICS, json_lines
from tools.harness import split_keys

# FLA's, among the families that we export
FAMILIES = ("KDAForCausalLM", "GatedDeltaNetForCausalLM", "RWKV7ForCausalLM")
LAST = 50  # steps at a curve's end of which the means are compared
Loss = Callable[[nn.Module, Batch], Tensor]  # the sum of a batch's cross-entropies


# --- FLA's model -----------------------------------------------------------------------------------------------------


def fla_model(
    model: ModelConfig,
    weights: Path,
    device: torch.device,
    *,
    compiled: bool,
    checkpointing: bool,
) -> nn.Module:
    """FLA's model of this configuration, float32, ready to train.

    Args:
        weights: a Hugging Face folder.
        compiled: torch.compile each layer, the embedding and the last norm, as flame does.
    """
    import fla.models as peers

    kind = getattr(peers, find_family(model))
    network = kind.from_pretrained(weights, dtype=torch.float32)
    network = network.to(device).train()
    if checkpointing:
        network.gradient_checkpointing_enable()
    if compiled:
        for part in (network.model.embeddings, *network.model.layers, network.model.norm):
            part.compile()
    return network


def fla_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of a batch's cross-entropies, by FLA's fused head and loss, which keeps no logits."""
    from fla.modules import FusedLinearCrossEntropyLoss

    tokens = batch.tokens
    labels = batch.labels
    packed = {}
    if len(batch.cu_seqlens) == batch.num_streams + 1:  # one document a stream: a row of its own
        tokens, labels = (x.view(batch.num_streams, -1) for x in (tokens, labels))
    else:
        packed["cu_seqlens"] = batch.cu_seqlens
    hidden = model.model(input_ids=tokens, **packed)[0]
    criterion = FusedLinearCrossEntropyLoss(reduction="sum")
    return criterion(hidden, labels, model.lm_head.weight)


def train_fla(args: argparse.Namespace, keys: list[str]) -> None:
    # Refuse what FLA cannot train, or not from the same weights.
    config = load_config(keys)
    check_config(config, 1)
    model = Origin.of(config).model
    if find_family(model) not in FAMILIES:
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


# --- Training another model ------------------------------------------------------------------------------------------


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
    """
    device = own_device()
    t = config.training
    origin = Origin.of(config)
    initial_weights(config, folder / "initial-hf")
    (folder / CONFIG).write_text(config_to_toml(config), encoding="utf-8")
    model = build(folder / "initial-hf", device)
    streams, _ = RunData(config, build_tokenizer(origin.tokenizer_path)).streams(None)
    loader = iter(build_loader(config, streams, LocalDims()))
    optimizer = torch.optim.AdamW(build_optimizer(model, config.optimizer).param_groups)
    peak = peak_tflops(config.metrics.peak_tflops, t.mixed_precision_param, device)
    tokens = t.global_batch_size * t.seq_len
    with (folder / METRICS).open("w", encoding="utf-8") as file:
        for step in range(1, t.steps + 1):
            # The seconds include the device's work.
            begin = time.perf_counter()
            batches = list(islice(loader, t.global_batch_size // t.local_batch_size))
            documents = [Documents.of(batch.cu_seqlens.numpy()) for batch in batches]
            lr = rate_at(config, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            numbers = train_step(model, loss, batches, optimizer, t, device).wait()
            seconds = time.perf_counter() - begin
            line = {
                "step": step,
                "loss": numbers.loss,
                "grad_norm": numbers.grad_norm,
                "lr": lr,
                "tokens": step * tokens,
                "tokens_per_second": tokens / seconds,
                "memory_gib": peak_memory_gib(),
                **clock_and_power(device),
            }
            if peak:
                work = training_flops(origin.model, Documents(*map(sum, zip(*documents))))
                line["mfu"] = work / seconds / 1e12 / peak
            print(json.dumps(line), file=file, flush=True)
            said = f"loss {numbers.loss:.4f}  grad {numbers.grad_norm:.3g}"
            print(f"step {step}/{t.steps}  {said}")


def train_step(
    model: nn.Module,
    loss: Loss,
    batches: list[Batch],
    optimizer: torch.optim.Optimizer,
    t: Training,
    device: torch.device,
) -> HostCopy:
    """Do a step; its loss (nats per token) and gradient norm are on their way to the host, which has not waited."""
    valid = sum(int((batch.labels != IGNORE).sum()) for batch in batches)
    dtype = DTYPES[t.mixed_precision_param]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            # The host does not wait for the copy.
            mean_loss = loss(model, to_device(batch, device)) / valid
        mean_loss.backward()
        total += mean_loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), t.max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return HostCopy(StepNumbers(total, norm.double(), signal=torch.zeros_like(total)))


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
