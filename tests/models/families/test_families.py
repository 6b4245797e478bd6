"""The families of Hugging Face: our model is theirs, forward and backward, from their files and back to them."""

import json
import math
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.models import hf_models
from tests.models.hf_states import state_from_hf, state_to_hf
from tests.models.ours import State, initialised, labels_of, packed, relative, run, run_on_rank
from tests.ops.inputs import same
from tests.refusals import refused
from titan_linear.models.config import ModelConfig, mistake
from titan_linear.models.decoder import Decoder, LayerCache
from titan_linear.models.hf_mapping import config_from_hf, config_to_hf, ignored, placements
from titan_linear.models.mixers import Attention, Mamba2
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import MODELS, preset
from titan_linear.storage.hf_io import check_folder
from titan_linear.storage.hf_writing import find_family, gather, write_folder

T = 131
DOCUMENTS = {"one document": [0, T], "packed": [0, 37, 38, 96, T]}


@dataclass(frozen=True)
class Case:
    family: str
    config: ModelConfig | None
    disk: State  # as saved by transformers
    live: State  # as in its module
    tokens: Tensor  # [T]
    # documents -> logits, loss, gradients by our names
    references: dict[str, tuple[Tensor, float, State]]

    @property
    def state(self):
        return state_from_hf(self.disk, self.config, self.family)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A family's model and what transformers computes with it, once."""
    done = {}

    def get(name):
        if name not in done:
            done[name] = _case(hf_models.build(name), tmp_path_factory.mktemp("model"))
        return done[name]

    return get


def _case(model, folder):
    written, disk = hf_models.save(model, folder)
    family, config = config_from_hf(written)
    tokens = torch.randint(hf_models.VOCAB, (T,), generator=torch.Generator().manual_seed(1))
    references = {}
    for documents, bounds in DOCUMENTS.items():
        logits, loss, grads = hf_models.reference(model, tokens, bounds)
        references[documents] = logits, loss, state_from_hf(grads, config, family)
    live = {n: t.detach() for n, t in model.state_dict().items()}
    disk, live = (
        {n: t for n, t in x.items() if n not in not_ours(config, family, x)} for x in (disk, live)
    )
    return Case(family, config, disk, live, tokens, references)


def not_ours(config, family, names):
    """Constants, and a head that is the embedding."""
    return ignored(config, family, dict.fromkeys(names, ()))


def check(ours, theirs):
    assert relative(ours[0], theirs[0]) < 1e-5
    assert abs(ours[1] - theirs[1]) < 1e-5 * theirs[1]
    errors = {name: relative(ours[2][name], grad) for name, grad in theirs[2].items()}
    assert ours[2].keys() == errors.keys() and max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_model_is_theirs(name, documents, case):
    c, bounds = case(name), DOCUMENTS[documents]
    plan = packed(bounds)
    check(
        run(c.config, c.state, c.tokens, labels_of(c.tokens, bounds), plan), c.references[documents]
    )


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_model_is_theirs_at_cp_2(name, documents, layout, case, worlds):
    check_at_cp_2(case(name), documents, layout, "auto", worlds)


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_latent_attention_by_every_method(method, layout, case, worlds):
    check_at_cp_2(case("Kimi-Linear"), "packed", layout, method, worlds)


