"""Hugging Face folders written beside the training: the same bytes as a conversion gives, and never in its way."""

import multiprocessing
import os
import pydoc
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.keys import argv_of
from tests.processes import gone, until
from tests.records import read_json, write_json
from tests.refusals import refused
from tests.training import arguments, train
from titan_linear.commands import convert
from titan_linear.config import check_config, load_config
from titan_linear.distributed.process import StopSignal
from titan_linear.hooks import Exports, Hook, exports
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import _check_checkpoint, preflight
from titan_linear.train import Trainer

ROOT = Path(__file__).parents[2]
KEYS = {
    "model.name": "kda",
    "training.steps": 3,
    "training.local_batch_size": 2,
    "training.seq_len": 32,
    "checkpoint.enable": "true",
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 1,
    "checkpoint.export_interval": 1,
    "checkpoint.export_dtype": "bfloat16",
    "checkpoint.async_mode": "async",
}


def test_a_checkpoint_is_exported_while_training_goes_on(corpus, worlds, tmp_path, capfd):
    argv = arguments(corpus, KEYS, {"job.dump_folder": tmp_path, "training.steps": 2})
    preflight(load_config(argv), world_size=2)
    worlds(2).run(train, argv)
    folder = tmp_path / "checkpoint"
    # One is kept, and no other stays because it was read.
    assert sorted(path.name for path in folder.iterdir()) == ["step-1-hf", "step-2", "step-2-hf"]
    assert (
        convert.main(
            ["to-hf", str(folder / "step-2"), str(tmp_path / "out"), "--export-dtype", "bfloat16"]
        )
        == 0
    )
    found, wanted = (
        load_file(path / "model.safetensors") for path in (folder / "step-2-hf", tmp_path / "out")
    )
    assert found.keys() == wanted.keys() and all(
        (found[name] == wanted[name]).all() for name in wanted
    )
    kept = tmp_path / "config.toml"  # of another model: a layer would be left out
    kept.write_text(kept.read_text().replace("num_layers = 0", "num_layers = 1"))
    assert convert.main(["to-hf", str(folder / "step-2"), str(tmp_path / "less")]) == 2
    assert "of another model" in capfd.readouterr().err and not (tmp_path / "less").exists()


class SignalAtStep2(Hook):
    def after_step(self, done):
        if done.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_rank_1(rank, world_size, argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            exports, "command", lambda *_: [sys.executable, "-c", "import signal; signal.pause()"]
        )
        trainer = Trainer(load_config(argv))
        trainer.hooks += [SignalAtStep2(trainer.config, trainer.session)] * rank
        with trainer.stop:
            trainer.train()


def test_a_stop_waits_for_no_export(corpus, worlds, tmp_path):
    """The signal came to another rank than that of the exports. Only what is to be kept is kept for the next start."""
    argv = arguments(corpus, KEYS, {"job.dump_folder": tmp_path, "training.steps": 5})
    preflight(load_config(argv), world_size=2)
    worlds(2).run(stop_rank_1, argv)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-3"]


def exported(config, step):
    """Its name and its config.json."""
    exports.export_folder(config, step).mkdir()
    (exports.export_folder(config, step) / "config.json").touch()


