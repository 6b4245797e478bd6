"""The command itself: killed and restarted, stopped by a signal, resumed with other degrees, refused.

Starting processes is most of what a run costs here. What is no question to the command is computed in processes that
other tests use too (`train_in`), and what the launcher refuses before it starts a process is asked of its `main`.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.keys import argv_of
from tests.launches import Launch
from tests.processes import children, gone, until
from tests.records import read_lines, write_texts
from tests.refusals import exit_of, own_handlers
from tests.worlds import free_port
from titan_linear.config import load_config
from titan_linear.run import launch
from titan_linear.storage.rundir import unused
from titan_linear.train import Trainer

ROOT = Path(__file__).parents[2]
STEPS = 12
KEYS = {
    "training.dataset": "jsonl",
    "training.seq_len": 64,
    "training.global_batch_size": 2,
    "training.steps": STEPS,
    "lr_scheduler.warmup_steps": 4,
    "parallelism.context_parallel_degree": 2,
    "checkpoint.interval": 3,
    "checkpoint.keep_latest_k": 2,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    draw = random.Random(0)
    texts = ("".join(draw.choices("abcdefgh", k=draw.randint(1, 149))) for _ in range(200))
    return write_texts(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", texts)


def start(corpus, folder, node=None, fresh=False, **overrides):
    """The launcher, as run_train.sh execs it, with two processes; or with one, as one of two nodes: (rank, port)."""
    place = {}
    if node is not None:  # with a cache of its own
        place = {
            "NNODES": 2,
            "NODE_RANK": node[0],
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": node[1],
            "NGPU": 1,
            "XDG_CACHE_HOME": folder / f"cache-{node[0]}",
        }
    output = unused(folder / "output")
    output.touch()
    return Launch(arguments(corpus, folder, **overrides), output, environment(**place), fresh)


def arguments(corpus, folder, **overrides):
    return argv_of(KEYS | {"training.dataset_path": corpus, "job.dump_folder": folder}, **overrides)


def environment(**variables):
    found = os.environ | {"NGPU": "2", "OMP_NUM_THREADS": "1"}
    found |= {name: str(value) for name, value in variables.items()}
    found.pop("TRITON_INTERPRET", None)  # as a user would have it
    return found | {"PYTHONPATH": f"{ROOT / 'tests/faults'}{os.pathsep}{ROOT}"}


def command(argv):
    argv, output = (
        [sys.executable, "-m", *argv],
        {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    return subprocess.Popen(argv, env=environment(), text=True, **output)


def finish(process, code=0):
    output, _ = process.communicate()
    assert process.returncode == code, output
    return output


def losses(folder):
    lines = read_lines(folder / "metrics.jsonl")
    # each once, in order
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: line["loss"] for line in lines}


def wait_for_step(process, folder, step):
    """Until `step` is reported."""
    while process.poll() is None:
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


def train_on_rank(rank, world_size, argv):
    trainer = Trainer(load_config(argv))
    begins_from = trainer.step
    trainer.train()
    return begins_from


def train_in(world, begins_from, corpus, folder, **overrides):
    """The same run without the command, which must go on from a given step; its losses."""
    steps = world.run(train_on_rank, arguments(corpus, folder, **overrides))
    assert steps == [begins_from] * world.world_size
    return losses(folder)


@pytest.fixture(scope="module")
def uninterrupted(corpus, worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    found = train_in(worlds(2), 0, corpus, folder)
    assert set(found) == set(range(1, STEPS + 1))
    return found


STARTS = "starts workers"


@pytest.fixture
def answer(corpus, capfd, monkeypatch):
    """answer(code, folder, **keys): what the launcher says in this process before it exits with `code`, or where that
    is STARTS, before it would start workers."""
    monkeypatch.setattr(launch, "run_workers", lambda *_: STARTS)
    monkeypatch.setenv("NGPU", "2")

    def answer(code, folder, **overrides):
        found, said = exit_of(launch.main, arguments(corpus, folder, **overrides), capfd)
        assert found == code, said
        return said

    with own_handlers():
        yield answer


def newest_step(folder):
    return max(
        int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").glob("step-*[0-9]")
    )


def test_sigkill_and_restart(corpus, tmp_path, uninterrupted, answer):
    """The launcher killed while it saves; then, on two nodes, a rank, after which all start again."""
    process = start(corpus, tmp_path, checkpoint__async_mode="disabled")
    wait_for_step(process, tmp_path, 5)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, workers)))  # the kernel ends them
    before = newest_step(tmp_path)
    port = free_port()
    nodes = [
        start(corpus, tmp_path, (rank, port), checkpoint__async_mode="async", comm__max_restarts=1)
        for rank in (0, 1)
    ]
    wait_for_step(nodes[0], tmp_path, 8)
    (worker,) = children(nodes[1].pid)
    os.kill(worker, signal.SIGKILL)
    said, other = finish(nodes[0]), finish(nodes[1])
    # each has tokenised for itself
    assert len(list(tmp_path.glob("cache-?/titan_linear/jsonl-*/tokens*"))) == 2
    assert "failed (exitcode: -9) local_rank: 0 " in other
    assert not re.search("Traceback|UserWarning", said + other)
    # the save before the last may be all there is when the kill meets a save
    assert before in (3, 6)
    again = [int(step) for step in re.findall(r"resuming from step (\d+)", said)]
    assert again[0] == before and again[1] in (3, 6, 9) and again[1] >= before
    assert losses(tmp_path) == uninterrupted
    assert "is finished" in answer(0, tmp_path)


# What Slurm has in their place: a node is a process here.
SLURM = {
    "srun": """
