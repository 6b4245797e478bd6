"""A machine's speed: rates measured on a GPU, and the links between its GPUs.

Rates are a JSON file that `tools/bench_rates.py` wrote on the machine, or a file of the
package (rates/).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic
from pydantic import Field

from titan_linear.models.layers import Above0, AtLeast0
from titan_linear.ops.layout.levels import FARTHER
from titan_linear.ops.torch import flash4
from titan_linear.planner.counting import Size
from titan_linear.storage.files import read_json

SHIPPED = Path(__file__).parent / "rates"
# TFLOP/s of forward, and of forward with backward.
ByHeadDim = Annotated[dict[str, tuple[Above0, Above0]], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True)
class Link:
    """A link between GPUs of one node: seconds per message, bytes per second that a GPU
    sends.
    """

    latency: AtLeast0
    all_gather: Above0
    reduce_scatter: Above0
    all_to_all: Above0


@pydantic.dataclasses.dataclass(frozen=True)
class Rates:
    """Measured rates of a GPU; `sources` has the origin of each figure."""

    gpu: str
    memory_gib: Above0
    peak_tflops: Above0
    # Bytes per second, reads plus writes: of copies, of single elementwise operations, and
    # of compiled ones.
    copy: Above0
    elementwise: Above0
    fused: Above0
    # Pairs of the smallest size and TFLOP/s.
    products: Annotated[list[tuple[Above0, Above0]], Field(min_length=1)]
    # TFLOP/s by kernel and head dim.
    attention: Annotated[dict[str, ByHeadDim], Field(min_length=1)]
    # Pairs of ns per token and head (K = V = 128) or channel, and ns per token of an entry.
    # A name with " any" is for gates without a lower bound.
    operators: dict[str, tuple[AtLeast0, AtLeast0]]
    # Seconds between kernels, and seconds that the host takes per launch.
    gap: AtLeast0
    host: AtLeast0
    # None: not measured.
    node: Link | None
    sources: dict[str, str]
    # Products in float8, as `products`. None: not measured.
    float8: list[tuple[Above0, Above0]] | None = None
    # Products of rows by expert, as `products`. None: not measured; `products` is used.
    grouped: list[tuple[Above0, Above0]] | None = None

    @pydantic.field_validator("operators")
    @classmethod
    def _with_convolution(
        cls, operators: dict[str, tuple[float, float]]
    ) -> dict[str, tuple[float, float]]:
        if not {"conv1d", "conv1d_backward"} <= operators.keys():
            raise ValueError("conv1d and conv1d_backward are missing")
        return operators

    def product(self, size: Size, grouped: bool = False) -> float:
        """Return the seconds of [m, k] @ [k, n] in bfloat16.

        grouped: each row is multiplied by one of several such matrices.
        """
        m, n, k = size
        # A product takes at least as long as reading and writing its matrices.
        moved = 2 * (m * k + k * n + m * n)
        rates = (self.grouped if grouped else None) or self.products
        return max(2 * m * n * k / _tflops(rates, size) / 1e12, moved / self.copy)

    def float8_product(self, size: Size) -> float:
        """Return the seconds of [m, k] @ [k, n] from float8, without the rounding to it."""
        if self.float8 is None:
            raise ValueError(
                f"the rates of {self.gpu} do not say how fast products in float8 are, so that no time is planned with "
                "float8.enable = true; python -m tools.bench_rates measures that"
            )
        m, n, k = size
        return 2 * m * n * k / _tflops(self.float8, size) / 1e12


def _tflops(rates: list[tuple[float, float]], size: Size) -> float:
    """Return the rate of products of this size, interpolated by the smallest of its three
    sizes.
    """
    points = sorted((math.log2(width), rate) for width, rate in rates)
    sizes, measured = zip(*points, strict=True)
    return float(np.interp(math.log2(min(size)), sizes, measured))


def shipped() -> dict[str, Path]:
    """Return the files of rates in the package, by GPU."""
    return {path.stem.upper(): path for path in sorted(SHIPPED.glob("*.json"))}


def read_rates(path: Path) -> Rates:
    """Read and check a file of rates.

    Raises:
        ValueError: the file does not have rates.
    """
    return read_json(path, Rates, "python -m tools.bench_rates writes a file of rates")


@dataclass(frozen=True)
class Group:
    """Speed of exchanges in a group of ranks: seconds, and bytes per second that a rank
    sends.
    """

    # Seconds until data that a rank sends has arrived.
    message: float
    all_gather: float
    reduce_scatter: float
    all_to_all: float
    # Rate if each rank sends only to the next one.
    neighbour: float


@dataclass(frozen=True)
class Machine:
    rates: Rates
    # GPUs per node.
    node_size: int
    # Bytes per second that a GPU sends to other nodes.
    network: float
    # The kernel. "flash" replaces "cudnn" if lengths do not recur, or if heads are wider.
    attention: str

    def attention_rates(self, D: int, Dv: int, recurring: bool) -> tuple[float, float]:
        """Return TFLOP/s of attention's forward, and of both passes, on heads of D and Dv
        channels.

        They are the rates of the least measured width that holds both dims, without the
        work on padding.
        """
        wide = max(D, Dv)
        kernel = self.attention
        if kernel == "cudnn" and "flash" in self.rates.attention:
            widest = max(map(int, self.rates.attention[kernel]))
            kernel = kernel if recurring and wide <= widest else "flash"
        # The kernel computes padded heads, so the useful share of its rate is smaller.
        computed = 2 * wide if kernel == "flash" else sum(flash4.widths(D, Dv))
        by_width = {int(width): rates for width, rates in self.rates.attention[kernel].items()}
        held = [width for width in by_width if width >= wide]
        forward, both = by_width[min(held, default=max(by_width))]
        useful = (D + Dv) / computed
        return forward * useful, both * useful

    def group(self, ranks: int, stride: int) -> Group:
        """Return the speed of exchanges in a group of `ranks` ranks that are `stride` ranks
        apart.
        """
        node = self.rates.node
        if ranks == 1:
            return Group(0.0, 1.0, 1.0, 1.0, 1.0)
        if node is None:
            raise ValueError(
                f"the rates of {self.rates.gpu} do not say how fast GPUs exchange data; torchrun --nproc-per-node 2 -m "
                "tools.bench_rates measures that"
            )
        # Number of the group's ranks on a node.
        here = min(max(self.node_size // stride, 1), ranks)
        if here == ranks:
            rates = node.all_gather, node.reduce_scatter, node.all_to_all
            return Group(node.latency, *rates, neighbour=node.all_gather)
        # One ring passes through each rank's link to other nodes.
        rings = here * self.network
        return Group(
            message=node.latency + FARTHER,
            all_gather=min(rings, node.all_gather),
            reduce_scatter=min(rings, node.reduce_scatter),
            all_to_all=min(self.network * (ranks - 1) / (ranks - here), node.all_to_all),
            neighbour=min(self.network, node.all_gather),
        )
