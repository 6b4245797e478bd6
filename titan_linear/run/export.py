"""Export of a run's weights as a Hugging Face folder.

python -m titan_linear.run.export CHECKPOINT FOLDER DTYPE      an export during training
(hooks/exports.py)
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_linear.config import Adapter, Config
from titan_linear.data import Tokenizer, build_tokenizer
from titan_linear.data.corpus.tokenizer import FILES, GENERATION, TOKENIZER
from titan_linear.distributed.process import ignore_warnings_of_torch, refusing
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import config_to_hf, mtp_depth
from titan_linear.run.build import DTYPES, unallocated, under_key
from titan_linear.run.origin import Adapters, Origin
from titan_linear.storage.files import Json, json_bytes, parse_json, read_inside
from titan_linear.storage.hf_io import CONFIG, read_config, read_model
from titan_linear.storage.hf_writing import (
    Destination,
    Files,
    UnfitTokenizer,
    beside,
    check_tokenizer,
    gather,
    with_tokens,
)
from titan_linear.storage.peft import PEFT_CONFIG, check_base, keys_of, options_of, settings_of
from titan_linear.storage.rundir import config_of
from titan_linear.storage.step_folders import read_progress, verify, weights_path
from titan_linear.storage.tensors import Weights, check_weights, stored_weights

EXPORT_DTYPES = {**DTYPES, "float16": torch.float16, "source": None}

# The program of an export's process. Its arguments are the parent's process id and the
# arguments of `main`. It watches the parent first, because this module takes seconds to
# import, and the parent may die meanwhile.
START = """
import sys
from titan_linear.distributed.process import die_with_parent
die_with_parent(int(sys.argv[1]))
from titan_linear.run.export import main
sys.exit(main(sys.argv[2:]))
"""


def export_folder(config: Config, step: int) -> Path:
    return config.checkpoint_folder / f"step-{step}-hf"


def is_exported(config: Config, step: int) -> bool:
    """Whether the step's Hugging Face folder exists and has not been emptied.

    The folder gets its name only when it is whole.
    """
    return any((export_folder(config, step) / name).is_file() for name in (CONFIG, PEFT_CONFIG))


def lacks_export(config: Config, step: int) -> bool:
    """Whether checkpoint.export_interval asks for an export of step-N that does not exist."""
    c = config.checkpoint
    # The run itself exports its last step.
    last = c.last_save_in_hf and step == config.training.steps
    wanted = c.export_interval and step % c.export_interval == 0 and not last
    return bool(wanted) and not is_exported(config, step)


def not_exported(steps: Sequence[int]) -> str:
    """Return a line that tells the user which steps were not exported."""
    return f"not exported: {', '.join(f'step-{step}' for step in steps)}; titan-linear convert to-hf does it"


def destination(
    origin: Origin,
    tokenizer: Tokenizer | None,
    like: str = "",
    files: Files | None = None,
) -> Destination:
    """Return the destination of an export.

    Args:
        tokenizer: None keeps the special tokens of the folder that the export is like, and
            takes `files`.
        like: a Hugging Face folder of the same model; by default the one that the run began
            from.
        files: the files of the tokenizer; by default as it writes them.

    Raises:
        ValueError: no architecture holds the model and its tokenizer, peft cannot name some
            of the adapters, or a file to copy is not a regular file.
    """
    files = tokenizer.hugging_face_files() if files is None else files
    # Next to adapters, transformers takes any tokenizer.
    checked = files if origin.exports_whole else {}
    named = Path(like) if like else None
    family = origin.family(named or origin.folder, checked)
    origin.check_export(family)
    # The folder whose config.json and names are kept, or a config.json of our own. Adapters
    # are for the model that their folder defines.
    folder = named or (origin.folder if origin.exports_whole else origin.assets)
    settings = read_config(folder) if folder else config_to_hf(family, origin.definition.base)
    check_tokenizer(family, settings, checked)
    eos = {"eos_token_id": tokenizer.eos_id} if tokenizer and tokenizer.eos_id is not None else {}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | eos
    # With the folder's own tokenizer, keep its other special tokens.
    if not tokenizer or (folder and origin.tokenizer_path == str(folder / TOKENIZER)):
        tokens = eos
    # Texts end at the end token by the settings next to the tokenizer, or else by the
    # folder's.
    changes = eos if GENERATION in files else tokens
    copied = beside(settings if origin.exports_whole else {}, folder) | files
    if GENERATION in copied:
        settings = under_key(GENERATION, parse_json, copied[GENERATION], Json)
        copied[GENERATION] = json_bytes(with_tokens(settings, changes))
    return Destination(family, folder, copied, tokens)


def check_exports(origin: Origin) -> bool:
    """Check that the exports of a run, if it has any, can hold its model.

    Returns:
        Whether the run exports.
    """
    c = origin.config.checkpoint
    exports = c.last_save_in_hf or c.export_interval > 0
    if exports:
        interval = f"export_interval = {c.export_interval}"
        key = f"checkpoint.{'last_save_in_hf = true' if c.last_save_in_hf else interval}"
        under_key(key, destination, origin, origin.tokenizer)
    return exports


def export(
    path: Path,
    origin: Origin,
    get: Weights,
    *,
    dtype: str,
    like: str = "",
    base: str = "",
) -> None:
    """Write a run's weights as a Hugging Face folder, or its adapters as a PEFT folder.

    Every rank calls it; see `write_folder`.

    Args:
        dtype: a key of EXPORT_DTYPES.
        like: as in `destination`.
        base: the fingerprint of the adapters' base.
    """
    to = destination(origin, origin.tokenizer, like)
    origin.write(path, origin.model, get, to, EXPORT_DTYPES[dtype], base)


def export_checkpoint(checkpoint: Path, folder: Path, dtype: str, like: str = "") -> None:
    """Write a checkpoint as a Hugging Face folder.

    It takes one process, which holds one tensor at a time.

    Args:
        checkpoint: a path in its run's folder that `weights_path` resolves.
        dtype, like: as in `export`.

    Raises:
        ValueError: the checkpoint does not exist, is damaged or of another model, or no
            architecture holds its model.
        SaveFailed: the folder could not be written.
    """
    checkpoint = weights_path(checkpoint, key="CHECKPOINT")
    verify(checkpoint)
    origin = Origin.of(config_of(checkpoint))
    if dtype == "source" and not (like or origin.folder):
        raise ValueError(
            "--export-dtype source: this run did not begin from a Hugging Face folder; name one by --like"
        )
    check_weights(checkpoint, unallocated(origin.model))
    content = read_progress(checkpoint).content
    base = content.base if content else ""
    export(folder, origin, stored_weights(checkpoint), dtype=dtype, like=like, base=base)


class AdaptedModel(NamedTuple):
    """Adapters to be merged into their base."""

    origin: Adapters
    model: ModelConfig
    tokenizer: Tokenizer | None
    # Files of the tokenizer, if not as it writes them.
    files: Files | None = None


def merge(source: Path, folder: Path, base: str, dtype: str) -> None:
    """Write the sum of a base and its adapters as a whole Hugging Face folder.

    The sum is rounded once. It is computed one tensor at a time.

    Args:
        source: a PEFT folder, or a checkpoint of a run with adapters (`weights_path`).
        base: the base's Hugging Face folder; by default the one that `source` names.
        dtype: a key of EXPORT_DTYPES.
    """
    if (source / PEFT_CONFIG).is_file():
        adapted = _adapters_of_folder(source, base)
    else:
        adapted = _adapters_of_run(source, base)
    source_origin = adapted.origin.source
    if dtype == "source" and not source_origin.folder:
        dtype = "float32"
    try:
        to = destination(source_origin, adapted.tokenizer, files=adapted.files)
    except UnfitTokenizer as error:
        # Adapters can be trained with such a tokenizer.
        print(f"warning: {error}; the folder gets no tokenizer")
        to = destination(source_origin, None, files={})
    source_origin.write(
        folder, adapted.model.base, adapted.origin.weights(), to, EXPORT_DTYPES[dtype]
    )


def _adapters_of_folder(source: Path, base: str) -> AdaptedModel:
    """Return the adapters of a PEFT folder. Its tokenizer takes precedence over the base's."""
    named = Path(base or settings_of(source)["base_model_name_or_path"] or "")
    if not (named / CONFIG).is_file():
        raise ValueError(
            f"'{named}', the base of '{source}', is not a Hugging Face folder; give it by --base"
        )
    # Adapters may reach into the layers that predict further tokens.
    depth = mtp_depth(read_config(named))
    family, theirs = read_model(named, depth)
    options = options_of(source, theirs, family)
    layers = re.findall(r"layers\.(\d+)", " ".join(options["targets"] + options["train_extra"]))
    further = max(map(int, layers), default=0) >= theirs.num_layers
    # The configuration of the base, with the keys and options that the folder records.
    keys = keys_of(source)
    run = Origin.reading(named, ["--model.mtp_layers", str(depth * further), *keys]).config
    adapter = Adapter(**options, initial_load_path=str(source))
    run = run.model_copy(update={"adapter": adapter})
    # Nothing is known of the texts' length.
    if not keys:
        run = run.changed({"training.seq_len": 0})
    # A tokenizer next to the adapters replaces the base's.
    files = read_inside(source, *FILES)
    base_files = read_inside(named, *FILES)
    tokenizer = None
    if TOKENIZER in files:
        tokenizer = build_tokenizer(str(source))
        if files[TOKENIZER] != base_files.get(TOKENIZER):
            run = run.changed({"model.tokenizer_path": str(source)})
    origin = Origin.of(run)
    assert isinstance(origin, Adapters)
    model = origin.model_for(tokenizer) if tokenizer else origin.definition
    return AdaptedModel(origin, model, tokenizer, files if tokenizer else base_files)