def saved(folder, *steps):
    """A run that exports every second step; its checkpoints are but names."""
    for step in steps:
        (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoint" / f"step-{step}" / "manifest.json").touch()
    keys = {
        "job.dump_folder": folder,
        "training.steps": 8,
        "checkpoint.interval": 1,
        "checkpoint.export_interval": 2,
        "checkpoint.last_save_in_hf": "true",
    }
    return load_config(argv_of(keys))


def runs(monkeypatch, code):
    """In place of the export: code that knows the folder that it is to write."""
    monkeypatch.setattr(
        exports, "command", lambda _, folder, __: [sys.executable, "-c", code, str(folder)]
    )


def test_what_was_cut_short_is_made_up_for(monkeypatch, capsys, tmp_path):
    """One after the other; not twice; not of a future that is left, not what the run itself exports at its end."""
    config, in_use = saved(tmp_path, 1, 2, 4, 6, 7, 8), set()
    exported(config, 2)
    exports.export_folder(config, 4).mkdir()  # emptied
    runs(monkeypatch, "import os, sys; os.makedirs(sys.argv[1], exist_ok=True)")
    found = Exports(config, 4, in_use)
    for step in (5, 6, 6, 8):
        found.after_save(step)
    assert in_use == {4, 6} == set(found.waiting)
    found.finish(StopSignal())
    assert not in_use and capsys.readouterr().out == "".join(
        f"exported '{tmp_path}/checkpoint/step-{step}-hf'\n" for step in (4, 6)
    )


def test_a_finished_run_names_what_it_lacks(monkeypatch, capsys, tmp_path):
    """A kill after the last step, while exports were written."""
    config = saved(tmp_path, 2, 4, 6, 8)
    exported(config, 4)
    exports.export_folder(config, 8).mkdir()
    monkeypatch.setattr("titan_linear.run.preflight.verify", lambda _: None)
    with pytest.raises(SystemExit):
        _check_checkpoint(Origin.of(config))
    out = capsys.readouterr().out
    assert "\nnot exported: step-2, step-6; titan-linear convert to-hf does it\n" in out
    assert "\nits Hugging Face folder is not there; titan-linear convert to-hf" in out


def test_a_failure_is_a_warning(monkeypatch, capsys, tmp_path):
    config, in_use = saved(tmp_path, 2), set()
    runs(monkeypatch, "import sys; print('Trace'); sys.exit('error: the disk is full')")
    found = Exports(config, 2, in_use)
    found.after_save(4)  # it is being saved
    until(lambda: found.look() or 2 not in in_use)
    assert capsys.readouterr().out == "warning: exporting step-2 failed: the disk is full\n"
    assert found.waiting == [4] and found.process is None


ONCE = """
import os, signal, sys
try:
    os.mkdir(sys.argv[1] + ".tried")
    os.kill(os.getpid(), signal.SIGKILL)
except FileExistsError:
    os.mkdir(sys.argv[1])
"""
ALWAYS = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("code", [ONCE, ALWAYS], ids=["once", "always"])
def test_an_export_that_is_killed_starts_again_once(code, monkeypatch, capsys, tmp_path):
    """Its checkpoint is kept until then."""
    config, in_use = saved(tmp_path, 2), set()
    runs(monkeypatch, code)
    found = Exports(config, 2, in_use)
    until(lambda: found.look() or found.again)
    assert in_use == {2} and found.exporting == 2
    until(lambda: found.look() or not in_use)
    assert not found.waiting and found.process is None
    folder = exports.export_folder(config, 2)
    assert (
        capsys.readouterr().out
        == "warning: exporting step-2 failed: its process was killed; it starts again\n"
        + (
            f"exported '{folder}'\n"
            if code == ONCE
            else "warning: exporting step-2 failed: exit code -9\n"
        )
    )


@pytest.mark.parametrize(
    "lacking, said", [("tempfile.TemporaryFile", "full"), ("subprocess.Popen", "too many")]
)
def test_an_export_that_cannot_start_is_a_warning(lacking, said, monkeypatch, capsys, tmp_path):
    """No room for temporary files, or for processes: what it does to one export it need not do to the next."""
    runs(monkeypatch, "import os, sys; os.mkdir(sys.argv[1])")
    given = pydoc.locate(lacking)
    left = [OSError(11, said)]
    monkeypatch.setattr(lacking, lambda *a, **k: _raise(left.pop()) if left else given(*a, **k))
    in_use = set()
    Exports(saved(tmp_path, 2, 4), 4, in_use).finish(StopSignal())
    assert not in_use and capsys.readouterr().out == (
        f"warning: exporting step-2 failed: no process starts: {said}\nexported '{tmp_path}/checkpoint/step-4-hf'\n"
    )


def _raise(error):
    raise error


def test_a_checkpoint_that_is_gone_is_not_waited_for(monkeypatch, capsys, tmp_path):
    """Removed by a person while it waits; those behind it are exported."""
    runs(monkeypatch, "import os, sys; os.mkdir(sys.argv[1])")
    found, folder = Exports(saved(tmp_path, 2, 4, 6), 6, set()), tmp_path / "checkpoint"
    found.look()
    shutil.rmtree(folder / "step-4")
    found.finish(StopSignal())
    found.report(StopSignal())
    assert capsys.readouterr().out == (
        f"exported '{folder}/step-2-hf'\nexported '{folder}/step-6-hf'\n"
        "warning: not exported: step-4 (no checkpoint there any more)\n"
    )


def test_an_export_ends_with_the_run(monkeypatch, capsys, tmp_path):
    """A Ctrl-C while the complete run waits for it: no later start makes it, so it is named."""
    runs(monkeypatch, "import signal; signal.pause()")
    found, stop = Exports(saved(tmp_path, 2), 2, set()), StopSignal()
    found.look()
    assert found.process.poll() is None
    stop.received = signal.SIGINT
    found.finish(stop)
    found.report(stop)
    assert found.process.returncode == -signal.SIGKILL
    assert capsys.readouterr().out == "not exported: step-2; titan-linear convert to-hf does it\n"


SLOW = """
import os, signal
with open("new", "w") as file:
    file.write(str(os.getpid()))
os.rename("new", "imports")
signal.pause()
"""


def begin_export(folder):
    """As a rank does, in a folder whose torch is SLOW."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    command = exports.command(folder / "step-2", folder / "step-2-hf", "float32")
    write_json(folder / "command", command)
    subprocess.Popen(command)
    signal.pause()


def test_an_export_dies_with_its_rank(tmp_path):
    """From its first moment on: it imports torch later, which takes long."""
    (tmp_path / "torch.py").write_text(SLOW)
    rank = multiprocessing.get_context("forkserver").Process(target=begin_export, args=(tmp_path,))
    rank.start()
    until((tmp_path / "imports").exists)
    export = int((tmp_path / "imports").read_text())
    assert not gone(export)
    rank.kill()
    until(lambda: gone(export))
    (tmp_path / "imports").unlink()
    command = read_json(tmp_path / "command")  # of a rank that is no more
    assert (
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode
        == 1
    )
    assert not (tmp_path / "imports").exists()


def test_intervals_that_do_not_fit_are_refused():
    argv = ["--checkpoint.interval", "100", "--checkpoint.export_interval", "150"]
    with refused(r"export_interval = 150 must be a multiple .* for example 200"):
        check_config(load_config(argv), 1)
