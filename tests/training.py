"""Small whole runs: models, splits of the work, and how two runs are compared."""

import warnings
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from tests.keys import argv_of
from tests.steps import after_backward
from titan_linear.config import load_config
from titan_linear.models.config import MoEConfig
from titan_linear.models.mixers import RWKV7, Attention, Mamba2, ShortConv
from titan_linear.models.presets import MODELS, OWN
from titan_linear.models.rope import RopeScaling
from titan_linear.storage.hf_writing import gather
from titan_linear.storage.tensors import named_parameters
from titan_linear.train import Trainer

BASE = {
    "training.dataset": "jsonl",
    "training.seq_len": 64,
    "training.global_batch_size": 4,
    "training.local_batch_size": 4,
    "training.steps": 6,
    "training.loss_chunk_size": 48,
    "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 2,
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
    "comm.init_timeout_seconds": 3600,
    "comm.train_timeout_seconds": 3600,
}
FLOAT64 = {"training.dtype": "float64"}
# The debug hybrid with half its widths, a flavor of these tests: the same layers, ratios of heads and options.
SMALL = replace(
    OWN["hybrid"]["debug"],
    dim=64,
    hidden_dim=128,
    pattern=tuple(
        replace(mixer, head_dim=16, **({"v_head_dim": 16} if mixer.linear else {}))
        for mixer in OWN["hybrid"]["debug"].pattern
    ),
)
SMALL_HYBRID = {"model.name": "hybrid", "model.flavor": "small"}
# two of them warm up, and two decay
FOUR_STEPS = SMALL_HYBRID | {"training.steps": 4, "optimizer.lr": 5e-3}
# The norm of queries and keys over all heads, and blocks that norm what their attention gives.
WIDE_NORMS = replace(
    SMALL,
    num_layers=2,
    pattern=(replace(SMALL.pattern[2], qk_norm="width"), SMALL.pattern[1]),
    post_norm=("attention",),
    tie_embeddings=True,
)
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
SOFTMAX = replace(SMALL, num_layers=2, pattern=(replace(SMALL.pattern[2], rope_scaling=YARN),))
# Latent attention and a mixture of experts alone, whose layers compile sooner than a recurrence in PyTorch.
KIMI = MODELS["kimi-linear"]["debug"]
EXPERTS = replace(
    KIMI,
    num_layers=1,
    pattern=KIMI.pattern[1:],
    dense_layers=(),
    moe=replace(KIMI.moe, balance_coefficient=0.01),
)


