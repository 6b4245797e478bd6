"""What a configuration says of a run's beginning is decided once, and files are read when they are needed."""

import pytest
import torch

from tests.keys import argv_of
from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.run.build import allocated
from titan_linear.run.origin import Adapters, Checkpointed, Origin, Published

IN_HF = {"checkpoint.initial_load_in_hf": "true"}
LOADS = {"checkpoint.initial_load_path": "gone"}
ASSETS = {"model.flavor": "hf", "model.hf_assets_path": "assets"}


@pytest.mark.parametrize(
    "keys, kind, folder, assets",
    [
        ({}, Origin, None, None),
        (ASSETS, Origin, None, "assets"),
        (LOADS, Checkpointed, None, None),
        (LOADS | ASSETS, Checkpointed, None, "assets"),
        (LOADS | IN_HF, Published, "gone", "gone"),
        (ASSETS | IN_HF, Published, "assets", "assets"),
        (LOADS | ASSETS | IN_HF, Published, "gone", "assets"),
        (LOADS | IN_HF | {"checkpoint.enable": "false"}, Published, "gone", "gone"),
    ],
)
@pytest.mark.parametrize("adapted", ["false", "true"])
def test_a_configuration_has_one_origin(keys, kind, folder, assets, adapted):
    origin = Origin.of(load_config(argv_of(keys, adapter__enable=adapted)))
    assert type(origin.source if adapted == "true" else origin) is kind
    assert isinstance(origin, Adapters) == (adapted == "true")
    for path, name in ((origin.folder, folder), (origin.assets, assets)):
        assert (path and str(path)) == name
    drawn = "weights drawn from debug.seed = 0"
    assert origin.title == (drawn if kind is Origin else f"weights of '{origin.path}'")
    assert origin.follows_tokenizer == (not folder and keys.get("model.flavor") != "hf")


@pytest.mark.parametrize("adapted", ["false", "true"])
def test_drawn_weights_are_not_tuned_by_preferences(adapted):
    """Unless the run is told to, or resumes."""
    keys = {"loss.name": "dpo", "adapter.enable": adapted}
    origin = Origin.of(load_config(argv_of(keys)))
    with refused(r"this run would draw them: .* sets dpo\.initial_weights = 'drawn'"):
        origin.check(new=True, exports=False)
    origin.check(new=False, exports=False)
    others = {"dpo.reference_free": "true"}, {"loss.name": "policy"}
    for told in ({"dpo.initial_weights": "drawn"}, *others):
        Origin.of(load_config(argv_of(keys | told))).check(new=True, exports=False)


def test_drawn_weights_are_the_same_by_name_and_in_place():
    """Adapters that have not trained change nothing, and the base below them is what a run without them draws."""
    plain, adapted = (
        Origin.of(load_config(argv_of({"model.name": "gdn"}, adapter__enable=enable)))
        for enable in ("false", "true")
    )
    models = [allocated(x.model, torch.float32, torch.device("cpu")) for x in (plain, adapted)]
    for origin, model in zip((plain, adapted), models, strict=True):
        origin.load(model)
    get = plain.weights()
    for name, p in models[0].named_parameters():
        assert torch.equal(p, get(name)) and torch.equal(p, models[1].get_parameter(name))
    assert plain.fingerprint == plain.base_fingerprint == adapted.base_fingerprint == ""
