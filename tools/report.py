"""Show runs side by side on one self-contained page of HTML: no network, no scripts.

python -m tools.report outputs/debug
python -m tools.report outputs/kda outputs/gdn outputs/hybrid --out report.html --x tokens

The page has loss and validation, gradient norm, learning rate, throughput, memory, loss by source; what telemetry saw
last: loss by position, decay half-lives and gradient norms by layer; where configurations differ; the environment of
each run; spikes. It shows whatever a folder holds: a run that is under way, or a copy of its .jsonl, .toml and .json
files.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from titan_linear.config import Config, flat_keys, load_config, tokens_at, toml_value
from titan_linear.process import refusing, run_command
from titan_linear.rundir import CONFIG, MANIFEST, METRICS, SPIKES, TELEMETRY

COLOURS = ("#2f6fde", "#d9622b", "#2a9d5c", "#9b4fc4", "#c23a6b", "#6d7a1f", "#158a9c", "#7a5c3e")
DASHES = ("", "6 4")
POINTS = 2000  # per curve, about
SEEN = (  # the quantities of telemetry that are shown
    "loss_by_position", "loss_by_source", "grad_norm", "update_norm", "half_life", "carried_share", "attention_entropy",
)  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 280, 62, 12, 12, 34  # of a chart, and its margins
STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #66707f; --line: #dfe3ea; --paper: #fff; --mark: #fff4d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #97a1b0; --line: #333b47; --paper: #161a20; --mark: #3d3517; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: .95rem; margin: 0 0 .3rem; font-weight: 600; }
table { border-collapse: collapse; font-size: .87rem; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .28rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; } th { color: var(--soft); font-weight: 600; }
tr.differs td { background: var(--mark); } .soft { color: var(--soft); font-size: .87rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.6rem 1.2rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); } .grid { stroke: var(--line); }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em; }
"""


@dataclass(frozen=True)
class Run:
    """What a run's folder holds."""

    name: str
    colour: str
    steps: list[dict[str, Any]]  # metrics.jsonl's lines about training steps
    validations: list[dict[str, Any]]
    traces: list[dict[str, Any]]  # metrics.jsonl's lines about what traces showed
    telemetry: list[dict[str, Any]]
    spikes: list[dict[str, Any]]
    config: Config | None
    manifest: dict[str, Any]


class Curve(NamedTuple):
    name: str
    colour: str
    points: list[tuple[float, float | None]]  # in the order of x; None: a gap
    style: int = 0  # index into DASHES


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders. ValueError: a folder holds no run, or lines that no run writes."""
    names = [folder.absolute().name for folder in folders]
    names = [str(f) if names.count(name) > 1 else name for f, name in zip(folders, names, strict=True)]
    return [
        read_run(f, name, COLOURS[n % len(COLOURS)]) for n, (f, name) in enumerate(zip(folders, names, strict=True))
    ]


def read_run(folder: Path, name: str, colour: str) -> Run:
    if not (folder / METRICS).is_file():
        raise ValueError(f"'{folder}' holds no {METRICS}; give the folder of a run (job.dump_folder)")
    lines, manifest = read_lines(folder / METRICS), folder / MANIFEST
    return Run(
        name, colour,
        *([line for line in lines if key in line] for key in ("loss", "validation_loss", "exposed_communication")),
        read_lines(folder / TELEMETRY, _is_seen), read_lines(folder / SPIKES, _is_spike), read_config(folder / CONFIG),
        _object(manifest.read_text(encoding="utf-8", errors="replace"), manifest, "it") if manifest.is_file() else {},
    )  # fmt: skip


def read_config(path: Path) -> Config | None:
    """The configuration; None: it is missing or, as a warning says, of another version that this one cannot read."""
    try:
        return load_config(["--job.config_file", str(path)]) if path.is_file() else None
    except ValueError as error:
        print(f"warning: '{path}' is not of this version, and left out: {error}", file=sys.stderr)
        return None


def _is_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int


def read_lines(path: Path, is_line: Callable[[dict[str, Any]], bool] = _is_step) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, if it exists; without a last line that is still being written."""
    if not path.is_file():
        return []
    *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = [_object(line, path, f"line {i}") for i, line in enumerate(lines, 1)]
    if wrong := next((i for i, line in enumerate(found, 1) if not is_line(line)), 0):
        raise ValueError(f"'{path}': line {wrong} is none that a run writes; repair it, or leave the run out")
    return found


