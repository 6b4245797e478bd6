"""Models that no published architecture holds: any order of KDA, GDN and softmax layers, with FLA's tensor names.

Their folders include the file that defines them, modeling_titan_linear.py.
"""

from __future__ import annotations

from titan_linear.models.families.fla import FLA_ATTENTION, FLA_GDN, FLA_KDA, FLA_MODEL
from titan_linear.models.families.keys import table
from titan_linear.models.families.layout import GATES, MLP, Family, spelled, weights
from titan_linear.models.families.remote import remote_code
from titan_linear.models.mixers import GDN, KDA, Attention

OWN_KDA = (*FLA_KDA, *weights("mixer.", "attn.", "f_proj", "g_proj"), spelled("mixer.g_proj.bias", "attn.g_proj.bias"))
OWN_ATTENTION = (*FLA_ATTENTION, *weights("mixer.", "attn.", "q_norm", "k_norm", "g_proj"))

LAYERS = {(KDA,): OWN_KDA, (GDN,): FLA_GDN, (Attention,): OWN_ATTENTION}
OWN_FAMILY = Family(FLA_MODEL, LAYERS, MLP, (), table("titan_linear", *remote_code("TitanLinear")), float32=GATES)
