"""The validation with the lowest loss, and when a run ends early."""

import json

import pytest

from tests.keys import argv_of
from tests.refusals import refused
from titan_linear.config import Validation, check_config, load_config
from titan_linear.run.best import LowestLoss, Validated


@pytest.mark.parametrize(
    "losses, best, ends",
    [
        ([3.0], 1, False),
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.0, 2.5], 2, True),  # an equal loss is not lower
        ([3.0, float("nan"), 2.9], 3, False),
        ([float("nan"), float("nan")], 0, True),
    ],
)
def test_validations_without_a_lower_loss_end_a_run(losses, best, ends):
    validations = [Validated(step, loss) for step, loss in enumerate(losses, 1)]
    lowest = LowestLoss(Validation(patience=2), validations)
    assert (lowest.step, lowest.ends_run) == (best, ends)
    assert not LowestLoss(Validation(), validations).ends_run


def test_a_resumed_run_knows_its_earlier_validations(tmp_path):
    lines = [
        {"step": 2, "loss": 1.0},
        {"step": 2, "validation_loss": 2.0},
        {"step": 4, "validation_loss": None, "nonfinite": "validation_loss = nan"},
        {"step": 6, "validation_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config([f"--job.dump_folder={tmp_path}"])
    lowest = LowestLoss.so_far(config, 5)
    assert (lowest.step, lowest.loss) == (2, 2.0)


def test_what_is_validated_must_be_saved():
    keys = {
        "validation.enable": "true",
        "validation.keep_best": "true",
        "validation.freq": 30,
        "checkpoint.interval": 20,
    }
    with refused("validation.keep_best = true: validation.freq = 30 .* checkpoint.interval = 20"):
        check_config(load_config(argv_of(keys)), 1)
    check_config(load_config(argv_of(keys, validation__freq=40)), 1)
