"""Generate text from trained weights.

titan-linear generate outputs/debug/checkpoint/step-150 --prompt "def " --max-new-tokens 200 --temperature 0.7
titan-linear generate Qwen3.5-2B --prompt "def " --draft --temperature 0
titan-linear generate Qwen3.5-2B --prompt "Once upon a time" --prompt "In the beginning" --top-p 0.9 --seed 1
titan-linear generate Qwen3.5-2B --chat --max-new-tokens 1000

PATH is a run's folder or its checkpoint/ (the newest step is taken), a step-N in it, or a
Hugging Face folder with its tokenizer.json. All prompts form one batch; each text is
printed with its prompt. With --chat, the prompts and then lines of the terminal are turns
of one conversation, until Ctrl-D. It uses the chat template of the tokenizer's folder.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from titan_linear.commands import command_parser
from titan_linear.data import Tokenizer
from titan_linear.data.corpus.chat import Conversations
from titan_linear.distributed.process import ignore_warnings_of_torch, refusing
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import mtp_depth
from titan_linear.run.build import DTYPES, allocated
from titan_linear.run.generate import Drafts, Rows, Sampling, continuations, generate
from titan_linear.run.origin import Origin, other_tokenizer
from titan_linear.storage.hf_io import CONFIG, read_config
from titan_linear.storage.step_folders import verify


@refusing
def main(argv: list[str]) -> int:
    args = parse(argv)
    ignore_warnings_of_torch()
    device = device_of(args.device)
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    # Refuse wrong arguments before the weights are read.
    if args.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} must be 0 or more")
    usual = "float32" if device.type == "cpu" else "bfloat16"
    dtype = DTYPES[args.dtype or usual]
    if args.draft and args.temperature:
        raise ValueError(
            f"--draft takes the likeliest tokens, not those of --temperature {args.temperature:g}; give 0"
        )
    if not (args.chat or args.prompt):
        raise ValueError("--prompt is missing: give a text to continue, or --chat")
    # Read the weights, then generate.
    model, tokenizer = load(Path(args.path), args.tokenizer, dtype, device, args.draft)
    model.use(args.impl, device, dtype)
    drafts = Drafts() if args.draft else None
    options = dict(
        max_new_tokens=args.max_new_tokens, device=device, sampling=sampling, drafts=drafts
    )
    if args.chat:
        chat(tokenizer, args.prompt, partial(continuations, model, tokenizer, **options))
    else:
        print("\n---\n".join(generate(model, tokenizer, args.prompt, **options)))
    if drafts:
        print(
            f"{drafts.made} tokens drafted, {drafts.accepted / max(drafts.made, 1):.0%} accepted",
            file=sys.stderr,
        )
    return 0


def chat(
    tokenizer: Tokenizer,
    first: Sequence[str],
    answers: Callable[[Rows], Rows],
) -> None:
    """Print an answer to each turn: the prompts given, then lines of the terminal."""
    conversation = Conversations(tokenizer, "--chat")
    messages = []
    for turn in chain(first, lines()):
        messages.append({"role": "user", "content": turn})
        (answer,) = answers([conversation.prompt(messages)])
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
        print(messages[-1]["content"], flush=True)


def lines() -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


def device_of(name: str | None) -> torch.device:
    """Return the device of this name; by default the GPU, if there is one.

    Raises:
        ValueError: the device cannot be used here.
    """
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # The name is unknown, or PyTorch was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {name} cannot be used: {str(error).partition(chr(10))[0]}; leave it out"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"--device {name} is neither cpu nor cuda, where the ops run; use one of them"
        )
    return device


def load(
    path: Path, tokenizer: str, dtype: torch.dtype, device: torch.device, draft: bool = False
) -> tuple[Decoder, Tokenizer]:
    """Return the model, on one device, and its tokenizer.

    draft: load the layers that predict further tokens as well.

    Raises:
        ValueError: the weights at `path` cannot be used.
    """
    # A Hugging Face folder says itself how many layers predict further tokens.
    in_hf = (path / CONFIG).is_file()
    keys = ["--model.mtp_layers", str(mtp_depth(read_config(path)))] if in_hf and draft else []
    keys += ["--model.tokenizer_path", tokenizer] if tokenizer else []
    origin = Origin.reading(path, keys)
    if draft and not origin.config.model.mtp_layers:
        raise ValueError(
            f"--draft: '{path}' has no layers that predict further tokens; leave it out"
        )
    # Check the checkpoint and the tokenizer before the model is allocated.
    weights = Path(origin.config.checkpoint.initial_load_path)
    text = origin.tokenizer
    if not in_hf:
        verify(weights)
    key = "--tokenizer" if tokenizer else "model.tokenizer_path of its run"
    if warning := other_tokenizer(weights, text, f"'{weights}'", key):
        print(warning, file=sys.stderr)
    model = allocated(origin.model, dtype, device)
    origin.load(model)
    return model, text


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("titan-linear generate", __doc__)
    option = parser.add_argument
    option("path", metavar="PATH", help="a checkpoint of ours, or a Hugging Face folder")
    option("--prompt", action="append", default=[], help="may be given several times")
    option("--chat", action="store_true", help="converse, by the tokenizer's chat template")
    option("--max-new-tokens", type=int, default=100)
    option(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the likeliest token (default: 0.8)",
    )
    option(
        "--top-p",
        type=float,
        default=1.0,
        help="share of the likeliest tokens drawn from (default: 1)",
    )
    option(
        "--draft",
        action="store_true",
        help="draft with the layers that predict a further token; the text stays",
    )
    option("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    option(
        "--tokenizer",
        default="",
        help="a tokenizer.json to use instead of the run's or the folder's",
    )
    option(
        "--dtype",
        choices=DTYPES,
        help="dtype of compute (default: bfloat16 on a GPU, float32 on the CPU)",
    )
    option("--device", help="default: cuda if there is a GPU")
    option("--impl", default="auto", help="implementation of the ops (default: auto)")
    return parser.parse_args(argv)
