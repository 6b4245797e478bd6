"""The reference runs: another model gets the run's weights, streams, schedule and updates, and so the run's curve."""

import json
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.refusals import is_refused
from tests.test_train import arguments
from titan_linear.config import load_config
from titan_linear.data import Batch
from titan_linear.train import Trainer
from tools import reference_run
from tools.peers import fla_loss

STEPS = 6
KEYS = {
    "training.steps": STEPS,
    "training.local_batch_size": 2,
    "training.max_norm": 0.5,
    "optimizer.weight_decay": 0.3,
}


def losses_on_rank(rank, world_size, argv):
    trainer = Trainer(load_config(argv))
    return [trainer.train_step()["loss"] for _ in range(STEPS)]


def exported_model(folder, device):
    """The model of an exported folder in transformers alone, in place of FLA's, whose kernels need a GPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).train()


def document_by_document(model, batch):
    """The sum of cross-entropies: this model knows of no documents, so each is run by itself."""
    total = torch.zeros(())
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        logits = model(input_ids=batch.tokens[:, begin:end]).logits
        total = total + F.cross_entropy(logits[0], batch.labels[0, begin:end], reduction="sum")
    return total


def curve(folder):
    return [numbers["loss"] for numbers in reference_run.read_run(folder).values()]


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_another_model_has_the_curve_of_the_run(name, corpus, worlds, tmp_path):
    argv = arguments(corpus, KEYS, {"model.name": name, "job.dump_folder": tmp_path / "run"})
    ours = worlds(1).run(losses_on_rank, argv)[0]
    reference_run.train_peer(load_config(argv), tmp_path / "peer", exported_model, document_by_document)
    theirs = curve(tmp_path / "peer")
    assert len(theirs) == STEPS and theirs == pytest.approx(ours, rel=1e-5)
    assert ours[-1] < 0.8 * ours[0]  # it has learnt, so that the updates count


@pytest.mark.parametrize("edges", [[0, 8, 16], [0, 3, 8, 16]])
def test_documents_as_fla_takes_them(edges, monkeypatch):
    """Streams of one document are rows; packed ones are one row, with their boundaries. No label is lost."""
    modules, seen = ModuleType("fla.modules"), {}
    modules.FusedLinearCrossEntropyLoss = nn.CrossEntropyLoss
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.modules", modules)
    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", lambda self, hidden, labels, weight: (self.reduction, labels))

    class Model:
        lm_head = nn.Linear(4, 16)

        def model(self, **given):
            seen.update(given)
            return [given["input_ids"]]

    tokens = torch.arange(16)[None]
    batch = Batch(tokens, tokens + 1, torch.tensor(edges, dtype=torch.int32), tokens, 2, (0, 1))
    reduction, labels = fla_loss(Model(), batch)
    packed = len(edges) > 3
    assert reduction == "sum" and (labels == seen["input_ids"] + 1).all()
    assert seen["input_ids"].shape == ((1, 16) if packed else (2, 8)) and ("cu_seqlens" in seen) == packed


def write_run(folder, losses):
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss, "mfu": step / 100}) for step, loss in enumerate(losses, 1)]
    validations = ['{"step": 2, "validation_loss": 9.0}', '{"step": 4, "validation_loss": 8.0}']
    (folder / "metrics.jsonl").write_text("\n".join([*lines, *validations, ""]))
    return folder


def test_a_pair_of_curves(tmp_path, capsys, monkeypatch):
    ours = write_run(tmp_path / "ours", [9.0] * 10 + [2.02] * 50)
    theirs = write_run(tmp_path / "theirs", [9.0] * 10 + [2.0] * 50 + [5.0])  # a step more
    drawn = []
    monkeypatch.setattr(reference_run, "draw", drawn.append)
    assert reference_run.main(["draw", str(tmp_path / "out"), "--add", "kda", str(ours), str(theirs)]) == 0
    *_, first, second, gap = capsys.readouterr().out.splitlines()
    assert drawn == [tmp_path / "out"]
    assert first == "| ours | 2.0200 | 8.0000 | – | 30.5% | – | – | – |"
    assert second == "| theirs | 2.0000 | 8.0000 | – | 30.5% | – | – | – |"
    assert gap == "kda: the mean losses of the last 50 steps differ by 1.00%"


def test_runs_of_the_same_last_name(tmp_path, capsys):
    runs = [write_run(tmp_path / by / "kda", [loss]) for by, loss in (("ours", 2.0), ("theirs", 1.0))]
    reference_run.write_pair(tmp_path / "kda.csv", runs)
    losses = {name: numbers["loss"] for name, numbers in reference_run.read_pair(tmp_path / "kda.csv").items()}
    assert losses == {"ours/kda": {1: 2.0}, "theirs/kda": {1: 1.0}}
    argv = ["draw", str(tmp_path), "--add", "kda", str(runs[0]), f"{runs[0]}/"]
    assert is_refused(reference_run.main, argv, capsys) == f"--add: both runs are {runs[0]}; give two\n"


def test_the_picture(tmp_path):
    for name in ("gdn", "kda"):
        runs = [write_run(tmp_path / f"{name}_{by}", [3.0, 2.0]) for by in ("ours", "theirs")]
        reference_run.write_pair(tmp_path / f"{name}.csv", runs)
    reference_run.draw(tmp_path)
    assert "<svg" in (tmp_path / "loss.svg").read_text()


@pytest.mark.parametrize(
    "keys, message",
    [
        (["--model.name=hybrid"], "model.name = 'hybrid' is none of FLA's; use kda or gdn"),
        (["--model.name=kda", "--checkpoint.initial_load_path=x"], "checkpoint.initial_load_path is set; leave it out"),
    ],
)
def test_what_is_refused(keys, message, capsys, tmp_path):
    assert is_refused(reference_run.main, ["fla", str(tmp_path), "--", *keys], capsys).startswith(message)
