"""Sequence mixers, with one or two of a kind in each file.

A file has the options, the module, initial values, the cache, the sizes of ops, and how
heads are split. A new mixer takes a file here and its name in the list below;
docs/adding_a_mixer.md contains a complete example.
"""

from titan_linear.config.registry import TABLES, register
from titan_linear.models.config import MixerOptions
from titan_linear.models.mixers.attention import Attention
from titan_linear.models.mixers.delta import GDN, KDA
from titan_linear.models.mixers.lightning import Lightning
from titan_linear.models.mixers.mamba2 import Mamba2
from titan_linear.models.mixers.mla import MLA
from titan_linear.models.mixers.rwkv7 import RWKV7
from titan_linear.models.mixers.short_conv import ShortConv

MIXERS: dict[str, type[MixerOptions]] = TABLES[MixerOptions.chosen_by]
for _kind in (KDA, GDN, Mamba2, RWKV7, Lightning, ShortConv, Attention, MLA):
    register(_kind)
