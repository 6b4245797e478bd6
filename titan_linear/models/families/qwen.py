"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention; large models have experts."""

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.keys import (
    COMMON,
    HEADS,
    HIDDEN_DIM,
    Json,
    Keys,
    Part,
    Row,
    experts,
    layer_types,
    only,
    plain,
    rope,
    table,
)
from titan_linear.models.families.layout import OwnTokenizer
from titan_linear.models.mixers import GDN, Attention

# --- config.json -----------------------------------------------------------------------

FULL = Part(
    Attention, plain(head_dim="head_dim"), HEADS, rope(1e4, 0.25), qk_norm="head", output_gate=True
)
LINEAR = Part(
    GDN,
    plain(
        heads="linear_num_key_heads",
        v_heads="linear_num_value_heads",
        head_dim="linear_key_head_dim",
        v_head_dim="linear_value_head_dim",
        conv_size="linear_conv_kernel_dim",
    ),
)


def _is_full(key: Keys, layer: int) -> bool:
    every = key("full_attention_interval", 4)
    return layer % every == every - 1


def _has_experts(key: Keys) -> bool:
    return key("num_experts") > 0


def _read_shared(key: Keys) -> Json:
    shared = key("shared_expert_intermediate_size") or 0
    return {"shared_hidden_dim": shared, "shared_gate": shared > 0}


# The coefficient counts only if the router's logits are returned.
def _read_balance(key: Keys) -> Json:
    balance = key("router_aux_loss_coef", 0.001) if key("output_router_logits", False) else 0.0
    return {"balance_coefficient": balance}


def _write_balance(moe: MoEConfig) -> Json:
    balance = moe.balance_coefficient
    return {"output_router_logits": balance > 0, "router_aux_loss_coef": balance or 0.001}


def _experts(*rows: Row) -> Row:
    return experts(
        _has_experts,
        plain(
            num_experts="num_experts",
            top_k="num_experts_per_tok",
            hidden_dim="moe_intermediate_size",
        ),
        Row(_read_shared, lambda moe: {"shared_expert_intermediate_size": moe.shared_hidden_dim}),
        Row(_read_balance, _write_balance),
        *rows,
        otherwise=lambda model: {"num_experts": 0},
    )


# Layers without experts: listed, or all but every `decoder_sparse_step`-th.
def _read_dense_layers(key: Keys) -> Json:
    if not _has_experts(key):
        return {}
    step = key("decoder_sparse_step", 1)
    dense = key("mlp_only_layers", None) or []
    return {
        "dense_layers": tuple(
            i for i in range(key("num_hidden_layers")) if i in dense or (i + 1) % step
        )
    }


def _write_dense_layers(model: ModelConfig) -> Json:
    return (
        {"mlp_only_layers": list(model.dense_layers), "decoder_sparse_step": 1} if model.moe else {}
    )


def _keys(model_type: str, *rows: Row) -> Part:
    return table(
        model_type,
        *COMMON,
        layer_types(FULL, LINEAR, _is_full),
        only("attn_output_gate", True),
        # Of linear layers.
        only("output_gate_type", "swish", "silu"),
        *rows,
        zero_centred_norm=True,
    )


WIDTH_OF_MLPS = Row(
    lambda key: {"hidden_dim": key("intermediate_size", 0)},
    lambda model: {"intermediate_size": model.hidden_dim} if model.hidden_dim else {},
)

# --- Tokenizer -------------------------------------------------------------------------

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Offsets in the text do not change the tokens.
ANY_OFFSETS = {"trim_offsets": None}
_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": _WORDS},
    "behavior": "Isolated",
    "invert": False,
    **ANY_OFFSETS,
}
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, **ANY_OFFSETS}
_PLAIN = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)


def _is_qwens(tokenizer: Json) -> bool:
    """Whether a tokenizer is Qwen3.5's, except for its vocabulary.

    It must have NFC, Qwen3.5's split into words, the byte level and a plain BPE, and know
    <|endoftext|>.
    """
    model = tokenizer["model"]
    special = {token["content"] for token in tokenizer.get("added_tokens") or []}
    before = tokenizer.get("pre_tokenizer") or {}
    parts = [part | ANY_OFFSETS for part in before.get("pretokenizers") or []]
    return (
        tokenizer.get("normalizer") == {"type": "NFC"}
        and parts == [_SPLIT, _LEVEL]
        and (tokenizer.get("decoder") or {}).get("type") == "ByteLevel"
        and model.get("type") == "BPE"
        and not any(model.get(option) for option in _PLAIN)
        and "<|endoftext|>" in special
    )


TOKENIZER = OwnTokenizer(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), _is_qwens)

# --- The families ----------------------------------------------------------------------

QWEN3_5 = _keys("qwen3_5_text", HIDDEN_DIM)
QWEN3_5_MOE = _keys("qwen3_5_moe_text", WIDTH_OF_MLPS, _experts())
QWEN3_NEXT = _keys(
    "qwen3_next",
    HIDDEN_DIM,
    # Qwen3.5 always normalizes, without a key.
    _experts(plain(normalise=("norm_topk_prob", True))),
    Row(_read_dense_layers, _write_dense_layers),
)
