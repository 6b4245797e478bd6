"""A block of attention merged into another, beside the same in float64."""

import pytest
import torch

from tests.ops.inputs import DEVICE, relative_error
from titan_linear.ops.torch import attention
from titan_linear.ops.triton.merge import merge_

HALF = torch.bfloat16, 2**-8


@pytest.mark.parametrize(
    "dtype, bound",
    [(torch.float32, 1e-6), HALF, pytest.param(*HALF, marks=pytest.mark.cuda, id="on a GPU")],
)
def test_merged_rows_match_float64(dtype, bound):
    """Rows of a stream, with numbers of the other block in another order, and weights down to 0."""
    draw = torch.Generator().manual_seed(0)
    o, part = (
        torch.randn(1, *shape, generator=draw).to(dtype) for shape in ((70, 3, 33), (3, 65, 33))
    )
    lse, part_lse = (100 * torch.randn(1, *shape, generator=draw) for shape in ((3, 70), (65, 3)))
    blocks = [x.to(DEVICE) for x in (o, lse, part.transpose(1, 2), part_lse.mT)]

    def merged(function, o, lse, *block):
        function(o[:, 2:67], lse[..., 2:67], *block)
        return o.cpu(), lse.cpu()

    want = merged(attention.merge_, *(x.double() for x in blocks))
    for function in (merge_, attention.merge_):
        got = merged(function, *(x.clone() for x in blocks))
        assert all(relative_error(x.double(), y) <= bound for x, y in zip(got, want, strict=True))
