"""Choice of the products that a model computes in float8."""

from collections.abc import Sequence

import torch.nn.functional as F

from titan_linear.models.decoder import Decoder
from titan_linear.models.layers import Projection
from titan_linear.ops.float8 import MULTIPLE, emulated_linear, float8_linear

# K and N: rounding to float8 takes longer than smaller products save.
SMALLEST = 2048


def use_float8(
    model: Decoder, filter_fqns: Sequence[str], emulate: bool = False, first: int = 0
) -> list[list[str]]:
    """Make projections compute in float8.

    Candidates are the products that modules list in `float8`. A product must be large
    enough, and none of the names of its projections may contain an entry of `filter_fqns`.

    Args:
        first: number of the first layer.

    Returns:
        The names of the projections, by product.
    """
    product = emulated_linear if emulate else float8_linear
    found = []
    for i, layer in enumerate(model.layers, first):
        for owner, module in layer.named_modules(prefix=f"layers.{i}"):
            for joined in getattr(module, "float8", ()):
                projections = [getattr(module, name) for name in joined]
                # Skip a projection through a latent, which is narrow.
                if not isinstance(projections[0], Projection):
                    continue
                names = [f"{owner}.{name}" for name in joined]
                if _pays(projections) and not any(
                    part in name for part in filter_fqns for name in names
                ):
                    found.append(names)
                    for projection in projections:
                        projection.product = product
    return found


def _pays(projections: list[Projection]) -> bool:
    K = projections[0].in_features
    N = sum(projection.out_features for projection in projections)
    return min(K, N) >= SMALLEST and K % MULTIPLE == N % MULTIPLE == 0


def float8_line(model: Decoder) -> str:
    """Return a console line about the projections in float8; "" without any."""
    modules = model.named_modules()
    names = [
        name.rpartition(".")[2]
        for name, m in modules
        if isinstance(m, Projection) and m.product is not F.linear
    ]
    return f"float8: {len(names)} projections, {', '.join(dict.fromkeys(names))}" if names else ""
