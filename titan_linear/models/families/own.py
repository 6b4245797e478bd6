"""Models that no published architecture holds: any order of KDA, GDN and softmax layers, with FLA's tensor names.

Their folders include the file that defines them, modeling_titan_linear.py.
"""

from __future__ import annotations

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.fla import FLA_ATTENTION, FLA_GDN, FLA_KDA, FLA_MODEL
from titan_linear.models.families.layout import GATES, MLP, Family, Json, spelled, weights
from titan_linear.models.families.remote import from_remote, remote_code
from titan_linear.models.mixers import GDN, KDA, Attention


def _to_hf(config: ModelConfig) -> Json:
    return dict(model_type="titan_linear", **remote_code(config, "TitanLinear"))


OWN_KDA = (*FLA_KDA, *weights("mixer.", "attn.", "f_proj", "g_proj"), spelled("mixer.g_proj.bias", "attn.g_proj.bias"))
OWN_ATTENTION = (*FLA_ATTENTION, *weights("mixer.", "attn.", "q_norm", "k_norm", "g_proj"))

LAYERS = {(KDA,): OWN_KDA, (GDN,): FLA_GDN, (Attention,): OWN_ATTENTION}
OWN_FAMILY = Family(FLA_MODEL, LAYERS, MLP, (), from_remote, _to_hf, float32=GATES)
