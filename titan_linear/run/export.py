"""A run's weights as a Hugging Face folder.

python -m titan_linear.run.export CHECKPOINT FOLDER DTYPE      an export while the run goes on (hooks/exports.py)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import Config, hf_assets, hf_weights
from titan_linear.data import Tokenizer
from titan_linear.distributed.process import ignore_warnings_of_torch, refusing
from titan_linear.models.adapters import config_to_hf
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.run.build import DTYPES, FAMILY_OF, model_config, open_tokenizer, tokenizer_path, unallocated
from titan_linear.storage.hf_io import CONFIG, read_config, read_model
from titan_linear.storage.hf_writing import check_tokenizer, find_family, gather, write_folder
from titan_linear.storage.rundir import checkpoint_folder, config_of
from titan_linear.storage.step_folders import verify, weights_path
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
    return (export_folder(config, step) / CONFIG).is_file()


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
    files = tokenizer.hugging_face_files()
    like = like or hf_weights(config)
    if not (like or hf_assets(config)):
        return FAMILY_OF.get(config.model.name) or find_family(model, files)
    family, _ = read_model(Path(like or hf_assets(config)))
    check_tokenizer(family, read_config(Path(like)) if like else config_to_hf(family, model), files)
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
) -> None:
    """Write the weights of a run as a Hugging Face folder. Every rank calls it; see `write_folder`.

    Args:
        dtype: a key of EXPORT_DTYPES.
        like: a Hugging Face folder of the same model; by default the one that the run began from, if it did.
    """
    like = like or hf_weights(config)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}
    if like and tokenizer_path(config) == str(Path(like) / "tokenizer.json"):  # its own: it has others of them
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
        raise ValueError("--export-dtype source: this run did not begin from a Hugging Face folder; name one by --like")
    tokenizer = open_tokenizer(run)
    model = model_config(run, tokenizer)
    check_weights(checkpoint, unallocated(model, torch.float32))
    export(folder, run, model, tokenizer, stored_weights(checkpoint), dtype=dtype, like=like)


def export_last(config: Config, model: Decoder, tokenizer: Tokenizer) -> None:
    """Write the run's last weights as a Hugging Face folder, step-N-hf. Every rank calls it."""
    path = export_folder(config)
    dtype = config.checkpoint.export_dtype
    export(path, config, model.config, tokenizer, gather(model), dtype=dtype)
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
