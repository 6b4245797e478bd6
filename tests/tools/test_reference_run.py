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
from tests.training import arguments
from titan_linear.commands import report
from titan_linear.config import load_config
from titan_linear.data import Batch
from titan_linear.step import optimizer
from titan_linear.storage.rundir import json_lines
from titan_linear.train import Trainer
from tools import reference_run

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

    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).train()


def document_by_document(model, batch):
    """The sum of cross-entropies: this model knows of no documents, so each is run by itself."""
    total = torch.zeros(())
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        logits = model(input_ids=batch.tokens[:, begin:end]).logits
        total = total + F.cross_entropy(logits[0], batch.labels[0, begin:end], reduction="sum")
    return total


def curve(folder):
    return [line["loss"] for line in json_lines(folder / "metrics.jsonl", dict)]


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_another_model_has_the_curve_of_the_run(name, corpus, worlds, tmp_path, monkeypatch):
    argv = arguments(corpus, KEYS, {"model.name": name, "job.dump_folder": tmp_path / "run"})
    ours = worlds(1).run(losses_on_rank, argv)[0]
    # to ours; a peer's updates are torch's
    monkeypatch.setattr(optimizer, "is_large", lambda p: True)
    reference_run.train_peer(
        load_config(argv), tmp_path / "peer", exported_model, document_by_document
    )
    theirs = curve(tmp_path / "peer")
    assert len(theirs) == STEPS and theirs == pytest.approx(ours, rel=1e-5)
    assert ours[-1] < 0.8 * ours[0]  # it has learnt, so that the updates count
    row = report.standing(tmp_path / "peer")
    assert (row["step"], row["loss"]) == (str(STEPS), f"{theirs[-1]:.4f}")


@pytest.mark.parametrize("edges", [[0, 8, 16], [0, 3, 8, 16]])
def test_documents_as_fla_takes_them(edges, monkeypatch):
    """Streams of one document are rows; packed ones are one row, with their boundaries. No label is lost."""
    modules, seen = ModuleType("fla.modules"), {}
    modules.FusedLinearCrossEntropyLoss = nn.CrossEntropyLoss
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.modules", modules)
    monkeypatch.setattr(
        nn.CrossEntropyLoss,
        "forward",
        lambda self, hidden, labels, weight: (self.reduction, labels),
    )

    class Model:
        lm_head = nn.Linear(4, 16)

        def model(self, **given):
            seen.update(given)
            return [given["input_ids"]]

    tokens = torch.arange(16)[None]
    batch = Batch(tokens, tokens + 1, torch.tensor(edges, dtype=torch.int32), tokens, 2, (0, 1), {})
    reduction, labels = reference_run.fla_loss(Model(), batch)
    packed = len(edges) > 3
    assert reduction == "sum" and (labels == seen["input_ids"] + 1).all()
    assert (
        seen["input_ids"].shape == ((1, 16) if packed else (2, 8))
        and ("cu_seqlens" in seen) == packed
    )


def write_run(folder, losses):
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text(
        "\n".join([*lines, '{"step": 4, "validation_loss": 8.0}', ""])
    )
    return str(folder)


def test_how_far_apart_two_runs_end(tmp_path, capsys):
    """By the last 50 steps that both have."""
    ours = write_run(tmp_path / "ours", [9.0] * 10 + [2.02] * 50)
    theirs = write_run(tmp_path / "theirs", [9.0] * 10 + [2.0] * 50 + [5.0])  # a step more
    assert reference_run.main(["compare", ours, theirs]) == 0
    assert (
        capsys.readouterr().out
        == "mean losses of the last 50 steps: 2.0200 and 2.0000, 1.00% apart\n"
    )


@pytest.mark.parametrize(
    "keys, message",
    [
        (["--model.name=hybrid"], "model.name = 'hybrid' is none of FLA's; use kda or gdn"),
        (
            ["--model.name=kda", "--checkpoint.initial_load_path=x"],
            "checkpoint.initial_load_path is set; leave it out",
        ),
    ],
)
def test_what_is_refused(keys, message, capsys, tmp_path):
    assert is_refused(reference_run.main, ["fla", str(tmp_path), "--", *keys], capsys).startswith(
        message
    )
