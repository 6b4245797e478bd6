"""Exact context parallelism and packed documents inside transformers' own hybrid models.

`context_parallel` opens one for a training loop; `ContextParallelMixin` does it for a `transformers.Trainer`.
docs/transformers.md has the first steps, what is supported and what is refused.
"""

from titan_linear.transformers.model import ContextParallel, context_parallel
from titan_linear.transformers.trainer import ContextParallelMixin

__all__ = ["ContextParallel", "ContextParallelMixin", "context_parallel"]
