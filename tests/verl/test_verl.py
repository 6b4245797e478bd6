"""verl's trainers and workers on our engine, next to programs of our own (run by -m verl)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from tests.verl.environment import make, run, save_model
from titan_linear.models.plan import BatchPlan
from titan_linear.run.build import allocated
from titan_linear.run.origin import Origin
from titan_linear.storage.hf_writing import write_folder

pytestmark = pytest.mark.verl
CP = ("--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_layout=zigzag")
SPLITS = {"cp 2": CP, "dp 2": ()}
TEMPERATURE = 0.7
CLIP = 0.2


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return make(tmp_path_factory.mktemp("verl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    save_model(path := tmp_path_factory.mktemp("model") / "qwen")
    return path


@pytest.fixture(scope="module")
def texts(python, folder, tmp_path_factory):
    """What rank 0 finds in verl's SFT trainer, and where it saves."""
    out = tmp_path_factory.mktemp("sft") / "out"
    return run(python, "sft", folder, out, *CP)[0], out


@pytest.fixture(scope="module", params=SPLITS)
def updates(request, python, folder, tmp_path_factory):
    """What both ranks find in updates of an actor."""
    out = tmp_path_factory.mktemp("ppo") / "out"
    return run(python, "ppo", folder, out, *SPLITS[request.param])


# --- verl's SFT trainer --------------------------------------------------------------------


def fitted_alone(folder, steps):
    """Losses, norms and weights of transformers' model on one process, a sequence at a time."""
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0)
    numbers = []
    for step in steps:
        count = sum(map(sum, step["loss_mask"]))
        loss = torch.zeros(())
        for ids, mask in zip(step["input_ids"], step["loss_mask"], strict=True):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
            logp = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
            loss = loss - (logp * torch.tensor(mask[1:])).sum() / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers, model.state_dict()


def test_ten_steps_of_verls_sft_trainer_equal_transformers_on_one_process(texts, folder):
    found, _ = texts
    steps = found["first"]["steps"]
    numbers, weights = fitted_alone(folder, steps)
    assert len(steps) == 10 and numbers[-1][0] < numbers[0][0]
    for step, (loss, norm) in zip(steps, numbers, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=2e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=2e-5)
    got = found["first"]["weights"]
    assert set(got) == set(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-5)


def test_a_run_resumes_from_its_checkpoint_with_the_same_numbers(texts):
    found, _ = texts
    first, resumed = found["first"], found["resumed"]
    assert resumed["steps"] == first["steps"][5:]
    torch.testing.assert_close(resumed["weights"], first["weights"], rtol=0, atol=0)


def test_a_checkpoint_has_the_model_as_a_folder(texts):
    found, out = texts
    assert (out / "checkpoints/global_step_10/huggingface/config.json").is_file()
    saved = load_file(out / "checkpoints/global_step_10/huggingface/model.safetensors")
    weights = found["first"]["weights"]
    assert set(saved) == set(weights)
    for name, tensor in saved.items():
        torch.testing.assert_close(weights[name].to(tensor.dtype), tensor, rtol=0, atol=0)


# --- An actor's update ---------------------------------------------------------------------


def decoder(folder):
    origin = Origin.reading(folder, ["--training.dtype=float64"])
    model = allocated(origin.model, torch.float64, torch.device("cpu"))
    origin.load(model)
    return model, origin


def responses(model, data) -> list[tuple[Tensor, Tensor]]:
    """Log p of the tokens of each response, and all of a sequence's entropies."""
    found = []
    for ids, mask, answered in zip(
        data["input_ids"], data["attention_mask"], data["response_mask"], strict=True
    ):
        ids = ids[mask.bool()]
        length = len(ids)
        plan = BatchPlan(torch.arange(length), cu_seqlens=torch.tensor([0, length]).int())
        logp = (model(ids[None], plan)[0] / TEMPERATURE).log_softmax(-1)
        picked = logp[torch.arange(length - 1), ids[1:]]
        entropy = -(logp.exp() * logp).sum(-1)
        found.append((picked[-int(answered.sum()) :], entropy[:-1]))
    return found


def vanilla(logp: list[Tensor], old: list[Tensor], advantages: list[Tensor]) -> Tensor:
    """PPO's clipped loss, bounded where advantages are negative; the mean over tokens."""
    total, count = 0, 0
    for new, before, advantage in zip(logp, old, advantages, strict=True):
        ratio = (new - before).exp()
        worse = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        bounded = torch.maximum(worse, 3 * advantage)
        total = total - torch.where(advantage < 0, bounded, worse).sum()
        count += len(new)
    return total / count


def gspo(logp: list[Tensor], old: list[Tensor], advantages: list[Tensor]) -> Tensor:
    """The ratio of a sequence is the geometric mean over its tokens; the mean over sequences."""
    losses = []
    for new, before, advantage in zip(logp, old, advantages, strict=True):
        ratio = (new - before).mean().exp()
        # A token's gradient is its advantage's; the value has the sequence's ratio.
        of_tokens = ratio.detach() * (new - new.detach()).exp()
        clipped = of_tokens.clamp(1 - CLIP, 1 + CLIP)
        losses.append(-torch.minimum(of_tokens * advantage, clipped * advantage).mean())
    return torch.stack(losses).mean()


