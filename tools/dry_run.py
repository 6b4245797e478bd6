"""Memory per GPU of a run, without a GPU: the model is built on the meta device, where nothing is allocated.

python -m tools.dry_run --gpus 8 64 -- --model.name kda --model.flavor 1.3B --training.seq_len 32768
python -m tools.dry_run --gpus 8 64 -- --model.flavor hf --model.hf_assets_path Qwen3-Next-80B-A3B \
    --training.seq_len 131072 --parallelism.context_parallel_degree 8 --activation_checkpoint.mode full

python -m tools.dry_run --gpus 8 -- --job.config_file train_configs/hybrid_1_3b_128k.toml

What follows `--` is the run, as for run_train.sh. Its types are those that it has on GPUs; neither its corpus nor its
tokenizer has to be there (without the latter a preset has its own vocabulary). The report is of the GPU that holds
most, in GiB:

    parameters, gradients, optimizer, gathered, activations, head    (titan_linear/memory.py explains each)

It leaves out workspaces of kernels and of NCCL, and fragmentation; keep a tenth of the GPU free.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from titan_linear.build import model_config, model_without_tokenizer, tokenizer_path, unallocated
from titan_linear.config import Config, load_config
from titan_linear.data import build_tokenizer
from titan_linear.memory import GIB, PARTS, memory
from titan_linear.models.config import ModelConfig
from titan_linear.preflight import check_expert_parallel, check_tensor_parallel


def main(argv: list[str]) -> int:
    own, run = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="python -m tools.dry_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[8], help="numbers of GPUs (default: 8)")
    args = parser.parse_args(own)
    try:
        config = load_config(run, cuda=True)
        model = planned_model(config)
        if min(args.gpus) < 1:
            raise ValueError(f"--gpus {min(args.gpus)} must be 1 or more")
        check_tensor_parallel(model, config)
        check_expert_parallel(model, config)
        reports = {gpus: memory(config, model, gpus) for gpus in args.gpus}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(config, model), "", table(reports), sep="\n")
    return 0


def planned_model(config: Config) -> ModelConfig:
    """The run's model; without its tokenizer's file, as if every vocabulary were large enough."""
    path = tokenizer_path(config)
    if path and not Path(path).expanduser().exists():
        model = model_without_tokenizer(config)
        print(f"model.tokenizer_path = {path!r} is not here: a vocabulary of {model.vocab_size} is assumed")
        return model
    return model_config(config, build_tokenizer(path))


def describe(config: Config, model: ModelConfig) -> str:
    built = unallocated(model, torch.float32)
    total = sum(p.numel() for p in built.parameters())
    t, p = config.training, config.parallelism
    sharers = p.context_parallel_degree * p.tensor_parallel_degree
    return (
        f"{config.model.name}/{config.model.flavor}: {total:,} parameters, {model.num_layers} layers\n"
        f"{t.local_batch_size} x {t.seq_len} tokens in a micro-step on {sharers} GPU{'s' if sharers > 1 else ''}; "
        f"parameters {t.dtype}, compute {t.mixed_precision_param}, reductions {t.mixed_precision_reduce}; activation "
        f"checkpointing {config.activation_checkpoint.mode}"
    )


def table(reports: dict[int, dict[str, float]]) -> str:
    """A row for each number of GPUs, GiB."""
    lines = ["| GPUs | " + " | ".join((*PARTS, "sum")) + " |", "|---" * (len(PARTS) + 2) + "|"]
    for gpus, parts in reports.items():
        cells = [f"{value / GIB:.2f}" for value in (*(parts[name] for name in PARTS), sum(parts.values()))]
        lines.append(f"| {gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
