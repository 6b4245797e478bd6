"""Losses with their keys, texts and definitions."""

import math

from tests.training import BASE, FLOAT64, SMALL_HYBRID

KEYS = (
    BASE
    | FLOAT64
    | SMALL_HYBRID
    | {
        "training.dataset_format": "tokens",
        "training.steps": 2,
        "lr_scheduler.warmup_steps": 0,
        "optimizer.lr": 3e-4,
    }
)


def logprobs(n, rng):
    return [-5.5 - rng.random() for _ in range(n)]


def taught(n, rng):
    ids = [rng.sample(range(256), 5) for _ in range(n)]
    teacher = [
        sorted((math.log(rng.random() / 5) for _ in range(5)), reverse=True) for _ in range(n)
    ]
    return {"tokens": rng.choices(range(256), k=n), "teacher_ids": ids, "teacher_logprobs": teacher}


WEIGHED = {"training.dataset_columns": '["weights"]'}
PAIRS = {
    "training.dataset_columns": '["weights", "reference"]',
    "training.dataset_format": "preference",
    "loss.name": "dpo",
}
ROLLED_OUT = {
    "training.dataset_columns": '["weights", "advantages", "behaviour", "reference"]',
    "loss.name": "policy",
    "policy.clip_low": 0.05,
    "policy.clip_high": 0.1,
}
OF_BASE = {
    "loss.reference": "base",
    "adapter.enable": "true",
    "adapter.rank": 3,
    "training.steps": 3,
    "optimizer.lr": 0.02,
}
CASES = {
    "weights": WEIGHED | {"model.mtp_layers": 1},
    "by document, smoothed": WEIGHED
    | {
        "loss.normalise": "document",
        "cross_entropy.label_smoothing": 0.1,
        "cross_entropy.z_loss": 0.01,
    },
    "by stream": WEIGHED | {"loss.normalise": "stream"},
    "DPO": PAIRS | {"dpo.beta": 0.5},
    "SimPO": PAIRS
    | {
        "loss.normalise": "token",
        "dpo.beta": 2.0,
        "dpo.margin": 0.5,
        "dpo.length_normalised": "true",
        "dpo.reference_free": "true",
    },
    "DPO, the base as reference": PAIRS
    | OF_BASE
    | {"dpo.beta": 0.5, "training.dataset_columns": '["weights"]'},
    "GRPO": ROLLED_OUT | {"policy.kl": 0.1},
    "GRPO, the base as reference": ROLLED_OUT | OF_BASE | {"policy.kl": 0.1},
    "GSPO": ROLLED_OUT | {"policy.kl": 0.1, "policy.level": "sequence"},
    "distillation": {
        "training.dataset_columns": '["teacher_ids", "teacher_logprobs"]',
        "loss.name": "distillation",
        "distillation.temperature": 2.0,
    },
}
