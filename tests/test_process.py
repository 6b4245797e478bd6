"""Signals of one process; what binds it to its parent is in test_launch.py."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from titan_linear.distributed.process import StopSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("agreed", [False, True])
def test_a_signal_is_noted_and_a_stop_is_not_cut_short(number: int, agreed: bool) -> None:
    caught = []
    before = signal.signal(number, lambda *_: caught.append("before"))
    try:
        stop = StopSignal()
        with stop:
            os.kill(os.getpid(), number)
            assert stop.received == number and stop.agreed == 0
            stop.agreed = number if agreed else 0
        os.kill(os.getpid(), number)
        assert caught == ([] if agreed else ["before"])
    finally:
        signal.signal(number, before)


def test_a_signal_is_seen_while_the_main_thread_waits_in_c() -> None:
    """Where another rank has died, this one waits for a device for ever, and its handlers in Python do not run."""
    seen = []

    def other_thread() -> None:
        time.sleep(0.3)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        seen.extend([stop.arrived(), stop.received])

    with StopSignal() as stop:
        assert stop.arrived() == 0
        thread = threading.Thread(target=other_thread)
        thread.start()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # else it would end the wait below
        ctypes.CDLL(None).sleep(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        thread.join()
    assert seen == [signal.SIGTERM, 0]
    assert stop.received == stop.arrived() == signal.SIGTERM


def test_nobody_reads_what_a_command_prints() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "titan_linear.launch", "--help", "flavors"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_interrupted_command_is_silent() -> None:
    code = (
        "import signal, sys\n"
        "from titan_linear.distributed.process import run_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
        "run_command(lambda argv: print('begun', flush=True) or sys.stdin.read())\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as command:
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGINT)
        assert (command.wait(), command.stderr.read()) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_nobody_reads_what_a_run_prints(stream: str) -> None:
    """It goes on, and says the rest to nobody: a pipe that breaks in between is no reason to lose a last save."""
    code = (
        "import sys\n"
        "from titan_linear.distributed.process import outliving_readers\n"
        "with outliving_readers():\n"
        f"    print('before', file=sys.{stream}, flush=True)\n"
        "    sys.stdin.read()\n"
        "    for _ in range(3):\n"
        f"        print('x' * 100_000, file=sys.{stream}, flush=True)\n"
        f"    print('kept for the end', file=sys.{stream})\n"
        "sys.exit(7)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, **{stream: subprocess.PIPE})
    reader = getattr(run, stream)
    assert reader.readline() == b"before\n"
    reader.close()
    run.stdin.close()
    assert run.wait() == 7
