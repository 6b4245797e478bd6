"""Prefix trees: leaves give the results of their documents alone, and do not affect each
other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from titan_linear.ops.runtime.support import short
from titan_linear.proof.cases import Case
from titan_linear.proof.findings import Finding, Findings, off
from titan_linear.proof.ops import SMALL, after_change, alone, repeatable, split_among_ranks
from titan_linear.proof.subject import ProofSubject


def trees(subject: ProofSubject, case: Case) -> Findings:
    """Check the shortest leaf, the longest, and one between.

    Their documents' shares in outputs and gradients must be the same as alone. Changing a
    leaf must change only its own outputs, and only gradients on its path.
    """
    subject = replace(subject, on_trees=True)
    trees = next(iter(subject.loader(0, subject.degrees.dp))).trees
    leaves = sorted(
        trees.leaves[trees.parents[trees.leaves] >= 0], key=np.diff(trees.edges).__getitem__
    )
    error, alone_at, change, changed_at = 0.0, "", 0.0, ""
    with repeatable():
        before = split_among_ranks(subject, case, subject.dtype, subject.config.model.impl)
        # Each leaf's path has the tokens of all nodes from the root to it.
        for leaf in dict.fromkeys([*leaves[:1], *leaves[len(leaves) // 2 :][:1], *leaves[-1:]]):
            own = slice(*trees.edges[leaf : leaf + 2])
            path = np.concatenate(
                [np.arange(*trees.edges[n : n + 2]) for n in trees.on_paths(leaf[None])[1]]
            )
            # Gradients of outputs off the path are zero, as for the document alone.
            dy = torch.zeros_like(case.dy)
            dy[:, path] = case.dy[:, path]
            shares = split_among_ranks(subject, replace(case, dy=dy), torch.float64, "torch").tokens
            of_path = alone(subject, case, path, len(path))
            # Change the leaf, and look for changes elsewhere.
            for name, x in after_change(subject, case, own).items():
                difference = (x.double() - before.tokens[name].double()).abs()
                difference[:, own if name == "y" else path] = 0
                if not difference.max() <= change:
                    change, changed_at = (
                        difference.max().item(),
                        f"{name}, by {subject.document(own.start)}",
                    )
                # Compare the document's share with the document alone.
                apart = off(
                    shares[name][:, path], of_path[name], SMALL * shares[name].norm().item()
                )
                if not apart <= error:
                    error, alone_at = apart, f"{name}, {subject.document(own.start)}"
    what = f"{case}, cp {subject.degrees.cp}"
    yield Finding(
        "trees", f"{what}, in a prefix tree and alone, float64", error, case.bound, alone_at
    )
    yield Finding(
        "trees",
        f"{what}: what changing a leaf changes of others, {short(subject.dtype)}",
        change,
        0.0,
        changed_at,
    )
