"""A run's weights as a Hugging Face folder.

python -m titan_linear.run.export CHECKPOINT FOLDER DTYPE      an export while the run goes on (hooks/exports.py)
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Adapter, Config, changed, hf_assets, hf_weights
from titan_linear.data import Tokenizer
from titan_linear.distributed.process import ignore_warnings_of_torch, refusing
from titan_linear.models.adapters import config_to_hf, mtp_depth
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
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
)
from titan_linear.run.data import base_of
from titan_linear.run.reading import config_for
from titan_linear.storage.hf_io import (
    CONFIG,
    INDEX,
    RowReader,
    check_folder,
    read_config,
    read_model,
)
from titan_linear.storage.hf_writing import check_tokenizer, gather, write_folder
from titan_linear.storage.peft import (
    PEFT_CONFIG,
    check_base,
    not_served,
    options_of,
    peft_config,
    peft_tensors,
    read_peft,
    settings_of,
    write_peft,
)
from titan_linear.storage.rundir import checkpoint_folder, config_of
from titan_linear.storage.step_folders import read_progress, verify, weights_path
from titan_linear.storage.tensors import check_weights, stored_weights

EXPORT_DTYPES = {**DTYPES, "float16": torch.float16, "source": None}

# The program of an export's process; its arguments are the parent's process id and those of `main`. It attends to the
# parent first, because this module takes seconds to import, in which the parent may die.
START = """
import sys
from titan_linear.distributed.process import die_with_parent
die_with_parent(int(sys.argv[1]))
from titan_linear.run.export import main
sys.exit(main(sys.argv[2:]))
"""


def export_folder(config: Config, step: int = 0) -> Path:
    """The Hugging Face folder of a step; by default that of the run's last step."""
    return checkpoint_folder(config) / f"step-{step or config.training.steps}-hf"


def is_exported(config: Config, step: int = 0) -> bool:
    """Whether that folder is there, which has its name once it is whole, and not emptied."""
    return any((export_folder(config, step) / name).is_file() for name in (CONFIG, PEFT_CONFIG))


def lacks_export(config: Config, step: int) -> bool:
    """Whether checkpoint.export_interval asks for an export of step-N that is not there."""
    c = config.checkpoint
    last = c.last_save_in_hf and step == config.training.steps  # the run exports that one itself
    wanted = c.export_interval and step % c.export_interval == 0 and not last
    return bool(wanted) and not is_exported(config, step)


def not_exported(steps: Sequence[int]) -> str:
    """A line that tells the user which steps were not exported."""
    return f"not exported: {', '.join(f'step-{step}' for step in steps)}; titan-linear convert to-hf does it"


def export_family(config: Config, model: ModelConfig, tokenizer: Tokenizer, like: str = "") -> str:
    """The architecture under which a run's model and tokenizer are saved. ValueError: none can hold them."""
    files = {} if model.adapter else tokenizer.hugging_face_files()  # which do not go with adapters
    like = like or hf_weights(config)
    family = family_of(model.base, config, like, files)
    check_tokenizer(
        family, read_config(Path(like)) if like else config_to_hf(family, model.base), files
    )
    return family


def export(
    path: Path,
    config: Config,
    model: ModelConfig,
    tokenizer: Tokenizer,
    get: Callable[[str], Tensor],
    *,
    dtype: str,
    like: str = "",
    base: str = "",
) -> None:
    """Write the weights of a run as a Hugging Face folder, or its adapters as a PEFT folder. Every rank calls it; see
    `write_folder`.

    Args:
        base: the fingerprint of the adapters' base.
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began from, if it did.
    """
    if model.adapter:
        family = export_family(config, model, tokenizer, like)
        like = like or hf_assets(config)
        names = peft_config(model, family, config.adapter, like)
        kept = EXPORT_DTYPES[dtype]
        tensors = {name: x.to(dtype=kept) for name, x in peft_tensors(model, family, get).items()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_peft(path, names, tensors, base)
            known = like and (Path(like) / CONFIG).is_file()
            if line := not_served(
                names, read_config(Path(like))["architectures"][0] if known else ""
            ):
                print(line)
        return
    like = like or hf_weights(config)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}
    # its own: it has others of them
    if like and tokenizer_path(config) == str(Path(like) / "tokenizer.json"):
        tokens = {name: token for name, token in tokens.items() if token is not None}
    write_folder(
        path,
        model,
        export_family(config, model, tokenizer, like),
        get,
        dtype=EXPORT_DTYPES[dtype],
        like=Path(like) if like else None,
        tokenizer=tokenizer.hugging_face_files(),
        extra=tokens,
        longest=config.training.seq_len,
    )


