"""A run's configuration: a TOML file, overridden by `--section.key value`, and checked.

    config = load_config(["--job.config_file", "train_configs/debug.toml", "--training.steps", "100"])
    check_config(config, world_size=2)

Sections and keys have the names of TorchTitan v0.2 wherever the same thing exists. TOML has
no null: where a key may be unset, the empty string or a number named in its description
stands for it. `--help` prints the descriptions.
"""

from titan_linear.config.checks import check_config
from titan_linear.config.reading import config_to_toml, difference, load_config, toml_value
from titan_linear.config.schema import (
    BYTES,
    COLUMNS,
    KEYS,
    OTHER,
    RECORDS,
    SECTIONS,
    ActivationCheckpoint,
    Adapter,
    Comm,
    Config,
    Evaluation,
    Float8,
    KeyRule,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Sample,
    Section,
    Source,
    Training,
    Validation,
    absolute,
    has_records,
    keys_with,
)
