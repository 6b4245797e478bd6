"""Published sizes: their config.json is the same model to `transformers`, with as many parameters."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BailingHybridConfig

from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.config.reading import toml_value
from titan_linear.config.schema import NAMES
from titan_linear.models import families
from titan_linear.models.config import MoEConfig, fingerprint, mistake
from titan_linear.models.hf_mapping import config_from_hf, config_to_hf, placements
from titan_linear.models.init import count_parameters
from titan_linear.models.presets import MODELS, OWN, flavors, preset, resized
from titan_linear.models.rope import RopeScaling
from titan_linear.run.origin import FAMILY_OF, Origin
from titan_linear.storage.hf_writing import find_family

BY_THEIR_AUTHORS = {  # of models that transformers lacks, and two others
    ("olmo-hybrid", "7B"): 7_430_870_688,
    ("nemotron-h", "nano-3-4B"): 3_973_556_832,  # 3.97 × 10⁹ in the model's card
    ("rwkv7", "0.1B"): 191_034_624,
    ("rwkv7", "0.4B"): 450_767_872,
    ("rwkv7", "1.5B"): 1_527_404_544,
    ("rwkv7", "2.9B"): 2_947_735_040,
}
PUBLISHED = [
    (n, f) for n in MODELS if n not in OWN for f in MODELS[n] if f != "debug" and n != "rwkv7"
]


def family_of(name, config):
    return FAMILY_OF.get(name) or find_family(config)


def published(name, flavor):
    """The config.json that the preset is read from."""
    return json.loads((Path(families.__file__).parent / f"configs/{name}.json").read_text())[flavor]


DIGESTS = {
    "bamba": "fe50254637997996",
    "falcon-h1": "c0b74cf2c19af029",
    "granite-h": "4e2229f0242a2d58",
    "kimi-linear": "6c1d1d0f3fda404e",
    "lfm2": "12a1a663e83fae4c",
    "lfm2-moe": "e3a65286f55b636f",
    "ling-3": "ae4e85c44916641c",
    "minimax": "8b619ef885989074",
    "nemotron-h": "41cb7fbe228b8cfe",
    "olmo-hybrid": "90567bd248356aba",
    "qwen3-next": "f4740851fffbd86a",
    "qwen3.5": "e6104b14cad5a88c",
    "rwkv7": "754cb4a276568294",
}


def digest(sizes):
    """Of every option of every flavor that is not its default."""
    training = [
        (m.init_std, m.moe and (m.moe.balance_coefficient, m.moe.bias_update_rate))
        for m in sizes.values()
    ]
    parts = [*sizes, *map(fingerprint, sizes.values()), training]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def test_no_number_of_a_published_size_changes():
    assert {name: digest(sizes) for name, sizes in MODELS.items() if name not in OWN} == DIGESTS


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_parameter_counts(name, flavor):
    config = preset(name, flavor)
    written = config_to_hf(family_of(name, config), config)
    model_type = written.pop("model_type")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **written))
    assert type(theirs).__name__ == family_of(name, config)
    assert count_parameters(config) == sum(p.numel() for p in theirs.parameters())
    if name != "kimi-linear":  # whose linear_attn_config transformers does not read
        read = AutoConfig.for_model(**published(name, flavor)).to_dict()
        assert config_from_hf(read | {"architectures": [type(theirs).__name__]}) == (
            type(theirs).__name__,
            config,
        )


def test_parameter_counts_of_their_authors():
    assert {
        which: count_parameters(preset(*which)) for which in BY_THEIR_AUTHORS
    } == BY_THEIR_AUTHORS


@pytest.mark.parametrize("name, flavor", [("qwen3-next", "80B-A3B"), ("kimi-linear", "48B-A3B")])
def test_adapters_of_the_large_ones(name, flavor):
    """The whole table, and that a rank of 64 asks for 1/64 of the elements."""
    config = preset(name, flavor)
    table = placements(config, family_of(name, config))
    whole = sum(e.num_rows * e.width for e in table)
    bias = 256 * 26 if name == "kimi-linear" else 0
    assert whole == count_parameters(config) + bias
    own = 0
    for placement in table:
        per = placement.num_rows // placement.shape[0]
        rows = -(-placement.shape[0] // 64) * per
        own += (
            sum(
                stop - start
                for _, start, stop, _ in placement.pieces(0, min(rows, placement.num_rows))
            )
            * placement.width
        )
    assert own < whole / 64 * 1.05


@pytest.mark.parametrize("name, flavor", [(n, f) for n in MODELS for f in MODELS[n]])
def test_presets_can_be_saved(name, flavor):
    """As their family; a hybrid as ours, for FLA's models do not have its softmax layers."""
    config = preset(name, flavor)
    if name == "hybrid":
        why = "it has no layers gdn" if flavor == "debug" else "attention.qk_norm = 'head'"
        with refused(rf"KDAForCausalLM cannot hold this model: .*{why}"):
            config_to_hf("KDAForCausalLM", config)
    family, back = config_from_hf(config_to_hf(family_of(name, config), config))
    assert family == family_of(name, config)
    assert [(e.name, e.shape) for e in placements(back, family)] == [
        (e.name, e.shape) for e in placements(config, family)
    ]
    if flavor != "debug" and name not in OWN:
        assert back == config


