"""The runs of the matrix: every pair of values of these factors occurs in one of about forty rows.

A row is a run of the launcher: a model with real head dims and few layers, on packed text, with a few keys. What it is
compared with is the same model on the same streams, uncompiled, in one process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 6
STREAMS = 4  # of a step
KILLED_AFTER = 2  # the step whose checkpoint is whole when a process is killed
Keys = Mapping[str, object]

# --- Models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A preset or a shipped configuration, cut to a few layers.

    scheduled: streams have half their length in the first half of the steps.
    lr: with 1e-4 the third loss of wide models rises again, and what rounding differs by with it.
    """

    keys: Keys
    toml: str = ""
    seq_len: int = 4096
    lr: float = 3e-5
    scheduled: bool = False
    experts: bool = False


def preset(name: str, flavor: str, **options: object) -> Variant:
    """Options are fields of Variant, and with "__" for the dot, keys of [model]."""
    own = {
        f"model.{key.replace('__', '.')}": x for key, x in options.items() if key not in _VARIANT
    }
    rest = {key: x for key, x in options.items() if key in _VARIANT}
    return Variant({"model.name": name, "model.flavor": flavor} | CUT | own, **rest)


def shipped(toml: str, **options: object) -> Variant:
    cut = {} if toml in ("debug", "dpo") else CUT
    return Variant(cut | options.pop("keys", {}), f"train_configs/{toml}.toml", **options)


