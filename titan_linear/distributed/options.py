"""How a model is computed on its ranks: precision, implementations, methods and memory."""

from dataclasses import dataclass, field

import torch

from titan_linear.config import ActivationCheckpoint, Parallelism
from titan_linear.config.schema import Compile, Float8


@dataclass(frozen=True)
class SessionOptions:
    """Options of a `Session`, most of which `parallelize` reads.

    Sections are those of the configuration, with its keys (docs/keys.md). Degrees of
    parallelism are not read from here: `ParallelDims` has them.
    """

    # "auto", "triton" or "torch".
    impl: str = "auto"
    # Of parameters and optimizer states, of computation, and of gradients that ranks sum.
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    # Tokens whose logits exist at once; 0: the head decides.
    loss_chunk_size: int = 0
    # Gradients are clipped to this 2-norm.
    max_norm: float = 1.0