def test_a_dense_qwen3_next():
    """Without experts it is the function of a Qwen3.5, in other names."""
    config = preset("qwen3.5", "0.8B")
    family, back = config_from_hf(config_to_hf("Qwen3NextForCausalLM", config))
    assert back == config
    names = {s.name for e in placements(back, family) for s in e.sources}
    assert (
        "model.layers.0.linear_attn.in_proj_qkvz.weight" in names
        and "model.layers.0.mlp.up_proj.weight" in names
    )


def test_the_table_names_every_preset():
    rows = [line.split()[:2] for line in flavors().partition("\n\n")[0].splitlines()[1:]]
    assert rows == [[name, flavor] for name, sizes in MODELS.items() for flavor in sizes]
    assert sorted(NAMES) == sorted(MODELS)


def test_keys_change_sizes_pattern_and_options():
    keys = [
        "--model.flavor=340M",
        "--model.dim=256",
        "--model.num_layers=6",
        "--model.hidden_dim=512",
    ]
    keys += [
        '--model.pattern=["kda", "attention"]',
        "--model.kda.heads=2",
        "--model.kda.v_heads",
        "4",
    ]
    keys += [
        "--model.attention={heads = 4, kv_heads = 2, rope_theta = 1e4}",
        "--model.kda.lower_bound=",
    ]
    old, new = preset("hybrid", "340M"), resized_by(keys)
    kda, attention = new.pattern
    assert kda == replace(old.pattern[0], heads=2, v_heads=4, lower_bound=None)
    assert attention == replace(old.pattern[-1], heads=4, kv_heads=2, rope_theta=1e4)
    assert new == replace(old, dim=256, num_layers=6, hidden_dim=512, pattern=(kda, attention))
    assert resized_by([]) == preset("hybrid", "debug")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for keys in (
        [f"--model.attention.rope_scaling={toml_value(yarn)}"],
        ["--model.attention.rope_scaling="],
    ):
        expected = RopeScaling(**yarn) if "yarn" in keys[0] else None
        assert resized_by(keys).pattern[2] == replace(
            preset("hybrid", "debug").pattern[2], rope_scaling=expected
        )
    assert resized_by(
        ["--model.moe={num_experts = 4, top_k = 2, hidden_dim = 8}"]
    ).moe == MoEConfig(4, 2, 8)


def test_ling_3_as_published():
    """The defaults of its configuration are those of Ling-3.0-Flash."""
    defaults = BailingHybridConfig().to_dict() | {"architectures": ["BailingHybridForCausalLM"]}
    assert config_from_hf(defaults) == ("BailingHybridForCausalLM", preset("ling-3", "flash"))
    tiny = preset("ling-3", "tiny")  # 7.9B-A1.3B on its card
    folder = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
    }
    assert config_from_hf(published("ling-3", "tiny") | folder) == (
        "BailingHybridForCausalLM",
        tiny,
    )
    sparse = sum(tiny.has_experts(i) for i in range(tiny.num_layers))
    idle = sparse * (128 - 8) * 3 * tiny.dim * tiny.moe.hidden_dim
    assert (count_parameters(tiny), count_parameters(tiny) - idle) == (7_893_389_856, 1_381_732_896)


def test_head_dim_auto_is_what_the_width_leaves():
    falcon = published("falcon-h1", "0.5B") | {"mamba_d_head": "auto"}
    assert config_from_hf(falcon) == ("FalconH1ForCausalLM", preset("falcon-h1", "0.5B"))