def check_at_cp_2(c, documents, layout, method, worlds):
    tokens = torch.cat([c.tokens, torch.zeros(1, dtype=torch.int64)])  # to a multiple of 4
    ranks = worlds(2).run(
        run_on_rank, c.config, c.state, tokens, DOCUMENTS[documents], layout, method
    )
    logits = torch.empty(T + 1, hf_models.VOCAB)
    for mine, part, _, _ in ranks:
        logits[mine] = part
    for _, _, _, grads in ranks:
        check((logits[:T], sum(r[2] for r in ranks), grads), c.references[documents])


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_decoding_goes_on_from_a_prefix(name, case):
    """Chunks of a text and then single tokens, with caches, give the logits of the whole text. In float64."""
    c = case(name)
    model = Decoder(c.config).double()
    model.load_state_dict(c.state, strict=not c.config.tie_embeddings)
    tokens = torch.stack([c.tokens, c.tokens.flip(0)])
    caches, parts = [LayerCache() for _ in model.layers], []
    with torch.no_grad():
        for start, end in pairwise([0, 70, 72, *range(128, T + 1)]):
            plan = BatchPlan(torch.arange(start, end))
            parts.append(model(tokens[:, start:end], plan, caches=caches))
        whole = model(tokens, BatchPlan(torch.arange(T)))
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_folders_go_in_and_out_unchanged(name, case):
    """In both spellings, each tensor in its own dtype, and config.json."""
    c = case(name)
    assert config_from_hf(config_to_hf(c.family, c.config)) == (c.family, c.config)
    for tensors in (c.disk, c.live):
        mixed = {n: t if "A_log" in n or "norm" in n else t.bfloat16() for n, t in tensors.items()}
        state = state_from_hf(mixed, c.config, c.family)
        back = state_to_hf(
            state, c.config, c.family, {n: tuple(t.shape) for n, t in tensors.items()}
        )
        assert back.keys() == mixed.keys()
        assert all(back[n].dtype == t.dtype and torch.equal(back[n], t) for n, t in mixed.items())
    one, other = c.state, state_from_hf(c.live, c.config, c.family)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_every_row_is_used_once(name, case):
    """The table is a bijection, and pieces of a slice are the slice of the pieces."""
    c = case(name)
    for on_disk in (None, *({n: tuple(t.shape) for n, t in x.items()} for x in (c.disk, c.live))):
        used = {}
        table = placements(c.config, c.family, on_disk)
        assert [e.name for e in table] == [n for n, _ in Decoder(c.config).named_parameters()]
        for placement in table:
            filled = torch.zeros(placement.num_rows, dtype=torch.int64)
            for source, start, stop, row in placement.pieces():
                rows = torch.Size(source.shape).numel() // placement.width
                used.setdefault(source.name, torch.zeros(rows, dtype=torch.int64))[start:stop] += 1
                filled[row : row + stop - start] += 1
            assert (filled == 1).all()
            half = placement.num_rows // 2
            parts = [*placement.pieces(0, half), *placement.pieces(half, placement.num_rows)]
            assert [(s.name, i) for s, a, b, _ in parts for i in range(a, b)] == [
                (s.name, i) for s, a, b, _ in placement.pieces() for i in range(a, b)
            ]
        assert all((rows == 1).all() for rows in used.values())
        assert on_disk is None or used.keys() == on_disk.keys()


def test_errors_list_every_tensor(case):
    c = case("Kimi-Linear")
    broken = dict(c.disk)
    del broken["model.norm.weight"], broken["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    broken["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 32)
    broken["model.layers.7.extra"] = torch.zeros(2)
    with pytest.raises(ValueError) as error:
        state_from_hf(broken, c.config, c.family)
    message = str(error.value)
    for part in (
        "model.norm.weight: missing",
        "experts.5.w2.weight: missing",
        "model.layers.7.extra [2]: not used",
        "q_proj.weight: shape [3, 32], not [32, 32]",
    ):
        assert part in message, message
    assert message.count("\n") == 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        (
            {"rope_scaling": {"rope_type": "ntk"}, "rope_parameters": {"rope_type": "default"}},
            "rope_type = 'ntk', which",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "must be 'linear' | 'llama3'",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling factor = None, which must be a valid number",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope_scaling factor = 0, which must be at least 1",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": "4"}},
            "rope_scaling factor = '4', which must be a valid number",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_scaling 'yarn' without original_max_position_embedd",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "no 'full_attention'; set that",
        ),
        ({"architectures": 3}, "architectures = 3: unknown"),
        ({"layer_types": 3}, "of another kind"),
        ({"rope_scaling": "yarn"}, "of another kind"),
        ({"text_config": "none"}, "of another kind"),
        ({"hidden_size": "wide"}, "dim = 'wide', which must be a valid integer"),
        ({"num_hidden_layers": 10**11}, "num_hidden_layers = 100000000000 is above 10,000; fetch"),
        ({"hidden_size": -1}, "dim = -1, which must be greater than or equal to 1"),
        ({"hidden_size": 10**30}, f"dim = {10**30}, which must be less than 1048576"),
        (
            {"linear_key_head_dim": 10**30},
            f"gdn head_dim = {10**30}, which must be less than 1048576",
        ),
        ({"rms_norm_eps": -1e-6}, "norm_eps = -1e-06, which must be greater than 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0, which must be greater than 0"),
        ({"head_dim": 36}, "attention 9 channels to rotate, which must be even"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}},
            "and at most a head's",
        ),
    ],
)
def test_what_we_do_not_have_is_refused(change, words, case):
    c = case("Qwen3.5, tied")
    written = {
        k: v for k, v in (config_to_hf(c.family, c.config) | change).items() if v is not None
    }
    with refused(words.replace("[", r"\[")):
        config_from_hf(written)


