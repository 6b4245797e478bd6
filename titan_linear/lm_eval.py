"""lm-evaluation-harness on trained weights, without an export, under any split (pip install 'titan_linear[eval]').

NGPU=4 titan-linear lm-eval outputs/a --tasks arc_easy,wikitext --limit 100 --parallelism.context_parallel_degree 4

PATH is a run's folder or its checkpoint/, a step-N in it, or a Hugging Face folder. Options with a dot in their names
are keys, the run's own ones changed; all others are those of `lm_eval run`, whose --model titan_linear this is.
Requests are packed as documents; none is cut. Texts are generated with the likeliest tokens, one at a time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from titan_linear.commands import command_parser
from titan_linear.config import Config, load_config
from titan_linear.data import Prompts, Sample
from titan_linear.data.streams.prompts import rows_of
from titan_linear.distributed.process import own_device, refusing, run_command, under_launcher
from titan_linear.launch import run_workers
from titan_linear.run.evaluate import examine, stream_length
from titan_linear.run.generate import Sampling, continuations
from titan_linear.run.reading import Reader, open_reader
from titan_linear.score import checked, joined


@refusing
def main(argv: list[str]) -> int:
    options, keys = parted(argv)
    if under_launcher():
        return joined(load_config(keys), partial(harness, options))
    parser = command_parser(
        "titan-linear lm-eval", __doc__, usage="titan-linear lm-eval PATH --tasks …"
    )
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint of ours, or a Hugging Face folder"
    )
    args, options = parser.parse_known_args(options)
    if not find_spec("lm_eval"):
        raise ValueError("lm-evaluation-harness is not installed; pip install 'titan_linear[eval]'")
    config, node, *_ = checked(args.path, keys)
    return run_workers(config, node, "titan_linear.lm_eval", options)


def parted(argv: list[str]) -> tuple[list[str], list[str]]:
    """Options of lm_eval and keys, each with its values."""
    options: list[str] = []
    keys: list[str] = []
    into = options
    for text in argv:
        if text.startswith("--"):
            into = keys if "." in text.partition("=")[0] else options
        into.append(text)
    return options, keys


def harness(options: list[str], config: Config) -> None:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    register_model("titan_linear")(adapted(config))
    sys.argv = ["lm_eval", "run", "--model", "titan_linear", *options]
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere) if dist.get_rank() else nullcontext(),
    ):
        cli_evaluate()


def likelihoods(
    requests: Sequence[tuple[list[int], int]], reader: Reader
) -> list[tuple[float, bool]]:
    """Of the tokens of each from a place on, on every rank: log p, and whether greedy decoding would write them."""
    samples = [Sample("", len(tokens), 0.0, i) for i, (tokens, _) in enumerate(requests)]
    prompts = Prompts(
        samples,
        lambda sample: rows_of(requests[sample.number][0], 0, requests[sample.number][1]),
        stream_length(reader.config, max(sample.length for sample in samples)),
    )
    shown = [
        examine(
            reader,
            prompts,
            show=lambda _, rows: [(float(rows[:, 4].sum()), bool(rows[:, 3].all()))],
        )
    ]
    dist.broadcast_object_list(shown, group=reader.host)
    return shown[0]


def adapted(config: Config) -> type:
    """The class that lm_eval takes, of this rank's model."""
    from lm_eval.api.model import TemplateLM

    reader = open_reader(config)

    class TitanLinear(TemplateLM):
        @classmethod
        def create_from_arg_string(cls, *_: Any) -> TitanLinear:
            return cls()

        create_from_arg_obj = create_from_arg_string
        eot_token_id = reader.tokenizer.eos_id

        def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
            return reader.tokenizer.encode(string).tolist()

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return likelihoods(
                [(context + more, len(context)) for _, context, more in requests], reader
            )

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            texts = [
                [self.prefix_token_id, *self.tok_encode(request.args[0])] for request in requests
            ]
            return [
                logprob for logprob, _ in likelihoods([(tokens, 1) for tokens in texts], reader)
            ]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return [self._until(*request.args) for request in requests]

        def _until(self, text: str, options: dict[str, Any]) -> str:
            until = options.get("until") or []
            with reader.precision:
                (new,) = continuations(
                    reader.model,
                    reader.tokenizer,
                    [self.tok_encode(text)],
                    max_new_tokens=options.get("max_gen_toks", 256),
                    sampling=Sampling(),
                    device=own_device(),
                )
            written = reader.tokenizer.decode(new)
            for end in [until] if isinstance(until, str) else until:
                written = written.partition(end)[0]
            return written

    return TitanLinear


if __name__ == "__main__":
    run_command(main)
