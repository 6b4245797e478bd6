"""Inputs and comparisons that the tests of the linear-attention ops share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import softplus

from titan_linear.distributed.one_process import run_ranks
from titan_linear.ops import (
    CPContext,
    build_cp_context,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_rwkv7,
    chunk_simple_gla,
    chunk_ssd,
)
from titan_linear.ops.cross_entropy import ChunkedLogits, cross_entropy
from titan_linear.ops.exchange.collectives import Ranks
from titan_linear.ops.reference.delta_rule import gdn_gate, kda_gate, l2norm, recurrent_delta_rule
from titan_linear.ops.reference.linear_attention import (
    recurrent_dplr,
    recurrent_simple_gla,
    recurrent_ssd,
)

# of Triton's kernels, which run in its interpreter there
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = {
    "kda": chunk_kda,
    "gdn": chunk_gated_delta_rule,
    "ssd": chunk_ssd,
    "gla": chunk_simple_gla,
    "rwkv7": chunk_rwkv7,
}
STATES = {  # what an op calls its states
    op: ("initial_states", "return_final_states")
    if op == "ssd"
    else ("initial_state", "output_final_state")
    for op in OPS
}
FORWARD, GRADIENTS = 1e-12, 1e-9  # relative errors in float64
GATES = {"slow": 1e-3, "usual": 1.0, "safe": 5.0, "fast": 20.0}  # largest decay per token, −g

# Log decays of single tokens among those of −1e-3.
JUMPS = [
    {20: -168.0},
    dict.fromkeys(range(3, 23), -5.0),
    {3: -100.0},
    {3: -100.0, 70: -168.0, 90: -100.0},
]


@contextmanager
def new_memory_of_nan() -> Iterator[None]:
    """What is read before it is written shows; and only deterministic algorithms run."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def device_of(impl: str) -> str:
    """Where an implementation runs in tests."""
    return DEVICE if impl == "triton" else "cpu"


def tokens_of(ctx: CPContext) -> Tensor:
    """[T_local] int64: which of the stream's tokens this rank has, in the order in which it has them."""
    return torch.cat([torch.arange(*ends) for ends in ctx.fragments])


def make_inputs(
    op: str,
    T: int,
    *,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 24,
    B: int = 1,
    gate: str = "usual",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Float64 inputs of chunk_kda ("kda") or chunk_gated_delta_rule ("gdn") with q, k normalised and log gates."""
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng, dtype=torch.float64)
    g_shape = (B, T, HV, K) if op == "kda" else (B, T, HV)
    x = {"q": l2norm(randn(B, T, H, K)), "k": l2norm(randn(B, T, H, K)), "v": randn(B, T, HV, V)}
    x["g"] = -GATES[gate] * torch.rand(*g_shape, generator=rng, dtype=torch.float64)
    x["beta"] = torch.rand(B, T, HV, generator=rng, dtype=torch.float64)
    return x


def raw_gate_inputs(op: str, T: int, **shape: int) -> dict[str, Tensor]:
    """As make_inputs, with q, k not normalised and g raw, and A_log and dt_bias that differ from head to head."""
    x = make_inputs(op, T, **shape)
    rng = torch.Generator().manual_seed(1)
    HV = x["v"].shape[2]
    for name in "qkg":
        x[name] = torch.randn(x[name].shape, generator=rng, dtype=torch.float64)
    x["A_log"] = torch.linspace(-1, 1.5, HV, dtype=torch.float64)
    x["dt_bias"] = torch.randn(x["g"].shape[2:].numel(), generator=rng, dtype=torch.float64)
    return x


def decaying_inputs(
    op: str,
    T: int,
    *,
    G: int = 2,
    heads: int = 4,
    N: int = 16,
    P: int = 24,
    B: int = 1,
    bias: float = 0.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Float64 inputs of chunk_ssd ("ssd"), raw time steps with `dt_bias` about `bias`, or of chunk_simple_gla ("gla")
    with the decays of such time steps; they differ from head to head."""
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng, dtype=torch.float64)
    C, B_, x = randn(B, T, G, N), randn(B, T, G, N), randn(B, T, heads, P)
    rates = torch.linspace(0.2, 2.0, heads, dtype=torch.float64)
    if op == "gla":
        return {"q": C, "k": B_, "v": x, "g": -rates * softplus(bias + randn(B, T, heads))}
    parameters = {"A": -rates, "D": randn(heads), "dt_bias": bias + randn(heads)}
    return {"x": x, "dt": randn(B, T, heads), "B": B_, "C": C, **parameters}