def _adapters_of_run(source: Path, base: str) -> AdaptedModel:
    """Return the adapters of a run's checkpoint."""
    checkpoint = weights_path(source, key="SOURCE")
    verify(checkpoint)
    run = config_of(checkpoint)
    # Another folder may stand in for the base; its fingerprint is compared below.
    if base:
        loads = run.checkpoint.initial_load_path
        key = "checkpoint.initial_load_path" if loads else "model.hf_assets_path"
        run = run.changed({key: base})
    origin = Origin.of(run)
    if not isinstance(origin, Adapters):
        raise ValueError(
            f"'{source}' has no adapters; titan-linear convert to-hf exports a whole model"
        )
    model = origin.model
    check_base(read_progress(checkpoint).content.base, origin.base_fingerprint, checkpoint)
    return AdaptedModel(replace(origin, checkpoint=checkpoint), model, origin.tokenizer)


def export_last(origin: Origin, model: Decoder, step: int, base: str) -> None:
    """Write the weights of the run's last step as a Hugging Face folder, step-N-hf.

    Every rank calls it.

    Args:
        base: the fingerprint of the adapters' base.
    """
    path = export_folder(origin.config, step)
    export(path, origin, gather(model), dtype=origin.config.checkpoint.export_dtype, base=base)
    if dist.get_rank() == 0:
        print(f"exported '{path}'")


def command(checkpoint: Path, folder: Path, dtype: str) -> list[str]:
    return [sys.executable, "-c", START, str(os.getpid()), str(checkpoint), str(folder), dtype]


@refusing
def main(argv: list[str]) -> int:
    os.nice(19)
    ignore_warnings_of_torch()
    checkpoint, folder, dtype = argv
    export_checkpoint(Path(checkpoint), Path(folder), dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
