"""Export of a run's weights as a Hugging Face folder.

python -m titan_linear.run.export CHECKPOINT FOLDER DTYPE      an export during training
(hooks/exports.py)
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Adapter, Config, toml_value
from titan_linear.data import Tokenizer, build_tokenizer
from titan_linear.data.corpus.tokenizer import FILES, GENERATION, TOKENIZER
from titan_linear.distributed.process import ignore_warnings_of_torch, refusing
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import config_to_hf, mtp_depth
from titan_linear.models.init import initialise
from titan_linear.models.layers import lora_name
from titan_linear.models.lora import first_of
from titan_linear.run.build import (
    DTYPES,
    allocated,
    family_of,
    model_config,
    model_without_tokenizer,
    open_tokenizer,
    tokenizer_path,
    unallocated,
    under_key,
)
from titan_linear.run.data import base_of
from titan_linear.run.reading import config_for
from titan_linear.storage.files import Json, json_bytes, parse_json, read_inside
from titan_linear.storage.hf_io import (
    CONFIG,
    POSITIONS,
    RowReader,
    check_folder,
    read_config,
    read_model,
)
from titan_linear.storage.hf_writing import (
    Files,
    UnfitTokenizer,
    beside,
    check_tokenizer,
    gather,
    with_tokens,
    write_folder,
)
from titan_linear.storage.peft import (
    PEFT_CONFIG,
    check_base,
    keys_of,
    not_served,
    options_of,
    peft_config,
    read_peft,
    settings_of,
    write_peft,
)
from titan_linear.storage.rundir import config_of
from titan_linear.storage.step_folders import read_progress, verify, weights_path
from titan_linear.storage.tensors import check_weights, stored_weights

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


def export_folder(config: Config, step: int = 0) -> Path:
    """Return the Hugging Face folder of a step; by default, of the run's last step."""
    return config.checkpoint_folder / f"step-{step or config.training.steps}-hf"


def is_exported(config: Config, step: int = 0) -> bool:
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


class Destination(NamedTuple):
    """Everything that an export writes besides tensors."""

    family: str
    # The folder whose tensor names are kept.
    like: Path | None
    # Files of the tokenizer, and generation_config.json.
    files: Files
    # Special tokens, in config.json.
    tokens: Json


def destination(
    config: Config,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    like: str = "",
    files: Files | None = None,
) -> Destination:
    """Return the destination of a run's export. Arguments are as in `export`.

    Raises:
        ValueError: no architecture holds the model and its tokenizer, or a file to copy is
            not a regular file.
    """
    files = tokenizer.hugging_face_files() if files is None else files
    # Next to adapters, transformers takes any tokenizer.
    checked = {} if model.adapter else files
    family = family_of(model.base, config, like or config.hf_weights, checked)
    # The folder whose config.json and names are kept, or a config.json of our own.
    given = like or (config.hf_assets if model.adapter else config.hf_weights)
    folder = Path(given) if given else None
    settings = read_config(folder) if folder else config_to_hf(family, model.base)
    check_tokenizer(family, settings, checked)
    eos = {"eos_token_id": tokenizer.eos_id} if tokenizer and tokenizer.eos_id is not None else {}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | eos
    # With the folder's own tokenizer, keep its other special tokens.
    if not tokenizer or (folder and tokenizer_path(config) == str(folder / TOKENIZER)):
        tokens = eos
    # Texts end at the end token by the settings next to the tokenizer, or else by the
    # folder's.
    changes = eos if GENERATION in files else tokens
    copied = beside({} if model.adapter else settings, folder) | files
    if GENERATION in copied:
        known = under_key(GENERATION, parse_json, copied[GENERATION], Json)
        copied[GENERATION] = json_bytes(with_tokens(known, changes))
    return Destination(family, folder, copied, tokens)


def export(
    path: Path,
    config: Config,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    get: Callable[[str], Tensor],
    *,
    dtype: str,
    like: str = "",
    base: str = "",
    files: Files | None = None,
) -> None:
    """Write a run's weights as a Hugging Face folder, or its adapters as a PEFT folder.

    Every rank calls it; see `write_folder`.

    Args:
        tokenizer: None keeps the special tokens of `like` unchanged, and takes `files`.
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began
            from.
        base: the fingerprint of the adapters' base.
        files: the files of the tokenizer; by default as it writes them.
    """
    to = destination(config, model, tokenizer, like, files)
    kept = EXPORT_DTYPES[dtype]
    if not model.adapter:
        return write_folder(
            path,
            model,
            to.family,
            get,
            dtype=kept,
            like=to.like,
            tokenizer=to.files,
            extra=to.tokens,
            longest=config.training.seq_len,
        )
    # Adapters: record the keys that change the base's positions.
    settings = peft_config(model, to.family, config.adapter, str(to.like or ""))
    given = config.model.mixers.get("attention", {})
    positions = {key: given.get(key.removeprefix("attention.")) for key in POSITIONS}
    keys = [f"--model.{key}={toml_value(x)}" for key, x in positions.items() if x is not None]
    kept_keys = [*keys, f"--training.seq_len={config.training.seq_len}"]
    write_peft(path, settings, model, to.family, get, kept, to.files, base, kept_keys)
    # Warn of what servers cannot do with the folder.
    architecture = read_config(to.like)["architectures"][0] if to.like else ""
    lines = [line] if (line := not_served(settings, architecture)) else []
    if keys:
        lines.append(
            f"a PEFT folder has no place for {', '.join(keys)}; with the base's config.json it is another model: serve "
            "what titan-linear convert merge writes"
        )
    if lines and (not dist.is_initialized() or dist.get_rank() == 0):
        print("\n".join(lines))