_VARIANT = {f.name for f in fields(Variant)}
CUT = {"model.num_layers": 4}  # the first layers of each have every kind
LESS = {"vocab_size": 8192, "hidden_dim": 4096}
QWEN_MOE = {"vocab_size": 8192, "moe__num_experts": 32, "experts": True}
SIX = {"vocab_size": 8192, "num_layers": 6}
MODELS: dict[str, tuple[Variant, ...]] = {
    "hybrid": (
        shipped("hybrid_340m_32k", seq_len=8192),
        shipped("hybrid_1_3b_128k", scheduled=True, seq_len=8192),
        shipped("hybrid_100m", seq_len=8192),
        shipped("debug", scheduled=True),
    ),
    "kda": (
        preset("kda", "340M"),
        shipped("reference_340m", seq_len=8192),
        preset("kda", "1.3B", scheduled=True),
    ),
    "gdn": (
        preset("gdn", "340M"),
        preset("gdn", "1.3B", scheduled=True),
        preset("olmo-hybrid", "7B", **LESS),
        preset("olmo-hybrid", "7B", **LESS, scheduled=True),
    ),
    "qwen": (
        preset("qwen3.5", "0.8B", vocab_size=8192),
        preset("qwen3.5", "35B-A3B", **QWEN_MOE),
        preset("qwen3.5", "4B", **LESS, scheduled=True),
        preset("qwen3-next", "80B-A3B", **QWEN_MOE),
    ),
    "kimi-linear": (
        preset("kimi-linear", "48B-A3B", vocab_size=8192, moe__num_experts=16, experts=True),
        preset(
            "kimi-linear",
            "48B-A3B",
            vocab_size=8192,
            moe__num_experts=16,
            experts=True,
            scheduled=True,
        ),
        preset("ling-3", "flash", **SIX, moe__num_experts=16, experts=True),
    ),
    "mamba-2": (
        # Its routers see little but the last bytes at first: a context (a tenth of all tokens are spaces among spaces)
        # chooses experts as one. What rounding decides of that moves losses by 6e-3 at 3e-5, and by 3e-4 at 1e-5.
        preset("nemotron-h", "nano-3-30B-A3B", **SIX, moe__num_experts=16, experts=True, lr=1e-5),
        preset("granite-h", "tiny", **SIX, moe__num_experts=16, experts=True, scheduled=True),
        preset("granite-h", "micro", **SIX),
        preset("falcon-h1", "0.5B", num_layers=8, vocab_size=8192),
    ),
    "others": (
        preset("rwkv7", "0.4B", vocab_size=8192),
        preset("lfm2", "350M", vocab_size=8192, scheduled=True),
        preset(
            "minimax",
            "text-01",
            num_layers=8,
            vocab_size=8192,
            dim=2048,
            moe__num_experts=8,
            moe__hidden_dim=1024,
        ),
    ),
}
# Recipes that begin from a folder or read pairs, on drawn weights and what rows have to read.
DRAWN = {
    "model.vocab_size": 8192,
    "checkpoint.initial_load_in_hf": "false",
    "checkpoint.initial_load_path": "",
    "checkpoint.last_save_in_hf": "false",
    "checkpoint.export_dtype": "float32",
    "training.dataset_format": "text",
}
PAIRS = {
    "training.dataset": "jsonl",
    "training.dataset_path": "{pairs}",
    "training.dataset_format": "preference",
    "dpo.initial_weights": "drawn",
}
CHATS = {
    "training.dataset": "jsonl",
    "training.dataset_path": "{chats}",
    "training.dataset_format": "messages",
    "model.tokenizer_path": "{tokenizer}",
    "model.name": "qwen3.5",
    "model.flavor": "0.8B",
}
OF_TOKENS = {
    "training.dataset": "jsonl",
    "training.dataset_format": "tokens",
    "loss.scores": "",
}
SMALL_QWEN = {"model.name": "qwen3.5", "model.flavor": "0.8B"}
ROLLOUTS = {
    "training.dataset_path": "{rollouts}",
    "training.dataset_columns": '["weights", "advantages", "behaviour"]',
}
TAUGHT = {
    "training.dataset_path": "{taught}",
    "training.dataset_columns": '["teacher_ids", "teacher_logprobs"]',
}
BASE_AS_REFERENCE = {"adapter.enable": "true", "loss.reference": "base"}
RECIPES: dict[str, tuple[Variant, ...]] = {
    "qwen": (
        shipped("lora_qwen3_6_27b_128k", keys=DRAWN),
        shipped("sft_qwen3_5_9b_32k", keys=DRAWN),
        shipped("sft_chat", keys=DRAWN | CHATS),
        shipped("lora_chat", keys=DRAWN | CHATS),
        shipped("grpo", keys=DRAWN | SMALL_QWEN | OF_TOKENS | ROLLOUTS),
        shipped("distil", keys=DRAWN | SMALL_QWEN | OF_TOKENS | TAUGHT),
        shipped("continue_hf", keys=DRAWN | {"model.name": "qwen3.5", "model.flavor": "2B"}),
    ),
    # to the first attention
    "mamba-2": (shipped("full_nemotron_3_nano_4b", keys=DRAWN | {"model.num_layers": 13}),),
    "hybrid": (
        shipped("dpo", keys=PAIRS | BASE_AS_REFERENCE),
        shipped("dpo", keys=PAIRS | {"dpo.reference_free": "true"}),
        shipped("recall_4m", keys={"training.mixture": "[]"}),
    ),
}
EXPERTS = [
    name for name, variants in MODELS.items() if any(variant.experts for variant in variants)
]

# --- Factors ---------------------------------------------------------------------------------------------------------

DP, REPLICAS, CP, TP, EP = (
    f"parallelism.{kind}_degree"
    for kind in (
        "data_parallel_shard",
        "data_parallel_replicate",
        "context_parallel",
        "tensor_parallel",
        "expert_parallel",
    )
)
LAYOUT = "parallelism.context_parallel_layout"
ONE_GPU = {DP: -1, REPLICAS: 1, CP: 1, TP: 1, EP: 1, LAYOUT: "contiguous"}


@dataclass(frozen=True)
class Split:
    processes: int
    keys: Keys
    resumes_as: str  # the split under which a killed run goes on
    streams_at_once: int = 1  # streams that different ranks compute


