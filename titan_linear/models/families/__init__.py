"""The Hugging Face families that we read and write: their tensors, their config.json, and their published sizes.

A new family takes a file here and its lines in these tables; one with sizes of its own, a name in `config.Model` too.
"""

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.bamba import BAMBA, BAMBA_MODELS
from titan_linear.models.families.falcon_h1 import FALCON_H1, FALCON_H1_MODELS
from titan_linear.models.families.fla import FLA_GDN_FAMILY, FLA_KDA_FAMILY
from titan_linear.models.families.granite_h import GRANITE_H, GRANITE_H_MODELS
from titan_linear.models.families.kimi import KIMI_LINEAR, KIMI_LINEAR_MODELS
from titan_linear.models.families.layout import Family
from titan_linear.models.families.lfm2 import LFM2, LFM2_MODELS
from titan_linear.models.families.ling import LING_3, LING_3_MODELS
from titan_linear.models.families.minimax import MINIMAX, MINIMAX_MODELS
from titan_linear.models.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_MODELS
from titan_linear.models.families.olmo import OLMO_HYBRID, OLMO_HYBRID_MODELS
from titan_linear.models.families.own import OWN_FAMILY
from titan_linear.models.families.qwen import QWEN3_5, QWEN3_5_MODELS, QWEN3_5_MOE, QWEN3_NEXT, QWEN3_NEXT_MODELS
from titan_linear.models.families.rwkv7 import RWKV7_FAMILY, RWKV7_MODELS

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
    "MiniMaxForCausalLM": MINIMAX,
    "RWKV7ForCausalLM": RWKV7_FAMILY,
    "KDAForCausalLM": FLA_KDA_FAMILY,
    "GatedDeltaNetForCausalLM": FLA_GDN_FAMILY,
    "TitanLinearForCausalLM": OWN_FAMILY,
}

PUBLISHED: dict[str, dict[str, ModelConfig]] = {  # by name and flavor, from their config.json
    "qwen3.5": QWEN3_5_MODELS,
    "qwen3-next": QWEN3_NEXT_MODELS,
    "olmo-hybrid": OLMO_HYBRID_MODELS,
    "kimi-linear": KIMI_LINEAR_MODELS,
    "ling-3": LING_3_MODELS,
    "nemotron-h": NEMOTRON_H_MODELS,
    "granite-h": GRANITE_H_MODELS,
    "bamba": BAMBA_MODELS,
    "falcon-h1": FALCON_H1_MODELS,
    "lfm2": LFM2_MODELS,
    "minimax": MINIMAX_MODELS,
    "rwkv7": RWKV7_MODELS,
}
