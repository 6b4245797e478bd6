"""Models on GPUs through the launcher, on packed text, with every pair of the ways to run them.

    pytest -m cuda tests/matrix --matrix-part 1/4 --matrix-out rows.jsonl -rP

takes two GPUs, or with --share-gpus one; a failed row is repeated by the command that its line of rows.jsonl has. The
losses of each are those of one process, uncompiled.
"""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.matrix.rows import (
    FACTORS,
    MODELS,
    RANK,
    RECIPES,
    ROOT,
    STEPS,
    Row,
    Variant,
    all_pairs,
    all_rows,
    baseline_keys,
    in_turn,
    pairs,
    part_of,
    row_keys,
)
from tests.matrix.runs import ROOM, Failed, Matrix, Outcome
from titan_linear.commands.plan import planned_model
from titan_linear.config import check_config, load_config
from titan_linear.planner.memory import parameters
from titan_linear.run.data import RunData
from titan_linear.run.model_checks import check_model
from titan_linear.run.origin import Origin

ROWS = all_rows()
TINY = Variant(
    {"model.name": "hybrid", "model.flavor": "debug", "model.dim": 64, "model.impl": "torch"},
    seq_len=256,
)


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        rows = part_of(ROWS, metafunc.config.getoption("--matrix-part"))
        marked = [
            pytest.param(row, id=row.name, marks=pytest.mark.cuda(row.processes)) for row in rows
        ]
        metafunc.parametrize("row", marked)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """By the rows' names. All that are to be tested begin at once."""
    option = request.config.getoption
    out = option("--matrix-out") and Path(option("--matrix-out")).absolute()
    matrix = Matrix(
        tmp_path_factory.mktemp("matrix"), torch.cuda.device_count(), option("--matrix-jobs"), out
    )
    chosen = [
        item.callspec.params["row"]
        for item in request.session.items
        if item.name.startswith("test_a_row_of_the_matrix_passes[")
    ]
    try:
        yield {row.name: matrix.submit(row) for row in in_turn(chosen)}
    finally:
        matrix.close()


def test_a_row_of_the_matrix_passes(row, outcomes):
    outcome = outcomes[row.name].result()
    print("\n".join(outcome.commands))
    print(
        f"{outcome.seconds} s, first steps after {outcome.first_step_seconds} s, losses {outcome.worst} off"
    )
    assert outcome.passed, "\n".join([outcome.why, *outcome.tail])


# --- The matrix itself -----------------------------------------------------------------------------------------------


def values(row):
    return {factor: getattr(row, factor) for factor in FACTORS}


def test_rows_have_every_pair_of_values():
    assert set(all_pairs()) <= set(chain.from_iterable(pairs(values(row)) for row in ROWS))
    assert (
        all(row.variant in MODELS[row.model] + RECIPES.get(row.model, ()) for row in ROWS)
        and len(ROWS) <= 56
    )
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_preset_and_every_shipped_configuration_has_a_row():
    known = [variant.keys for variants in MODELS.values() for variant in variants]
    assert all(keys in [row.variant.keys for row in ROWS] for keys in known)
    shipped = {path.name for path in ROOT.glob("train_configs/*.toml")}
    assert {Path(row.variant.toml).name for row in ROWS if row.variant.toml} == shipped


@pytest.mark.parametrize(
    "recipe", [row for row in ROWS if row.extra.startswith("recipe")], ids=lambda row: row.extra
)
def test_recipes_are_accepted(recipe, tmp_path):
    """Their keys, cut, of both that are compared; nothing but the rows' own texts is read."""
    matrix = Matrix(tmp_path, 0, 1)
    for keys, processes in ((row_keys(recipe, recipe.split), 2), (baseline_keys(recipe), 1)):
        config = load_config(matrix.arguments("run", recipe, keys))
        check_config(config, processes)
        model = planned_model(Origin.of(config))
        check_model(model, config, processes, processes)
        RunData(config, Origin.of(config).tokenizer).streams(None)
        assert 0 < parameters(model) < 2e9 and not Origin.of(config).folder


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_parts_have_each_row_once(parts):
    rows = [row for n in range(parts) for row in part_of(ROWS, f"{n + 1}/{parts}")]
    assert sorted(row.name for row in rows) == sorted(row.name for row in ROWS)


def test_the_largest_run_fits_and_sharing_ranks_take_twice(tmp_path):
    largest = next(row for row in ROWS if row.name.startswith("kimi-linear, one, compiled, none"))
    two, one = (Matrix(tmp_path, gpus, jobs=1) for gpus in (2, 1))
    argv = two.arguments("row", largest, row_keys(largest, "one"))
    assert 20 < two.gib(argv, 1) < ROOM / 2
    assert one.gib(argv, 2) == 2 * two.gib(argv, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    matrix = Matrix(
        folder,
        0,
        2,
        folder / "rows.jsonl",
        {"training.dataset": "jsonl", "training.dataset_path": "{documents}"},
    )
    yield matrix
    matrix.close()


SMALL = Row(
    model="hybrid",
    split="cp 2",
    code="uncompiled",
    checkpointing="full",
    batch="accumulated",
    between="validation",
    end=RANK,
    watched="",
    length="",
    memory="",
    variant=TINY,
)


def test_a_killed_row_resumes_and_is_compared(tiny):
    outcome = tiny.submit(SMALL).result()
    assert outcome.passed, [outcome.why, *outcome.tail]
    assert (
        outcome.resumed_after in (2, 4)
        and len(outcome.commands) == len(outcome.first_step_seconds) == 2
    )
    assert (
        len(outcome.baseline) == STEPS + STEPS // 2
        and outcome.losses.keys() <= outcome.baseline.keys()
    )
    # A kill between a step's save and its validation loses that validation alone: a resume does not make up for it.
    assert outcome.baseline.keys() - outcome.losses.keys() <= {
        f"validation {outcome.resumed_after}"
    }
    assert '"passed": true' in tiny.out.read_text() and "NGPU=2" in outcome.commands[0]


def test_conversations_are_tuned_on_where_ranks_share_them(tmp_path):
    recipe = next(row for row in ROWS if "sft_chat" in row.variant.toml).variant
    variant = replace(recipe, keys={**recipe.keys, **TINY.keys, "model.num_layers": 3}, seq_len=256)
    matrix = Matrix(tmp_path, 0, 1)
    outcome = matrix.submit(replace(SMALL, end="", between="", variant=variant)).result()
    matrix.close()
    assert outcome.passed, [outcome.why, *outcome.tail]


def test_a_row_that_is_refused_fails(tiny):
    outcome = tiny.submit(replace(SMALL, end="", variant=replace(TINY, seq_len=0))).result()
    assert not outcome.passed and "exit code 2" in outcome.why
    assert "training.seq_len = 0 must be" in "\n".join(outcome.tail)


@pytest.mark.parametrize(
    "loss, why",
    [(2.003, "3: 2.003 and 2.0$"), (math.nan, "3: nan and 2.0$"), (None, "no loss of steps 3")],
)
def test_losses_that_differ_fail(loss, why):
    baseline = {str(step): 2.0 for step in range(1, STEPS + 1)} | {
        "validation 2": 2.0,
        "validation 6": 2.0,
    }
    outcome = Outcome("row", "debug", losses={**baseline, "3": loss})
    if loss is None:
        del outcome.losses["3"]
    with pytest.raises(Failed, match=why):
        outcome.compare(baseline)
    del outcome.losses["validation 2"]
    outcome.losses["3"] = 2.0019
    outcome.compare(baseline)
