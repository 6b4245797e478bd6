"""modeling_titan_linear.py, which our folders take along: it is our models, as transformers opens them."""

import importlib
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.dynamic_module_utils import check_imports

from tests.models.ours import initialised, loss_of
from tests.records import read_json, write_json
from tests.refusals import refused
from titan_linear.models.decoder import Decoder
from titan_linear.models.families.remote import MODELING
from titan_linear.models.hf_mapping import config_from_hf, config_to_hf
from titan_linear.models.mixers import KDA, MLA, Attention
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import OWN, preset
from titan_linear.models.rope import RopeScaling
from titan_linear.run.generate import Sampling, generate_tokens
from titan_linear.storage.hf_io import load_weights, open_folder, read_model
from titan_linear.storage.hf_writing import find_family, gather, write_folder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

T = 77  # not a multiple of the chunk
HYBRID = preset("hybrid", "debug")
_KDA, _GDN, _ATTENTION = HYBRID.pattern
YARN = RopeScaling(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=24,
    mscale=1.0,
    mscale_all_dim=0.5,
)
# Every option that the presets leave out, in models that no published architecture holds.
MODELS = {
    **{f"{name} debug": flavors["debug"] for name, flavors in OWN.items()},
    "hybrid 340M, small": replace(
        HYBRID,
        pattern=(
            KDA(heads=4, v_heads=4, head_dim=16, v_head_dim=16),
            replace(_ATTENTION, rope_theta=None, output_gate=False),
        ),
        tie_embeddings=True,
    ),
    "unbounded gates, negative eigenvalues": replace(
        HYBRID,
        pattern=(
            replace(_KDA, lower_bound=None, gate_bias=False, beta_range=2.0, o_norm_eps=1e-3),
            replace(_GDN, beta_range=2.0, conv_size=3, v_head_dim=48),
        ),
    ),
    "zero-centred, whole gates, partial rotary, YaRN": replace(
        HYBRID,
        zero_centred_norm=True,
        pattern=(
            replace(_KDA, low_rank_gates=False),
            replace(
                _ATTENTION,
                rotary_fraction=0.25,
                rope_theta=500.0,
                rope_scaling=YARN,
                key_factor=0.7,
                out_factor=0.6,
            ),
        ),
    ),
    "post-norm, over the width": replace(
        HYBRID,
        post_norm=("attention",),
        pattern=(_GDN, _KDA, replace(_ATTENTION, qk_norm="width")),
    ),
    "FLA's hybrid": replace(
        HYBRID,
        pattern=(replace(_KDA), Attention(heads=4, kv_heads=2, head_dim=32)),
        norm_eps=1e-3,
    ),
}
FAMILIES = {
    "kda debug": "KDAForCausalLM",
    "gdn debug": "GatedDeltaNetForCausalLM",
    "FLA's hybrid": "KDAForCausalLM",
}


@torch.no_grad()
def randomise(model):
    """Initial values of norms, gates and biases would hide a name in the place of another. Decay is slow."""
    rng = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=rng)
        if name.endswith("A_log"):
            p.copy_(-1 + 0.5 * noise)
        elif p.dim() > 1:
            p.copy_(noise * p.shape[-1] ** -0.5)
        else:
            p.add_(0.2 * noise)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, done = tmp_path_factory.mktemp("own"), {}

    def get(name):
        if name not in done:
            config, folder = MODELS[name], root / str(len(done))
            model = initialised(config, 1)
            randomise(model)
            write_folder(folder, config, find_family(config), gather(model), dtype=torch.float32)
            done[name] = folder, model
        return done[name]

    return get


def theirs(folder, dtype=torch.float32):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=dtype
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def tokens_of(rows, length=T):
    return torch.randint(320, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_our_model(name, folders):
    """Logits, in float64 to the last places and in float32; the loss and its gradients."""
    folder, ours = folders(name)
    tokens, plan = tokens_of(2), BatchPlan(torch.arange(T))
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, ours = theirs(folder, dtype), ours.to(dtype)
        with torch.no_grad():
            found, expected = model(tokens).logits, ours(tokens, plan)
        assert found.dtype == dtype
        assert (found - expected).norm() < bound * expected.norm()
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    ours.zero_grad()
    loss = ours(tokens, plan, loss=loss_of(labels))
    loss.backward()
    out = model.train()(tokens, labels=tokens)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss.item() / (2 * (T - 1)), rel=1e-5)
    # as transformers' Trainer asks for
    counted = model(tokens, labels=tokens, num_items_in_batch=10).loss
    assert counted.item() == pytest.approx(loss.item() / 10, rel=1e-5)
    grad = ours.embedding.weight.grad / (2 * (T - 1))
    assert (model.model.embeddings.weight.grad - grad).norm() < 1e-4 * grad.norm()


