"""Prefix trees: leaves give what their documents give alone, and know nothing of each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import Case
from titan_linear.proof.findings import Finding, Findings, off
from titan_linear.proof.ops import SMALL, computed, plan_of, repeatable, split_among_ranks
from titan_linear.proof.subject import Subject


def trees(subject: Subject, case: Case) -> Findings:
    """Of the shortest leaf, the longest and one between: the shares of their documents in outputs and gradients. What
    they change of others are neither outputs but their own, nor gradients but those of their path."""
    subject = replace(subject, on_trees=True)
    nodes = next(iter(subject.loader(0, subject.degrees.dp))).nodes
    leaves = sorted(nodes.leaves[nodes.parents[nodes.leaves] >= 0], key=np.diff(nodes.edges).__getitem__)
    dtype, impl = subject.dtype, subject.config.model.impl
    error, alone_at, change, changed_at = 0.0, "", 0.0, ""
    with repeatable():
        before = split_among_ranks(subject, case, dtype, impl)
        for leaf in dict.fromkeys([*leaves[:1], *leaves[len(leaves) // 2 :][:1], *leaves[-1:]]):
            own = slice(*nodes.edges[leaf : leaf + 2])
            path = np.concatenate([np.arange(*nodes.edges[n : n + 2]) for n in nodes.paths[leaf]])
            dy = torch.zeros_like(case.dy)
            dy[:, path] = case.dy[:, path]
            shares = split_among_ranks(subject, replace(case, dy=dy), torch.float64, "torch").tokens
            tokens = {name: x[:, path] for name, x in case.tokens.items()}
            plan = plan_of(subject, torch.tensor([0, len(path)], dtype=torch.int32))
            alone = computed(replace(case, tokens=tokens, dy=dy[:, path]), torch.float64, plan).tokens
            other = {name: x.clone() for name, x in (case.tokens | {"dy": case.dy}).items()}
            for x in other.values():
                x[:, own] = 1.5 * x[:, own].flip(-1) + 0.25
            after = split_among_ranks(subject, replace(case, dy=other.pop("dy"), tokens=other), dtype, impl).tokens
            for name, x in after.items():
                difference = (x.double() - before.tokens[name].double()).abs()
                difference[:, own if name == "y" else path] = 0
                if not difference.max() <= change:
                    change, changed_at = difference.max().item(), f"{name}, by {subject.document(own.start)}"
                apart = off(shares[name][:, path], alone[name], SMALL * shares[name].norm().item())
                if not apart <= error:
                    error, alone_at = apart, f"{name}, {subject.document(own.start)}"
    what = f"{case}, cp {subject.degrees.cp}"
    yield Finding("trees", f"{what}, in a prefix tree and alone, float64", error, case.bound, alone_at)
    yield Finding("trees", f"{what}: what changing a leaf changes of others, {short(dtype)}", change, 0.0, changed_at)