def cut(model):
    """Four of its layers, softmax among them if it has some, a 16th as wide: a quarter of the experts, and of Mamba-2's
    heads and groups; as many heads of other mixers."""

    def thin(part):
        match part:
            case tuple():
                return tuple(map(thin, part))
            case ShortConv():
                return replace(part, channels=part.channels // 16)
            case RWKV7():
                ranks = {f"{x}_rank": getattr(part, f"{x}_rank") // 16 for x in "wavg"}
                return replace(part, head_dim=part.head_dim // 16, **ranks)
            case Mamba2():
                quarters = {
                    name: getattr(part, name) // 4 for name in ("heads", "head_dim", "state_dim")
                }
                return replace(part, **quarters, groups=max(part.groups // 4, 1))
            case Attention():
                return replace(part, head_dim=part.head_dim // 16)
            case MoEConfig():
                sizes = {
                    "hidden_dim": part.hidden_dim // 16,
                    "shared_hidden_dim": part.shared_hidden_dim // 16,
                }
                return replace(part, num_experts=part.num_experts // 4, **sizes)
        return part

    sizes = {
        "vocab_size": 320,
        "dim": model.dim // 16,
        "hidden_dim": model.hidden_dim // 16,
        "num_layers": 4,
    }
    return replace(
        model, pattern=tuple(map(thin, (model.pattern * 8)[4:8])), moe=thin(model.moe), **sizes
    )


OWN_FLAVORS = {
    "small": SMALL,
    "wide-norms": WIDE_NORMS,
    "softmax": SOFTMAX,
    "experts": EXPERTS,
    "nano-3": cut(MODELS["nemotron-h"]["nano-3-30B-A3B"]),
    "granite-tiny": cut(MODELS["granite-h"]["tiny"]),
    "falcon-0.5B": cut(MODELS["falcon-h1"]["0.5B"]),
    "lfm2-350M": cut(MODELS["lfm2"]["350M"]),
    "rwkv7-0.1B": cut(MODELS["rwkv7"]["0.1B"]),
}
CP_2, TP_2 = ({f"parallelism.{kind}_parallel_degree": 2} for kind in ("context", "tensor"))
ZIGZAG = CP_2 | {"parallelism.context_parallel_layout": "zigzag"}
# name: (processes, what differs from one process). local_batch_size 1 makes four micro-steps of a step.
SPLITS = {
    "dp 2": (
        2,
        {"training.local_batch_size": 2, "parallelism.fsdp_reshard_after_forward": "never"},
    ),
    "cp 2": (2, CP_2),
    "cp 4": (4, {"parallelism.context_parallel_degree": 4, "training.enable_cpu_offload": "true"}),
    "dp 2 x cp 2": (4, CP_2 | {"training.local_batch_size": 2}),
    "cp 2 zig-zag": (2, ZIGZAG),
    "HSDP": (4, {"parallelism.data_parallel_replicate_degree": 2, "training.local_batch_size": 1}),
    "HSDP x cp": (
        4,
        ZIGZAG
        | {
            "parallelism.data_parallel_replicate_degree": 2,
            "activation_checkpoint.mode": "selective",
            "training.local_batch_size": 1,
        },
    ),
    "cp 4 sharded over 2": (
        4,
        {
            "parallelism.context_parallel_degree": 4,
            "parallelism.fsdp_shard_degree": 2,
            "training.local_batch_size": 2,
        },
    ),
    "dp 2 x cp 2 sharded over 1": (
        4,
        CP_2 | {"parallelism.fsdp_shard_degree": 1, "training.local_batch_size": 1},
    ),
    "tp 2": (2, TP_2),
    "tp 2 x cp 2 zig-zag": (4, TP_2 | ZIGZAG),
    "HSDP x tp": (
        4,
        TP_2
        | {
            "parallelism.data_parallel_replicate_degree": 2,
            "training.local_batch_size": 1,
            "activation_checkpoint.mode": "attention",
            "training.enable_cpu_offload": "true",
        },
    ),
    "accumulation": (1, {"training.local_batch_size": 1}),
    "full activation checkpointing": (2, CP_2 | {"activation_checkpoint.mode": "full"}),
    "every second layer recomputed": (
        2,
        CP_2
        | {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
    ),
    "selective activation checkpointing": (
        4,
        CP_2
        | TP_2
        | {"activation_checkpoint.mode": "selective", "training.enable_cpu_offload": "true"},
    ),
    **{
        f"cp 2 {method} {layout}": (
            2,
            CP_2
            | {
                "parallelism.context_parallel_method": method,
                "parallelism.context_parallel_layout": layout,
            },
        )
        for method in ("ring", "allgather")  # "auto" is "ulysses" here
        for layout in ("contiguous", "zigzag")
    },
    "cp 2 all heads": (2, CP_2 | {"parallelism.context_parallel_linear_method": "ulysses"}),
}
# Of models with experts.
EXPERT_SPLITS = {
    "ep 2, dp 2": (
        2,
        {
            "parallelism.expert_parallel_degree": 2,
            "training.local_batch_size": 1,
            "activation_checkpoint.mode": "none",
        },
    ),
    "ep 2, dp 2 x cp 2": (
        4,
        ZIGZAG
        | {
            "parallelism.expert_parallel_degree": 2,
            "training.local_batch_size": 2,
            "activation_checkpoint.mode": "selective",
            "training.enable_cpu_offload": "true",
        },
    ),
    "ep 2, cp 4 sharded over 2": (
        4,
        {
            "parallelism.expert_parallel_degree": 2,
            "parallelism.context_parallel_degree": 4,
            "parallelism.fsdp_shard_degree": 2,
            "training.local_batch_size": 2,
        },
    ),
    "ep 2, HSDP x cp 2 x tp 2": (
        8,
        CP_2
        | TP_2
        | {
            "parallelism.expert_parallel_degree": 2,
            "parallelism.data_parallel_replicate_degree": 2,
            "training.local_batch_size": 1,
        },
    ),
}


def arguments(corpus, *overrides):
    keys = {"training.dataset_path": corpus, "job.dump_folder": corpus.parent / "run"}
    for more in (BASE, *overrides):
        keys |= more
    return argv_of(keys)


def trainer_of(argv):
    """In any process: the flavors of these tests are known."""
    OWN["hybrid"] |= OWN_FLAVORS
    trainer = Trainer(load_config(argv))
    assert trainer.model.head.chunk == trainer.config.training.loss_chunk_size
    return trainer


def train(rank, world_size, argv):
    """A whole run."""
    trainer_of(argv).train()


def train_on_rank(rank, world_size, argv):
    """Losses and gradient norms of all steps, and the whole weights after them."""
    warnings.filterwarnings("error", message="FSDP2-wrapped")
    trainer = trainer_of(argv)
    numbers = [trainer.train_step() for _ in range(trainer.config.training.steps)]
    return [n["loss"] for n in numbers], [n["grad_norm"] for n in numbers], whole_weights(trainer)


def whole_weights(trainer):
    get = gather(trainer.model)
    return {name: get(name) for name, _ in trainer.model.named_parameters()}


def check_equal(run, one):
    """Losses, gradient norms and weights of a float64 run are those of one process."""
    assert worst(run[0], one[0]) < 1e-9 and worst(run[1], one[1]) < 1e-9
    check_weights(run[2], one[2])


def check_weights(got, want):
    errors = {n: ((got[n] - w).norm() / w.norm()).item() for n, w in want.items()}
    assert max(errors.values()) < 1e-9, errors


def worst(a, b):
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return ((a - b).abs() / b.abs()).max().item()


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def early(rank, world_size, argv, goes_on):
    """Four steps, of which the second is poisoned and skipped, then one that a signal ends. Losses, the weights, and
    which forwards had begun before the numbers of the step before were read."""
    trainer, begun = trainer_of(argv), []
    if not goes_on:
        trainer._next_follows = lambda: False
    after_backward(trainer, lambda loss: loss * (float("nan") if trainer.step == 1 else 1.0))
    losses = []
    for step in range(5):
        trainer.stop.received = 15 * (step == 4)
        losses.append(trainer.train_step()["loss"])
        begun.append(trainer.passes.begun is not None)
    kinds = {name: (type(p), p.dtype) for name, p in trainer.model.named_parameters()}
    weights = {
        name: _local(p).detach().clone() for name, p in named_parameters(trainer.model).items()
    }
    assert trainer.stop.agreed == 15 and trainer.skipped == 1
    if not trainer.dims.sharded:  # FSDP's own are gathered still, until somebody asks for the state
        assert all(kind == (torch.nn.Parameter, torch.float32) for kind in kinds.values())
    return losses, weights, begun