@pytest.mark.parametrize("name", MODELS)
def test_generation(name, folders):
    """With a cache and without one, as ours; prompts of other lengths in one batch do not change a row's text."""
    folder, ours = folders(name)
    model, rows = theirs(folder), [row.tolist() for row in tokens_of(2, 40)]
    rows[1] = rows[1][:9]
    cpu = torch.device("cpu")
    expected = generate_tokens(
        ours.float(), rows, max_new_tokens=12, sampling=Sampling(), device=cpu
    )
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    padded = torch.tensor([rows[0], [0] * 31 + rows[1]])
    mask = torch.ones_like(padded)
    mask[1, :31] = 0
    for use_cache in (True, False):
        out = model.generate(padded, attention_mask=mask, use_cache=use_cache, **options)
        assert out[:, 40:].tolist() == expected
        for row, new in zip(rows, expected):
            alone = model.generate(torch.tensor([row]), use_cache=use_cache, **options)
            assert alone[0, len(row) :].tolist() == new
    beams = [
        model.generate(padded[:1], num_beams=3, use_cache=use, **options).tolist()
        for use in (True, False)
    ]
    assert beams[0] == beams[1]


def test_generation_reads_each_token_once_and_warns_of_nothing(folders, monkeypatch):
    """By the cache that this version of transformers hands on, under its own name."""
    model = AutoModelForCausalLM.from_pretrained(folders("hybrid debug")[0], trust_remote_code=True)
    read, warnings, embed = [], [], model.model.embeddings.forward
    monkeypatch.setattr(
        model.model.embeddings, "forward", lambda ids: read.append(ids.shape[1]) or embed(ids)
    )
    monkeypatch.setattr(
        "logging.Logger.warning", lambda _, message, *__, **___: warnings.append(message)
    )
    transformers.utils.logging.warning_once.cache_clear()
    model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    model(torch.arange(5)[None])
    assert read == [5, 1, 1, 5] and not [text for text in warnings if "past_key_values" in text]


@torch.no_grad()
@pytest.mark.parametrize("left", [True, False])
def test_padded_texts_are_read_and_continued_as_alone(left, folders):
    model, tokens = theirs(folders("hybrid debug")[0], torch.float64), tokens_of(2, 40)
    mask = torch.ones_like(tokens)
    mask[1, slice(31) if left else slice(9, None)] = 0
    text = mask.bool()
    read = model(tokens, attention_mask=mask)
    more = tokens_of(2, 43)[:, 40:]
    cache = {"past_key_values": read.get("cache", read.get("past_key_values"))}
    outputs = [read]
    for part in (more, *more.split(1, 1)):  # three tokens at once, and three more one by one
        mask = torch.cat([mask, torch.ones_like(part)], 1)
        outputs.append(model(part, attention_mask=mask, **cache))
    for row, seen in enumerate(text):
        alone = model(torch.cat([tokens[row][seen], more[row], more[row]])[None]).logits[0]
        first, *others = (out.logits[row] for out in outputs)
        assert (torch.cat([first[seen], *others]) - alone).norm() < 1e-10 * alone.norm()
    mask[0, -1] = 0
    with refused("attention_mask: padding follows cached tokens"):
        model(more, attention_mask=mask, **cache)


