"""Whole runs: the same losses, gradient norms and weights however the work is split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.worlds import World
from titan_linear.build import model_config
from titan_linear.config import load_config
from titan_linear.data import build_tokenizer
from titan_linear.models.config import MoEConfig
from titan_linear.preflight import preflight
from titan_linear.train import NonFinite, Trainer

STEPS = 20
BASE = {
    "training.dataset": "jsonl",
    "training.seq_len": 64,
    "training.global_batch_size": 4,
    "training.local_batch_size": 4,
    "training.steps": STEPS,
    "training.loss_chunk_size": 48,
    "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 4,
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
}
FLOAT64 = {"training.dtype": "float64"}

# name: (processes, what differs from one process). local_batch_size 1 makes four micro-steps of a step.
SPLITS = {
    "dp 2": (2, {"training.local_batch_size": 2}),
    "cp 2": (2, {"parallelism.context_parallel_degree": 2}),
    "cp 4": (4, {"parallelism.context_parallel_degree": 4}),
    "dp 2 x cp 2": (4, {"parallelism.context_parallel_degree": 2, "training.local_batch_size": 2}),
    "cp 2 zig-zag": (2, {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_layout": "zigzag"}),
    "HSDP": (4, {"parallelism.data_parallel_replicate_degree": 2, "training.local_batch_size": 1}),
    "HSDP x cp": (4, {"parallelism.data_parallel_replicate_degree": 2, "parallelism.context_parallel_degree": 2,
                      "training.local_batch_size": 2}),
    "accumulation": (1, {"training.local_batch_size": 1}),
    "full activation checkpointing": (2, {"parallelism.context_parallel_degree": 2,
                                          "activation_checkpoint.mode": "full"}),
    **{
        f"cp 2 {method} {layout}": (2, {"parallelism.context_parallel_degree": 2,
                                        "parallelism.context_parallel_method": method,
                                        "parallelism.context_parallel_layout": layout})
        for method in ("ring", "allgather", "ulysses") for layout in ("contiguous", "zigzag")
    },
    "cp 2 all heads": (2, {"parallelism.context_parallel_degree": 2,
                           "parallelism.context_parallel_linear_method": "ulysses"}),
}  # fmt: skip

FLOAT64_ONLY = [
    "HSDP x cp",
    "cp 2 all heads",
    *(f"cp 2 {method} zigzag" for method in ("ring", "allgather", "ulysses")),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Documents of 1 to 200 bytes: many to a stream, some across several ranks; the cache stays in the same folder."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = torch.Generator().manual_seed(0)
    words = [
        "def",
        "return",
        "self",
        "import",
        "class",
        "for",
        "in",
        "if",
        "else",
        "while",
        "None",
        "True",
        "lambda",
        "yield",
    ]
    with open(folder / "corpus.jsonl", "w") as file:
        for _ in range(400):
            length = int(torch.randint(1, 200, (), generator=rng))
            picks = torch.randint(len(words), (60,), generator=rng).tolist()
            file.write(json.dumps({"text": " ".join(words[i] for i in picks)[:length]}) + "\n")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder / "corpus.jsonl"
    patch.undo()


def arguments(corpus: Path, *overrides: dict) -> list[str]:
    keys: dict[str, object] = {"training.dataset_path": corpus, "job.dump_folder": corpus.parent / "run"}
    for more in (BASE, *overrides):
        keys |= more
    return [text for key, value in keys.items() for text in (f"--{key}", str(value))]


def train_on_rank(
    rank: int, world_size: int, argv: list[str], cache: str
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of all steps, and the whole weights after them."""
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    trainer = Trainer(load_config(argv))
    numbers = [trainer.train_step() for _ in range(trainer.config.training.steps)]
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in trainer.model.named_parameters()
    }
    return [n["loss"] for n in numbers], [n["grad_norm"] for n in numbers], weights


@pytest.fixture(scope="module")
def one_process(corpus: Path, worlds: Callable[[int], World]) -> Callable[[dict], tuple]:
    """The reference for some keys, computed once."""
    done: dict[str, tuple] = {}

    def get(keys: dict) -> tuple:
        if str(keys) not in done:
            argv = arguments(corpus, keys)
            preflight(load_config(argv), world_size=1)
            done[str(keys)] = worlds(1).run(train_on_rank, argv, str(corpus.parent))[0]
        return done[str(keys)]

    return get


def worst(a: list[float], b: list[float]) -> float:
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return ((a - b).abs() / b.abs()).max().item()


@pytest.mark.parametrize("name", SPLITS)
def test_float64_runs_are_equal(name: str, corpus: Path, worlds: Callable[[int], World], one_process: Callable) -> None:
    processes, keys = SPLITS[name]
    losses, norms, weights = one_process(FLOAT64)
    for rank in worlds(processes).run(train_on_rank, arguments(corpus, FLOAT64, keys), str(corpus.parent)):
        assert worst(rank[0], losses) < 1e-9 and worst(rank[1], norms) < 1e-9
        errors = {n: ((rank[2][n] - w).norm() / w.norm()).item() for n, w in weights.items()}
        assert max(errors.values()) < 1e-9, errors
    assert losses[-1] < losses[0] - 1  # it learns


