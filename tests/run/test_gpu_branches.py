"""What a run does at its start, and with results, where there is a GPU, on the CPU: devices are stood in for."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from titan_linear.commands.generate import device_of
from titan_linear.config import load_config
from titan_linear.data import IGNORE
from titan_linear.models.presets import MODELS
from titan_linear.run import model_checks, reading
from titan_linear.storage.run_manifest import write_manifest

GPU = torch.device("cuda")


def test_generation_takes_the_gpu_if_there_is_one(monkeypatch):
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert device_of(None) == torch.device(device)


@pytest.mark.parametrize("available", [False, True])
def test_implementations_are_checked_for_the_device_that_runs_them(monkeypatch, available):
    asked = []

    class Stop(Exception):
        pass

    def implementations(config, model, device):
        asked.append(device.type)
        raise Stop

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(model_checks, "implementations", implementations)
    with pytest.raises(Stop):
        model_checks.check_model(MODELS["hybrid"]["debug"], load_config([]), 1, 1)
    assert asked == ["cuda" if available else "cpu"]


def test_a_runs_manifest_names_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU number {i}")
    write_manifest(
        tmp_path, parameters=1, world_size=2, degrees={"dp_shard": 2}, implementations={}
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["hardware"]["gpus"] == ["GPU number 0", "GPU number 1"]


def test_results_are_read_after_their_copies(monkeypatch):
    """The copies of a micro-batch are queued, then its moment is marked; the next one's are too before the first is
    read, for which the host waits for that moment."""
    log, to, numpy = [], torch.Tensor.to, torch.Tensor.numpy

    class Moment:
        def __init__(self, device):
            self.number = log.count("copies end")
            log.append("copies end")

        def wait(self):
            log.append(f"wait for {self.number}")

    def copied(x, device, non_blocking=False):
        assert device == "cpu" and non_blocking
        log.append("copy")
        return to(x, device)

    def sharding(i):
        labels = torch.tensor([[IGNORE, 5, IGNORE, 7 + i]])
        return SimpleNamespace(tokens=labels, labels=labels, plan=None, columns={})

    class Logits:
        def __init__(self, x):
            self.x = x

    monkeypatch.setattr(reading, "Moment", Moment)
    monkeypatch.setattr(reading, "gathered", lambda own, host: [own])
    monkeypatch.setattr(reading, "replace", lambda logits, x: Logits(x))
    monkeypatch.setattr(reading.Reader, "batches", lambda *_, **__: iter(range(2)))
    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(torch.Tensor, "numpy", lambda x: log.append("read") or numpy(x))
    session = SimpleNamespace(
        model=lambda tokens, plan, loss: loss(Logits(torch.arange(4.0))),
        dims=SimpleNamespace(tp_ranks=SimpleNamespace(rank=0)),
        sharding=sharding,
        precision=nullcontext(),
        host=None,
    )
    reader = reading.Reader(config=None, tokenizer=None, session=session)
    found = list(reader.read(None, lambda logits, labels, own: (10 * logits.x,)))
    one = ["copy", "copy", "copies end"]
    assert log == [*one, *one, "wait for 0", "read", "read", "wait for 1", "read", "read"]
    assert [[x.tolist() for x in of_rank] for (of_rank,) in found] == 2 * [[[10.0, 30.0]]]
    assert all(isinstance(x, np.ndarray) for (of_rank,) in found for x in of_rank)
