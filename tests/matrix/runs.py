"""Running the rows of the matrix: several at once, each in processes, with a port, a folder and a time of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bpe import byte_bpe
from tests.matrix.rows import (
    EXTRAS,
    KILLED_AFTER,
    LAUNCHER,
    RANK,
    ROOT,
    SPLITS,
    STEPS,
    Row,
    Split,
    baseline_keys,
    compared_with,
    row_keys,
)
from tests.processes import children, gone
from tests.worlds import free_port
from titan_linear.commands.plan import planned_model
from titan_linear.config import KEYS, load_config, toml_value
from titan_linear.planner.memory import GIB, PlannedRank
from titan_linear.run.origin import Origin

TOLERANCE = 1e-3  # of a loss, in bfloat16
LIMIT = 300.0  # seconds of each start of a run
ROOM = 72.0  # GiB of a GPU, that runs may take
OWN, MORE = 3.0, 1.25  # GiB of CUDA and NCCL in a process, and times what is planned of the rest
AGAIN = ("compiled layers again", "recompile_limit")  # signs that layers compile again, or no more
TAIL = 25  # lines of the output of a failed run that are kept
REPORT = re.compile(r"^step \d+/\d+ +loss", re.MULTILINE)  # of a step, on the console
ONE_DOCUMENT, SHORT = 40_000, 400  # bytes of the documents of a corpus that has both


@dataclass
class Outcome:
    """What became of a row; a line of the results' file."""

    row: str
    variant: str
    commands: list[str] = field(default_factory=list)
    passed: bool = False
    why: str = ""
    seconds: float = 0.0
    # of each start, from the command on
    first_step_seconds: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    worst: float | None = None
    resumed_after: int | None = None
    graphs: dict[str, list[float]] = field(default_factory=dict)  # the compiler's numbers, by step
    tail: list[str] = field(default_factory=list)

    def compare(self, baseline: dict[str, float]) -> None:
        """Raise Failed if a step's loss is missing or is not the baseline's; likewise of validations, which this run
        may have had at fewer steps."""
        self.baseline = baseline
        if lacking := [step for step in map(str, range(1, STEPS + 1)) if step not in self.losses]:
            raise Failed(f"there is no loss of steps {', '.join(lacking)}")
        off = {step: abs(loss / baseline[step] - 1) for step, loss in self.losses.items()}
        self.worst = max(off.values())
        if wrong := [step for step in off if not off[step] < TOLERANCE]:
            pairs = ", ".join(f"{step}: {self.losses[step]} and {baseline[step]}" for step in wrong)
            raise Failed(f"losses differ from those of one process, uncompiled: {pairs}")


class Failed(Exception):
    """A row has failed; the message says why, `output` is that of its process."""

    def __init__(self, why: str, output: Path | None = None):
        super().__init__(why)
        self.output = output


class Gpus:
    """The GPUs' memory, shared out among the runs. count: 0 on the CPU."""

    def __init__(self, count: int):
        self.free = [ROOM] * count
        self.changed = threading.Condition()

    @contextmanager
    def taken(self, processes: int, gib: float) -> Iterator[list[int]]:
        """The emptiest GPUs, as soon as each has so much room: one for each process, or all that there are."""
        with self.changed:
            while not (chosen := self._with_room(processes, gib)) and self.free:
                self.changed.wait()
            for gpu in chosen:
                self.free[gpu] -= gib
        try:
            yield chosen
        finally:
            with self.changed:
                for gpu in chosen:
                    self.free[gpu] += gib
                self.changed.notify_all()

    def _with_room(self, processes: int, gib: float) -> list[int]:
        wanted = min(processes, len(self.free))
        emptiest = sorted(range(len(self.free)), key=lambda gpu: -self.free[gpu])[:wanted]
        return sorted(emptiest) if all(self.free[gpu] >= gib for gpu in emptiest) else []


