"""TRL's trainers with `ContextParallelMixin` on ranks of a group, beside TRL alone on one process."""

from __future__ import annotations

import pytest

from tests.transformers.trl_workers import train

IGNORED = ("step", "epoch", "num_tokens")


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_two_ranks_train_like_trl_alone(worlds, tmp_path, kind):
    """20 steps with adapters and accumulation 2: all that TRL logs, the adapters, and an evaluation."""
    (alone,) = worlds(1).run(train, kind, str(tmp_path / "1"))
    for cut in worlds(2).run(train, kind, str(tmp_path / "2"), 2):
        assert len(cut[0]) == len(alone[0]) == 20
        worst = {}
        for found, wanted in zip(cut[0], alone[0], strict=True):
            for name in wanted:
                difference = abs(float(found[name]) - float(wanted[name]))
                worst[name] = max(difference, worst.get(name, 0.0))
        print(kind, worst, (cut[1] - alone[1]).norm() / alone[1].norm())
        print({n: (cut[2][n], alone[2][n]) for n in alone[2]})