def _is_seen(line: dict[str, Any]) -> bool:
    """Whether a line is telemetry: quantities are given by name, and positions are numbers."""
    named = all(isinstance(line.get(quantity, {}), dict) for quantity in SEEN)
    return _is_step(line) and named and all(p.isdecimal() and int(p) for p in line.get("loss_by_position", {}))


def _is_spike(line: dict[str, Any]) -> bool:
    batches = line.get("micro_batches", [])
    return isinstance(batches, list) and all(isinstance(m, dict) and {"streams", "loss"} <= m.keys() for m in batches)


def _object(text: str, path: Path, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"'{path}': {where} is no JSON object; repair it, or leave the run out")
    return found


# --- Curves ----------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[Run], key: str, x: str, of: str = "steps", style: int = 0, what: str = "") -> list[Curve]:
    """A curve for each run that has this number."""
    found = []
    for run in runs:
        lines = [line for line in getattr(run, of) if key in line]
        points = [(_place(run, line, x), _number(line[key])) for line in lines]
        if any(y is not None for _, y in points):
            found.append(Curve(run.name + what, run.colour, points, style))
    return found


def _place(run: Run, line: dict[str, Any], x: str) -> float:
    """Where a line lies on the x axis. For a run without its configuration, tokens per step are estimated from the last
    line that states tokens."""
    if x == "step":
        return line["step"]
    if run.config is not None:
        return tokens_at(run.config.training, line["step"])
    each = (tokens / s["step"] for s in reversed(run.steps) if s["step"] and (tokens := _number(s.get("tokens"))))
    return line["step"] * next(each, 0.0)


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _middle(values: list[Any]) -> float | None:
    """The median of those values that are numbers: non-finite ones are written as text."""
    known = [x for x in map(_number, values) if x is not None]
    return median(known) if known else None


def by_layer(runs: Sequence[Run], quantity: str) -> list[Curve]:
    """What telemetry saw last, by layer: a number, or the median over heads."""
    found = []
    for run in runs:
        seen = next((line[quantity] for line in reversed(run.telemetry) if quantity in line), {})
        layers = {int(n[1]): value for name, value in seen.items() if (n := re.fullmatch(r"layers\.(\d+)", name))}
        points = [(n, _middle(v) if isinstance(v, list) else _number(v)) for n, v in sorted(layers.items())]
        if points:
            found.append(Curve(run.name, run.colour, points))
    return found


def by_position(runs: Sequence[Run]) -> list[Curve]:
    """Loss by position in the document: what telemetry saw last (solid) and first (dashed), over log2."""
    found = []
    for run in runs:
        lines = [line for line in run.telemetry if "loss_by_position" in line]
        for line, style in [(line, 0) for line in lines[-1:]] + [(line, 1) for line in lines[:-1][:1]]:
            points = [(math.log2(int(p)), _number(y)) for p, y in line["loss_by_position"].items()]
            found.append(Curve(f"{run.name}, step {line['step']}", run.colour, points, style))
    return found


def by_source(runs: Sequence[Run], x: str) -> dict[str, list[Curve]]:
    """Name of a source or group of files → for each run that has it, a curve of its loss, as telemetry saw it."""
    found: dict[str, list[Curve]] = {}
    for run in runs:
        lines = [line for line in run.telemetry if "loss_by_source" in line]
        for name in dict.fromkeys(name for line in lines for name in line["loss_by_source"]):
            own = [line for line in lines if name in line["loss_by_source"]]
            points = [(_place(run, line, x), _number(line["loss_by_source"][name])) for line in own]
            found.setdefault(name, []).append(Curve(run.name, run.colour, points))
    return found


# --- Charts ----------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in short, such as 1.5e-4, 0.25, 12k, 1.2M."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    return f"{value:.1e}".replace("e-0", "e-") if 0 < size < 1e-3 else f"{value:.4g}"


def whole(value: float) -> str:
    """A whole number's text; "" for any other number."""
    return f"{value:.0f}" if float(value).is_integer() else ""


