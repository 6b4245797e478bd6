"""Inputs for the KDA kernels, a run through all stages, and the same through the reference."""

from __future__ import annotations

import torch

from titan_linear.ops.reference.delta_rule import kda_gate, l2norm, recurrent_delta_rule
from titan_linear.ops.runtime.options import DeltaRuleOptions, Inputs, States
from titan_linear.ops.triton.chunks import chunks_of
from titan_linear.ops.triton.kda import KDA
from titan_linear.ops.triton.stages import TritonRule

NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")


def make_inputs(T, H, HV, K, V, N, *, gate="none", fast=1.0, device="cpu", state=True):
    """Random fp32 inputs; g is `fast` times a number in [−1, 0], or raw if a gate is in the kernel. `fast` may be one
    number for each chunk."""
    gen = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    x = {"q": rand(T, H, K), "k": rand(T, H, K), "v": rand(T, HV, V)}
    x["q"], x["k"] = l2norm(x["q"]).float(), l2norm(x["k"]).float()
    if gate == "none":
        of_tokens = torch.as_tensor(fast).repeat_interleave(64 if isinstance(fast, tuple) else T)[:T, None, None]
        x["g"] = -of_tokens * torch.rand(T, HV, K, generator=gen)
    else:
        x["g"] = fast * rand(T, HV, K)
        x["A_log"], x["dt_bias"] = 0.5 * rand(HV), 0.5 * rand(HV * K)
    x["beta"] = torch.rand(T, HV, generator=gen)
    if state:
        x["h0"], x["dht"] = rand(N, HV, K, V), rand(N, HV, K, V)
    x["do"] = rand(T, HV, V)
    return {name: t.to(device) for name, t in x.items()}


def run_kernels(x, cu, *, gate="none", safe=False, lower_bound=None, scale=None):
    """All stages of forward and backward → dict of NAMES."""
    options = DeltaRuleOptions(
        scale=scale or x["q"].shape[-1] ** -0.5,
        gate_in_kernel=gate != "none",
        lower_bound=lower_bound if gate == "bounded" else None,
        safe_gate=safe,
    )
    inputs, chunks = Inputs(*map(x.get, Inputs._fields)), _chunks(x, cu)
    initial, d_final = (None if x.get(name) is None else States(x[name]) for name in ("h0", "dht"))
    forward = TritonRule(KDA, inputs, options, chunks, ())
    o, ht = forward.forward(initial, True)
    again = TritonRule(KDA, inputs, options, chunks, forward.kept[2:])
    grads, d_initial = again.backward(x["do"], initial, d_final, initial is not None)
    return dict(zip(NAMES, (o, ht, *grads, d_initial), strict=True))


def _chunks(x, cu):
    return chunks_of(torch.tensor(cu, dtype=torch.int32, device=x["q"].device), len(x["q"]))


def recurrence(q, k, v, g, beta, cu, scale, h0):
    """The oracle on one packed stream without a batch dimension: o [T, HV, V], states [N, HV, K, V]."""
    x = (t[None] for t in (q, k, v, g, beta))
    o, states = recurrent_delta_rule(*x, scale=scale, initial_state=h0, cu_seqlens=torch.tensor(cu))
    return o[0], states


def error(x, ref, size=None):
    """‖x − ref‖ / ‖size‖, size the reference unless given; NaN fails every bound."""
    x, ref = x.double().cpu(), ref.double().cpu()
    return ((x - ref).norm() / (ref if size is None else size.cpu()).norm().clamp_min(1e-30)).item()


def run_reference(x, cu, *, gate="none", lower_bound=None, scale=None, **_):
    """What run_kernels gives, in fp64, and the sizes of the sums that dA_log and ddt_bias are."""
    scale = scale or x["q"].shape[-1] ** -0.5
    leaves = {n: x[n].double().requires_grad_() for n in ("q", "k", "v", "g", "beta", "h0") if n in x}
    q, k, v, g, beta = (leaves[n] for n in ("q", "k", "v", "g", "beta"))
    if gate != "none":  # a copy per token and channel, whose gradients are the terms of the parameters' gradients
        params = {n: x[n].double().view(g.shape[1], -1).expand(g.shape).clone() for n in ("A_log", "dt_bias")}
        terms = [t.requires_grad_().flatten() for t in params.values()]
        g = kda_gate(g.reshape(-1, 1), *terms, lower_bound).view_as(g)
    o, ht = recurrence(q, k, v, g, beta, cu, scale, leaves.get("h0"))
    loss = (o * x["do"].double()).sum()
    if "dht" in x:
        loss = loss + (ht * x["dht"].double()).sum()
    loss.backward()
    out = {"o": o.detach(), "ht": ht.detach()} | {f"d{n}": t.grad for n, t in leaves.items()}
    if gate != "none":
        for name, terms in (("dA_log", params["A_log"].grad.sum(2)), ("ddt_bias", params["dt_bias"].grad.flatten(1))):
            out |= {name: terms.sum(0), f"size of {name}": terms.abs().sum(0)}
    return out


def run_boundary(x, cu, entries, *, safe=False):
    """S_ext, M and dS_ext of the listed entries."""
    entries = torch.tensor(entries, dtype=torch.int32, device=x["q"].device)
    options = DeltaRuleOptions(scale=x["q"].shape[-1] ** -0.5, safe_gate=safe)
    rule = TritonRule(KDA, Inputs(*(x[n] for n in Inputs._fields[:5])), options, _chunks(x, cu), ())
    S_ext, M = rule.entry_transitions(entries)
    return {"S_ext": S_ext, "M": M, "dS_ext": rule.entry_gradients(x["do"], entries)}


def reference_boundary(x, cu, entries, **_):
    names = ("q", "k", "v", "g", "beta", "do")
    out = {"S_ext": [], "M": [], "dS_ext": []}
    for n in entries:
        q, k, v, g, beta, do = (x[name][cu[n] : cu[n + 1]].double() for name in names)
        T, HV, V, K = *v.shape, k.shape[-1]
        run = lambda v, h0: recurrence(q, k, v, g, beta, [0, T], K**-0.5, h0)  # noqa: B023, E731
        eye = torch.eye(K, dtype=v.dtype, device=v.device).expand(1, HV, K, K)
        h0 = v.new_zeros(1, HV, K, V).requires_grad_()
        out["S_ext"].append(run(v, None)[1][0])
        out["M"].append(run(v.new_zeros(T, HV, K), eye)[1][0])
        out["dS_ext"].append(torch.autograd.grad((run(v, h0)[0] * do).sum(), h0)[0][0])
    return {name: torch.stack(tensors) for name, tensors in out.items()}
