"""What FSDP2 does between layers, beyond gathering parameters."""

import torch
import torch.distributed as dist

from tests.hf_workers import sharded
from tests.models.ours import loss_of
from tests.ops.inputs import boundaries
from titan_linear.models.config import ModelConfig
from titan_linear.models.init import initialise
from titan_linear.models.mixers import Attention
from titan_linear.models.plan import BatchPlan
from titan_linear.ops import build_cp_context


def given_to_layers(rank, world_size):
    """Of each layer: whether its plan is the batch's own; the dtypes of its input, and of the angles it reads."""
    config = ModelConfig(
        vocab_size=8,
        dim=32,
        pattern=(Attention(heads=2, kv_heads=2, head_dim=16),),
        num_layers=2,
        hidden_dim=32,
    )
    model = sharded(config, world_size, dtype=torch.bfloat16)
    initialise(model, 0)
    context = build_cp_context(boundaries([40, 24]), dist.group.WORLD)
    plan = BatchPlan(context.position_ids, cp_context=context)
    rotary = config.pattern[0].rotary
    plan.prepare([rotary], torch.float32)
    same, inputs, angles = [], [], []

    def look(layer, given):
        inputs.append(given[0].dtype)
        same.append(given[1] is plan)
        angles.append(given[1].angles(rotary, torch.float32)[0].dtype)

    for layer in model.layers:
        layer.register_forward_pre_hook(look)  # which comes after FSDP's
    tokens = torch.arange(context.cut.tokens).remainder(8).unsqueeze(0)
    model(tokens, plan, loss=loss_of(torch.zeros_like(tokens))).backward()
    return same, inputs, angles


def test_layers_are_given_the_plan_itself(worlds):
    """In bfloat16, where it would cast inputs: a copy would have RoPE's angles in bfloat16, and derive again."""
    for same, inputs, angles in worlds(2).run(given_to_layers):
        assert (
            same == [True, True]
            and inputs == [torch.bfloat16] * 2
            and angles == [torch.float32] * 2
        )
