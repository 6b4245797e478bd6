import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.processes import elsewhere, gone, handles, until
from tests.refusals import is_refused, own_handlers, refused
from tests.worlds import free_port  # and what the server imports
from titan_linear.config import Config, load_config
from titan_linear.distributed.process import AGREED, LAUNCHER, LOST
from titan_linear.run import launch, preflight
from titan_linear.run.folder import RunFolder
from titan_linear.run.launch import Node
from titan_linear.storage.run_lock import lock_folder

ROOT = Path(__file__).parents[2]
ALONE = Node(2)
FORKSERVER = multiprocessing.get_context("forkserver")
WORKER = """
import os, signal, sys, time
from pathlib import Path
from titan_linear.distributed.process import StopSignal, die_with_parent, under_launcher

mode, folder = os.environ["MODE"], Path(os.environ["FOLDER"])
rank, events = os.environ["RANK"], []
launcher = os.getppid()

def note(word):
    events.append(word)
    new = folder / f".{rank}"
    new.write_text(" ".join(map(str, events)))
    new.rename(folder / f"rank-{rank}")

def end_of_a_stop():
    stop = StopSignal()
    stop.agreed = signal.SIGTERM
    stop.report()
    sys.exit(0)

def on_term(number, frame):
    note(signal.Signals(number).name)
    if mode == "nodes":
        (folder / "stop").touch()
    elif mode == "builds":
        pass  # it waits for rank 0 in a collective
    elif mode in ("errs", "fails", "dies", "loses"):
        sys.exit(4)
    elif mode != "deaf":
        while mode == "works" and not (folder / "disk").exists():  # that a save waits for
            time.sleep(0.01)
        note("saved")
        sys.exit(3) if mode == "unsaved" else end_of_a_stop()

assert under_launcher()
if mode == "late":
    note(os.getpid())
    while os.getppid() == launcher:
        time.sleep(0.01)
    note("orphaned")
die_with_parent()
if mode != "starting" and not (mode == "builds" and rank == "0"):
    signal.signal(signal.SIGTERM, on_term)
note(os.getpid())
note("start-" + os.environ["TORCHELASTIC_RESTART_COUNT"])
if mode == "imports":
    while not (folder / "imported").exists():
        time.sleep(0.01)
    signal.signal(signal.SIGUSR1, lambda number, frame: note("SIGUSR1"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    note("listens")
if mode == "builds" and rank == "1":
    while not (folder / "rank-0").exists() or Path("/proc", (folder / "rank-0").read_text().split()[0]).exists():
        time.sleep(0.01)
    sys.exit(4)
if mode == "done":
    sys.exit(0)
if mode == "reads":
    note(Path(sys.argv[2]).read_text().count('description = "as checked"'))
    sys.exit(0)
if mode == "loses" and rank == "0":
    sys.exit(4)
if mode in ("errs", "fails", "dies", "loses") and rank == "1":
    while not (folder / "rank-0").exists():
        time.sleep(0.01)
    print("why rank 1 failed", file=sys.stderr, flush=True)
    sys.exit({"errs": 2, "fails": 3}[mode]) if mode in ("errs", "fails") else os.kill(os.getpid(), signal.SIGSEGV)
if mode == "nodes":
    while not (folder / "stop").exists():
        if events[-1] == "start-0" and (folder / "lost").exists():
            sys.exit(4)
        time.sleep(0.01)
    end_of_a_stop()
if mode == "joins":
    from datetime import timedelta
    import torch, torch.distributed as dist
    from titan_linear.distributed.groups import process_group
    with process_group(timedelta(minutes=30)):
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        note(int(total))
    sys.exit(0)
while True:
    signal.pause()
"""