def with_options(name, kind, **options):
    """A family's debug model, whose mixers of this kind have other options."""
    model = MODELS[name]["debug"]
    return replace(
        model,
        pattern=tuple(replace(x, **options) if isinstance(x, kind) else x for x in model.pattern),
    )


@pytest.mark.parametrize(
    "family, model",
    [
        ("GraniteMoeHybridForCausalLM", with_options("granite-h", Mamba2, heads=4)),
        ("GraniteMoeHybridForCausalLM", with_options("granite-h", Mamba2, heads=16)),
        ("KimiLinearForCausalLM", replace(MODELS["kimi-linear"]["debug"], tie_embeddings=True)),
        ("NemotronHForCausalLM", replace(MODELS["nemotron-h"]["debug"], tie_embeddings=True)),
    ],
    ids=["as wide as the model", "four times as wide", "Kimi, tied", "Nemotron, tied"],
)
def test_transformers_computes_what_we_write(family, model, tmp_path):
    from transformers import AutoModelForCausalLM

    ours, tokens = initialised(model), torch.arange(24).unsqueeze(0)
    write_folder(tmp_path / "one", model, family, gather(ours), dtype=torch.float32)
    ours.embedding.weight.data.mul_(2)
    write_folder(tmp_path / "two", model, family, gather(ours), dtype=None, like=tmp_path / "one")
    check_folder(tmp_path / "two", model)
    with torch.no_grad():
        expected = ours(tokens, BatchPlan(torch.arange(24)))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "two")(
            tokens, use_cache=False
        ).logits
    assert relative(theirs, expected) < 1e-5


@pytest.mark.parametrize(
    "family, model, words",
    [
        (
            "GraniteMoeHybridForCausalLM",
            with_options("granite-h", Mamba2, heads=9),
            "mamba2.head_dim = 32; use",
        ),
        (
            "NemotronHForCausalLM",
            replace(
                MODELS["nemotron-h"]["debug"],
                moe=replace(MODELS["nemotron-h"]["debug"].moe, shared_hidden_dim=0),
            ),
            "cannot hold this model: moe = MoEConfig",
        ),
        (
            "Lfm2ForCausalLM",
            with_options("lfm2", Attention, rope_theta=None),
            "of this architecture has positions",
        ),
        (
            "OlmoHybridForCausalLM",
            replace(preset("olmo-hybrid", "7B"), num_layers=3),
            "every layer is gdn, and this",
        ),
    ],
)
def test_what_transformers_would_not_compute_is_not_written(family, model, words):
    with refused(words):
        config_to_hf(family, model)


def test_a_family_of_experts_is_not_asked_for_a_model_without():
    attention = MODELS["hybrid"]["debug"].pattern[2]
    assert (
        find_family(replace(MODELS["hybrid"]["debug"], pattern=(attention,)))
        == "TitanLinearForCausalLM"
    )


def test_rope_by_type_of_layer(case):
    c = case("Qwen3.5, tied")
    written = config_to_hf(c.family, c.config)
    plain = {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.5}
    for rope in (plain, {"full_attention": plain, "linear_attention": {"rope_theta": 5.0}}):
        attention = config_from_hf(written | {"rope_parameters": rope})[1].layers[1].mixers[0]
        assert (attention.rope_theta, attention.rotary_fraction) == (123.0, 0.5)


QWEN, KIMI = ("Qwen3_5MoeForCausalLM", "qwen3.5"), ("KimiLinearForCausalLM", "kimi-linear")


