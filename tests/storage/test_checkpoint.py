"""Checkpoints: bitwise under any mesh, whole or absent, damage noticed."""

import concurrent.futures
import contextlib
import errno
import hashlib
import io
import itertools
import math
import multiprocessing as mp
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import types
import zlib
from functools import partial
from pathlib import PosixPath
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.processes import stopped, until
from tests.refusals import refused
from tests.worlds import free_port
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.mixers import KDA, Attention
from titan_linear.run.build import unallocated
from titan_linear.storage import tensors
from titan_linear.storage.checkpoint import Checkpointer, SaveFailed
from titan_linear.storage.files import Unreadable
from titan_linear.storage.manifest import Manifest, read_manifest
from titan_linear.storage.step_folders import (
    Progress,
    complete_steps,
    find_step,
    read_progress,
    verify,
    weights_path,
)
from titan_linear.storage.tensors import check_weights, holds_optimizer, stored_weights

PATTERN = (
    KDA(heads=1, v_heads=2, head_dim=4, v_head_dim=4),
    Attention(heads=2, kv_heads=1, head_dim=4, qk_norm="head"),
)
CONFIG = dict(vocab_size=17, dim=6, pattern=PATTERN, num_layers=2, hidden_dim=10)
# where it is not what is in a checkpoint that matters
SMALL = dict(pattern=PATTERN[:1], num_layers=1)
LR = 1e-2
WRAPS = {
    "none": lambda layer: layer,
    "ac": checkpoint_wrapper,
    "ac, compile": lambda layer: torch.compile(checkpoint_wrapper(layer), backend="eager"),
}


# --- A sharded model, and gradients that depend on the weights alone -------------------------------------------------


