"""Runs jobs side by side: each as soon as what it needs is there and a GPU has room for it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.harness import ROOT

LIMIT = 540.0  # seconds of one command
POLL = 0.01


class Failed(Exception):
    """A job has failed; the message says why."""


class Figure(NamedTuple):
    text: str
    tokens_per_second: float = 0.0  # of a job that measures a rate


Check = Callable[[list[str]], Figure]  # outputs of a job's commands → figure; raises Failed


def last_line(outputs: list[str]) -> Figure:
    """A command that ends with 0 states what it has done in its last line."""
    line = outputs[-1].strip().rpartition("\n")[2]
    return Figure(line.strip("| ").replace(" | ", ", "))


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a job's first command and its workers, after a save and some steps that follow it.

    Args:
        save: file that appears when the save is complete.
        metrics: file with a line for each step; a copy is made after the kill.
        steps: lines that it must have.
        copy: where the copy goes.
    """

    save: Path
    metrics: Path
    steps: int
    copy: Path

    def is_due(self) -> bool:
        if not self.save.exists():
            return False
        return self.metrics.read_text(encoding="utf-8").count("\n") >= self.steps


@dataclass(frozen=True)
class Job:
    """A line of the proof: commands that run one after the other, and what must hold after them.

    Args:
        commands: arguments of `python -m`; "@" stands for the folder of all files.
        check: called with what each command printed.
        part: the half of the proof, 1 or 2, that has this job.
        needs: names of jobs before it whose output it reads.
        gpus: number of GPUs that its commands use.
        processes: NGPU of its commands; 0: one for each GPU, two on the CPU.
        gib: memory that it takes of each of its GPUs.
        share: of the time of each of its GPUs. Kernels of several processes take turns on a GPU, so that
            a job with many small kernels waits long for the others.
        alone: nothing but such jobs runs meanwhile.
        kill: when the first command is killed.
    """

    name: str
    about: str
    commands: list[str]
    check: Check = last_line
    part: int = 1
    needs: tuple[str, ...] = ()
    gpus: int = 1
    processes: int = 0
    gib: float = 8.0
    share: float = 0.2
    alone: bool = False
    kill: Kill | None = None


@dataclass
class Room:
    """What is left of a GPU."""

    gib: float
    share: float = 1.0

    def fits(self, job: Job) -> bool:
        return self.gib >= job.gib and self.share >= job.share

    def take(self, job: Job, times: int = 1) -> None:
        """Take a job's part, or return it with times = -1."""
        self.gib -= times * job.gib
        self.share = round(self.share - times * job.share, 3)


class Result(NamedTuple):
    job: Job
    passed: bool
    figure: Figure
    seconds: float = 0.0
    log: str = ""


# --- Scheduling ------------------------------------------------------------------------------------------------------


def run_jobs(jobs: list[Job], runner: Runner, free: list[Room], at_once: int) -> Iterator[Result]:
    """Yield each job's result as it ends. Jobs that run alone come last.

    Args:
        free: the room on each GPU; without GPUs everything has room.
        at_once: the most jobs that run side by side.
    """
    waiting = list(jobs)
    running: dict[Future[Result], tuple[Job, list[int]]] = {}
    passed: dict[str, bool] = {}
    # The runner is closed first, so that no thread of the pool waits for a process.
    with ThreadPoolExecutor(at_once) as pool, closing(runner):
        while waiting or running:
            # Start what can start, and fail what needs something that has failed.
            for job in list(waiting):
                lost = [need for need in job.needs if not passed.get(need, True)]
                others = [*waiting, *(other for other, _ in running.values())]
                disturbed = job.alone and not all(other.alone for other in others)
                ready = all(need in passed for need in job.needs) and not disturbed
                emptiest = sorted(range(len(free)), key=lambda gpu: -free[gpu].share)
                fitting = [gpu for gpu in emptiest if free[gpu].fits(job)]
                gpus = fitting[: job.gpus]
                has_room = len(gpus) == min(job.gpus, len(free)) and len(running) < at_once
                if lost:
                    waiting.remove(job)
                    passed[job.name] = False
                    yield Result(job, False, Figure(f"not run: it needs {lost[0]}"))
                elif ready and has_room:
                    waiting.remove(job)
                    for gpu in gpus:
                        free[gpu].take(job)
                    running[pool.submit(runner.run, job, gpus)] = job, gpus

            # Wait for the next end. Nothing is running if the last jobs have failed above.
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                job, gpus = running.pop(future)
                for gpu in gpus:
                    free[gpu].take(job, -1)
                result = future.result()
                passed[job.name] = result.passed
                yield result


