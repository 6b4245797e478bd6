"""Nothing is written through a link: in a folder from elsewhere, names that this program uses may lead anywhere."""

import os
from contextlib import suppress

import numpy as np
import pytest
import torch

from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.data import ByteTokenizer, write_corpus
from titan_linear.data.corpus.cache import remove_cache
from titan_linear.data.corpus.writing import Journal, write_into
from titan_linear.distributed.hangs import Watch
from titan_linear.hooks.metrics import MetricsLogger, Moment
from titan_linear.hooks.spikes import MicroLoss, write_spike
from titan_linear.run.folder import RunFolder
from titan_linear.storage.files import replacing, write_whole
from titan_linear.storage.run_lock import lock_folder

DOCUMENT = np.array([72, 105])
CACHE = f"text-{'0' * 24}"


def config(folder, *more):
    return load_config(
        ["--job.dump_folder", str(folder), "--metrics.enable_tensorboard", "false", *more]
    )


def refused_start(folder):
    with RunFolder(config(folder)).claimed():
        raise ValueError("refused")


def start_with_checkpoints_elsewhere(folder):
    with RunFolder(
        config(folder / "run", "--checkpoint.enable=true", "--checkpoint.folder", str(folder))
    ).claimed():
        pass


def lock(folder):
    with lock_folder(str(folder)):
        pass


def export(folder):
    with replacing(folder / "step-1-hf"):
        pass


def log(folder):
    logger = MetricsLogger(config(folder), torch.device("cpu"))
    logger.log(
        1,
        moment=Moment(torch.device("cpu")),
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens=1,
        memory_gib=1.0,
    )
    logger.close()


def telemetry(folder):
    MetricsLogger(config(folder), torch.device("cpu")).log_telemetry(1, {"rms": {"0": 1.0}})


def resume_tokenising(folder):
    journal = Journal(key="key", read=1, num_documents=1, num_tokens=2)
    write_into(folder / "web", iter([DOCUMENT]), ByteTokenizer(), journal)


def record_a_hang(folder):
    watch = Watch.__new__(Watch)
    watch.folder, watch.rank = folder, 0
    watch._dump()


# What writes → the name in the folder that is a link.
WRITERS = {
    "a run's lock": (lock, ".lock"),
    "of a start that is refused": (refused_start, ".lock"),
    "of checkpoints elsewhere": (start_with_checkpoints_elsewhere, ".lock"),
    "an export's lock": (export, ".step-1-hf.lock"),
    "a corpus's lock": (
        lambda folder: write_corpus(folder / "web", [DOCUMENT], ByteTokenizer()),
        "web.lock",
    ),
    "a cache's lock": (lambda folder: remove_cache(folder / CACHE), f"{CACHE}.lock"),
    "a file written whole": (
        lambda folder: write_whole(folder / "config.toml", "new"),
        "config.toml.new",
    ),
    "metrics": (log, "metrics.jsonl"),
    "telemetry": (telemetry, "telemetry.jsonl"),
    "spikes": (
        lambda folder: write_spike(folder, 1, {}, [[MicroLoss((0,), 1, 1.0)]]),
        "spikes.jsonl",
    ),
    "a corpus's arrays": (resume_tokenising, "web.tmp/tokens.bin"),
    "the flight recorder": (record_a_hang, "rank-0"),
}


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("what", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path, what, dangling):
    write, name = WRITERS[what]
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    if not dangling:
        victim.write_text('{"step": 1}\n')
        os.utime(victim, (1, 1))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(victim)
    with suppress(OSError, ValueError):
        write(folder)
    if dangling:
        assert not victim.exists()
    else:
        assert (victim.read_text(), victim.stat().st_mtime) == ('{"step": 1}\n', 1)


def test_links_are_named(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with refused(r"job.dump_folder = .*/.lock': .*symbolic link.*; use another folder"):
        lock(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "victim")
    with refused(r"job.dump_folder = .*/metrics.jsonl' is a link, and a run appends to none"):
        RunFolder(config(tmp_path)).check_writable()


def test_what_a_killed_write_left_is_replaced(tmp_path):
    (tmp_path / "config.toml.new").write_text("half")
    write_whole(tmp_path / "config.toml", "whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("config.toml", "whole")
    ]