def launch_workers(mode, folder, node, repeat, config):
    """`run_workers` with processes of WORKER, in a process of its own that has a terminal's session."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    os.dup2(os.open(folder / f"stderr-{node.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "MODE": mode, "FOLDER": str(folder)}
    tempfile.tempdir = str(folder / "tmp")
    launch.REPEAT = repeat
    sys.exit(launch.run_workers(config, node, "worker"))


class Run:
    """A launcher, forked from a server that has imported torch, and its workers."""

    def __init__(self, folder, mode, node, *options):
        (folder / "worker.py").write_text(WORKER)
        (folder / "tmp").mkdir(exist_ok=True)
        self.folder, self.node = folder, node
        self.process = FORKSERVER.Process(
            target=launch_workers, args=(mode, folder, node, *options)
        )
        self.process.start()

    def kill(self, number):
        os.kill(self.process.pid, number)

    def events(self, rank):
        path = self.folder / f"rank-{rank}"
        return path.read_text().split() if path.exists() else []

    def wait_for(self, event):
        """Until each worker has noted `event`, or with "ready" its process id."""
        until(
            lambda: all(event in self.events(rank) or self.ready(rank, event) for rank in range(2))
        )

    def alive(self):
        return any(map(alive, map(self.events, range(2))))

    def ready(self, rank, event):
        return event == "ready" and bool(self.events(rank))

    def end(self):
        """(exit code, stderr)"""
        self.process.join()
        err = (self.folder / f"stderr-{self.node.rank}").read_text()
        own = range(self.node.rank, self.node.rank + self.node.processes)
        until(lambda: not any(alive(self.events(rank)) for rank in own))
        assert "Traceback" not in err
        return self.process.exitcode, err


def alive(events):
    """The process whose id a worker noted first runs."""
    return bool(events) and not gone(int(events[0]))


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(mode, repeat=0.3, node=ALONE, max_restarts=0, saves=True):
        config = Config(
            job={"description": "as checked"},
            checkpoint={"enable": saves},
            comm={"max_restarts": max_restarts},
        )
        runs.append(Run(tmp_path, mode, node, repeat, config))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        for events in filter(alive, map(run.events, range(2))):  # they should have died with it
            with suppress(ProcessLookupError):
                os.kill(int(events[0]), signal.SIGKILL)
        run.process.join()


def test_a_run_ends_with_its_workers(start, tmp_path):
    assert start("done").end() == (0, "")
    assert not any((tmp_path / "tmp").iterdir())  # torchrun's own folders stay otherwise


def test_workers_read_what_was_checked(start):
    run = start("reads")
    assert run.end() == (0, "")
    assert [run.events(rank)[-1] for rank in range(2)] == ["1", "1"]


def test_workers_join_one_process_group(start):
    run = start("joins")
    assert run.end()[0] == 0
    assert [run.events(rank)[-1] for rank in range(2)] == ["3", "3"]


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_reaches_every_worker_once_and_lets_it_save(start, number, code):
    run = start("works", repeat=60)
    run.wait_for("start-0")
    os.killpg(run.process.pid, number)  # as a terminal does
    run.wait_for("SIGTERM")
    run.kill(number)  # as a wrapper does that passes signals on
    (run.folder / "disk").touch()
    assert run.end()[0] == code
    assert [run.events(rank)[2:] for rank in range(2)] == [["SIGTERM", "saved"]] * 2


@pytest.mark.parametrize("saves", [True, False])
def test_a_stop_promises_a_save_only_where_there_are_checkpoints(start, saves):
    run = start("works", saves=saves)
    run.wait_for("ready")
    (run.folder / "disk").touch()
    run.kill(signal.SIGTERM)
    when = (
        "after a last save"
        if saves
        else "after this step, without a save (checkpoint.enable = false)"
    )
    assert run.end() == (143, f"stopping {when}; Ctrl-C again stops at once\n")


def test_a_second_interrupt_kills(start):
    """Also where workers would start again."""
    run = start("deaf", repeat=0, max_restarts=2)
    run.wait_for("start-0")
    run.kill(signal.SIGINT)
    run.wait_for("SIGTERM")
    run.kill(signal.SIGINT)
    assert run.end()[0] == 130
    assert [run.events(rank)[1:] for rank in range(2)] == [["start-0", "SIGTERM"]] * 2


@pytest.mark.parametrize("mode", ["starting", "builds"])
def test_a_stop_while_workers_start_is_a_stop(start, mode):
    """They cannot listen yet, or wait for one that has ended."""
    run = start(mode)
    run.wait_for("ready")
    run.kill(signal.SIGINT)
    code, err = run.end()
    assert code == 130 and "error" not in err


def test_nothing_starts_again_after_a_stop(start):
    run = start("unsaved", max_restarts=2)
    run.wait_for("start-0")
    run.kill(signal.SIGTERM)
    code, err = run.end()
    assert code == 1 and err.endswith("error: the workers have failed instead of saving\n")


def test_a_request_for_a_snapshot_is_passed_on(start):
    """And ends no worker that does not listen yet."""
    run = start("imports")
    run.wait_for("ready")
    run.kill(signal.SIGUSR1)
    (run.folder / "imported").touch()
    run.wait_for("listens")
    run.kill(signal.SIGUSR1)
    run.wait_for("SIGUSR1")
    run.kill(signal.SIGTERM)
    assert run.end()[0] == 143


def test_a_failed_save_is_a_failure(start):
    run = start("unsaved")
    run.wait_for("start-0")
    run.kill(signal.SIGTERM)
    code, err = run.end()
    assert code == 3 and "failed (exit code 3)" in err


@pytest.mark.parametrize(
    "mode, code, how",
    [("errs", 2, "exit code 2"), ("fails", 3, "exit code 3"), ("dies", 139, "killed by SIGSEGV")],
)
def test_a_failed_worker_ends_the_run(start, mode, code, how):
    """The one that is the cause, not another that ends for want of it."""
    run = start(mode)
    assert run.end() == (code, f"why rank 1 failed\nerror: rank 1 failed ({how})\n")


def test_the_cause_of_a_failure():
    """It counts before what others do for want of it, though torchrun sees those first."""

    def failure(code, timestamp):
        return SimpleNamespace(
            exitcode=code, timestamp=timestamp, signal_name=lambda: signal.Signals(-code).name
        )

    failures = {
        0: failure(LOST, 1),
        1: failure(-signal.SIGTERM, 1),
        2: failure(-signal.SIGKILL, 3),
        3: failure(3, 2),
    }
    assert launch._report(failures) == 3
    failures.pop(3)
    assert launch._report(failures) == 137
    failures.pop(2)
    assert launch._report(failures) == LOST


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_failure_comes_again_as_often_as_restarts_are_allowed(start, max_restarts):
    """As for torchrun: also one that would always come again."""
    run = start("fails", max_restarts=max_restarts)
    code, err = run.end()
    assert code == 3 and err.count("why rank 1 failed\n") == 1 + max_restarts


def test_workers_die_with_a_killed_launcher(start):
    run = start("works")
    run.wait_for("start-0")
    run.process.kill()
    until(lambda: not run.alive())
    assert [len(run.events(rank)) for rank in range(2)] == [2, 2]  # no SIGTERM, no save


def test_a_worker_whose_launcher_died_before_it_asked_ends_itself(start):
    run = start("late")
    run.wait_for("ready")
    run.process.kill()
    run.wait_for("orphaned")
    until(lambda: not run.alive())
    assert [run.events(rank)[1:] for rank in range(2)] == [["orphaned"]] * 2


def listening(process):
    """The TCP ports on which a process listens, and each one's address, as the kernel writes it."""
    links = [os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in sockets]
    return {int(port, 16): address for address, port in places}


