"""The Hugging Face families: names and layouts of their tensors, and their config.json to ours and back.

Names of ours are those of `Decoder`, within a layer where they are a layer's. A part of a model that folders spell in
several ways has several layouts: the first is written, any is read. What a family does that our modules cannot is a
ValueError when its config.json is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_linear.models.config import ModelConfig, MoEConfig


@dataclass(frozen=True)
class Layout:
    """Our parameters `ours`, interleaved group by group, are the tensors `theirs` one after the other."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]  # names with {e} stand for one tensor of every expert
    groups: str | None = None  # the field of ModelConfig that counts them; None: one group
    form: str = "matrix"  # the shape on disk: "matrix", "conv" [rows, 1, W], "heads" [1, 1, H, 1], "stacked" as ours
    equal: bool = False  # `theirs` are of equal size (the last may be smaller) whatever `ours` are

    def shape_on_disk(self, rows: int, width: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        matrix = (rows,) if len(ours) == 1 else (rows, width)
        return {"matrix": matrix, "conv": (rows, 1, width), "heads": (1, 1, rows, 1), "stacked": ours}[self.form]


Spellings = tuple[Layout, ...]  # of one part of a model
Json = dict[str, object]


@dataclass(frozen=True)
class Family:
    model: tuple[Spellings, ...]
    layers: Mapping[str, tuple[Spellings, ...]]  # by mixer, norms included
    mlp: tuple[Spellings, ...]
    experts: tuple[Spellings, ...]
    config_from_hf: Callable[[Json], ModelConfig]
    config_to_hf: Callable[[ModelConfig], Json]
    prefixes: tuple[str, ...] = ("model.",)  # of every name but lm_head's
    ignored: tuple[str, ...] = ()  # tensors that are no part of the language model, as regular expressions
    wrappers: tuple[str, ...] = ()  # architectures whose language model this is


def weights(ours: str, theirs: str, **names: str) -> tuple[Spellings, ...]:
    """Tensors one to one: ours.NAME.weight is theirs.OTHER.weight for each NAME = OTHER."""
    return tuple((Layout((f"{ours}{a}.weight",), (f"{theirs}{b}.weight",)),) for a, b in names.items())


def same(ours: str, theirs: str, *names: str) -> tuple[Spellings, ...]:
    return weights(ours, theirs, **{n: n for n in names})


def fused(ours: tuple[str, ...], theirs: str, **options: object) -> Spellings:
    """Several of a mixer's projections in one tensor."""
    return (Layout(tuple(f"mixer.{n}.weight" for n in ours), (theirs,), **options),)


def convolutions(prefix: str, *, thirds: bool = False) -> Spellings:
    """Three tensors, or one over q, k and v; or three of equal size, whatever the widths of q, k and v."""
    ours = tuple(f"mixer.{x}_conv1d.weight" for x in "qkv")
    three = tuple(f"{prefix}{x}_conv1d.weight" for x in "qkv")
    one = Layout(ours, (f"{prefix}conv1d.weight",), form="conv")
    equal = (Layout(ours, three, form="conv", equal=True),) if thirds else ()
    return (Layout(ours, three, form="conv"), one, *equal)


def gates(theirs: str) -> tuple[Spellings, ...]:
    return tuple((Layout((f"mixer.{name}",), (f"{theirs}{name}",)),) for name in ("A_log", "dt_bias"))


def swiglu(ours: str, *theirs: str) -> tuple[Spellings, ...]:
    """In each of the spellings `theirs` of the module's name."""
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return tuple(tuple(Layout((ours + n,), (t + n,)) for t in theirs) for n in names)


def experts(theirs: str, gate: str, up: str, down: str) -> tuple[Spellings, ...]:
    """One by one, or stacked."""
    up_names = (f"{theirs}{{e}}.{gate}.weight", f"{theirs}{{e}}.{up}.weight")
    return (
        (
            Layout(("mlp.experts.gate_up_proj",), up_names),
            Layout(("mlp.experts.gate_up_proj",), (f"{theirs}gate_up_proj",), form="stacked"),
        ),
        (
            Layout(("mlp.experts.down_proj",), (f"{theirs}{{e}}.{down}.weight",)),
            Layout(("mlp.experts.down_proj",), (f"{theirs}down_proj",), form="stacked"),
        ),
    )


MODEL = (
    *weights("", "", embedding="embed_tokens"),
    *weights("head.", "", norm="norm"),
    *weights("", "", head="lm_head"),
)
FLA_MODEL = (*weights("", "", embedding="embeddings"), *MODEL[1:])
NORMS = weights("", "", mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm")
MLP = swiglu("mlp.", "mlp.")

# --- Qwen3-Next and Qwen3.5 ------------------------------------------------------------------------------------------

QWEN_ATTENTION = (
    *NORMS,
    fused(("q_proj", "g_proj"), "self_attn.q_proj.weight", groups="heads"),
    *same("mixer.", "self_attn.", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
)
QWEN_GDN = (
    *NORMS,
    fused(("q_conv1d", "k_conv1d", "v_conv1d"), "linear_attn.conv1d.weight", form="conv"),
    *weights("mixer.", "linear_attn.", o_norm="norm", o_proj="out_proj"),
    *gates("linear_attn."),
)
QWEN3_NEXT_GDN = (
    *QWEN_GDN,
    fused(("q_proj", "k_proj", "v_proj", "g_proj"), "linear_attn.in_proj_qkvz.weight", groups="linear_heads"),
    fused(("b_proj", "a_proj"), "linear_attn.in_proj_ba.weight", groups="linear_heads"),
)
QWEN3_5_GDN = (
    *QWEN_GDN,
    fused(("q_proj", "k_proj", "v_proj"), "linear_attn.in_proj_qkv.weight"),
    *weights("mixer.", "linear_attn.", g_proj="in_proj_z", b_proj="in_proj_b", a_proj="in_proj_a"),
)
QWEN_EXPERTS = (
    *weights("mlp.", "mlp.", router="gate", shared_gate="shared_expert_gate"),
    *experts("mlp.experts.", "gate_proj", "up_proj", "down_proj"),
    *swiglu("mlp.shared.", "mlp.shared_expert."),
)


class _Keys:
    """A config.json that names the key when something is wrong with it."""

    def __init__(self, config: Json):
        self.config = config

    def __call__(self, key: str, *default: object) -> object:
        if key in self.config or default:
            return self.config.get(key, *default)
        raise ValueError(f"config.json: {key!r} is missing")

    def only(self, key: str, *known: object) -> None:
        """The first of `known` is the default."""
        if (value := self.config.get(key, known[0])) not in known:
            raise ValueError(f"config.json: {key} = {value!r}; only {' or '.join(map(repr, known))} is known")

    def rope(self, theta: float | None, fraction: float) -> tuple[float | None, float]:
        """(theta, fraction of the head that is rotated); the arguments are defaults."""
        rope = {**(self("rope_scaling", None) or {}), **(self("rope_parameters", None) or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", None):
            raise ValueError(f"config.json: rope_type = {kind!r}; only 'default' is known")
        theta = rope.get("rope_theta", self("rope_theta", theta))
        return theta, rope.get("partial_rotary_factor", self("partial_rotary_factor", fraction))

    def pattern(self, full: str, linear: str, default: list[str]) -> tuple[str, ...]:
        """The mixers of the layers, once per period."""
        types = self("layer_types", None) or default
        names = {"full_attention": full, "linear_attention": linear}
        if unknown := set(types) - set(names):
            raise ValueError(f"config.json: layer_types has {sorted(unknown)}; known are {sorted(names)}")
        if len(types) != self("num_hidden_layers"):
            raise ValueError(
                f"config.json: layer_types has {len(types)} layers, num_hidden_layers = {self('num_hidden_layers')}"
            )
        return shortest([names[t] for t in types])


def shortest(layers: list[str]) -> tuple[str, ...]:
    """The shortest pattern that repeats to these layers."""
    periods = (n for n in range(1, len(layers) + 1) if all(m == layers[i % n] for i, m in enumerate(layers)))
    return tuple(layers[: next(periods)])


def _layer_types(config: ModelConfig, linear: str) -> list[str]:
    return ["linear_attention" if m == linear else "full_attention" for m in config.layers]


def _common(key: _Keys) -> Json:
    """What every family but FLA's calls alike."""
    key.only("attention_bias", False)
    key.only("hidden_act", "silu", "swish")
    key.only("quantization_config", None)
    return dict(
        vocab_size=key("vocab_size"), dim=key("hidden_size"), num_layers=key("num_hidden_layers"),
        heads=key("num_attention_heads"), norm_eps=key("rms_norm_eps"),
        tie_embeddings=key("tie_word_embeddings", False), init_std=key("initializer_range", 0.02),
    )  # fmt: skip


def _common_to_hf(config: ModelConfig) -> Json:
    return dict(
        vocab_size=config.vocab_size, hidden_size=config.dim, num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads, rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tie_embeddings,
        initializer_range=config.init_std, hidden_act="silu", attention_bias=False,
    )  # fmt: skip


GDN_SIZES = dict(
    linear_heads="linear_num_key_heads", linear_v_heads="linear_num_value_heads", linear_head_dim="linear_key_head_dim",
    linear_v_head_dim="linear_value_head_dim", conv_size="linear_conv_kernel_dim",
)  # fmt: skip


def _qwen_from_hf(config: Json, moe: bool) -> ModelConfig:
    key = _Keys(config)
    key.only("attn_output_gate", True)
    every = key("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(key("num_hidden_layers"))]
    theta, fraction = key.rope(10000.0, 0.25)
    moe = moe and key("num_experts") > 0
    return ModelConfig(
        **_common(key), **{ours: key(theirs) for ours, theirs in GDN_SIZES.items()},
        pattern=key.pattern("attention", "gdn", default),
        hidden_dim=key("intermediate_size", 0) if moe else key("intermediate_size"),
        kv_heads=key("num_key_value_heads"), head_dim=key("head_dim"), qk_norm="head", rope_theta=theta,
        rotary_fraction=fraction, output_gate=True, zero_centred_norm=True,
        moe=_qwen_moe(key) if moe else None, dense_layers=_dense_layers(key) if moe else (),
    )  # fmt: skip


def _qwen_moe(key: _Keys) -> MoEConfig:
    return MoEConfig(
        num_experts=key("num_experts"), top_k=key("num_experts_per_tok"), hidden_dim=key("moe_intermediate_size"),
        shared_hidden_dim=key("shared_expert_intermediate_size"), shared_gate=True,
        normalise=key("norm_topk_prob", True),
        balance_coefficient=key("router_aux_loss_coef", 0.001) if key("output_router_logits", False) else 0.0,
    )  # fmt: skip


def _dense_layers(key: _Keys) -> tuple[int, ...]:
    step, only = key("decoder_sparse_step", 1), key("mlp_only_layers", None) or []
    return tuple(i for i in range(key("num_hidden_layers")) if i in only or (i + 1) % step)


def _qwen_to_hf(config: ModelConfig, model_type: str) -> Json:
    rope = dict(rope_type="default", rope_theta=config.rope_theta, partial_rotary_factor=config.rotary_fraction)
    written = dict(
        model_type=model_type, **_common_to_hf(config), num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        layer_types=_layer_types(config, "gdn"), rope_parameters=rope,
        **{theirs: getattr(config, ours) for ours, theirs in GDN_SIZES.items()},
    )  # fmt: skip
    if config.hidden_dim:
        written["intermediate_size"] = config.hidden_dim
    if (moe := config.moe) is not None:
        written |= dict(
            num_experts=moe.num_experts, num_experts_per_tok=moe.top_k, moe_intermediate_size=moe.hidden_dim,
            shared_expert_intermediate_size=moe.shared_hidden_dim, output_router_logits=moe.balance_coefficient > 0,
            router_aux_loss_coef=moe.balance_coefficient or 0.001,
        )  # fmt: skip
    elif model_type != "qwen3_5_text":
        written["num_experts"] = 0
    if model_type == "qwen3_next" and moe is not None:
        written |= dict(norm_topk_prob=moe.normalise, mlp_only_layers=list(config.dense_layers), decoder_sparse_step=1)
    return written


# --- OLMo-Hybrid -----------------------------------------------------------------------------------------------------


def _norm(ours: str, *theirs: str) -> Spellings:
    return tuple(Layout((f"{ours}.weight",), (f"{t}.weight",)) for t in theirs)


# `transformers` writes its own names of both norms of a linear layer, and by the same rule one of a softmax layer's.
OLMO_GDN = (
    _norm("mixer_norm", "attention_layer_norm", "input_layernorm"),
    _norm("mlp_norm", "feedforward_layer_norm", "post_attention_layernorm"),
    *same("mixer.", "linear_attn.", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"),
    convolutions("linear_attn.", thirds=True),
    *gates("linear_attn."),
)
OLMO_ATTENTION = (
    _norm("mixer_norm", "feedforward_layer_norm", "post_attention_layernorm"),
    _norm("mlp_norm", "post_feedforward_layernorm"),
    *same("mixer.", "self_attn.", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
)


def _olmo_from_hf(config: Json) -> ModelConfig:
    key = _Keys(config)
    layers, heads = key("num_hidden_layers"), key("num_attention_heads")
    default = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    key_dim = key("linear_key_head_dim", None) or int(
        0.75 * key("hidden_size") / (key("linear_num_key_heads", None) or heads)
    )
    theta, _ = key.rope(None, 1.0)
    return ModelConfig(
        **_common(key), pattern=key.pattern("attention", "gdn", default), hidden_dim=key("intermediate_size"),
        linear_heads=key("linear_num_key_heads", None) or heads,
        linear_v_heads=key("linear_num_value_heads", None) or heads,
        linear_head_dim=key_dim, linear_v_head_dim=key("linear_value_head_dim", None) or 2 * key_dim,
        conv_size=key("linear_conv_kernel_dim", 4), beta_range=2.0 if key("linear_allow_neg_eigval", True) else 1.0,
        o_norm_eps=1e-5, kv_heads=key("num_key_value_heads", None) or heads, head_dim=key("hidden_size") // heads,
        qk_norm="width", rope_theta=theta, post_norm=("attention",),
    )  # fmt: skip


def _olmo_to_hf(config: ModelConfig) -> Json:
    return dict(
        model_type="olmo_hybrid", **_common_to_hf(config), intermediate_size=config.hidden_dim,
        num_key_value_heads=config.kv_heads, layer_types=_layer_types(config, "gdn"),
        rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta),
        linear_allow_neg_eigval=config.beta_range == 2.0,
        **{theirs: getattr(config, ours) for ours, theirs in GDN_SIZES.items()},
    )  # fmt: skip


# --- Kimi-Linear -----------------------------------------------------------------------------------------------------


def _kimi_gate(ours: str, theirs: str, **options: str) -> Spellings:
    """As on disk, or as in the module of `transformers`."""
    return tuple(Layout((f"mixer.{ours}",), (f"self_attn.{p}{theirs}",), **options) for p in ("", "forget_gate."))


KIMI_KDA = (
    *NORMS,
    *same("mixer.", "self_attn.", "q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj"),
    convolutions("self_attn."),
    (*_kimi_gate("A_log", "A_log", form="heads"), Layout(("mixer.A_log",), ("self_attn.A_log",))),
    _kimi_gate("dt_bias", "dt_bias"),
    _kimi_gate("f_proj.0.weight", "f_a_proj.weight"),
    _kimi_gate("f_proj.1.weight", "f_b_proj.weight"),
    (Layout(("mixer.g_proj.0.weight",), ("self_attn.g_a_proj.weight",)),),
    (Layout(("mixer.g_proj.1.weight",), ("self_attn.g_b_proj.weight",)),),
)
KIMI_MLA = (
    *NORMS,
    *same("mixer.", "self_attn.", "q_proj", "kv_b_proj", "o_proj"),
    *weights("mixer.", "self_attn.", kv_a_proj="kv_a_proj_with_mqa", kv_norm="kv_a_layernorm"),
)
KIMI_EXPERTS = tuple(
    disk + live
    for disk, live in zip(
        (
            *weights("mlp.", "block_sparse_moe.", router="gate"),
            (Layout(("mlp.router.selection_bias",), ("block_sparse_moe.gate.e_score_correction_bias",)),),
            *(s[:1] for s in experts("block_sparse_moe.experts.", "w1", "w3", "w2")),
            *swiglu("mlp.shared.", "block_sparse_moe.shared_experts."),
        ),
        (
            *weights("mlp.", "mlp.", router="gate"),
            (Layout(("mlp.router.selection_bias",), ("mlp.gate.e_score_correction_bias",)),),
            *(s[1:] for s in experts("mlp.experts.", "w1", "w3", "w2")),
            *swiglu("mlp.shared.", "mlp.shared_experts."),
        ),
        strict=True,
    )
)


def _kimi_from_hf(config: Json) -> ModelConfig:
    key = _Keys(config)
    for name in ("q_lora_rank", "rope_scaling"):
        key.only(name, None)
    key.only("mla_use_nope", True)
    key.only("moe_router_activation_func", "sigmoid")
    heads, linear = key("num_attention_heads"), key("linear_attn_config", None) or {}
    dense, sparse = _kimi_mlp_types(key)
    if key("num_key_value_heads", None) not in (None, heads):
        raise ValueError(f"config.json: num_key_value_heads = {key('num_key_value_heads')}; only {heads} is known")
    linear_heads = linear.get("num_heads", key("linear_num_heads", 32))
    head_dim = linear.get("head_dim", key("linear_head_dim", 128))
    return ModelConfig(
        **_common(key), pattern=key.pattern("mla", "kda", _kimi_layer_types(key, linear)),
        hidden_dim=key("intermediate_size"), linear_heads=linear_heads,
        linear_v_heads=linear_heads, linear_head_dim=head_dim, linear_v_head_dim=head_dim,
        conv_size=linear.get("short_conv_kernel_size", key("linear_conv_kernel_dim", 4)), kda_lower_bound=None,
        kda_gate_bias=False, kv_heads=heads, kv_rank=key("kv_lora_rank"), nope_dim=key("qk_nope_head_dim"),
        shared_k_dim=key("qk_rope_head_dim"), mla_v_dim=key("v_head_dim"), rope_theta=None, dense_layers=dense,
        moe=_kimi_moe(key) if sparse else None,
    )  # fmt: skip


def _kimi_layer_types(key: _Keys, linear: Json) -> list[str]:
    layers = key("num_hidden_layers")
    if "full_attn_layers" in linear:  # counted from 1
        return ["full_attention" if i + 1 in linear["full_attn_layers"] else "linear_attention" for i in range(layers)]
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]


def _kimi_mlp_types(key: _Keys) -> tuple[tuple[int, ...], bool]:
    """Layers without experts, and whether there are others."""
    layers, first = key("num_hidden_layers"), key("first_k_dense_replace", 1)
    types = key("mlp_layer_types", None) or ["dense" if i < first else "sparse" for i in range(layers)]
    key.only("moe_layer_freq", 1)
    dense = tuple(i for i, t in enumerate(types) if t == "dense")
    return (dense, True) if len(dense) < layers else ((), False)


def _kimi_moe(key: _Keys) -> MoEConfig:
    def first(*names: str) -> object:
        return next((key(n) for n in names if key(n, None) is not None), None) or key(names[0])

    return MoEConfig(
        num_experts=first("num_experts", "num_local_experts"),
        top_k=first("num_experts_per_token", "num_experts_per_tok"),
        hidden_dim=key("moe_intermediate_size"),
        shared_hidden_dim=key("moe_intermediate_size") * first("num_shared_experts", "n_shared_experts"),
        score="sigmoid", normalise=key("moe_renormalize", key("norm_topk_prob", True)), selection_bias=True,
        scale=key("routed_scaling_factor"), groups=first("num_expert_group", "n_group"),
        top_groups=key("topk_group", 1),
    )  # fmt: skip


def _kimi_to_hf(config: ModelConfig) -> Json:
    written = dict(
        model_type="kimi_linear", **_common_to_hf(config), intermediate_size=config.hidden_dim,
        num_key_value_heads=config.heads, layer_types=_layer_types(config, "kda"), q_lora_rank=None,
        linear_num_heads=config.linear_heads, linear_head_dim=config.linear_head_dim,
        linear_conv_kernel_dim=config.conv_size,
        kv_lora_rank=config.kv_rank, qk_nope_head_dim=config.nope_dim, qk_rope_head_dim=config.shared_k_dim,
        v_head_dim=config.mla_v_dim,
        mlp_layer_types=["sparse" if config.has_experts(i) else "dense" for i in range(config.num_layers)],
    )  # fmt: skip
    if (moe := config.moe) is not None:
        written |= dict(
            num_experts=moe.num_experts, num_experts_per_token=moe.top_k, moe_intermediate_size=moe.hidden_dim,
            num_shared_experts=moe.shared_hidden_dim // moe.hidden_dim, moe_renormalize=moe.normalise,
            routed_scaling_factor=moe.scale, num_expert_group=moe.groups, topk_group=moe.top_groups,
        )  # fmt: skip
    return written


# --- flash-linear-attention ------------------------------------------------------------------------------------------

FLA_NORMS = weights("", "", mixer_norm="attn_norm", mlp_norm="mlp_norm")
FLA_LINEAR = (
    *FLA_NORMS,
    *same("mixer.", "attn.", "q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj"),
    convolutions("attn."),
    *gates("attn."),
)
FLA_KDA = (
    *FLA_LINEAR,
    *same("mixer.", "attn.", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"),
    (Layout(("mixer.g_proj.1.bias",), ("attn.g_proj.1.bias",)),),
)
FLA_GDN = (*FLA_LINEAR, *same("mixer.", "attn.", "a_proj", "g_proj"))
FLA_ATTENTION = (*FLA_NORMS, *same("mixer.", "attn.", "q_proj", "k_proj", "v_proj", "o_proj"))


def _fla_from_hf(config: Json, mixer: str) -> ModelConfig:
    key = _Keys(config)
    key.only("hidden_act", "swish", "silu")
    key.only("use_short_conv", True)
    key.only("use_gate", True)
    key.only("attnres_block_size", None)
    layers, dim, head_dim = key("num_hidden_layers"), key("hidden_size"), key("head_dim")
    softmax = _fla_attention(key, dim)
    own = {"kda_lower_bound": key("lower_bound", None)} if mixer == "kda" else {}
    return ModelConfig(
        vocab_size=key("vocab_size"), dim=dim, num_layers=layers, hidden_dim=_fla_hidden_dim(key, dim),
        pattern=shortest(["attention" if i in softmax["layers"] else mixer for i in range(layers)]),
        linear_heads=key("num_heads"), linear_v_heads=key("num_v_heads", None) or key("num_heads"),
        linear_head_dim=head_dim, linear_v_head_dim=int(head_dim * key("expand_v", 1.0 if mixer == "kda" else 2.0)),
        conv_size=key("conv_size", 4), beta_range=2.0 if key("allow_neg_eigval", False) else 1.0, **own,
        **softmax["options"], tie_embeddings=key("tie_word_embeddings", False), norm_eps=key("norm_eps", 1e-6),
        init_std=key("initializer_range", 0.02),
    )  # fmt: skip


def _fla_hidden_dim(key: _Keys, dim: int) -> int:
    """intermediate_size, or the multiple of 256 at or above 2/3 · hidden_ratio · hidden_size."""
    if size := key("intermediate_size", None):
        return size
    return 256 * -(-int(dim * (key("hidden_ratio", None) or 4) * 2 / 3) // 256)


def _fla_attention(key: _Keys, dim: int) -> Json:
    """The softmax layers and their options."""
    specs = key("attn", None) or []
    specs = [specs] if isinstance(specs, dict) else specs
    found = [{**s, "layers": None} for s in specs]
    if any(s != found[0] for s in found):
        raise ValueError("config.json: attn has layers of several kinds; only one kind of softmax layer is known")
    layers = [i for s in specs for i in s["layers"]]
    if not layers:
        return {"layers": [], "options": {}}
    spec = _Keys(found[0])
    spec.only("qkv_bias", False)
    spec.only("window_size", None)
    heads = spec("num_heads")
    options = dict(heads=heads, kv_heads=spec("num_kv_heads", None) or heads, head_dim=dim // heads,
                   rope_theta=float(spec("rope_theta", None) or 10000.0))  # fmt: skip
    return {"layers": layers, "options": options}


def _fla_to_hf(config: ModelConfig, mixer: str) -> Json:
    softmax = [i for i, m in enumerate(config.layers) if m == "attention"]
    attn = dict(layers=softmax, num_heads=config.heads, num_kv_heads=config.kv_heads, qkv_bias=False, window_size=None,
                rope_theta=config.rope_theta)  # fmt: skip
    own = (
        dict(safe_gate=config.kda_lower_bound is not None, lower_bound=config.kda_lower_bound) if mixer == "kda" else {}
    )
    return dict(
        model_type="kda" if mixer == "kda" else "gated_deltanet", vocab_size=config.vocab_size, hidden_size=config.dim,
        num_hidden_layers=config.num_layers, intermediate_size=config.hidden_dim, num_heads=config.linear_heads,
        num_v_heads=config.linear_v_heads, head_dim=config.linear_head_dim,
        expand_v=config.linear_v_head_dim / config.linear_head_dim, conv_size=config.conv_size, hidden_act="swish",
        use_short_conv=True, use_gate=True, allow_neg_eigval=config.beta_range == 2.0, attn=attn if softmax else None,
        tie_word_embeddings=config.tie_embeddings, norm_eps=config.norm_eps, initializer_range=config.init_std, **own,
    )  # fmt: skip


VISION = (r"model\.visual\..*", r"mtp\..*")  # and multi-token prediction

FAMILIES = {
    "Qwen3_5ForCausalLM": Family(
        MODEL, {"gdn": QWEN3_5_GDN, "attention": QWEN_ATTENTION}, MLP, (), lambda c: _qwen_from_hf(c, moe=False),
        lambda c: _qwen_to_hf(c, "qwen3_5_text"), ("model.", "model.language_model."), VISION,
        ("Qwen3_5ForConditionalGeneration",),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        MODEL, {"gdn": QWEN3_5_GDN, "attention": QWEN_ATTENTION}, MLP, QWEN_EXPERTS,
        lambda c: _qwen_from_hf(c, moe=True),
        lambda c: _qwen_to_hf(c, "qwen3_5_moe_text"), ("model.", "model.language_model."), VISION,
        ("Qwen3_5MoeForConditionalGeneration",),
    ),
    "Qwen3NextForCausalLM": Family(
        MODEL, {"gdn": QWEN3_NEXT_GDN, "attention": QWEN_ATTENTION}, MLP, QWEN_EXPERTS,
        lambda c: _qwen_from_hf(c, moe=True),
        lambda c: _qwen_to_hf(c, "qwen3_next"), ignored=(r"mtp\..*",),
    ),
    "OlmoHybridForCausalLM": Family(
        MODEL, {"gdn": OLMO_GDN, "attention": OLMO_ATTENTION}, MLP, (), _olmo_from_hf, _olmo_to_hf
    ),
    "KimiLinearForCausalLM": Family(
        MODEL, {"kda": KIMI_KDA, "mla": KIMI_MLA}, swiglu("mlp.", "block_sparse_moe.", "mlp."), KIMI_EXPERTS,
        _kimi_from_hf, _kimi_to_hf,
    ),
    "KDAForCausalLM": Family(
        FLA_MODEL, {"kda": FLA_KDA, "attention": FLA_ATTENTION}, MLP, (), lambda c: _fla_from_hf(c, "kda"),
        lambda c: _fla_to_hf(c, "kda"),
    ),
    "GatedDeltaNetForCausalLM": Family(
        FLA_MODEL, {"gdn": FLA_GDN, "attention": FLA_ATTENTION}, MLP, (), lambda c: _fla_from_hf(c, "gdn"),
        lambda c: _fla_to_hf(c, "gdn"),
    ),
}  # fmt: skip
