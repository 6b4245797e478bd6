"""lm-evaluation-harness on trained weights, under any split (pip install
'titan_linear[eval]').

NGPU=4 titan-linear lm-eval outputs/a --tasks arc_easy,wikitext --limit 100 --parallelism.context_parallel_degree 4

The weights need no export. PATH is a run's folder or its checkpoint/, a step-N in it, or a
Hugging Face folder. Options with a dot in their names are keys, which change the run's own.
All other options are passed to `lm_eval run`, whose --model is titan_linear. Requests are
packed as documents; none is cut. Texts are generated one at a time, with the likeliest
tokens unless the task samples (do_sample, temperature, top_p).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch.distributed as dist

from titan_linear.commands import command_parser
from titan_linear.commands.score import checked, joined
from titan_linear.config import Config
from titan_linear.data import Prompts, TaskSample
from titan_linear.data.corpus.chat import Conversations
from titan_linear.data.streams.prompts import rows_of
from titan_linear.distributed.process import own_device, refusing, run_command, under_launcher
from titan_linear.run.evaluate import examine
from titan_linear.run.generate import Sampling, continuations
from titan_linear.run.launch import run_workers
from titan_linear.run.reading import Reader, open_reader

CHAT = "--apply_chat_template"
# Names in a task's generation_kwargs. The first length that is given counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Of each request: its log p, and whether greedy decoding yields it.
Likelihoods = list[tuple[float, bool]]
OPTIONS = {*LENGTHS, "max_length", "until", "do_sample", "temperature", "top_p"}


@refusing
def main(argv: list[str]) -> int:
    options, keys = parted(argv)
    # A worker runs the harness. The first process checks everything, then starts the
    # workers.
    if under_launcher():
        return joined(keys, partial(harness, options))
    parser = command_parser(
        "titan-linear lm-eval", __doc__, usage="titan-linear lm-eval PATH --tasks …"
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint of ours, or a Hugging Face folder",
        # Everything that can be refused is refused here, before a process starts.
    )
    args, options = parser.parse_known_args(options)
    if not find_spec("lm_eval"):
        raise ValueError("lm-evaluation-harness is not installed; pip install 'titan_linear[eval]'")
    origin, node = checked(args.path, keys)
    given = {option.partition("=")[0] for option in options}
    if given & {"--model_args", "-a"}:
        raise ValueError("--model_args: PATH and keys say what is evaluated; leave it out")
    if CHAT in given:
        Conversations(origin.tokenizer, CHAT)
    return run_workers(origin.config, node, "titan_linear.commands.lm_eval", options)


def parted(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into options of lm_eval and keys, each with its values."""
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

    register_model("titan_linear")(adapted(open_reader(config)))
    sys.argv = ["lm_eval", "run", "--model", "titan_linear", *options]
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere) if dist.get_rank() else nullcontext(),
    ):
        cli_evaluate()


def likelihoods(requests: Sequence[tuple[list[int], int]], reader: Reader) -> Likelihoods:
    """Return each request's log p from a position on, and whether greedy decoding yields
    it.

    Every rank has all of them. A request without tokens from there on has 0.0 and True.
    """
    # Requests without tokens to score are left out here and filled in at the end.
    samples = [
        TaskSample("", len(tokens), 0.0, i)
        for i, (tokens, begin) in enumerate(requests)
        if begin < len(tokens)
    ]
    longest = max([reader.config.training.seq_len, *(sample.length for sample in samples)])
    prompts = Prompts(
        samples,
        lambda sample: rows_of(requests[sample.number][0], 0, requests[sample.number][1]),
        reader.config.parallelism.even_length(longest),
    )

    def show(_: TaskSample, rows: np.ndarray) -> Likelihoods:
        return [(float(rows["logprob"].sum()), bool(rows["likeliest"].all()))]

    shown = [examine(reader, prompts, show=show)]
    dist.broadcast_object_list(shown, group=reader.session.host)
    # Rank 0 has the results; all ranks need them, because the harness runs on each.
    scored = iter(shown[0])
    return [next(scored) if begin < len(tokens) else (0.0, True) for tokens, begin in requests]