def dplr_inputs(
    T: int, *, H: int = 2, K: int = 16, V: int = 24, B: int = 1, gate: str = "usual", seed: int = 0
) -> dict[str, Tensor]:
    """Float64 inputs of RWKV-7's recurrence, by its implementations' names: a reads along a unit vector, b takes a
    share of its own from each channel."""
    rng = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=rng, dtype=torch.float64)
    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V)}
    removed = l2norm(randn(B, T, H, K))
    x |= {"a": -removed, "b": removed * randn(B, T, H, K).sigmoid()}
    return x | {"gk": -GATES[gate] * torch.rand(B, T, H, K, generator=rng, dtype=torch.float64)}


def rwkv7_inputs(T: int, **sizes) -> dict[str, Tensor]:
    """Float64 inputs of chunk_rwkv7."""
    named = {"q": "r", "gk": "w"}
    return {named.get(name, name): t for name, t in dplr_inputs(T, **sizes).items()}


MAKERS = {
    **{op: partial(make_inputs, op) for op in ("kda", "gdn")},
    **{op: partial(decaying_inputs, op) for op in ("ssd", "gla")},
    "rwkv7": rwkv7_inputs,
}
SMALL = {  # sizes and slow decay, for many tokens
    **{op: {"H": 1, "HV": 2, "K": 8, "V": 6, "gate": "slow"} for op in ("kda", "gdn")},
    **{op: {"G": 1, "heads": 2, "N": 8, "P": 6, "bias": -7.0} for op in ("ssd", "gla")},
    "rwkv7": {"K": 8, "V": 6, "gate": "slow"},
}


def call(op: str, x: dict[str, Tensor], **options) -> tuple[Tensor, Tensor | None]:
    """The op under test on make_inputs, raw_gate_inputs or decaying_inputs."""
    if op == "ssd":
        options = {"dt_softplus": True} | options
    if "A_log" in x:
        options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True} | options
    return OPS[op](**x, **options)


def oracle(
    op: str, x: dict[str, Tensor], lower_bound: float | None = None, **options
) -> tuple[Tensor, Tensor]:
    """The token-by-token result for the same inputs."""
    for name in ("disable_recompute", "safe_gate"):
        options.pop(name, None)
    if op == "ssd":
        return recurrent_ssd(**x, **{"dt_softplus": True} | options)
    if op == "gla":
        return recurrent_simple_gla(**x, **options)
    if op == "rwkv7":
        named = {{"r": "q", "w": "gk"}.get(name, name): t for name, t in x.items()}
        if options.pop("use_gate_in_kernel", False):
            named["gk"] = -math.exp(-0.5) * named["gk"].sigmoid()
        return recurrent_dplr(**named, **{"scale": 1.0} | options)
    x = dict(x)
    initial_state = x.pop("initial_state", None)
    if "A_log" in x:
        A_log, dt_bias = x.pop("A_log"), x.pop("dt_bias")
        x["q"], x["k"] = l2norm(x["q"]), l2norm(x["k"])
        x["g"] = (
            kda_gate(x["g"], A_log, dt_bias, lower_bound)
            if op == "kda"
            else gdn_gate(x["g"], A_log, dt_bias)
        )
    return recurrent_delta_rule(**x, initial_state=initial_state, **options)


def gradients(outputs: list[Tensor], x: dict[str, Tensor], seed: int = 2) -> list[Tensor]:
    """Outputs and the gradients of every input for fixed random output gradients."""
    rng = torch.Generator().manual_seed(seed)
    douts = [torch.randn(o.shape, generator=rng, dtype=torch.float64).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(x.values()), douts)]


def errors(
    op: str, x: dict[str, Tensor], cu: Tensor | None = None, *, impl: str = "torch", **options
) -> dict[str, float]:
    """`relative_error` of o, the final states and the gradients of all inputs, from random initial states, against the
    oracle of the same numbers."""
    initial, need_final = STATES[op]
    values, keys = (x["x"], x["B"]) if op == "ssd" else (x["v"], x["k"])
    (heads, V), K = values.shape[2:], keys.shape[3]
    state = (heads, V, K) if op == "ssd" else (heads, K, V)
    entries, rng = len(values) if cu is None else len(cu) - 1, torch.Generator().manual_seed(3)
    wide = torch.promote_types(values.dtype, torch.float32)
    x = x | {initial: torch.randn(entries, *state, generator=rng, dtype=wide)}
    ours = leaves({name: t.to(device_of(impl)) for name, t in x.items()})
    placed = None if cu is None else cu.to(device_of(impl))
    got = gradients(
        list(call(op, ours, cu_seqlens=placed, impl=impl, **{need_final: True}, **options)), ours
    )
    exact = leaves({name: t.double() for name, t in x.items()})
    want = gradients(list(oracle(op, exact, cu_seqlens=cu, **options)), exact)
    return {
        name: relative_error(a.cpu(), b)
        for name, a, b in zip(["o", "final", *x], got, want, strict=True)
    }


