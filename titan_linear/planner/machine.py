"""What a machine can do: rates measured on a GPU, and the links between its GPUs.

Rates are a JSON file: one that `tools/bench_rates.py` wrote on the machine at hand, or one of those shipped (rates/).
"""

from __future__ import annotations

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
# Seconds by which each further rank, and each further node, delays a ring: as NCCL estimates them, not measured.
HOP, HOP_BETWEEN_NODES = 2e-6, 4e-6

# TFLOP/s forward, forward and backward
ByHeadDim = Annotated[dict[str, tuple[Above0, Above0]], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True)
class Link:
    """A link between GPUs of a node, or of several: seconds per message, bytes per second that a GPU sends."""

    latency: AtLeast0
    all_gather: Above0
    reduce_scatter: Above0
    all_to_all: Above0


@pydantic.dataclasses.dataclass(frozen=True)
class Offload:
    """Bytes per second between a GPU and its host's pinned memory, and of AdamW on the host, reads plus writes."""

    to_device: Above0
    to_host: Above0
    adamw: Above0


@pydantic.dataclasses.dataclass(frozen=True)
class Rates:
    """Measured rates of a GPU; `sources` says where each figure is from."""

    gpu: str
    memory_gib: Above0
    peak_tflops: Above0
    copy: Above0  # bytes per second, reads plus writes, as the next two
    elementwise: Above0  # of single operations
    fused: Above0  # of compiled operations
    products: Annotated[list[tuple[Above0, Above0]], Field(min_length=1)]  # smallest size, TFLOP/s
    attention: Annotated[dict[str, ByHeadDim], Field(min_length=1)]  # by kernel
    # (ns per token and head (K = V = 128) or channel, ns per token of an entry); "… any": gates without a lower bound
    operators: dict[str, tuple[AtLeast0, AtLeast0]]
    gap: AtLeast0  # seconds between kernels
    host: AtLeast0  # seconds that the host takes per launch
    node: Link | None  # None: not measured
    sources: dict[str, str]
    offload: Offload | None = None  # None: not measured
    float8: list[tuple[Above0, Above0]] | None = None  # as `products`; None: not measured
    # of rows by expert; None: not measured, as `products`
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
        """Seconds of [m, k] @ [k, n] in bfloat16. grouped: rows have one of several such matrices."""
        m, n, k = size
        moved = 2 * (m * k + k * n + m * n)
        rates = (self.grouped if grouped else None) or self.products
        return max(2 * m * n * k / _tflops(rates, size) / 1e12, moved / self.copy)

    def float8_product(self, size: Size) -> float:
        """Seconds of [m, k] @ [k, n] from float8, without what rounds to it."""
        if self.float8 is None:
            raise ValueError(
                f"the rates of {self.gpu} do not say how fast products in float8 are, so that no time is planned with "
                "float8.enable = true; python -m tools.bench_rates measures that"
            )
        m, n, k = size
        return 2 * m * n * k / _tflops(self.float8, size) / 1e12


def _tflops(rates: list[tuple[float, float]], size: Size) -> float:
    """The rate of products of this size: rates are by the smallest of the three."""
    points = sorted((math.log2(width), rate) for width, rate in rates)
    sizes, measured = zip(*points, strict=True)
    return float(np.interp(math.log2(min(size)), sizes, measured))


def shipped() -> dict[str, Path]:
    """GPU → its file of rates."""
    return {path.stem.upper(): path for path in sorted(SHIPPED.glob("*.json"))}


def read_rates(path: Path) -> Rates:
    """Read and check a file of rates. ValueError: it is not one."""
    return read_json(path, Rates, "python -m tools.bench_rates writes a file of rates")


@dataclass(frozen=True)
class Group:
    """The exchanges of a group of ranks: seconds, and bytes per second that a rank sends."""

    message: float  # seconds before what a rank sends to others directly is there
    # and of an all-gather or reduce-scatter, which passes through all ranks, one after the other
    ring: float
    all_gather: float
    reduce_scatter: float
    all_to_all: float
    neighbour: float  # where each rank sends to the next alone


@dataclass(frozen=True)
class Machine:
    rates: Rates
    node_size: int  # GPUs per node
    network: float  # bytes per second that a GPU sends to other nodes
    # the kernel; "flash" stands in for "cudnn" where lengths do not recur, or heads are wider
    attention: str

    def attention_rates(self, D: int, Dv: int, recurring: bool) -> tuple[float, float]:
        """TFLOP/s of forward, and of both passes, on heads of D and Dv channels: those of the least measured width that
        holds both, without the work on padding."""
        wide = max(D, Dv)
        kernel = self.attention
        if kernel == "cudnn" and not (
            recurring and wide <= max(map(int, self.rates.attention[kernel]))
        ):
            kernel = "flash" if "flash" in self.rates.attention else kernel
        computed = 2 * wide if kernel == "flash" else sum(flash4.widths(D, Dv))
        by_width = {int(width): rates for width, rates in self.rates.attention[kernel].items()}
        forward, both = by_width[min((w for w in by_width if w >= wide), default=max(by_width))]
        return forward * (D + Dv) / computed, both * (D + Dv) / computed

    @property
    def offload(self) -> Offload:
        if self.rates.offload is None:
            raise ValueError(
                f"the rates of {self.rates.gpu} do not say how fast its host is, so that no time is planned with "
                "training.enable_cpu_offload = true; python -m tools.bench_rates measures that"
            )
        return self.rates.offload

    def group(self, ranks: int, stride: int) -> Group:
        """The exchanges of a group of `ranks` ranks that lie `stride` ranks apart."""
        node = self.rates.node
        if ranks == 1:
            return Group(0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
        if node is None:
            raise ValueError(
                f"the rates of {self.rates.gpu} do not say how fast GPUs exchange data; torchrun --nproc-per-node 2 -m "
                "tools.bench_rates measures that"
            )
        here = min(max(self.node_size // stride, 1), ranks)  # the group's ranks on a node
        if here == ranks:
            return Group(
                node.latency,
                node.latency,
                node.all_gather,
                node.reduce_scatter,
                node.all_to_all,
                node.all_gather,
            )
        # one ring through each rank's link to other nodes
        nodes, rings = -(-ranks // here), here * self.network
        return Group(
            message=node.latency + FARTHER,
            ring=node.latency + (ranks - nodes) * HOP + nodes * HOP_BETWEEN_NODES,
            all_gather=min(rings, node.all_gather),
            reduce_scatter=min(rings, node.reduce_scatter),
            all_to_all=min(self.network * (ranks - 1) / (ranks - here), node.all_to_all),
            neighbour=min(self.network, node.all_gather),
        )
