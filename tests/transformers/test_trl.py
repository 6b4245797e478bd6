"""TRL's trainers with `ContextParallelMixin` on ranks of a group, beside TRL alone on one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import free_port

pytestmark = pytest.mark.trl

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transformers.md"
# Largest absolute differences: of log p, summed over a sequence, about 300.
BOUNDS = {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 2e-5, "logps/chosen": 1e-4}
BOUNDS |= {"logps/rejected": 1e-4, "eval_logps/chosen": 1e-4, "eval_logps/rejected": 1e-4}
SPEED = ("_runtime", "_per_second")


def trained(world, *arguments):
    # TRL is imported by these tests alone.
    from tests.transformers.trl_workers import train

    return world.run(train, *arguments)


def compare(found, wanted):
    assert set(found) == set(wanted)
    for name in wanted:
        if not name.endswith(SPEED):
            bound = BOUNDS.get(name, 2e-5)
            assert found[name] == pytest.approx(wanted[name], rel=0, abs=bound), name


@pytest.mark.parametrize("case", ["sft", "dpo", "dpo, ref_model", "reward"])
def test_two_ranks_train_like_trl_alone(worlds, tmp_path, case):
    """20 steps with accumulation 2: all that TRL logs, the trained weights, and an evaluation."""
    (alone,) = trained(worlds(1), case, str(tmp_path / "1"))
    for lines, adapters, evaluation in trained(worlds(2), case, str(tmp_path / "2"), 2):
        assert len(lines) == len(alone[0]) == 20
        for found, wanted in zip(lines, alone[0], strict=True):
            compare(found, wanted)
        assert (adapters - alone[1]).norm() < 1e-5 * alone[1].norm()
        compare(evaluation, alone[2])


def test_saved_and_resumed(worlds, tmp_path):
    """TRL's own checkpoints, of adapters: the steps after one are those of a run that was not interrupted."""
    arguments = "dpo", str(tmp_path), 2, 4, 2
    (whole, *_) = trained(worlds(2), *arguments)
    (again, *_) = trained(worlds(2), *arguments, str(tmp_path / "checkpoint-2"))
    for found, wanted in zip(again[0], whole[0], strict=True):
        # TRL's count of tokens begins again.
        assert found | {"num_tokens": wanted["num_tokens"]} == wanted
    assert (again[1] == whole[1]).all()


def test_the_page_by_accelerate_launch(tmp_path):
    """Two processes on the CPU, by the page's command."""
    page = PAGE.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name in ("train.py", "train_trl.py"):
        mains = [code for code in programs if "__main__" in code]
        (code,) = [code for code in mains if ("from trl" in code) == ("trl" in name)]
        (tmp_path / name).write_text(code)
    (command,) = re.findall(r"ACCELERATE_USE_CPU=true accelerate (launch .*) train.py", page)
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *command.split()]
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "CI": "true",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*launch, "--main_process_port", str(free_port()), "train_trl.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert (tmp_path / "outputs" / "checkpoint-5" / "adapter_model.safetensors").exists()
