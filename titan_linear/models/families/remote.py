"""Keys of a config.json for modeling_titan_linear.py, the file with which transformers
opens our models with our layers."""

from dataclasses import MISSING, asdict, fields
from pathlib import Path

from titan_linear.models.config import MixerOptions
from titan_linear.models.families.keys import (
    HIDDEN_DIM,
    Json,
    Keys,
    Row,
    changed,
    names_of_model,
    plain,
    table,
    written,
)
from titan_linear.models.mixers import MIXERS
from titan_linear.models.rope import RopeScaling

MODELING = Path(__file__).parents[1] / "modeling_titan_linear.py"


def remote_code(name: str) -> tuple[Row, ...]:
    """Return the rows for a folder with FLA's tensor names. `name`: the file's class name
    without Config or ForCausalLM."""
    classes = {"AutoConfig": f"{name}Config", "AutoModelForCausalLM": f"{name}ForCausalLM"}
    return (
        written(auto_map={auto: f"{MODELING.stem}.{own}" for auto, own in classes.items()}),
        names_of_model("norm_eps"),
        HIDDEN_DIM,
        plain(zero_centred_norm="zero_centred_norm"),
        changed("post_norm", "post_norm", tuple, list),
        Row(
            _read_pattern,
            lambda model: {"pattern": [{"kind": m.name, **asdict(m)} for m in model.pattern]},
        ),
    )


def _read_pattern(key: Keys) -> Json:
    pattern = key("pattern")
    if not (
        isinstance(pattern, list)
        and pattern
        and all(isinstance(options, dict) for options in pattern)
    ):
        raise ValueError(
            f"config.json: pattern = {pattern!r}; give a list of a mixer's options each"
        )
    return {"pattern": tuple(_mixer(options) for options in pattern)}


def _mixer(options: Json) -> MixerOptions:
    kind = MIXERS.get(options.get("kind"))
    if kind is None:
        raise ValueError(
            f"config.json: pattern has an unknown kind, {options.get('kind')!r}; export the model again"
        )
    # Compare the options with the kind's fields. Later versions may add options that have
    # defaults.
    names = {"kind", *(f.name for f in fields(kind))}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    if not needed <= options.keys() <= names:
        wrong = {
            "lacks": sorted(needed - options.keys()),
            "has unknown": sorted(options.keys() - names),
        }
        said = " and ".join(f"{verb} {keys}" for verb, keys in wrong.items() if keys)
        raise ValueError(f"config.json: pattern {said}; export the model again")
    if rope := options.get("rope_scaling"):
        options = {**options, "rope_scaling": RopeScaling(**rope)}
    return kind(**{name: value for name, value in options.items() if name != "kind"})


# Models that no published architecture covers: any order of KDA, GDN and softmax layers,
# with FLA's tensor names.
KEYS = table("titan_linear", *remote_code("TitanLinear"))