class Matrix:
    """The rows' runs. Each row and what it is compared with begin when it is their turn.

    Args:
        folder: for everything that the runs write.
        gpus: their number; 0: on the CPU.
        jobs: number of runs at once.
        out: file that gets a line of JSON as each row ends.
        keys: of every run, beside those of its row.
    """

    def __init__(
        self,
        folder: Path,
        gpus: int,
        jobs: int,
        out: Path | None = None,
        keys: Mapping[str, object] = {},
    ):
        self.folder, self.out, self.keys = folder, out, dict(keys)
        self.gpus, self.pool = Gpus(gpus), ThreadPoolExecutor(jobs)
        self.baselines: dict[str, Future[dict[str, float]]] = {}
        self.running: set[int] = set()
        self.planning, self.writing = threading.Lock(), threading.Lock()
        kinds = ("documents", "pairs", "chats", "rollouts", "taught")
        names = (*(f"{kind}.jsonl" for kind in kinds), "tokenizer")
        self.texts = {name.removesuffix(".jsonl"): folder / name for name in names}
        write_documents(self.texts["documents"])
        write_pairs(self.texts["pairs"])
        write_chats(self.texts["chats"], self.texts["tokenizer"])
        write_columns(self.texts["rollouts"], self.texts["taught"])

    def submit(self, row: Row) -> Future[Outcome]:
        run = compared_with(row)
        if run not in self.baselines:
            self.baselines[run] = self.pool.submit(
                self._baseline, row, f"baseline-{len(self.baselines)}"
            )
        return self.pool.submit(self._run, row, self.baselines[run])

    def close(self) -> None:
        """End what still runs."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for pid in list(self.running):
            end(pid)
        self.pool.shutdown()

    def _baseline(self, row: Row, name: str) -> dict[str, float]:
        """Losses of the row's model, uncompiled, in one process."""
        with self._started(
            name, row, baseline_keys(row) | {"validation.freq": 2}, SPLITS["one"]
        ) as start:
            start.finish(0)
        return losses(start.folder)

    @contextmanager
    def _started(
        self,
        name: str,
        row: Row,
        keys: Mapping[str, object],
        split: Split,
        outcome: Outcome | None = None,
    ) -> Iterator[Start]:
        """A start of a run, as soon as there is room for it, which it has until the end."""
        argv = self.arguments(name, row, keys)
        with self.gpus.taken(split.processes, self.gib(argv, split.processes)) as gpus:
            yield Start(self, name, row, argv, split.processes, gpus, outcome)

    def arguments(self, name: str, row: Row, keys: Mapping[str, object]) -> list[str]:
        """The command line of a run."""
        argv = [f"--job.config_file={ROOT / row.variant.toml}"] if row.variant.toml else []
        keys = {**keys, **self.keys, "job.dump_folder": self.folder / name}
        if not row.variant.toml:
            keys = {key: value for key, value in keys.items() if not is_default(key, value)}
        named = {f"{{{name}}}": str(path) for name, path in self.texts.items()}
        return argv + [f"--{key}={named.get(value, value)}" for key, value in keys.items()]

    def gib(self, argv: list[str], processes: int) -> float:
        """GiB that a run takes of each of its GPUs."""
        if not self.gpus.free:
            return 0.0
        with self.planning:
            config = load_config(argv, cuda=True)
            planned = PlannedRank(config, planned_model(Origin.of(config)), processes).needs / GIB
        sharing = -(-processes // len(self.gpus.free))
        return sharing * (OWN + MORE * planned)

    def _run(self, row: Row, baseline: Future[dict[str, float]]) -> Outcome:
        model = row.variant.keys.get("model.flavor", row.variant.toml)
        outcome, begun = Outcome(row.name, str(model)), time.monotonic()
        try:
            self._judge(row, outcome, baseline)
            outcome.passed = True
        except Failed as failed:
            outcome.why = str(failed)
            if failed.output:
                outcome.tail = failed.output.read_text(errors="replace").splitlines()[-TAIL:]
        outcome.seconds = round(time.monotonic() - begun, 1)
        if self.out:
            with self.writing, self.out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        return outcome

    def _judge(self, row: Row, outcome: Outcome, baseline: Future[dict[str, float]]) -> None:
        """Run the row and compare. Raises Failed."""
        name = row.name.replace(", ", "-").replace(" ", "_")
        folder, split = self.folder / name, row.split
        try:
            with self._started(name, row, row_keys(row, split), SPLITS[split], outcome) as start:
                if row.end:
                    start.stop(row.end)
                else:
                    start.finish(0)
            if row.end:
                outcome.resumed_after, split = newest(folder), SPLITS[split].resumes_as
                with self._started(
                    name, row, row_keys(row, split), SPLITS[split], outcome
                ) as start:
                    start.finish(0)
            outcome.losses, outcome.graphs = losses(folder), graphs(folder)
            said = start.output.read_text(errors="replace")
            resumed = f"resuming from step {outcome.resumed_after}"
            if row.end and resumed not in said:
                raise Failed(f"it did not say {resumed!r}", start.output)
            for sign in AGAIN:
                if sign in said and not row.end:
                    raise Failed(f"{sign!r} in the output", start.output)
            try:
                outcome.compare(baseline.result())
            except Failed as failed:
                raise Failed(str(failed), failed.output or start.output) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # checkpoints of gigabytes


class Start:
    """A start of a run: `NGPU=n python -m titan_linear.run.launch …`, or torchrun where ranks share a GPU."""

    def __init__(
        self,
        matrix: Matrix,
        name: str,
        row: Row,
        argv: list[str],
        processes: int,
        gpus: list[int],
        outcome: Outcome | None,
    ):
        self.matrix, self.outcome, self.folder = matrix, outcome, matrix.folder / name
        self.output = matrix.folder / f"{name}.{len(outcome.commands) if outcome else 0}.txt"
        own = dict(EXTRAS[row.extra].environment) | {"NGPU": str(processes)}
        command = [sys.executable, "-m", "titan_linear.run.launch", *argv]
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else list(map(str, range(len(matrix.gpus.free))))
            own["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus[:processes])
        self.code = 128 + signal.SIGTERM  # after SIGTERM
        if gpus and processes > len(gpus):
            self.code = 1
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command = [sys.executable, "-m", *torchrun, "-m", "tests.matrix.shared_gpus", *argv]
        said = " ".join(f"{name}={value}" for name, value in own.items())
        self.command = f"{said} {shlex.join(['python', *command[1:]])}"
        if outcome:
            outcome.commands.append(self.command)
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each process: there are several runs at once
            **os.environ,
            **own,
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        environment.pop("TRITON_INTERPRET", None)  # of the tests themselves
        self.begun = time.monotonic()
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        matrix.running.add(self.process.pid)
        self.first_step: float | None = None

    def finish(self, code: int, seconds: float = LIMIT) -> None:
        """Wait until it ends, with this exit code."""
        try:
            while self.process.poll() is None:
                self._look()
                if time.monotonic() > self.begun + seconds:
                    raise Failed(f"it did not end in {seconds:.0f} s: {self.command}", self.output)
                time.sleep(0.02)
        finally:
            end(self.process.pid)
            self.process.wait()
            self.matrix.running.discard(self.process.pid)
        if self.process.returncode != code:
            raise Failed(f"exit code {self.process.returncode}: {self.command}", self.output)

    def stop(self, how: str) -> None:
        """Wait for its first whole checkpoint, then kill a process or send a signal, and wait until all have ended."""
        manifest = self.folder / "checkpoint" / f"step-{KILLED_AFTER}" / "manifest.json"
        while not manifest.exists():
            self._look()
            if self.process.poll() is not None or time.monotonic() > self.begun + LIMIT:
                self.finish(0, 0)
                raise Failed("it ended before it could be killed", self.output)
            time.sleep(0.005)
        workers = children(self.process.pid)
        if how == LAUNCHER:
            self.process.kill()
            self.finish(-signal.SIGKILL)
        elif how == RANK:
            ranks = [
                pid
                for pid in workers
                if re.search(rb"titan_linear.train|shared_gpus", cmdline(pid))
            ]
            os.kill(ranks[-1], signal.SIGKILL)
            self._ends_in(20)
        else:
            self.process.send_signal(signal.SIGTERM)
            self.finish(self.code)
        deadline = time.monotonic() + 10
        while not all(map(gone, workers)):
            if time.monotonic() > deadline:
                raise Failed(f"workers outlive their launcher by 10 s: {self.command}", self.output)
            time.sleep(0.02)

    def _ends_in(self, seconds: float) -> None:
        """Wait until the launcher has noticed that a rank is gone."""
        killed = time.monotonic()
        try:
            self.finish(0, killed - self.begun + seconds)
        except Failed:
            if self.process.returncode == -signal.SIGKILL:
                raise
        else:
            raise Failed("a rank was killed, and the launcher's exit code is 0", self.output)

    def _look(self) -> None:
        """Note when the first step is reported."""
        if self.first_step is None and REPORT.search(self.output.read_text(errors="replace")):
            self.first_step = round(time.monotonic() - self.begun, 1)
            if self.outcome:
                self.outcome.first_step_seconds.append(self.first_step)


def is_default(key: str, value: object) -> bool:
    """Whether a key of the command line says what a run does anyway."""
    default = KEYS[key].default if key in KEYS else None
    return default is not None and toml_value(default).strip('"') == str(value)


def end(pid: int) -> None:
    """Kill a process and all below it."""
    with suppress(OSError):
        below = children(pid)
        os.kill(pid, signal.SIGKILL)
        for child in below:
            end(child)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, but for one that is being written."""
    path = folder / "metrics.jsonl"
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> dict[str, float]:
    """Step → its loss, "validation 2" → the validation loss after step 2."""
    found = {}
    for line in metrics(folder):
        if "loss" in line:
            found[str(line["step"])] = float(line["loss"])
        if "validation_loss" in line:
            found[f"validation {line['step']}"] = float(line["validation_loss"])  # "nan" is text
    return found


def graphs(folder: Path) -> dict[str, list[float]]:
    """What metrics say of the compiler, by step."""
    found: dict[str, list[float]] = {}
    for line in metrics(folder):
        for name, value in line.items():
            if "graph" in name or "compil" in name:
                found.setdefault(name, []).append(value)
    return found


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint."""
    whole = [
        int(path.parent.name.removeprefix("step-"))
        for path in folder.glob("checkpoint/step-*/manifest.json")
    ]
    return max(whole)


def write_documents(path: Path) -> None:
    """A corpus of which some streams are of one document, and others of twenty and more."""
    text = (ROOT / "titan_linear" / "config" / "schema.py").read_text(
        encoding="ascii", errors="replace"
    )
    whole = text * 30
    with path.open("w") as file:
        for n in range(20):
            start = n * 1_000
            file.write(json.dumps({"text": whole[start : start + ONE_DOCUMENT]}) + "\n")
            for part in range(100):
                here = start + part * SHORT
                # no two alike: some are held out
                text = f"{n} {part} " + whole[here : here + SHORT]
                file.write(json.dumps({"text": text[:SHORT]}) + "\n")


def write_pairs(path: Path) -> None:
    """Pairs of a line and the next, and of it and another."""
    source = ROOT / "titan_linear" / "config" / "schema.py"
    text = source.read_text(encoding="ascii", errors="replace")
    lines = list(dict.fromkeys(line for line in text.splitlines() if line.strip()))
    with path.open("w") as file:
        for n in range(8_000):
            line, following, other = (lines[k % len(lines)] + " " for k in (n, n + 1, 7 * n + 3))
            if following != other:
                record = {"prompt": line, "chosen": following, "rejected": other}
                file.write(json.dumps(record) + "\n")


def write_columns(rollouts: Path, taught: Path) -> None:
    """Bytes of a line and the next with advantages and log-probabilities, and with a teacher's two likeliest ids."""
    text = (ROOT / "titan_linear" / "config" / "schema.py").read_bytes()
    with rollouts.open("w") as answers, taught.open("w") as texts:
        for n in range(2_000):
            start = n * SHORT // 2 % (len(text) - SHORT)
            tokens = list(text[start : start + SHORT])
            columns = {
                "weights": [float(i >= SHORT // 2) for i in range(SHORT)],
                "advantages": (-1.0) ** n,
                "behaviour": [-8.0 - i % 3 / 4 for i in range(SHORT)],
            }
            answers.write(json.dumps({"tokens": tokens, **columns}) + "\n")
            columns = {
                "teacher_ids": [[id, (id + 1) % 256] for id in tokens],
                "teacher_logprobs": [[-0.5, -1.5]] * SHORT,
            }
            texts.write(json.dumps({"tokens": tokens, **columns}) + "\n")


def write_chats(path: Path, tokenizer: Path) -> None:
    """Conversations of two answers, of which one counts half, and a tokenizer with a template."""
    text = (ROOT / "titan_linear" / "config" / "schema.py").read_text(
        encoding="ascii", errors="replace"
    )
    parts = [text[start : start + SHORT] for start in range(0, len(text), SHORT)]
    roles = [
        {"role": "user"},
        {"role": "assistant"},
        {"role": "user"},
        {"role": "assistant", "weight": 0.5},
    ]
    with path.open("w") as file:
        for n in range(800):
            messages = [
                role | {"content": parts[(n + i) % len(parts)]} for i, role in enumerate(roles)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer.mkdir(exist_ok=True)
    byte_bpe(parts, 320, ["<|end|>"]).save(str(tokenizer / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
