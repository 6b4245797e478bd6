"""Prove a run before it costs a week, with its own model, tokenizer, corpus and parallelism (docs/proof.md).

python -m tools.doctor --job.config_file my.toml
python -m tools.doctor --job.config_file my.toml --training.seq_len 32768 --parallelism.context_parallel_degree 8

Keys are those of run_train.sh. It prints a line for each thing it proves, with a figure and its bound, and exits with 0
only if all hold. It runs on one GPU or the CPU, with all ranks in one process; under torchrun the run's own processes
compute a step, too. It writes nothing into the run's folder.
"""

from __future__ import annotations

from titan_linear.distributed.process import run_command
from titan_linear.proof.doctor import main

if __name__ == "__main__":
    run_command(main)