@pytest.mark.parametrize(
    "model, change, words",
    [
        (
            QWEN,
            {"num_key_value_heads": 3},
            "attention heads = 4, which must be a multiple of kv_heads = 3",
        ),
        (
            QWEN,
            {"num_key_value_heads": 8},
            "attention heads = 4, which must be a multiple of kv_heads = 8",
        ),
        (
            QWEN,
            {"linear_num_value_heads": 3},
            "gdn v_heads = 3, which must be a multiple of heads = 2",
        ),
        (
            ("KDAForCausalLM", "kda"),
            {"num_v_heads": 3},
            "kda v_heads = 3, which must be a multiple of heads = 2",
        ),
        (
            ("KDAForCausalLM", "kda"),
            {"lower_bound": -8.0},
            r"kda lower_bound = -8.0, which must be null or lie in",
        ),
        (
            ("KDAForCausalLM", "kda"),
            {"lower_bound": 0},
            r"kda lower_bound = 0, which must be null or lie in",
        ),
        (("KDAForCausalLM", "kda"), {"head_dim": 10**400}, "of another kind .*too large"),
        (
            KIMI,
            {"num_experts_per_token": 99},
            "config.json gives top_k = 99, more than num_experts = 8",
        ),
        (KIMI, {"num_expert_group": 3}, "num_experts = 8 in groups = 3, which must be of one size"),
        (
            KIMI,
            {"num_expert_group": 8},
            "num_experts = 8 in groups = 8, which must be of one size, two or more",
        ),
        (
            KIMI,
            {"moe_intermediate_size": 0},
            "hidden_dim = 0, which must be greater than or equal to 1",
        ),
        (KIMI, {"topk_group": 5}, "top_groups = 5, more than groups = 4"),
        (
            KIMI,
            {"topk_group": 1, "num_experts_per_token": 3},
            "top_k = 3, more than the experts of top_groups = 1",
        ),
    ],
)
def test_numbers_at_odds_are_refused(model, change, words):
    family, name = model
    written = config_to_hf(family, MODELS[name]["debug"])
    assert change.keys() <= written.keys()
    with refused(f"{words}.*; fetch it again"):
        config_from_hf(written | change)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("nemotron-h", {"n_groups": 3}, "mamba2 heads = 8, which must be a multiple of groups = 3"),
        (
            "nemotron-h",
            {"layers_block_type": None, "hybrid_override_pattern": "MXE-"},
            "hybrid_override_pattern has ['X']",
        ),
        (
            "nemotron-h",
            {"layers_block_type": ["mamba", "foo"]},
            "layers_block_type has ['foo']; known are",
        ),
        (
            "nemotron-h",
            {"num_hidden_layers": 7},
            "layers_block_type has 4 layers; num_hidden_layers = 7 must be",
        ),
        (
            "nemotron-h",
            {"time_step_limit": [0.1, 0.001]},
            "time_step_limit = [0.1, 0.001]; give the lower limit",
        ),
        ("nemotron-h", {"time_step_limit": [0.1]}, "time_step_limit = [0.1]; give the lower limit"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'; only 'silu'"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'; only 'relu2'"),
        (
            "granite-h",
            {"mamba_n_groups": 3},
            "mamba2 heads = 8, which must be a multiple of groups = 3",
        ),
        ("granite-h", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; only 'silu'"),
        ("granite-h", {"time_step_limit": ["a", 3]}, "a value is of another kind"),
        (
            "falcon-h1",
            {"mamba_norm_before_gate": True},
            "mamba_norm_before_gate = True; only False is known",
        ),
        (
            "qwen3.5",
            {"output_gate_type": "sigmoid"},
            "output_gate_type = 'sigmoid'; only 'swish' or 'silu' is known",
        ),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate = False; only True is known"),
        ("ling-3", {"no_kda_lora": False}, "no_kda_lora = False; only True is known"),
        ("ling-3", {"rope_interleave": False}, "rope_interleave = False; only True is known"),
        (
            "ling-3",
            {"score_function": "softmax"},
            "score_function = 'softmax'; only 'sigmoid' is known",
        ),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias = True; only False is known"),
        ("falcon-h1", {"mlp_multipliers": [0.5]}, "mlp_multipliers = [0.5]; give 2 numbers"),
        (
            "falcon-h1",
            {"ssm_multipliers": [1, 2, 3, 4]},
            "ssm_multipliers = [1, 2, 3, 4]; give 5 numbers",
        ),
        ("falcon-h1", {"key_multiplier": "a"}, "a value is of another kind"),
        (
            "falcon-h1",
            {"lm_head_multiplier": -1.0},
            "logits_divisor = -1.0, which must be greater than 0",
        ),
        ("kimi-linear", {"q_lora_rank": 16}, "q_lora_rank = 16; only None is known"),
        ("ling-3", {"num_key_value_heads": 2}, "num_key_value_heads = 2; only 4 is known"),
        (
            "ling-3",
            {"kda_lower_bound": -6.0},
            "kda lower_bound = -6.0, which must be null or lie in [-5, 0)",
        ),
        (
            "ling-3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "only rope_type 'default' is known",
        ),
        ("ling-3", {"partial_rotary_factor": 0.25}, "scale or leave out channels"),
        (
            "ling-3",
            {"expert_swiglu_limit_list": [0, 4]},
            "expert_swiglu_limit_list = [0, 4]; only None is known",
        ),
        ("ling-3", {"qk_rope_head_dim": 15}, "mla 15 channels to rotate, which must be even"),
        (
            "minimax",
            {"mlp_alpha_factor": 1.0},
            "'mlp_alpha_factor': 1.0} must be one number; fetch it again",
        ),
        (
            "granite-h",
            {"architectures": None, "ssm_cfg": {"layer": "Mamba2"}},
            "mamba_ssm's own format is not read",
        ),
    ],
)
def test_what_is_not_as_we_have_it_is_refused(name, change, words):
    written = config_to_hf(find_family(MODELS[name]["debug"]), MODELS[name]["debug"]) | change
    with refused(re.escape(words)):
        config_from_hf({key: value for key, value in written.items() if value is not None})


