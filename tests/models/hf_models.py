"""Tiny random models of the families, made and saved by `transformers`: what ours are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 97
# The epsilon is large enough that a norm with another one shows.
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, initializer_range=0.05, rms_norm_eps=1e-3
)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
QWEN = (
    SIZES | HEADS | LINEAR | dict(head_dim=16, layer_types=["linear_attention", "full_attention"])
)
# A context of 32, of which the texts of the tests are four times. (Configs write into what they are given.)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)
LLAMA3 = YARN | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=3.0)
QWEN_MOE = dict(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
)
OLMO = (
    SIZES
    | HEADS
    | LINEAR
    | dict(
        layer_types=["linear_attention", "full_attention"],
        intermediate_size=48,
        pad_token_id=0,
        eos_token_id=1,
    )
)
LATENT = SIZES | dict(
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    pad_token_id=0,
)
ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=16, n_group=4, topk_group=2)
KIMI = LATENT | dict(linear_head_dim=8, linear_num_heads=4, bos_token_id=1, eos_token_id=2)
KIMI_MOE = ROUTED | dict(num_experts=8, n_shared_experts=2)
LING = (
    LATENT
    | ROUTED
    | dict(
        head_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=100.0),
        first_k_dense_replace=1,
        num_local_experts=8,
    )
)
NEMOTRON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    initializer_range=0.05,
    layer_norm_epsilon=1e-3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    ssm_state_size=8,
    mamba_num_heads=8,
    mamba_head_dim=12,
    n_groups=2,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    pad_token_id=0,
)
GRANITE = (
    SIZES
    | HEADS
    | dict(
        layer_types=["linear_attention", "full_attention"],
        intermediate_size=16,
        shared_intermediate_size=24,
        mamba_n_heads=8,
        mamba_d_state=8,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
    )
)
BAMBA = SIZES | dict(
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=[1],
    mamba_n_heads=8,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_chunk_size=32,
)
FALCON = (
    SIZES
    | HEADS
    | dict(
        head_dim=16,
        intermediate_size=48,
        mamba_d_ssm=48,
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_chunk_size=32,
        mamba_norm_before_gate=False,
        embedding_multiplier=2.5,
        lm_head_multiplier=0.3,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.9,
        ssm_in_multiplier=1.25,
        ssm_multipliers=[0.6, 1.4, 0.8, 1.7, 1.1],
        ssm_out_multiplier=0.45,
        mlp_multipliers=[0.85, 0.55],
    )
)


def nemotron(pattern: str, **options: object) -> PreTrainedModel:
    """Its Mamba-2 layers take `time_step_limit` for the limits of time steps, as the trainer of the published models
    does, and not `time_step_min` for the lower one."""
    model = NemotronHForCausalLM(
        NemotronHConfig(**NEMOTRON, hybrid_override_pattern=pattern, **options)
    )
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = tuple(model.config.time_step_limit)
    return model


# name of the case -> how to build it; each uses what the others leave out
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Qwen3.5, tied": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**QWEN, intermediate_size=48, tie_word_embeddings=True)
    ),
    "Qwen3.5 MoE": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**QWEN, **QWEN_MOE)),
    "Qwen3-Next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **QWEN,
            **QWEN_MOE,
            intermediate_size=48,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            max_position_embeddings=128,
            rope_parameters=dict(YARN),
        )
    ),
    "OLMo-Hybrid": lambda: OlmoHybridForCausalLM(OlmoHybridConfig(**OLMO)),
    "OLMo-Hybrid, no positions": lambda: OlmoHybridForCausalLM(
        OlmoHybridConfig(**OLMO, rope_parameters={"rope_theta": None, "rope_type": "default"})
    ),
    "Kimi-Linear": lambda: KimiLinearForCausalLM(
        KimiLinearConfig(**KIMI, **KIMI_MOE, layer_types=["linear_attention", "full_attention"])
    ),
    "Ling 3": lambda: BailingHybridForCausalLM(BailingHybridConfig(**LING, layer_group_size=2)),
    "Ling 3, unbounded": lambda: BailingHybridForCausalLM(
        BailingHybridConfig(
            **LING,
            layer_types=["full_attention", "linear_attention"],
            kda_safe_gate=False,
            q_lora_rank=24,
        )
    ),
    "Nemotron-H": lambda: nemotron("M*-M"),
    "Nemotron 3": lambda: nemotron(
        "ME*EM", moe_latent_size=12, norm_topk_prob=False, time_step_limit=(2e-2, 5e-2)
    ),
    "Granite-H": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **GRANITE, num_local_experts=8, num_experts_per_tok=3, tie_word_embeddings=True
        )
    ),
    "Bamba": lambda: BambaForCausalLM(BambaConfig(**BAMBA, time_step_limit=(0.9, 1.4))),
    "Falcon-H1": lambda: FalconH1ForCausalLM(
        FalconH1Config(**FALCON, mamba_rms_norm=True, mamba_n_groups=2, time_step_limit=(0.9, 1.4))
    ),
    "Falcon-H1, no norm": lambda: FalconH1ForCausalLM(
        FalconH1Config(
            **FALCON, mamba_conv_bias=False, tie_word_embeddings=True, rope_parameters=dict(LLAMA3)
        )
    ),
    "LFM2": lambda: Lfm2ForCausalLM(
        Lfm2Config(
            **{k: v for k, v in SIZES.items() if k != "rms_norm_eps"},
            **{k: v for k, v in HEADS.items() if k != "head_dim"},
            norm_eps=1e-3,
            intermediate_size=60,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.3,
            layer_types=["conv", "full_attention"],
            rope_parameters=YARN
            | dict(truncate=False, attention_factor=1.5, beta_fast=16.0, beta_slow=0.5),
        )
    ),
    "LFM2-MoE": lambda: Lfm2MoeForCausalLM(
        Lfm2MoeConfig(
            **{k: v for k, v in SIZES.items() if k != "rms_norm_eps"},
            **HEADS,
            norm_eps=1e-3,
            intermediate_size=48,
            num_dense_layers=1,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            routed_scaling_factor=2.5,
            layer_types=["conv", "full_attention"],
        )
    ),
    "MiniMax": lambda: MiniMaxForCausalLM(
        MiniMaxConfig(
            **SIZES,
            **HEADS,
            head_dim=16,
            intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0),
            **{f"{branch}_alpha_factor": 2.5 for branch in ("linear_attn", "full_attn", "mlp")},
            **{f"{branch}_beta_factor": 0.5 for branch in ("linear_attn", "full_attn", "mlp")},
        )
    ),
    "Granite-H, dense": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **GRANITE,
            num_local_experts=0,
            mamba_n_groups=2,
            position_embedding_type="rope",
            rope_parameters=dict(LLAMA3),
        )
    ),
}


def build(name: str) -> PreTrainedModel:
    """The model of a case in fp32."""
    torch.manual_seed(0)
    return randomise(MODELS[name]())


@torch.no_grad()
def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Every weight random, also those that begin as zeros and ones.

    Decay is slow: a leak between documents then does not fade, and an output is a sum of many tokens' values. With fast
    decay it is one token's value times q·k, whose rounding error, where q·k is near zero, the output norm makes large.
    """
    rng = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=rng)
        if name.endswith(("inv_freq", "slope_rate", "_decay", "mup_vector")):
            continue
        if "kv_a_proj" in name:  # latents so small that the eps of their norm shows
            tensor.copy_(noise * 1e-3 * tensor.shape[-1] ** -0.5)
        elif name.endswith("A_log"):
            tensor.copy_(-3 + 0.5 * noise)
        elif tensor.dim() > 1:
            tensor.copy_(noise * max(tensor.shape[-1], 1) ** -0.5)
        else:
            tensor.add_(0.2 * noise)
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Saved by transformers: its config.json and its tensors."""
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def reference(
    model: PreTrainedModel, tokens: Tensor, bounds: list[int]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits [T, vocab], the summed loss and every gradient, by the live names; each document on its own."""
    model.zero_grad()
    logits, total = [], 0.0
    for start, end in pairwise(bounds):
        document = tokens[start:end]
        out = model(document.unsqueeze(0), use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(out[:-1], document[1:], reduction="sum")
        loss.backward()
        logits.append(out.detach())
        total += loss.item()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    grads |= {
        n: torch.zeros_like(b)
        for n, b in model.named_buffers()
        if n.endswith(("correction_bias", "expert_bias"))
    }
    return torch.cat(logits), total, grads
