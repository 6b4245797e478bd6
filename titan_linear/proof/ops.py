"""Ops and mixers of the run's model: split among ranks, against float64, documents alone,
repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from titan_linear.distributed.one_process import Degrees, LocalDims
from titan_linear.distributed.parallelize import cp_method
from titan_linear.models.config import MixerOptions
from titan_linear.models.plan import BatchPlan, Later
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import Case, Draws, Tensors
from titan_linear.proof.cases import cases as of_ops
from titan_linear.proof.data import tokens_of
from titan_linear.proof.findings import UNIT, Finding, Findings, off, worst
from titan_linear.proof.ranks import on_ranks, sharding_of
from titan_linear.proof.subject import STREAMS, ProofSubject

# Number of tokens for oracles, which run token by token.
ORACLE_TOKENS = 192
# Number of documents that are computed alone.
ALONE = 6
# The least share of the batch's norm that errors of a document are relative to. A document
# may be as short as one token.
SMALL = 1e-3


# --- The cases of a model -----------------------------------------------------------------

OF_MIXER = {"": 12.0}


def cases(subject: ProofSubject) -> Iterator[Case]:
    """Yield, for each kind of mixer, its ops, then the mixer itself."""
    whole = subject.whole(torch.float64)
    T = STREAMS * subject.config.training.seq_len
    for kind in subject.model.mixers:
        layers = tuple(i for i, layer in enumerate(subject.model.layers) if kind in layer.mixers)
        method = cp_method(kind, subject.config.parallelism)
        draw = Draws(T, subject.config.debug.seed, kind.name, subject.device, method)
        of_first = zip(
            subject.model.layers[layers[0]].mixers, whole.layers[layers[0]].mixers, strict=True
        )
        for case in (
            *of_ops(kind, draw),
            _mixer(kind, draw, subject.model.dim, dict(of_first)[kind]),
        ):
            yield replace(case, layers=layers)


def _mixer(kind: MixerOptions, draw: Draws, dim: int, mixer: nn.Module) -> Case:
    def run(x: Tensors, plan: BatchPlan, impl: str) -> Tensor:
        x = dict(x)
        # Copy the module for each call, because ranks run it in turns.
        copied = copy.deepcopy(mixer)
        arguments = [x.pop(name) for name in tokens]
        # Replace the copy's parameters by the case's, which need gradients.
        for name, p in x.items():
            owner, _, leaf = name.rpartition(".")
            module = copied.get_submodule(owner)
            del module._parameters[leaf]
            setattr(module, leaf, p)
        copied.cp_method = draw.cp_method
        copied.implementations = choose_implementations(
            kind.ops, impl, arguments[0].device, arguments[0].dtype
        )
        x, *taken = arguments
        y = copied(x, plan, None, *taken)
        return y if isinstance(y, Tensor) else y[0]

    tokens = draw.tokens(x=(dim,)) | (draw.tokens(values=(kind.takes,)) if kind.takes else {})
    parameters = {name: p.detach() for name, p in mixer.named_parameters()}
    wide = getattr(mixer, "kept_whole", ())
    dy = draw("dy of mixer", 1, draw.T, dim)
    more = {"parameters": parameters, "wide": wide, "by_head": False}
    return Case(f"mixer {kind.name}", tokens, dy, run, None, OF_MIXER, **more)


# --- A case on one rank or many -----------------------------------------------------------


class Results(NamedTuple):
    """The results of a case: its output and gradients by token; the gradients of its
    parameters.
    """

    tokens: Tensors
    parameters: Tensors


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """Return the case with its values rounded to `dtype`, but stored in float64."""
    if dtype != torch.float64:
        case = replace(case, parameters=case.parameters | case.usual)
    tokens, parameters = (
        {name: x.to(_dtype_of(case, name, dtype)).double() for name, x in part.items()}
        for part in (case.tokens, case.parameters)
    )
    return replace(case, tokens=tokens, parameters=parameters, dy=case.dy.to(dtype).double())


def _dtype_of(case: Case, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if name in case.wide else dtype


def computed(
    case: Case,
    dtype: torch.dtype,
    plan: BatchPlan,
    impl: str = "torch",
    mine: Tensor | slice = slice(None),
) -> Results:
    """Compute the case in `dtype`, on the tokens `mine`."""
    # Inputs are leaves, so that their gradients can be compared.
    tokens = {n: x[:, mine].to(dtype, copy=True).requires_grad_() for n, x in case.tokens.items()}
    parameters = {
        n: x.to(_dtype_of(case, n, dtype), copy=True).requires_grad_()
        for n, x in case.parameters.items()
    }
    y = case.run(tokens | parameters, plan, impl)
    grads = torch.autograd.grad(
        y, [*tokens.values(), *parameters.values()], case.dy[:, mine].to(dtype)
    )
    gradients = dict(zip([*tokens, *parameters], grads, strict=True))
    return Results(
        {"y": y.detach()} | {f"d{n}": gradients[n] for n in tokens},
        {f"d{n}": gradients[n] for n in parameters},
    )


def on_one(subject: ProofSubject, case: Case, dtype: torch.dtype, impl: str = "torch") -> Results:
    """Compute the case on one rank, without the run's plan.

    Documents are given by their boundaries.
    """
    return computed(case, dtype, plan_of(subject, _bounds(subject)), impl)


def split_among_ranks(subject: ProofSubject, case: Case, dtype: torch.dtype, impl: str) -> Results:
    """Compute the case on the ranks that share a stream, and join their results.

    Raises:
        RankFailed: a rank raised an error.
    """
    degrees = Degrees(cp=subject.degrees.cp)

    def on_rank(dims: LocalDims) -> Results:
        batch = next(iter(subject.loader(0, subject.degrees.dp)))
        plan = sharding_of(subject, dims, dtype)(batch).plan
        return computed(
            case, dtype, plan, impl, tokens_of(subject, 0, dims.rank).to(subject.device)
        )

    ranks = on_ranks(degrees, on_rank)
    # Put each rank's tokens at their places, and sum the gradients of parameters.
    whole = {
        name: x.new_empty(1, case.dy.shape[1], *x.shape[2:]) for name, x in ranks[0].tokens.items()
    }
    for rank, results in enumerate(ranks):
        for name, x in results.tokens.items():
            whole[name][:, tokens_of(subject, 0, rank).to(x.device)] = x
    return Results(
        whole, {n: sum(r.parameters[n].double() for r in ranks) for n in ranks[0].parameters}
    )


def _bounds(subject: ProofSubject) -> Tensor:
    """Return the boundaries of the first data-parallel rank's streams, [N+1] int32, on the
    CPU.
    """
    bounds = subject.batch.cu_seqlens
    return bounds[bounds <= STREAMS * subject.config.training.seq_len]


def plan_of(
    subject: ProofSubject, bounds: Tensor, num_streams: int = 1, later: Later | None = None
) -> BatchPlan:
    """Return the plan of documents with these boundaries, computed by hand."""
    positions = torch.cat([torch.arange(n) for n in bounds.diff().tolist()]).to(subject.device)
    return BatchPlan(
        positions, cu_seqlens=bounds.to(subject.device), num_streams=num_streams, later=later
    )


# --- What is compared ---------------------------------------------------------------------


def _compared(
    subject: ProofSubject, case: Case, got: Results, want: Results, dtype: torch.dtype
) -> tuple[float, float, str]:
    """Return the worst error, its bound, and its place."""
    both = (got.tokens | got.parameters), (want.tokens | want.parameters)
    errors = {name: off(x, both[1][name]) for name, x in both[0].items()}
    bounds = {name: _bound(case, name, dtype) for name in errors}
    # If results are out of bounds, name the first that has a place: results by token, the
    # output before gradients.
    name = next(
        (name for name in got.tokens if not errors[name] <= bounds[name]), worst(errors, bounds)
    )
    return (
        errors[name],
        bounds[name],
        _where(subject, case, name, both[0][name], both[1][name], name in got.tokens),
    )


def _bound(case: Case, name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return case.bound
    return case.units.get(name if name == "y" else name[1:], case.units[""]) * UNIT[dtype]


def _where(
    subject: ProofSubject, case: Case, name: str, got: Tensor, want: Tensor, of_tokens: bool
) -> str:
    """Describe in words the result, its worst head, and where the error begins.

    The place is a rank and a document.
    """
    wrong = (got.double() - want.double()).abs().nan_to_num(torch.inf, torch.inf)
    said = [name]
    if not of_tokens:
        # Gradients of parameters are [HV] or [HV·K].
        if case.by_head:
            said.append(f"head {int(wrong.view(case.dy.shape[2], -1).amax(1).argmax())}")
        return ", ".join(said)
    if case.by_head:
        said.append(f"head {int(wrong.transpose(0, 2).flatten(1).amax(1).argmax())}")
    return ", ".join(
        [*said, _place(subject, case.first + begins(wrong[0].flatten(1).amax(1), name != "y"))]
    )


def begins(wrong: Tensor, backward: bool) -> int:
    """Return the first token, or in backward the last, with a large error.

    An error is large if it is a hundredth of the worst or more. wrong: [T] errors.
    """
    about = (wrong >= wrong.max() / 100).nonzero().flatten()
    return int(about[-1 if backward else 0])


def _place(subject: ProofSubject, token: int) -> str:
    ranks = [r for r in range(subject.degrees.cp) if token in tokens_of(subject, 0, r)]
    return f"rank {ranks[0]}, {subject.document(token)}"


def split(subject: ProofSubject, case: Case) -> Findings:
    """Check that the case split among ranks equals float64 on one rank.

    In the run's dtype, it must be equal within the cost of rounding.
    """
    what = f"{case}, cp {subject.degrees.cp}"
    for dtype in dict.fromkeys((torch.float64, subject.dtype)):
        rounded_case = rounded(case, dtype)
        impl = "torch" if dtype == torch.float64 else subject.config.model.impl
        got = split_among_ranks(subject, rounded_case, dtype, impl)
        want = on_one(subject, rounded_case, torch.float64)
        yield Finding(f"split, {short(dtype)}", what, *_compared(subject, case, got, want, dtype))


def implementations(subject: ProofSubject, case: Case) -> Findings:
    """Check the run's implementation against float64, and float64 against the definition.

    The document lengths are the run's.
    """
    dtype = subject.dtype
    rounded_case = rounded(case, dtype)
    got = on_one(subject, rounded_case, dtype, subject.config.model.impl)
    compared = _compared(subject, case, got, on_one(subject, rounded_case, torch.float64), dtype)
    yield Finding(f"implementation, {short(dtype)}", f"{case}, against float64", *compared)
    # The definition runs token by token, so it gets few tokens.
    if case.oracle is not None:
        few, bounds = _few(subject, case)
        got = computed(few, torch.float64, plan_of(subject, bounds))
        written = replace(few, run=lambda x, plan, impl: few.oracle(x, bounds))
        want = computed(written, torch.float64, plan_of(subject, bounds))
        compared = _compared(subject, few, got, want, torch.float64)
        yield Finding("implementation, float64", f"{case}, against the definition", *compared)


def _few(subject: ProofSubject, case: Case) -> tuple[Case, Tensor]:
    """Return the case on the last tokens of the batch, and their documents' boundaries.

    The first of these documents is cut off.
    """
    bounds = _bounds(subject)
    first = max(int(bounds[-1]) - ORACLE_TOKENS, 0)
    cut = first + (int(bounds[-1]) - first) // 3
    bounds = torch.cat([torch.tensor([first, cut]), bounds[bounds > cut]])
    tokens = {name: x[:, first:] for name, x in case.tokens.items()}
    few = replace(case, tokens=tokens, dy=case.dy[:, first:], first=first)
    return few, (bounds - first).int()


def documents(subject: ProofSubject, case: Case) -> Findings:
    """Check that a document gives the same packed and alone.

    Changing another document must not change anything of it.
    """
    bounds = _bounds(subject)
    lengths = bounds.diff()
    order = lengths.argsort(descending=True).tolist()
    packed = on_one(subject, case, torch.float64)
    worst_of = (0.0, "")
    # Compare the longest and the shortest documents, packed and alone.
    for n in [*order[: ALONE // 2], *order[::-1][: ALONE // 2]]:
        document = slice(int(bounds[n]), int(bounds[n + 1]))
        for name, x in alone(subject, case, document, int(lengths[n])).items():
            whole = packed.tokens[name]
            error = off(whole[:, document], x, SMALL * whole.norm().item())
            if not error <= worst_of[0]:
                worst_of = error, f"{name}, {subject.document(document.start)}"
    yield Finding(
        "documents", f"{case}, packed and alone, float64", worst_of[0], case.bound, worst_of[1]
    )
    # Change documents one by one; all others must keep their bits.
    what = f"{case}, cp {subject.degrees.cp}: what changing one document changes of others, {short(subject.dtype)}"
    most, where = 0.0, ""
    with repeatable():
        for n, before, after in _changed(subject, case, [order[0], order[-1], 0]):
            for name, x in after.tokens.items():
                change = (x.double() - before.tokens[name].double()).abs()
                if not change.max() <= most:
                    most = change.max().item()
                    token = int(change[0].flatten(1).amax(1).argmax())
                    where = (
                        f"{name}, {_place(subject, token)}, by {subject.document(int(bounds[n]))}"
                    )
    yield Finding("documents", what, most, 0.0, where)
    # The run's own kernels may sum in any order, so they get a bound instead.
    if may_differ(subject, case.layers):
        _, before, after = next(_changed(subject, case, [order[0]]))
        compared = _compared(subject, case, after, before, subject.dtype)
        yield Finding("documents", f"{what}, by the kernels of the run", *compared)


def alone(subject: ProofSubject, case: Case, rows: slice | np.ndarray, length: int) -> Tensors:
    """Return the results of a document's tokens alone, in float64."""
    plan = plan_of(subject, torch.tensor([0, length], dtype=torch.int32))
    return computed(case, torch.float64, plan, mine=rows).tokens


