"""What a step does where there is a GPU, on the CPU: events, streams, pinned memory and devices are stood in for."""

from types import SimpleNamespace

import pytest
import torch

from titan_linear.hooks import norms
from titan_linear.step import feed as feeds
from titan_linear.step import flops, optimizer
from titan_linear.step.feed import Feed
from titan_linear.step.optimizer import HostCopy, StepNumbers, norms_of

GPU = torch.device("cuda")


# --- Norms -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch):
    """Tensors say that they are on a GPU, where the norms of many are computed at once."""
    monkeypatch.setattr(torch.Tensor, "device", GPU, raising=False)


def tensors(dtype):
    """Of all shapes, an empty shard and a scalar among them."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 50), (0, 50), (7,), (), (2, 3, 4)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_many_tensors_at_once(elsewhere, dtype):
    """In float32 whatever the dtype, in order, and 0 of an empty one; so are their squares for telemetry in float64."""
    given = tensors(dtype)
    exact = torch.stack([x.double().norm() for x in given])
    found, squares = norms_of(given), norms._squares(given)
    assert found.dtype == torch.float32 and squares.dtype == torch.float64
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(squares, exact.square(), rtol=2e-6, atol=0)


def test_squares_of_a_mix_of_dtypes(elsewhere):
    """Weights in float32 and gradients in bfloat16, in either order."""
    given = [*tensors(torch.float32), *tensors(torch.bfloat16)]
    exact = torch.stack([x.double().square().sum() for x in given])
    torch.testing.assert_close(norms._squares(given), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(norms._squares(given[::-1]), exact.flip(0), rtol=2e-6, atol=0)


# --- What the host waits for -----------------------------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch):
    """What is done with memory and events, in order."""
    done = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            done.append("record")

        def synchronize(self):
            done.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return done


def test_a_steps_numbers_are_copied_before_their_event(log, monkeypatch):
    """Into pinned memory, without the host's waiting; it reads them only after the event."""
    copy_, tolist = torch.Tensor.copy_, torch.Tensor.tolist

    def empty_like(x, device, pin_memory):
        log.append(f"pinned {pin_memory}")
        return torch.full(x.shape, torch.nan, dtype=x.dtype, device=device)

    def copied(x, source, non_blocking):
        assert non_blocking
        log.append("copy")
        return copy_(x, source)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: log.append("read") or tolist(x))
    moment = optimizer.Moment
    monkeypatch.setattr(optimizer, "Moment", lambda device: moment(GPU))
    loss, norm, signal, report = torch.tensor([2.5, 0.5, 15.0, 7.0], dtype=torch.float64)
    numbers = HostCopy(StepNumbers(loss, norm, signal, (report,)), torch.tensor([1.0, 3.0]))
    assert log == ["pinned True", "copy", "record"]
    reading = numbers.wait()
    assert log[3:] == ["synchronize", "read"]
    assert reading == (2.5, 0.5, 15.0, [7.0], [1.0, 3.0])


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("idle", [True, False])
def test_the_feed_counts_time_in_which_the_device_waits(monkeypatch, idle, reads):
    """All of it, if the device has by its end done what was queued before its beginning; on a CPU always."""
    clock, order = [0.0], []

    def record_event():
        order.append("record")
        return SimpleNamespace(query=lambda: order.append("query") or idle)

    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=record_event)
    )
    monkeypatch.setattr(feeds, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for device, waited in ((GPU, 3.0 * idle), (torch.device("cpu"), 3.0)):
        feed = Feed(
            iter(()), lambda batch: batch, micro_steps=1, copies=1, host=None, device=device
        )
        with feed._timed(reads):
            order.append("work")
            clock[0] += 3
        assert feed._stats.seconds == 3.0 * reads and feed._stats.waited == waited
    assert order == ["record", "work", "query", "work"]


# --- Rates -----------------------------------------------------------------------------------------------------------


def test_the_peak_of_a_gpu_is_said_or_missed_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Other")
    assert flops.peak_tflops(0.0, "bfloat16", GPU) is None
    assert "the peak of NVIDIA Other in" in flops.no_peak("bfloat16", GPU)
    assert "the peak of the CPU in" in flops.no_peak("float32", torch.device("cpu"))
