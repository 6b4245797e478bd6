"""What hooks say and count where there is a GPU, on the CPU: its driver is stood in for."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from titan_linear.config import Comm, Config, Profiling, Training
from titan_linear.hooks import metrics, profiling, report, telemetry
from titan_linear.hooks.compilation import Compilation

GPU, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * GIB)
    stats = {"reserved_bytes.all.current": 4 * GIB, "inactive_split_bytes.all.current": GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    return stats


def test_memory_is_that_of_the_gpu(gpu):
    assert report.peak_memory_gib() == 3.0
    assert report.reserved_memory() == {"memory_reserved_gib": 5.0, "memory_fragmentation": 0.25}
    gpu.clear()  # nothing is allocated yet
    assert report.reserved_memory()["memory_fragmentation"] == 0.0


def test_without_a_gpu_there_is_the_process_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report.peak_memory_gib() > 0.01 and report.reserved_memory() == {}


def test_clock_and_power_are_said_if_the_driver_tells_them(monkeypatch):
    error = type("NVMLError", (Exception,), {})
    monkeypatch.setattr(report, "find_spec", lambda name: name)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", SimpleNamespace(NVMLError=error))
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_000)
    assert report.clock_and_power(GPU) == {"sm_clock_mhz": 1980, "power_watts": 650.0}
    assert report.clock_and_power(CPU) == {}

    def refused(device):
        raise error

    monkeypatch.setattr(torch.cuda, "power_draw", refused)
    assert report.clock_and_power(GPU) == {}
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert report.clock_and_power(GPU) == {}


@pytest.mark.parametrize("available", [False, True])
def test_the_board_draws_fragmentation_of_a_gpus_memory(tmp_path, monkeypatch, available):
    boards = []

    class Writer:
        def __init__(self, *_, **__):
            boards.append(self)

        def add_custom_scalars(self, charts):
            self.charts = charts

        def add_text(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    metrics._tensorboard(tmp_path, 0, Config(), with_mfu=False)
    names = {name for charts in boards[0].charts.values() for name in charts}
    assert ("fragmentation" in names) == available


@pytest.mark.parametrize(
    "device_type, ep, whole", [("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)]
)
def test_layers_on_gpus_should_be_one_graph(device_type, ep, whole):
    """Unless experts' rows are exchanged inside; a break is then said once."""
    dims = SimpleNamespace(mesh=SimpleNamespace(device_type=device_type), ep=ep)
    options = SimpleNamespace(compile=SimpleNamespace(enable=True))
    session = SimpleNamespace(dims=dims, host=None, options=options)
    graphs = Compilation(Training(), Comm(), session).graphs
    graphs._counters = {"stats": {"unique_graphs": 1}, "graph_break": {"a reason": 2}}
    said = graphs.after("training")
    assert ("in parts (graph_breaks = 2)" in said) == whole
    assert not graphs.after("training")


@pytest.mark.parametrize("available, time", [(False, "self_cpu"), (True, "self_cuda")])
def test_a_traces_costs_are_in_order_of_the_devices_time(tmp_path, monkeypatch, available, time):
    """By names that PyTorch's tables of costs take."""
    sorted_by = []
    with torch.profiler.profile() as real:
        torch.ones(8).exp()

    class Trace:
        step_num = 1

        def export_chrome_trace(self, path):
            pass

        def key_averages(self):
            return self

        def table(self, sort_by, row_limit):
            sorted_by.append(sort_by)
            return real.key_averages().table(sort_by=sort_by, row_limit=row_limit)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setenv("RANK", "0")
    profiler = profiling.Profiler(str(tmp_path), Profiling(), 0, lambda: None, ExitStack)
    profiler.recorded = 1
    profiler._write(Trace())
    (costs,) = tmp_path.rglob("*.txt")
    assert sorted_by == [f"{time}_time_total"] and "aten::exp" in costs.read_text()


@pytest.mark.parametrize(
    "tokens, window", [(100, 100), (256, 256), (1000, 256), (32_768, 2048), (1 << 20, 4096)]
)
def test_telemetrys_window_is_a_share_of_a_ranks_tokens(tokens, window):
    """Within limits, which short streams and very long ones reach."""
    assert telemetry._window_tokens(tokens) == window
