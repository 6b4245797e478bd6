"""Sequence mixers, one room each: options, module, initial values, cache, what its ops need, how its heads split.

A new mixer is a file here and a line in MIXERS. One that is neither a delta rule (`DeltaOptions`) nor softmax attention
also says what a batch plans for it (distributed/batch.py), what it takes (timing.py) and how the doctor tries it
(proof/ops.py).
"""

from titan_linear.models.config import MixerOptions
from titan_linear.models.mixers.attention import Attention
from titan_linear.models.mixers.gdn import GDN
from titan_linear.models.mixers.kda import KDA
from titan_linear.models.mixers.mla import MLA

MIXERS: dict[str, type[MixerOptions]] = {"kda": KDA, "gdn": GDN, "attention": Attention, "mla": MLA}

__all__ = ["GDN", "KDA", "MIXERS", "MLA", "Attention"]
