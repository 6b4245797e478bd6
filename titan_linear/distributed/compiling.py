"""torch.compile for layers.

This file determines what graphs recompute in backward, and compiles our Triton kernels
along with a graph.

Import this only where something is compiled: the compiler is slow to import.
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

# A number for which kernels are not specialized, unlike 1 and multiples of 16.
VARIES = 3


def apply_compile(model: Decoder, backend: str) -> None:
    """Compile each layer's `forward`.

    Layers of one kind, that is with equal options, share a code object and thereby their
    graphs, which do not depend on the documents. Every other kind gets a code object of its
    own. Otherwise, where FSDP2 manages a module, the compiler treats an int that differs
    between modules sharing a code object as dynamic. The compiler keeps what it has seen by
    code object, and no public option separates this: `isolate_recompiles` (torch 2.13)
    separates only the graphs, and `dynamic=False` would compile for each number of
    documents.

    What lies between products and our operators (norms, gates, activations) is recomputed
    in backward.
    """
    compiler = _compiler(backend)
    # One code object and one name for each kind of layer.
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
    """Return `backend` with options that apply to our graphs only.

    They do not apply to any other graph of this process.
    """
    options = {}
    if backend == "inductor":
        options["config_patches"] = {"joint_custom_pre_pass": OwnOperators()}
    compile_graph = lookup_backend(backend)

    def compiler(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        functorch = torch._functorch.config.patch(
            # By default, a result is recomputed only if it could be fused with the product
            # that reads it, and was used on one side of an operator only. Each of RWKV-7's
            # mixes of x and its shift was therefore kept for its product.
            ban_recompute_materialized_backward=False,
            ban_recompute_used_far_apart=False,
            # Backward is compiled together with forward. If it fails, the error belongs to
            # a layer, in the first step's forward.
            force_non_lazy_backward_lowering=True,
        )
        with functorch, _kernels_ahead(inputs):
            return compile_graph(graph, inputs, **options)

    return compiler


def _named(compiled: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """Wrap `compiled` so that a failure to compile names the layer and the remedy."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            # The compiler's advice follows an empty line, and is dropped.
            reason = shorten(str(error).strip().partition("\n\n")[0], 300)
            raise ValueError(
                f"compile.enable = true: {layer} cannot be compiled ({type(error).__name__}: {reason}); "
                "set compile.enable = false"
            ) from error

    return forward


def _kernels_ahead(inputs: list[Tensor]) -> AbstractContextManager[None]:
    """Return `compiling_ahead` if the inputs are on a GPU, else an empty context."""
    device = next((x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda), None)
    if device is None:
        return nullcontext()
    # Triton is available on Linux only.
    from titan_linear.ops.triton.tiles import compiling_ahead

    return compiling_ahead(device)


class OwnOperators(CustomGraphPass):
    """A pass over a layer's joint graph for our operators, unknown to the compiler."""

    def __call__(self, graph: fx.Graph) -> None:
        compute_again(graph)
        compile_kernels(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((str(Path(__file__)),))


def compute_again(graph: fx.Graph) -> None:
    """Mark results to be recomputed in backward, as in uncompiled code.

    These are concatenated weights, and what operators prepare for backward
    (`Spec.prepares`).
    """
    prepares = {node: _prepares(node) for node in graph.nodes}
    # False if backward has an operator of its own.
    shared = "backward" not in prepares.values()
    for node, when in prepares.items():
        # "backward" too: a result without elements costs nothing to keep, so its operator
        # would also run in forward.
        if when == "backward" or (when == "forward" and shared) or _joins_parameters(node):
            for marked in (node, *(user for user in node.users if user.target is getitem)):
                marked.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def compile_kernels(graph: fx.Graph) -> None:
    """Run the operators that launch kernels on the meta device.

    Their kernels then compile concurrently, while the compiler continues
    (`compiling_ahead`). Otherwise each would wait for its first launch.
    """
    with unset_fake_temporarily():
        for node in filter(_own, graph.nodes):
            python = node.target.python
            if python.__module__.startswith("titan_linear.ops.triton."):
                python(*map_arg(node.args, _stand_in), **map_arg(node.kwargs, _stand_in))


def _stand_in(node: fx.Node) -> Any:
    """Return a node's value, with tensors on the meta device.

    Ints that differ between batches become VARIES.
    """
    x = node.meta["val"]
    if not isinstance(x, Tensor):
        return VARIES if isinstance(x, torch.SymInt) else x
    size = [VARIES if isinstance(n, torch.SymInt) else n for n in x.shape]
    stride = [VARIES if isinstance(n, torch.SymInt) else n for n in x.stride()]
    return torch.empty_strided(size, stride, dtype=x.dtype, device="meta")


def _joins_parameters(node: fx.Node) -> bool:
    """Whether a node concatenates weights (`models.layers.project`).

    If kept, the result would be a copy that FSDP cannot free.
    """
    concatenates = node.target is torch.ops.aten.cat.default
    return concatenates and all(x.op == "placeholder" for x in node.args[0])


def _prepares(node: fx.Node) -> str | None:
    """Return `Spec.prepares` of one of our operators; None for any other node."""
    return SPECS[node.target._opname].prepares if _own(node) else None


def _own(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "titan_linear"
