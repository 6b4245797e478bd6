"""Ling 3: Kimi Delta Attention with bounded gates, latent attention with positions and gated heads, experts."""

from __future__ import annotations

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.kimi import mla_from_hf, mla_to_hf, mlps_from_hf, mlps_to_hf
from titan_linear.models.families.layout import (
    GATES,
    MLP,
    NORMS,
    ROUTER,
    Family,
    Json,
    Keys,
    Layout,
    Spellings,
    common_from_hf,
    common_to_hf,
    experts,
    options_of,
    spelled,
    swiglu,
    weights,
)
from titan_linear.models.mixers import KDA, MLA

# --- Tensors: as on disk, or as in the module of `transformers` ------------------------------------------------------


def _mixer(*same: str, **renamed: str) -> tuple[Spellings, ...]:
    """Weights of a mixer; ours = the name on disk where it has another."""
    names = {name: name for name in same} | renamed
    return tuple(_either(f"mixer.{ours}.weight", f"{theirs}.weight") for ours, theirs in names.items())


def _either(ours: str, theirs: str, live: str = "") -> Spellings:
    return spelled(ours, f"attention.{theirs}", f"self_attn.{live or theirs}")


CONVOLUTIONS = tuple(f"mixer.{x}_conv1d.weight" for x in "qkv")
LAYERS = {
    (KDA,): (
        *NORMS,
        *_mixer("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "o_norm"),
        _either("mixer.o_proj.weight", "dense.weight", "o_proj.weight"),
        _either("mixer.f_proj.weight", "f_proj.weight", "forget_gate.f_proj.weight"),
        _either("mixer.A_log", "A_log", "forget_gate.A_log"),
        _either("mixer.dt_bias", "dt_bias", "forget_gate.dt_bias"),
        (
            Layout(CONVOLUTIONS, tuple(f"attention.{x}_conv1d.weight" for x in "qkv"), form="conv"),
            Layout(CONVOLUTIONS, ("self_attn.conv1d.weight",), form="conv"),
        ),
    ),
    (MLA,): (
        *NORMS,
        *_mixer("q_proj", "kv_b_proj", "g_proj", kv_a_proj="kv_a_proj_with_mqa", kv_norm="kv_a_layernorm"),
        _either("mixer.o_proj.weight", "dense.weight", "o_proj.weight"),
    ),
}
EXPERTS = (
    *weights("mlp.", "mlp.", router="gate"),
    spelled("mlp.router.selection_bias", "mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    *experts(("mlp.", "mlp."), "gate_proj", "up_proj", "down_proj"),
    *swiglu("mlp.shared.", "mlp.shared_experts."),
)
MODEL = (
    spelled("embedding.weight", "word_embeddings.weight", "embed_tokens.weight"),
    *weights("head.", "", norm="norm"),
    *weights("", "", head="lm_head"),
)

# --- config.json -----------------------------------------------------------------------------------------------------


def _from_hf(config: Json) -> ModelConfig:
    key = Keys(config)
    key.only("q_lora_rank", None)
    key.only("no_kda_lora", True)
    key.only("rope_interleave", True)
    key.only("score_function", "sigmoid")
    period = key("layer_group_size", 6)
    return ModelConfig(
        **common_from_hf(key),
        pattern=key.pattern(_mla_from_hf, _kda_from_hf, lambda i: (i + 1) % period == 0),
        **mlps_from_hf(key, first_sparse=2),
    )


def _mla_from_hf(key: Keys) -> MLA:
    positions = key.rope(6e6, 1.0)
    if positions.get("rope_scaling") or positions["rotary_fraction"] != 1:
        raise ValueError("config.json: rope_parameters scale or leave out channels; only rope_type 'default' is known")
    return mla_from_hf(key, rope_theta=positions["rope_theta"], head_gate=True)


def _kda_from_hf(key: Keys) -> KDA:
    heads = key("linear_num_heads", key("num_attention_heads"))
    head_dim = key("linear_head_dim", key("head_dim", 128))
    return KDA(
        heads=heads,
        v_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        lower_bound=key("kda_lower_bound", -5.0) if key("kda_safe_gate", True) else None,
        gate_bias=False,
        low_rank_gates=False,
        conv_size=key("linear_conv_kernel_dim", key("short_conv_kernel_size", 4)),
    )


def _to_hf(config: ModelConfig) -> Json:
    written = dict(model_type="bailing_hybrid", **common_to_hf(config), **mlps_to_hf(config), q_lora_rank=None)
    if kda := options_of(config, KDA):
        written |= dict(
            num_attention_heads=kda.heads,
            head_dim=kda.head_dim,
            short_conv_kernel_size=kda.conv_size,
            kda_safe_gate=kda.lower_bound is not None,
            kda_lower_bound=-5.0 if kda.lower_bound is None else kda.lower_bound,
        )
    if mla := options_of(config, MLA):
        written |= dict(rope_parameters=dict(rope_type="default", rope_theta=mla.rope_theta), **mla_to_hf(config))
    return written


FLOAT32 = (*ROUTER, *CONVOLUTIONS, *GATES)
LING_3 = Family(MODEL, LAYERS, MLP, EXPERTS, _from_hf, _to_hf, mtp_layers=True, ties=False, float32=FLOAT32)
