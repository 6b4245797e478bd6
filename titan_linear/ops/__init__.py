"""Ops on packed documents, with the names and argument shapes of flash-linear-attention.

The functions' docstrings describe arguments, results and errors.
"""

from titan_linear.ops.attention import attention
from titan_linear.ops.convolution import causal_conv1d
from titan_linear.ops.delta_rule import chunk_gated_delta_rule, chunk_kda
from titan_linear.ops.layout.build_context import build_cp_context
from titan_linear.ops.layout.context import CPContext
from titan_linear.ops.rwkv7 import chunk_rwkv7
from titan_linear.ops.simple_gla import chunk_simple_gla
from titan_linear.ops.ssd import chunk_ssd

# Without __all__, "import *" would bind the name torch to ops.torch.
__all__ = [
    "CPContext",
    "attention",
    "build_cp_context",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "chunk_ssd",
]