def export_checkpoint(checkpoint: Path, folder: Path, dtype: str, like: str = "") -> None:
    """Write a checkpoint as a Hugging Face folder.

    It takes one process, which holds one tensor at a time.

    Args:
        checkpoint: a path in its run's folder that `weights_path` resolves.
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began
            from.

    Raises:
        ValueError: the checkpoint does not exist, is damaged or of another model, or no
            architecture holds its model.
        SaveFailed: the folder could not be written.
    """
    checkpoint = weights_path(checkpoint, key="CHECKPOINT")
    verify(checkpoint)
    run = config_of(checkpoint)
    if dtype == "source" and not (like or run.hf_weights):
        raise ValueError(
            "--export-dtype source: this run did not begin from a Hugging Face folder; name one by --like"
        )
    tokenizer = open_tokenizer(run)
    model = model_config(run, tokenizer)
    check_weights(checkpoint, unallocated(model, torch.float32))
    base = read_progress(checkpoint).content.base if model.adapter else ""
    export(
        folder, run, model, tokenizer, stored_weights(checkpoint), dtype=dtype, like=like, base=base
    )


class AdaptedModel(NamedTuple):
    """A base and its adapters, to be merged."""

    run: Config
    model: ModelConfig
    trained: Callable[[str], Tensor]
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
    of_peft = (source / PEFT_CONFIG).is_file()
    run, model, trained, tokenizer, files = (_of_peft if of_peft else _of_run)(source, base)
    if not model.adapter:
        raise ValueError(
            f"'{source}' has no adapters; titan-linear convert to-hf exports a whole model"
        )
    if dtype == "source" and not run.hf_weights:
        dtype = "float32"
    try:
        destination(run, model.base, tokenizer, files=files)
    except UnfitTokenizer as error:
        # Adapters can be trained with such a tokenizer.
        print(f"warning: {error}; the folder gets no tokenizer")
        tokenizer, files = None, {}
    with ExitStack() as opened:
        get = merged(model, base_weights(run, model, opened), trained)
        export(folder, run, model.base, tokenizer, get, dtype=dtype, files=files)


def _of_peft(source: Path, base: str) -> AdaptedModel:
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
    run = config_for(named, ["--model.mtp_layers", str(depth * further), *keys])
    run = run.model_copy(update={"adapter": Adapter(**options)})
    # Nothing is known of the texts' length.
    if not keys:
        run = run.changed({"training.seq_len": 0})
    # A tokenizer next to the adapters replaces the base's.
    files, base_files = read_inside(source, *FILES), read_inside(named, *FILES)
    tokenizer = None
    if TOKENIZER in files:
        tokenizer = build_tokenizer(str(source))
        if files[TOKENIZER] != base_files.get(TOKENIZER):
            run = run.changed({"model.tokenizer_path": str(source)})
    model = model_config(run, tokenizer) if tokenizer else model_without_tokenizer(run)
    trained = read_peft(source, model, family, run.adapter, base_of(run)).__getitem__
    return AdaptedModel(run, model, trained, tokenizer, files if tokenizer else base_files)


def _of_run(source: Path, base: str) -> AdaptedModel:
    """Return the adapters of a run's checkpoint."""
    checkpoint = weights_path(source, key="SOURCE")
    verify(checkpoint)
    run = config_of(checkpoint)
    # Another folder may stand in for the base; its fingerprint is compared below.
    if base:
        given = run.checkpoint.initial_load_path
        key = "checkpoint.initial_load_path" if given else "model.hf_assets_path"
        run = run.changed({key: base})
    tokenizer = open_tokenizer(run)
    model = model_config(run, tokenizer)
    check_base(read_progress(checkpoint).content.base, base_of(run), checkpoint)
    return AdaptedModel(run, model, stored_weights(checkpoint), tokenizer)


def base_weights(run: Config, model: ModelConfig, files: ExitStack) -> Callable[[str], Tensor]:
    """Return a function from a name to the whole tensor that a run begins from."""
    if run.hf_weights:
        folder, found = check_folder(Path(run.hf_weights), model.base, POSITIONS)
        placements = {placement.name: placement for placement in found}
        reader = RowReader(folder, files)
        return lambda name: reader.whole(placements[name], torch.float32)
    if run.checkpoint.initial_load_path:
        return stored_weights(weights_path(Path(run.checkpoint.initial_load_path)))
    drawn = allocated(model.base, torch.float32, torch.device("cpu"))
    initialise(drawn, run.debug.seed)
    return drawn.get_parameter


def merged(
    model: ModelConfig, base: Callable[[str], Tensor], trained: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """Return a function from a name to the merged tensor.

    The tensor is W + s B A in float64, or a parameter trained as a whole, or the base's.
    """
    with torch.device("meta"):
        own = dict(Decoder(model).named_parameters())
    adapted = {name for name in own if lora_name(name, "B") in own}

    def get(name: str) -> Tensor:
        if own[name].requires_grad:
            return trained(name)
        weight = base(name)
        if name not in adapted:
            return weight
        # Projections that share a matrix share the A of the first.
        first = first_of(name, model.adapter, adapted)
        A, B = (trained(lora_name(n, part)).double() for n, part in ((first, "A"), (name, "B")))
        return weight.double() + model.adapter.factor * (B.flatten(A.dim() - 2, -2) @ A).view_as(
            weight
        )

    return get


def export_last(config: Config, model: Decoder, tokenizer: Tokenizer, base: str) -> None:
    """Write the run's last weights as a Hugging Face folder, step-N-hf.

    Every rank calls it.
    """
    path = export_folder(config)
    dtype = config.checkpoint.export_dtype
    export(path, config, model.config, tokenizer, gather(model), dtype=dtype, base=base)
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
