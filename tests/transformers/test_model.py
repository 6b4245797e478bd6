"""transformers' models inside `context_parallel`: every class, on one rank and cut, beside transformers alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DynamicCache,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as file

from tests.models import hf_models
from tests.transformers.workers import (
    BOUNDS,
    alone,
    batch,
    build,
    compare,
    different_batches,
    errors,
    gradient,
    in_float64,
    leaks,
    sharded,
    trained,
    vision_model,
    with_images,
)
from titan_linear.transformers import context_parallel
from titan_linear.transformers.functions import FAMILIES

NAMES = list(hf_models.MODELS)
LAYOUTS = ["contiguous", "zigzag"]


@pytest.fixture
def model():
    return build("Qwen3.5, tied")


def test_every_family_has_a_case():
    assert {type(build(name)).__module__.split(".")[-2] for name in NAMES} == set(FAMILIES)


def within(results):
    # Tables of MiniMax's decays are float32 in transformers.
    bounds = {result: 1e-7 if "MiniMax" in result else 1e-9 for result in results}
    return {result: found for result, found in results.items() if found[0] > bounds[result]}


@pytest.mark.parametrize("names", [NAMES[:9], NAMES[9:]])
def test_two_ranks_equal_transformers_alone(worlds, names):
    """Loss and every gradient, in float64 everywhere: transformers' own file, a call for each document."""
    results = worlds(2).run(compare, names, LAYOUTS)[0]
    assert len(results) == 2 * len(names)
    assert within(results) == {}


def test_four_ranks_equal_transformers_alone(worlds):
    assert within(worlds(4).run(compare, ["Qwen3.5, tied", "Nemotron-H"], LAYOUTS)[0]) == {}


def test_documents_are_apart(worlds):
    """Other tokens in a document change no logit of another by anything, and its own."""
    for changes in worlds(2).run(leaks, NAMES)[0].values():
        assert changes[0] == 0.0 and changes[1] > 0.1


def test_one_rank_with_float32_inside(model):
    """As users have it: differences are those of transformers' float32."""
    found = errors(trained(model), alone(model))
    assert max(found.values()) < 5e-6 and found["loss"] < 1e-7


