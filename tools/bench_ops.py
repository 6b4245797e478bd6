"""Times of the linear-attention ops on one GPU, beside the floor of their bytes and, if wanted, FLA's.

    python -m tools.bench_ops                     # KDA, GDN and the convolution, the shapes of docs/kernels.md
    python -m tools.bench_ops --peers             # beside FLA's (fla-core installed; it autotunes for minutes)
    python -m tools.bench_ops --ops kda --tokens 8192 --heads 64

Median milliseconds of triton.testing.do_bench, forward and forward + backward, q and k normalised and gates computed
beforehand, bfloat16 with float32 gates, K = V = 128. "packed" has ten documents. The floor is the bytes of inputs,
outputs and gradients over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from triton.testing import do_bench

from titan_linear.ops import causal_conv1d, chunk_gated_delta_rule, chunk_kda

PACKED = (0, 2960, 5212, 9513, 13567, 17443, 20634, 23521, 26281, 31785, 32768)
K = V = 128
Inputs = dict[str, torch.Tensor]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def delta_inputs(op: str, T: int, H: int) -> Inputs:
    q, k = (torch.nn.functional.normalize(randn(1, T, H, K), dim=-1).bfloat16() for _ in range(2))
    g = -5 * torch.rand(1, T, H, K, device="cuda") if op == "kda" else -torch.rand(1, T, H, device="cuda")
    beta = torch.rand(1, T, H, device="cuda").bfloat16()
    return {"q": q, "k": k, "v": randn(1, T, H, V).bfloat16(), "g": g, "beta": beta}


def conv_inputs(_: str, T: int, H: int) -> Inputs:
    return {"x": randn(1, T, H * K).bfloat16(), "weight": randn(H * K, 4).bfloat16()}


OPS: dict[str, tuple[Callable[..., Any], Callable[[str, int, int], Inputs], dict[str, Any]]] = {
    "kda": (chunk_kda, delta_inputs, {"safe_gate": True}),
    "gdn": (chunk_gated_delta_rule, delta_inputs, {}),
    "conv": (causal_conv1d, conv_inputs, {"activation": "silu"}),
}


def peers(op: str) -> Callable[..., Any]:
    """flash-linear-attention's function of the same name."""
    if op == "conv":
        from fla.modules.convolution import causal_conv1d as peer
    elif op == "kda":
        from fla.ops.kda import chunk_kda as peer
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as peer
    return peer


def measure(fn: Callable[..., Any], x: Inputs, options: dict[str, Any]) -> tuple[float, float, float]:
    """(forward ms, forward + backward ms, peak GiB above the inputs)."""
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    dy = torch.randn_like(fn(**x, **options)[0])

    def both() -> None:
        torch.autograd.grad(fn(**x, **options)[0], list(x.values()), dy)

    with torch.no_grad():
        forward = do_bench(lambda: fn(**x, **options), warmup=50, rep=300, return_mode="median")
    both()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return forward, do_bench(both, warmup=50, rep=300, return_mode="median"), peak


def copy_bandwidth() -> float:
    """Bytes read and written per millisecond."""
    a = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / do_bench(lambda: b.copy_(a), return_mode="median")


def floors(x: Inputs, bandwidth: float) -> tuple[float, float]:
    """ms to read the inputs and write the output; and, for both passes, to read them again and write the gradients."""
    inputs = sum(t.nbytes for t in x.values())
    output = x["v" if "v" in x else "x"].nbytes
    return (inputs + output) / bandwidth, (3 * inputs + 2 * output) / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192])
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--peers", action="store_true", help="flash-linear-attention beside ours")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.2f} TB/s")
    print("| op | T | heads | documents | forward | of floor | forward + backward | of floor | peak GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for op in args.ops:
        ours, make, options = OPS[op]
        for T in args.tokens:
            for H in args.heads:
                for documents in ["one"] + ["packed"] * (PACKED[-1] == T):
                    torch.manual_seed(0)
                    x = make(op, T, H)
                    cu = torch.tensor(PACKED if documents == "packed" else (0, T), dtype=torch.int32, device="cuda")
                    floor = floors(x, bandwidth)
                    for name, fn in [(op, ours)] + ([(f"{op}, FLA", peers(op))] if args.peers else []):
                        fw, both, peak = measure(fn, x, options | {"cu_seqlens": cu})
                        print(
                            f"| {name} | {T} | {H} | {documents} | {fw:.2f} | {floor[0] / fw:.0%} | {both:.2f} "
                            f"| {floor[1] / both:.0%} | {peak:.2f} |",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
