"""Prefix trees: each op and mixer beside the same documents packed apart, and what leaves know of each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from titan_linear.ops.layout.nodes import Nodes
from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import Case
from titan_linear.proof.findings import Finding, Findings, off
from titan_linear.proof.ops import computed, plan_of, repeatable, split_among_ranks
from titan_linear.proof.subject import Subject


def trees(subject: Subject, case: Case) -> Findings:
    subject = replace(subject, on_trees=True)
    nodes = next(iter(subject.loader(0, subject.degrees.dp))).nodes
    yield _apart(subject, case, nodes)
    yield _leaves(subject, case, nodes)


def _apart(subject: Subject, case: Case, nodes: Nodes) -> Finding:
    """A shared token's output counts in the first of its documents, and its gradient is the sum of theirs."""
    paths = [_tokens(nodes, leaf) for leaf in nodes.leaves]
    rows = np.concatenate(paths)
    first = np.zeros(len(rows), dtype=bool)
    first[np.unique(rows, return_index=True)[1]] = True
    bounds = torch.tensor([0, *np.cumsum([len(path) for path in paths])], dtype=torch.int32)
    at, counted = (torch.from_numpy(x).to(case.dy.device) for x in (rows, first))
    tokens = {name: x[:, at] for name, x in case.tokens.items()}
    dy = case.dy[:, at].masked_fill(~_along(counted, case.dy), 0)
    apart = computed(replace(case, tokens=tokens, dy=dy), torch.float64, plan_of(subject, bounds))
    errors = {}
    for name, x in split_among_ranks(subject, case, torch.float64, "torch").tokens.items():
        of_paths = apart.tokens[name]
        of_paths = of_paths.masked_fill(~_along(counted, of_paths), 0) if name == "y" else of_paths
        errors[name] = off(x, torch.zeros_like(x).index_add_(1, at, of_paths))
    worst = max(errors, key=errors.__getitem__)
    what = f"{case}, cp {subject.degrees.cp}, prefix trees beside their documents apart, float64"
    return Finding("trees", what, errors[worst], case.bound, worst)


def _leaves(subject: Subject, case: Case, nodes: Nodes) -> Finding:
    """Of outputs all but the leaf's stay as they are, and of gradients all but its path's."""
    dtype, impl = subject.dtype, subject.config.model.impl
    branching = [leaf for leaf in nodes.leaves if (nodes.parents == nodes.parents[leaf]).sum() > 1]
    by_length = sorted((leaf for leaf in branching if nodes.parents[leaf] >= 0), key=np.diff(nodes.edges).__getitem__)
    most, where = 0.0, ""
    with repeatable():
        before = split_among_ranks(subject, case, dtype, impl)
        for leaf in dict.fromkeys([*by_length[:1], *by_length[-1:]]):
            own, path = slice(*nodes.edges[leaf : leaf + 2]), _tokens(nodes, leaf)
            changed = {name: x.clone() for name, x in (case.tokens | {"dy": case.dy}).items()}
            for x in changed.values():
                x[:, own] = 1.5 * x[:, own].flip(-1) + 0.25
            after = split_among_ranks(subject, replace(case, dy=changed.pop("dy"), tokens=changed), dtype, impl)
            for name, x in after.tokens.items():
                change = (x.double() - before.tokens[name].double()).abs()
                change[:, own if name == "y" else path] = 0
                if not change.max() <= most:
                    most = change.max().item()
                    token = int(change[0].flatten(1).amax(1).argmax())
                    where = f"{name}, {subject.document(token)}, by {subject.document(own.start)}"
    what = f"{case}, cp {subject.degrees.cp}: what changing a leaf changes of other leaves, {short(dtype)}"
    return Finding("trees", what, most, 0.0, where)


def _tokens(nodes: Nodes, leaf: int) -> np.ndarray:
    return np.concatenate([np.arange(*nodes.edges[n : n + 2]) for n in nodes.paths[leaf]])


def _along(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[T] as [1, T, 1, …]"""
    return tokens.view(1, -1, *[1] * (like.dim() - 2))