def decoding(options: dict[str, Any], context: int, seed: int) -> dict[str, Any]:
    """Return how a text is generated after `context` tokens, from a task's
    generation_kwargs.

    Raises:
        ValueError: generation_kwargs ask for something that is not supported.
    """
    # A value of 1 is neutral: num_beams, repetition_penalty.
    if unused := [name for name, x in options.items() if name not in OPTIONS and x != 1]:
        raise ValueError(f"generation_kwargs: {unused[0]} is not used here; leave it out")
    # `max_length` counts the context as well.
    most = next((options[name] for name in LENGTHS if name in options), 256)
    if "max_length" in options:
        most = max(options["max_length"] - context, 0)
    # Greedy decoding is temperature 0.
    drawn = options.get("do_sample", "temperature" in options)
    temperature = options.get("temperature", 1.0) if drawn else 0.0
    return {
        "max_new_tokens": most,
        "sampling": Sampling(temperature, options.get("top_p", 1.0), seed),
    }


def adapted(reader: Reader) -> type:
    """Return a class of models for lm_eval that reads this rank's model.

    It treats texts as lm_eval's `hf` does.
    """
    from lm_eval.api.model import TemplateLM

    tokenizer = reader.tokenizer
    chat = cache(lambda: Conversations(tokenizer, CHAT))
    first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if first is None:
        raise ValueError(
            "model.tokenizer_path: the tokenizer has neither bos_token nor eos_token, one of which stands before "
            "a text without context; name one in tokenizer_config.json"
        )

    class TitanLinear(TemplateLM):
        eot_token_id = tokenizer.eos_id
        prefix_token_id: int = first
        tokenizer_name = tokenizer.fingerprint

        @classmethod
        def create_from_arg_string(cls, *_: Any) -> TitanLinear:
            return cls()

        create_from_arg_obj = create_from_arg_string

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            tokens = tokenizer.encode(string).tolist()
            # A chat template may already have written the first ids.
            begun = add_special_tokens is False or tokens[:1] == tokenizer.first_ids
            return tokens if begun else tokenizer.first_ids + tokens

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return chat().source if chat_template else None

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return chat().text(chat_history, add_generation_prompt)

        def loglikelihood(self, requests: Any, **_: Any) -> Likelihoods:
            encoded = []
            for context, more in (request.args for request in requests):
                if context:
                    encoded.append(("", *self._encode_pair(context, more)))
                else:
                    tokens = self.tok_encode(more, add_special_tokens=False)
                    encoded.append(("", [], tokens[tokens[:1] == [self.prefix_token_id] :]))
            return self._loglikelihood_tokens(encoded)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Likelihoods:
            pairs = [(context or [self.prefix_token_id], more) for _, context, more in requests]
            return likelihoods([(context + more, len(context)) for context, more in pairs], reader)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            texts = [[self.prefix_token_id, *self.tok_encode(*x.args)] for x in requests]
            return [logprob for logprob, _ in likelihoods([(text, 1) for text in texts], reader)]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return [self._until(i, *request.args) for i, request in enumerate(requests)]

        def _until(self, number: int, text: str, options: dict[str, Any]) -> str:
            context = self.tok_encode(text) or [self.prefix_token_id]
            ends = options.get("until") or []
            ends = [ends] if isinstance(ends, str) else [*filter(None, ends)]

            def stops(new: list[int]) -> bool:
                written = tokenizer.decode(new, special=True)
                return any(end in written for end in ends)

            with reader.session.precision:
                (new,) = continuations(
                    reader.session.model,
                    tokenizer,
                    [context],
                    **decoding(options, len(context), reader.config.debug.seed + number),
                    stops=stops,
                    device=own_device(),
                )
            written = tokenizer.decode(new)
            for end in ends:
                written = written.partition(end)[0]
            return written

    return TitanLinear


if __name__ == "__main__":
    run_command(main)
