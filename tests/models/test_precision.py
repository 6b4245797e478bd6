"""Of bfloat16 inputs reductions run in float32: results are those of float64, rounded once."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from tests.ops.inputs import chunked_cross_entropy
from titan_linear.models.config import MoEConfig
from titan_linear.models.layers import GatedRMSNorm, RMSNorm
from titan_linear.models.mlps.moe import Router

ONCE = 2**-8 * 1.001  # half a unit of the last place of bfloat16, relative


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    "module, arguments",
    [
        (RMSNorm(512, 1e-6), (randn(64, 512),)),
        (RMSNorm(512, 1e-6, zero_centred=True), (randn(64, 512),)),
        (GatedRMSNorm(512, 1e-6, "silu"), (randn(64, 512), randn(64, 512, seed=1))),
        (GatedRMSNorm(512, 1e-6, "sigmoid"), (randn(64, 512), randn(64, 512, seed=1))),
    ],
)
def test_norms_round_once(module, arguments):
    with torch.no_grad():
        module.weight.copy_(randn(512, seed=2))
        got = deepcopy(module).bfloat16()(*arguments)
        want = module.double()(*(x.double() for x in arguments))
    assert got.dtype == torch.bfloat16 and ((got - want).abs() <= ONCE * want.abs() + 1e-7).all()


def test_a_router_scores_in_float32():
    router = Router(256, MoEConfig(num_experts=8, top_k=2, hidden_dim=16))
    with torch.no_grad():
        router.weight.copy_(randn(8, 256, seed=1))
        *_, scores = deepcopy(router).bfloat16()(randn(64, 256))
        *_, want = router.double()(randn(64, 256).double())
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-7)


def test_logits_are_not_rounded():
    """Of bfloat16's 10 the next number is 10.0625: the loss would show it."""
    x, weight, labels = 2 * randn(256, 64), randn(320, 64, seed=1), torch.arange(256)
    want = F.cross_entropy(x.double() @ weight.double().T, labels, reduction="sum")
    torch.testing.assert_close(
        chunked_cross_entropy(x, weight, labels, 100).double(), want, rtol=1e-6, atol=0
    )