def test_a_new_model_has_drawn_weights(folders):
    config = AutoConfig.from_pretrained(folders("hybrid debug")[0], trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert all(p.isfinite().all() for p in model.parameters())
    assert (model.model.norm.weight == 1).all()
    layers = [layer.mlp.up_proj.weight for layer in model.model.layers]
    assert layers[0].std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert not torch.equal(layers[0], layers[1])


def test_without_the_package_transformers_says_so(monkeypatch):
    def imported(name):
        if name == "titan_linear":
            raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(ImportError, match=r"titan_linear\. Run .pip install titan_linear"):
        check_imports(MODELING)


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out(name, folders, tmp_path):
    """Our folder comes back with the same bytes, and so does what transformers saves of it."""
    folder, _ = folders(name)
    theirs(folder).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / MODELING.name).read_bytes() == MODELING.read_bytes()
    bytes_of = {
        n: t.file.read_bytes()[t.begin : t.end] for n, t in open_folder(folder).tensors.items()
    }
    for source in (folder, tmp_path / "saved"):
        family, config = read_model(source)
        assert (
            family == FAMILIES.get(name, "TitanLinearForCausalLM")
            and config.layers == MODELS[name].layers
        )
        model, target = Decoder(config), tmp_path / f"again-{source.name}"
        load_weights(source, model)
        write_folder(target, config, family, gather(model), dtype=None, like=source)
        found = {
            n: t.file.read_bytes()[t.begin : t.end] for n, t in open_folder(target).tensors.items()
        }
        assert found == bytes_of
        assert read_json(target / "config.json") == read_json(source / "config.json")
        assert (target / MODELING.name).is_file()


@pytest.mark.parametrize("name", FAMILIES)
def test_flas_names_stay(name, folders):
    """Whoever has flash-linear-attention opens the folder with it: its keys are there, and its class's name."""
    folder, _ = folders(name)
    written = read_json(folder / "config.json")
    assert (
        written["architectures"] == [FAMILIES[name]]
        and written["head_dim"] == 32
        and written["use_short_conv"]
    )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.model_type == written["model_type"] in ("kda", "gated_deltanet")

    class Theirs(PretrainedConfig):  # as that library registers its own when it is imported
        model_type = written["model_type"]

    AutoConfig.register(Theirs.model_type, Theirs)
    try:
        assert type(AutoConfig.from_pretrained(folder)) is Theirs
        assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)) is Theirs
    finally:
        CONFIG_MAPPING._extra_content.pop(Theirs.model_type)


def test_what_the_file_does_not_have():
    latent = MLA(heads=2, kv_rank=16, nope_dim=16, shared_k_dim=8, v_dim=16)
    with refused(r"no Hugging Face architecture .* none has layers gdn, mla"):
        find_family(replace(HYBRID, pattern=(_GDN, latent)))


def test_a_pattern_of_another_time(folders, tmp_path):
    folder, _ = folders("hybrid debug")
    written = read_json(folder / "config.json")
    for change in ({"kind": "mamba"}, {"window": 3}):
        pattern = [{**written["pattern"][0], **change}, *written["pattern"][1:]]
        write_json(tmp_path / "config.json", {**written, "pattern": pattern})
        with refused(r"config.json: pattern has .*(mamba|window)"):
            read_model(tmp_path)
    pattern = [
        {n: x for n, x in mixer.items() if n != "rope_scaling"} for mixer in written["pattern"]
    ]
    write_json(tmp_path / "config.json", {**written, "pattern": pattern})
    assert read_model(tmp_path)[1] == HYBRID  # of a version before that option
    for pattern in ([], "kda", ["kda"]):
        write_json(tmp_path / "config.json", {**written, "pattern": pattern})
        with refused(r"config.json: pattern = .* give a list"):
            read_model(tmp_path)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("beta_range", 1.5, "beta_range = 1.5 of kda: must be 1, or 2"),
        ("beta_range", "two", "beta_range = 'two' of kda: must be 1, or 2"),
        ("head_dim", 0, "kda head_dim = 0, which must be greater than or equal to 1"),
        ("heads", "two", "heads = 'two', which must be a valid integer"),
        ("heads", 2.0, "heads = 2.0, which must be a valid integer"),
        ("gate_bias", 1, "gate_bias = 1, which must be a valid boolean"),
        ("lower_bound", True, r"lower_bound = True, which must be a valid number"),
    ],
)
def test_an_option_of_another_type_or_range(name, value, message):
    config = config_to_hf(find_family(HYBRID), HYBRID)
    assert config_from_hf(config)[1] == HYBRID
    config["pattern"] = [config["pattern"][0] | {name: value}]
    with refused(message):
        config_from_hf(config)


def test_options_take_one_or_two_as_the_range_of_beta():
    assert replace(_GDN, beta_range=2).beta_range == 2
    for value in (0.0, 3.0, "two"):
        with refused(rf"beta_range = {value!r} of gdn: must be 1, or 2"):
            replace(_GDN, beta_range=value)
