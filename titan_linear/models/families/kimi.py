"""Kimi-Linear: Kimi Delta Attention, and latent attention without positions, with experts."""

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.keys import (
    COMMON,
    HIDDEN_DIM,
    Json,
    Keys,
    Part,
    Row,
    always,
    experts,
    layer_types,
    only,
    plain,
    table,
)
from titan_linear.models.mixers import KDA, MLA


def _linear(theirs: str, inner: str, default: int, *ours: str) -> Row:
    """Map a key of linear layers.

    Published folders have these keys in a table of their own, under other names.
    """

    def read(key: Keys) -> Json:
        size = (key("linear_attn_config", None) or {}).get(inner, key(theirs, default))
        return dict.fromkeys(ours, size)

    return Row(read, lambda kda: {theirs: getattr(kda, ours[0])})


def _is_full(key: Keys, layer: int) -> bool:
    linear = key("linear_attn_config", None) or {}
    # Its indices count from 1.
    if "full_attn_layers" in linear:
        return layer + 1 in linear["full_attn_layers"]
    return layer > 0 and layer % 4 == 0


# Latent attention has as many key heads as query heads.
def _read_kv_heads(key: Keys) -> Json:
    heads = key("num_attention_heads")
    if key("num_key_value_heads") not in (None, heads):
        raise ValueError(
            f"config.json: num_key_value_heads = {key('num_key_value_heads')}; only {heads} is known"
        )
    return {}


# Sizes of latent attention.
LATENT = (
    Row(_read_kv_heads, lambda mla: {"num_key_value_heads": mla.heads}),
    plain(
        heads="num_attention_heads",
        kv_rank="kv_lora_rank",
        nope_dim="qk_nope_head_dim",
        shared_k_dim="qk_rope_head_dim",
        v_dim="v_head_dim",
    ),
)


# Layers without experts: listed by type, or the first ones.
def _dense_layers(key: Keys, first_sparse: int) -> tuple[int, ...]:
    first = key("first_k_dense_replace", first_sparse)
    types = key("mlp_layer_types", None) or [
        "dense" if i < first else "sparse" for i in range(key("num_hidden_layers"))
    ]
    return tuple(i for i, kind in enumerate(types) if kind == "dense")


def _write_mlp_types(model: ModelConfig) -> Json:
    return {
        "mlp_layer_types": [
            "sparse" if model.has_experts(i) else "dense" for i in range(model.num_layers)
        ]
    }


# Shared experts form one wide expert.
def _read_shared(key: Keys) -> Json:
    count = plain(count="num_shared_experts n_shared_experts").read(key)["count"]
    return {"shared_hidden_dim": key("moe_intermediate_size") * (count or 0)}


def mlps(first_sparse: int) -> tuple[Row, ...]:
    """Map MLPs and experts.

    If a string has two names, the second is the name in transformers and in Ling's folders.

    Args:
        first_sparse: the first layer with experts, unless a key differs.
    """

    def sparse(key: Keys) -> bool:
        return len(_dense_layers(key, first_sparse)) < key("num_hidden_layers")

    def read(key: Keys) -> Json:
        return {"dense_layers": _dense_layers(key, first_sparse)} if sparse(key) else {}

    return (
        HIDDEN_DIM,
        only("moe_layer_freq", 1),
        Row(read, _write_mlp_types),
        experts(
            sparse,
            plain(
                num_experts="num_experts num_local_experts",
                top_k="num_experts_per_token num_experts_per_tok",
                hidden_dim="moe_intermediate_size",
                normalise=("moe_renormalize norm_topk_prob", True),
                scale="routed_scaling_factor",
                groups="num_expert_group n_group",
                top_groups="topk_group",
            ),
            Row(
                _read_shared,
                lambda moe: {"num_shared_experts": moe.shared_hidden_dim // moe.hidden_dim},
            ),
            score="sigmoid",
            selection_bias=True,
        ),
    )


LINEAR = Part(
    KDA,
    _linear("linear_num_heads", "num_heads", 32, "heads", "v_heads"),
    _linear("linear_head_dim", "head_dim", 128, "head_dim", "v_head_dim"),
    _linear("linear_conv_kernel_dim", "short_conv_kernel_size", 4, "conv_size"),
    lower_bound=None,
    gate_bias=False,
)
ATTENTION = Part(MLA, *LATENT)
KEYS = table(
    "kimi_linear",
    *COMMON,
    layer_types(ATTENTION, LINEAR, _is_full),
    *mlps(first_sparse=1),
    always("q_lora_rank", None),
    only("rope_scaling", None),
    only("mla_use_nope", True),
    only("moe_router_activation_func", "sigmoid"),
)
