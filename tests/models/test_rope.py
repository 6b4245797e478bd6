"""Scaled rotary frequencies are those of transformers, and extend a model that is already there."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    modeling_rope_utils,
)

from tests.models import hf_models
from tests.records import read_json, write_json
from tests.refusals import refused
from titan_linear.models.config import fingerprint
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import config_from_hf, config_to_hf
from titan_linear.models.layers import rotate
from titan_linear.models.mixers import Attention
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset
from titan_linear.models.rope import RopeScaling, inverse_frequencies
from titan_linear.storage.hf_io import POSITIONS, check_folder, load_weights, read_model
from titan_linear.storage.hf_writing import gather, write_folder

LONG = {"factor": 4.0, "original_max_position_embeddings": 262144}
SCALINGS = {
    "linear": dict(rope_type="linear", factor=3.0),
    "llama3": dict(rope_type="llama3", **LONG, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": dict(rope_type="yarn", **LONG),
    "yarn, not truncated": dict(
        rope_type="yarn", **LONG, truncate=False, beta_fast=20.0, beta_slow=2.0
    ),
    "yarn, own factor on scores": dict(rope_type="yarn", **LONG, attention_factor=1.25),
    "yarn, DeepSeek's factor": dict(rope_type="yarn", **LONG, mscale=1.0, mscale_all_dim=0.7),
    "yarn, half of DeepSeek's factor": dict(rope_type="yarn", **LONG, mscale=1.0),
    "yarn, factor 1": dict(rope_type="yarn", factor=1.0, original_max_position_embeddings=64),
    "yarn, a ramp of no width": dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=6
    ),
}


class Float64:
    """torch, where transformers asks for float32 by name."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("theta, dim", [(1e7, 64), (1e4, 128), (500000.0, 6)])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, theta, dim, monkeypatch):
    """In float64, to the last places; and ours, where they are applied, are of these."""
    monkeypatch.setattr(modeling_rope_utils, "torch", Float64())
    given = SCALINGS[name]
    config = LlamaConfig(
        head_dim=2 * dim,
        rope_parameters=given | dict(rope_theta=theta, partial_rotary_factor=0.5),
        hidden_size=64,
    )
    expected, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[given["rope_type"]](
        config, torch.device("cpu")
    )
    assert expected.dtype == torch.float64 and len(expected) == dim // 2
    attention = Attention(
        heads=1,
        kv_heads=1,
        head_dim=2 * dim,
        rope_theta=theta,
        rotary_fraction=0.5,
        rope_scaling=RopeScaling(**given),
    )
    found, ours = inverse_frequencies(*attention.rotary)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert ours == pytest.approx(factor, rel=1e-15)
    x, at = torch.randn(1, 1, 1, 2 * dim, dtype=torch.float64), torch.tensor([1_000_000])
    turned = rotate(x, *BatchPlan(at).angles(attention.rotary, torch.float64)).flatten()
    a, b, rest = x.flatten().split([dim // 2, dim // 2, dim])
    cos, sin = (factor * f(1_000_000 * expected) for f in (torch.cos, torch.sin))
    torch.testing.assert_close(
        turned, torch.cat([a * cos - b * sin, b * cos + a * sin, rest]), rtol=0, atol=1e-8
    )


def test_numbers_without_a_point_are_the_same_model():
    model = preset("qwen3.5", "debug")
    scaled = [
        fingerprint(
            replace(
                model,
                pattern=tuple(replace(m, rope_scaling=s) if m.rotary else m for m in model.pattern),
            )
        )
        for s in (
            None,
            *(RopeScaling(rope_type="linear", factor=factor) for factor in (2, 2.0, 3.0)),
        )
    ]
    assert len(set(scaled)) == 3 and scaled[1] == scaled[2] and scaled[0] == fingerprint(model)


def test_the_context_that_a_folder_does_not_name():
    """It is the folder's longest, as in transformers; keys that the type does not use say nothing."""
    written = config_to_hf("Qwen3_5ForCausalLM", preset("qwen3.5", "2B")) | {
        "max_position_embeddings": 262144
    }
    old = {
        "type": "yarn",
        "factor": 4,
        "beta_fast": None,
        "low_freq_factor": 3.0,
        "mrope_section": [11, 11, 10],
    }
    for key in ("rope_parameters", "rope_scaling"):
        attention = (
            config_from_hf(written | {key: {**old, "rope_theta": 1e7}})[1].layers[3].mixers[0]
        )
        assert attention.rope_scaling == RopeScaling(rope_type="yarn", **LONG)
        assert (attention.rope_theta, attention.rotary_fraction) == (1e7, 0.25)


@pytest.mark.parametrize("older", [False, True])
def test_an_extended_model_leaves_a_folder_that_says_so(older, tmp_path):
    """Of a folder with vision beside the text: its other keys stay, and transformers turns as we do."""
    text = hf_models.QWEN | dict(intermediate_size=48, max_position_embeddings=64)
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32)
    outer = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    hf_models.randomise(outer).save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    written = read_json(source / "config.json")
    section = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    named = {
        "rope_scaling" if older else "rope_parameters": {
            "rope_type": "linear",
            "factor": 2.0,
            **section,
        }
    }
    named |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25} if older else {}
    written["text_config"] = {
        k: v for k, v in written["text_config"].items() if k != "rope_parameters"
    } | named
    write_json(source / "config.json", written)
    family, model = read_model(source)
    decoder = Decoder(model)
    load_weights(source, decoder)
    yarn = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    longer = tuple(
        replace(m, rope_theta=1e5, rope_scaling=yarn) if m.rotary else m for m in model.pattern
    )
    write_folder(
        tmp_path / "out",
        replace(model, pattern=longer),
        family,
        gather(decoder),
        dtype=torch.float32,
        like=source,
    )
    config = read_json(tmp_path / "out/config.json")
    rope, theirs = (
        config["text_config"]["rope_parameters"],
        config_to_hf(family, replace(model, pattern=longer)),
    )
    check_folder(source, replace(model, pattern=longer), POSITIONS)
    with refused(r"is another model: attention.rope_theta = 10000.0 \(this run: 100000.0\), att"):
        check_folder(source, replace(model, pattern=longer))
    assert rope == theirs["rope_parameters"] | (section if not older else {})
    assert config["text_config"]["max_position_embeddings"] == 256
    assert (
        not {"rope_scaling", "rope_theta", "partial_rotary_factor"} & config["text_config"].keys()
    )
    assert "rope_parameters" not in config and config["vision_config"] == written["vision_config"]
    assert read_model(tmp_path / "out")[1].pattern == longer
    opened = Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path / "out"
    ).model.language_model.rotary_emb
    frequencies, factor = inverse_frequencies(*longer[1].rotary)
    torch.testing.assert_close(opened.inv_freq, frequencies.float(), rtol=1e-6, atol=0)
    assert opened.attention_scaling == pytest.approx(factor)


def test_positions_that_a_config_cannot_name(tmp_path):
    """They are refused before the run, not by its export."""
    hf_models.MODELS["Nemotron-H"]().save_pretrained(tmp_path)
    _, model = read_model(tmp_path)
    pattern = tuple(
        replace(m, rope_theta=1e4) if isinstance(m, Attention) else m for m in model.pattern
    )
    with refused(r"cannot hold this model: attention.rope_theta = 10000.0"):
        check_folder(tmp_path, replace(model, pattern=pattern), POSITIONS)