def build(mesh, *, seed=0, tied=True, wrap="ac", lr=LR, fused=True, **changes):
    """As the trainer builds it: blocks wrapped and sharded; A_log and dt_bias replicated and plain.

    fused: AdamW takes one operation, whose last bits depend on where a shard ends.
    """
    model = Decoder(ModelConfig(**CONFIG | dict(tie_embeddings=tied) | changes))
    for i, layer in enumerate(model.layers):
        model.layers[i] = WRAPS[wrap](layer)
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    plain = {p for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    for module in (*model.layers, model):
        fully_shard(module, mesh=device_mesh, ignored_params=plain)
    fill(model, seed)
    rest = [p for p in model.parameters() if p not in plain]
    groups = [{"params": rest}, {"params": list(plain), "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=lr, weight_decay=0.1, fused=fused)


def nowhere(tied=True, **changes):
    """On the meta device, as before processes start."""
    return unallocated(ModelConfig(**CONFIG | dict(tie_embeddings=tied) | changes), torch.float32)


def fill(model, seed):
    initialise(model, seed)
    with torch.no_grad():
        for p in model.parameters():  # norms are ones: tell them apart
            p.add_(torch.sin(seed + 3 * p) if p.numel() else p)


def step(model, optimizer):
    """A real optimizer step, elementwise in the weights, so that it is the same under every mesh."""
    for p in model.parameters():
        p.grad = torch.sin(3 * p.detach()) + 0.1
    optimizer.step()
    optimizer.zero_grad()


def digests(model, optimizer):
    """A hash of each whole tensor: weights, and the optimizer's state."""
    tensors = {}
    for name, p in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        tensors[name] = p
        for key, value in (optimizer.state[p] if optimizer else {}).items():
            tensors[f"{name}/{key}"] = value
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {
        name: hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for name, t in whole.items()
    }


def save_steps(rank, world_size, folder, steps, model_options=None, mesh=None):
    """Save after each of `steps`; the digests at the last one, and after one more step."""
    model, optimizer = build(mesh or (world_size,), **(model_options or {}))
    checkpointer = Checkpointer(folder)
    for number in range(1, max(steps) + 1):
        step(model, optimizer)
        if number in steps:
            checkpointer.save(number, model, optimizer, Progress(step=number, total_steps=9))
    saved = digests(model, optimizer)
    step(model, optimizer)
    return saved, digests(model, optimizer)


def load_step(rank, world_size, folder, mesh, number, model_options=None):
    model, optimizer = build(mesh, seed=1, **(model_options or {}))
    before = digests(model, None)
    progress = Checkpointer(folder).load(number, model, optimizer)
    loaded = digests(model, optimizer)
    step(model, optimizer)
    return before, progress, loaded, digests(model, optimizer)


# --- Round trips -----------------------------------------------------------------------------------------------------


# wrappers may change too
MESHES = {(2,): "ac", (1,): "ac, compile", (2, 1): "none", (4,): "none", (2, 2): "ac"}


@pytest.mark.parametrize("tied, meshes", [(True, MESHES), (False, {(1,): "none"})])
def test_bitwise_under_any_mesh(worlds, tmp_path, tied, meshes):
    options = {"tied": tied, "fused": False}
    saved, after = worlds(2).run(save_steps, tmp_path, [1, 2], options)[0]
    assert (
        any(name.endswith("A_log/exp_avg") for name in saved) and ("head.weight" in saved) != tied
    )
    for mesh, wrap in meshes.items():
        for result in worlds(math.prod(mesh)).run(
            load_step, tmp_path, mesh, 2, options | {"wrap": wrap}
        ):
            before, progress, loaded, loaded_after = result
            assert not set(before.values()) & set(saved.values())  # else nothing would need loading
            assert progress == Progress(step=2, total_steps=9)
            assert (loaded, loaded_after) == (saved, after), mesh


def test_saved_under_hsdp(worlds, tmp_path):
    options = {"fused": False}
    saved, after = worlds(4).run(save_steps, tmp_path, [1], options, (2, 2))[0]
    assert worlds(1).run(load_step, tmp_path, (1,), 1, options)[0][2:] == (saved, after)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "step-1").glob("*.distcp")}
    # replicas share the writing
    assert len(sizes) == 4 and max(sizes.values()) < 2 * min(sizes.values()), sizes


def save_async_and_step(rank, world_size, folder):
    """Nothing is written before the weights have changed twice."""
    model, optimizer = build((world_size,))
    checkpointer = Checkpointer(folder, async_mode="async")
    saved = []
    for number in (1, 2):
        step(model, optimizer)
        go, save = threading.Event(), dcp.save
        with patch.object(
            dcp, "save", lambda *a, go=go, save=save, **k: (go.wait(), save(*a, **k))
        ):
            checkpointer.save(number, model, optimizer, Progress(step=number, total_steps=9))
            saved.append(digests(model, optimizer))
            step(model, optimizer)
            go.set()
            checkpointer.wait()
    return saved


def test_async_equals_sync(worlds, tmp_path):
    saved = worlds(2).run(save_async_and_step, tmp_path)[0]
    for number in (1, 2):
        verify(tmp_path / f"step-{number}")
        _, progress, loaded, _ = worlds(2).run(load_step, tmp_path, (2,), number)[0]
        assert progress.step == number and loaded == saved[number - 1]


def load_keeps_hyperparameters(rank, world_size, folder):
    model, optimizer = build((world_size,), seed=1, lr=0.5)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    Checkpointer(folder).load(1, model, optimizer)
    return [
        (group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups
    ]


def test_hyperparameters_are_the_new_runs(worlds, tmp_path):
    worlds(2).run(save_steps, tmp_path, [1])
    groups = worlds(2).run(load_keeps_hyperparameters, tmp_path)[0]
    assert groups == [(0.5, 0.25, (0.9, 0.999)), (0.5, 0.0, (0.9, 0.999))]


# --- Weights only, other models --------------------------------------------------------------------------------------


def save_weights_only(rank, world_size, folder):
    model, optimizer = build((world_size,))
    step(model, optimizer)
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model, optimizer, Progress(step=1))
    step(model, optimizer)
    checkpointer.save(2, model, None, Progress(step=2))
    return digests(model, None)


def load_weights(rank, world_size, path, options=None):
    model, _ = build((world_size,), seed=1, **(options or {}))
    tensors.load_weights(path, model, dist.group.WORLD)
    return digests(model, None)


def load_error(rank, world_size, folder, number):
    model, optimizer = build((world_size,), seed=1)
    try:
        return Checkpointer(folder).load(number, model, optimizer)
    except (ValueError, SystemExit) as error:  # what rank 0 finds, it says
        return str(error)


def load_weights_error(rank, world_size, path, options):
    try:
        return load_weights(rank, world_size, path, options)
    except ValueError as error:
        return str(error)


def test_saves_of_weights_alone_are_recognised(worlds, tmp_path):
    saved = worlds(2).run(save_weights_only, tmp_path)[0]
    assert holds_optimizer(tmp_path / "step-1") and not holds_optimizer(tmp_path / "step-2")
    run = tmp_path / "run"
    (run / "saves").mkdir(parents=True)
    (tmp_path / "step-1").rename(run / "saves" / "step-1")
    shutil.copytree(tmp_path / "step-2", run / "checkpoint" / "step-3")
    shutil.copytree(tmp_path / "step-2", run / "saves" / "step-2")
    (run / "manifest.json").write_text("{}")
    assert weights_path(run) == run / "checkpoint" / "step-3"
    (run / "config.toml").write_text('[checkpoint]\nfolder = "saves"')
    for path in (run, run / "saves", run / "saves" / "step-2"):
        assert weights_path(path) == run / "saves" / "step-2"
    assert worlds(2).run(load_weights, run)[0] == saved
    (run / "saves" / "step-1").rename(tmp_path / "step-1")
    assert weights_path(tmp_path) == tmp_path / "step-2"
    for path in (tmp_path, tmp_path / "step-2"):
        assert worlds(4).run(load_weights, path)[0] == saved
    assert worlds(2).run(load_weights, tmp_path / "step-1")[0].keys() == saved.keys()
    for message in worlds(2).run(load_error, tmp_path, 2):
        assert "step-2' holds weights only" in message and "checkpoint.load_step" in message
    with refused(r"checkpoint.initial_load_path = .*neither a whole checkpoint"):
        weights_path(tmp_path / "nothing")


def load_what_rank_0_sees(rank, world_size, load, *arguments):
    """While a run saves: the others do not see its newest checkpoint yet."""
    behind = patch("titan_linear.storage.step_folders.complete_steps", lambda folder: [1])
    with behind if rank else contextlib.nullcontext():
        return load(rank, world_size, *arguments)


def test_all_ranks_load_the_same_checkpoint(worlds, tmp_path):
    saved, _ = worlds(2).run(save_steps, tmp_path, [1, 2])[0]
    for weights in worlds(2).run(load_what_rank_0_sees, load_weights, tmp_path):
        assert weights == {name: saved[name] for name in weights}
    for _, progress, loaded, _ in worlds(2).run(
        load_what_rank_0_sees, load_step, tmp_path, (2,), 2
    ):
        assert progress.step == 2 and loaded == saved


def test_another_model_is_refused(worlds, tmp_path):
    worlds(2).run(save_steps, tmp_path, [1])
    for options, found in (
        ({"num_layers": 3}, "lacks .* of this model's tensors .*layers.2"),
        ({"num_layers": 1}, "others .*layers.1"),
        ({"tied": False}, "lacks 1 of this model's tensors .*head.weight"),
        (
            {"hidden_dim": 12},
            r"6 tensors have another size: model.layers.0.mlp.gate_proj.weight \(10, 6\), here \(12, 6\)",
        ),
    ):
        with refused(found):
            check_weights(tmp_path / "step-1", nowhere(**options))
        for message in worlds(2).run(load_weights_error, tmp_path, options):
            assert re.search(found, message), message
    check_weights(tmp_path / "step-1", nowhere())


def test_a_missing_step_is_refused(worlds, tmp_path):
    assert find_step(tmp_path / "none", -1) is None
    with refused(r"checkpoint.load_step = 3.*it has none"):
        find_step(tmp_path, 3)
    worlds(2).run(save_steps, tmp_path, [1, 2])
    assert (find_step(tmp_path, -1), find_step(tmp_path, 1)) == (2, 1)
    with refused(r"checkpoint.load_step = 3.*use one of 1, 2"):
        find_step(tmp_path, 3)
    assert "checkpoint.load_step = 3" in worlds(2).run(load_error, tmp_path, 3)[0]


# --- Damage ----------------------------------------------------------------------------------------------------------


def zero(file):
    """The first 4 KB, or what there is."""
    with file.open("r+b") as stream:
        stream.write(bytes(min(4096, file.stat().st_size)))


def flip(file):
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "zeroed": zero,
    "flipped": flip,
    "deleted": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


def test_damage_is_noticed(worlds, tmp_path):
    worlds(2).run(save_steps, tmp_path / "sound", [1, 2])
    names = sorted(file.name for file in (tmp_path / "sound" / "step-2").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "progress.json"]
    verify(tmp_path / "sound" / "step-2")
    for name in names:
        for kind, damage in DAMAGE.items():
            folder = tmp_path / f"{name} {kind}"
            shutil.copytree(tmp_path / "sound", folder)
            damage(folder / "step-2" / name)
            with refused(rf"step-2/{name}' .*checkpoint.load_step = 1"):
                verify(folder / "step-2")
            assert name == "manifest.json" or weights_path(folder / "step-2") == folder / "step-2"
            verify(folder / "step-1")
    shutil.rmtree(folder / "step-1")
    with refused(r"start a new run in another job\.dump_folder") as error:
        verify(folder / "step-2")
    assert "remove" not in str(error.value)


def test_a_signal_ends_the_reading(monkeypatch, tmp_path):
    """A large checkpoint takes minutes to read."""
    blocks = []

    def read(*_):
        blocks.append(1)
        if len(blocks) == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.005)

    def stop(number, _):
        sys.exit(128 + number)

    for name in ("a", "b"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 30)
    write_manifest(tmp_path, {"a": [0, 0], "b": [0, 0]}, {})
    monkeypatch.setattr("titan_linear.storage.step_folders.checksum", read)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit):
            verify(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(blocks) < 2 * 1024


def write_manifest(folder, files, tensors):
    """As whoever has the program can write it."""
    manifest = Manifest.model_construct(files=files, tensors=tensors)
    (folder / "manifest.json").write_text(manifest.signed().model_dump_json())


@pytest.fixture
def small(tmp_path):
    """A checkpoint of two tensors in one process."""
    checkpoints, state = (
        tmp_path / "checkpoint",
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)},
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        read = {name: partial(torch.clone, x) for name, x in state.items()}
        Checkpointer(checkpoints).save_lazily(1, read, state, Progress(step=1))
    finally:
        dist.destroy_process_group()
    return checkpoints / "step-1"


