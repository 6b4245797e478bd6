"""What proofs compute and say where there is a GPU, on the CPU: its driver is stood in for."""

import json
from types import SimpleNamespace

import pytest
import torch

from titan_linear.config import load_config
from titan_linear.models.presets import MODELS
from titan_linear.proof import doctor, hf, subject

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("seq_len, lengths", [(8192, (256, 2048)), (1024, (256, 1024))])
def test_streams_are_longer_on_a_gpu(seq_len, lengths):
    """But no longer than the run's."""
    parallelism = load_config([]).parallelism
    found = [subject._length(seq_len, parallelism, device) for device in (CPU, GPU)]
    assert tuple(found) == lengths


@pytest.mark.parametrize("device, name", [(GPU, "NVIDIA Other"), (CPU, "the CPU")])
def test_the_doctor_names_its_device(monkeypatch, device, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Other")
    model = MODELS["hybrid"]["debug"]
    degrees = SimpleNamespace(ranks=1)
    examined = SimpleNamespace(
        run=load_config([]),
        device=device,
        model=model,
        dtype=torch.bfloat16,
        degrees=degrees,
        said=(),
    )
    assert f"1 rank in one process on {name}: " in doctor._introduction(examined)


def test_a_published_model_must_fit_the_gpu(tmp_path, monkeypatch):
    """With this project's beside it, in the memory that is free there, not in the host's."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 80 << 30))
    assert not hf._reason_against(tmp_path, 1 << 30, GPU)
    said = "two models of 1.5 GiB do not fit in 4.0 GiB"
    assert hf._reason_against(tmp_path, 3 << 30, GPU) == said
