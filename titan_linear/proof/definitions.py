"""The loss, products in float8 and positions, against their definitions.

All other comparisons have these on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_linear.config.schema import LOSS_NAMES
from titan_linear.models.draws import generator
from titan_linear.models.float8 import SMALLEST
from titan_linear.models.layers import rotate
from titan_linear.models.plan import BatchPlan
from titan_linear.models.rope import inverse_frequencies
from titan_linear.ops.cross_entropy import IGNORE, ChunkedLogits, cross_entropy
from titan_linear.ops.float8 import emulated_linear, float8_linear
from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import DELTA, cases
from titan_linear.proof.findings import UNIT, Finding, Findings, Note, of_worst, off
from titan_linear.proof.subject import ProofSubject

# Number of tokens, and the most rows of the head: all rows are computed alike.
TOKENS = 200
VOCAB = 4096
# Units by which the loss and its gradients may be off.
OF_LOSS = 3.0
# Number of terms that Hopper adds at a time, and the relative size of the bits that it then
# drops (DeepSeek-V3, section 3.3.2).
PER_ADDITION = 32
ADDITION = 2.0**-13


def loss(subject: ProofSubject) -> Findings:
    """Check that the loss and its gradients, chunk by chunk, equal PyTorch's in float64.

    PyTorch's loss is its cross-entropy.
    """
    vocab = min(subject.model.vocab_size, VOCAB)
    dim = subject.model.dim
    device = subject.device
    # Draw hidden states, weights and labels, some of them missing.
    rng = generator(subject.config.debug.seed, "proof", "loss")
    x, weight = (torch.randn(n, dim, generator=rng).double().to(device) for n in (TOKENS, vocab))
    labels = torch.randint(vocab, (TOKENS,), generator=rng).to(device)
    labels[::7] = IGNORE
    chunk = TOKENS // 3

    def results(dtype: torch.dtype, of: Callable[..., Tensor]) -> dict[str, Tensor]:
        # Hidden states and weights as the run has them, as leaves in this dtype.
        leaves = [t.to(subject.dtype).to(dtype, copy=True) for t in (x, weight * dim**-0.5)]
        for leaf in leaves:
            leaf.requires_grad_()
        value = of(*leaves)
        dx, dW = torch.autograd.grad(value, leaves)
        return {"loss": value.detach(), "dx": dx, "dW": dW}

    def direct(x: Tensor, W: Tensor) -> Tensor:
        return F.cross_entropy(x @ W.T, labels, ignore_index=IGNORE, reduction="sum")

    def chunked(x: Tensor, W: Tensor, impl: str) -> Tensor:
        return ChunkedLogits(x, W, chunk, impl=impl).sum(labels, cross_entropy)

    # Compare each implementation with PyTorch's cross-entropy of all tokens at once.
    exact = results(torch.float64, direct)
    for this in subject.in_each_dtype:
        dtype = this.dtype
        got = results(dtype, partial(chunked, impl=this.config.model.impl))
        # The worst of the loss and its two gradients.
        errors = {name: off(got[name], exact[name]) for name in exact}
        bound = DELTA if dtype == torch.float64 else OF_LOSS * UNIT[dtype]
        what = "loss, against the definition"
        yield of_worst(f"implementation, {short(dtype)}", what, errors, bound)


def missing(subject: ProofSubject) -> Findings:
    """Name the mixers whose ops have no definition here, and a registered loss."""
    names = {subject.config.loss.name} - {*LOSS_NAMES}
    for mixer in subject.model.mixers:
        if cases.dispatch(type(mixer)) is cases.dispatch(object):
            names.add(mixer.name)
    for name in sorted(names):
        yield Note(f"definition: {name} has none here, and is only compared with itself")


def float8(subject: ProofSubject) -> Findings:
    """Check products in float8 against float64, for hidden states and their gradients.

    The float64 products have the same rounded numbers.
    """
    run = subject.run.float8
    if not run.enable:
        return
    rng = generator(subject.config.debug.seed, "proof", "float8")
    x, weight = (
        torch.randn(n, SMALLEST, generator=rng).to(subject.device, subject.dtype)
        for n in (TOKENS, SMALLEST)
    )
    # Both products of a linear layer with its input, and with its output's gradient.
    for what, w in (("x", weight), ("dy", weight.T)):
        error = off(float8_linear(x, w, run.emulate), emulated_linear(x.double(), w.double()))
        bound = OF_LOSS * UNIT[subject.dtype] + SMALLEST / PER_ADDITION * ADDITION
        what = f"products with {what}, against float64"
        yield Finding(f"float8, {short(subject.dtype)}", what, error, bound)


def positions(subject: ProofSubject) -> Findings:
    """Check that rotary embeddings equal complex numbers turned by position · theta^(−i /
    half).

    The definition is RoFormer's, eq. 34. If the run scales frequencies, the scaled ones are
    used.
    """
    for mixer in subject.model.mixers:
        if mixer.rotary is not None:
            theta, dim, scaling = mixer.rotary
            places = [0, 1, 2, 1000, subject.run.training.seq_len - 1]
            at = torch.tensor(places, device=subject.device)
            # Two heads at these positions, rotated by us.
            rng = generator(subject.config.debug.seed, "proof", "positions")
            x = torch.randn(1, len(at), 2, dim, generator=rng).double().to(subject.device)
            got = rotate(x, *BatchPlan(at).angles(mixer.rotary, torch.float64))
            if scaling:
                frequencies, factor = inverse_frequencies(*mixer.rotary, at.device)
            else:
                powers = torch.arange(0, dim, 2, device=at.device).double() / dim
                frequencies = theta**-powers
                factor = 1.0
            # Turn pairs of channels as complex numbers.
            turn = factor * torch.exp(1j * at[:, None].double() * frequencies)
            turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * turn[:, None]
            error = off(got, torch.cat([turned.real, turned.imag], -1))
            what = f"positions, {mixer.name}, against the definition"
            yield Finding("implementation, float64", what, error, DELTA)
