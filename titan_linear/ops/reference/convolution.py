"""Causal depthwise convolution, written out tap by tap in float64: the oracle of
`causal_conv1d`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_linear.ops.reference.delta_rule import l2norm
from titan_linear.ops.reference.token_by_token import sequences


def direct_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    widths: Sequence[int] = (),
    norm_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve x [B,T,D] with weight [D,W], bias [D] and initial_state [N,D,W−1] -> y
    [B,T,D], final states [N,D,W−1], float64.

    norm_dim: heads of this many channels are normalized in the first two of three `widths`.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    flat = x.double().flatten(0, 1)
    weight = weight.double()
    outputs = []
    states = []
    # Put the earlier tokens in front of each sequence, and add up the taps.
    for n, (start, end) in enumerate(sequences(B, T, cu_seqlens)):
        past = flat.new_zeros(D, W - 1) if initial_state is None else initial_state[n].double()
        padded = torch.cat([past.T, flat[start:end]])  # [W−1+length, D]
        taps = [padded[j : j + end - start] * weight[:, j] for j in range(W)]
        outputs.append(sum(taps))
        states.append(padded[padded.shape[0] - (W - 1) :].T)
    # Bias, activation and normalization.
    y = torch.cat(outputs).unflatten(0, (B, T))
    y = y if bias is None else y + bias.double()
    y = y * torch.sigmoid(y) if activation in ("silu", "swish") else y
    if norm_dim is not None:
        q, k, v = y.split(widths, -1)
        q, k = (l2norm(part.unflatten(-1, (-1, norm_dim))).flatten(-2) for part in (q, k))
        y = torch.cat([q, k, v], -1)
    return y, torch.stack(states)
