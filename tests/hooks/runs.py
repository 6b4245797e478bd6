"""Runs that telemetry watches."""

from tests.keys import argv_of


def arguments(folder, *overrides):
    parts = (
        f'{{name="{n}", weight=1, dataset="tokens", dataset_path="{folder / n}"}}' for n in "ab"
    )
    keys = {
        "training.mixture": f"[{', '.join(parts)}]",
        "training.seq_len": 64,
        "training.dtype": "float64",
        "training.global_batch_size": 4,
        "training.local_batch_size": 4,
        "training.loss_chunk_size": 48,
        "training.steps": 2,
        "lr_scheduler.warmup_steps": 0,
        "optimizer.lr": 3e-3,
        "model.flavor": "small",
        "checkpoint.enable": "false",
        "metrics.enable_tensorboard": "false",
        "metrics.telemetry_freq": 2,
        "job.dump_folder": folder / "run",
    }
    for more in overrides:
        keys |= more
    return argv_of(keys)