def test_every_bit_of_a_manifest_counts(small):
    file = small / "manifest.json"
    sound = file.read_bytes()
    for bit in range(8 * len(sound)):
        altered = bytearray(sound)
        altered[bit // 8] ^= 1 << bit % 8
        file.write_bytes(altered)
        with pytest.raises(Unreadable):
            read_manifest(small)
    file.write_bytes(sound)
    verify(small)


CHUNK = {"offsets": [0], "sizes": [2], "relative_path": "x", "offset": 0, "length": 9}
TENSOR = {"dtype": "torch.float32", "size": [2], "chunks": [CHUNK]}


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize(
    "files, tensors, why",
    [
        ({}, {"a": TENSOR}, "it has no checksum of 'x'"),
        ({"x": [0, 0], "../y": [0, 0]}, {"a": TENSOR}, "it names a file of another folder, '../y'"),
        ({"x": [0, 0]}, {"a": TENSOR | {"dtype": "torch.load"}}, "there is no dtype 'torch.load'"),
        (
            {"x": [0, 0]},
            {"a": TENSOR | {"size": "2"}},
            "tensors.a.size: Input should be a valid array",
        ),
        (
            {"x": [0, 0]},
            {"a": TENSOR | {"more": 1}},
            "tensors.a.more: Extra inputs are not permitted",
        ),
        ([], {}, "files: Input should be an object"),
        ({"x": None}, {}, "files.x: Input should be a valid array"),
    ],
)
def test_a_manifest_from_elsewhere(small, files, tensors, why):
    """Its checksum is right."""
    write_manifest(small, files, tensors)
    for read in (verify, holds_optimizer, lambda folder: stored_weights(folder)("a")):
        with pytest.raises(Unreadable, match=re.escape(f"/manifest.json' cannot be read ({why}")):
            read(small)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"files": {}}', b"[" * 100_000, b"\xff"])
