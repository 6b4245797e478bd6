"""Models of flash-linear-attention: KDA or Gated DeltaNet, with optional softmax layers.

Softmax layers are listed in `attn`.

The folders that we write also open without that library, with this package installed, by
modeling_titan_linear.py (see remote.py).
"""

from titan_linear.models.config import ModelConfig
from titan_linear.models.families.keys import (
    Json,
    Keys,
    Part,
    Row,
    always,
    beta_range,
    changed,
    derived,
    either,
    mixer,
    names_of_model,
    only,
    plain,
    shortest,
    table,
    written,
)
from titan_linear.models.families.remote import remote_code
from titan_linear.models.mixers import GDN, KDA, Attention


def _read_spec(key: Keys) -> Json:
    """Read `attn`: the options of softmax layers, and their indices."""
    specs = key("attn", None) or []
    specs = [specs] if isinstance(specs, dict) else specs
    kinds = [{**spec, "layers": None} for spec in specs]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            "config.json: attn has layers of several kinds; only one kind of softmax layer is known"
        )
    return dict(*kinds[:1], layers=[i for spec in specs for i in spec["layers"]])


SOFTMAX = Part(
    Attention,
    plain(heads="num_heads"),
    either("kv_heads", "num_kv_heads", lambda spec: spec("num_heads"), None),
    derived(head_dim=lambda spec: spec("hidden_size") // spec("num_heads")),
    always("qkv_bias", False),
    always("window_size", None),
    changed(
        "rope_theta", "rope_theta", lambda theta: float(theta or 10000.0), lambda theta: theta, None
    ),
)


# All softmax layers are of one kind.
def _write_softmax(model: ModelConfig) -> Json:
    layers = [i for i, layer in enumerate(model.layers) if isinstance(layer.mixers[0], Attention)]
    return {"attn": {"layers": layers, **mixer(SOFTMAX).write(model)} if layers else None}


# Softmax layers at the indices of `attn`, linear ones elsewhere.
def _pattern(linear: Part) -> Row:
    def read(key: Keys) -> Json:
        layers = range(key("num_hidden_layers"))
        spec = _read_spec(key)
        softmax = set(spec["layers"])
        attention = (
            SOFTMAX.read(Keys(spec | {"hidden_size": key("hidden_size")})) if softmax else None
        )
        other = None if softmax >= set(layers) else linear.read(key)
        return {"pattern": shortest([attention if i in softmax else other for i in layers])}

    return Row(read, _write_softmax)


def _hidden_dim(key: Keys) -> int:
    """Return the multiple of 256 at or above 2/3 · hidden_ratio · hidden_size."""
    return 256 * -(-int(key("hidden_size") * (key("hidden_ratio", None) or 4) * 2 / 3) // 256)


# The options that KDA and Gated DeltaNet share.
def _linear(kind: type[KDA] | type[GDN], expand: float, *rows: Row) -> Part:
    return Part(
        kind,
        plain(heads="num_heads"),
        either("v_heads", "num_v_heads", lambda key: key("num_heads"), None),
        plain(head_dim="head_dim"),
        Row(
            lambda key: {"v_head_dim": int(key("head_dim") * key("expand_v", expand))},
            lambda linear: {"expand_v": linear.v_head_dim / linear.head_dim},
        ),
        plain(conv_size=("conv_size", 4)),
        beta_range("allow_neg_eigval", False),
        *rows,
    )


# Everything outside the linear layer is the same for both.
def _keys(name: str, model_type: str, linear: Part) -> Part:
    return table(
        model_type,
        *(Row(write=row.write) for row in remote_code(name)),
        names_of_model(("norm_eps", 1e-6)),
        either("hidden_dim", "intermediate_size", _hidden_dim, None),
        always("hidden_act", "swish", "silu"),
        always("use_short_conv", True),
        always("use_gate", True),
        only("attnres_block_size", None),
        written(attn=None),
        mixer(linear),
        _pattern(linear),
    )


# KDA's gate has a lower bound if `safe_gate` is set.
BOUND = Row(
    lambda key: {"lower_bound": key("lower_bound", None)},
    lambda kda: {"safe_gate": kda.lower_bound is not None, "lower_bound": kda.lower_bound},
)
FLA_KDA = _keys("KDA", "kda", _linear(KDA, 1.0, BOUND))
FLA_GDN = _keys("GatedDeltaNet", "gated_deltanet", _linear(GDN, 2.0))
