"""The gated short convolution of LFM2: y = C ⊙ conv(B ⊙ x).

B, C and x are projections of the layer's input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from titan_linear.models.config import MixerOptions, ModelConfig
from titan_linear.models.layers import (
    Cache,
    ConvWeight,
    OpDims,
    OpModule,
    Size,
    heads_split,
    project_each,
    projection,
)
from titan_linear.models.plan import BatchPlan


class ShortConvMixer(OpModule):
    """Gated short convolution.

    The cache holds `conv` [B, channels, W−1], the convolution's last inputs.
    """

    split = heads_split("b_proj.weight", "c_proj.weight", "x_proj.weight", "conv1d.weight")
    # The product of B, C and x is left out because of the gates.
    float8 = (("o_proj",),)

    def __init__(self, options: ShortConv, config: ModelConfig, layer: int):
        super().__init__()
        self.b_proj, self.c_proj, self.x_proj = (
            projection(config.dim, options.channels) for _ in range(3)
        )
        self.conv1d = ConvWeight(options.channels, options.conv_size)
        self.o_proj = projection(options.channels, config.dim)

    def forward(self, x: Tensor, plan: BatchPlan, cache: Cache = None) -> Tensor:
        """Apply the mixer: x [B, T, dim] -> [B, T, dim].

        A cache of earlier tokens is updated in place.
        """
        B, C, x = project_each(x, self.b_proj, self.c_proj, self.x_proj)
        y = self.convolve(B * x, self.conv1d.weight, cache, "conv", **plan.documents)
        return self.o_proj(C * y)


@dataclass(frozen=True, kw_only=True)
class ShortConv(MixerOptions):
    channels: Size
    conv_size: Size = 3

    name = "short_conv"
    module = ShortConvMixer
    linear = True

    @property
    def ops(self) -> OpDims:
        return {"causal_conv1d": {"W": self.conv_size}}

    @property
    def head_counts(self) -> dict[str, int]:
        return {"channels": self.channels}

    def indivisible_heads(self, ranks: int) -> None:
        """An all-to-all never splits it: ranks exchange the tokens before their fragments."""