def places(config):
    """Keys, and those of tables."""
    for key, value in config.items():
        yield (key,)
        yield from ((key, name) for name in (value if isinstance(value, dict) else ()))


def at_place(config, place, how):
    """The config.json with nothing, or null, in this place."""
    changed = deepcopy(config)
    table = changed if len(place) == 1 else changed[place[0]]
    del table[place[-1]]
    return changed if how == "missing" else (table.update({place[-1]: None}) or changed)


def as_we_read(config):
    """None: it is refused."""
    try:
        return config_from_hf(config)
    except ValueError:
        return None


@pytest.mark.parametrize("how", ["missing", "null"])
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_what_a_folder_leaves_out_is_as_transformers_has_it(name, how):
    """Of each key in turn: we read what the installed class makes of the rest, or refuse it."""
    model = hf_models.MODELS[name]()
    kind, written = (
        type(model.config),
        model.config.to_dict() | {"architectures": [type(model).__name__]},
    )
    assert as_we_read(written)
    wrong, read = [], 0
    for place in places(written):
        config = at_place(written, place, how)
        if place == ("architectures",) or (ours := as_we_read(config)) is None:
            continue
        try:
            completed = kind.from_dict(deepcopy(config)).to_dict() | {
                "architectures": written["architectures"]
            }
        except (StrictDataclassError, KeyError):  # their class refuses it
            continue
        wrong += [place] * (ours != as_we_read(completed))
        read += 1
    assert not wrong and read > 20, (wrong, read)


def test_limits_of_time_steps():
    """Infinity as an object, as JSON has no number for it, or as Python writes it; transformers' own lower limit."""
    model = MODELS["nemotron-h"]["debug"]
    for low, high in ((0.0, math.inf), (1e-3, math.inf), (1e-3, 0.1)):
        pattern = tuple(
            replace(x, dt_min=low, dt_max=high) if isinstance(x, Mamba2) else x
            for x in model.pattern
        )
        written = config_to_hf("NemotronHForCausalLM", replace(model, pattern=pattern))
        json.dumps(written, allow_nan=False)
        assert 0 <= written["time_step_min"] - low < 1e-300
        for again in (written, written | {"time_step_limit": [low, high]}):
            (mamba,) = (x for x in config_from_hf(again)[1].mixers if isinstance(x, Mamba2))
            assert (mamba.dt_min, mamba.dt_max) == (low, high)


def test_minimax_rotates_part_of_a_head():
    """As many channels as the published config.json says, which has no fraction of them; all without it."""
    written = config_to_hf("MiniMaxForCausalLM", preset("minimax", "text-01")) | {
        "rope_parameters": None
    }
    assert (written["rotary_dim"], written["head_dim"]) == (64, 128)
    for change, share in (({}, 0.5), ({"rotary_dim": 32}, 0.25), ({"rotary_dim": 128}, 1.0)):
        (attention,) = (
            x for x in config_from_hf(written | change)[1].mixers if isinstance(x, Attention)
        )
        assert attention.rotary_fraction == share
    del written["rotary_dim"]
    (attention,) = (x for x in config_from_hf(written)[1].mixers if isinstance(x, Attention))
    assert attention.rotary_fraction == 1.0


def test_no_preset_is_at_odds_with_itself():
    for model in (model for sizes in MODELS.values() for model in sizes.values()):
        assert not mistake(model)