def compare(op: str, x: dict[str, Tensor], cu: Tensor | None = None, **options) -> None:
    """The same in float64, to float64's precision."""
    found = errors(op, x, cu, **options)
    assert max(found["o"], found["final"]) < FORWARD and max(found.values()) < GRADIENTS, found


def compare_four_ranks(
    op: str, x: dict[str, Tensor], cu: Tensor, layout: str, tolerance: float
) -> None:
    """The kernels' float32 output and gradients of all inputs under context parallelism; those of parameters add up."""
    x = {name: t.float() for name, t in x.items()}
    exact = leaves({name: t.double() for name, t in x.items()})
    want = gradients([oracle(op, exact, cu_seqlens=cu)[0]], exact)
    do = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def on_rank(group):
        ctx = build_cp_context(cu, group, device=DEVICE, layout=layout)
        mine = tokens_of(ctx)
        own = leaves({name: (t[:, mine] if t.dim() > 2 else t).to(DEVICE) for name, t in x.items()})
        o, _ = call(op, own, cp_context=ctx, impl="triton")
        return [mine, o.detach(), *torch.autograd.grad(o, list(own.values()), do[:, mine].to(o))]

    places, *ranks = zip(*run_ranks(on_rank, 4), strict=True)
    order = torch.cat(places).argsort()
    for name, got, right in zip(["o", *x], ranks, want, strict=True):
        whole = torch.cat(got, 1).cpu()[:, order] if right.dim() > 2 else sum(got).cpu()
        assert relative_error(whole, right) < tolerance, name


def check_neighbours(
    op: str, base: dict[str, Tensor], lengths: list[int], documents: Iterable[int], **options
) -> None:
    """Whatever one of these documents holds, the others' outputs and gradients are what they are without it, to the
    last bit; and a second run gives the same bits."""
    device, cu = device_of(options.get("impl", "torch")), boundaries(lengths)
    tokens = [name for name, t in base.items() if t.dim() > 2]

    def results(given):
        x = leaves({name: t.to(device) for name, t in given.items()})
        return gradients([call(op, x, cu_seqlens=cu.to(device), **options)[0]], x)

    before = results(base)
    assert all(map(torch.equal, results(base), before))
    for i in documents:
        inside = slice(int(cu[i]), int(cu[i + 1]))
        for value in (torch.nan, torch.inf, 6e4, -6e4):
            changed = {name: t.clone() for name, t in base.items()}
            for name in tokens:
                changed[name][:, inside] = value
            for name, a, b in zip(["o", *base], results(changed), before, strict=True):
                if name in ("o", *tokens):
                    a, b = (
                        torch.cat([t[:, : inside.start], t[:, inside.stop :]], 1) for t in (a, b)
                    )
                    assert torch.equal(a, b), (name, i, value)


def leaves(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in x.items()}


def same(
    got: Sequence[Tensor] | dict[str, Tensor], want: Sequence[Tensor] | dict[str, Tensor]
) -> bool:
    """To the last bit; of tensors by name `got` may have more."""
    if isinstance(want, dict):
        got, want = [got[name] for name in want], list(want.values())
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def relative_error(a: Tensor, b: Tensor, scale: Tensor | None = None) -> float:
    """‖a − b‖ / ‖scale‖, b's by default; infinite where a is not finite."""
    error = (a.double() - b.double()).norm() / (
        b if scale is None else scale
    ).double().norm().clamp(min=1e-300)
    return error.item() if torch.isfinite(a).all() else float("inf")


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    ranks: Ranks | None = None,
    impl: str = "auto",
) -> Tensor:
    """Σ_t cross_entropy(x_t Wᵀ, label_t) over labels that are not −100, [T] int64 (`ChunkedLogits`)."""
    return ChunkedLogits(x, weight, chunk, ranks, impl=impl).sum(labels, cross_entropy)
