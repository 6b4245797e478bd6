"""What comes before the processes of a run train: in the launcher, or, under plain torchrun, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from titan_linear.config import Config
from titan_linear.storage.run_lock import claimed
from titan_linear.storage.rundir import check_resume, copied_configuration


@contextmanager
def cleared(config: Config, argv: list[str], world_size: int, node_size: int, *, first: bool = True) -> Iterator[None]:
    """Check all that can be refused, say how the run resumes, and hold the locks of its folders inside `with`.

    Args:
        argv: the run's command line, for the doctor.
        node_size: number of processes on this node.
        first: whether this is node 0, which holds the locks for all nodes and has the doctor prove the run.

    Raises:
        ValueError, SystemExit: as `claimed`, `check_resume`, `preflight` and `prove`.
    """
    if warning := copied_configuration(config):
        print(warning)
    with claimed(config) if first else nullcontext():
        for change in check_resume(config):
            print(f"resuming with {change}")
        from titan_linear.run.preflight import preflight, prove  # slow to import; --help and misspelt keys do without

        preflight(config, world_size, node_size)
        if config.doctor.at_start and first:
            prove(argv, world_size)
        yield
