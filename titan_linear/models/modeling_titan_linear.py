"""Kimi Delta Attention, Gated DeltaNet and softmax attention in any order, for `transformers`.

This file and rope.py lie beside the weights that it reads and need nothing but PyTorch and transformers:

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Linear layers run the delta rule in chunks, which is exact; matrix products do the work, without kernels of their own.
`generate` keeps what each layer needs of earlier tokens: states, tails of convolutions, keys and values. Each row of a
batch is one text, padded on the left or on the right where attention_mask says so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .rope import inverse_frequencies

CHUNK = 32  # tokens whose interactions are computed as matrices; between chunks a state is carried
L2_EPS = 1e-6
# by version
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class TitanLinearConfig(PretrainedConfig):
    """`pattern` has the options of the first layers' mixers, each with its "kind": "kda", "gdn" or "attention"; further
    layers repeat it. Blocks with a mixer of a kind in `post_norm` have norms after mixer and MLP, others before."""

    model_type = "titan_linear"

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=1024,
        num_hidden_layers=0,
        intermediate_size=2816,
        pattern=(),
        norm_eps=1e-5,
        zero_centred_norm=False,
        post_norm=(),
        initializer_range=0.02,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = (
            vocab_size,
            hidden_size,
            num_hidden_layers,
        )
        self.intermediate_size = intermediate_size
        self.pattern = list(pattern)
        self.post_norm = list(post_norm)
        self.norm_eps, self.zero_centred_norm = norm_eps, zero_centred_norm
        self.initializer_range = initializer_range
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


def widen(x):
    """x in float32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; zero-centred: · (1 + weight); gated: · act(z)."""

    def __init__(self, dim, eps, zero_centred=False, activation=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if zero_centred else torch.ones(dim))
        self.eps, self.zero_centred, self.activation = eps, zero_centred, activation

    def forward(self, x, z=None):
        weight = 1 + widen(self.weight) if self.zero_centred else widen(self.weight)
        y = F.rms_norm(widen(x), self.weight.shape, weight, self.eps)
        return (y if z is None else y * self.activation(widen(z))).to(x.dtype)


# --- Linear layers ---------------------------------------------------------------------------------------------------


def delta_rule(q, k, v, g, beta, state):
    """S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t.

    q, k [B, H, T, K], v [B, H, T, V], g [B, H, T, K] or [B, H, T, 1], beta [B, H, T], state [B, H, K, V], all in one
    dtype -> o [B, H, T, V] and the last state.
    """
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        q_, k_, v_, g_, b_ = (
            x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta.unsqueeze(-1))
        )
        G = g_.cumsum(2)  # [B, H, C, K or 1], log decay since the start of the chunk
        later = torch.ones(G.shape[2], G.shape[2], dtype=torch.bool, device=q.device).triu(1)[
            ..., None
        ]
        # [B, H, C, C, K or 1]
        decay = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(later, float("-inf")).exp()
        lower = b_ * pairs(k_, k_, decay).tril(-1)
        u = torch.linalg.solve_triangular(
            lower, b_ * (v_ - (k_ * G.exp()) @ state), upper=False, unitriangular=True
        )
        outputs.append((q_ * G.exp()) @ state + pairs(q_, k_, decay) @ u)
        last = G[:, :, -1:]
        state = last.exp().transpose(2, 3) * state + (k_ * (last - G).exp()).transpose(2, 3) @ u
    return torch.cat(outputs, 2), state


def pairs(a, b, decay):
    """Σ_k a_ik b_jk decay_ijk, [B, H, C, C]."""
    if decay.shape[-1] == 1:
        return (a @ b.transpose(2, 3)) * decay.squeeze(-1)
    return (a.unsqueeze(3) * b.unsqueeze(2) * decay).sum(-1)


class DeltaLayer(nn.Module):
    """The cache holds `state` [B, HV, K, V] and `conv` [B, D, W−1], the convolution's last inputs."""

    def __init__(self, config, options, activation):
        super().__init__()
        self.heads = options["heads"]
        self.v_heads = options["v_heads"]
        self.head_dim = options["head_dim"]
        self.v_head_dim = options["v_head_dim"]
        self.conv_size = options["conv_size"]
        self.beta_range = options["beta_range"]
        dim = config.hidden_size
        key_dim = self.heads * self.head_dim
        value_dim = self.v_heads * self.v_head_dim
        self.widths = (key_dim, key_dim, value_dim)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, w, bias=False) for w in self.widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(w, w, self.conv_size, groups=w, bias=False) for w in self.widths
        )
        self.b_proj = nn.Linear(dim, self.v_heads, bias=False)
        eps = config.norm_eps if options["o_norm_eps"] is None else options["o_norm_eps"]
        self.o_norm = RMSNorm(self.v_head_dim, eps, activation=activation)
        self.o_proj = nn.Linear(value_dim, dim, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.v_heads))

    def forward(self, x, tokens, cache):
        """x [B, T, dim] -> [B, T, dim]."""
        if tokens.is_text is not None:  # padding leaves no trace in convolution and state
            x = x * tokens.is_text[:, -x.shape[1] :, None].to(x.dtype)
        q, k, v = (widen(y) for y in self.convolved(x, cache))
        q, k = (y * (y.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for y in (q, k))
        q, k = (
            y.repeat_interleave(self.v_heads // self.heads, 2) for y in (q * self.head_dim**-0.5, k)
        )
        g = self.gate(x)
        beta = widen(self.b_proj(x)).sigmoid() * self.beta_range
        state = q.new_zeros(len(x), self.v_heads, self.head_dim, self.v_head_dim)
        if cache is not None:
            state = cache.get("state", state)
        o, state = delta_rule(*(y.transpose(1, 2) for y in (q, k, v, g, beta)), state)
        if cache is not None:
            cache["state"] = state
        z = self.g_proj(x).unflatten(-1, (self.v_heads, self.v_head_dim))
        return self.o_proj(self.o_norm(o.transpose(1, 2).to(x.dtype), z).flatten(2))

    def convolved(self, x, cache):
        """q, k [B, T, H, K] and v [B, T, HV, V] after the short convolution."""
        # [B, D, T]
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1).transpose(1, 2)
        weight = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        before = qkv.new_zeros(len(x), qkv.shape[1], self.conv_size - 1)
        if cache is not None:
            before = cache.get("conv", before)
        qkv = torch.cat([before, qkv], 2)
        if cache is not None:
            cache["conv"] = qkv[:, :, qkv.shape[2] - self.conv_size + 1 :]
        y = (
            F.silu(F.conv1d(widen(qkv), widen(weight), groups=len(weight)))
            .to(x.dtype)
            .transpose(1, 2)
        )
        q, k, v = y.split(self.widths, -1)
        return (
            q.unflatten(-1, (self.heads, self.head_dim)),
            k.unflatten(-1, (self.heads, self.head_dim)),
            v.unflatten(-1, (self.v_heads, self.v_head_dim)),
        )


class KDA(DeltaLayer):
    """Kimi Delta Attention: a gate per channel."""

    def __init__(self, config, options):
        super().__init__(config, options, torch.sigmoid)
        self.lower_bound = options["lower_bound"]
        dim = config.hidden_size
        gate_dim = self.v_heads * self.head_dim
        low_rank = options.get("low_rank_gates", True)
        rank = self.v_head_dim if low_rank else dim
        f_proj = nn.Linear(rank, gate_dim, bias=False)
        g_proj = nn.Linear(rank, self.widths[2], bias=options["gate_bias"])
        if low_rank:
            f_proj, g_proj = (
                nn.Sequential(nn.Linear(dim, rank, bias=False), second)
                for second in (f_proj, g_proj)
            )
        self.f_proj, self.g_proj = f_proj, g_proj
        self.dt_bias = nn.Parameter(torch.zeros(gate_dim))

    def gate(self, x):
        """Natural log of the decay, [B, T, HV, K]."""
        raw = (widen(self.f_proj(x)) + widen(self.dt_bias)).unflatten(
            -1, (self.v_heads, self.head_dim)
        )
        speed = widen(self.A_log).exp().unsqueeze(-1)
        return (
            -speed * F.softplus(raw)
            if self.lower_bound is None
            else self.lower_bound * (speed * raw).sigmoid()
        )


class GDN(DeltaLayer):
    """Gated DeltaNet: a gate per head."""

    def __init__(self, config, options):
        super().__init__(config, options, F.silu)
        self.a_proj = nn.Linear(config.hidden_size, self.v_heads, bias=False)
        self.g_proj = nn.Linear(config.hidden_size, self.widths[2], bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.v_heads))

    def gate(self, x):
        """Natural log of the decay, [B, T, HV, 1]."""
        return (
            -widen(self.A_log).exp() * F.softplus(widen(self.a_proj(x)) + widen(self.dt_bias))
        ).unsqueeze(-1)