@pytest.mark.parametrize("nodes", [1, 2])
def test_writes_from_outside_start_nothing_again(start, nodes):
    """PyTorch's stores ask for no password, and with several nodes listen on all interfaces."""
    port = free_port()
    places = [ALONE] if nodes == 1 else [Node(1, rank, 2, "127.0.0.1", port) for rank in (0, 1)]
    runs = [start("works", node=place, max_restarts=3) for place in places]
    runs[0].wait_for("start-0")
    ports = listening(runs[0].process.pid)
    assert ports
    assert nodes > 1 or set(ports.values()) == {"0100007F"}  # 127.0.0.1
    for open_port in ports:
        with socket.create_connection(("127.0.0.1", open_port)) as stranger:
            stranger.sendall(b"\xff" * 64)
        store = dist.TCPStore("127.0.0.1", open_port, is_master=False, wait_for_workers=False)
        for key in store.list_keys():
            # torchrun unpickles what it reads there
            assert not key.startswith("torch.rendezvous") or nodes > 1
            store.set(key, "of a stranger")
    time.sleep(2)
    for run in runs:
        run.kill(signal.SIGTERM)
    runs[0].wait_for("SIGTERM")
    (runs[0].folder / "disk").touch()
    assert [run.end()[0] for run in runs] == [143] * nodes
    assert [runs[0].events(rank)[1:] for rank in range(2)] == [["start-0", "SIGTERM", "saved"]] * 2