class Update(NamedTuple):
    """One update of all weights."""

    loss: float
    norm: float
    # Under Hugging Face's names.
    weights: dict[str, Tensor]
    # Of each sequence before it: log p of the response, and all entropies.
    scores: list[tuple[Tensor, Tensor]]


def updated_alone(loss, folder, to) -> Update:
    """An update by plain PyTorch in float64, a sequence at a time."""
    data = torch.load(folder / "rollout.pt")
    model, origin = decoder(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-2, weight_decay=0
    )
    scores = responses(model, data)
    lengths = data["response_mask"].sum(1).tolist()
    old, advantages = (
        [row[:length] for row, length in zip(data[name], lengths, strict=True)]
        for name in ("old_log_probs", "advantages")
    )
    value = loss([logp for logp, _ in scores], old, advantages)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    write_folder(to, origin.model, origin.family(), model.get_parameter, dtype=torch.float64)
    return Update(value.item(), norm.item(), load_file(to / "model.safetensors"), scores)


def check_update(ranks, want):
    """The first rank of each cp group has metrics; every rank, the weights."""
    metrics = [rank["metrics"] for rank in ranks if rank["metrics"]]
    assert metrics
    for numbers in metrics:
        # verl keeps the loss in float32.
        assert numbers["loss"] == pytest.approx([want.loss], rel=1e-6)
        assert numbers["grad_norm"] == pytest.approx([want.norm], rel=1e-12)
        assert sum(numbers["actor/pg_loss"]) == pytest.approx(want.loss, rel=1e-12)
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], want.weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", [vanilla, gspo])
def test_an_update_of_an_actor_equals_a_program_in_float64(loss, updates, folder, tmp_path):
    want = updated_alone(loss, folder, tmp_path / "moved")
    ranks = [rank[loss.__name__] for rank in updates]
    check_scores(ranks, want.scores)
    check_update(ranks, want)


def check_scores(ranks, want):
    """Log p of the responses and entropies, as verl's trainer collects them."""
    scores = [row for rank in ranks for row in rank["scores"] or []]
    entropies = [row for rank in ranks for row in rank["entropy"] or []]
    assert len(scores) == len(entropies) == len(want)
    for row, entropy, (logp, of_all) in zip(scores, entropies, want, strict=True):
        assert row[-len(logp) - 1 : -1] == pytest.approx(logp.tolist(), rel=1e-12)
        assert entropy[:-1] == pytest.approx(of_all.tolist(), rel=1e-12)
        assert row[-1] == entropy[-1] == 0


def test_an_update_on_its_own_weights_has_a_kl_of_exactly_0(updates):
    for loss in ("vanilla", "gspo"):
        found = [rank["own"][loss] for rank in updates if rank["own"][loss]]
        assert found
        for metrics in found:
            assert set(metrics["actor/ppo_kl"]) == set(metrics["actor/pg_clipfrac"]) == {0.0}
            assert metrics["grad_norm"][0] > 0


def test_weights_have_the_names_and_values_of_the_folder(updates, folder):
    want = load_file(folder / "model.safetensors")
    for rank in updates:
        assert rank["peft"] is None and set(rank["start"]) == set(want)
        for name, tensor in want.items():
            torch.testing.assert_close(rank["start"][name], tensor.double(), rtol=0, atol=0)


def test_adapters_are_sent_alone_and_can_be_disabled(updates):
    for rank in updates:
        found = rank["adapters"]
        assert all("lora_" in name for name in found["names"]) and found["names"]
        assert found["settings"] == {
            "peft_type": "PeftType.LORA",
            "task_type": "TaskType.CAUSAL_LM",
            "r": "4",
        }
    # Ranks that have outputs.
    compared = [rank["adapters"] for rank in updates if rank["adapters"]["same"] is not None]
    assert compared
    for found in compared:
        assert found["same"] and found["change"] > 1e-6


def test_what_is_not_computed_is_refused(updates):
    for rank in updates:
        refused = rank["refused"]
        assert "set the entropy's coefficient (actor.entropy_coeff) to 0" in refused["entropy"]
        assert "set actor.calculate_sum_pi_squared to false" in refused["sum_pi_squared"]
        assert "must have one temperature" in refused["temperature"]
        assert "model.use_liger = True" in refused["liger"]
        assert "set --adapter.targets in engine.keys" in refused["targets"]
        assert "training.nothing" in refused["key"]


def test_verls_workers_are_built_from_its_configuration(python, folder, tmp_path):
    """The reference model scores, and the actor is updated, as the program does."""
    want = updated_alone(vanilla, folder, tmp_path / "moved")
    ranks = run(python, "workers", folder, tmp_path / "out", *CP)
    check_scores(ranks, want.scores)
    check_update(ranks, want)