def test_keys_put_mixers_side_by_side():
    keys = [
        '--model.pattern=["kda+attention", "gdn"]',
        "--model.attention.kv_heads=1",
        "--model.gdn.conv_size=3",
    ]
    keys += ["--model.num_layers=4"]
    kda, gdn, attention = preset("hybrid", "debug").pattern
    assert resized_by(keys).pattern == (
        (kda, replace(attention, kv_heads=1)),
        replace(gdn, conv_size=3),
    )
    beside = replace(preset("hybrid", "debug"), pattern=((kda, attention),))
    given = load_config(["--model.attention.kv_heads=1"]).model.model_dump()
    assert resized(beside, given).pattern == ((kda, replace(attention, kv_heads=1)),)


def test_options_apply_to_each_layer_of_their_kind():
    kda = preset("kda", "debug").pattern[0]
    model = replace(preset("kda", "debug"), pattern=(kda, replace(kda, lower_bound=None)))
    keys = load_config(["--model.kda.conv_size=3"]).model.model_dump()
    assert resized(model, keys).pattern == (
        replace(kda, conv_size=3),
        replace(kda, conv_size=3, lower_bound=None),
    )


@pytest.mark.parametrize(
    "pattern, num_layers, says",
    [
        ('["kda", "kda", "kda", "attention"]', 4, "3 kda + 1 attention"),
        ('["kda+attention", "gdn"]', 6, "3 kda+attention + 3 gdn"),
        ('["gdn"]', 3, "3 gdn"),
    ],
)
def test_a_pattern_is_repeated_as_a_whole(pattern, num_layers, says):
    model = resized_by([f"--model.pattern={pattern}", f"--model.num_layers={num_layers}"])
    assert model.composition == says and len(model.layers) == num_layers


YARN = "factor = 2.0, original_max_position_embeddings = 64"


def test_logits_are_not_divided_by_0():
    model = replace(preset("granite-h", "debug"), logits_divisor=0)
    assert mistake(model) == "the model's logits_divisor = 0, which must be greater than 0"


def test_the_largest_sizes_can_be_counted():
    most = 2**20 - 1
    model = replace(
        preset("kda", "debug"),
        vocab_size=most,
        dim=most,
        hidden_dim=most,
        moe=MoEConfig(most, 1, most),
    )
    kda = replace(model.pattern[0], heads=1, v_heads=most, head_dim=most, v_head_dim=most)
    model = replace(model, pattern=(kda,))
    assert mistake(model) is None and count_parameters(model) > 2**62