@pytest.mark.parametrize("name", [name for name in SPLITS if name not in FLOAT64_ONLY])
def test_float32_runs_are_equal(name: str, corpus: Path, worlds: Callable[[int], World], one_process: Callable) -> None:
    processes, keys = SPLITS[name]
    losses, norms, _ = one_process({})
    for rank in worlds(processes).run(train_on_rank, arguments(corpus, keys), str(corpus.parent)):
        assert worst(rank[0], losses) < 1e-5 and worst(rank[1], norms) < 1e-3


def test_tied_embeddings_and_other_presets(corpus: Path, worlds: Callable[[int], World], one_process: Callable) -> None:
    """Each family, and the head that shares its weight with the embedding."""
    keys = FLOAT64 | {"training.steps": 3}
    for name in ("kda", "gdn"):
        losses, _, weights = one_process(keys | {"model.name": name})
        split = keys | {"model.name": name, "parallelism.context_parallel_degree": 2}
        got = worlds(2).run(train_on_rank, arguments(corpus, split), str(corpus.parent))[0]
        assert worst(got[0], losses) < 1e-9
        assert max(((got[2][n] - w).norm() / w.norm()).item() for n, w in weights.items()) < 1e-9


@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear"])
def test_mixtures_of_experts(
    name: str, corpus: Path, worlds: Callable[[int], World], one_process: Callable[[dict], tuple]
) -> None:
    """A load-balance loss, a selection bias that moves, and latent attention, over FSDP and both layouts."""
    keys = FLOAT64 | {"training.steps": 5, "model.name": name, "activation_checkpoint.mode": "full"}
    losses, norms, weights = one_process(keys)
    splits = ("accumulation", "dp 2", "dp 2 x cp 2", "cp 2 zig-zag")
    for processes, split in [*(SPLITS[s] for s in splits), (1, {"activation_checkpoint.mode": "none"})]:
        got = worlds(processes).run(train_on_rank, arguments(corpus, keys, split), str(corpus.parent))[0]
        assert worst(got[0], losses) < 1e-9 and worst(got[1], norms) < 1e-9
        assert max(((got[2][n] - w).norm() / w.norm()).item() for n, w in weights.items()) < 1e-9
    bias = weights.get("layers.1.mlp.router.selection_bias")
    assert (bias is not None and bool(bias.any())) == (name == "kimi-linear")


def test_how_experts_are_balanced(corpus: Path) -> None:
    """The configuration's word comes before the model's, and is refused where it means nothing."""

    def moe(name: str, **keys: float) -> MoEConfig | None:
        argv = arguments(corpus, {"model.name": name} | {f"training.expert_{k}": v for k, v in keys.items()})
        return model_config(load_config(argv), build_tokenizer(None)).moe

    assert (moe("kimi-linear").bias_update_rate, moe("qwen3.5").balance_coefficient) == (1e-3, 1e-2)
    assert moe("kimi-linear", bias_update_rate=0.0, balance_coefficient=0.5) == replace(
        moe("kimi-linear"), bias_update_rate=0.0, balance_coefficient=0.5
    )
    with pytest.raises(ValueError, match=r"training.expert_balance_coefficient .* has no experts"):
        moe("hybrid", balance_coefficient=0.1)
    with pytest.raises(ValueError, match=r"training.expert_bias_update_rate .* has no selection bias"):
        moe("qwen3.5", bias_update_rate=0.1)


def poisoned(rank: int, world_size: int, argv: list[str], cache: str) -> tuple[str, bool, int]:
    """A NaN in what rank 1 computes at step 2: the message, whether weights stayed as they were, skipped steps."""
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    trainer = Trainer(load_config(argv))
    trainer.train_step()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    forward = trainer._forward_backward
    trainer._forward_backward = lambda batch, valid: forward(batch, valid) * (float("nan") if rank == 1 else 1.0)
    message = ""
    try:
        trainer.train_step()
    except NonFinite as error:
        message = str(error)
    same = all(torch.equal(_local(a), _local(b)) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return message, same, trainer.skipped


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def test_a_non_finite_loss_never_reaches_the_weights(corpus: Path, worlds: Callable[[int], World]) -> None:
    keys = {"training.local_batch_size": 2}
    for message, same, _ in worlds(2).run(poisoned, arguments(corpus, keys), str(corpus.parent)):
        assert "step 2" in message and "rank 1: streams 6, 7." in message and same
    for message, same, skipped in worlds(2).run(
        poisoned, arguments(corpus, keys, {"training.on_nonfinite": "skip"}), str(corpus.parent)
    ):
        assert message == "" and same and skipped == 1
