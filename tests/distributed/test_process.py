"""Signals of one process; what binds it to its parent is in test_launch.py."""

import ctypes
import io
import os
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.processes import until
from titan_linear.distributed.ending import explain
from titan_linear.distributed.process import StopSignal, outliving_readers, refusing, unescaped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("agreed", [False, True])
def test_a_signal_is_noted_and_a_stop_is_not_cut_short(number, agreed):
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


def test_a_signal_is_seen_while_the_main_thread_waits_in_c():
    """Where another rank has died, this one waits for a device for ever, and its handlers in Python do not run."""
    seen = []

    def other_thread():
        main = Path(f"/proc/self/task/{os.getpid()}/syscall")
        # its first argument, or "running" alone
        until(lambda: main.read_text().split()[1:2] == [hex(reader)])
        os.kill(os.getpid(), signal.SIGTERM)
        until(stop.arrived)
        seen.extend([stop.arrived(), stop.received])
        os.write(writer, b"\n")

    reader, writer = os.pipe()
    with StopSignal() as stop:
        assert stop.arrived() == 0
        thread = threading.Thread(target=other_thread)
        thread.start()
        # else it would end the wait below
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        thread.join()
    assert seen == [signal.SIGTERM, 0]
    assert stop.received == stop.arrived() == signal.SIGTERM


def test_nobody_reads_what_a_command_prints():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "titan_linear.run.launch", "--help", "flavors"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_interrupted_command_is_silent():
    code = (
        "import signal, sys\n"
        "from titan_linear.distributed.process import run_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
        "run_command(lambda argv: print('begun') or sys.stdin.read())\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as command:
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGINT)
        assert (command.wait(), command.stderr.read()) == (128 + signal.SIGINT, "")


ANYTHING = "tab\t é 中 \x1b]0;title\x07\x1b[2J\x9b1m\b\x7f\u202egpj\udcff a\rb c\r\nend"
SHOWN = r"tab<TAB> é 中 \x1b]0;title\x07\x1b[2J\x9b1m\x08\x7f\u202egpj\udcff a\rb c<CR>" + "\nend\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("around", ["run_command", "outliving_readers"])
def test_any_text_can_be_shown_and_none_is_obeyed(around, stream, encoding):
    code = (
        "import atexit, os, sys\n"
        "from titan_linear.distributed import process\n"
        "atexit.register(os.abort)\n"  # as threads may that the interpreter's end finds
        "def main(argv):\n"
        f"    print({ANYTHING!r}, file=sys.{stream})\n"
        "    return 7\n"
        "if 'run' in sys.argv[1]:\n"
        "    process.run_command(main)\n"
        "with process.outliving_readers():\n"
        "    code = main([])\n"
        "process.end(code)\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", code, around], capture_output=True, env=environment
    )
    escaped = SHOWN.encode(encoding, "backslashreplace")
    assert getattr(done, stream) == escaped.replace(b"<TAB>", b"\t").replace(b"<CR>", b"\r")
    assert done.returncode == 7


def test_progress_bars_and_colours_reach_the_terminal():
    out = io.StringIO()
    with redirect_stdout(out), outliving_readers():
        print("\rhalf", end="")
        print("\033[32mgreen\033[0m", file=unescaped(sys.stdout))
        print("\033[32mgreen\033[0m")
    assert out.getvalue() == "\rhalf\033[32mgreen\033[0m\n\\x1b[32mgreen\\x1b[0m\n"


def test_what_cannot_be_encoded_is_no_mistake_of_the_users():
    @refusing
    def main(argv):
        "é".encode("ascii")

    with pytest.raises(UnicodeEncodeError) as error:
        main([])
    assert explain(error.value) == (1, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_nobody_reads_what_a_run_prints(stream):
    """It goes on, and says the rest to nobody: a pipe that breaks in between is no reason to lose a last save."""
    code = (
        "import sys\n"
        "from titan_linear.distributed.process import outliving_readers\n"
        "with outliving_readers():\n"
        f"    print('before', file=sys.{stream})\n"
        "    sys.stdin.read()\n"
        "    for _ in range(3):\n"
        f"        print('x' * 100_000, file=sys.{stream})\n"
        f"    print('kept for the end', file=sys.{stream})\n"
        "sys.exit(7)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, **{stream: subprocess.PIPE}
    )
    reader = getattr(run, stream)
    assert reader.readline() == b"before\n"
    reader.close()
    run.stdin.close()
    assert run.wait() == 7
