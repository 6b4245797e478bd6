"""Softmax attention under context parallelism on two GPUs, against float64 on one of them.

float64 shows that what travels through NCCL is right; bfloat16 runs the kernels that training does.
"""

import pytest
import torch
import torch.distributed as dist

from tests.ops.attention_cases import error, make, run
from tests.ops.inputs import boundaries, tokens_of
from titan_linear.ops import attention, build_cp_context
from titan_linear.ops.reference.attention import attention as reference

HEADS = [(8, 2, 128, 128), (4, 2, 192, 128)]  # Hq, Hkv, D, Dv: cuDNN and flash; flash alone
LENGTHS = [[2048], [1024, 1024], [1, 15, 63, 64, 65, 1000, 3, 837], [2, 2043, 3]]
UNIT = torch.finfo(torch.bfloat16).eps / 2
# o and gradients. A block may have 2 and 4 units on one device; here blocks are rounded, merged and rounded again.
BOUNDS = {torch.float64: (1e-12, 1e-12), torch.bfloat16: (3 * UNIT, 6 * UNIT)}


def on_rank(rank, world_size, method, layout):
    """The errors of this rank's tokens that are out of bounds, o's and the worst gradient's."""
    wrong = {}
    for lengths in LENGTHS:
        cu = boundaries(lengths)
        cp = build_cp_context(cu.cuda(), dist.group.WORLD, layout=layout, cu_seqlens_cpu=cu)
        mine = tokens_of(cp).cuda()
        for heads in HEADS:
            for dtype, (o_bound, gradient_bound) in BOUNDS.items():
                for causal in (True, False):
                    whole = make(1, cu[-1], cu[-1], *heads, dtype=dtype, device="cuda")
                    exact = [x.detach().double().requires_grad_() for x in whole]
                    exact = run(reference, *exact, causal=causal, cu_seqlens=cu)
                    q, k, v, do = (x.detach()[:, mine].requires_grad_() for x in whole)
                    ours = run(
                        attention, q, k, v, do.detach(), causal=causal, cp_context=cp, method=method
                    )
                    o, *gradients = (error(x, y[:, mine]) for x, y in zip(ours, exact, strict=True))
                    if not (o <= o_bound and max(gradients) <= gradient_bound):
                        wrong[f"{lengths} {heads} {dtype} causal={causal}"] = o, max(gradients)
    return wrong


@pytest.mark.cuda(2)
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_two_devices(worlds, method, layout):
    assert worlds(2, "nccl").run(on_rank, method, layout) == [{}, {}]
