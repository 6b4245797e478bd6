"""The table of several runs."""

import json
from pathlib import Path

import pytest

from titan_linear.commands import report
from titan_linear.config import load_config
from titan_linear.storage.rundir import write_config


@pytest.fixture
def runs(tmp_path):
    """A run with all there is, and one that has just begun, its last line being written."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for n, folder in enumerate(folders):
        folder.mkdir()
        lr, size = f"--optimizer.lr={(n + 1) / 1000}", "--training.global_batch_size=4"
        write_config(load_config([f"--job.dump_folder={folder}", lr, size, f"--job.description={n}"]))
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
    (folders[0] / "spikes.jsonl").write_text('{"step": 3, "why": "nan"}\n')
    return list(map(str, folders))


def test_where_runs_stand_and_differ(runs, capsys):
    """Medians leave out the first step, which compiles."""
    assert report.main(runs) == 0
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    _, _, first, second, _, head, _, *differences = cells
    assert first == [runs[0], "stdlib", "4", "1.2500", "2.5000", "32,768", "33,333", "–", "2.00", "1", "1"]
    assert second == [runs[1], "stdlib", "1", "5.0000", "–", "8,192", "100,000", "–", "2.00", "1", "0"]
    assert head == ["key", *runs] and differences == [["optimizer.lr", "0.001", "0.002"]]


def test_what_runs_were_trained_on():
    texts = load_config(["--training.dataset=text", "--training.dataset_path=a.txt"])
    assert report.data_of(texts.training) == "text a.txt"
    sources = (f'{{name = "{name}", weight = {weight}, dataset = "stdlib"}}' for name, weight in (("a", 3), ("b", 0.5)))
    assert report.data_of(load_config([f"--training.mixture=[{', '.join(sources)}]"]).training) == "a 3 + b 0.5"


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
