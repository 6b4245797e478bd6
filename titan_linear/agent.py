"""The workers of a node: torch's elastic agent, which starts, watches and restarts them.

Differences from `torchrun`, in every version of torch that this runs with:

- SIGTERM and Ctrl-C reach every worker once, as SIGTERM; workers save, for as long as it takes, and the exit code is
  143 or 130 (143 on nodes that got no signal themselves); a second Ctrl-C kills the workers. Before their first step
  they have nothing to save, and the signal kills them;
- SIGUSR1 is passed on to the workers, which write snapshots of their GPUs' memory (profiling.py);
- when a worker fails, the others have GRACE seconds to say why they fail too, and are then killed: they must not save
  without it. One line says which failed, and the exit code is that worker's. A node whose ranks have only lost a rank
  of another node waits to hear from that node (`Nodes.hear`);
- an error that would recur (a user's mistake, a non-finite loss, a failed save) causes no restart;
- ranks follow NODE_RANK, and one port serves the agents and the workers of all starts (nodes.py);
- workers die with the agent, whatever killed it (process.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from types import FrameType

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from titan_linear.config import Config
from titan_linear.nodes import Nodes
from titan_linear.process import FINAL, LAUNCHER, LOST, STOPPED, Node, pass_on_configuration

GRACE = 5.0  # seconds
REPEAT = 0.3  # seconds in which a wrapper that passes signals on may send the same one again


def run_workers(module: str, argv: list[str], here: Node, config: Config) -> int:
    """Run `python -m module *argv` in this node's processes; return the exit code of the whole (see above).

    Args:
        config: as it was checked, for the workers of all starts: its file may have changed by then.

    Raises:
        ValueError: the nodes' environment is wrong.
    """
    os.environ.update(_environment(here.processes))
    pass_on_configuration(config.model_dump_json())
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.propagate, elastic.handlers = False, [logging.NullHandler()]  # this module says what it does
    nodes = Nodes(here)
    agent = Agent(
        WorkerSpec(
            role="trainer", local_world_size=here.processes, entrypoint=sys.executable, args=("-m", module, *argv),
            rdzv_handler=nodes, max_restarts=config.comm.max_restarts, monitor_interval=0.1,
        ),
        saves=config.checkpoint.enable,
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, agent.on_signal)
    code = 1
    try:
        code = agent.run_to_end()
    except RendezvousClosedError:
        print("error: the run has failed on another node", file=sys.stderr)
    except RendezvousTimeoutError as error:
        print(f"error: {error}", file=sys.stderr)
    except DistNetworkError:
        print(f"error: node 0 ({here.address}:{here.port}) is gone", file=sys.stderr)
    finally:
        nodes.leave(code, at_once=agent.at_once)
    return code


def _environment(processes: int) -> dict[str, str]:
    """Variables that workers inherit; a default yields to a value that the user has set."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        # Waiting threads soon sleep: on a machine with other work, spinning would take the core that the thread they
        # wait for needs. If they slept at once (PASSIVE sets libgomp's spin count to 0), waking them would halve the
        # speed of a free machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = "1000"
    own = {
        LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP",  # `on_signal` handles the others
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",  # all nodes have the same number (nodes.py): no exchange
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | own


class Agent(LocalElasticAgent):
    """Stops and restarts the workers of this node.

    saves: whether they save before they stop.
    """

    def __init__(self, spec: WorkerSpec, saves: bool = True):
        super().__init__(spec, DefaultLogsSpecs(os.devnull))
        self.saves = saves
        self.failures: dict[int, int] = {}  # of this start, in the order seen: rank → exit code
        self.hung = False  # a worker did not end, and was killed
        self.asked, self.asked_at, self.at_once = 0, 0.0, False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """End the agent's loop at the first request to stop; kill at a later Ctrl-C, but not at one within REPEAT
        seconds: wrappers repeat at once what the terminal has already sent, and a person takes longer."""
        if self.asked:
            if number != signal.SIGINT or time.monotonic() - self.asked_at < REPEAT:
                return
            self.at_once = True  # raised again, the exception makes the agent kill what it waits for
        else:
            self.asked, self.asked_at = number, time.monotonic()
        raise SignalException("asked to stop", signal.Signals(number))

    def pass_on(self, number: int, _: FrameType | None) -> None:
        for process in self._processes():
            process.send_signal(number)

    def run_to_end(self) -> int:
        """Run the workers until they end for good; return the exit code."""
        code = 0
        try:
            self.run()
        except SignalException:
            code = 128 + self.asked
        # A worker that was asked to stop before it handled signals was killed by the request. That is no failure, nor
        # is it one that others then lost it. But if one hung, the others have lost that one, and with it their save.
        forgiven = (-signal.SIGTERM, *([] if self.hung else [LOST])) if code else ()
        failures = {rank: c for rank, c in self.failures.items() if c not in forgiven}
        if not failures or self.at_once:
            return code
        rank, failed = _cause(failures)
        print(f"error: {_how(rank, failed)}", file=sys.stderr)
        return failed if failed > 0 else 128 - failed

    # --- What the elastic agent asks for ------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        spec = worker_group.spec
        self._remaining_restarts = spec.max_restarts - spec.rdzv_handler.start  # the same on all nodes, whoever failed
        self.failures, self.hung = {}, False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: while they import PyTorch they have no handler yet
        ids = super()._start_workers(worker_group)
        signal.signal(signal.SIGUSR1, self.pass_on)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [process.poll() for process in self._processes()]
        if self._look():
            self._end()
            self._prepare_restart()
        elif None in codes:  # super() would poll again, and take a worker that stops meanwhile for a failure
            return RunResult(state=WorkerState.HEALTHY)
        elif stopped := [code for code in codes if code in STOPPED]:
            raise SignalException("stopped", signal.Signals(stopped[0] - 128))  # maybe at the request of another node
        return super()._monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 0) -> None:
        """Called with a signal's number after a SignalException, and without one after anything else."""
        if death_sig != signal.SIGKILL and not self.asked:  # another node was
            self.asked, self.asked_at = death_sig, time.monotonic()
        if death_sig != signal.SIGKILL and any(process.poll() is None for process in self._processes()):
            for process in self._processes():
                process.send_signal(signal.SIGTERM)  # no effect on one that has ended
            after = "after a last save" if self.saves else "after this step, without a save (checkpoint.enable = false)"
            print(f"stopping {after}; Ctrl-C again stops at once", file=sys.stderr, flush=True)
            self._end()
        self._kill()

    # ------------------------------------------------------------------------------------------------------------------

    def _processes(self) -> list:
        return [handler.proc for handler in self._pcontext.subprocess_handlers.values()] if self._pcontext else []

    def _look(self) -> dict[int, int]:
        for worker, process in zip(self._worker_group.workers, self._processes()):
            if process.poll() and process.returncode not in STOPPED:
                self.failures.setdefault(worker.global_rank, process.returncode)
        return self.failures

    def _end(self) -> None:
        """Wait until all workers have ended; once one has failed, give the others GRACE seconds to say why they fail
        too."""
        deadline = None
        while any(process.poll() is None for process in self._processes()):
            if self._look() and deadline is None:
                deadline = time.monotonic() + GRACE
            if deadline and time.monotonic() > deadline:
                self.hung = True
                return self._kill()
            time.sleep(0.05)
        self._look()

    def _kill(self) -> None:
        if self._pcontext:
            self._pcontext.close(signal.SIGKILL, timeout=30)

    def _prepare_restart(self) -> None:
        rank, code = _cause(self.failures)
        if code == LOST:
            self._worker_group.spec.rdzv_handler.hear()
        if code in FINAL:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            most = self._worker_group.spec.max_restarts
            number = most - self._remaining_restarts + 1
            print(f"{_how(rank, code)}: restart {number} of {most}", file=sys.stderr, flush=True)


def _cause(failures: dict[int, int]) -> tuple[int, int]:
    """Rank and exit code of the first failure; failures other than the loss of another rank come first."""
    return min(failures.items(), key=lambda failure: failure[1] == LOST)


def _how(rank: int, code: int) -> str:
    if code == LOST:
        return f"rank {rank} lost another rank"
    how = f"exit code {code}" if code > 0 else f"killed by {_name(-code)}"
    return f"rank {rank} failed ({how})"


def _name(number: int) -> str:
    """Of a signal; real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