def after_change(subject: ProofSubject, case: Case, rows: slice) -> Tensors:
    """Return the results of all tokens on the run's ranks after some tokens are changed."""
    other = {name: x.clone() for name, x in (case.tokens | {"dy": case.dy}).items()}
    for x in other.values():
        x[:, rows] = 1.5 * x[:, rows].flip(-1) + 0.25
    changed = replace(case, dy=other.pop("dy"), tokens=other)
    return split_among_ranks(subject, changed, subject.dtype, subject.config.model.impl).tokens


def _changed(
    subject: ProofSubject, case: Case, documents: list[int]
) -> Iterator[tuple[int, Results, Results]]:
    """Yield each of these documents, with the results before and after it is changed.

    In the results after the change, the document's own are the ones before it: only other
    documents' results differ.
    """
    bounds = _bounds(subject)
    before = split_among_ranks(subject, case, subject.dtype, subject.config.model.impl)
    for n in dict.fromkeys(documents):
        document = slice(int(bounds[n]), int(bounds[n + 1]))
        after = after_change(subject, case, document)
        for name, x in after.items():
            x[:, document] = before.tokens[name][:, document]
        yield n, before, Results(after, {})


def repeated(subject: ProofSubject, case: Case) -> Findings:
    """Check that the case gives the same bits when it runs again; name results that do not."""
    dtype, impl = subject.dtype, subject.config.model.impl
    with repeatable(may_differ(subject, case.layers)):
        first, again = (split_among_ranks(subject, case, dtype, impl) for _ in range(2))
    pairs = [(name, x, again[i][name]) for i in range(2) for name, x in first[i].items()]
    differ = [name for name, x, y in pairs if not torch.equal(x, y)]
    what = f"{case}: results that differ in their bits when it runs again"
    yield Finding("repeated", what, len(differ), 0, ", ".join(differ))


@contextmanager
def repeatable(on: bool = True) -> Iterator[None]:
    """Use deterministic algorithms where they exist: repeated results have the same bits."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn" if on else before)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def may_differ(subject: ProofSubject, layers: Iterable[int]) -> bool:
    """Whether some results of these layers may have other bits each time.

    Results of softmax attention on GPUs may, unless algorithms are deterministic: its
    fastest kernels add in any order.
    """
    softmax = not all(mixer.linear for i in layers for mixer in subject.model.layers[i].mixers)
    return softmax and subject.device.type != "cpu"
