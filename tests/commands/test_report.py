"""The table of several runs, and their page."""

import json
from pathlib import Path

import pytest

from tests.browser import chromium
from tests.commands.pages import Page
from titan_linear.commands import batch, report
from titan_linear.commands.page import SPIKE_LINES, read
from titan_linear.config import load_config
from titan_linear.run.folder import RunFolder

# Step 3 has streams 8 to 11. A number that is not finite is text there.
FILES = {
    "spikes.jsonl": [
        {
            "step": 3,
            "why": "outlier",
            "loss": 9.5,
            "micro_batches": [
                {"streams": [8, 9], "loss": 2.0},
                {"streams": [10, 11], "loss": 17.0},
            ],
        }
    ],
    "telemetry.jsonl": [
        {
            "step": 2,
            "half_life": {"layers.0": [8.0, 9.0], "layers.1.mixer1": [1.0]},
            "grad_norm": {"head": 1.0},
        },
        {
            "step": 4,
            "half_life": {"layers.0": [7.0, "inf"]},
            "loss_by_position": {"1": 5.0, "2": 4.0},
        },
    ],
    "evaluation.jsonl": [
        {"step": step, "task": task, "length": length, "depth": depth, "score": score}
        for task, depth in (("needle", 0.1 * 3), ("mqar", None))
        for step, length, score in ((2, 64, 0.125), (4, 128, 0.25), (4, 64, 0.5), (4, 64, 1.0))
    ]
    + [
        {"step": 4, "task": "loss", "length": 64, "depth": None, "position": n, "score": n}
        for n in (1, 2)
    ],
}


@pytest.fixture
def runs(tmp_path, corpus):
    """A run with all there is, and one that has just begun, its last line being written."""
    data = [
        "--training.dataset=jsonl",
        f"--training.dataset_path={corpus}",
        "--training.seq_len=256",
    ]
    folders = [tmp_path / "a", tmp_path / "b"]
    for n, folder in enumerate(folders):
        folder.mkdir()
        lr, size = f"--optimizer.lr={(n + 1) / 1000}", "--training.global_batch_size=4"
        RunFolder(
            load_config([f"--job.dump_folder={folder}", lr, size, *data, f"--job.description={n}"])
        ).write_config()
        steps = [
            {
                "step": s,
                "loss": None if s == 3 else 5.0 / s,
                "tokens": 8192 * s,
                "tokens_per_second": 1e5 / s,
                "memory_gib": 2.5 - s / 2,
                "skipped_steps": 1,
            }
            for s in range(1, 5 - 3 * n)
        ]
        validations = [{"step": s, "validation_loss": 1.25 * s} for s in range(2, 4 - 2 * n)]
        text = "".join(json.dumps(line) + "\n" for line in steps + validations)
        (folder / "metrics.jsonl").write_text(text + '{"step": 9, "lo' * n)
    for name, lines in FILES.items():
        (folders[0] / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folders[0] / "manifest.json").write_text('{"parameters": 1234}')
    (folders[0] / "doctor.txt").write_text("all 26 hold & <b> too")
    return list(map(str, folders))


def test_where_runs_stand_and_differ(runs, corpus, capsys):
    """Medians leave out the first step, which compiles."""
    assert report.main(runs) == 0
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    _, _, first, second, _, head, _, *differences = cells
    assert first == [
        runs[0],
        "1,234",
        f"jsonl {corpus}",
        "4",
        "1.2500",
        "2.5000",
        "32,768",
        "33,333",
        "–",
        "2.00",
        "1",
        "1",
    ]
    assert second == [
        runs[1],
        "–",
        f"jsonl {corpus}",
        "1",
        "5.0000",
        "–",
        "8,192",
        "100,000",
        "–",
        "2.00",
        "1",
        "0",
    ]
    assert head == ["key", *runs] and differences == [["optimizer.lr", "0.001", "0.002"]]


