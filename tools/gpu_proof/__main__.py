"""Prove an installation on this machine's GPUs, through the launcher and the commands, at real sizes and compiled.

    ./tests/run.sh --gpus                      # 10 to 15 minutes
    ./tests/run.sh --gpus --part 1/2           # half of it; then 2/2
    ./tests/run.sh --gpus --part doctors       # the doctor of every shipped configuration
    ./tests/run.sh --gpus --only lora sweep    # some lines, with what they need
    ./tests/run.sh --gpus --list               # all lines
    python -m tools.gpu_proof --cpu-rehearsal  # the same jobs on the CPU with tiny models, to test this command
    python -m tools.gpu_proof --page           # the committed record, as docs/results.md shows it

Training runs are killed with SIGKILL some steps after a save, and started again. They take these steps again: every
loss and gradient norm must be exactly what it was without the interruption. Then come exports, merges and scores of
these runs, the doctor, the kernels' numbers, and the rates of steps compared with recorded ones. Jobs run side by
side, from empty caches, in a temporary folder.

--out gets gpu_proof.json, which holds each GPU's newest result of each line, and logs.txt. Copy the former to
docs/results/ to commit it. Exits with 1 if a line failed. Without git, TITAN_LINEAR_COMMIT names the commit.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from titan_linear.commands import command_parser, table
from titan_linear.distributed.process import refusing, run_command
from tools import harness
from tools.gpu_proof import record
from tools.gpu_proof.jobs import Setting, jobs
from tools.gpu_proof.schedule import Job, Room, Runner, run_jobs
from tools.gpu_proof.texts import write_texts

PARTS = {"1/2": (1,), "2/2": (2,), "doctors": (0,)}
CORES = 3  # of the machine for each job that runs beside others
TAIL = 20  # lines of a failed job's log that are printed
SPARE = 1.5  # GiB of a GPU that no job may have
TEXTS = 96, 4000  # records, and bytes of each
SMALL_TEXTS = 24, 100


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("./tests/run.sh --gpus", __doc__)
    parser.add_argument("--part", choices=PARTS, help="half of the lines, or all doctors")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these lines")
    parser.add_argument("--list", action="store_true", help="print the lines and end")
    parser.add_argument("--page", action="store_true", help="print the committed record and end")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs", "gpu_proof"),
        help="folder for gpu_proof.json and logs.txt (default: outputs/gpu_proof)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    parser.add_argument(
        "--cpu-rehearsal", action="store_true", help="tiny models on the CPU; proves no GPU"
    )
    return parser.parse_args(argv)


def chosen(every: list[Job], args: argparse.Namespace) -> list[Job]:
    """The jobs that the arguments ask for, and those that they need.

    Raises:
        ValueError: --only names a line that does not exist.
    """
    parts = PARTS.get(args.part, (1, 2))
    names = set(args.only) or {job.name for job in every if job.part in parts}
    if args.part == "doctors":
        names.update(job.name for job in every if job.name.startswith("doctor-"))
    unknown = names - {job.name for job in every}
    if unknown:
        raise ValueError(f"--only {' '.join(unknown)}: there is no such line; --list prints them")
    for job in reversed(every):  # what a job needs comes before it
        if job.name in names:
            names.update(job.needs)
    return [job for job in every if job.name in names]


@refusing
def main(argv: list[str]) -> int:
    args = parse(argv)
    records = record.read(record.COMMITTED)
    if args.page:
        print(record.page(records))
        return 0
    gpus = record.REHEARSAL if args.cpu_rehearsal or args.list else record.find_gpus()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="titan_linear_proof_"))
    try:
        rate = partial(record.recorded_rate, records, gpus.kind)
        selected = chosen(jobs(Setting(folder, len(gpus.names), gpus.gib, rate)), args)
        if args.list:
            print(table(["line", "", "part"], [[j.name, j.about, j.part] for j in selected]))
            return 0
        return prove(selected, gpus, Runner(folder, gpus.names), args.out)
    finally:
        if args.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def prove(selected: list[Job], gpus: record.Gpus, runner: Runner, out: Path) -> int:
    """Run the jobs, print and record each result as it comes, and end with a table of all."""
    begun = time.monotonic()
    write_texts(runner.folder, *(TEXTS if gpus.names else SMALL_TEXTS))
    out.mkdir(parents=True, exist_ok=True)
    file = out / record.COMMITTED.name
    records = record.read(file) or record.read(record.COMMITTED)
    commit = harness.commit()
    print(f"{gpus.key}, commit {commit}: {len(selected)} lines; {file} and logs.txt", flush=True)

    free = [Room(gpus.gib - SPARE) for _ in gpus.names]
    at_once = max(len(os.sched_getaffinity(0)) // CORES, 1)
    rows = {}
    failed = []
    with (out / "logs.txt").open("w", encoding="utf-8") as logs:
        for result in run_jobs(selected, runner, free, at_once):
            job, passed, figure, seconds, log = result
            state = "pass" if passed else "FAIL"
            rows[job.name] = [state, job.name, job.about, figure.text, f"{seconds:.0f}"]
            print(f"{state} {job.name}: {figure.text} ({seconds:.0f} s)", flush=True)
            if not passed:
                failed.append(job.name)
                print(*log.splitlines()[-TAIL:], sep="\n    ", flush=True)
            logs.write(f"===== {job.name}\n{log}\n")
            logs.flush()
            record.add(records, gpus, result, commit)
            record.write(records, file)

    in_order = [rows[job.name] for job in selected]
    print(f"\n{table(['', 'line', '', 'figure', 'seconds'], in_order)}\n")
    print(f"{len(rows) - len(failed)} of {len(rows)} hold, {time.monotonic() - begun:.0f} s")
    if failed:
        print(f"to repeat what failed: ./tests/run.sh --gpus --only {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
