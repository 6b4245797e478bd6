"""MLPs, one per file.

A file has the options, the module, what its ops need, and how its hidden channels are
split.

A layer of a model has a mixer, an MLP, or both (`ModelConfig.layers`).
"""

from titan_linear.models.mlps.dense import Dense
from titan_linear.models.mlps.moe import MoEConfig
from titan_linear.models.mlps.options import MLPOptions
