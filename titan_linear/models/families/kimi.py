"""Kimi-Linear: Kimi Delta Attention and latent attention without positions, with experts."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig, MoEConfig
from titan_linear.models.families.layout import (
    MODEL,
    NORMS,
    ROUTER,
    Family,
    Json,
    Keys,
    Spellings,
    common_from_hf,
    common_to_hf,
    convolutions,
    experts,
    named,
    options_of,
    spelled,
    swiglu,
    weights,
)
from titan_linear.models.mixers import KDA, MLA

# --- Tensors ---------------------------------------------------------------------------------------------------------


PLACES = ("block_sparse_moe.", "mlp.")  # on disk, and in the module of `transformers`


def _gate(ours: str, theirs: str, **options: str) -> Spellings:
    """Spelled as on disk, or as in the module of `transformers`."""
    return spelled(f"mixer.{ours}", *(f"self_attn.{part}{theirs}" for part in ("", "forget_gate.")), **options)


KIMI_KDA = (
    *NORMS,
    *weights("mixer.", "self_attn.", "q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj"),
    convolutions("self_attn."),
    (*_gate("A_log", "A_log", form="heads"), *spelled("mixer.A_log", "self_attn.A_log")),
    _gate("dt_bias", "dt_bias"),
    _gate("f_proj.0.weight", "f_a_proj.weight"),
    _gate("f_proj.1.weight", "f_b_proj.weight"),
    spelled("mixer.g_proj.0.weight", "self_attn.g_a_proj.weight"),
    spelled("mixer.g_proj.1.weight", "self_attn.g_b_proj.weight"),
)
KIMI_MLA = (
    *NORMS,
    *weights(
        "mixer.",
        "self_attn.",
        "q_proj",
        "kv_b_proj",
        "o_proj",
        kv_a_proj="kv_a_proj_with_mqa",
        kv_norm="kv_a_layernorm",
    ),
)
EXPERTS = (
    spelled("mlp.router.weight", *(f"{place}gate.weight" for place in PLACES)),
    spelled("mlp.router.selection_bias", *(f"{place}gate.e_score_correction_bias" for place in PLACES)),
    *experts(PLACES, "w1", "w3", "w2"),
    *swiglu("mlp.shared.", *(f"{place}shared_experts." for place in PLACES)),
)

# --- config.json -----------------------------------------------------------------------------------------------------

MLA_SIZES = dict(
    heads="num_attention_heads",
    kv_rank="kv_lora_rank",
    nope_dim="qk_nope_head_dim",
    shared_k_dim="qk_rope_head_dim",
    v_dim="v_head_dim",
)
MOE_SIZES = dict(
    num_experts="num_experts",
    top_k="num_experts_per_token",
    hidden_dim="moe_intermediate_size",
    normalise="moe_renormalize",
    scale="routed_scaling_factor",
    groups="num_expert_group",
    top_groups="topk_group",
)
OTHER_NAMES = dict(  # in transformers and in Ling's folders
    num_local_experts="num_experts",
    num_experts_per_tok="num_experts_per_token",
    norm_topk_prob="moe_renormalize",
    n_group="num_expert_group",
    n_shared_experts="num_shared_experts",
)


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    for name in ("q_lora_rank", "rope_scaling"):
        key.only(name, None)
    key.only("mla_use_nope", True)
    key.only("moe_router_activation_func", "sigmoid")
    linear = key("linear_attn_config", None) or {}
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(mla_from_hf, lambda key: _kda_from_hf(key, linear), lambda i: _is_softmax(i, linear)),
        **mlps_from_hf(key, first_sparse=1),
    )


def _kda_from_hf(key: Keys, linear: Json) -> KDA:
    heads = linear.get("num_heads", key("linear_num_heads", 32))
    head_dim = linear.get("head_dim", key("linear_head_dim", 128))
    return KDA(
        heads=heads,
        v_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        lower_bound=None,
        gate_bias=False,
        conv_size=linear.get("short_conv_kernel_size", key("linear_conv_kernel_dim", 4)),
    )


def mla_from_hf(key: Keys, **more: object) -> MLA:
    heads = key("num_attention_heads")
    if key("num_key_value_heads") not in (None, heads):
        raise ValueError(f"config.json: num_key_value_heads = {key('num_key_value_heads')}; only {heads} is known")
    return MLA(**key.options(MLA_SIZES), **more)


def _is_softmax(layer: int, linear: Json) -> bool:
    if "full_attn_layers" in linear:  # counted from 1
        return layer + 1 in linear["full_attn_layers"]
    return layer > 0 and layer % 4 == 0


def mlps_from_hf(key: Keys, first_sparse: int) -> Json:
    """Options of MLPs and experts. first_sparse: the first layer with experts, unless a key says so."""
    layers = key("num_hidden_layers")
    first = key("first_k_dense_replace", first_sparse)
    types = key("mlp_layer_types", None) or ["dense" if i < first else "sparse" for i in range(layers)]
    key.only("moe_layer_freq", 1)
    dense = tuple(i for i, t in enumerate(types) if t == "dense")
    experts = dict(dense_layers=dense, moe=_moe_from_hf(key)) if len(dense) < layers else {}
    return dict(hidden_dim=key("intermediate_size"), **experts)


def _moe_from_hf(key: Keys) -> MoEConfig:
    key = Keys({name: key(other) for other, name in OTHER_NAMES.items() if other in key.config} | key.config)
    sizes = key.options(MOE_SIZES, normalise=True)
    shared = sizes["hidden_dim"] * (key("num_shared_experts") or 0)
    return MoEConfig(**sizes, shared_hidden_dim=shared, score="sigmoid", selection_bias=True)


def _to_hf(config: ModelConfig) -> Json:
    written = dict(
        model_type="kimi_linear",
        **common_to_hf(config),
        **mlps_to_hf(config),
        q_lora_rank=None,
    )
    if kda := options_of(config, KDA):
        written |= dict(linear_num_heads=kda.heads, linear_head_dim=kda.head_dim, linear_conv_kernel_dim=kda.conv_size)
    return written | mla_to_hf(config)


def mla_to_hf(config: ModelConfig) -> Json:
    mla = options_of(config, MLA)
    return dict(num_key_value_heads=mla.heads, **named(mla, MLA_SIZES)) if mla else {}


def mlps_to_hf(config: ModelConfig) -> Json:
    """The inverse of `mlps_from_hf`."""
    types = ["sparse" if config.has_experts(i) else "dense" for i in range(config.num_layers)]
    written = dict(intermediate_size=config.hidden_dim, mlp_layer_types=types)
    if (moe := config.moe) is not None:
        written |= dict(**named(moe, MOE_SIZES), num_shared_experts=moe.shared_hidden_dim // moe.hidden_dim)
    return written


KIMI_LINEAR = Family(
    MODEL,
    {(KDA,): KIMI_KDA, (MLA,): KIMI_MLA},
    swiglu("mlp.", *PLACES),
    EXPERTS,
    _from_hf,
    _to_hf,
    ties=False,
    float32=(*ROUTER, "dt_bias"),
)