def test_one_group_holds_all_experts(case):
    """Of experts that are not in groups none are left out, whatever `topk_group` says."""
    written = config_to_hf("KimiLinearForCausalLM", MODELS["kimi-linear"]["debug"])
    ungrouped = {"num_expert_group": 1, "topk_group": 3, "num_experts_per_token": 8}
    assert config_from_hf(written | ungrouped)[1].moe.top_k == 8


def test_a_key_of_another_family_says_nothing():
    """Qwen3.5 normalises the weights of experts and has them in every layer, whatever Qwen3-Next's keys say."""
    for family, other in (("Qwen3_5MoeForCausalLM", False), ("Qwen3NextForCausalLM", True)):
        written = config_to_hf(family, MODELS["qwen3.5"]["debug"])
        read = config_from_hf(
            written | {"norm_topk_prob": False, "mlp_only_layers": [0], "intermediate_size": 64}
        )[1]
        assert read.moe.normalise != other and read.dense_layers == ((0,) if other else ())


def test_numbers_without_a_point(case):
    """JSON's 0 and 1 for a coefficient or a scale."""
    c = case("Kimi-Linear")
    moe = replace(c.config.moe, balance_coefficient=0, scale=1)
    assert not mistake(replace(c.config, moe=moe, init_std=0))


def test_a_head_is_tied_as_the_whole_model_says(case):
    """Of a model with vision beside the text: transformers ties by the key outside of text_config."""
    c = case("Qwen3.5, tied")
    text = config_to_hf(c.family, c.config)
    for outside, inside in ((False, True), (True, False)):
        wrapped = text | {
            "tie_word_embeddings": outside,
            "text_config": text | {"tie_word_embeddings": inside},
        }
        assert config_from_hf(wrapped)[1].tie_embeddings == outside


def test_positions_are_said_or_refused():
    """What transformers takes for 10000, vLLM takes for none."""
    written = config_to_hf("OlmoHybridForCausalLM", preset("olmo-hybrid", "7B"))
    for rope in (None, {}, {"rope_type": "default"}):
        with refused("rope_parameters has no 'rope_theta'; set it: null"):
            config_from_hf(written | {"rope_parameters": rope})
    assert (
        config_from_hf(written | {"rope_parameters": {"rope_theta": None}})[1]
        .layers[3]
        .mixers[0]
        .rope_theta
        is None
    )


def without_shared_experts():
    """Their modules have tensors of no elements in the place of a shared expert, and Qwen's still has its gate."""
    types = dict(layer_types=["linear_attention", "full_attention"])
    kimi = KimiLinearConfig(
        **hf_models.KIMI, **hf_models.KIMI_MOE | types | dict(n_shared_experts=0)
    )
    sizes = (
        hf_models.QWEN
        | hf_models.QWEN_MOE
        | dict(shared_expert_intermediate_size=0, intermediate_size=48)
    )
    return {
        "Kimi-Linear": KimiLinearForCausalLM(kimi),
        "Qwen3-Next": Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)),
    }


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", ["Kimi-Linear", "Qwen3-Next"])
def test_a_family_without_shared_experts(name, tmp_path):
    """The model is theirs, its config.json goes there and back, and the key may be null."""
    model = hf_models.randomise(without_shared_experts()[name])
    written, disk = hf_models.save(model, tmp_path)
    family, config = config_from_hf(written)
    assert config.moe.shared_hidden_dim == 0 and not config.moe.shared_gate
    assert config_from_hf(config_to_hf(family, config)) == (family, config)
    keys = written.keys() & {
        "num_shared_experts",
        "n_shared_experts",
        "shared_expert_intermediate_size",
    }
    assert config_from_hf(written | dict.fromkeys(keys)) == (family, config)
    with refused(r"shared_expert.* is missing"):  # transformers has some then
        config_from_hf({k: v for k, v in written.items() if k not in keys})
    tokens, bounds = torch.arange(T) % hf_models.VOCAB, DOCUMENTS["packed"]
    logits, loss, _ = hf_models.reference(model, tokens, bounds)
    plan = packed(bounds)
    ours = run(config, state_from_hf(disk, config, family), tokens, labels_of(tokens, bounds), plan)
    assert relative(ours[0], logits) < 1e-5 and abs(ours[1] - loss) < 1e-5 * loss


