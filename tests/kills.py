"""A tiny run is killed at random moments and resumed until it ends. (Flipped bits are in test_checkpoint.py.)

    python -m tests.kills              # 40 kills
    python -m tests.kills 100 7        # 100, by another seed
    python -m tests.kills 10 0 adapters

SIGKILL comes to the launcher, to a worker, or to all at once, while they start, compute or save. When a run ends,
its losses must be those of one that nobody killed, to the last digit; then the next begins. A run of adapters, in
float64, resumes under one of several splits, by chance, and its losses are equal within what these differ by.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.processes import children, gone, until
from tests.records import read_lines

STEPS = 100
KEYS = {
    "model.name": "kda",
    "model.num_layers": 1,
    "training.dataset": "text",
    "training.seq_len": 64,
    "training.global_batch_size": 2,
    "training.steps": STEPS,
    "checkpoint.interval": 2,
    "checkpoint.async_mode": "async",
    "checkpoint.keep_latest_k": 2,
    "validation.enable": "false",
    "metrics.log_freq": 1,
}
ADAPTERS = {
    "model.name": "qwen3.5",
    "training.dtype": "float64",
    "adapter.enable": "true",
    "adapter.rank": 3,
    "adapter.train_extra": '["*norm"]',
    "training.steps": 40,
}
SPLITS = {
    "dp 2": {},
    "cp 2": {"parallelism.context_parallel_degree": 2},
    "tp 2": {"parallelism.tensor_parallel_degree": 2},
    "ep 2": {"parallelism.expert_parallel_degree": 2},
}


def start(folder: Path, keys: dict[str, object]) -> subprocess.Popen:
    keys = KEYS | {"training.dataset_path": folder.parent / "texts"} | keys
    argv = [f"--{key}={value}" for key, value in keys.items()]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "titan_linear.run.launch",
            f"--job.dump_folder={folder / 'run'}",
            *argv,
        ],
        env=os.environ
        | {"NGPU": "2", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder.parent / "cache")},
        stdout=(folder / "output").open("a"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def outcome(folder: Path) -> tuple[dict[int, float], str]:
    """The losses of a run that has ended, and all that it said."""
    lines = read_lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), folder
    return {line["step"]: line["loss"] for line in lines}, (folder / "output").read_text()


def lives_on(run: subprocess.Popen, folder: Path, rng: random.Random) -> bool:
    """Whether a run is still there some steps later, or in one of four cases, some time after its start."""
    metrics = folder / "run" / "metrics.jsonl"
    wanted = rng.randint(1, 8) + (metrics.read_text().count("\n") if metrics.exists() else 0)
    deadline = time.monotonic() + rng.choice([rng.uniform(0, 10), 600, 600, 600])
    while run.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= wanted:
            time.sleep(rng.uniform(0, 0.2))
            break
        time.sleep(0.01)
    return run.poll() is None


def kill(launcher: subprocess.Popen, rng: random.Random) -> str:
    """SIGKILL to some of a run's processes, and wait for the others to follow."""
    workers = children(launcher.pid)
    whom = rng.choice(["launcher", "all", *["worker"] * bool(workers)])
    chosen = {
        "launcher": [launcher.pid],
        "all": [launcher.pid, *workers],
        "worker": workers and [rng.choice(workers)],
    }
    for pid in chosen[whom]:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
    until(lambda: all(map(gone, workers)))
    return whom


def main(kills: int, seed: int, adapters: bool) -> int:
    rng, done, ended = random.Random(seed), [], 0
    keys, splits, error = (ADAPTERS, [*SPLITS.values()], 1e-9) if adapters else ({}, [{}], 0.0)
    with tempfile.TemporaryDirectory() as place:
        Path(place, "texts").write_text("".join(rng.choices("aabcdefgh \n", k=20_000)))
        whole = Path(place, "whole")
        whole.mkdir()
        assert start(whole, keys).wait() == 0, (whole / "output").read_text()
        expected, _ = outcome(whole)
        while len(done) < kills:
            folder = Path(place, str(ended))
            folder.mkdir()
            run = start(folder, keys | rng.choice(splits))
            while len(done) < kills and lives_on(run, folder, rng):
                done.append(kill(run, rng))
                run = start(folder, keys | rng.choice(splits))
            assert run.wait() == 0, (folder / "output").read_text()
            losses, said = outcome(folder)
            assert losses.keys() == expected.keys(), folder
            off = [
                step
                for step in expected
                if not abs(losses[step] - expected[step]) <= error * expected[step]
            ]
            assert not off, off
            ended += 1
            resumed = said.count("resuming from step")
            print(
                f"run {ended}: equal, resumed {resumed} times; {len(done)} kills so far", flush=True
            )
        print(
            f"{ended} runs, killed {len(done)} times ({dict(Counter(done))}): all equal", flush=True
        )
    return 0


if __name__ == "__main__":
    given = [int(x) for x in sys.argv[1:] if x.isdigit()]
    sys.exit(main(*[*given, *(40, 0)[len(given) :]], adapters="adapters" in sys.argv))
