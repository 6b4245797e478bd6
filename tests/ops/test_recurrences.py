"""Every chunked recurrence against its token-by-token oracle in float64: outputs, final states and all gradients."""

import pytest
import torch

from tests.ops.inputs import (
    FORWARD,
    JUMPS,
    MAKERS,
    SMALL,
    STATES,
    boundaries,
    call,
    check_neighbours,
    compare,
    errors,
    oracle,
    relative_error,
)
from tests.ops.layout.documents import EDGES, FLA_CP2, FLA_CP4

LENGTHS = [1, 15, 63, 64, 65, 2, 130]
OPS = pytest.mark.parametrize("op", MAKERS)


@pytest.mark.parametrize(
    "op, gate",
    [
        *((op, {"gate": gate}) for op in ("kda", "gdn") for gate in ("slow", "usual", "fast")),
        *(("rwkv7", {"gate": gate}) for gate in ("slow", "usual")),
        ("ssd", {}),
        ("gla", {}),
    ],
)
def test_packed_documents(op, gate):
    compare(op, MAKERS[op](sum(LENGTHS), **gate), boundaries(LENGTHS))


@OPS
@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
def test_document_lists_of_context_parallelism(op, lengths):
    compare(op, MAKERS[op](sum(lengths), **SMALL[op]), boundaries(lengths))


@pytest.mark.parametrize("lengths", FLA_CP2 + FLA_CP4, ids=str)
def test_document_lists_of_fla(op, lengths):
    compare(op, MAKERS[op](sum(lengths), **SMALL[op]), boundaries(lengths))


@OPS
@pytest.mark.parametrize("T", [1, 63, 128, 131])
def test_batch(op, T):
    compare(op, MAKERS[op](T, B=2), **({} if op == "ssd" else {"scale": 0.3}))


@OPS
def test_disable_recompute(op):
    compare(op, MAKERS[op](130), disable_recompute=True)


@OPS
def test_a_stretch_continues_from_its_state_and_then_token_by_token(op):
    """Tokens one by one are steps of the recurrence."""
    initial, need_final = STATES[op]
    x = MAKERS[op](80, B=2)
    want, end = call(op, x, **{need_final: True})
    parts, state = [], None
    for part in (slice(0, 77), *(slice(t, t + 1) for t in (77, 78, 79))):
        own = {name: t[:, part] if t.dim() > 2 else t for name, t in x.items()}
        o, state = call(op, own, **{initial: state, need_final: True})
        parts.append(o)
    assert (
        relative_error(torch.cat(parts, 1), want) < FORWARD and relative_error(state, end) < FORWARD
    )


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(op, dtype):
    """The error is that of rounding inputs and outputs: the computation in between is float32 or wider."""
    cu, x = boundaries(LENGTHS), MAKERS[op](sum(LENGTHS))
    x = {name: t.to(dtype) if t.dim() > 2 else t.float() for name, t in x.items()}
    o, final = call(op, x, cu_seqlens=cu, **{STATES[op][1]: True})
    assert o.dtype == dtype and final.dtype == torch.float32
    found = errors(op, x, cu)
    assert max(found.values()) < (torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5), found


@pytest.mark.parametrize("jumps", JUMPS, ids=str)
@pytest.mark.parametrize("op", sorted(MAKERS.keys() - {"rwkv7"}))  # its decays have a bound
def test_slow_decay_after_fast(op, jumps):
    """In float32 a sum of log decays that spans a fast one does not take part in those that follow it."""
    x, options = {name: t.float() for name, t in MAKERS[op](128, **SMALL[op]).items()}, {}
    decay = torch.full((1, 128, 1), -1e-3)
    for token, jump in jumps.items():
        decay[:, token] = jump
    if op == "ssd":
        x |= {"dt": -decay.expand(x["dt"].shape), "dt_bias": torch.zeros(2), "A": -torch.ones(2)}
        options = {"dt_softplus": False}
    else:
        x["g"][:] = decay.view(1, 128, *[1] * (x["g"].dim() - 2))
    want = oracle(op, {name: t.double() for name, t in x.items()}, **options)[0]
    assert (call(op, x, **options)[0] - want).abs().max() < 1e-6 * want.abs().max()


@OPS
def test_documents_do_not_touch_each_other(op):
    lengths = [5, 70, 1, 52]
    logits = {"use_gate_in_kernel": True} if op == "rwkv7" else {}  # its decays have a bound
    check_neighbours(op, MAKERS[op](sum(lengths), **SMALL[op]), lengths, range(4), **logits)
