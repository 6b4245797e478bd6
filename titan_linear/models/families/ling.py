"""Ling 3: Kimi Delta Attention with bounded gates, latent attention with positions and gated heads, experts."""

from __future__ import annotations

from titan_linear.models.families.keys import (
    COMMON,
    Json,
    Keys,
    Part,
    Row,
    always,
    layer_types,
    mixer,
    only,
    overruled,
    table,
)
from titan_linear.models.families.kimi import LATENT, mlps
from titan_linear.models.families.layout import (
    GATES,
    MLP,
    MTP,
    MTP_PARTS,
    NORMS,
    ROUTER,
    Family,
    Layout,
    Spellings,
    experts,
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


def _read_positions(key: Keys) -> Json:
    positions = key.rope(6e6, 1.0)
    if positions.get("rope_scaling") or positions["rotary_fraction"] != 1:
        raise ValueError("config.json: rope_parameters scale or leave out channels; only rope_type 'default' is known")
    return dict(rope_theta=positions["rope_theta"])


def _write_positions(mla: MLA) -> Json:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=mla.rope_theta))


def _read_bound(key: Keys) -> Json:
    return dict(lower_bound=key("kda_lower_bound", -5.0) if key("kda_safe_gate", True) else None)


def _write_bound(kda: KDA) -> Json:
    bound = kda.lower_bound
    return dict(kda_safe_gate=bound is not None, kda_lower_bound=-5.0 if bound is None else bound)


LINEAR = Part(
    KDA,
    overruled(
        heads="linear_num_heads num_attention_heads",
        v_heads="linear_num_heads num_attention_heads",
        head_dim=("linear_head_dim head_dim", 128),
        v_head_dim=("linear_head_dim head_dim", 128),
        conv_size=("linear_conv_kernel_dim short_conv_kernel_size", 4),
    ),
    Row(_read_bound, _write_bound),
    gate_bias=False,
    low_rank_gates=False,
)
ATTENTION = Part(MLA, Row(_read_positions, _write_positions), *LATENT, head_gate=True)
KEYS = table(
    "bailing_hybrid",
    *COMMON,
    layer_types(ATTENTION, LINEAR, lambda key, i: (i + 1) % key("layer_group_size", 6) == 0),
    *mlps(first_sparse=2),
    always("q_lora_rank", None),
    only("no_kda_lora rope_interleave", True),
    only("score_function", "sigmoid"),
    mixer(LINEAR),
    mixer(ATTENTION),
)
FLOAT32 = (*ROUTER, *CONVOLUTIONS, *GATES)
LING_3 = Family(
    MODEL, LAYERS, MLP, EXPERTS, KEYS, mtp=MTP("num_nextn_predict_layers", MTP_PARTS, ""), ties=False, float32=FLOAT32
)
