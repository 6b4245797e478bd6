"""torch.compile for layers: what their graphs compute again in backward instead of keeping it, and the Triton kernels
of our operators, which are compiled along with a graph.

Import it only where something is compiled: the compiler is slow to import.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import getitem
from pathlib import Path
from textwrap import shorten
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._dynamo import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from titan_linear.models.config import BESIDE
from titan_linear.models.decoder import Block, Decoder
from titan_linear.ops.runtime.operators import SPECS

VARIES = 3  # for this number kernels are not specialised, as for 1 and multiples of 16


def apply_compile(model: Decoder, backend: str) -> None:
    """Compile each layer's `forward`. Layers of one kind, that is of equal options, share a code object and with it
    their graphs, which do not depend on the documents. Other kinds have one of their own: where FSDP2 manages a module,
    the compiler takes a number that differs between the modules of one code for one that may change. It keeps what it
    has seen by code object, and no public option parts that: `isolate_recompiles` (torch 2.13) parts the graphs alone,
    and `dynamic=False` would compile for each number of documents.

    What lies between products and our operators (norms, gates, activations) is computed again in backward.
    """
    compiler = _compiler(backend)
    codes: dict[object, CodeType] = {}
    for i, layer in enumerate(model.layers):
        kind = layer.options.name
        experts = model.config.has_experts(i)
        name = f"forward_{len(codes)}_{kind.replace(BESIDE, '_')}{'_experts' if experts else ''}"
        code = codes.setdefault(layer.options, Block.forward.__code__.replace(co_name=name))
        forward = FunctionType(code, Block.forward.__globals__, name, Block.forward.__defaults__)
        compiled = torch.compile(MethodType(forward, layer), backend=compiler)
        layer.forward = _named(compiled, f"layers.{i} ({kind}{', experts' if experts else ''})")


def _compiler(backend: str) -> Callable[..., Any]:
    """`backend`, with options that hold while it compiles a graph of ours, and for no other graph of this process."""
    options = (
        {"config_patches": {"joint_custom_pre_pass": OwnOperators()}}
        if backend == "inductor"
        else {}
    )
    compile_graph = lookup_backend(backend)

    def compiler(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        functorch = torch._functorch.config.patch(
            # By default it is computed again only if it could be fused with the product that reads it, and was used on
            # one side of an operator only: each of RWKV-7's mixes of x and its shift was kept for its product.
            ban_recompute_materialized_backward=False,
            ban_recompute_used_far_apart=False,
            # Backward is compiled along with forward: its failure is then one of a layer, in the first step's forward.
            force_non_lazy_backward_lowering=True,
        )
        with functorch, _kernels_ahead(inputs):
            return compile_graph(graph, inputs, **options)

    return compiler


def _named(compiled: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """`compiled`, whose failure to compile names the layer and the remedy."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            # the compiler's advice follows
            reason = shorten(str(error).strip().partition("\n\n")[0], 300)
            raise ValueError(
                f"compile.enable = true: {layer} cannot be compiled ({type(error).__name__}: {reason}); "
                "set compile.enable = false"
            ) from error

    return forward


def _kernels_ahead(inputs: list[Tensor]) -> AbstractContextManager[None]:
    """On a GPU, `compiling_ahead`."""
    device = next((x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda), None)
    if device is None:
        return nullcontext()
    from titan_linear.ops.triton.tiles import compiling_ahead  # Triton is available on Linux only

    return compiling_ahead(device)


class OwnOperators(CustomGraphPass):
    """What the compiler does not know of our operators in a layer's graph of forward and backward."""

    def __call__(self, graph: fx.Graph) -> None:
        compute_again(graph)
        compile_kernels(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((str(Path(__file__)),))


def compute_again(graph: fx.Graph) -> None:
    """Mark results to be computed in backward, as in uncompiled code: weights put side by side, and what operators
    prepare for backward (`Spec.prepares`)."""
    prepares = {node: _prepares(node) for node in graph.nodes}
    shared = "backward" not in prepares.values()  # else backward has an operator of its own
    for node, when in prepares.items():
        # "backward" too: for a result without elements, which costs nothing to keep, it would run in forward as well.
        if when == "backward" or (when == "forward" and shared) or _joins_parameters(node):
            for marked in (node, *(user for user in node.users if user.target is getitem)):
                marked.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def compile_kernels(graph: fx.Graph) -> None:
    """Run the operators that launch kernels on the meta device, so that these are compiled while the compiler goes on,
    side by side (`compiling_ahead`); each would otherwise wait for its first launch."""
    with unset_fake_temporarily():
        for node in filter(_own, graph.nodes):
            if node.target.python.__module__.startswith("titan_linear.ops.triton."):
                node.target.python(
                    *map_arg(node.args, _stand_in), **map_arg(node.kwargs, _stand_in)
                )


def _stand_in(node: fx.Node) -> Any:
    """A node's value, a tensor on the meta device. Numbers that differ between batches become VARIES."""
    x = node.meta["val"]
    if not isinstance(x, Tensor):
        return VARIES if isinstance(x, torch.SymInt) else x
    size, stride = (
        [VARIES if isinstance(n, torch.SymInt) else n for n in of] for of in (x.shape, x.stride())
    )
    return torch.empty_strided(size, stride, dtype=x.dtype, device="meta")


def _joins_parameters(node: fx.Node) -> bool:
    """Whether a node puts weights side by side (`models.layers.project`): if kept, a copy that FSDP cannot free."""
    return node.target is torch.ops.aten.cat.default and all(
        x.op == "placeholder" for x in node.args[0]
    )


def _prepares(node: fx.Node) -> str | None:
    """`Spec.prepares` of one of our operators; None for any other node."""
    return SPECS[node.target._opname].prepares if _own(node) else None


def _own(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "titan_linear"
    )
