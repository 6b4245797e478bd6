"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention, with experts in the larger models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.layout import (
    GDN_SIZES,
    HEADS,
    MLP,
    MODEL,
    NORMS,
    Family,
    Json,
    Keys,
    OwnTokenizer,
    attention_to_hf,
    common_from_hf,
    common_to_hf,
    experts,
    fused,
    gates,
    named,
    options_of,
    swiglu,
    weights,
)
from titan_linear.models.mixers import GDN, Attention

# --- Tensors ---------------------------------------------------------------------------------------------------------

ATTENTION = (
    *NORMS,
    fused(("q_proj", "g_proj"), "self_attn.q_proj.weight", groups="heads"),
    *weights("mixer.", "self_attn.", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
)
_ANY_GDN = (
    *NORMS,
    fused(("q_conv1d", "k_conv1d", "v_conv1d"), "linear_attn.conv1d.weight", form="conv"),
    *weights("mixer.", "linear_attn.", o_norm="norm", o_proj="out_proj"),
    *gates("linear_attn."),
)
QWEN3_NEXT_GDN = (
    *_ANY_GDN,
    fused(("q_proj", "k_proj", "v_proj", "g_proj"), "linear_attn.in_proj_qkvz.weight", groups="heads"),
    fused(("b_proj", "a_proj"), "linear_attn.in_proj_ba.weight", groups="heads"),
)
QWEN3_5_GDN = (
    *_ANY_GDN,
    fused(("q_proj", "k_proj", "v_proj"), "linear_attn.in_proj_qkv.weight"),
    *weights("mixer.", "linear_attn.", g_proj="in_proj_z", b_proj="in_proj_b", a_proj="in_proj_a"),
)
EXPERTS = (
    *weights("mlp.", "mlp.", router="gate", shared_gate="shared_expert_gate"),
    *experts(("mlp.", "mlp."), "gate_proj", "up_proj", "down_proj"),
    *swiglu("mlp.shared.", "mlp.shared_expert."),
)

# --- config.json -----------------------------------------------------------------------------------------------------

MOE_SIZES = dict(num_experts="num_experts", top_k="num_experts_per_tok", hidden_dim="moe_intermediate_size")


def _from_hf(config: Json, model_type: str) -> ModelConfig:
    key = Keys(config)
    key.only("attn_output_gate", True)
    key.only("output_gate_type", "swish", "silu")  # of linear layers
    every = key("full_attention_interval", 4)
    moe = model_type != "qwen3_5_text" and key("num_experts") > 0
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(
            _attention_from_hf, lambda key: GDN(**key.options(GDN_SIZES)), lambda i: i % every == every - 1
        ),
        hidden_dim=key("intermediate_size", 0) if model_type == "qwen3_5_moe_text" else key("intermediate_size"),
        zero_centred_norm=True,
        moe=_moe_from_hf(key, model_type) if moe else None,
        dense_layers=_dense_layers(key) if moe and model_type == "qwen3_next" else (),
    )


def _attention_from_hf(key: Keys) -> Attention:
    sizes = key.options(HEADS) | dict(head_dim=key("head_dim"))
    return Attention(**sizes, qk_norm="head", output_gate=True, **key.rope(10000.0, 0.25))


def _moe_from_hf(key: Keys, model_type: str) -> MoEConfig:
    shared = key("shared_expert_intermediate_size") or 0
    normalise = model_type != "qwen3_next" or key("norm_topk_prob", True)  # Qwen3.5 always does, without a key
    return MoEConfig(
        **key.options(MOE_SIZES),
        shared_hidden_dim=shared,
        shared_gate=shared > 0,
        normalise=normalise,
        balance_coefficient=key("router_aux_loss_coef", 0.001) if key("output_router_logits", False) else 0.0,
    )


def _dense_layers(key: Keys) -> tuple[int, ...]:
    step = key("decoder_sparse_step", 1)
    only = key("mlp_only_layers", None) or []
    return tuple(i for i in range(key("num_hidden_layers")) if i in only or (i + 1) % step)


def _to_hf(config: ModelConfig, model_type: str) -> Json:
    written = dict(model_type=model_type, **common_to_hf(config))
    if attention := options_of(config, Attention):
        written |= dict(head_dim=attention.head_dim, **attention_to_hf(attention))
    if gdn := options_of(config, GDN):
        written |= named(gdn, GDN_SIZES)
    if config.hidden_dim or model_type == "qwen3_next":
        written["intermediate_size"] = config.hidden_dim
    if (moe := config.moe) is not None:
        written |= dict(
            **named(moe, MOE_SIZES),
            shared_expert_intermediate_size=moe.shared_hidden_dim,
            output_router_logits=moe.balance_coefficient > 0,
            router_aux_loss_coef=moe.balance_coefficient or 0.001,
        )
    elif model_type != "qwen3_5_text":
        written["num_experts"] = 0
    if model_type == "qwen3_next" and moe is not None:
        written |= dict(norm_topk_prob=moe.normalise, mlp_only_layers=list(config.dense_layers), decoder_sparse_step=1)
    return written


def _both_ways(model_type: str) -> tuple[Callable[[Json], ModelConfig], Callable[[ModelConfig], Json]]:
    return partial(_from_hf, model_type=model_type), partial(_to_hf, model_type=model_type)


# --- Tokenizer -------------------------------------------------------------------------------------------------------

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLIT = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False}
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


def _is_qwens(tokenizer: Json) -> bool:
    """Whether it has NFC, Qwen3.5's split into words, the byte level and a plain BPE, and knows <|endoftext|>."""
    model = tokenizer["model"]
    special = {token["content"] for token in tokenizer.get("added_tokens") or []}
    before = tokenizer.get("pre_tokenizer") or {}
    parts = [{k: v for k, v in part.items() if k != "trim_offsets"} for part in before.get("pretokenizers") or []]
    return (
        tokenizer.get("normalizer") == {"type": "NFC"}
        and parts == [_SPLIT, _LEVEL]
        and (tokenizer.get("decoder") or {}).get("type") == "ByteLevel"
        and model.get("type") == "BPE"
        and not any(model.get(option) for option in _PLAIN)
        and "<|endoftext|>" in special
    )


_TOKENIZER = OwnTokenizer(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), _is_qwens)

# --- The families ----------------------------------------------------------------------------------------------------

_VISION = (r"model\.visual\..*", r"mtp\..*")  # and multi-token prediction
_QWEN3_5_LAYERS = {(GDN,): QWEN3_5_GDN, (Attention,): ATTENTION}

QWEN3_5 = Family(
    MODEL,
    _QWEN3_5_LAYERS,
    MLP,
    (),
    *_both_ways("qwen3_5_text"),
    ("model.", "model.language_model."),
    _VISION,
    ("Qwen3_5ForConditionalGeneration",),
    _TOKENIZER,
)
QWEN3_5_MOE = Family(
    MODEL,
    _QWEN3_5_LAYERS,
    MLP,
    EXPERTS,
    *_both_ways("qwen3_5_moe_text"),
    ("model.", "model.language_model."),
    _VISION,
    ("Qwen3_5MoeForConditionalGeneration",),
    _TOKENIZER,
)
QWEN3_NEXT = Family(
    MODEL,
    {(GDN,): QWEN3_NEXT_GDN, (Attention,): ATTENTION},
    MLP,
    EXPERTS,
    *_both_ways("qwen3_next"),
    ignored=(r"mtp\..*",),
)
