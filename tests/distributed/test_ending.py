"""A rank that fails is heard at once, and no rank outlives it by long, wherever it fails.

On the CPU, what NCCL does is put in: `destroy_process_group` never returns, and the other rank waits for ever for the
one that is gone. The test is what torchrun is to the ranks: it has their store, and sends SIGTERM to what is left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.failing import (
    CODES,
    DELAY,
    FAULT,
    KEYS,
    PLACES,
    RANK_0,
    fail_at,
    says,
    wait_as_nccl_does,
)
from tests.launches import FORKSERVER
from tests.processes import stay
from tests.training import arguments
from titan_linear import train
from titan_linear.config import load_config
from titan_linear.distributed.process import LOST
from titan_linear.run.preflight import preflight

ROOT = Path(__file__).parents[2]
# seconds, on GPUs; on the CPU, which may be busy, a rank that is not told never ends
HEARD, ENDED = 5.0, 15.0
RUN = {
    "model.name": "kda",
    "training.local_batch_size": 2,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
}
TIMEOUT = float(KEYS["hang"]["comm.train_timeout_seconds"])  # after which a hang is to be heard


def rank_of_a_run(place, argv, output, environment):
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    fail_at(place, int(environment["RANK"]))
    dist.destroy_process_group = lambda *_: stay()
    if place != "hang":
        wait_as_nccl_does()
    sys.exit(train.main(argv))


@dataclass
class Seen:
    """What became of a run."""

    output: str
    codes: list[int]  # of each rank
    heard: float  # seconds from the fault to the line
    ended: float  # seconds from the fault to the end


def run(place, argv, folder):
    """The ranks of a run, as torchrun starts and ends them, but for the 30 seconds after which it kills."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    here = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
    }
    output, ranks = folder / "output", []
    output.touch()
    for rank in ("0", "1"):
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}"),
        }
        ranks.append(
            FORKSERVER.Process(
                target=rank_of_a_run, args=(place, argv, output, here | own), daemon=True
            )
        )
        ranks[-1].start()
    try:
        return watch(place, ranks, output)
    finally:
        for rank in ranks:
            rank.kill()


def watch(place, ranks, output):
    told, heard = False, Heard(place, output)
    while any(rank.exitcode is None for rank in ranks):
        heard.look()
        if not told and any(rank.exitcode for rank in ranks):
            told = True
            for rank in ranks:
                if rank.exitcode is None:
                    os.kill(rank.pid, signal.SIGTERM)
    return heard.seen([rank.exitcode for rank in ranks])


class Heard:
    """Waits for the line that a place has to give, in a run's output."""

    def __init__(self, place, output):
        self.place, self.output, self.at = place, output, None

    def look(self):
        """Call it again and again while the run goes on."""
        time.sleep(0.05)
        if self.at is None and self._is_said():
            self.at = time.time()

    def _is_said(self):
        after = self.output.read_text().partition(FAULT)[2]
        return any(part in after for part in says(self.place))

    def seen(self, codes, timeout=TIMEOUT):
        ended, said = time.time(), self.output.read_text()
        after = said.partition(FAULT)[2]
        assert self._is_said(), said
        begun = float(after.split()[0]) + (timeout if self.place == "hang" else 0.0)
        return Seen(said, codes, (self.at or ended) - begun, ended - begun)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "compilation"])
def test_a_failing_rank_is_heard(place, corpus, tmp_path):
    argv = arguments(corpus, RUN, KEYS.get(place, {}), {"job.dump_folder": tmp_path / "run"})
    seen = run(place, argv, tmp_path)
    first = 0 if place in (*RANK_0, "sync save", "hang") else 1  # a failed save is told by rank 0
    assert seen.codes[first] == CODES.get(place, 1) and seen.codes[1 - first] in (
        LOST,
        -signal.SIGTERM,
    ), seen
    # what torchrun's summary shows
    assert place in ("SIGKILL", "hang") or (tmp_path / f"error-{first}").exists()
    if place == "while saving":
        assert (tmp_path / "run/checkpoint/step-2/manifest.json").exists() and seen.ended > DELAY


# --- On GPUs ---------------------------------------------------------------------------------------------------------

COMMANDS = {
    "launcher": ["-m", "titan_linear.run.launch"],
    "torchrun": [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "titan_linear.train",
    ],
}
ON_GPUS = {"comm.train_timeout_seconds": 20}  # kernels are compiled, of several runs at a time


def launched(place, how, corpus, folder):
    """A run of two processes, by a command of COMMANDS."""
    folder.mkdir()
    more = ON_GPUS if place == "hang" else {}
    argv = arguments(corpus, RUN, KEYS.get(place, {}), more, {"job.dump_folder": folder / "run"})
    path = os.pathsep.join(
        [str(ROOT / "tests/faults"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {"FAIL_AT": place, "PYTHONPATH": path, "NGPU": "2"}
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *COMMANDS[how], *argv],
            env=os.environ | environment,
            stdout=file,
            stderr=file,
        )
    heard = Heard(place, output)
    try:
        while process.poll() is None:
            heard.look()
    finally:
        process.kill()
    return heard.seen([process.returncode], float(ON_GPUS["comm.train_timeout_seconds"]))


def table(corpus, folder, processes):
    """All places by all commands; the rows, also written to the file that FAILURES names, that are not as they should
    be."""
    cases, wrong = list(product(PLACES, COMMANDS)), []
    with ThreadPoolExecutor(processes) as pool:
        started = {
            pool.submit(launched, *case, corpus, folder / "-".join(case)): case for case in cases
        }
        for run in as_completed(started):
            place, how = started[run]
            row = {"place": place, "command": how}
            if error := run.exception():
                row |= {"error": str(error)}
            else:
                seen = run.result()
                row |= {
                    "heard": round(seen.heard, 1),
                    "ended": round(seen.ended, 1),
                    "code": seen.codes[0],
                }
            if "error" in row or row["heard"] > HEARD or row["ended"] > ENDED or not row["code"]:
                wrong.append(row)
            print(json.dumps(row))
            if path := os.environ.get("FAILURES"):
                with open(path, "a") as file:
                    file.write(json.dumps(row) + "\n")
    return wrong


@pytest.mark.cuda(2, peers=True)
def test_failing_ranks_are_heard_on_gpus(corpus, tmp_path):
    preflight(load_config(arguments(corpus, RUN)), world_size=2)  # writes the token cache, once
    assert not table(corpus, tmp_path, processes=7)