def test_vision_language_folders(case):
    """The language model of a folder that holds a vision tower and multi-token prediction too."""
    c = case("Qwen3.5, tied")
    written = config_to_hf(c.family, c.config)
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**written, "architectures": None},
    }
    assert config_from_hf(outer) == (c.family, c.config)
    named = {n.replace("model.", "model.language_model.", 1): t for n, t in c.disk.items()}
    named |= {"model.visual.blocks.0.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    state = state_from_hf(named, c.config, c.family)
    assert same(state, c.state)


def test_experts_of_lfm2_moe_in_float64(case):
    """What it adds to the sum of a token's weights shows: 1e-6. (Its norms and positions are in float32.)"""
    c = case("LFM2-MoE")
    theirs, ours = hf_models.build("LFM2-MoE").double(), Decoder(c.config).double()
    theirs.set_experts_implementation("eager")  # others have no float64
    ours.load_state_dict(c.state, strict=False)
    x = torch.randn(1, T, 32, dtype=torch.float64)
    with torch.no_grad():
        y = ours.layers[1].mlp(x, BatchPlan(torch.arange(T))).y
        assert relative(y, theirs.model.layers[1].feed_forward(x)) < 1e-12


def test_layers_that_predict_further_tokens(case):
    """Ling 3 has them after its last layer."""
    ling, kimi = case("Ling 3"), case("Kimi-Linear")
    more = {"model.layers.2.eh_proj.weight": torch.zeros(2)}
    assert state_from_hf(ling.disk | more, ling.config, ling.family).keys() == ling.state.keys()
    with refused(r"model.layers.2.eh_proj.weight \[2\]: not used"):
        state_from_hf(kimi.disk | more, kimi.config, kimi.family)


# --- flash-linear-attention: what its modules compute, in models of transformers after renaming ----------------------


def rename(tensors, table):
    out = {}
    for name, tensor in tensors.items():
        for old, new in table.items():
            name = name.replace(old, new)
        out[name] = tensor
    return out


BLOCK = {
    "embed_tokens": "embeddings",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attn",
    "linear_attn": "attn",
}


def fla_kda(tmp_path):
    """A Kimi-Linear of KDA and SwiGLUs alone."""
    types = dict(layer_types=["linear_attention"] * 2, mlp_layer_types=["dense"] * 2)
    c = _case(
        hf_models.randomise(KimiLinearForCausalLM(KimiLinearConfig(**hf_models.KIMI, **types))),
        tmp_path,
    )
    names = {
        "block_sparse_moe": "mlp",
        "f_a_proj": "f_proj.0",
        "f_b_proj": "f_proj.1",
        "g_a_proj": "g_proj.0",
        "g_b_proj": "g_proj.1",
    }
    tensors = rename(c.disk, BLOCK | names)
    for i in range(2):
        tensors[f"model.layers.{i}.attn.A_log"] = tensors[f"model.layers.{i}.attn.A_log"].flatten()
        tensors[f"model.layers.{i}.attn.g_proj.1.bias"] = torch.zeros(32)
    written = dict(
        architectures=["KDAForCausalLM"], num_heads=4, head_dim=8, expand_v=1.0, norm_eps=1e-3
    )
    return c, written, tensors


def fla_gdn(tmp_path):
    """A Qwen3.5 of GDN alone, whose norms are zero-centred."""
    config = Qwen3_5TextConfig(
        **{**hf_models.QWEN, "layer_types": ["linear_attention"] * 2},
        intermediate_size=48,
        linear_conv_kernel_dim=4,
    )
    c = _case(hf_models.randomise(Qwen3_5ForCausalLM(config)), tmp_path)
    names = {
        ".norm.": ".o_norm.",
        "model.o_norm": "model.norm",
        "in_proj_z": "g_proj",
        "in_proj_a": "a_proj",
        "in_proj_b": "b_proj",
        "out_proj": "o_proj",
    }
    tensors = rename(c.disk, BLOCK | names)
    for name in list(tensors):
        if name.endswith(("attn_norm.weight", "mlp_norm.weight", "model.norm.weight")):
            tensors[name] = tensors[name] + 1
        if "in_proj_qkv" in name or ".conv1d" in name:
            whole, new = tensors.pop(name), "{}_proj" if "in_proj" in name else "{}_conv1d"
            for x, part in zip("qkv", whole.split([16, 16, 48])):
                tensors[
                    name.replace("in_proj_qkv" if "in_proj" in name else "conv1d", new.format(x))
                ] = part
    written = dict(
        architectures=["GatedDeltaNetForCausalLM"],
        num_heads=2,
        num_v_heads=4,
        head_dim=8,
        expand_v=1.5,
        norm_eps=1e-3,
    )
    return c, written, tensors


# Softmax layers as FLA's config.json has them, but for their places.
FLA_ATTENTION = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_bias": False,
    "window_size": None,
    "rope_theta": 5000.0,
}


