"""The page of several runs: what is on it, and that it needs nothing else."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from titan_linear.config import load_config
from titan_linear.rundir import write_config
from tools import report
from tools.report import short, ticks


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A run with all there is, and one that has just begun, its last line being written."""
    folders = [tmp_path / "a", tmp_path / "b <i>"]
    for n, folder in enumerate(folders):
        folder.mkdir()
        lr, size = f"--optimizer.lr={(n + 1) / 1000}", "--training.global_batch_size=4"
        write_config(load_config([f"--job.dump_folder={folder}", lr, size, "--job.description=a & b"]))
        steps = [
            {"step": s, "loss": None if s == 3 else 5.0 / s, "lr": 0.1, "grad_norm": 1.0, "tokens": 8192 * s,
             "tokens_per_second": 1e5 * s, "memory_gib": 1.5, "skipped_steps": 0}
            for s in range(1, 6 - 4 * n)
        ]  # fmt: skip
        validation = [{"step": 4, "validation_loss": 1.25}] if n == 0 else []
        text = "".join(json.dumps(line) + "\n" for line in steps + validation)
        text += '{"step": 4, "exposed_communication": 0.05, "exposed_communication_seconds": 0.02}\n'
        (folder / "metrics.jsonl").write_text(text + '{"step": 9, "lo' * n)
    telemetry = [
        {"step": s, "loss_by_position": {"1": 4.0, "2": 3.0, "4": 2.5}, "grad_norm": {"layers.0": 1.0, "head": 2.0},
         "half_life": {"layers.0": [10.0, 30.0]}, "loss_by_source": {"code": 3.0 / s, "<i>": 2.0}}
        for s in (2, 4)
    ]  # fmt: skip
    (folders[0] / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in telemetry))
    spike = {"step": 5, "why": "outlier", "loss": 9.0, "mean": 1.0, "sigma": 0.1,
             "micro_batches": [{"streams": [16, 17], "tokens": 9, "loss": 12.0}]}  # fmt: skip
    (folders[0] / "spikes.jsonl").write_text(json.dumps(spike) + "\n")
    (folders[0] / "manifest.json").write_text(json.dumps({"versions": {"torch": "2.13"}, "hardware": {"gpus": []}}))
    return folders


class Tags(HTMLParser):
    """Names of all tags, and where they point."""

    def __init__(self, text: str):
        super().__init__()
        self.names, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]