def test_a_manifest_that_is_none(small, content):
    (small / "manifest.json").write_bytes(content)
    with pytest.raises(Unreadable, match=r"/manifest.json' cannot be read"):
        verify(small)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


# BUILD with (None, {name: value}) sets attributes of whatever is on the stack, here of a class.
PATCH = b"\x80\x02cpathlib\nPosixPath\nN}X\x0a\x00\x00\x00read_bytesctorch\nSize\ns\x86b."


def test_the_pickle_is_never_opened(small):
    """Neither what calls functions nor what sets attributes of classes."""
    ran, read_bytes = small / "ran", PosixPath.read_bytes
    for payload in (pickle.dumps(Payload(ran)), PATCH):
        (small / ".metadata").write_bytes(payload)
        manifest = read_manifest(small)
        write_manifest(
            small,
            manifest.files | {".metadata": [len(payload), zlib.crc32(payload)]},
            manifest.tensors,
        )
        verify(small)
        assert not holds_optimizer(small)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            assert stored_weights(small)("a").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert not ran.exists() and PosixPath.read_bytes is read_bytes


@pytest.mark.parametrize("content", ["", "{}", '{"step": null}', "[1]"])
def test_progress_that_cannot_be_read(small, content):
    (small / "progress.json").write_text(content)
    with pytest.raises(
        Unreadable, match=r"/progress.json' cannot be read \(.*restore it from a copy"
    ):
        read_progress(small)


