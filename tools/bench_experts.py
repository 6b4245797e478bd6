"""Times and memory of a layer's routed experts on one GPU, beside those of other libraries if asked.

    python -m tools.bench_experts
    python -m tools.bench_experts --models qwen3.5/35B-A3B granite-h/tiny --tokens 8192 --peers

All are given the same tokens, choices and weights (a router is not timed), matrices and gradient, in bfloat16, weights
of choices in float32, and are compiled. Milliseconds as in tools.bench_ops: forward, and forward + backward, gradients
of tokens, weights and matrices; TFLOP/s count products alone. "peak": GiB above parameters and inputs. "from ours": the
difference of the outputs, in norm.

--peers: beside what is installed of TorchTitan, of which squared ReLU has the products and the dispatch alone, and
ScatterMoE.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor, nn

from titan_linear.commands import command_parser, line, table
from titan_linear.distributed.process import refusing, run_command
from titan_linear.models.mlps.moe import Experts, LocalDispatch, MoEConfig
from titan_linear.models.presets import preset
from titan_linear.ops.experts import loads
from tools.bench_ops import timed

MODELS = ("nemotron-h/nano-3-30B-A3B", "qwen3.5/35B-A3B", "granite-h/tiny", "kimi-linear/48B-A3B")
# tokens [N, D], weights and experts [N, k] -> [N, D]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Layer = tuple[Run, nn.Module]  # and what has its parameters


# --- Layers with matrices up [E, 2 H or H, D], gates first, and down [E, D, H] ----------------------------------------


def ours(c: MoEConfig, up: Tensor, down: Tensor) -> Layer:
    layer = Experts(down.shape[1], c)
    for name, matrix in zip(layer.hidden_matrices, (up, down), strict=True):
        setattr(layer, name, nn.Parameter(matrix.view_as(getattr(layer, name))))

    def run(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return layer(*LocalDispatch(x, experts, weights, loads(experts, c.num_experts)).arrived())

    return run, layer


def torchtitan(c: MoEConfig, up: Tensor, down: Tensor) -> Layer:
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    class SquaredReLU(GroupedExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            h = self._grouped_mm(A=x, B_t=self.w1_EFD.mT, offs=ends).relu().square()
            return self._grouped_mm(A=h, B_t=self.w2_EDF.mT, offs=ends)

    sizes = GroupedExperts.Config(
        dim=down.shape[1], hidden_dim=c.hidden_dim, num_experts=c.num_experts
    )
    dispatcher = LocalTokenDispatcher.Config(num_experts=c.num_experts, top_k=c.top_k)
    layer = RoutedExperts.Config(inner_experts=sizes, token_dispatcher=dispatcher).build()
    gate, *rest = up.chunk(1 if c.activation == "relu2" else 2, 1)
    if not rest:
        layer.inner_experts = SquaredReLU(sizes)
    matrices = gate, rest[0] if rest else None, down
    for name, matrix in zip(("w1_EFD", "w3_EFD", "w2_EDF"), matrices, strict=True):
        setattr(
            layer.inner_experts, name, None if matrix is None else nn.Parameter(matrix.contiguous())
        )

    def run(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return layer(x[None], weights[None], experts[None], loads(experts, c.num_experts))[0]

    return run, layer


def scattermoe(c: MoEConfig, up: Tensor, down: Tensor) -> Layer:
    from scattermoe.mlp import GLUMLP, MLP

    sizes = down.shape[1], c.hidden_dim, c.num_experts, c.top_k
    if c.activation == "relu2":
        layer = MLP(*sizes, activation=lambda x: x.relu().square())
    else:
        layer = GLUMLP(*sizes)
        up = torch.cat(up.chunk(2, 1)[::-1], 1)  # gates last
    layer.experts.weight, layer.output_experts.weight = nn.Parameter(up), nn.Parameter(down)
    return lambda x, weights, experts: layer(x, weights.to(x.dtype), experts), layer


PEERS = {"torchtitan": torchtitan, "scattermoe": scattermoe}


# --- The table -------------------------------------------------------------------------------------------------------


def print_rows(
    model: str, tokens: int, peers: dict[str, Callable[..., Layer]], flush: Tensor
) -> None:
    """A row of our layer and of each of the peers'."""
    config = preset(*model.split("/"))
    c = config.moe
    torch.manual_seed(0)
    up, down = (
        torch.randn(c.num_experts, *sizes).mul_(0.02).bfloat16()
        for sizes in shapes(c, c.width(config.dim))
    )
    x, dy = torch.randn(2, tokens, down.shape[1]).bfloat16()
    weights, experts = torch.rand(tokens, c.num_experts).topk(c.top_k)
    inputs = (
        x.requires_grad_(),
        weights.div_(weights.sum(1, keepdim=True)).requires_grad_(),
        experts,
    )
    flops = 2 * tokens * c.top_k * (up[0].numel() + down[0].numel())  # of products, forward
    y = None
    for name, build in {"": ours, **peers}.items():
        run, layer = build(c, up, down)
        run = torch.compile(run, dynamic=False)
        output = run(*inputs).detach()
        y = output if y is None else y
        difference = ((output - y).float().norm() / y.float().norm()).item()
        cells = figures(run, inputs, list(layer.parameters()), dy, flops, flush)
        print(
            line([f"{model} {name}".strip(), str(tokens), *cells, f"{difference:.1e}"]), flush=True
        )


def shapes(c: MoEConfig, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of an expert's matrices."""
    return (c.hidden_dim * (1 + (c.activation == "swiglu")), dim), (dim, c.hidden_dim)


def figures(
    run: Run,
    inputs: tuple[Tensor, ...],
    parameters: list[Tensor],
    dy: Tensor,
    flops: int,
    flush: Tensor,
) -> list[str]:
    x, weights, _ = inputs

    def both() -> None:
        torch.autograd.grad(run(*inputs), [x, weights, *parameters], dy)

    forward, _ = timed(lambda: run(*inputs), flush)
    both()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    whole, host = timed(both, flush)
    rates = f"{flops / forward / 1e9:.0f}", f"{3 * flops / whole / 1e9:.0f}"
    return [f"{forward:.2f}", rates[0], f"{whole:.2f}", rates[1], f"{peak:.2f}", f"{host:.2f}"]


@refusing
def main(argv: list[str]) -> int:
    parser = command_parser("python -m tools.bench_experts", __doc__)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="NAME/FLAVOR of each (default: four)"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument(
        "--peers", action="store_true", help="also time other libraries, where installed"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("tools.bench_experts times the kernels of a GPU, and there is none here")
    torch.set_default_device("cuda")
    flush = torch.empty(12 << 30, dtype=torch.uint8)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rates = [
        name for kind in ("forward", "forward + backward") for name in (f"{kind} ms", "TFLOP/s")
    ]
    print(table(("experts of", "tokens", *rates, "peak", "host", "from ours"), []))
    peers = {name: build for name, build in PEERS.items() if args.peers and find_spec(name)}
    for model, tokens in product(args.models, args.tokens):
        print_rows(model, tokens, peers, flush)
    return 0


if __name__ == "__main__":
    run_command(main)