SPLITS = {
    "one": Split(1, {}, "dp 2"),
    "dp 2": Split(2, {}, "cp 2", streams_at_once=2),
    "cp 2": Split(2, {CP: 2}, "one"),
    "cp 2 zigzag": Split(2, {CP: 2, LAYOUT: "zigzag"}, "dp 2"),
    "tp 2": Split(2, {TP: 2}, "cp 2 zigzag"),
    "ep 2": Split(2, {EP: 2}, "tp 2", streams_at_once=2),
}
LAUNCHER, RANK, SIGTERM = "launcher killed", "rank killed", "SIGTERM"
# The first value of each is the plainest.
FACTORS: dict[str, tuple[str, ...]] = {
    "model": tuple(MODELS),
    "split": tuple(SPLITS),
    "code": ("compiled", "uncompiled"),
    "checkpointing": ("none", "selective", "attention", "full"),
    "batch": ("whole", "accumulated"),
    "between": ("", "validation"),
    "end": ("", LAUNCHER, RANK),
    "watched": ("", "telemetry"),
    "length": ("", "schedule"),
    "memory": ("", "offload"),
}


@dataclass(frozen=True)
class Extra:
    """What one row has beside the factors."""

    keys: Keys = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


EXTRAS = {
    "": Extra(),
    "blocking launches": Extra(environment={"CUDA_LAUNCH_BLOCKING": "1"}),
    "profiler": Extra(
        {
            "profiling.enable_profiling": "true",
            "profiling.profile_freq": 4,
            "profiling.profiler_active": 2,
        }
    ),
    "gathered once": Extra({"parallelism.fsdp_reshard_after_forward": "never"}),
    "one document, then many": Extra(
        {"training.dataset": "jsonl", "training.dataset_path": "{documents}"}
    ),
} | {f"recipe {n}": Extra() for n in range(sum(map(len, RECIPES.values())))}


@dataclass(frozen=True)
class Row:
    """A value of each factor, and the variant of the model."""

    model: str
    split: str
    code: str
    checkpointing: str
    batch: str
    between: str
    end: str
    watched: str
    length: str
    memory: str
    variant: Variant
    extra: str = ""

    @property
    def name(self) -> str:
        values = [getattr(self, factor) for factor in FACTORS]
        return ", ".join(filter(None, [*values, self.extra]))

    @property
    def processes(self) -> int:
        """The most that a part of the run has."""
        resumed = SPLITS[SPLITS[self.split].resumes_as] if self.end else SPLITS["one"]
        return max(SPLITS[self.split].processes, resumed.processes)


def fits(values: Mapping[str, str]) -> bool:
    """Whether these values, of some factors, can be together."""
    return values.get("split") != "ep 2" or values.get("model", EXPERTS[0]) in EXPERTS