@pytest.mark.parametrize(
    "keys, words",
    [
        (
            ["--model.kda.head=3"],
            r"model.kda.head is not a key; model.kda has heads, v_heads, .*gate_bias",
        ),
        (
            ["--model.kda.heads=x"],
            r"\[model\] gives kda heads = 'x', which must be a valid integer",
        ),
        (
            ["--model.kda.heads=0"],
            r"\[model\] gives kda heads = 0, which must be greater than or equal to 1",
        ),
        (
            ["--model.num_layers=100000000"],
            r"the model's num_layers = 100000000, which must be less than or equal to 10000",
        ),
        (
            ["--model.name=rwkv7", "--model.rwkv7.head_dim=1"],
            r"gives rwkv7 head_dim = 1, of which each head's norm",
        ),
        (["--model.attention.scale=0"], r"gives attention scale = 0, which must be greater than 0"),
        (
            ["--model.kda.v_heads=3"],
            r"gives kda v_heads = 3, which must be a multiple of heads = 2",
        ),
        (
            ["--model.attention.qk_norm=all"],
            r"attention qk_norm = 'all', which must be 'head' or 'width'",
        ),
        (
            ['--model.pattern=["mamba"]'],
            r"\['mamba'\] has 'mamba'; use kda, gdn, .*, mla, mlp, moe",
        ),
        (
            ['--model.pattern=["kda+mlp"]'],
            r"has 'kda\+mlp'; use kda, .*, moe, or mixers with \+ between them",
        ),
        *(
            ([f'--model.pattern=["kda", {rest} "attention"]', *layers], words)
            for rest, layers, words in (
                (
                    '"kda", "kda",',
                    [],
                    r"has 4 layers, which num_layers = 3 does not .*; set model.num_layers .* as 4,",
                ),
                (
                    "",
                    [],
                    r"\['kda', 'attention'\] has 2 layers, which num_layers = 3 does .*num_layers .*as 4, or write",
                ),
                (
                    '"kda",',
                    ["--model.num_layers=10"],
                    r"3 layers, which num_layers = 10 .* a multiple, such as 9, or",
                ),
            )
        ),
        (['--model.pattern=["kda+"]'], r"has 'kda\+'; use kda"),
        (
            ["--model.attention.rope_scaling={factor = 2.0}"],
            r"model.attention.rope_scaling lacks rope_type, which this model.flavor does not have; give",
        ),
        (
            ["--model.attention.rope_scaling={beta = 2.0}"],
            r"rope_scaling.beta is not a key; .* has rope_type, factor,",
        ),
        (
            ["--model.name=qwen3.5", "--model.moe.shared_hidden_dim=0"],
            "shared_gate = True, and shared_hidden_dim = 0",
        ),
        (
            ["--model.name=qwen3.5", "--model.moe.bias_update_rate=1"],
            "selection_bias = False leaves nothing to move",
        ),
        (
            ['--model.pattern=["mlp"]', "--model.mtp_layers=1"],
            "mtp_layers = 1, which take a mixer of the pattern",
        ),
        (
            ["--model.name=qwen3.5", "--model.moe.scale=inf"],
            "scale = inf, which must be a finite number",
        ),
        (
            ["--model.attention.rope_scaling=yarn"],
            r"attention rope_scaling = 'yarn', which must be an instance of RopeScaling",
        ),
        *(
            (
                [
                    f"--model.attention={{rope_theta = {theta}, rope_scaling = {{rope_type = '{kind}', {rest}}}}}"
                ],
                words,
            )
            for theta, kind, rest, words in (
                (
                    "''",
                    "linear",
                    "factor = 2.0",
                    r"attention rope_theta = None, which rope_scaling needs above 1",
                ),
                (
                    1.0,
                    "linear",
                    "factor = 2.0",
                    r"attention rope_theta = 1.0, which rope_scaling needs above 1",
                ),
                (
                    1e4,
                    "linear",
                    "factor = 0.5",
                    r"rope_scaling factor = 0.5, which must be at least 1",
                ),
                (
                    1e4,
                    "linear",
                    "factor = 2.0, truncate = false",
                    r"truncate, which 'linear' does not use",
                ),
                (
                    1e4,
                    "llama3",
                    "factor = 2.0",
                    r"'llama3' without original_max_position_embeddings",
                ),
                (
                    1e4,
                    "yarn",
                    "factor = 2.0, original_max_position_embeddings = 0",
                    r"_embeddings = 0, which must be at least 1",
                ),
                (
                    1e4,
                    "yarn",
                    f"{YARN}, beta_slow = 0.0",
                    r"rope_scaling beta_slow = 0.0, which must be at least 1e-06",
                ),
                (
                    1e4,
                    "yarn",
                    f"{YARN}, beta_slow = 40.0",
                    r"beta_slow = 40.0, which must be below beta_fast = 32.0",
                ),
                (
                    1e4,
                    "yarn",
                    f"{YARN}, truncate = 1",
                    r"rope_scaling truncate = 1, which must be a valid boolean",
                ),
            )
        ),
        (
            ['--model.pattern=["mla"]'],
            r"model.mla lacks heads, kv_rank, .*, which this model.flavor does not have",
        ),
        (
            ["--model.mla.heads=3"],
            r"model.mla is not used: model.pattern = \['kda', 'gdn', 'attention'\] has no 'mla'",
        ),
        (
            ["--model.mamba.heads=3"],
            r"model.mamba is neither a key nor a mixer; mixers are kda, .*, mla",
        ),
        (["--model.moe.top_k=3"], r"model.moe lacks num_experts, hidden_dim, which this"),
        (
            ["--model.flavor=100M"],
            r"'100M' is unknown for 'hybrid'; use .* keys for other sizes: model.dim",
        ),
    ],
)
def test_wrong_keys_of_a_model_are_answered(keys, words):
    with refused(words):
        resized_by(keys)


def resized_by(keys):
    return Origin.of(load_config(keys)).definition


def test_the_example_has_about_100M_parameters():
    model = resized_by(["--job.config_file=train_configs/hybrid_100m.toml"])
    assert count_parameters(model) == pytest.approx(100e6, rel=0.05)
    assert [mixer.name for mixer in model.pattern] == ["kda", "kda", "kda", "attention"]
