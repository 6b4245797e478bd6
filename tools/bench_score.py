"""How fast titan-linear score and evaluate are beside a forward of the same model, whose weights are drawn.

    python -m tools.bench_score --models qwen3.5/9B --seq-len 131072 -- --training.dtype bfloat16
    torchrun --nproc-per-node 4 -m tools.bench_score --models qwen3.5/9B --seq-len 131072 -- \\
        --training.dtype bfloat16 --parallelism.context_parallel_degree 4

Arguments are those of tools.bench_train. Rates are of all GPUs: of the layers alone, of a forward with the head, of
evaluation.tasks at evaluation.lengths, and of scoring, which takes the likeliest 64 tokens too and writes them; and of
both as shares of the forward's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from titan_linear import score
from titan_linear.config import Config
from titan_linear.data import Streams
from titan_linear.data.corpus.scores import Rows, begin
from titan_linear.distributed.groups import on_rank_0, process_group
from titan_linear.distributed.process import run_command
from titan_linear.losses.loss import logprobs
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.run.evaluate import examine, open_prompts
from titan_linear.run.reading import Columns, open_reader
from tools.bench_train import TOP, configurations, header, parse, random_corpora
from tools.peers import be_alone


def of_layers(
    logits: ChunkedLogits, labels: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    return (logits.x[:, 0].float(),)


def with_head(
    logits: ChunkedLogits, labels: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    return (logprobs(logits, labels),)


def main(argv: list[str]) -> int:
    args, keys = parse(argv)
    be_alone()
    with (
        process_group(timedelta(minutes=30)),
        random_corpora(args, args.steps * dist.get_world_size()) as corpora,
    ):
        for name, _, config in configurations(args, keys, dist.get_world_size(), corpora):
            rates = measured(config)
            if dist.get_rank() == 0:
                parts = (f"{what} {rate:,.0f}" for what, rate in rates.items())
                shares = ", ".join(
                    f"{rates[what] / rates['forward']:.1%}" for what in ("evaluate", "score")
                )
                print(f"{header()}\n{name}, tokens/s: {', '.join(parts)}; {shares}")
    return 0


def measured(config: Config) -> dict[str, float]:
    reader, size = open_reader(config), config.training.local_batch_size
    streams = score.streams_to_score(config, reader.tokenizer)

    def rate(work: Callable[[], object], of: Streams = streams) -> float:
        begun = time.perf_counter()
        work()
        return len(of) * of.seq_len / (time.perf_counter() - begun)

    def read(columns: Columns) -> list[list[Rows]]:
        return list(reader.read(streams, columns, 0, size))

    read(with_head)  # compiles
    rates = {"layers": rate(lambda: read(of_layers)), "forward": rate(lambda: read(with_head))}
    prompts = open_prompts(config, reader.tokenizer)
    rates["evaluate"] = rate(lambda: examine(reader, prompts), prompts)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(on_rank_0(lambda: own, reader.host))
        asked, _ = score.parse(["PATH", "--output", str(folder), "--top-k", str(TOP)])
        on_rank_0(
            lambda: begin(folder, *score.scores_of(asked, config, reader.tokenizer)), reader.host
        )
        return rates | {"score": rate(lambda: score.score(folder, reader, streams))}


if __name__ == "__main__":
    run_command(main)
