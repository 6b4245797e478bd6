"""transformers' Trainer with `ContextParallelMixin`, under DDP, beside one process."""

from __future__ import annotations

import pytest
from transformers import TrainingArguments

from tests.transformers.workers import CPTrainer, build, trainer


def test_four_ranks_train_like_one(worlds, tmp_path):
    """Two groups of two ranks, accumulation 2, and one process, accumulation 4, with packed batches of one epoch:
    gradient norms, logged losses, weights and the loss of an evaluation."""
    (one,) = worlds(1).run(trainer, str(tmp_path / "1"), 1, 4)
    four = worlds(4).run(trainer, str(tmp_path / "4"), 2, 2)
    for norms, losses, weights, evaluation in four:
        assert norms == pytest.approx(one[0], rel=1e-5) and len(norms) == 4
        assert losses == pytest.approx(one[1], rel=1e-5)
        assert ((weights - one[2]).norm() / one[2].norm()).item() < 1e-5
        assert evaluation == pytest.approx(one[3], rel=1e-5)
        assert (weights == four[0][2]).all()
    # FSDP2 as accelerate does it on GPUs
    for norms, losses, weights, evaluation in worlds(2).run(
        trainer, str(tmp_path / "2"), 2, 4, True
    ):
        assert norms == pytest.approx(one[0], rel=1e-5)
        assert losses == pytest.approx(one[1], rel=1e-5)
        assert ((weights - one[2]).norm() / one[2].norm()).item() < 1e-5
        assert evaluation == pytest.approx(one[3], rel=1e-5)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"compute_metrics": len}, "compute_metrics: "),
        ({"compute_loss_func": len}, "compute_loss_func: "),
        ({"context_parallel_degree": 2}, "must divide the number of processes, 1"),
    ],
)
def test_options_that_need_whole_rows(options, reason, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=reason):
        CPTrainer(build("LFM2"), args, **options)


def test_no_predictions(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="predict: a rank has logits of a part of each row"):
        CPTrainer(build("LFM2"), args).predict([])
