"""What the processes of tests/storage/test_hf_io.py run; here, so that they need not import transformers."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from titan_linear.config import ActivationCheckpoint, load_config
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.options import SessionOptions
from titan_linear.distributed.parallelize import materialise, parallelize, set_dtype
from titan_linear.models import mixers
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import placements
from titan_linear.models.init import owned
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.storage import files, hf_writing
from titan_linear.storage.checkpoint import SaveFailed
from titan_linear.storage.hf_io import load_weights, read_model
from titan_linear.storage.hf_writing import gather, write_folder
from titan_linear.storage.tensors import named_parameters
from titan_linear.train import Trainer

KDA = replace(preset("kda", "debug"), norm_eps=1e-6)
LARGE = replace(
    KDA,
    vocab_size=32768,
    dim=4096,
    hidden_dim=14336,
    num_layers=3,
    pattern=(mixers.KDA(heads=32, v_heads=32, head_dim=128, v_head_dim=128),),
)


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Of the tensors of KDA as a Hugging Face folder has them; not at import, for the meta device imports Triton."""
    return {placement.name: placement.shape for placement in placements(KDA, "KDAForCausalLM")}


EVERY = 100  # rows between the marks in a tensor


def mark(name: str, row: int) -> float:
    return 1.0 + zlib.crc32(f"{name} {row}".encode()) % 1000


def sharded(
    config: ModelConfig,
    world_size: int,
    replicas: int = 1,
    tp: int = 1,
    ep: int = 1,
    dtype: torch.dtype = torch.float32,
    fsdp_shard: int = -1,
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    set_dtype(model, torch.float32)
    options = SessionOptions(
        compute_dtype=dtype, activation_checkpoint=ActivationCheckpoint(mode="full")
    )
    dims = build_mesh(
        "cpu", replicas, world_size // replicas // tp, 1, tp, ep, fsdp_shard=fsdp_shard
    )
    parallelize(model, dims, options, torch.device("cpu"))
    materialise(model, torch.device("cpu"))
    return model


def in_and_out(rank, world_size, paths, replicas=1, tp=1, ep=1, fsdp_shard=-1):
    """Load each folder, write it again; the loaded parameters."""
    states = []
    for source, target in paths:
        family, config = read_model(source)
        model = sharded(
            config, world_size, replicas, tp, ep if config.moe else 1, fsdp_shard=fsdp_shard
        )
        load_weights(source, model)
        write_folder(
            target, config, family, gather(model), dtype=None, like=source, shard_bytes=20_000
        )
        get = gather(model)
        states.append({name: get(name) for name, _ in model.named_parameters()})
    return states


def train_on_rank(rank, world_size, argv):
    Trainer(load_config(argv)).train()


def go_on(rank, world_size, argv):
    """The step that a run comes back to, and its embedding there."""
    trainer = Trainer(load_config(argv))
    return trainer.step, gather(trainer.model)("embedding.weight")


def gathered_after_a_forward(rank, world_size, folder):
    """Parameters whose gathered values are not those that were loaded, once a forward in bfloat16 has run."""
    _, config = read_model(folder)
    model = sharded(config, world_size, dtype=torch.bfloat16)
    load_weights(folder, model)
    before = {name: gather(model)(name) for name in named_parameters(model)}
    with torch.no_grad():
        model(torch.arange(9).unsqueeze(0), BatchPlan(torch.arange(9)))
    get = gather(model)
    return [
        name
        for name, value in before.items()
        if get(name).dtype != value.dtype or not torch.equal(get(name), value)
    ]


def export_fails(rank, world_size, folder, target, failure):
    family, config = read_model(folder)
    model = sharded(config, world_size)
    load_weights(folder, model)
    whole, written = hf_writing._write_rows, []

    def write(*arguments):
        written.append(1)
        if len(written) == 3:
            raise failure
        whole(*arguments)

    hf_writing._write_rows = write
    try:
        write_folder(target, config, family, gather(model), dtype=None, like=folder)
    except SaveFailed as error:
        return str(error)
    finally:
        hf_writing._write_rows = whole
    return ""


def export_until_killed(folder: Path, moment: int) -> None:
    """Write biases of 2 over the folder; killed at the `moment`-th change of names after the tensors are written."""
    changes = itertools.count()

    def count(event, _):  # audit events come before what they tell of
        if event in ("os.rename", "os.remove", "os.rmdir") and next(changes) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    replace = files._replace

    def counted(*arguments):
        sys.addaudithook(count)
        replace(*arguments)

    files._replace = counted
    export(folder, 2.0)
    os._exit(0)


def export(folder: Path, value: float) -> None:
    write_folder(
        folder,
        KDA,
        "KDAForCausalLM",
        lambda name: torch.full(shapes()[name], value),
        dtype=torch.float32,
    )


def export_and_wait(folder: Path) -> None:
    """Write biases of 2; before its last tensor it waits until somebody removes the file "waits" beside the folder."""
    *_, last = shapes()

    def get(name):
        if name == last:
            folder.with_name("waits").touch()
            while folder.with_name("waits").exists():
                time.sleep(0.01)
        return torch.full(shapes()[name], 2.0)

    write_folder(folder, KDA, "KDAForCausalLM", get, dtype=torch.float32)


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def load_large(rank, world_size, folder):
    """(bytes that this rank owns, the most anonymous memory it had while loading, marks that it found in place)."""
    peak, loading = [0], True

    def watch():
        while loading:
            peak[0] = max(peak[0], anonymous_memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = sharded(LARGE, world_size)
    load_weights(folder, model)
    loading = False
    watcher.join()
    names = {
        placement.name: next(placement.pieces())[0].name
        for placement in placements(LARGE, "KDAForCausalLM")
    }
    owned_bytes = marks = 0
    for name, p in model.named_parameters():
        local, (first, *_) = owned(p)
        local = local.detach()
        owned_bytes += local.numel() * 4
        rows = [row for row in range(first, first + len(local)) if row % EVERY == 0]
        values = local.reshape(len(local), -1)
        assert [values[row - first, 0].item() for row in rows] == [
            mark(names[name], row) for row in rows
        ]
        assert int(values.count_nonzero()) == len(rows)  # and nothing elsewhere
        marks += len(rows)
    return owned_bytes, peak[0], marks