import os, signal, subprocess, sys
command = sys.argv[sys.argv.index("bash") :]
nodes = map(str, range(int(os.environ["SLURM_JOB_NUM_NODES"])))
own = [{"SLURM_NODEID": n, "XDG_CACHE_HOME": os.environ["CACHES"] + n} for n in nodes]
tasks = [subprocess.Popen(command, env=os.environ | of_node) for of_node in own]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
""",
    "scontrol": """
import sys
print(*(["127.0.0.1", "node2"] if sys.argv[1] == "show" else sys.argv[1:]), sep="\\n")
""",
}


def test_a_job_of_slurm_goes_back_into_the_queue_and_resumes(corpus, tmp_path, uninterrupted):
    """Two nodes; preempted, all of the job's processes get SIGTERM."""
    for name, program in SLURM.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{program}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "mine.toml").touch()
    job = {"SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_ID": os.getpid(), "SLURM_JOB_NODELIST": "node[1-2]"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {
        "SLURM_SUBMIT_DIR": ROOT,
        "CONFIG_FILE": tmp_path / "mine.toml",
        "PATH": path,
        "NGPU": 1,
        "CACHES": tmp_path / "cache-",
    }
    command = ["bash", ROOT / "examples/slurm.sh", *arguments(corpus, tmp_path / "run")]
    options = dict(
        env=environment(**job, **more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    begun = subprocess.Popen(command, **options)
    wait_for_step(begun, tmp_path / "run", 4)
    (srun,) = children(begun.pid)
    for process in (begun.pid, srun):
        os.kill(process, signal.SIGTERM)
    said = finish(begun, 143)
    assert said.endswith(f"requeue\n{job['SLURM_JOB_ID']}\n")
    saved = newest_step(tmp_path / "run")
    resumed = finish(subprocess.Popen(command, **options))
    assert f"resuming from step {saved}" in resumed and "requeue" not in resumed
    assert losses(tmp_path / "run") == uninterrupted


def test_from_dp_2_to_cp_2(corpus, worlds, tmp_path, uninterrupted, answer):
    first = {
        "parallelism__context_parallel_degree": 1,
        "training__steps": 6,
        "lr_scheduler__total_steps": 12,
    }
    train_in(worlds(2), 0, corpus, tmp_path, **first)
    output = answer(2, tmp_path, training__steps=20)
    assert "would change the learning rate of the 6 steps that are done" in output
    output = answer(STARTS, tmp_path, lr_scheduler__total_steps=12)
    assert "resuming with parallelism.context_parallel_degree: 1 → 2" in output
    resumed = train_in(worlds(2), 6, corpus, tmp_path, lr_scheduler__total_steps=12)
    assert set(resumed) == set(uninterrupted)
    assert max(abs(resumed[s] / uninterrupted[s] - 1) for s in resumed) < 1e-5


PARTS = {
    "parallelism__context_parallel_degree": 1,
    "parallelism__tensor_parallel_degree": 2,
    "parallelism__expert_parallel_degree": 2,
    "checkpoint__async_mode": "async",
}
OVER_TWO = {"parallelism__context_parallel_degree": 4, "parallelism__fsdp_shard_degree": 2}
MOVES = {
    "from dp 2 and cp 2 to tp 2 and ep 2 and back": ("qwen3.5", [{}, PARTS, {}]),
    "of adapters": ("kimi-linear", [PARTS, {}, PARTS]),
    "from shards over two ranks to all and to none": (
        "hybrid",
        [OVER_TWO, {}, {"parallelism__fsdp_shard_degree": 1}],
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_run_moves_twice(name, corpus, worlds, tmp_path):
    """What a rank has of a tensor, and of its moments, is another part each time."""
    model, splits = MOVES[name]
    keys = {"model__name": model, "lr_scheduler__total_steps": 6, "lr_scheduler__warmup_steps": 2}
    keys |= {"adapter__enable": "true"} if name == "of adapters" else {}
    alone, run = (tmp_path / "alone", tmp_path / "run")
    alone.mkdir()
    run.mkdir()
    whole = train_in(
        worlds(1),
        0,
        corpus,
        alone,
        training__steps=6,
        parallelism__context_parallel_degree=1,
        **keys,
    )
    for begins_from, split in zip((0, 2, 4), splits, strict=True):
        steps = begins_from + 2
        resumed = train_in(
            worlds(4), begins_from, corpus, run, training__steps=steps, **keys, **split
        )
    assert set(resumed) == set(whole) == set(range(1, 7))
    assert max(abs(resumed[s] / whole[s] - 1) for s in resumed) < 1e-5


def stopped(process, folder, number, code):
    """A run that a signal ended with a save: the step it reached."""
    process.send_signal(number)
    said, reached = finish(process, code), max(losses(folder))
    assert f"saved step {reached} in '{folder}/checkpoint'; the same command resumes\n" in said
    assert "Traceback" not in said
    assert (folder / "checkpoint" / f"step-{reached}").is_dir()
    return reached


def test_a_signal_saves_and_stops(corpus, worlds, tmp_path, uninterrupted):
    """SIGTERM, which a Ctrl-C comes to the workers as too (see below); of workers as they always start."""
    process = start(
        corpus, tmp_path, fresh=True, checkpoint__interval=1000, checkpoint__grace_seconds=60
    )
    wait_for_step(process, tmp_path, 2)
    reached = stopped(process, tmp_path, signal.SIGTERM, 143)
    assert reached < STEPS
    assert (
        train_in(worlds(2), reached, corpus, tmp_path, checkpoint__interval=1000) == uninterrupted
    )


REFUSED = [
    ({"training__seq_len": 65}, "training.seq_len = 65"),
    ({"training__seq_len": "64.0"}, "training.seq_len"),
    ({"training__sequence": 64}, "training.seq_len"),
    ({"parallelism__context_parallel_degree": 3}, "context_parallel_degree = 3"),
    (
        {"parallelism__context_parallel_method": "ulysses", "model__flavor": "nano"},
        "model.flavor = 'nano'",
    ),
    ({"model__vocab_size": 100}, "model.vocab_size = 100"),
    ({"training__dataset_path": "nowhere.jsonl"}, "training.dataset_path = 'nowhere.jsonl'"),
    ({"checkpoint__load_step": 7}, "checkpoint.load_step = 7"),
    ({"checkpoint__initial_load_path": "nowhere"}, "checkpoint.initial_load_path"),
    ({"model__impl": "triton"}, "impl = 'triton'"),
]


def is_refused(output, message, folder):
    assert message in output and "Traceback" not in output and "\nerror: " in f"\n{output}"
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize("keys, message", REFUSED[:-1])
def test_what_cannot_run_is_refused_before_anything_starts(keys, message, tmp_path, answer):
    is_refused(answer(2, tmp_path, **keys), message, tmp_path)


def test_the_command_refuses(corpus, tmp_path):
    """The process itself, in which kernels are not interpreted as they are here."""
    keys, message = REFUSED[-1]
    launcher = ["titan_linear.run.launch", *arguments(corpus, tmp_path, **keys)]
    is_refused(finish(command(launcher), 2), message, tmp_path)


def test_a_run_in_its_folder(corpus, tmp_path, answer):
    """Held by a live run, until Ctrl-C; then damaged; then asked for another model: each is refused, and nothing is
    lost."""
    process = start(corpus, tmp_path, training__steps=400)
    wait_for_step(process, tmp_path, 4)
    assert "in use by another run" in answer(2, tmp_path)
    reached = stopped(process, tmp_path, signal.SIGINT, 130)
    assert reached < 400 and reached == newest_step(tmp_path)
    for keys, message in (
        ({"training__seq_len": 128}, "training.seq_len: 64 → 128"),
        ({"debug__seed": 1}, "debug.seed"),
    ):
        assert message in answer(2, tmp_path, training__steps=400, **keys)
    other = {"model__name": "kda", "checkpoint__initial_load_path": tmp_path}
    is_refused(
        answer(2, tmp_path / "other", **other),
        f"step-{reached}' is of another model: it lacks",
        tmp_path / "other",
    )
    content = corpus.read_bytes()
    corpus.write_bytes(content.replace(b"a", b"b"))
    assert "another corpus" in answer(2, tmp_path, training__steps=400)
    corpus.write_bytes(content)
    shard = tmp_path / f"checkpoint/step-{reached}/__1_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:1000] + bytes(4096) + content[5096:])
    assert "was altered since it was saved" in answer(2, tmp_path, training__steps=400)
    shard.unlink()
    assert "is missing" in answer(2, tmp_path, training__steps=400)
    assert (tmp_path / "metrics.jsonl").exists()


SLOW_RANK_0 = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from titan_linear import train
from titan_linear.distributed.groups import set_timeout
from titan_linear.run.data import RunData

def slowly(*args, whole=RunData.corpora, **options):
    time.sleep(4)
    return whole(*args, **options)

def impatiently(*args, whole=train.on_rank_0):
    set_timeout([dist.group.WORLD], timedelta(seconds=2))
    return whole(*args)
    set_timeout([dist.group.WORLD], timedelta(minutes=30))

RunData.corpora, train.on_rank_0 = slowly, impatiently
sys.exit(train.main(sys.argv[1:]))
"""


def test_under_torchrun_the_others_wait_for_rank_0(corpus, tmp_path):
    """It checks and tokenises for longer than collectives may take."""
    (tmp_path / "slow.py").write_text(SLOW_RANK_0)
    argv = arguments(corpus, tmp_path / "run", training__steps=2)
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    process = command([*torchrun, str(free_port()), str(tmp_path / "slow.py"), *argv])
    output = finish(process)
    assert set(losses(tmp_path / "run")) == {1, 2} and output.count("corpus jsonl: ") == 1
