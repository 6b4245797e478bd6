"""Convert between our checkpoints and Hugging Face folders.

One process does it, and holds one tensor at a time.

titan-linear convert to-hf outputs/run/checkpoint/step-1000 exported --export-dtype bfloat16
titan-linear convert from-hf Qwen3.5-2B converted
titan-linear convert merge outputs/run merged

to-hf     CHECKPOINT is a run's folder, its checkpoint/ (the newest step is taken), or a step-N
          in it. If the run began from a Hugging Face folder, the names, config.json and
          tokenizer are taken from that folder; --like names another copy of it. A run with
          adapters becomes a PEFT folder.
merge     SOURCE is a PEFT folder or, as above, a checkpoint with adapters. FOLDER gets the sum
          of each weight and its adapter, rounded once, and everything else as to-hf writes it.
from-hf   writes CHECKPOINTS/step-0, weights only, for checkpoint.initial_load_path.
          checkpoint.initial_load_in_hf starts a run from the Hugging Face folder itself.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titan_linear.commands import command_parser
from titan_linear.distributed.process import ignore_warnings_of_torch, refusing
from titan_linear.models.hf_mapping import Placement
from titan_linear.run.build import DTYPES
from titan_linear.run.export import EXPORT_DTYPES, export_checkpoint, merge
from titan_linear.storage.checkpoint import Checkpointer
from titan_linear.storage.files import progress
from titan_linear.storage.hf_io import RowReader, locate, read_model
from titan_linear.storage.step_folders import Progress, complete_steps


@refusing
def main(argv: list[str]) -> int:
    args = parse(argv)
    ignore_warnings_of_torch()
    if args.direction == "from-hf":
        from_hf(args.folder, args.checkpoints, DTYPES[args.dtype])
        return 0
    if args.folder.exists():
        raise ValueError(f"'{args.folder}' is there already; choose another name")
    if args.direction == "to-hf":
        export_checkpoint(args.checkpoint, args.folder, args.export_dtype, args.like)
        print(f"exported '{args.checkpoint}' to '{args.folder}'")
    else:
        merge(args.source, args.folder, args.base, args.export_dtype)
        print(f"merged '{args.source}' to '{args.folder}'")
    return 0


def from_hf(folder: Path, checkpoints: Path, dtype: torch.dtype) -> None:
    """Write CHECKPOINTS/step-0 from a Hugging Face folder."""
    if steps := complete_steps(checkpoints):
        raise ValueError(
            f"'{checkpoints}' holds checkpoints already (step-{steps[-1]}); choose another folder"
        )
    # Find each parameter's tensors in the folder, without reading them.
    family, model = read_model(folder)
    source, found = locate(folder, family, model)
    # The checkpointer needs a process group, here of one process.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reader = RowReader(source)
    bar = progress(None, f"reading {folder.name}", len(found))

    def read(entry: Placement) -> torch.Tensor:
        bar.update()
        return reader.whole(entry, dtype)

    try:
        # Each tensor is read when it is written: only one is in memory at a time.
        Checkpointer(checkpoints).save_lazily(
            0,
            {entry.name: partial(read, entry) for entry in found},
            {entry.name: torch.empty(entry.shape, dtype=dtype, device="meta") for entry in found},
            Progress(step=0),
        )
    finally:
        dist.destroy_process_group()
    print(f"imported '{folder}' ({family}) to '{checkpoints / 'step-0'}'")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("titan-linear convert", __doc__)
    directions = parser.add_subparsers(dest="direction", required=True)
    to = directions.add_parser("to-hf")
    to.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    to.add_argument("folder", metavar="FOLDER", type=Path)
    to.add_argument(
        "--export-dtype",
        choices=EXPORT_DTYPES,
        default="float32",
        help="source: of each tensor as in the folder that the run began from (default: float32)",
    )
    to.add_argument("--like", default="", help="a Hugging Face folder of the same model")
    merging = directions.add_parser("merge")
    merging.add_argument("source", metavar="SOURCE", type=Path)
    merging.add_argument("folder", metavar="FOLDER", type=Path)
    merging.add_argument(
        "--export-dtype",
        choices=EXPORT_DTYPES,
        default="source",
        help="(default: that of the base)",
    )
    merging.add_argument("--base", default="", help="the base's folder, if it has moved")
    of = directions.add_parser("from-hf")
    of.add_argument("folder", metavar="FOLDER", type=Path)
    of.add_argument("checkpoints", metavar="CHECKPOINTS", type=Path)
    of.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the parameters (default: float32)",
    )
    return parser.parse_args(argv)
