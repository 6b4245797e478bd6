"""torch.compile for layers, and what their graphs compute again in backward instead of keeping it.

Import it only where something is compiled: the compiler is slow to import.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from pathlib import Path
from textwrap import shorten
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from titan_linear.models.decoder import Block, Decoder
from titan_linear.ops.runtime.operators import SPECS


def apply_compile(model: Decoder, backend: str) -> None:
    """Compile each layer's `forward`. Layers of one kind, that is of equal options, share a code object and with it
    their graphs, which do not depend on the documents. Other kinds have one of their own: where FSDP2 manages a module,
    the compiler takes a number that differs between the modules of one code for one that may change.

    What lies between products and our operators (norms, gates, activations) is computed again in backward.
    """
    compiler = _compiler(backend)
    codes = {}
    for i, layer in enumerate(model.layers):
        kind, experts = layer.options.name, model.config.has_experts(i)
        name = f"forward_{len(codes)}_{kind}{'_experts' if experts else ''}"
        code = codes.setdefault(layer.options, Block.forward.__code__.replace(co_name=name))
        forward = FunctionType(code, Block.forward.__globals__, name, Block.forward.__defaults__)
        compiled = torch.compile(MethodType(forward, layer), backend=compiler)
        layer.forward = _named(compiled, f"layers.{i} ({kind}{', experts' if experts else ''})")


def _compiler(backend: str) -> Callable[..., Any]:
    """`backend`, with options that hold while it compiles a graph of ours, and for no other graph of this process."""
    options = {"config_patches": {"joint_custom_pre_pass": ComputedAgain()}} if backend == "inductor" else {}
    compile_graph = lookup_backend(backend)

    def compiler(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(
            # By default it is computed again only if it could be fused with the product that reads it.
            ban_recompute_materialized_backward=False,
            # Backward is compiled along with forward: its failure is then one of a layer, in the first step's forward.
            force_non_lazy_backward_lowering=True,
        ):
            return compile_graph(graph, inputs, **options)

    return compiler


def _named(compiled: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """`compiled`, whose failure to compile names the layer and the remedy."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            reason = shorten(str(error).strip().partition("\n\n")[0], 300)  # the compiler's advice follows
            raise ValueError(
                f"compile.enable = true: {layer} cannot be compiled ({type(error).__name__}: {reason}); "
                "set compile.enable = false"
            ) from error

    return forward


class ComputedAgain(CustomGraphPass):
    """Marks two results to be computed again in backward, as in uncompiled code: weights put side by side, and what an
    operator prepares for backward too (`Spec.prepares`)."""

    def __call__(self, graph: fx.Graph) -> None:
        prepares = {node: _prepares(node) for node in graph.nodes}
        shared = "backward" not in prepares.values()  # else backward has an operator of its own
        for node, when in prepares.items():
            if (when == "forward" and shared) or _joins_parameters(node):
                for marked in (node, *(user for user in node.users if user.target is getitem)):
                    marked.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> bytes:
        return get_hash_for_files((str(Path(__file__)),))


def _joins_parameters(node: fx.Node) -> bool:
    """Whether a node puts weights side by side (`models.layers.project`): if kept, a copy that FSDP cannot free."""
    return node.target is torch.ops.aten.cat.default and all(x.op == "placeholder" for x in node.args[0])


def _prepares(node: fx.Node) -> str | None:
    """`Spec.prepares` of one of our operators; None for any other node."""
    own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "titan_linear"
    return SPECS[node.target._opname].prepares if own else None
