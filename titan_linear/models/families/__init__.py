"""The Hugging Face families that we read and write: their tensors and their config.json.

A new family takes a file here and its line in this table. configs/NAME.json is model.name = NAME: the config.json of
each flavor, trimmed to the keys that decide the model.
"""

from titan_linear.models.families.bamba import BAMBA
from titan_linear.models.families.falcon_h1 import FALCON_H1
from titan_linear.models.families.fla import FLA_GDN_FAMILY, FLA_KDA_FAMILY
from titan_linear.models.families.granite_h import GRANITE_H
from titan_linear.models.families.kimi import KIMI_LINEAR
from titan_linear.models.families.layout import Family
from titan_linear.models.families.lfm2 import LFM2
from titan_linear.models.families.lfm2_moe import LFM2_MOE
from titan_linear.models.families.ling import LING_3
from titan_linear.models.families.minimax import MINIMAX
from titan_linear.models.families.nemotron_h import NEMOTRON_H
from titan_linear.models.families.olmo import OLMO_HYBRID
from titan_linear.models.families.own import OWN_FAMILY
from titan_linear.models.families.qwen import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from titan_linear.models.families.rwkv7 import RWKV7_FAMILY

FAMILIES: dict[str, Family] = {  # by architecture
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "OlmoHybridForCausalLM": OLMO_HYBRID,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "BailingHybridForCausalLM": LING_3,
    "NemotronHForCausalLM": NEMOTRON_H,
    "GraniteMoeHybridForCausalLM": GRANITE_H,
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "MiniMaxForCausalLM": MINIMAX,
    "RWKV7ForCausalLM": RWKV7_FAMILY,
    "KDAForCausalLM": FLA_KDA_FAMILY,
    "GatedDeltaNetForCausalLM": FLA_GDN_FAMILY,
    "TitanLinearForCausalLM": OWN_FAMILY,
}
