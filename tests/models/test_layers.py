import pytest
import torch

from titan_linear.models.layers import QUERIES, attention_entropy, rotate
from titan_linear.models.plan import BatchPlan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dim", [16, 4])
def test_rotation_one_channel_at_a_time(dim, rows, dtype):
    """By the formula, with angles in float64, to the last bit; channels after the first `dim` stay."""
    B, T, H, D = 2, 9, 3, 16
    x = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )
    positions = torch.arange(20_000_000, 20_000_000 + T) + torch.arange(B).unsqueeze(1) * 1000
    positions = positions if rows else positions[0]  # [B, T] or [T]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = BatchPlan(positions).angles((1e4, dim, ()), wide)
    assert cos.dtype == wide and cos.shape == (*positions.shape, dim // 2)
    got, want = rotate(x, cos, sin), x.clone()
    for c in range(dim // 2):
        frequency = 1e4 ** -(torch.tensor(c, dtype=torch.float64) / (dim // 2))
        angle = (positions.double() * frequency).unsqueeze(-1)  # [.., T, 1]
        a, b = x[..., c].to(wide), x[..., c + dim // 2].to(wide)
        want[..., c] = (a * angle.cos().to(wide) - b * angle.sin().to(wide)).to(dtype)
        want[..., c + dim // 2] = (b * angle.cos().to(wide) + a * angle.sin().to(wide)).to(dtype)
    assert torch.equal(got, want)


def test_queries_that_see_one_key_have_no_entropy():
    """They are not counted: the first of each document."""
    q, k = torch.randn(2, 1, QUERIES, 2, 4, generator=torch.Generator().manual_seed(0))
    shares, count = attention_entropy(q, torch.zeros_like(k), torch.tensor([0, 1, QUERIES]))
    assert count.tolist() == [QUERIES - 2] * 2
    torch.testing.assert_close(shares, count.to(shares.dtype))
