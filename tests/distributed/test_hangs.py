"""What a run that hangs says, and that one that does not hang says nothing."""

import contextlib
import io
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import until
from tests.training import arguments
from tests.worlds import World
from titan_linear.config import load_config
from titan_linear.distributed.ending import peer_is_lost
from titan_linear.distributed.groups import set_timeout
from titan_linear.distributed.hangs import late_collective, recorded, watched
from titan_linear.train import Trainer

LATER = int(1e18)  # nanoseconds: past every time-out


def hang(rank, world_size, folder):
    """One of each collective, after which nothing is late; what is said when rank 1 stays away; whether it failed."""
    group = dist.new_group()
    x, came = torch.ones(2), torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(torch.ones(4), x, group=group)
    dist.reduce_scatter_tensor(torch.ones(1), x, group=group)
    dist.all_to_all_single(came, x, group=group)
    dist.broadcast(x, 0, group=group)
    dist.barrier(group)
    exchange = [
        dist.P2POp(dist.isend, x, 1 - rank, group),
        dist.P2POp(dist.irecv, came, 1 - rank, group),
    ]
    for request in dist.batch_isend_irecv(exchange):
        request.wait()
    # a thread of gloo's notes the end
    until(lambda: late_collective(recorded(), time.time_ns() + LATER) is None)
    set_timeout([group], timedelta(seconds=4))
    said, failed = io.StringIO(), False
    store = dist.PrefixStore(folder, dist.distributed_c10d._get_default_store())
    with watched(Path(folder), store, 4) as watch, contextlib.redirect_stderr(said):
        watch.step = lambda: 7
        try:
            if rank == 0:
                dist.all_reduce(x, group=group)
        except RuntimeError:
            failed = True
        dist.barrier()  # which rank 1 waits in meanwhile, and which has all the time
    return said.getvalue(), failed


def test_a_hang_is_said_in_one_line(worlds, tmp_path):
    (said, failed), (said_1, _) = worlds(2).run(hang, str(tmp_path / "recorder"))
    assert failed
    assert (
        said.startswith("hang: step 7: rank 0 in all_reduce for ")
        and "of 4 s, rank 1 not there; " in said
    )
    assert said.count("\n") == 1 and said_1 == ""
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == ["rank-0", "rank-1"]


def stall(rank, world_size, argv):
    """A run in which rank 1 reads no more after step 2: what is said, and what a rank that waits for it raises."""
    config = load_config(argv)
    trainer, said = Trainer(config), io.StringIO()
    recorder, store = (
        Path(config.job.dump_folder) / "recorder",
        dist.distributed_c10d._get_default_store(),
    )

    def batches(whole):
        yield from islice(whole, 2)
        if rank == 1:
            until(lambda: (recorder / "rank-1").exists())
            raise EOFError
        yield from whole

    trainer.feed.batches = batches(trainer.feed.batches)
    with (
        watched(recorder, store, config.comm.train_timeout_seconds) as watch,
        contextlib.redirect_stderr(said),
    ):
        watch.step = lambda: trainer.begun
        try:
            trainer.train()
        except (RuntimeError, EOFError) as error:
            hangs = [line for line in said.getvalue().splitlines() if line.startswith("hang: ")]
            return hangs, "gone" if isinstance(error, RuntimeError) and peer_is_lost(
                error
            ) else repr(error)
    raise AssertionError("it did not hang")


def test_a_rank_that_reads_no_more_is_missed(corpus, tmp_path):
    keys = {
        "model.name": "kda",
        "training.local_batch_size": 2,
        "comm.train_timeout_seconds": 4,
        "job.dump_folder": tmp_path,
    }
    world = World(2, "gloo")  # whose default group is not to be used after that
    ((said,), raised), nothing = world.run(stall, arguments(corpus, keys))
    world.close()
    assert (
        said.startswith("hang: step 2: rank 0 in all_reduce for ")
        and "of 4 s, rank 1 not there; " in said
    )
    assert raised == "gone" and nothing == ([], "EOFError()")


def entry(group, began, *, retired):
    return {
        "pg_id": group,
        "time_created_ns": int(began * 1e9),
        "timeout_ms": 100_000,
        "retired": retired,
    }


def test_what_a_later_collective_of_its_group_has_passed_is_not_late():
    """Parts of a batch are never marked as ended."""
    part, batch = entry(0, 0, retired=False), entry(0, 1, retired=True)
    behind, first = entry(1, 30, retired=False), entry(0, 20, retired=False)
    assert late_collective([[part, batch]], int(1e12)) is None
    assert late_collective([[part, batch, behind, first]], int(80e9)) is None
    assert late_collective([[part, batch, behind, first]], int(96e9)) is first
    assert late_collective([[behind], [part, batch, first]], int(106e9)) is first
    # gloo's end says nothing of NCCL's
    assert late_collective([[part], [batch]], int(96e9)) is part


def hang_on_gpus(rank, world_size, folder):
    """What is said when rank 1 comes only after that: NCCL ends the process whose collective times out."""
    group, x = dist.new_group(timeout=timedelta(seconds=20)), torch.ones(2, device="cuda")
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    said, store = (
        io.StringIO(),
        dist.PrefixStore(folder, dist.distributed_c10d._get_default_store()),
    )
    with watched(Path(folder), store, 20) as watch, contextlib.redirect_stderr(said):
        watch.step = lambda: 7
        if rank == 1:
            until(lambda: (Path(folder) / "rank-1").exists())
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        if rank == 0:
            # the ranks were late, and nobody waits for what is said of it
            until(lambda: said.getvalue() != "")
    return said.getvalue()


@pytest.mark.cuda(2)
def test_a_hang_of_nccl_is_said_too(worlds, tmp_path):
    said, said_1 = worlds(2, "nccl").run(hang_on_gpus, str(tmp_path / "recorder"))
    assert (
        said.startswith("hang: step 7: rank 0 in ")
        and "of 20 s, rank 1 not there; " in said
        and said_1 == ""
    )
    names = sorted(path.name for path in (tmp_path / "recorder").iterdir())
    assert names == ["gloo-0", "gloo-1", "rank-0", "rank-1"]
