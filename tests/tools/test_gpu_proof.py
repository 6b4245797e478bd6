"""The proof of a GPU installation: how its jobs are scheduled and judged, and some of them on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launches import Launch
from tests.refusals import is_refused
from tools.gpu_proof import __main__ as command
from tools.gpu_proof import record
from tools.gpu_proof.jobs import DOCTORS, MERGED, STEPS, Setting, compared_rate, jobs, resumed
from tools.gpu_proof.schedule import (
    Failed,
    Figure,
    Job,
    Kill,
    Result,
    Room,
    Runner,
    last_line,
    run_jobs,
)
from tools.harness import ROOT

H200 = record.Gpus("NVIDIA H200", ["0", "1"], 140.0, "570.1")


def job(name, needs=(), **more):
    return Job(name, f"about {name}", [], lambda outputs: Figure(""), needs=needs, **more)


class Fake(Runner):
    """Does nothing; notes which jobs ran beside which."""

    def __init__(self, failing=()):
        super().__init__(Path(), ["0", "1"])
        self.failing = failing
        self.gpus = {}
        self.closed = False

    def run(self, job, gpus):
        self.gpus[job.name] = gpus
        return Result(job, job.name not in self.failing, Figure(job.name))

    def close(self):
        self.closed = True


def test_jobs_wait_for_what_they_need_and_those_that_run_alone_for_all():
    given = [job("alone", alone=True), job("b", ("a",)), job("c", ("b",), gpus=2), job("a")]
    fake = Fake()
    results = list(run_jobs(given, fake, [Room(10.0), Room(10.0)], at_once=3))
    assert [result.job.name for result in results] == ["a", "b", "c", "alone"]
    assert sorted(fake.gpus["c"]) == [0, 1] and fake.closed


def test_what_needs_a_failed_job_fails_too():
    given = [job("a"), job("b", ("a",)), job("c", ("b",)), job("d")]
    results = {r.job.name: r for r in run_jobs(given, Fake(["a"]), [], at_once=1)}
    assert [name for name, result in results.items() if result.passed] == ["d"]
    assert results["c"].figure.text == "not run: it needs b"


def test_a_job_takes_the_emptiest_gpu_and_waits_for_room():
    """The emptiest by its time, if its memory suffices."""
    fake = Fake()
    free = [Room(20.0), Room(10.0)]
    given = [job("a", gib=15), job("b", gib=15), job("c", gib=6)]
    assert len(list(run_jobs(given, fake, free, at_once=3))) == 3
    assert fake.gpus == {"a": [0], "b": [0], "c": [1]} and free == [Room(20.0), Room(10.0)]
    assert (
        len(list(run_jobs([job("d", share=0.5), job("e", share=0.6)], fake, free, at_once=2))) == 2
    )
    assert (fake.gpus["d"], fake.gpus["e"]) == ([0], [1])


def test_every_line_comes_after_what_it_needs_and_parts_are_independent(tmp_path):
    every = jobs(Setting(tmp_path, 1, 79.0, lambda name: 0))
    seen = set()
    for each in every:
        assert seen.issuperset(each.needs) and each.gib < 77
        seen.add(each.name)
    assert len(seen) == len(every)
    parts = [command.chosen(every, command.parse(["--part", part])) for part in command.PARTS]
    names = [{each.name for each in part} for part in parts]
    # What a doctor needs is made in the first part.
    assert names[0] | names[1] | names[2] == seen and not names[0] & names[1]
    assert names[2] >= {each.name for each in every if each.name.startswith("doctor-")}
    only = command.chosen(every, command.parse(["--only", "scores"]))
    assert [each.name for each in only] == [
        "kda",
        "export",
        "lora",
        "merge",
        "score-base",
        "score-lora",
        "scores",
    ]


def test_every_shipped_configuration_has_a_doctor():
    assert {*DOCTORS} == {file.stem for file in (ROOT / "train_configs").glob("*.toml")}


def test_no_gpu_and_unknown_lines_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert is_refused(command.main, [], capsys).startswith("nvidia-smi shows no GPU; --cpu-")
    line = is_refused(command.main, ["--list", "--only", "nothing"], capsys)
    assert line.startswith("--only nothing: there is no such line")


def metrics(file, losses):
    lines = [{"step": n, "loss": x, "grad_norm": 1.0} for n, x in enumerate(losses, 1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_resumed_run_repeats_its_steps_to_the_last_bit(tmp_path):
    losses = [float(n) for n in range(1, STEPS + 1)]
    before = metrics(tmp_path / "before", losses[:6])
    after = metrics(tmp_path / "after", losses)
    said = ["", "resuming from step 4\n"]
    assert resumed(before, after, said).text.startswith("losses and gradient norms of steps 5 to 6")
    with pytest.raises(Failed, match="does not resume from step 4"):
        resumed(before, after, ["", "weights drawn"])
    with pytest.raises(Failed, match="only 1 steps were taken between the save and the kill"):
        resumed(metrics(tmp_path / "early", losses[:5]), after, said)
    with pytest.raises(Failed, match="the run ends at step 7, not 8"):
        resumed(before, metrics(tmp_path / "short", losses[:-1]), said)
    losses[5] *= 1 + 2**-52
    with pytest.raises(Failed, match="losses or gradient norms differ by"):
        resumed(before, metrics(tmp_path / "other", losses), said)


@pytest.mark.parametrize(
    "recorded, said",
    [
        (0, "the first on this GPU"),
        (1040, "within 5% of 1,040"),
        (1136, "slower by 12% than 1,136"),
        (800, "faster by 25% than 800"),
    ],
)
def test_rates_are_compared(recorded, said, tmp_path):
    file = tmp_path / "rate.json"
    file.write_text(json.dumps({"rows": [{"tokens_per_second": 1000.0}]}))
    assert compared_rate(file, recorded, []) == Figure(f"1,000 tokens/s, {said}", 1000.0)


def test_a_record_keeps_the_newest_result_of_each_line(tmp_path):
    records = {}
    for at, passed, rate in (("1", False, 10.0), ("2", True, 20.0)):
        result = Result(job("rate-kda"), passed, Figure("x", rate), 1.0)
        record.add(records, H200, result, at)
    record.add(records, H200, Result(job("kda"), True, Figure("y"), 1.0), "1")
    record.write(records, tmp_path / "record.json")
    records = record.read(tmp_path / "record.json")
    lines = records["2 × NVIDIA H200"]["lines"]
    assert lines["rate-kda"]["passed"] and lines["rate-kda"]["commit"] == "2" and len(lines) == 2
    assert record.recorded_rate(records, "NVIDIA H200", "rate-kda") == 20
    assert record.recorded_rate(records, "NVIDIA H100", "rate-kda") == 0


def test_the_page_shows_the_committed_record():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert record.page(record.read(record.COMMITTED)) in page


def test_a_kill_waits_for_the_save_and_for_steps_after_it(tmp_path):
    save, steps = tmp_path / "save", tmp_path / "steps"
    kill = Kill(save, steps, 2, tmp_path / "copy")
    steps.write_text("1\n2\n")
    assert not kill.is_due()
    save.touch()
    assert kill.is_due()
    steps.write_text("1\n2")
    assert not kill.is_due()


SLEEPING = 'timeit -n 1 -r 1 \'open("@begun", "w").write("1\\n"); import time; time.sleep(600)\''


@pytest.mark.parametrize(
    "commands, killed, passed, figure",
    [
        ([SLEEPING, "timeit -n 1 -r 1 pass"], True, True, "1 loop"),
        (["timeit -n 1 -r 1 pass"], True, False, "it ended with 0 before it could be killed"),
        (["timeit -n 1 -r 1 1/0", "timeit"], False, False, "exit code 1"),
    ],
)
def test_a_command_is_killed_when_that_is_due_and_must_end_with_0(
    commands, killed, passed, figure, tmp_path
):
    at = Kill(tmp_path / "begun", tmp_path / "begun", 1, tmp_path / "copy")
    kill = at if killed else None
    given = replace(job("job"), commands=commands, kill=kill, check=last_line)
    result = Runner(tmp_path, []).run(given, [])
    assert result.passed == passed and result.figure.text.startswith(figure)
    assert result.log.startswith("$ python -m timeit -n 1 -r 1")
    assert (tmp_path / "copy").exists() == passed


class Forked(Runner):
    def start(self, argv, environment, log):
        module = "titan_linear.__main__" if argv[0] == "titan_linear" else argv[0]
        return Launch(argv[1:], log, environment, module=module)


def test_some_lines_on_the_cpu(tmp_path, monkeypatch, capsys):
    """A run that is killed and resumed; its export; LoRA from there, likewise; the merge, and its scores."""
    monkeypatch.setattr(command, "Runner", Forked)
    argv = ["--cpu-rehearsal", "--only", "kda", "lora", "scores", "--out", str(tmp_path)]
    assert command.main(argv) == 0, capsys.readouterr().out
    lines = record.read(tmp_path / "gpu_proof.json")["0 × CPU"]["lines"]
    assert set(lines) == {"kda", "export", "lora", "merge", "score-base", "score-lora", "scores"}
    assert all(line["passed"] for line in lines.values())
    assert "taken twice, differ by 0.0" in lines["lora"]["figure"]
    assert f"bound {MERGED:.1e}" in lines["scores"]["figure"]
    assert "===== merge" in (tmp_path / "logs.txt").read_text()
