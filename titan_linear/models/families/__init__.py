"""Hugging Face families that we read and write: their tensors and their config.json.

A new family takes a file here, its line in this table, and tensors/ARCHITECTURE.json.
configs/NAME.json belongs to model.name = NAME: it has the config.json of each flavor,
trimmed to the keys that determine the model.
"""

from titan_linear.config.registry import TABLES, register
from titan_linear.models.families import (
    falcon_h1,
    fla,
    granite_h,
    kimi,
    lfm2,
    ling,
    minimax,
    nemotron_h,
    olmo,
    qwen,
    remote,
    rwkv7,
)
from titan_linear.models.families.layout import Family, read_family

# Tables of config.json, by architecture.
_KEYS = {
    "Qwen3_5ForCausalLM": qwen.QWEN3_5,
    "Qwen3_5MoeForCausalLM": qwen.QWEN3_5_MOE,
    "Qwen3NextForCausalLM": qwen.QWEN3_NEXT,
    "OlmoHybridForCausalLM": olmo.KEYS,
    "KimiLinearForCausalLM": kimi.KEYS,
    "BailingHybridForCausalLM": ling.KEYS,
    "NemotronHForCausalLM": nemotron_h.KEYS,
    "GraniteMoeHybridForCausalLM": granite_h.GRANITE,
    "BambaForCausalLM": granite_h.BAMBA,
    "FalconH1ForCausalLM": falcon_h1.KEYS,
    "Lfm2ForCausalLM": lfm2.LFM2,
    "Lfm2MoeForCausalLM": lfm2.LFM2_MOE,
    "MiniMaxForCausalLM": minimax.KEYS,
    "RWKV7ForCausalLM": rwkv7.KEYS,
    "KDAForCausalLM": fla.FLA_KDA,
    "GatedDeltaNetForCausalLM": fla.FLA_GDN,
    "TitanLinearForCausalLM": remote.KEYS,
}
_TOKENIZERS = dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), qwen.TOKENIZER)
FAMILIES: dict[str, Family] = TABLES[Family.chosen_by]
for _name, _keys in _KEYS.items():
    register(read_family(_name, _keys, _TOKENIZERS.get(_name)))