def test_what_runs_were_trained_on():
    texts = load_config(["--training.dataset=text", "--training.dataset_path=a.txt"])
    assert report.data_of(texts.training) == "text a.txt"
    sources = (
        f'{{name = "{name}", weight = {weight}, dataset = "stdlib"}}'
        for name, weight in (("a", 3), ("b", 0.5))
    )
    assert (
        report.data_of(load_config([f"--training.mixture=[{', '.join(sources)}]"]).training)
        == "a 3 + b 0.5"
    )


def test_what_is_no_run(runs, tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl; give the folder of a run" in capsys.readouterr().err
    path = Path(runs[0], "metrics.jsonl")
    for line in ("{]", '{"step": null}', "[1]", '{"step": 1, "memory_gib": "much"}'):
        path.write_text(line + "\n")
        assert report.main([runs[0]]) == 2
        assert f"'{path}' has a line that no run writes" in capsys.readouterr().err
    assert report.main(["x" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_page_has_all_and_asks_nobody(runs, tmp_path, capsys):
    assert report.main([*runs, "--html", str(tmp_path / "page.html")]) == 0
    assert (
        capsys.readouterr().out
        == f"{tmp_path}/page.html: {(tmp_path / 'page.html').stat().st_size / 1000:.0f} kB\n"
    )
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.texts and all(
        link.startswith(("#", "data:image/png")) for link in page.links
    )
    assert "@import" not in text and "url(http" not in text
    assert page.texts["li"] == runs and page.texts["td"][-2:] == ["0.001", "0.002"]
    captions = [caption.partition(",")[0] for caption in page.texts["figcaption"]]
    losses = ["training loss", "validation loss", "tokens a second", "memory", "nats per token"]
    assert captions == [*losses, "needle", "needle", "mqar", "loss", "half life"]
    assert "30%" in page.texts["svg"][6]
    # the mean at the last step
    assert "0.75" in page.texts["svg"][6] and "0.12" not in page.texts["svg"][6]
    assert "position in the document" in page.texts["svg"][8] and "length" in page.texts["svg"][7]
    # half lives of 1 and 7, on an even scale: one is infinite
    assert {"1", "7"} <= {*page.texts["svg"][9].split()}
    assert batch.main(["--job.config_file", f"{runs[0]}/config.toml", "--spike", "1"]) == 0
    spike, plan, doctor, *other = page.texts["pre"]
    assert spike.startswith(
        "step 3: outlier  loss 9.5\n\nstream 10, its micro-batch's loss 17.0\n  document 0: [0, "
    )
    assert capsys.readouterr().out.startswith(f"{spike}\n") and spike.count("\n") >= SPIKE_LINES
    assert doctor == "all 26 hold & <b> too"
    keeps = [
        f"titan-linear plan --job.config_file {run}/config.toml | tee {run}/plan.txt"
        for run in runs
    ]
    assert [plan, other[0]] == keeps and len(other) == 2


def with_lines(run, name, lines):
    with Path(run, name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def paged(runs, tmp_path):
    assert report.main([*runs, "--html", str(tmp_path / "page.html")]) == 0
    return Page((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_tiles_of_lengths_with_other_depths(runs, tmp_path):
    """Of two evaluations of one step. A number that is not finite is text."""
    asked = ((600, 0.0), (600, 0.5), (600, 1.0), (700, 0.25))
    known = {"step": 5, "task": "needle", "score": 0.5, "loss": "nan"}
    lines = [{**known, "length": length, "depth": depth} for length, depth in asked]
    with_lines(runs[0], "evaluation.jsonl", lines)
    texts = paged(runs, tmp_path).texts["svg"][6].split()
    assert {"600", "700", "25%"} <= {*texts} and texts.count("0.50") == len(asked)
    assert "nan" not in texts


def test_names_are_no_formulas(runs, tmp_path):
    names = ["from_$5_to_$10", r"a\$b^2_x$", "$x$ <b> & c", "cost_$5", r"\$\frac"]
    lines = [{"step": 5, "loss_by_source": {name: 1.0 + n for n, name in enumerate(names)}}]
    with_lines(runs[0], "telemetry.jsonl", lines)
    page = paged(runs, tmp_path)
    assert any(all(name in text for name in names) for text in page.texts["svg"])


def test_what_a_loss_reports(runs, tmp_path, capsys):
    """In its column and in charts of training and validation, in the loss's unit."""
    path = Path(runs[1], "config.toml")
    path.write_text(path.read_text().replace('name = "cross_entropy"', 'name = "dpo"'))
    step = {"step": 2, "loss": 0.5, "accuracy": 0.625, "margin": 1.5, "tokens": 9}
    path.with_name("metrics.jsonl").write_text(
        json.dumps(step) + "\n" + json.dumps({"step": 2, "validation_accuracy": 0.75}) + "\n"
    )
    assert report.main(runs) == 0
    head, _, first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()[:4]
    )
    rows = [dict(zip(head, row, strict=True)) for row in (first, second)]
    assert [(row["accuracy"], row["margin"]) for row in rows] == [("–", "–"), ("0.6250", "1.5000")]
    captions = paged(runs, tmp_path).texts["figcaption"]
    assert captions[0] == "training loss, nats per token or nats per pair"
    assert {"accuracy, share of pairs", "validation accuracy, share of pairs"} <= {*captions}
    assert "training loss, nats per pair" in paged(runs[1:], tmp_path).texts["figcaption"]
    policy = path.read_text().replace('name = "dpo"', 'name = "policy"')
    path.write_text(policy)
    path.with_name("metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 0.5, "entropy": 2.0, "clipped": 0.1, "kl": 0.2}) + "\n"
    )
    captions = [text.partition(",")[0] for text in paged(runs[1:], tmp_path).texts["figcaption"]]
    assert captions == [
        "training loss",
        "entropy",
        "clipped share of tokens or documents",
        "KL from the reference",
    ]


def test_what_telemetry_saw_last(runs):
    half_life = {"layers.0": [7.0, "inf"], "layers.1.mixer1": [1.0]}
    seen = {
        "half_life": half_life,
        "grad_norm": {"head": 1.0},
        "loss_by_position": {"1": 5.0, "2": 4.0},
    }
    assert read(Path(runs[0])).seen == seen


def test_a_corpus_that_is_gone(runs, tmp_path):
    path = Path(runs[0], "config.toml")
    path.write_text(path.read_text().replace("corpus.jsonl", "gone.jsonl"))
    assert report.main([runs[0], "--html", str(tmp_path / "page.html")]) == 0
    assert (
        "step 3: training.dataset_path"
        in Page((tmp_path / "page.html").read_text()).texts["pre"][0]
    )


@pytest.mark.browser
def test_a_browser_shows_all_of_the_page(runs, tmp_path):
    """No wider than a telephone or paper, in the colours of the reader; every chart has a size."""
    assert report.main([*runs, "--html", str(tmp_path / "page.html")]) == 0
    with chromium() as browser:
        for width, scheme, media in (
            (360, "dark", "screen"),
            (360, "light", "screen"),
            (794, "dark", "print"),
        ):
            view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            errors, asked = [], []
            view.on("console", lambda message, errors=errors: errors.append(message.text))
            view.on("request", lambda request, asked=asked: asked.append(request.url))
            view.goto(f"file://{tmp_path}/page.html")
            view.emulate_media(media=media)
            assert (errors, asked) == ([], [f"file://{tmp_path}/page.html"])
            assert view.evaluate("document.documentElement.scrollWidth") <= width
            ink = view.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
            assert ink == (
                "rgb(255, 255, 255)" if (scheme, media) == ("dark", "screen") else "rgb(0, 0, 0)"
            )
            sizes = [chart.bounding_box() for chart in view.locator("svg").all()]
            assert len(sizes) == 10 and all(
                300 <= size["width"] <= width and size["height"] > 150 for size in sizes
            )
