"""RWKV-7 ("Goose"): time mixing, then channel mixing, in folders of flash-linear-attention and files of RWKV-LM."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.families.keys import (
    Json,
    Keys,
    Part,
    Row,
    always,
    derived,
    either,
    mixer,
    names_of_model,
    only,
    plain,
    table,
    written,
)
from titan_linear.models.mixers import RWKV7

# --- config.json -----------------------------------------------------------------------------------------------------


def _read_heads(key: Keys) -> Json:
    dim = key("hidden_size")
    if key("value_dim", None) not in (None, dim, [dim] * key("num_hidden_layers")):
        raise ValueError(
            f"config.json: value_dim = {key('value_dim')}; only hidden_size = {dim} is known"
        )
    head_dim = key("head_dim", 64) or dim // key("num_heads")
    if dim % head_dim:
        raise ValueError(
            f"config.json: hidden_size = {dim} is no multiple of head_dim = {head_dim}; fetch it again"
        )
    return dict(heads=dim // head_dim, head_dim=head_dim)


def _hidden_dim(key: Keys) -> int:
    return 32 * -(-int(key("hidden_size") * (key("hidden_ratio", None) or 4)) // 32)


MIXER = Part(
    RWKV7,
    Row(_read_heads, lambda mixer: dict(head_dim=mixer.head_dim)),
    plain(
        w_rank=("decay_low_rank_dim", 64),
        a_rank=("a_low_rank_dim", 64),
        v_rank=("v_low_rank_dim", 16),
        g_rank=("gate_low_rank_dim", 128),
    ),
)
OPTIONS = dict(layer_norm=True, activation="shifted_relu2")
KEYS = table(
    "rwkv7",
    names_of_model(("norm_eps", 1e-5)),
    either("hidden_dim", "intermediate_size", _hidden_dim, None),
    always("hidden_act", "sqrelu"),
    derived(pattern=lambda key: (MIXER.read(key),)),
    mixer(MIXER),
    always("norm_first", True),
    always("norm_bias", True),
    only("attn", None),
    written(fuse_norm=False),  # FLA's fused norms add 1e-6 to the squares of keys
    **OPTIONS,
)
# --- RWKV-LM's files -------------------------------------------------------------------------------------------------

_RWKV_LM = {  # parts of our names -> of theirs
    "embedding_norm.": "blocks.0.ln0.",
    "embedding.": "emb.",
    "head.norm.": "ln_out.",
    "layers.": "blocks.",
    "mixer_norm.": "ln1.",
    "mlp_norm.": "ln2.",
    "_lora.down.weight": "1",  # transposed
    "_lora.up.weight": "2",  # transposed
    "_lora.bias": "0",
    "g_norm": "ln_x",
    "r_proj": "receptance",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "up_proj": "key",
    "down_proj": "value",
    "mixer.": "att.",
    "mlp.": "ffn.",
}
_UNUSED = {f"blocks.0.att.v{n}" for n in range(3)}  # the first layer's, which files have


def from_rwkv_lm(tensors: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The tensors of a .pth file of RWKV-LM -> the model, and its parameters by our names: views.

    Raises:
        ValueError: they are not exactly those of an RWKV-7; the message names one.
    """
    named = isinstance(tensors, dict) and all(isinstance(at, str) for at in tensors)
    if not named or not all(
        isinstance(x, Tensor) and x.is_floating_point() for x in tensors.values()
    ):
        raise ValueError(
            f"this {type(tensors).__name__} is no RWKV-7; give a file of tensors of floats by name"
        )
    model = _model_of(tensors)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(model).named_parameters()}
    names = {name: _rwkv_lm(name) for name in shapes}
    if others := sorted(tensors.keys() - set(names.values()) - _UNUSED):
        raise ValueError(f"{others[0]} is no tensor of an RWKV-7; other versions are not read")
    parameters = {}
    for name, shape in shapes.items():
        x = _tensor(tensors, names[name])
        if x.numel() != math.prod(shape):
            raise ValueError(
                f"{names[name]} is {list(x.shape)}, other than {list(shape)}; fetch it again"
            )
        parameters[name] = (x.T if name.endswith(("down.weight", "up.weight")) else x).reshape(
            shape
        )
    return model, parameters


def _model_of(tensors: dict[str, Tensor]) -> ModelConfig:
    def sizes(name: str) -> torch.Size:
        if (x := _tensor(tensors, name)).ndim != 2:
            raise ValueError(
                f"{name} is {list(x.shape)}, of other than two dimensions; fetch it again"
            )
        return x.shape

    num_layers = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    heads, head_dim = sizes("blocks.0.att.r_k")
    ranks = {f"{x}_rank": sizes(f"blocks.{num_layers - 1}.att.{x}1")[1] for x in "wavg"}
    vocab_size, dim = sizes("emb.weight")
    mixer = RWKV7(heads=heads, head_dim=head_dim, **ranks)
    hidden_dim, _ = sizes("blocks.0.ffn.key.weight")
    return ModelConfig(vocab_size, dim, (mixer,), num_layers, hidden_dim, **OPTIONS)


def _tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(
            f"{name} is missing, so that this is no RWKV-7; other versions are not read"
        )
    return tensors[name]


def _rwkv_lm(name: str) -> str:
    for ours, theirs in _RWKV_LM.items():
        name = name.replace(ours, theirs)
    return name
