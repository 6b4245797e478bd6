"""What ranks do where they have GPUs, on the CPU: devices, events, recorders and backends are stood in for."""

import pickle
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import triton
from torch import nn

from titan_linear.distributed import compiling, groups, hangs, one_process, parallelize
from titan_linear.distributed.hangs import Watch, late_collective, recorded
from titan_linear.distributed.one_process import run_ranks
from titan_linear.distributed.process import own_device
from titan_linear.ops.triton import tiles
from titan_linear.proof import doctor

GPU = torch.device("cuda", 3)


@pytest.fixture
def gpus(monkeypatch):
    """There are GPUs. The list has the devices that were made current, with the threads."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.append((threading.get_ident(), device))
    )
    return current


# --- Ranks in one process --------------------------------------------------------------------------------------------


def test_ranks_of_one_process_share_its_device(gpus):
    """Each in its own thread, for which it is made the current one."""
    threads = run_ranks(lambda group: threading.get_ident(), 3)
    assert sorted(gpus) == sorted((thread, 3) for thread in threads)


def test_streams_of_ranks_wait_for_each_other(monkeypatch):
    """A collective copies what all ranks' streams have computed, and each then waits for the copies."""
    log = []

    class Event:
        def __init__(self):
            log.append("record")
            self.number = log.count("record")

        def wait(self):
            log.append(f"wait for {self.number}")

    copy = one_process.COPIES["all_reduce"]
    monkeypatch.setitem(
        one_process.COPIES, "all_reduce", lambda ranks: log.append("copy") or copy(ranks)
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=Event)
    )

    def on_rank(group):
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        return x.sum().item()

    assert run_ranks(on_rank, 3) == [6.0, 6.0, 6.0]
    waits = [f"wait for {n}" for n in (1, 2, 3)]
    assert log == ["record"] * 3 + waits + ["copy", "record"] + ["wait for 4"] * 3


# --- Processes and their groups --------------------------------------------------------------------------------------


