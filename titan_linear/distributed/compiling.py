"""torch.compile for layers, and what their graphs compute again in backward instead of keeping it.

Imported where something is compiled: the compiler is slow to import.
"""

from __future__ import annotations

from operator import getitem
from pathlib import Path

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo.decorators import skip
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from titan_linear.models.decoder import Decoder
from titan_linear.ops.support import outside_graphs

PREPARE, RECOMPUTE = ("kda_prepare", "gdn_prepare"), ("kda_recompute", "gdn_recompute")


def compile_layers(model: Decoder, backend: str) -> None:
    """Compile each layer's `forward`: layers of one kind share their code, and documents do not change it.

    What is between products and our operators is computed again in backward: norms, gates, activations.
    """
    # By default only if the product that reads it could be fused with it.
    torch._functorch.config.ban_recompute_materialized_backward = False
    options = {"joint_custom_pre_pass": ComputedAgain()} if backend == "inductor" else None
    skip(outside_graphs(compile_layers))  # its wrapper, whose code all that it wraps share
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, options=options)


class ComputedAgain(CustomGraphPass):
    """Marks weights put side by side, and the chunks of a delta rule that backward prepares again, as uncompiled: the
    compiler would find that both calls are the same, and keep all of what the first one gave."""

    def __call__(self, graph: fx.Graph) -> None:
        names = {node: _own_name(node) for node in graph.nodes}
        again = () if set(RECOMPUTE) & set(names.values()) else PREPARE  # with the others, backward has its own
        for node, name in names.items():
            if name in again or _joins_parameters(node):
                for marked in (node, *(user for user in node.users if user.target is getitem)):
                    marked.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> bytes:
        return get_hash_for_files((str(Path(__file__)),))


def _joins_parameters(node: fx.Node) -> bool:
    """Weights side by side (`models.layers.project`): kept, they would be a copy that FSDP cannot free."""
    return node.target is torch.ops.aten.cat.default and all(x.op == "placeholder" for x in node.args[0])


def _own_name(node: fx.Node) -> str:
    """Of one of our operators, or ""."""
    own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "titan_linear"
    return node.target._opname if own else ""