@pytest.mark.parametrize("asked", [0, 1])
def test_nodes_start_again_together_and_stop_together(start, asked):
    """After the crash of a rank; then one node is asked to stop."""
    places = [Node(1, rank, 2, "127.0.0.1", port) for port in [free_port()] for rank in (0, 1)]
    runs = [start("nodes", node=node, max_restarts=1) for node in places]
    runs[0].wait_for("start-0")
    os.kill(int(runs[0].events(1)[0]), signal.SIGSEGV)
    (runs[0].folder / "lost").touch()
    runs[0].wait_for("start-1")
    runs[asked].kill(signal.SIGTERM)
    assert [run.end()[0] for run in runs] == [143, 143]
    assert "failed (exitcode: -11) local_rank: 0 " in runs[1].end()[1]


def test_a_failure_of_one_node_ends_each_with_what_it_knows(start):
    runs = [
        start("loses", node=Node(1, rank, 2, "127.0.0.1", port))
        for port in [free_port()]
        for rank in (0, 1)
    ]
    assert runs[0].end() == (LOST, "error: rank 0 lost another rank\n")
    assert runs[1].end() == (139, "why rank 1 failed\nerror: rank 1 failed (killed by SIGSEGV)\n")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_waits_for_others_can_be_stopped(start, rank, number):
    """In PyTorch's own wait, where no handler of its process's main thread would run."""
    run = start("done", node=Node(1, rank, 2, "127.0.0.1", free_port()))
    until(lambda: handles(run.process.pid, signal.SIGTERM))
    time.sleep(2)
    run.kill(number)
    run.process.join()
    assert run.process.exitcode == 128 + number


def test_a_port_in_use_is_a_mistake(monkeypatch):
    for name in (LAUNCHER, AGREED):
        monkeypatch.setenv(name, "")  # restored afterwards: they are set for the workers
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with own_handlers(), refused(f"nodes cannot meet at 127.0.0.1:{port} "):
            launch.run_workers(Config(), Node(1, 0, 2, "127.0.0.1", port), "worker")


# --- main ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What main calls, in a folder of its own, with no GPU and two processes."""
    calls = []
    monkeypatch.setattr(
        preflight, "preflight", lambda config, *sizes: calls.append(("preflight", *sizes))
    )
    monkeypatch.setattr(launch, "run_workers", lambda *args: calls.append(args) or 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with own_handlers():
        yield calls


def test_main_checks_then_starts_the_workers(calls):
    argv = ["--parallelism.context_parallel_degree", "2"]
    assert launch.main(argv) == 0
    assert calls == [("preflight", 2, 2), (load_config(argv), Node(2))]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN  # for the workers alone


def test_main_on_one_of_several_nodes(calls, monkeypatch):
    """Which prepares its data before it meets the others, and does not lock the folder that node 0 has locked."""
    for name, value in {"NGPU": 1, "NNODES": 4, "NODE_RANK": 3, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    argv = ["--comm.max_restarts", "2"]
    assert launch.main(argv) == 0
    here = Node(1, 3, 4, "127.0.0.1", 29500)
    assert calls == [("preflight", 4, 1), (load_config(argv), here)]
    assert not Path("outputs/.lock").exists()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"NNODES": "x"}, "NNODES = 'x' must be a number, 1 or more"),
        ({"NNODES": "2"}, "NODE_RANK = '' must be a number, 0 or more"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK = 2 must be less than NNODES = 2"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES = 2 needs MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "no host"}, "MASTER_ADDR = 'no host'"),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            "MASTER_PORT = '0' must",
        ),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "99999"},
            "MASTER_PORT = 99999 is not a port",
        ),
    ],
)
def test_wrong_nodes_are_refused(calls, capsys, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.main([]) == 2
    assert message in capsys.readouterr().err and calls == []


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--training.step", "3"], "did you mean training.steps?"),
        (
            ["--parallelism.context_parallel_degree", "3"],
            "need a multiple of 3 processes, and there are 2",
        ),
        (["--job.dump_folder", "/dev/null/x"], "job.dump_folder = '/dev/null/x' cannot be written"),
        (
            ["--comm.max_restarts", "1", "--checkpoint.enable", "false"],
            "set checkpoint.enable = true",
        ),
    ],
)
def test_a_mistake_is_a_short_message(calls, capsys, argv, message):
    assert message in is_refused(launch.main, argv, capsys)
    assert calls == []


