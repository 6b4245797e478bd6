"""Prove a run before it costs a week, with its own model, tokenizer, corpus and
parallelism.

titan-linear doctor --job.config_file my.toml
titan-linear doctor --job.config_file my.toml --training.seq_len 32768 --parallelism.context_parallel_degree 8
torchrun --nproc-per-node 8 -m titan_linear doctor --job.config_file my.toml

It takes the keys of run_train.sh (titan-linear train --help). It prints a line for each
thing it proves, with a figure and its bound, and exits with 0 only if all hold
(docs/proof.md). It runs on one GPU or the CPU, with all ranks in one process. Under
torchrun the run's own processes compute a step, too. It writes nothing into the run's
folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from titan_linear.config import load_config
from titan_linear.data.corpus.tree_records import BACK
from titan_linear.distributed.ending import report
from titan_linear.distributed.groups import process_group
from titan_linear.distributed.process import FAILED, ignore_warnings_of_torch, run_command
from titan_linear.models.lora import described
from titan_linear.ops.runtime.support import short
from titan_linear.proof import compiled, data, definitions, hf, model, ops, processes, resume
from titan_linear.proof.findings import Finding, Findings, Note
from titan_linear.proof.subject import ProofSubject, subject_of
from titan_linear.run.build import unallocated

# Longest time that processes wait for each other.
PATIENCE = timedelta(minutes=10)


def checks(subject: ProofSubject) -> Iterator[tuple[str, Callable[[], Findings]]]:
    """Yield the checks, by name and in order: the checks on which others rely come first."""
    for check in (data.labels, data.targets, data.cut, data.stream):
        yield check.__name__, partial(check, subject)
    of_case = [ops.implementations, ops.split, ops.documents, ops.repeated]
    if BACK in subject.streams[0].columns:
        of_case.append(ops.trees)
    for case in ops.cases(subject):
        for prove in of_case:
            yield f"{prove.__name__}, {case}", partial(prove, subject, case)
    of_model = [definitions.missing, definitions.loss, definitions.positions, definitions.float8]
    of_model += [model.split, model.documents, model.repeated, resume.resume, hf.logits]
    for check in of_model:
        yield check.__name__, partial(check, subject)
    # Under torchrun the run's own processes prove this (`_of_processes`).
    if "WORLD_SIZE" not in os.environ:
        yield "compiled", partial(compiled.layers, subject)


def guarded(name: str, check: Callable[[], Findings]) -> Findings:
    """Run a check. An exception is a finding too, unless memory ran out.

    A kernel that cannot start raises one, for example.
    """
    try:
        yield from check()
    except Exception as error:
        # An error of a rank in this process is the cause of another.
        if any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__)):
            raise
        said = f"{type(error).__name__}: {error}"
        yield Finding(name, "cannot be computed", float("inf"), 0, said)


def main(argv: list[str]) -> int:
    """Run all checks and return the exit code.

    It is 0 if all hold, 1 if something does not, 2 for a user's mistake, 3 if memory runs
    out.
    """
    if argv in (["-h"], ["--help"]):
        print(__doc__.rstrip())
        return 0
    ignore_warnings_of_torch()
    warnings.filterwarnings("ignore", message=".*deterministic")
    # Deterministic algorithms of cuBLAS require this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        subject = subject_of(load_config(argv))
        first = os.environ.get("RANK", "0") == "0"
        if first:
            print(_introduction(subject))
        # Under torchrun, all processes prove their part first.
        of_processes = list(_of_processes(subject)) if "WORLD_SIZE" in os.environ else []
        # The first process reports, and proves the rest.
        if not first:
            return 0
        with one_process():
            more = (finding for name, check in checks(subject) for finding in guarded(name, check))
            return _report(chain(of_processes, more))
    except (ValueError, torch.OutOfMemoryError) as error:
        return report(error)


def _of_processes(subject: ProofSubject) -> Findings:
    """Yield the findings of all processes under torchrun.

    An error of one process ends it, and so all of them.
    """
    with process_group(PATIENCE), _at_most(2 * PATIENCE):
        yield from processes.split(subject)
        yield from resume.of_processes(subject)
        yield from compiled.layers(subject)


@contextmanager
def _at_most(patience: timedelta) -> Iterator[None]:
    """End this process with an error line if the code inside takes longer.

    A device that waits forever raises nothing.
    """

    def end() -> None:
        rank = os.environ["RANK"]
        seconds = patience.total_seconds()
        print(
            f"error: rank {rank}: the proofs of processes hang, {seconds:.0f} s so far",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FAILED)

    # The timer runs in a thread, because the main thread may be stuck in C++.
    timer = threading.Timer(patience.total_seconds(), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _introduction(subject: ProofSubject) -> str:
    c = subject.run
    device = subject.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    kinds = ", ".join(layer.name for layer in subject.model.layers)
    lines = [
        f"model {c.model.name}/{c.model.flavor}: layers {kinds}; dim {subject.model.dim}; compute "
        f"{short(subject.dtype)}",
        f"{(n := subject.degrees.ranks)} rank{'s' * (n > 1)} in one process on {name}: {subject.degrees}, "
        f"{c.parallelism.context_parallel_layout}",
        *(f"cut: {line}" for line in subject.said),
        described(unallocated(subject.model)),
    ]
    return "\n".join(filter(None, lines))


def _report(findings: Findings) -> int:
    begin = time.perf_counter()
    lines = []
    for finding in findings:
        print(finding)
        lines += [] if isinstance(finding, Note) else [finding]
    failed = [finding for finding in lines if not finding.holds]
    seconds = time.perf_counter() - begin
    if not failed:
        print(f"all {len(lines)} hold, {seconds:.0f} s")
        return 0
    print(f"{len(failed)} of {len(lines)} do not hold, {seconds:.0f} s; the first: {failed[0]}")
    return 1


@contextmanager
def one_process() -> Iterator[None]:
    """Make a default group of this process alone, for code that needs one."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