def test_half_written_is_passed_over_and_removed(worlds, tmp_path):
    worlds(2).run(save_steps, tmp_path, [1], SMALL)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9.tmp")  # all but renamed
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-8")
    (tmp_path / "step-8" / "manifest.json").unlink()
    (tmp_path / "step-7").mkdir()
    assert complete_steps(tmp_path) == [1] and find_step(tmp_path, -1) == 1
    with refused(r"checkpoint.load_step = 8.*use one of 1"):
        find_step(tmp_path, 8)
    worlds(2).run(go_on, tmp_path, 1, [7, 8], {})
    assert complete_steps(tmp_path) == [1, 7, 8] and not list(tmp_path.glob("*.tmp"))
    verify(tmp_path / "step-8")


# --- Going on, pruning -----------------------------------------------------------------------------------------------


class Reading:
    """A data loader's state."""

    def __init__(self, next_stream):
        self.next_stream = next_stream

    def state_dict(self):
        return {"next_stream": torch.tensor(self.next_stream)}

    def load_state_dict(self, state):
        self.next_stream = int(state["next_stream"])


def save_reading(rank, world_size, folder, async_mode):
    model, optimizer = build((world_size,), **SMALL)
    step(model, optimizer)
    checkpointer, reading = Checkpointer(folder, async_mode=async_mode), Reading(5_000_000_000)
    checkpointer.save(1, model, optimizer, Progress(step=1), reading)
    reading.next_stream += 8  # it goes on while the save is under way
    checkpointer.wait()


def load_reading(rank, world_size, folder):
    model, optimizer = build((world_size,), **SMALL)
    reading = Reading(0)
    Checkpointer(folder).load(1, model, optimizer, reading)
    return reading.next_stream


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_the_next_stream_is_saved_and_loaded_on_any_ranks(worlds, tmp_path, async_mode):
    worlds(2).run(save_reading, tmp_path, async_mode)
    assert worlds(1).run(load_reading, tmp_path) == [5_000_000_000]
    assert worlds(2).run(load_reading, tmp_path) == [5_000_000_000] * 2


def go_on(rank, world_size, folder, start, steps, options):
    model, optimizer = build((world_size,), **SMALL)
    checkpointer = Checkpointer(folder, **options)
    checkpointer.load(start, model, optimizer)
    kept = []
    for number in steps:
        step(model, optimizer)
        checkpointer.save(number, model, optimizer, Progress(step=number))
        checkpointer.wait()
        kept.append(complete_steps(folder))
        dist.barrier()
    return kept


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_keep_latest_k(worlds, tmp_path, async_mode):
    worlds(2).run(save_steps, tmp_path, [1, 2], SMALL)
    kept = worlds(2).run(
        go_on, tmp_path, 2, [3, 4, 5], {"keep_latest_k": 2, "async_mode": async_mode}
    )[0]
    assert kept == [[2, 3], [3, 4], [4, 5]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]
    assert worlds(2).run(go_on, tmp_path, 5, [6], {"keep_latest_k": 1})[0] == [[6]]
    assert worlds(2).run(go_on, tmp_path, 6, [7, 8], {"keep_latest_k": 0})[0] == [[6, 7], [6, 7, 8]]


