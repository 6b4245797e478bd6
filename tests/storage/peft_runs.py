"""Runs that train adapters of a base in transformers' format."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.keys import argv_of
from tests.models import hf_models
from titan_linear.config import Config, load_config
from titan_linear.models.decoder import Decoder
from titan_linear.run.build import allocated
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import cleared
from titan_linear.train import Trainer

# of whose output projections of Mamba peft takes no adapters
REFUSING = ("Nemotron 3", "Falcon-H1")
KEYS = {
    "model.flavor": "hf",
    "model.tokenizer_path": "bytes",
    "training.dataset": "jsonl",
    "training.seq_len": 32,
    "training.global_batch_size": 2,
    "training.steps": 3,
    "lr_scheduler.warmup_steps": 1,
    "optimizer.lr": 0.005,
    "metrics.enable_tensorboard": "false",
    "checkpoint.initial_load_in_hf": "true",
    "checkpoint.last_save_in_hf": "true",
    "adapter.enable": "true",
    "adapter.rank": 4,
    "adapter.train_extra": '["*norm", "embedding"]',
}


def make_base(name: str, folder: Path) -> torch.nn.Module:
    """A model of bytes."""
    model = hf_models.build(name)
    model.resize_token_embeddings(320)
    hf_models.save(model, folder)
    return model


def config_of(name: str, folder: Path, corpus: Path, **more: object) -> Config:
    keys = KEYS | {"job.dump_folder": folder / "run", "model.hf_assets_path": folder / "base"}
    keys |= {"training.dataset_path": corpus}
    if name in REFUSING:
        keys["adapter.targets"] = '["!layers.*.mixer.o_proj"]'
    return load_config(argv_of(keys, **more))


def train(rank: int, world_size: int, config: Config) -> None:
    with cleared(config, [], world_size, world_size):
        Trainer(config).train()


def begun(origin: Origin) -> Decoder:
    model = allocated(origin.definition, torch.float32, torch.device("cpu"))
    origin.load(model)
    return model