def test_a_run_whose_numbers_are_not_finite(runs: list[Path], tmp_path: Path) -> None:
    """They stand as text in telemetry; and a spike may lack all but its step."""
    seen = {
        "half_life": {"layers.0": ["nan", 10.0, 30.0], "layers.1": ["nan", "inf"]},
        "grad_norm": {"layers.0": "nan"},
    }
    with (runs[0] / "telemetry.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, **seen}) + "\n")
    with (runs[0] / "spikes.jsonl").open("ab") as file:
        file.write(b'{"why": "\xff"}\n')
    assert report.main([*map(str, runs), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize("x", ["step", "tokens"])
def test_the_page(x: str, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "page.html"
    assert report.main([*map(str, runs), "--out", str(out), "--x", x]) == 0
    text = out.read_text()
    tags = Tags(text)
    assert tags.links == [] and not {"script", "link", "img", "i"} & set(tags.names) and "http" not in text
    drawn = [ET.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text)]
    titles = re.findall("<h3>(.*?)</h3>", text)
    assert {"Loss of source code", "Loss of source &lt;i&gt;"} < set(titles)
    assert "Share of a step in which a GPU only communicates" in titles
    assert len(drawn) == len(titles) and "Loss by position in the document (dashed: at first)" in titles
    loss = drawn[0]
    assert "a, b &lt;i&gt;, a, validation" in text
    assert len(loss.findall("polyline")) == 2 + 1 + 1  # steps 1–2 and 4–5, beside the gap; b; validation
    assert loss.find("circle").find("title").text == f"a: 5 at {1 if x == 'step' else 8192}"
    rows = re.findall("<tr[^>]*>(.*?)</tr>", text)
    cells = [re.sub("<[^>]*>", "|", row) for row in rows]
    assert any("5 of 1000" in row and "1.0000" in row and "1.2500" in row and "a &amp; b" in row for row in cells)
    differing = text[text.index("Where configurations differ") : text.index("Spikes")]
    assert "optimizer.lr" in differing and "global_batch_size" not in differing and "dump_folder" not in differing
    assert "[16, 17]: 12.0" in text and "versions.torch" in text


def test_a_run_of_another_version(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What is unknown of its configuration is the others' business no more than its own curves'."""
    with (runs[0] / "config.toml").open("a") as file:
        file.write("[another]\nkey = 1\n")
    out = tmp_path / "page.html"
    assert report.main([*map(str, runs), "--out", str(out), "--x", "tokens"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"warning: '{runs[0] / 'config.toml'}' is not of this version, and left out: ")
    assert said.count("\n") == 1 and "a: 5 at 8192" in out.read_text()


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics", '{"loss": 1.0}'),
        ("metrics", '{"step": 1.5, "loss": 1.0}'),
        ("metrics", '{"step": null, "validation_loss": 1.0}'),
        ("telemetry", '{"grad_norm": {"layers.0": 1.0}}'),
        ("telemetry", '{"step": 1, "loss_by_position": {"0": 1.0}}'),
        ("telemetry", '{"step": 1, "half_life": [1.0]}'),
        ("spikes", '{"step": 1, "micro_batches": [1]}'),
        ("spikes", '{"step": 1, "micro_batches": 1}'),
    ],
)
def test_a_line_that_no_run_writes(file: str, line: str, runs: list[Path], capsys: pytest.CaptureFixture) -> None:
    with (path := runs[0] / f"{file}.jsonl").open("a") as lines:
        lines.write(line + "\n")
    last = path.read_text().count("\n")
    assert report.main([str(runs[0])]) == 2
    assert f"'{path}': line {last} is none that a run writes; repair it" in capsys.readouterr().err


def test_values_that_are_no_numbers(runs: list[Path], tmp_path: Path) -> None:
    keys = "tokens", "tokens_per_second", "memory_gib", "loss", "validation_loss"
    with (runs[0] / "metrics.jsonl").open("a") as file:
        for value in (None, "x", []):
            file.write(json.dumps({"step": 9} | dict.fromkeys(keys, value)) + "\n")
    with (runs[0] / "telemetry.jsonl").open("a") as file:
        file.write('{"step": 9, "grad_norm": {"layers.x": 1.0, "layers.0": {}}}\n')
    assert report.main([str(runs[0]), "--out", str(tmp_path / "page.html")]) == 0


def test_axes() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and ticks(3, 3) == [3]
    assert ticks(17, 95) == [20, 40, 60, 80]
    assert [short(v) for v in (0, 0.25, 1.5e-4, 9999, 12000, 1.25e6, 3e13)] == [
        "0", "0.25", "1.5e-4", "9999", "12k", "1.25M", "30T",
    ]  # fmt: skip


def test_long_curves_are_thinned() -> None:
    points = [(float(x), 100.0 if x == 4321 else float(x % 7)) for x in range(50000)]
    few = report.thinned(points)
    assert len(few) <= 2 * report.POINTS and few == sorted(few) and (4321.0, 100.0) in few
    assert report.thinned(points[:9]) == points[:9]


def test_where_nothing_can_be_written(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for out, why in (
        (tmp_path / "none" / "r.html", "No such file"),
        (tmp_path, "Is a directory"),
        ("/dev/full", "No sp"),
    ):
        assert report.main([str(runs[0]), "--out", str(out)]) == 2
        assert f"--out {out} cannot be written: {why}" in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl; give the folder of a run" in capsys.readouterr().err
    for line in ("none", "5"):
        (tmp_path / "metrics.jsonl").write_text(line + "\n")
        assert report.main([str(tmp_path)]) == 2 and "line 1 is no JSON object" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "manifest.json").write_text("{")
    assert report.main([str(tmp_path)]) == 2 and "manifest.json': it is no JSON object" in capsys.readouterr().err