def test_a_checkpoint_behind_a_link_is_let_go_as_a_link(worlds, tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    worlds(2).run(save_steps, run, [1, 2], SMALL)
    disk.mkdir()
    (run / "step-1").rename(disk / "step-1")
    (run / "step-1").symlink_to(disk / "step-1")
    (run / "step-9.tmp").symlink_to(disk / "step-1")  # what a removal left
    assert worlds(2).run(go_on, run, 2, [3, 4], {"keep_latest_k": 2})[0] == [[2, 3], [3, 4]]
    assert sorted(path.name for path in run.iterdir()) == ["step-3", "step-4"]
    verify(disk / "step-1")


def go_on_where_files_stay(rank, world_size, *arguments):
    """As on a disk of which other programs use files; also what is said."""

    def remove(path):
        if path.exists():
            raise OSError(errno.EBUSY, "Device or resource busy")

    with (
        patch("titan_linear.storage.checkpoint.remove", remove),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        return go_on(rank, world_size, *arguments), said.getvalue()


def test_what_cannot_be_removed_fails_no_save(worlds, tmp_path):
    worlds(2).run(save_steps, tmp_path, [1, 2], SMALL)
    (kept, said), (_, nothing) = worlds(2).run(
        go_on_where_files_stay, tmp_path, 2, [3, 4], {"keep_latest_k": 2}
    )
    assert kept == [[2, 3], [3, 4]] and nothing == ""
    assert said == "".join(
        f"warning: '{tmp_path / name}' is no longer needed and could not be removed: Device or resource busy\n"
        for name in ("step-1", "step-1.tmp", "step-2")
    )


def test_going_on_from_an_earlier_step(worlds, tmp_path):
    """Nothing happens before the first save; then the future that was left is set aside, the same step included."""
    worlds(2).run(save_steps, tmp_path, [1, 2, 3, 4], SMALL)
    old = {n: (tmp_path / f"step-{n}" / "__0_0.distcp").read_bytes() for n in (3, 4)}
    worlds(2).run(go_on, tmp_path, 2, [], {})
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
    assert worlds(2).run(go_on, tmp_path, 2, [3], {"keep_latest_k": 2})[0] == [[2, 3]]
    assert read_progress(tmp_path / "step-3") == Progress(step=3)
    (aside,) = tmp_path.glob("abandoned-*")
    assert {n: (aside / f"step-{n}" / "__0_0.distcp").read_bytes() for n in (3, 4)} == old
    verify(aside / "step-4")


def save_twice(rank, world_size, folder):
    model, optimizer = build((world_size,))
    checkpointer = Checkpointer(folder)
    inodes = []
    for state, number in ((None, 1), (optimizer, 1), (optimizer, 1), (None, 1)):
        checkpointer.save(number, model, state, Progress(step=number))
        inodes.append((folder / "step-1").stat().st_ino)
        dist.barrier()
    checkpointer.load(1, model, optimizer)
    checkpointer.save(1, model, optimizer, Progress(step=1))
    return [*inodes, (folder / "step-1").stat().st_ino]


def test_saving_a_step_again(worlds, tmp_path):
    weights, full, *again = worlds(2).run(save_twice, tmp_path)[0]
    assert weights != full  # more than was there
    assert again == [full] * 3
    assert holds_optimizer(tmp_path / "step-1")


# --- Errors and kills ------------------------------------------------------------------------------------------------


def save_with_broken_disk(rank, world_size, folder, broken_rank, fault, async_mode, verify=True):
    model, optimizer = build((world_size,), **SMALL)
    keep = 1 if fault == "lies" and verify else 10
    checkpointer = Checkpointer(folder, async_mode=async_mode, keep_latest_k=keep, verify=verify)
    checkpointer.save(1, model, optimizer, Progress(step=1))
    checkpointer.wait()
    step(model, optimizer)
    with FAULTS[fault if rank == broken_rank else "none"]():
        try:
            checkpointer.save(2, model, optimizer, Progress(step=2))
            checkpointer.wait()
            error = None
        except SaveFailed as failure:
            error = str(failure)
    dist.barrier()
    left = complete_steps(folder), list(folder.glob("*.tmp"))
    dist.barrier()
    checkpointer.save(3, model, optimizer, Progress(step=3))
    checkpointer.wait()
    return error, left, digests(model, optimizer)


class SmallFiles:
    """A real disk error inside DCP: this process cannot write files of more than 4 KB."""

    def __enter__(self):
        self.limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.limit[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_, **__):
    raise RuntimeError("not a disk error")


@contextlib.contextmanager
def full_device(_, path, mode):
    """In place of DCP's own stream. Unbuffered, so that torch.save itself meets the error and wraps it."""
    with open("/dev/full" if mode == "wb" else path, mode, buffering=0) as stream:
        yield stream


@contextlib.contextmanager
def lying_device(_, path, mode):
    """In place of DCP's own stream, which it is below: of each block the last byte is another on the disk."""
    with open(path, mode) as stream:
        if mode == "wb":
            write = stream.write
            stream = types.SimpleNamespace(
                write=lambda data: (
                    write(bytes(data)[:-1] + bytes([bytes(data)[-1] ^ 1])) if len(data) else 0
                ),
                tell=stream.tell,
                flush=stream.flush,
                close=stream.close,
            )
        yield stream


@contextlib.contextmanager
def lies_once():
    streams = iter([lying_device])
    honest = FileSystem.create_stream
    with patch.object(FileSystem, "create_stream", lambda *args: next(streams, honest)(*args)):
        yield


FAULTS = {
    "none": lambda: patch.dict({}),
    "write": SmallFiles,
    "lies": lambda: patch.object(FileSystem, "create_stream", lying_device),
    "lies once": lies_once,
    "device": lambda: patch.object(FileSystem, "create_stream", full_device),
    "runtime": lambda: patch("titan_linear.storage.step_folders._measure", broken),
    "sync": lambda: patch("titan_linear.storage.checkpoint.os.fsync", full_disk),
    "mkdir": lambda: patch("titan_linear.storage.checkpoint.Path.mkdir", full_disk),
    # DCP's own of .metadata
    "rename": lambda: patch("titan_linear.storage.checkpoint.Path.rename", full_disk),
    "commit": lambda: patch("titan_linear.storage.checkpoint.set_steps_aside", full_disk),
}


REASONS = dict.fromkeys(FAULTS, "No space left on device") | {
    "write": "File too large",
    "runtime": "RuntimeError('not a disk error')",
    "lies": "__1_0.distcp on the disk is not what was written",
}


@pytest.mark.parametrize(
    "fault, broken_rank, async_mode",
    [
        (*at, "disabled")
        for at in (
            ("mkdir", 0),
            ("write", 0),
            ("write", 1),
            ("rename", 0),
            ("sync", 1),
            ("commit", 0),
        )
    ]
    + [
        ("write", 1, "async"),
        ("commit", 0, "async"),
        ("device", 1, "disabled"),
        ("runtime", 1, "async"),
        ("lies", 1, "disabled"),
        ("lies", 1, "async"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(worlds, tmp_path, fault, broken_rank, async_mode):
    results = worlds(2).run(save_with_broken_disk, tmp_path, broken_rank, fault, async_mode)
    for error, (whole, leftovers), _ in results:
        assert error.startswith(f"saving step-2 in '{tmp_path}' failed: rank {broken_rank}: "), (
            error
        )
        assert error.partition(f"rank {broken_rank}: ")[2] == REASONS[fault], error
        assert (whole, leftovers) == ([1], [])
    assert complete_steps(tmp_path) == ([3] if fault == "lies" else [1, 3])
    assert worlds(2).run(load_step, tmp_path, (2,), 3, SMALL)[0][2] == results[0][2]


def save_after_a_failure(rank, world_size, folder):
    model, optimizer = build((world_size,), **SMALL)
    checkpointer = Checkpointer(folder, async_mode="async")
    with FAULTS["commit" if rank == 0 else "none"]():
        checkpointer.save(1, model, optimizer, Progress(step=1))
        concurrent.futures.wait([checkpointer._pending])
    checkpointer.save(2, model, optimizer, Progress(step=2))
    at_once = complete_steps(folder)
    checkpointer.save(3, model, optimizer, Progress(step=3))
    return at_once, checkpointer._pending is not None


def test_after_an_async_save_that_failed_the_next_is_made_at_once(worlds, tmp_path):
    """It may be the last: of a run that is asked to stop."""
    assert worlds(2).run(save_after_a_failure, tmp_path) == [([2], True)] * 2


def test_what_a_disk_alters_is_written_again(worlds, tmp_path):
    """Without verify it is seen when the checkpoint is read: its checksums are of what was to be written."""
    for (error, (whole, _), _), _ in zip(
        worlds(2).run(save_with_broken_disk, tmp_path / "a", 1, "lies once", "async"),
        range(2),
        strict=True,
    ):
        assert error is None and whole == [1, 2]
    verify(tmp_path / "a" / "step-2")
    worlds(2).run(save_with_broken_disk, tmp_path / "b", 1, "lies", "disabled", False)
    with refused(r"__1_0.distcp' was altered since it was saved"):
        verify(tmp_path / "b" / "step-2")


def save_until_killed(port, folder, moment):
    """Saves 1 and 2, then 3, which removes 1; killed at the `moment`-th change of names or files during the last."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    checkpointer = Checkpointer(folder, keep_latest_k=2)
    changes = itertools.count()

    def count(event, arguments):  # audit events come before what they tell of
        opened = (
            event == "open"
            and str(arguments[0]).startswith(str(folder))
            and arguments[2] & os.O_CREAT
        )
        if (opened or event in CHANGES) and next(changes) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    for number in (1, 2, 3):
        if number == 3:
            sys.addaudithook(count)
        checkpointer.save(number, nn.Linear(2, 2), None, Progress(step=number))
    os._exit(0)


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def processes(target, arguments):
    """A process for each tuple of arguments; they are forked from a server that has imported torch (see worlds.py)."""
    context = mp.get_context("forkserver")
    started = [context.Process(target=target, args=args) for args in arguments]
    for process in started:
        process.start()
    return started


def test_kill_at_every_moment_of_a_save(tmp_path):
    seen = []
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        (process,) = processes(save_until_killed, [(free_port(), folder, moment)])
        process.join(60)
        whole = complete_steps(folder)
        for number in whole:
            verify(folder / f"step-{number}")
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        seen.append((tuple(whole), any(folder.glob("*.tmp"))))
    assert whole == [2, 3] and len(seen) > 10
    # nothing of it yet; in progress; whole; the oldest one is being removed
    assert list(dict.fromkeys(seen)) == [
        ((1, 2), False),
        ((1, 2), True),
        ((1, 2, 3), False),
        ((2, 3), True),
    ]


def save_for_ever(rank, port, folder, async_mode):
    """Save `number` holds weights that are all `number`; a line per finished save goes to `folder`/done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    checkpointer = Checkpointer(folder, async_mode=async_mode, keep_latest_k=2)
    start = find_step(folder, -1) or 0
    if start:
        assert checkpointer.load(start, model, optimizer) == Progress(step=start)
        assert all((p.to_local() == start).all() for p in model.parameters())
    for number in itertools.count(start + 1):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(number)
                p.grad = torch.zeros_like(p)
        optimizer.step()
        checkpointer.save(number, model, optimizer, Progress(step=number))
        if rank == 0:
            with (folder / "done").open("a") as done:
                done.write(f"{number if async_mode == 'disabled' else number - 1}\n")


def stopped_in_a_save(ranks, folder):
    """Stop the processes. Where no save is in progress, they go on."""
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    until(lambda: all(stopped(rank.pid) for rank in ranks))
    if any(folder.glob("*.tmp")):
        return True
    for rank in ranks:
        os.kill(rank.pid, signal.SIGCONT)
    return False


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_kill_at_any_moment(tmp_path, async_mode):
    """Two processes are killed again and again, one after the other; each start resumes from the newest whole save.
    The last time, they are stopped first until that is in the middle of a save."""
    rng = random.Random(async_mode)
    done = tmp_path / "done"
    done.touch()
    for last in (False, False, True):
        before, port = done.stat().st_size, free_port()
        ranks = processes(save_for_ever, [(rank, port, tmp_path, async_mode) for rank in range(2)])
        while done.stat().st_size < before + 6:  # a few saves
            assert all(rank.is_alive() for rank in ranks)
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        while last and not stopped_in_a_save(ranks, tmp_path):
            time.sleep(rng.uniform(0, 0.02))
        for rank in rng.sample(ranks, 2):
            rank.kill()
            rank.join()
        whole = complete_steps(tmp_path)
        assert whole[-1] >= int(done.read_text().split()[-1]) and len(whole) >= 2, whole
        for number in whole:
            verify(tmp_path / f"step-{number}")
    assert any(tmp_path.glob("*.tmp")), "no kill hit a save: the test shows nothing"