def fla_attention(tmp_path):
    """A Llama: FLA's softmax layers alone."""
    sizes = hf_models.SIZES | hf_models.HEADS | dict(intermediate_size=48)
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    model = hf_models.randomise(LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)))
    attn = FLA_ATTENTION | {"layers": [0, 1]}
    written = dict(
        architectures=["KDAForCausalLM"],
        num_heads=4,
        head_dim=8,
        expand_v=1.0,
        norm_eps=1e-3,
        attn=attn,
    )
    tokens, references = (
        torch.randint(hf_models.VOCAB, (T,), generator=torch.Generator().manual_seed(1)),
        {},
    )
    for documents, bounds in DOCUMENTS.items():
        logits, loss, grads = hf_models.reference(model, tokens, bounds)
        references[documents] = logits, loss, rename(grads, BLOCK)
    tensors = rename({n: t.detach() for n, t in model.state_dict().items()}, BLOCK)
    return Case("KDAForCausalLM", None, tensors, tensors, tokens, references), written, tensors


@pytest.mark.parametrize("make", [fla_kda, fla_gdn, fla_attention])
def test_fla_models_are_ours(make, tmp_path):
    c, written, tensors = make(tmp_path)
    common = dict(
        vocab_size=hf_models.VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        conv_size=4,
        initializer_range=0.05,
    )
    family, config = config_from_hf(common | written)
    assert config_from_hf(config_to_hf(family, config)) == (family, config)
    state = state_from_hf(tensors, config, family)
    back = state_to_hf(state, config, family)
    assert back.keys() == tensors.keys() and same(back, tensors)
    for documents, bounds in DOCUMENTS.items():
        plan = packed(bounds)
        logits, loss, _ = run(config, state, c.tokens, labels_of(c.tokens, bounds), plan)
        theirs = c.references[documents]
        assert relative(logits, theirs[0]) < 1e-5
        assert abs(loss - theirs[1]) < 1e-5 * theirs[1]


def test_fla_hybrids_are_read_and_written():
    """Softmax layers among linear ones: config.json and names, there and back."""
    attn = FLA_ATTENTION | {"layers": [1, 3]}
    written = dict(
        architectures=["KDAForCausalLM"],
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_heads=2,
        head_dim=8,
        hidden_ratio=4,
        lower_bound=-5.0,
        safe_gate=True,
        attn=attn,
    )
    family, config = config_from_hf(written)
    assert [layer.name for layer in config.layers] == ["kda", "attention"] * 2
    assert config.hidden_dim == 256 and config.layers[1].mixers[0].rope_theta == 5000.0
    names = {s.name for e in placements(config, family) for s in e.sources}
    assert {
        "model.layers.1.attn.q_proj.weight",
        "model.layers.1.attn_norm.weight",
        "model.embeddings.weight",
    } <= names
    assert "model.layers.1.attn.A_log" not in names and "model.layers.0.attn.g_proj.1.bias" in names
    assert config_from_hf(config_to_hf(family, config)) == (family, config)
    with refused("window_size = 512"):
        config_from_hf(written | {"attn": attn | {"window_size": 512}})


@pytest.mark.parametrize("kind, expand", [("KDA", 1), ("GatedDeltaNet", 2)])
def test_fla_values_are_as_wide_as_its_classes_have_them(kind, expand):
    """expand_v is 1 by default in KDAConfig, 2 in GatedDeltaNetConfig."""
    written = dict(
        architectures=[f"{kind}ForCausalLM"], vocab_size=97, hidden_size=32, num_hidden_layers=1
    )
    (mixer,) = config_from_hf(written | dict(num_heads=2, head_dim=8))[1].mixers
    assert mixer.v_head_dim == 8 * expand


def test_ling_3_without_types_of_layers():
    """Every sixth layer is softmax, as in transformers' class."""
    written = config_to_hf("BailingHybridForCausalLM", preset("ling-3", "flash"))
    del written["layer_types"]
    layers = config_from_hf(written)[1].layers
    assert [i for i, layer in enumerate(layers) if not layer.mixers[0].linear] == list(
        range(5, len(layers), 6)
    )