# --- Softmax layers --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped heads; optional QK-norm, rotary positions and output gate. The cache holds `k` and `v` [B, Hkv, T, D]."""

    def __init__(self, config, options):
        super().__init__()
        self.heads = options["heads"]
        self.kv_heads = options["kv_heads"]
        self.head_dim = options["head_dim"]
        scaling = options.get("rope_scaling") or {}
        rotated = int(self.head_dim * options["rotary_fraction"])
        self.rotary = options["rope_theta"], rotated, tuple(scaling.items())
        self.qk_norm = options["qk_norm"]
        self.scale = options.get("scale")
        self.key_factor, self.out_factor = (
            options.get(f"{name}_factor", 1.0) for name in ("key", "out")
        )
        dim = config.hidden_size
        self.q_proj = nn.Linear(dim, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=False)
        if self.qk_norm is not None:
            # of each norm
            q_heads, k_heads = (1, 1) if self.qk_norm == "head" else (self.heads, self.kv_heads)
            self.q_norm = RMSNorm(
                q_heads * self.head_dim, config.norm_eps, config.zero_centred_norm
            )
            self.k_norm = RMSNorm(
                k_heads * self.head_dim, config.norm_eps, config.zero_centred_norm
            )
        self.g_proj = (
            nn.Linear(dim, self.heads * self.head_dim, bias=False)
            if options["output_gate"]
            else None
        )
        self.o_proj = nn.Linear(self.heads * self.head_dim, dim, bias=False)

    def forward(self, x, tokens, cache):
        """x [B, T, dim] -> [B, T, dim]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        k = k * self.key_factor
        if self.rotary[0] is not None:
            cos, sin = tokens.angles(self.rotary, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = (
                torch.cat([cache[n], y], 2) if n in cache else y for n, y in (("k", k), ("v", v))
            )
            cache.update(k=k, v=v)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        mask = tokens.mask(k.shape[2])
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        o = o.transpose(1, 2).flatten(2)
        o = o if self.g_proj is None else o * self.g_proj(x).sigmoid()
        return self.o_proj(o) * self.out_factor


def rotate(x, cos, sin):
    """Rotary embedding of the first 2·half channels of x [B, H, T, D], halves against each other; cos [.., T, half]."""
    half = cos.shape[-1]
    a, b, rest = widen(x).split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class Tokens:
    """Where the T tokens of a forward lie: positions [B or 1, T], and is_text [B, earlier + T], False for padding."""

    def __init__(self, length, earlier, attention_mask, device):
        self.length, self.device, self.is_text = length, device, None
        self.positions = torch.arange(earlier, earlier + length, device=device)[None]
        if attention_mask is not None and not attention_mask.all():
            self.is_text = attention_mask.bool()
            self.positions = (self.is_text.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        self.known = {}

    def angles(self, rotary, dtype):
        """cos and sin [B or 1, 1, T, rotated / 2], from angles in float64."""
        if rotary not in self.known:
            frequencies, factor = inverse_frequencies(*rotary, self.device)
            angle = (self.positions.double().unsqueeze(-1) * frequencies).unsqueeze(1)
            dtype = torch.promote_types(dtype, torch.float32)
            self.known[rotary] = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
        return self.known[rotary]

    def mask(self, keys):
        """[B or 1, 1, T, keys], True where a query sees a key; None: as many keys as queries, causal."""
        if self.is_text is None and keys == self.length:
            return None
        key = torch.arange(keys, device=self.device)
        query = torch.arange(keys - self.length, keys, device=self.device)
        seen = (key <= query[:, None])[None, None]
        if self.is_text is not None:
            # a row of padding sees itself
            seen = seen & self.is_text[:, None, None] | (key == query[:, None])
        return seen


# --- The model -------------------------------------------------------------------------------------------------------

MIXERS = {"kda": KDA, "gdn": GDN, "attention": Attention}


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); post-norm: x + norm(attn(x)), x + norm(mlp(x))."""

    def __init__(self, config, options):
        super().__init__()
        self.post_norm = options["kind"] in config.post_norm
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centred_norm)
        self.attn = MIXERS[options["kind"]](config, options)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centred_norm)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x, tokens, cache):
        if self.post_norm:
            x = x + self.attn_norm(self.attn(x, tokens, cache))
            return x + self.mlp_norm(self.mlp(x))
        x = x + self.attn(self.attn_norm(x), tokens, cache)
        return x + self.mlp(self.mlp_norm(x))


