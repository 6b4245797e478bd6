"""flash-linear-attention's models: KDA or Gated DeltaNet, with softmax layers where `attn` says so.

The folders that we write also open without that library, through modeling_titan_linear.py (see remote.py).
"""

from __future__ import annotations

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.layout import (
    GATES,
    MLP,
    Family,
    Json,
    Keys,
    convolutions,
    gates,
    options_of,
    outside_layers,
    shortest,
    spelled,
    weights,
)
from titan_linear.models.families.remote import remote_code
from titan_linear.models.mixers import GDN, KDA, Attention

# --- Tensors ---------------------------------------------------------------------------------------------------------

FLA_MODEL = outside_layers("embeddings", "norm")
_NORMS = weights("", "", mixer_norm="attn_norm", mlp_norm="mlp_norm")
_LINEAR = (
    *_NORMS,
    *weights("mixer.", "attn.", "q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj"),
    convolutions("attn."),
    *gates("attn."),
)
FLA_KDA = (
    *_LINEAR,
    *weights("mixer.", "attn.", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"),
    spelled("mixer.g_proj.1.bias", "attn.g_proj.1.bias"),
)
FLA_GDN = (*_LINEAR, *weights("mixer.", "attn.", "a_proj", "g_proj"))
FLA_ATTENTION = (*_NORMS, *weights("mixer.", "attn.", "q_proj", "k_proj", "v_proj", "o_proj"))

# --- config.json -----------------------------------------------------------------------------------------------------


def _from_hf(config: Json, kind: type[KDA] | type[GDN]) -> ModelConfig:
    key = Keys(config)
    key.only("hidden_act", "swish", "silu")
    key.only("use_short_conv", True)
    key.only("use_gate", True)
    key.only("attnres_block_size", None)
    dim = key("hidden_size")
    softmax, attention = _softmax_from_hf(key, dim)
    layers = range(key("num_hidden_layers"))
    linear = None if set(layers) <= set(softmax) else _linear_from_hf(key, kind)
    return ModelConfig(
        vocab_size=key("vocab_size"),
        dim=dim,
        num_layers=len(layers),
        hidden_dim=_hidden_dim(key, dim),
        pattern=shortest([attention if i in softmax else linear for i in layers]),
        tie_embeddings=key("tie_word_embeddings", False),
        norm_eps=key("norm_eps", 1e-6),
        init_std=key("initializer_range", 0.02),
    )


def _linear_from_hf(key: Keys, kind: type[KDA] | type[GDN]) -> KDA | GDN:
    heads, head_dim = key("num_heads"), key("head_dim")
    own = {"lower_bound": key("lower_bound", None)} if kind is KDA else {}
    return kind(
        heads=heads,
        v_heads=key("num_v_heads", None) or heads,
        head_dim=head_dim,
        v_head_dim=int(head_dim * key("expand_v", 1.0 if kind is KDA else 2.0)),
        conv_size=key("conv_size", 4),
        beta_range=2.0 if key("allow_neg_eigval", False) else 1.0,
        **own,
    )


def _hidden_dim(key: Keys, dim: int) -> int:
    """intermediate_size, or the multiple of 256 at or above 2/3 · hidden_ratio · hidden_size."""
    if size := key("intermediate_size", None):
        return size
    return 256 * -(-int(dim * (key("hidden_ratio", None) or 4) * 2 / 3) // 256)


def _softmax_from_hf(key: Keys, dim: int) -> tuple[list[int], Attention | None]:
    """The indices of the softmax layers, and their options."""
    specs = key("attn", None) or []
    specs = [specs] if isinstance(specs, dict) else specs
    found = [{**s, "layers": None} for s in specs]
    if any(s != found[0] for s in found):
        raise ValueError("config.json: attn has layers of several kinds; only one kind of softmax layer is known")
    layers = [i for s in specs for i in s["layers"]]
    if not layers:
        return [], None
    spec = Keys(found[0])
    spec.only("qkv_bias", False)
    spec.only("window_size", None)
    heads = spec("num_heads")
    return layers, Attention(
        heads=heads,
        kv_heads=spec("num_kv_heads", None) or heads,
        head_dim=dim // heads,
        rope_theta=float(spec("rope_theta", None) or 10000.0),
    )


def _to_hf(config: ModelConfig, kind: type[KDA] | type[GDN]) -> Json:
    written = dict(
        model_type="kda" if kind is KDA else "gated_deltanet",
        **remote_code(config, "KDA" if kind is KDA else "GatedDeltaNet"),
        hidden_act="swish",
        use_short_conv=True,
        use_gate=True,
        attn=None,
    )
    if linear := options_of(config, kind):
        written |= dict(
            num_heads=linear.heads,
            num_v_heads=linear.v_heads,
            head_dim=linear.head_dim,
            expand_v=linear.v_head_dim / linear.head_dim,
            conv_size=linear.conv_size,
            allow_neg_eigval=linear.beta_range == 2.0,
        )
    if isinstance(linear, KDA):
        written |= dict(safe_gate=linear.lower_bound is not None, lower_bound=linear.lower_bound)
    if attention := options_of(config, Attention):
        softmax = [i for i, layer in enumerate(config.layers) if isinstance(layer.mixers[0], Attention)]
        written["attn"] = dict(
            layers=softmax,
            num_heads=attention.heads,
            num_kv_heads=attention.kv_heads,
            qkv_bias=False,
            window_size=None,
            rope_theta=attention.rope_theta,
        )
    return written


SOFTMAX = {(Attention,): FLA_ATTENTION}
FLA_KDA_FAMILY = Family(
    FLA_MODEL,
    {(KDA,): FLA_KDA, **SOFTMAX},
    MLP,
    (),
    lambda c: _from_hf(c, KDA),
    lambda c: _to_hf(c, KDA),
    float32=GATES,
)
FLA_GDN_FAMILY = Family(
    FLA_MODEL,
    {(GDN,): FLA_GDN, **SOFTMAX},
    MLP,
    (),
    lambda c: _from_hf(c, GDN),
    lambda c: _to_hf(c, GDN),
    float32=GATES,
)