@pytest.mark.parametrize("name", ["Qwen3.5, tied", "Ling 3", "Falcon-H1", "MiniMax"])
def test_autocast(name):
    """bfloat16 for products: queries and keys are then wider than values."""
    model = hf_models.build(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = errors(trained(model), alone(model))
    assert max(found.values()) < 0.3 and found["loss"] < 1e-2


def test_base_models_have_no_loss(model):
    """Hidden states of the decoder alone, of one document."""
    tokens = batch()["input_ids"]
    with torch.no_grad(), in_float64(model):
        with context_parallel(model.model) as cp:
            states = model.model(**cp.cut({"input_ids": tokens})).last_hidden_state
        want = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert (states - want).norm() < 1e-9 * want.norm()


def rows_of(columns):
    """The documents of a packed row, as rows padded on the right."""
    width = max(b - a for a, b in pairwise(BOUNDS))
    rows = {name: torch.zeros(len(BOUNDS) - 1, width).to(x) for name, x in columns.items()}
    rows["attention_mask"] = torch.zeros(len(BOUNDS) - 1, width, dtype=torch.long)
    for i, (start, end) in enumerate(pairwise(BOUNDS)):
        rows["attention_mask"][i, : end - start] = 1
        for name, column in columns.items():
            rows[name][i, : end - start] = column[0, start:end]
    return rows


def test_padded_rows_are_packed(model):
    packed = batch()
    rows = rows_of({name: packed[name] for name in ("input_ids", "labels")})
    assert max(errors(trained(model, inputs=rows), trained(model)).values()) == 0.0


def test_labels_may_be_shifted_and_have_weights(model):
    """A weight is of the label beside it; the loss is divided by the sum of weights of tokens with labels."""
    inputs = batch()
    weights = torch.rand(inputs["input_ids"].shape, generator=torch.Generator().manual_seed(3))
    with context_parallel(model) as cp:
        output = model(**cp.cut(inputs | {"loss_weights": weights}))
    losses = wanted = 0.0
    for start, end in pairwise(BOUNDS):
        log_p = output.logits[0, start : end - 1].log_softmax(-1)
        targets = inputs["input_ids"][0, start + 1 : end]
        losses -= (log_p.gather(1, targets[:, None])[:, 0] * weights[0, start + 1 : end]).sum()
        wanted += weights[0, start + 1 : end].sum()
    assert torch.allclose(output.loss, losses / wanted, rtol=1e-6)
    shifted = inputs["labels"].roll(-1, 1)
    shifted[0, torch.tensor(BOUNDS[1:]) - 1] = -100
    given = {name: x for name, x in inputs.items() if name != "labels"}
    assert (
        trained(model, inputs=given | {"shift_labels": shifted})["loss"] == trained(model)["loss"]
    )


def test_nothing_stays(model):
    names = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    before = [getattr(file, name) for name in names], model.config._attn_implementation
    loss = model.loss_function
    with pytest.raises(KeyError), context_parallel(model):
        assert model.config._attn_implementation == "titan_linear"
        raise KeyError
    assert ([getattr(file, name) for name in names], model.config._attn_implementation) == before
    assert model.loss_function is loss
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_layers_may_run_again_inside(model):
    """Gradient checkpointing in the block gives the same; a backward after it would run other functions."""
    want = trained(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert max(errors(trained(model), want).values()) == 0.0
    with context_parallel(model) as cp:
        loss = model(**cp.cut(batch())).loss
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside"):
        loss.backward()


def test_adapters(model):
    """PEFT's wrapper: gradients of adapters, on every rank of one."""
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj_qkv", "q_proj"]))
    ours = trained(adapted)
    assert (
        ours["loss"] > 0 and sum(bool(g.any()) for name, g in ours.items() if "lora_B" in name) == 2
    )


def test_sharded_models(worlds):
    """FSDP2 derives a class from the model's, and hands our context down."""
    for found in worlds(2).run(sharded):
        assert max(found.values()) < 1e-6


def test_language_model_of_a_vision_class(model):
    """The same weights in Qwen3_5ForConditionalGeneration: the same loss and gradients."""
    vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=32)
    text = model.config.to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    whole = Qwen3_5ForConditionalGeneration(config).double()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    want, found = trained(model), trained(whole.eval())
    assert torch.equal(found["loss"], want["loss"])
    for name, p in model.model.named_parameters():
        inside = whole.model.language_model.get_parameter(name)
        assert torch.equal(gradient(inside), gradient(p)), name


def test_images(worlds):
    """Two rows with an image each: loss and every gradient of transformers alone, the vision tower's too."""
    for found in worlds(2).run(with_images, LAYOUTS):
        assert max(found.values())[0] < 1e-9


def test_images_that_cannot_be_cut(model):
    pixels = {"pixel_values": torch.zeros(1)}
    rows = {"input_ids": batch()["input_ids"]}
    with (
        context_parallel(model) as cp,
        pytest.raises(ValueError, match=r"batch has \['pixel_values'\], but the model has"),
    ):
        cp.cut(rows | pixels)
    with (
        context_parallel(vision_model()) as cp,
        pytest.raises(ValueError, match=r"batch has \['pixel_values'\], which cannot be cut"),
    ):
        cp.cut(batch() | pixels)


def test_texts_of_a_vision_class():
    """Qwen's processor gives types of tokens to texts, too."""
    model = vision_model()
    rows = {"input_ids": batch()["input_ids"], "labels": batch()["labels"]}
    types = {"mm_token_type_ids": torch.zeros_like(rows["input_ids"])}
    assert trained(model, inputs=rows | types)["loss"] == trained(model, inputs=rows)["loss"]


# --- What is refused ----------------------------------------------------------------------


def tiny(kind):
    small = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    return kind(**small, num_attention_heads=2, num_key_value_heads=2, head_dim=4)


def test_classes_are_refused_by_name(model):
    for refused in (
        Qwen3ForCausalLM(tiny(Qwen3Config)),
        Qwen3_5TextForSequenceClassification(model.config),
        torch.nn.Linear(1, 1),
    ):
        with pytest.raises(ValueError, match=f"{type(refused).__name__} is not supported"):
            context_parallel(refused).__enter__()


@pytest.mark.parametrize(
    "name, value",
    [
        ("output_router_logits", True),
        ("z_loss_coefficient", 0.1),
        ("sliding_window", 8),
        ("attention_dropout", 0.1),
    ],
)
def test_settings_that_cannot_be_exact(model, name, value):
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"config.{name} = {value}: "):
        context_parallel(model).__enter__()


def test_other_losses_and_blocks(model):
    with (
        context_parallel(model),
        pytest.raises(ValueError, match="is inside context_parallel"),
    ):
        context_parallel(model).__enter__()
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ValueError, match="loss_function"):
        context_parallel(model).__enter__()


def test_calls_that_cannot_be_exact(model):
    tokens = batch()["input_ids"]
    with context_parallel(model) as cp:
        cut = cp.cut(batch())
        for inputs, reason in (
            ({"input_ids": tokens}, "called with use_cache=True"),
            (cut | {"use_cache": True}, "called with use_cache=True"),
            (cut | {"attention_mask": torch.ones_like(tokens)}, "called with attention_mask"),
            (cut | {"cache": DynamicCache()}, "called with cache"),
            ({"input_ids": tokens, "use_cache": False}, "a layer was called without cp_context"),
        ):
            with pytest.raises(ValueError, match=reason):
                model(**inputs)


def test_batches_that_cannot_be_cut(model):
    tokens = batch()["input_ids"]
    left = torch.ones_like(tokens)
    left[:, :5] = 0
    with context_parallel(model) as cp:
        for inputs, reason in (
            ({"attention_mask": left}, "padding on the left"),
            ({"attention_mask": torch.ones(1, 1, 120, 120)}, "must be \\[B, T\\]"),
            ({"token_type_ids": tokens}, r"batch has \['token_type_ids'\]"),
            ({"cu_seq_lens_q": torch.tensor([0, 50])}, r"batch has \['cu_seq_lens_q'\]"),
        ):
            with pytest.raises(ValueError, match=reason):
                cp.cut({"input_ids": tokens} | inputs)


def test_ranks_have_the_same_batch(worlds):
    for said in worlds(2).run(different_batches):
        assert said == "ranks of a context-parallel group have different batches"
