"""Activation checkpointing of every n-th layer. ops/runtime/test_operators.py tests what a checkpointed layer keeps."""

from dataclasses import replace

import pytest
import torch

from tests.models.ours import initialised
from tests.ops.inputs import same
from titan_linear.config import ActivationCheckpoint
from titan_linear.distributed.parallelize import apply_ac
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset

LAYERS = 5


def gradients(ac):
    """Of all parameters, and how often each layer's MLP ran."""
    model = initialised(replace(preset("hybrid", "debug"), num_layers=LAYERS), dtype=torch.float64)
    ran = [0] * LAYERS

    def count(i):
        ran[i] += 1

    for i, layer in enumerate(model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: count(i))
    apply_ac(model, ac, compiled=False)
    model(torch.arange(10).unsqueeze(0), BatchPlan(torch.arange(10))).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], ran


@pytest.mark.parametrize(
    "option, recomputed",
    [("1", {0, 1, 2, 3, 4}), ("2", {1, 3}), ("3", {2}), ("5", {4}), ("op", {0, 1, 2, 3, 4})],
)
def test_every_nth_layer_runs_again(option, recomputed):
    want, once = gradients(ActivationCheckpoint())
    got, ran = gradients(ActivationCheckpoint(mode="selective", selective_ac_option=option))
    assert once == [1] * LAYERS and ran == [2 if i in recomputed else 1 for i in range(LAYERS)]
    assert want and same(got, want)