def chart(title: str, lines: Sequence[Curve], x_name: str, show_x: Callable[[float], str] = short) -> str:
    """A figure; "" if there are no curves."""
    xs = [x for c in lines for x, _ in c.points]
    ys = [y for c in lines for _, y in c.points if y is not None]
    if not ys:
        return ""
    (x0, x1), (y0, y1) = (min(xs), max(xs)), _room(ys)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return LEFT + across * (right - LEFT), bottom - (y - y0) / (y1 - y0) * (bottom - TOP)

    parts = []
    for y in ticks(y0, y1):
        v = at(x0, y)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{v:.1f}" y2="{v:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{v + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in ticks(x0, x1):
        u = at(x, y0)[0]
        parts.append(f'<text x="{u:.1f}" y="{bottom + 16}" text-anchor="middle">{show_x(x)}</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(x_name)}</text>')
    parts += [_drawn(c, at) for c in lines]
    body = "".join(parts)
    described = html.escape(f"{title}: {', '.join(c.name for c in lines)}")
    return (
        f'<figure style="margin:0"><h3>{html.escape(title)}</h3><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{described}">{body}</svg></figure>'
    )


def _room(ys: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: that of the values and a little around it."""
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.35 * high else low - margin), high + margin


def _drawn(curve: Curve, at: Callable[[float, float], tuple[float, float]]) -> str:
    """Lines between gaps, and points with their numbers: all if there are few, else the last."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in curve.points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    out, dash = [], f' stroke-dasharray="{DASHES[curve.style]}"' if curve.style else ""
    for piece in map(thinned, filter(None, pieces)):
        path = " ".join(f"{u:.1f},{v:.1f}" for u, v in (at(x, y) for x, y in piece))
        out.append(f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="1.8"{dash}/>')
    whole = [point for piece in pieces for point in piece]
    for x, y in whole if len(whole) <= 80 else whole[-1:]:
        (u, v), text = at(x, y), html.escape(f"{curve.name}: {short(y)} at {short(x)}")
        out.append(f'<circle cx="{u:.1f}" cy="{v:.1f}" r="2.6" fill="{curve.colour}"><title>{text}</title></circle>')
    return "".join(out)


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """About POINTS points at most: of each group of neighbours the highest and the lowest, so that outliers stay."""
    size = -(-2 * len(points) // POINTS)
    if len(points) <= POINTS:
        return points
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [p for part in parts for p in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})]


def charts(runs: Sequence[Run], x: str) -> list[str]:
    name = "step" if x == "step" else "tokens"

    def of(title: str, *keys: str, what: Sequence[str] = ("", "")) -> str:
        lines = [c for n, key in enumerate(keys) for c in curves(runs, key, x, style=n, what=what[n])]
        return chart(title, lines, name)

    validation = curves(runs, "validation_loss", x, "validations", 1, ", validation")
    drawn = [
        chart("Loss, nats per token (dashed: validation)", curves(runs, "loss", x) + validation, name),
        of("Gradient norm", "grad_norm"),
        of("Learning rate", "lr"),
        of("Tokens a second (dashed: with a label)", "tokens_per_second", "valid_tokens_per_second",
           what=("", ", with a label")),
        of("TFLOP/s of a GPU", "tflops"),
        of("MFU", "mfu"),
        of("Share of time without data", "data_wait"),
        chart("Share of a step in which a GPU only communicates", curves(runs, "exposed_communication", x, "traces"),
              name),
        of("Memory, GiB (dashed: reserved)", "memory_gib", "memory_reserved_gib", what=("", ", reserved")),
        chart("Loss by position in the document (dashed: at first)", by_position(runs), "position",
              lambda x: whole(x) and short(2**x)),
        *(chart(f"Loss of source {source}", lines, name) for source, lines in by_source(runs, x).items()),
        chart("Gradient norm by layer, last", by_layer(runs, "grad_norm"), "layer", whole),
        chart("Update norm by layer, last", by_layer(runs, "update_norm"), "layer", whole),
        chart("Decay half-life in tokens by layer, median of heads, last", by_layer(runs, "half_life"), "layer", whole),
        chart("Share of the output carried over, by layer, median of heads, last", by_layer(runs, "carried_share"),
              "layer", whole),
        chart("Entropy of attention by layer, 1: even, median of heads, last", by_layer(runs, "attention_entropy"),
              "layer", whole),
    ]  # fmt: skip
    return [figure for figure in drawn if figure]


# --- Tables ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """A table in HTML. Cells are HTML; a marked row is one that differs between runs."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr{' class=differs' if marked else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for cells, marked in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def named(run: Run) -> str:
    return f'<span class="swatch" style="background:{run.colour}"></span>{html.escape(run.name)}'


def summary(runs: Sequence[Run]) -> str:
    head = ("run", "steps", "loss", "validation, best", "tokens", "tokens a second, median", "memory, GiB", "skipped",
            "spikes", "description")  # fmt: skip
    return table(head, ((_summed_up(run), False) for run in runs))


def _summed_up(run: Run) -> list[str]:
    last = run.steps[-1] if run.steps else {}
    rates = [y for line in run.steps[1:] or run.steps if (y := _number(line.get("tokens_per_second")))]
    losses = [y for line in run.validations if (y := _number(line["validation_loss"])) is not None]
    of = f" of {run.config.training.steps}" if run.config else ""
    loss = _number(last.get("loss"))
    return [
        named(run), f"{last.get('step', 0)}{of}", "–" if loss is None else f"{loss:.4f}",
        f"{min(losses):.4f}" if losses else "–", short(_number(last.get("tokens")) or 0),
        f"{median(rates):,.0f}" if rates else "–",
        f"{max((_number(line.get('memory_gib')) or 0.0 for line in run.steps), default=0.0):.2f}",
        html.escape(str(last.get("skipped_steps", 0))), str(len(run.spikes)),
        html.escape(run.config.job.description if run.config else ""),
    ]  # fmt: skip


def compared(runs: Sequence[Run], values: Sequence[dict[str, str]], only_differences: bool) -> str:
    """A row for each key, a column for each run."""
    keys = list(dict.fromkeys(key for each in values for key in each))
    rows = []
    for key in keys:
        own = [each.get(key, "–") for each in values]
        if (differs := len(set(own)) > 1) or not only_differences:
            rows.append(
                ([f"<code>{html.escape(key)}</code>", *map(html.escape, own)], differs and not only_differences)
            )
    return table(("", *map(named, runs)), rows) if rows else '<p class="soft">None.</p>'


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} → {"a.b": "1"}"""
    out: dict[str, str] = {}
    for key, x in value.items():
        out |= flat(x, f"{prefix}{key}.") if isinstance(x, dict) else {prefix + key: _text(x)}
    return out


def _text(value: Any) -> str:
    return "–" if value is None else ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def configuration(run: Run) -> dict[str, str]:
    keys = flat_keys(run.config) if run.config else {}
    return {key: toml_value(x) for key, x in keys.items() if key not in ("job.config_file", "job.dump_folder")}


def spikes(runs: Sequence[Run]) -> str:
    keys = ("step", "why", "loss", "mean", "sigma")
    rows = [
        ([named(run), *(html.escape(str(s.get(key, "–"))) for key in keys),
          html.escape(", ".join(f"{m['streams']}: {m['loss']}" for m in s.get("micro_batches", [])[:8]))], False)
        for run in runs for s in run.spikes[-20:]
    ]  # fmt: skip
    head = ("run", "step", "why", "loss", "mean before", "sigma", "streams and their losses (the first 8)")
    return table(head, rows) if rows else '<p class="soft">None.</p>'


# --- The page --------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Run], x: str) -> str:
    configurations = [configuration(run) for run in runs]
    legend = " &nbsp; ".join(map(named, runs))
    title = "Runs: " + ", ".join(run.name for run in runs)
    parts = [
        f"<h1>{html.escape(title)}</h1>", summary(runs),
        f'<h2>Curves</h2><p>{legend}</p><div class="charts">{"".join(charts(runs, x))}</div>',
    ]  # fmt: skip
    if len(runs) > 1:
        parts.append("<h2>Where configurations differ</h2>" + compared(runs, configurations, only_differences=True))
    parts += [
        "<h2>Spikes</h2>" + spikes(runs),
        "<h2>Environment</h2>" + compared(runs, [flat(run.manifest) for run in runs], only_differences=False),
        "<h2>Configuration</h2><details><summary>all keys</summary>"
        + compared(runs, configurations, only_differences=False) + "</details>",
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title><style>{STYLE}</style>'
        f"</head><body>{''.join(parts)}</body></html>\n"
    )


def write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out {file} cannot be written: {error.strerror}; give another file") from None


@refusing(ValueError)
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (default: report.html)")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="x axis of the curves (default: step)")
    args = parser.parse_args(argv)
    write(args.out, page(read_runs(args.runs), args.x))
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