def test_a_process_takes_the_gpu_of_its_local_rank(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device() == GPU and [device for _, device in gpus] == [GPU]
    monkeypatch.delenv("LOCAL_RANK")
    assert own_device() == torch.device("cuda", 0)


@pytest.fixture
def backends(monkeypatch):
    """Backends of the default groups that were made."""
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return made


@pytest.mark.parametrize("available", [False, True])
def test_collectives_on_gpus_are_nccls_and_others_gloos(backends, monkeypatch, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv(groups.STORE, raising=False)
    with groups.process_group(timedelta(seconds=5)):
        pass
    with doctor.one_process():
        pass
    assert backends == 2 * ["cpu:gloo,cuda:nccl" if available else "gloo"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_offloaded_shards_are_pinned_for_a_gpu(monkeypatch, device_type):
    policies = []
    monkeypatch.setattr(parallelize, "replicated_parameters", lambda model: [])
    monkeypatch.setattr(
        parallelize, "fully_shard", lambda module, **options: policies.append(options)
    )
    dims = SimpleNamespace(
        fsdp_mesh=None, cpu_offload=True, ep=1, mesh=SimpleNamespace(device_type=device_type)
    )
    model = nn.Module()
    model.config = SimpleNamespace(tie_embeddings=False)
    model.layers = nn.ModuleList([nn.Identity()])
    model.embedding, model.head = nn.Identity(), nn.Identity()
    parallelize.apply_fsdp(model, dims, parallelize.MixedPrecisionPolicy(), reshard=True)
    pinned = {options["offload_policy"].pin_memory for options in policies}
    assert len(policies) >= 3 and pinned == {device_type == "cuda"}


# --- Recorders of collectives ----------------------------------------------------------------------------------------


def entry(backend, number, began, retired):
    """As PyTorch's recorders of NCCL and gloo have them, times in seconds."""
    return {
        "frames": [],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{backend}:all_reduce",
        "time_created_ns": int(began * 1e9),
        "input_sizes": ((2,),),
        "input_dtypes": ["Float"],
        "output_sizes": ((2,),),
        "output_dtypes": ["Float"],
        "state": "completed" if retired else "started",
        "time_discovered_started_ns": int(began * 1e9),
        "time_discovered_completed_ns": int(began * 1e9) + 5 if retired else None,
        "retired": retired,
        "timeout_ms": 20_000,
        "is_p2p": False,
    }


@pytest.fixture
def traces(gpus, monkeypatch):
    """Recorders with a collective of NCCL that waits since second 10, and ended ones."""
    entries = {
        "_dump_nccl_trace": [entry("nccl", 1, 2, True), entry("nccl", 2, 10, False)],
        "_dump_fr_trace": [entry("gloo", 1, 3, True)],
    }

    def dump(entries, includeStackTraces=True):
        return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": entries})

    for name, of_backend in entries.items():
        monkeypatch.setattr(
            torch._C._distributed_c10d,
            name,
            lambda of_backend=of_backend, **options: dump(of_backend, **options),
            raising=False,
        )
    return entries


def test_nccls_recorder_is_read_too(traces, monkeypatch):
    assert recorded() == list(traces.values())
    assert late_collective(recorded(), int(24e9)) is None
    assert late_collective(recorded(), int(26e9))["profiling_name"] == "nccl:all_reduce"
    empty = pickle.dumps({"version": "2.10"})
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace", lambda **_: empty, raising=False
    )
    assert late_collective(recorded(), int(26e9)) is None


def test_a_hang_of_nccl_is_said_from_its_recorder(traces, tmp_path, monkeypatch, capsys):
    """In one line, and both recorders are written."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(hangs.time, "time_ns", lambda: int(27e9))
    store = dist.HashStore()
    store.set("waits/0", "")
    watch = Watch(tmp_path / "recorder", SimpleNamespace(clone=lambda: store), 20)
    watch.period = 0.0
    watch.step = lambda: 7
    watch._look()  # the step that is computed
    watch._look()
    said = capsys.readouterr().err
    assert said.startswith("hang: step 7: rank 0 in all_reduce for 17 of 20 s, rank 1 not there; ")
    names = sorted(path.name for path in (tmp_path / "recorder").iterdir())
    assert names == ["gloo-0", "rank-0"]
    assert pickle.loads((tmp_path / "recorder" / "rank-0").read_bytes())["entries"][1]["pg_id"] == 0


# --- Kernels that are compiled ahead ---------------------------------------------------------------------------------


def test_kernels_are_compiled_ahead_for_the_inputs_gpu(monkeypatch):
    entered = []

    @contextmanager
    def compiling_ahead(device):
        entered.append(device)
        yield

    monkeypatch.setattr(tiles, "compiling_ahead", compiling_ahead)
    with compiling._kernels_ahead([torch.ones(1), 3]):
        pass
    assert not entered
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    x = torch.ones(1)
    with compiling._kernels_ahead([3, x]):
        pass
    assert entered == [x.device]


class Compiled:
    """A kernel that was compiled; reading `run` loads it to the thread's current device."""

    def __init__(self, loaded):
        self.loaded = loaded

    @property
    def run(self):
        self.loaded.append(threading.get_ident())
        return None


def test_the_end_of_compiling_ahead_waits_for_kernels_and_loads_them(gpus, monkeypatch):
    """In threads whose current device is the one that they are for. A failure to compile is raised."""
    loaded, modes = [], []

    class Mode:
        def __init__(self, pool):
            self.pool, self.future_kernels = pool, {}
            modes.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(triton, "AsyncCompileMode", Mode)
    with tiles.compiling_ahead(GPU):
        for key in range(5):
            modes[-1].future_kernels[key] = modes[-1].pool.submit(Compiled, loaded)
        assert not loaded
    assert len(loaded) == 5 and set(loaded) <= {thread for thread, _ in gpus}
    assert {device for _, device in gpus} == {GPU}
    failed = Future()
    failed.set_exception(RuntimeError("out of registers"))
    with pytest.raises(RuntimeError, match="out of registers"), tiles.compiling_ahead(GPU):
        modes[-1].future_kernels[0] = failed


def test_launches_on_the_meta_device_only_compile(monkeypatch):
    """By the first argument, or the first tensor of a tuple, or a descriptor's; all others run."""
    launched = []
    kernel = tiles.sum_groups_kernel
    monkeypatch.setattr(
        kernel, "jitted", SimpleNamespace(run=lambda *_, warmup, **__: launched.append(warmup))
    )
    here, there = torch.ones(64, 64), torch.ones(64, 64, device="meta")
    for x in (here, there):
        for first in (x, (x, 3), ((x, 3), None), tiles.chunk_tiles(x)):
            kernel[1,](first, here)
    assert launched == [False] * 4 + [True] * 4
