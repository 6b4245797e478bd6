"""Ops and mixers of the run's model: split among ranks, against float64, documents alone,
prefix trees, repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from titan_linear.distributed.one_process import Degrees, LocalDims
from titan_linear.distributed.parallelize import cp_method
from titan_linear.models.config import MixerOptions
from titan_linear.models.decoder import Block
from titan_linear.models.plan import BatchPlan, Later
from titan_linear.ops.registry import choose_implementations
from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import Case, Draws, Tensors
from titan_linear.proof.cases import cases as of_ops
from titan_linear.proof.data import tokens_of
from titan_linear.proof.findings import (
    UNIT,
    Finding,
    Findings,
    by_token,
    difference,
    of_count,
    of_worst,
    off,
    worst,
)
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
        for case in of_ops(kind, draw):
            yield replace(case, layers=layers)
        # The mixer is the first layer's.
        place = subject.model.layers[layers[0]].mixers.index(kind)
        mixer = cast(Block, whole.layers[layers[0]]).mixers[place]
        yield replace(_mixer(kind, draw, subject.model.dim, mixer), layers=layers)


def _mixer(kind: MixerOptions, draw: Draws, dim: int, mixer: nn.Module) -> Case:
    def run(x: Tensors, plan: BatchPlan, impl: str) -> Tensor:
        # Copy the module for each call, because ranks run it in turns.
        copied = copy.deepcopy(mixer)
        copied.cp_method = draw.cp_method
        first, *values = (x[name] for name in inputs)
        copied.implementations = choose_implementations(kind.ops, impl, first.device, first.dtype)
        # Run it with the case's parameters, which need gradients, on the case's tokens.
        case_parameters = {name: x[name] for name in parameters}
        y = functional_call(copied, case_parameters, (first, plan, None, *values))
        return y if isinstance(y, Tensor) else y[0]

    # Hidden states, and the values of an earlier layer if the mixer takes them.
    inputs = draw.tokens(x=(dim,))
    if kind.takes:
        inputs |= draw.tokens(values=(kind.takes,))
    dy = draw("dy of mixer", 1, draw.T, dim)
    parameters = {name: p.detach() for name, p in mixer.named_parameters()}
    wide = getattr(mixer, "kept_whole", ())
    more = {"parameters": parameters, "wide": wide, "by_head": False}
    return Case(f"mixer {kind.name}", inputs | {"dy": dy}, run, None, OF_MIXER, **more)


# --- A case on one rank or many -----------------------------------------------------------


class Results(NamedTuple):
    """The results of a case: its output and gradients by token; the gradients of its
    parameters.
    """

    tokens: Tensors
    parameters: Tensors


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """Return the case with its values rounded to `dtype`, but stored in float64."""

    def of(part: Tensors) -> Tensors:
        return {name: x.to(case.dtype(name, dtype)).double() for name, x in part.items()}

    # Below float64, decays are the usual ones.
    parameters = case.parameters
    if dtype != torch.float64:
        parameters = parameters | case.usual
    return replace(case, tokens=of(case.tokens), parameters=of(parameters))


def computed(
    subject: ProofSubject,
    case: Case,
    plan: BatchPlan,
    mine: Tensor | slice | np.ndarray = slice(None),
) -> Results:
    """Compute the case as the subject is computed, on the tokens `mine`.

    Args:
        mine: indices of tokens, [T_local] int64, or a range of them.
    """
    dtype = subject.dtype
    # Inputs are leaves, so that their gradients can be compared.
    leaves = {name: x[:, mine] for name, x in case.tokens.items()} | case.parameters
    dy = leaves.pop("dy").to(dtype)
    for name, x in leaves.items():
        leaves[name] = x.to(case.dtype(name, dtype), copy=True).requires_grad_()
    # Forward and backward.
    y = case.run(leaves, plan, subject.config.model.impl)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    # The first are by token, the others of parameters.
    results = {f"d{name}": x for name, x in zip(leaves, gradients)}
    parameters = {f"d{name}": results.pop(f"d{name}") for name in case.parameters}
    return Results({"y": y.detach(), **results}, parameters)


def on_one(subject: ProofSubject, case: Case) -> Results:
    """Compute the case on one rank, without the run's plan.

    Documents are given by their boundaries.
    """
    return computed(subject, case, plan_of(subject, _bounds(subject)))


def split_among_ranks(subject: ProofSubject, case: Case) -> Results:
    """Compute the case on the ranks that share a stream, and join their results.

    Raises:
        RankFailed: a rank raised an error.
    """

    def on_rank(dims: LocalDims) -> Results:
        batch = next(iter(subject.loader(0, subject.degrees.dp)))
        plan = sharding_of(subject, dims)(batch).plan
        mine = tokens_of(subject, 0, dims.rank).to(subject.device)
        return computed(subject, case, plan, mine)

    ranks = on_ranks(Degrees(cp=subject.degrees.cp), on_rank)
    # Put each rank's tokens at their places.
    total = case.tokens["dy"].shape[1]
    tokens = {}
    for name, first in ranks[0].tokens.items():
        tokens[name] = first.new_empty(1, total, *first.shape[2:])
        for rank, results in enumerate(ranks):
            mine = tokens_of(subject, 0, rank).to(first.device)
            tokens[name][:, mine] = results.tokens[name]
    # Sum the gradients of parameters.
    parameters = {}
    for name in ranks[0].parameters:
        parameters[name] = sum(results.parameters[name].double() for results in ranks)
    return Results(tokens, parameters)


def _bounds(subject: ProofSubject) -> Tensor:
    """Return the boundaries of the first data-parallel rank's streams, [N+1] int32, on the
    CPU.
    """
    bounds = subject.batch.cu_seqlens
    return bounds[bounds <= STREAMS * subject.config.training.seq_len]


def plan_of(
    subject: ProofSubject,
    bounds: Tensor | list[int],
    num_streams: int = 1,
    later: Later | None = None,
) -> BatchPlan:
    """Return the plan of documents with these boundaries, computed by hand."""
    bounds = torch.as_tensor(bounds, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in bounds.diff().tolist()]).to(subject.device)
    bounds = bounds.to(subject.device)
    return BatchPlan(positions, cu_seqlens=bounds, num_streams=num_streams, later=later)


# --- What is compared ---------------------------------------------------------------------


def _compared(
    check: str, what: str, subject: ProofSubject, case: Case, got: Results, want: Results
) -> Finding:
    """Return the finding of the worst error."""
    # Errors and bounds of all results.
    ours = got.tokens | got.parameters
    theirs = want.tokens | want.parameters
    errors = {name: off(x, theirs[name]) for name, x in ours.items()}
    bounds = {name: _bound(case, name, subject.dtype) for name in errors}
    # If results are out of bounds, name the first that has a place: results by token, the
    # output before gradients.
    beyond = [name for name in got.tokens if not errors[name] <= bounds[name]]
    name = beyond[0] if beyond else worst(errors, bounds)
    where = _where(subject, case, name, ours[name], theirs[name], name in got.tokens)
    return Finding(check, what, errors[name], bounds[name], where)


def _bound(case: Case, name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return case.bound
    of = name if name == "y" else name[1:]
    return case.units.get(of, case.units[""]) * UNIT[dtype]


def _where(
    subject: ProofSubject,
    case: Case,
    name: str,
    got: Tensor,
    want: Tensor,
    of_tokens: bool,
) -> str:
    """Describe in words the result, its worst head, and where the error begins.

    The place is a rank and a document.
    """
    wrong = difference(got, want)
    said = [name]
    if case.by_head:
        # Gradients of parameters are [HV] or [HV·K].
        H = case.tokens["dy"].shape[2]
        heads = wrong.transpose(0, 2) if of_tokens else wrong.view(H, -1)
        said.append(f"head {int(heads.flatten(1).amax(1).argmax())}")
    if of_tokens:
        token = begins(by_token(wrong), name != "y")
        said.append(_place(subject, case.first + token))
    return ", ".join(said)


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
    for this in subject.in_each_dtype:
        rounded_case = rounded(case, this.dtype)
        got = split_among_ranks(this, rounded_case)
        want = on_one(subject.in_float64, rounded_case)
        yield _compared(f"split, {short(this.dtype)}", what, this, case, got, want)


def implementations(subject: ProofSubject, case: Case) -> Findings:
    """Check the run's implementation against float64, and float64 against the definition.

    The document lengths are the run's.
    """
    # The run's implementation and float64 get the same rounded values.
    exact = subject.in_float64
    rounded_case = rounded(case, subject.dtype)
    got = on_one(subject, rounded_case)
    want = on_one(exact, rounded_case)
    check = f"implementation, {short(subject.dtype)}"
    yield _compared(check, f"{case}, against float64", subject, case, got, want)
    # The definition runs token by token, so it gets few tokens.
    if case.oracle is not None:
        few, bounds = _few(subject, case)
        plan = plan_of(subject, bounds)
        got = computed(exact, few, plan)
        written = replace(few, run=lambda x, plan, impl: few.oracle(x, bounds))
        want = computed(exact, written, plan)
        what = f"{case}, against the definition"
        yield _compared("implementation, float64", what, exact, few, got, want)


def _few(subject: ProofSubject, case: Case) -> tuple[Case, Tensor]:
    """Return the case on the last tokens of the batch, and their documents' boundaries.

    The first of these documents is cut off.
    """
    bounds = _bounds(subject)
    first = max(int(bounds[-1]) - ORACLE_TOKENS, 0)
    cut = first + (int(bounds[-1]) - first) // 3
    bounds = torch.cat([torch.tensor([first, cut]), bounds[bounds > cut]])
    tokens = {name: x[:, first:] for name, x in case.tokens.items()}
    return replace(case, tokens=tokens, first=first), (bounds - first).int()


def documents(subject: ProofSubject, case: Case) -> Findings:
    """Check that a document gives the same packed and alone.

    Changing another document must not change anything of it.
    """
    bounds = _bounds(subject)
    lengths = bounds.diff()
    order = lengths.argsort(descending=True).tolist()
    packed = on_one(subject.in_float64, case)
    errors = {}
    # Compare the longest and the shortest documents, packed and alone.
    for n in [*order[: ALONE // 2], *order[::-1][: ALONE // 2]]:
        document = slice(int(bounds[n]), int(bounds[n + 1]))
        for name, x in alone(subject, case, document, int(lengths[n])).items():
            whole = packed.tokens[name]
            error = off(whole[:, document], x, SMALL * whole.norm().item())
            errors[f"{name}, {subject.document(document.start)}"] = error
    yield of_worst("documents", f"{case}, packed and alone, float64", errors, case.bound)
    # Change documents one by one; all others must keep their bits.
    what = f"{case}, cp {subject.degrees.cp}: what changing one document changes of others, {short(subject.dtype)}"
    changes = {}
    with repeatable():
        for n, before, after in _changed(subject, case, [order[0], order[-1], 0]):
            by = subject.document(int(bounds[n]))
            for name, x in after.tokens.items():
                change = by_token(difference(x, before.tokens[name]))
                token = int(change.argmax())
                changes[f"{name}, {_place(subject, token)}, by {by}"] = change.max().item()
    yield of_worst("documents", what, changes)
    # The run's own kernels may sum in any order, so they get a bound instead.
    if may_differ(subject, case.layers):
        _, before, after = next(_changed(subject, case, [order[0]]))
        what += ", by the kernels of the run"
        yield _compared("documents", what, subject, case, after, before)


def alone(subject: ProofSubject, case: Case, rows: slice | np.ndarray, length: int) -> Tensors:
    """Return the results of a document's tokens alone, in float64."""
    return computed(subject.in_float64, case, plan_of(subject, [0, length]), rows).tokens