def pairs(values: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of (factor, value)."""
    ordered = [(factor, values[factor]) for factor in FACTORS if factor in values]
    yield from combinations(ordered, 2)


def all_pairs() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Those that can be together, in the order of the factors."""
    found = []
    for first, second in combinations(FACTORS, 2):
        for a in FACTORS[first]:
            for b in FACTORS[second]:
                if fits({first: a, second: b}):
                    found.append(((first, a), (second, b)))
    return found


def pairwise() -> list[dict[str, str]]:
    """Values of rows that have every pair: each row begins with a pair that none has yet, and takes of each other
    factor the value that brings the most new pairs."""
    left, rows = dict.fromkeys(all_pairs()), []
    while left:
        row = dict(next(iter(left)))
        for factor, values in FACTORS.items():
            if factor not in row:
                row[factor] = max(
                    (value for value in values if fits(row | {factor: value})),
                    key=lambda value, factor=factor: sum(
                        pair in left for pair in pairs(row | {factor: value})
                    ),
                )
        for pair in pairs(row):
            left.pop(pair, None)
        rows.append(row)
    return rows


def all_rows() -> list[Row]:
    """The rows of all pairs, and after them one for each extra."""
    used: Counter[tuple[str, Variant]] = Counter()
    rows = []
    for values in pairwise():
        scheduled, experts = values["length"] == "schedule", values["split"] == "ep 2"
        fitting = [
            v
            for v in MODELS[values["model"]]
            if v.scheduled == scheduled and (v.experts or not experts)
        ]
        variant = min(fitting, key=lambda v: used[values["model"], id(v)])
        used[values["model"], id(variant)] += 1
        rows.append(Row(**values, variant=variant))
    plain = Row(
        **{factor: values[0] for factor, values in FACTORS.items()}, variant=MODELS["hybrid"][0]
    )
    cp = replace(plain, split="cp 2")
    recipes = [(model, variant) for model, variants in RECIPES.items() for variant in variants]
    return [
        *rows,
        *(
            replace(cp, model=model, variant=v, extra=f"recipe {n}")
            for n, (model, v) in enumerate(recipes)
        ),
        replace(cp, checkpointing="full", extra="blocking launches"),
        replace(cp, extra="profiler"),
        replace(plain, split="dp 2", batch="accumulated", extra="gathered once"),
        replace(cp, between="validation", extra="one document, then many"),
        replace(cp, end=SIGTERM),
    ]


def part_of(rows: list[Row], part: str) -> list[Row]:
    """The rows of part "1/2". Those that are compared with the same run are in one part, and parts have about as many
    runs each."""
    number, _, parts = part.partition("/")
    # of each comparison: its own, and those of its rows
    runs = Counter(compared_with(row) for row in rows)
    runs.update(compared_with(row) for row in rows if row.end)
    runs.update(set(runs))
    total, place = [0] * int(parts), {}
    for comparison, count in runs.most_common():
        place[comparison] = total.index(min(total))
        total[place[comparison]] += count
    return [row for row in rows if place[compared_with(row)] == int(number) - 1]


def in_turn(rows: list[Row]) -> list[Row]:
    """Those that take longest first; of these the models in turn, so that rows that take much memory do not come
    together."""
    of_model = Counter[str]()
    turns = []
    for row in rows:
        turns.append((not row.end, of_model[row.model], len(turns), row))
        of_model[row.model] += 1
    return [row for *_, row in sorted(turns, key=lambda turn: turn[:3])]


# --- Keys ------------------------------------------------------------------------------------------------------------

BASE = ONE_GPU | {
    "training.dataset": "stdlib",
    "training.dataset_path": "",
    "training.global_batch_size": STREAMS,
    "training.local_batch_size": 1,
    "training.steps": STEPS,
    "lr_scheduler.warmup_steps": 2,
    "activation_checkpoint.mode": "none",
    "compile.enable": "false",
    "checkpoint.enable": "false",
    "checkpoint.interval": KILLED_AFTER,
    "checkpoint.async_mode": "async",
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "metrics.telemetry_freq": 0,
    "validation.enable": "true",
    "validation.freq": 2,
    "validation.steps": 3,  # not a multiple of 2: a rank's last stream is padding
    "sample.max_new_tokens": 0,
}


def baseline_keys(row: Row) -> dict[str, object]:
    """The keys of the run that this row is compared with: those that decide what is computed."""
    v = row.variant
    keys = (
        BASE
        | v.keys
        | {"training.seq_len": v.seq_len, "optimizer.lr": v.lr}
        | EXTRAS[row.extra].keys
    )
    keys = {
        key: value
        for key, value in keys.items()
        if not key.startswith(("profiling.", "parallelism.fsdp"))
    }
    if v.scheduled:
        keys["training.seq_len_schedule"] = (
            f"[{{until_step = {STEPS // 2}, seq_len = {v.seq_len // 2}}}]"
        )
    return keys


def compared_with(row: Row) -> str:
    """What the row is compared with: rows that have the same share one run."""
    return json.dumps(baseline_keys(row), sort_keys=True) + row.variant.toml


def row_keys(row: Row, split: str) -> dict[str, object]:
    """The keys of the row's run while it is split so."""
    whole = STREAMS // SPLITS[split].streams_at_once
    keys = baseline_keys(row) | dict(EXTRAS[row.extra].keys) | dict(SPLITS[split].keys)
    return keys | {
        "training.local_batch_size": 1 if row.batch == "accumulated" else whole,
        "activation_checkpoint.mode": row.checkpointing,
        "compile.enable": str(row.code == "compiled").lower(),
        "checkpoint.enable": str(bool(row.end)).lower(),
        "validation.freq": 2 if row.between else STEPS,
        # not that of training
        "validation.local_batch_size": 2 if row.batch == "accumulated" else 1,
        "validation.sample_tokens": 16 if row.between else 0,
        "metrics.telemetry_freq": 2 if row.watched else 0,
        "training.enable_cpu_offload": str(bool(row.memory)).lower(),
    }
