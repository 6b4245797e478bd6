"""Where the time of a trace of torch.profiler goes: the largest costs, idle time, communication that nothing hides.

python -m tools.trace outputs/debug/profile_traces/rank0_step10.json
python -m tools.trace trace.json.gz --rows 30

For a GPU's trace, between the first kernel's beginning and the last one's end, without the validations and saves that a
run has between its steps:

    idle      the share in which no kernel or copy runs
    exposed   the share in which communication runs (NCCL's kernels, copies between GPUs, exchanges in mapped memory)
              and nothing else does
    costs     kernels and copies by name: their times added up, over all streams

For a trace without a GPU, the operators' own times, without those of the operators that they call, and no shares.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from titan_linear.process import refusing, run_command
from titan_linear.traces import Event, costs, on_device, own_costs, read, stretches, summary


def report(events: Sequence[Event], rows: int) -> str:
    s, trained = summary(events), [e for part in stretches(events) for e in part]
    host = not s.launches
    span = s.span or math.inf  # 0 if kernels took no time
    largest, whole = (own_costs if host else costs)(trained if host else on_device(trained), rows), s.busy * 1e3
    lines = ["no kernels of a GPU: operators of the host" if host else (
        f"{s.span * 1e3:,.1f} ms{f', training steps: {s.steps}' if s.steps else ''}, {s.launches:,} launches: idle "
        f"{1 - s.busy / span:.1%}, communication {s.communication / span:.1%}, exposed {s.exposed / span:.1%}"
    )]  # fmt: skip
    lines += ["", "| ms | of the busy time | calls | |", "|---|---|---|---|"]
    for cost in largest:
        share = "–" if host else f"{cost.ms / (whole or math.inf):.1%}"
        lines.append(f"| {cost.ms:,.2f} | {share} | {cost.calls:,} | `{cost.name.replace('|', ' ')}` |")
    return "\n".join(lines)


@refusing(ValueError)
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a Chrome trace, .json or .json.gz")
    parser.add_argument("--rows", type=int, default=10, help="costs to print (default: 10)")
    args = parser.parse_args(argv)
    if args.rows < 1:
        raise ValueError(f"--rows {args.rows} must be 1 or more")
    print(report(read(args.trace), args.rows))
    return 0


if __name__ == "__main__":
    run_command(main)