class LayerCaches:
    """What the layers keep of the tokens read so far."""

    def __init__(self, num_layers):
        self.layers = [{} for _ in range(num_layers)]
        self.length = 0

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        """Reorder the rows, for beam search."""
        for layer in self.layers:
            layer.update(
                {name: x.index_select(0, beam_idx.to(x.device)) for name, x in layer.items()}
            )


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        pattern = config.pattern
        self.layers = nn.ModuleList(
            Block(config, pattern[i % len(pattern)]) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centred_norm)

    def forward(self, x, tokens, caches):
        for i, layer in enumerate(self.layers):
            x = layer(x, tokens, None if caches is None else caches.layers[i])
        return self.norm(x)


class TitanLinearForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TitanLinearConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block",)
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    # rounding to bfloat16 would change a text's decay
    _keep_in_fp32_modules_strict = ("A_log", "dt_bias")
    _is_stateful = True  # tokens that were read cannot be taken back: no assisted generation

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # it has its own, which forward creates

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        caches = kwargs.get(CACHE)
        unread = input_ids if caches is None else input_ids[:, caches.length :]
        names = (CACHE, "attention_mask", "use_cache", "logits_to_keep")
        return {"input_ids": unread, **{name: kwargs[name] for name in names if name in kwargs}}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        return_dict=None,
        num_items_in_batch=None,
        cache=None,
        **kwargs,
    ):
        """input_ids [B, T] -> logits [B, T, vocab], of the last `logits_to_keep` tokens only, unless that is 0.

        attention_mask [B, earlier tokens + T]: 0 for padding. labels [B, T], −100: none; the loss is their mean,
        or their sum over `num_items_in_batch`, the number of labels of all batches whose gradients are added up.
        """
        x = self.model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        caches = past_key_values if cache is None else cache
        if caches is None and (not self.training if use_cache is None else use_cache):
            caches = LayerCaches(self.config.num_hidden_layers)
        tokens = Tokens(
            x.shape[1], 0 if caches is None else caches.length, attention_mask, x.device
        )
        x = self.model(x, tokens, caches)
        if caches is not None:
            caches.length += tokens.length
        logits = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            of = widen(logits[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
            whole = num_items_in_batch is None
            loss = (
                F.cross_entropy(*of)
                if whole
                else F.cross_entropy(*of, reduction="sum") / num_items_in_batch
            )
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: caches})
        return out.to_tuple() if return_dict is False else out


# Models with one kind of linear layer have flash-linear-attention's names for them: that library opens them too.


class KDAConfig(TitanLinearConfig):
    model_type = "kda"


class KDAForCausalLM(TitanLinearForCausalLM):
    config_class = KDAConfig


class GatedDeltaNetConfig(TitanLinearConfig):
    model_type = "gated_deltanet"


class GatedDeltaNetForCausalLM(TitanLinearForCausalLM):
    config_class = GatedDeltaNetConfig