def after_change(subject: ProofSubject, case: Case, rows: slice) -> Tensors:
    """Return the results of all tokens on the run's ranks after some tokens are changed."""

    def other(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, rows] = 1.5 * x[:, rows].flip(-1) + 0.25
        return x

    tokens = {name: other(x) for name, x in case.tokens.items()}
    changed = replace(case, tokens=tokens)
    return split_among_ranks(subject, changed).tokens


def _changed(
    subject: ProofSubject, case: Case, documents: list[int]
) -> Iterator[tuple[int, Results, Results]]:
    """Yield each of these documents, with the results before and after it is changed.

    In the results after the change, the document's own are the ones before it: only other
    documents' results differ.
    """
    # The results before any change.
    bounds = _bounds(subject)
    before = split_among_ranks(subject, case)
    for n in dict.fromkeys(documents):
        document = slice(int(bounds[n]), int(bounds[n + 1]))
        after = after_change(subject, case, document)
        for name, x in after.items():
            x[:, document] = before.tokens[name][:, document]
        yield n, before, Results(after, {})


def trees(subject: ProofSubject, case: Case) -> Findings:
    """Check leaves of prefix trees: the shortest, the longest, and one between.

    Their documents' shares in outputs and gradients must be the same as alone. Changing a
    leaf must change only its own outputs, and only gradients on its path.
    """
    subject = replace(subject, on_trees=True)
    trees = next(iter(subject.loader(0, subject.degrees.dp))).trees
    lengths = np.diff(trees.edges)
    leaves = sorted(trees.leaves[trees.parents[trees.leaves] >= 0], key=lengths.__getitem__)
    errors = {}
    changes = {}
    with repeatable():
        before = split_among_ranks(subject, case)
        # Each leaf's path has the tokens of all trees from the root to it.
        places = {0, len(leaves) // 2, len(leaves) - 1} if leaves else ()
        for leaf in (leaves[place] for place in sorted(places)):
            own = slice(*trees.edges[leaf : leaf + 2])
            _, on_path = trees.on_paths(leaf[None])
            path = np.concatenate([np.arange(*trees.edges[n : n + 2]) for n in on_path])
            said = subject.document(own.start)
            # Gradients of outputs off the path are zero, as for the document alone.
            dy = torch.zeros_like(case.tokens["dy"])
            dy[:, path] = case.tokens["dy"][:, path]
            on_its_path = replace(case, tokens=case.tokens | {"dy": dy})
            shares = split_among_ranks(subject.in_float64, on_its_path).tokens
            of_path = alone(subject, case, path, len(path))
            # Change the leaf, and look for changes elsewhere.
            for name, x in after_change(subject, case, own).items():
                change = by_token(difference(x, before.tokens[name]))
                change[own if name == "y" else path] = 0
                changes[f"{name}, by {said}"] = change.max().item()
                # Compare the document's share with the document alone.
                share = shares[name]
                least = SMALL * share.norm().item()
                errors[f"{name}, {said}"] = off(share[:, path], of_path[name], least)
    what = f"{case}, cp {subject.degrees.cp}"
    yield of_worst("trees", f"{what}, in a prefix tree and alone, float64", errors, case.bound)
    what += f": what changing a leaf changes of others, {short(subject.dtype)}"
    yield of_worst("trees", what, changes)


def repeated(subject: ProofSubject, case: Case) -> Findings:
    """Check that the case gives the same bits when it runs again; name results that do not."""
    results = []
    with repeatable(may_differ(subject, case.layers)):
        for _ in range(2):
            tokens, parameters = split_among_ranks(subject, case)
            results.append(tokens | parameters)
    first, again = results
    differ = [name for name, x in first.items() if not torch.equal(x, again[name])]
    what = f"{case}: results that differ in their bits when it runs again"
    yield of_count("repeated", what, differ, shown=3)


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
    mixers = chain.from_iterable(subject.model.layers[i].mixers for i in layers)
    return subject.device.type != "cpu" and not all(mixer.linear for mixer in mixers)