def export_checkpoint(checkpoint: Path, folder: Path, dtype: str, like: str = "") -> None:
    """Write a checkpoint as a Hugging Face folder, in one process that holds one tensor at a time.

    Args:
        checkpoint: a path that `weights_path` resolves, in its run's folder.
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began from, if it did.

    Raises:
        ValueError: there is no such checkpoint, it is damaged or of another model, or no architecture holds its model.
        SaveFailed: the folder could not be written.
    """
    checkpoint = weights_path(checkpoint, key="CHECKPOINT")
    verify(checkpoint)
    run = config_of(checkpoint)
    if dtype == "source" and not (like or hf_weights(run)):
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


def merge(source: Path, folder: Path, base: str, dtype: str) -> None:
    """Write the sum of a base and its adapters, rounded once, as a whole Hugging Face folder, one tensor at a time.

    Args:
        source: a PEFT folder, or a checkpoint of a run with adapters (`weights_path`).
        base: the base's Hugging Face folder; by default the one that `source` names.
        dtype: a key of EXPORT_DTYPES.
    """
    if (source / PEFT_CONFIG).is_file():
        named = Path(base or settings_of(source).get("base_model_name_or_path") or "")
        if not (named / CONFIG).is_file():
            raise ValueError(
                f"'{named}', the base of '{source}', is no Hugging Face folder; give it by --base"
            )
        depth = mtp_depth(read_config(named))
        family, theirs = read_model(named, depth)
        options = options_of(source, theirs, family)
        layers = re.findall(r"layers\.(\d+)", " ".join(options["targets"] + options["train_extra"]))
        further = max(map(int, layers), default=0) >= theirs.num_layers
        run = config_for(named, ["--model.mtp_layers", str(depth * further)])
        run = run.model_copy(update={"adapter": Adapter(**options)})
        model = model_without_tokenizer(run)
        trained = read_peft(source, model, family, run.adapter, base_of(run)).__getitem__
    else:
        checkpoint = weights_path(source, key="SOURCE")
        verify(checkpoint)
        run = config_of(checkpoint)
        if base:
            key = (
                "checkpoint.initial_load_path"
                if run.checkpoint.initial_load_path
                else "model.hf_assets_path"
            )
            run = changed(run, {key: base})
        model = model_config(run, open_tokenizer(run))
        check_base(read_progress(checkpoint).content.base, base_of(run), checkpoint)
        trained = stored_weights(checkpoint)
    if not model.adapter:
        raise ValueError(
            f"'{source}' has no adapters; titan-linear convert to-hf exports a whole model"
        )
    with ExitStack() as files:
        get = merged(model, base_weights(run, model, files), trained)
        if not hf_weights(run):
            dtype = "float32" if dtype == "source" else dtype
            return export(folder, run, model.base, open_tokenizer(run), get, dtype=dtype)
        like = Path(hf_weights(run))
        family, _ = read_model(like)
        beside = (
            file for kind in ("*.json", "*.txt", "*.model", "*.jinja") for file in like.glob(kind)
        )
        own = {file.name: file.read_bytes() for file in beside if file.name not in (CONFIG, INDEX)}
        write_folder(
            folder, model.base, family, get, dtype=EXPORT_DTYPES[dtype], like=like, tokenizer=own
        )


def base_weights(run: Config, model: ModelConfig, files: ExitStack) -> Callable[[str], Tensor]:
    """name -> a whole tensor of the weights that a run begins from."""
    if hf_weights(run):
        folder, found = check_folder(Path(hf_weights(run)), model.base)
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
    """name -> W + s B A in float64, or what was trained as a whole, or the base's."""
    with torch.device("meta"):
        own = dict(Decoder(model).named_parameters())
    adapted = {name for name in own if lora_name(name, "B") in own}

    def get(name: str) -> Tensor:
        if own[name].requires_grad:
            return trained(name)
        weight = base(name)
        if name not in adapted:
            return weight
        first = first_of(name, model.adapter, adapted)
        A, B = (trained(lora_name(n, part)).double() for n, part in ((first, "A"), (name, "B")))
        return weight.double() + model.adapter.factor * (B.flatten(A.dim() - 2, -2) @ A).view_as(
            weight
        )

    return get


def export_last(config: Config, model: Decoder, tokenizer: Tokenizer, base: str) -> None:
    """Write the run's last weights as a Hugging Face folder, step-N-hf. Every rank calls it."""
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