def test_preflight_refuses_before_workers_start(calls, capsys, monkeypatch):
    def refuse(config, *sizes):
        raise ValueError("training.dataset_path = 'x' holds no document")

    monkeypatch.setattr(preflight, "preflight", refuse)
    assert launch.main([]) == 2
    assert capsys.readouterr().err == "error: training.dataset_path = 'x' holds no document\n"
    assert calls == [] and not Path("outputs").exists()


def test_a_folder_in_use_is_refused(calls, capsys):
    with elsewhere(lambda: lock_folder("outputs")) as other:
        assert launch.main([]) == 2
        shown = capsys.readouterr().err
        assert f"job.dump_folder = 'outputs' is in use by another run (process {other} on " in shown
        with refused("in use"), lock_folder("outputs"):
            pass
    assert launch.main([]) == 0  # the lock went with its process
    assert Path("outputs/.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_two_runs_do_not_share_a_folder_of_checkpoints(calls, capsys, tmp_path):
    """Each would resume from the other's, and remove them."""
    shared, link = tmp_path / "large", Path("outputs/checkpoint")
    shared.mkdir()
    link.parent.mkdir()
    link.symlink_to(shared)
    config = load_config(["--job.dump_folder", "another run", "--checkpoint.folder", str(shared)])
    with elsewhere(lambda: RunFolder(config).claimed()) as other:
        for own in (["--checkpoint.folder", str(shared)], []):
            assert launch.main(own) == 2
            shown = capsys.readouterr().err
            assert (
                f"checkpoint.folder = '{shared}' is in use by another run (process {other} on "
                in shown
            )
        assert launch.main(["--checkpoint.folder", "own"]) == 0
    assert launch.main([]) == 0


@pytest.mark.parametrize("asked, gpus, count", [("", 0, 2), ("", 4, 4), ("3", 0, 3), ("2", 4, 2)])
def test_ngpu_decides_the_number_of_processes(monkeypatch, asked, gpus, count):
    monkeypatch.setenv("NGPU", asked)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert launch.process_count() == count


@pytest.mark.parametrize("asked, gpus", [("0", 0), ("x", 0), ("-1", 4), ("1.5", 0), ("5", 4)])
def test_a_wrong_ngpu_is_refused(monkeypatch, asked, gpus):
    monkeypatch.setenv("NGPU", asked)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with refused("NGPU = "):
        launch.process_count()


def test_waiting_threads_soon_sleep(monkeypatch):
    """Spinning on, they would take the core from what they wait for on a busy machine. The user's word holds."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    found = launch._environment(1)
    assert found["OMP_WAIT_POLICY"] == "PASSIVE" and found["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "20000")
    assert launch._environment(1)["GOMP_SPINCOUNT"] == "20000"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # a count would outweigh it
    found = launch._environment(1)
    assert found["OMP_WAIT_POLICY"] == "ACTIVE" and "GOMP_SPINCOUNT" not in found


def test_help_of_flavors(capsys):
    assert launch.main(["--job.config_file", "none.toml", "--help", "flavors"]) == 0
    assert "80B-A3B" in capsys.readouterr().out
