"""transformers' models inside `context_parallel`: every class, on one rank and cut, beside transformers alone."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models import hf_models
from tests.transformers.workers import (
    BOUNDS,
    alone,
    batch,
    build,
    compare,
    different_batches,
    errors,
    leaks,
    trained,
)
from titan_linear.transformers import context_parallel
from titan_linear.transformers.functions import FAMILIES

NAMES = list(hf_models.MODELS)
LAYOUTS = ["contiguous", "zigzag"]


def test_every_family_has_a_case():
    assert {type(build(name)).__module__.split(".")[-2] for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("names", [NAMES[:9], NAMES[9:]])
def test_two_ranks_equal_one(worlds, names):
    """One process of ours is what transformers alone computes, up to its float32; two ranks are one process."""
    results = worlds(2).run(compare, names, LAYOUTS)[0]
    for (name, layout), found in results.items():
        assert found.cut <= 1e-6, (name, layout, found)
        assert found.loss <= 2e-7 and found.alone <= 5e-6, (name, layout, found)


def test_four_ranks_equal_one(worlds):
    found = worlds(4).run(compare, ["Qwen3.5, tied"], LAYOUTS)[0]
    assert all(each.cut <= 1e-6 and each.alone <= 5e-6 for each in found.values()), found