# --- Processes -------------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Runs the commands of jobs.

    Args:
        folder: of all files, and of caches that begin empty.
        visible: the names of the GPUs, as CUDA_VISIBLE_DEVICES has them.
        alive: process ids of commands.
    """

    folder: Path
    visible: list[str]
    alive: set[int] = field(default_factory=set)

    def run(self, job: Job, gpus: list[int]) -> Result:
        begun = time.monotonic()
        outputs: list[str] = []
        log = ""
        passed = True
        try:
            for n, command in enumerate(job.commands):
                argv = shlex.split(command.replace("@", f"{self.folder}/"))
                file = self.folder / f"{job.name}.{n}.log"
                process = self.start(argv, self.environment(job, gpus), file)
                try:
                    self._until_end(process, None if n else job.kill)
                finally:
                    outputs.append(file.read_text(errors="replace"))
                    log += f"$ python -m {shlex.join(argv)}\n{outputs[-1]}\n"
            figure = job.check(outputs)
        except Failed as failed:
            figure = Figure(str(failed))
            passed = False
        figure = figure._replace(text=figure.text.replace(f"{self.folder}/", "@"))
        return Result(job, passed, figure, time.monotonic() - begun, log)

    def close(self) -> None:
        """Kill what still runs."""
        for pid in list(self.alive):
            kill(pid)

    def start(self, argv: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
        """Start `python -m *argv` in a session of its own."""
        with log.open("w") as file:
            return subprocess.Popen(
                [sys.executable, "-m", *argv],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def environment(self, job: Job, gpus: list[int]) -> dict[str, str]:
        caches = self.folder / "caches"
        return {
            **os.environ,
            "NGPU": str(job.processes or len(gpus) or 2),
            "CUDA_VISIBLE_DEVICES": ",".join(self.visible[gpu] for gpu in sorted(gpus)),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(self.folder),  # what is killed leaves files there
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            # Several processes share the machine's cores.
            "OMP_NUM_THREADS": "2",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "XDG_CACHE_HOME": str(caches),
        }

    def _until_end(self, process: subprocess.Popen, at: Kill | None) -> None:
        """Wait for a command's end, or kill it when that is due.

        Raises:
            Failed: it does not end with 0, or ends before it is killed.
        """
        self.alive.add(process.pid)
        deadline = time.monotonic() + LIMIT
        killed = False
        try:
            while process.poll() is None and not killed:
                if time.monotonic() > deadline:
                    raise Failed(f"a command did not end in {LIMIT:.0f} s")
                time.sleep(POLL)
                killed = at is not None and at.is_due()
        finally:
            if process.poll() is None:
                kill(process.pid)
            process.wait()
            self.alive.discard(process.pid)
        if killed:
            shutil.copyfile(at.metrics, at.copy)
            return
        if at:
            raise Failed(f"it ended with {process.returncode} before it could be killed")
        if process.returncode:
            raise Failed(f"exit code {process.returncode}")


def kill(pid: int) -> None:
    """SIGKILL to a process and its workers, which have sessions of their own; wait until the workers are gone."""
    workers = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            workers += map(int, file.read_text().split())
    for each in (pid, *workers):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    while not all(map(gone, workers)):
        time.sleep(POLL)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
