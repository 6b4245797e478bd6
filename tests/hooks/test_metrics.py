import io
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.records import events_of, read_lines
from titan_linear import train
from titan_linear.config import load_config
from titan_linear.hooks import metrics
from titan_linear.hooks.compilation import Graphs
from titan_linear.hooks.metrics import IntervalWork, MetricsLogger
from titan_linear.hooks.report import is_logged, peak_memory_gib
from titan_linear.step.optimizer import Moment
from tools import wandb_page

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
VALUES = {"loss": 2.5, "grad_norm": 0.75, "lr": 1e-3, "memory_gib": 1.5}


@pytest.fixture
def config(tmp_path):
    return configured(tmp_path)


def configured(folder, *overrides):
    return load_config(
        [
            f"--job.dump_folder={folder}",
            "--training.steps=25",
            "--metrics.enable_tensorboard=false",
            *overrides,
        ]
    )


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which only a test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def logger_of(config, **options):
    return MetricsLogger(config, CPU, **{"out": io.StringIO()} | options)


def log(logger, step, **numbers):
    logger.log(step, moment=Moment(CPU), **numbers)


def lines(config):
    return read_lines(Path(config.job.dump_folder, "metrics.jsonl"))


def test_the_first_every_tenth_and_the_last_step_are_logged(config):
    assert [
        step
        for step in range(1, 26)
        if is_logged(step, config.training.steps, config.metrics.log_freq)
    ] == [1, 10, 20, 25]


def test_a_step_is_a_flat_line(config, clock):
    logger = logger_of(config)
    clock[0] += 2
    log(logger, 1, tokens=1000, skipped=0, **VALUES)
    clock[0] += 3
    log(logger, 10, tokens=10000, **VALUES)
    logger.close()
    assert lines(config) == [
        {"step": 1, "tokens": 1000, "tokens_per_second": 500.0, "skipped": 0, **VALUES},
        {"step": 10, "tokens": 10000, "tokens_per_second": 3000.0, **VALUES},
    ]


def test_rates_of_what_was_done(config, clock):
    """Of the whole run: valid tokens; of one of its GPUs: TFLOP/s and, where the peak is known, their share of it."""
    out, written = io.StringIO(), []
    for peak in (None, 400.0):
        logger = MetricsLogger(config, CPU, gpus=2, peak_tflops=peak, out=out)
        clock[0] += 2
        log(
            logger,
            1,
            tokens=1000,
            work=IntervalWork(flops=800 * 10**12, valid=900, waited=0.5),
            **VALUES,
        )
        logger.close()
        written += lines(config)
    without, known = written
    rates = {"valid_tokens_per_second": 450.0, "tflops": 200.0, "data_wait": 0.25}
    assert without == {"step": 1, "tokens": 1000, "tokens_per_second": 500.0, **rates, **VALUES}
    assert known == without | {"mfu": 0.5}
    shown = [re.sub(" +", " ", line) for line in out.getvalue().splitlines()]
    assert "tok/s 500 valid 450 TFLOP/s 200 wait 25.0% mem" in shown[0]
    assert "tok/s 500 valid 450 TFLOP/s 200 mfu 50.0% wait 25.0% mem" in shown[1]


def test_nearly_all_tokens_valid_is_not_on_the_console(config, clock):
    logger = MetricsLogger(config, CPU, out=(out := io.StringIO()))
    clock[0] += 2
    log(logger, 1, tokens=1000, work=IntervalWork(flops=0, valid=999, waited=0.0), **VALUES)
    assert "valid" not in out.getvalue() and lines(config)[0]["valid_tokens_per_second"] > 0


def test_graphs_are_counted_and_new_ones_warned_of():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    graphs, fn = Graphs(), torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

    def after(kind, n):
        fn(torch.zeros(n))
        return graphs.after(kind)

    assert [
        after("training", 2),
        after("training", 2),
        after("validation", 3),
        after("training", 2),
    ] == [""] * 4
    assert "warning: training compiled layers again, 1 graphs more (compiled_graphs = 3)" in after(
        "training", 4
    )
    assert after("training", 5) == ""  # said once
    assert graphs.counts() == {"compiled_graphs": 4, "graph_breaks": 0}
    graphs = Graphs(passes=2)
    assert [after("training", n) for n in (6, 7, 7)] == [""] * 3 and "1 graphs more" in after(
        "training", 8
    )


def test_layers_in_parts_are_warned_of_where_each_should_be_one_graph():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    whole, parts = Graphs(whole=True), Graphs()
    torch.compile(broken, backend="eager")(torch.zeros(2))
    assert [whole.after("training") for _ in range(2)] == [
        "warning: layers are compiled in parts (graph_breaks = 1); TORCH_LOGS=graph_breaks says where",
        "",  # said once
    ]
    assert parts.after("training") == ""


def test_time_outside_training_counts_for_no_step(config, clock):
    logger = logger_of(config)
    with logger.between_steps():
        clock[0] += 50
    clock[0] += 2
    log(logger, 1, tokens=1000, **VALUES)
    assert lines(config)[0]["tokens_per_second"] == 500.0


class Device:
    """A stand-in for a GPU and its host, with a clock each."""

    def __init__(self):
        self.host = self.done = 0.0  # done: all that is queued

    def work(self, seconds):
        self.done = max(self.host, self.done) + seconds

    def Event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(time=0.0, synchronize=lambda: None)
        event.record = lambda: vars(event).update(time=max(self.host, self.done))
        event.elapsed_time = lambda later: 1e3 * (later.time - event.time)
        return event


def test_a_step_takes_its_device_the_same_time_whatever_follows(config, monkeypatch):
    """2 s for passes and 1 s for the update, every step; the host hears of one 0.5 s late where it queues the next
    forward, but not where a save of 7 s, a stop or nothing follows."""
    device, gpu = Device(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    logger = MetricsLogger(config, gpu, out=io.StringIO())
    for step in range(1, 7):
        device.work(2)
        moment = Moment(gpu)
        device.work(1)
        pauses = step in (3, 6)
        device.host = moment.event.time + 0.5 * (not pauses)
        if step != 4:
            logger.log(
                step,
                moment=moment,
                tokens=30 * step,
                work=IntervalWork(3 * 10**12, 30, 0.0),
                **VALUES,
            )
        if pauses:
            with logger.between_steps():
                device.host = device.done + 7
    shown = [(line["step"], line["tokens_per_second"], line["tflops"]) for line in lines(config)]
    assert shown == [(1, 15.0, 1.5), (2, 10.0, 1.0), (3, 10.0, 1.0), (5, 10.0, 0.5), (6, 10.0, 1.0)]


def test_the_console_line(config, clock):
    out = io.StringIO()
    logger = MetricsLogger(config, CPU, out=out)
    clock[0] += 10
    log(logger, 1, tokens=123456, **VALUES)
    logger.after_validation(1, 2.25, {}, "")
    first, second = out.getvalue().splitlines()
    assert re.sub(" +", " ", first) == (
        "step 1/25 loss 2.5000 grad 0.750 lr 1.00e-03 tok/s 12,346 mem 1.50 GiB eta 4m00s"
    )
    assert re.sub(" +", " ", second) == "step 1/25 validation loss 2.2500"


def test_the_console_has_what_the_loss_reports(tmp_path, clock):
    out = io.StringIO()
    keys = "--loss.name=dpo", "--dpo.reference_free=true", "--training.dataset_format=preference"
    logger = MetricsLogger(configured(tmp_path, *keys), CPU, out=out)
    for step, accuracy in enumerate((0.5, None), 1):
        clock[0] += 10
        log(logger, step, tokens=9 * step, accuracy=accuracy, margin=-1.25, other=1, **VALUES)
    first, second = (re.sub(" +", " ", line) for line in out.getvalue().splitlines())
    assert "accuracy 0.5000 margin -1.2500 tok/s" in first and "other" not in first
    assert "accuracy none margin" in second


def test_numbers_keep_their_places(config, clock):
    """Whatever their size: 0.75 and 123.4, 12,346 and 9."""
    out = io.StringIO()
    logger = MetricsLogger(config, CPU, out=out)
    for step, tokens, grad in ((1, 123456, 0.75), (2, 123546, 123.4)):
        clock[0] += 10
        work = IntervalWork(flops=10**13 * tokens, valid=0, waited=step)
        log(logger, step, tokens=tokens, work=work, **VALUES | {"grad_norm": grad})
    first, second = (
        [word.start() for word in re.finditer("[a-zA-Z/]+ ", line)]
        for line in out.getvalue().splitlines()
    )
    assert first == second


@pytest.mark.parametrize(
    "tty, no_colour, coloured", [(True, False, True), (True, True, False), (False, False, False)]
)
def test_colours_are_for_terminals(config, monkeypatch, tty, no_colour, coloured):
    out = io.StringIO()
    out.isatty = lambda: tty
    monkeypatch.setenv("NO_COLOR", "1") if no_colour else monkeypatch.delenv(
        "NO_COLOR", raising=False
    )
    log(MetricsLogger(config, CPU, out=out), 1, tokens=1, **VALUES)
    assert ("\033[" in out.getvalue()) is coloured


def test_validation_lines_carry_the_loss(config):
    logger_of(config).after_validation(10, 2.25, {}, "")
    assert lines(config) == [{"step": 10, "validation_loss": 2.25}]


@pytest.mark.parametrize("value, text", [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_lines_stay_json_when_numbers_are_not_finite(config, value, text):
    out = io.StringIO()
    log(MetricsLogger(config, CPU, out=out), 1, tokens=1, **(VALUES | {"loss": value}))
    (line,) = (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
    parsed = json.loads(line, parse_constant=pytest.fail)
    assert parsed["loss"] is None and parsed["nonfinite"] == f"loss = {text}"
    assert f"loss {text:>7}" in out.getvalue()


def test_a_step_without_a_label_has_no_loss(tmp_path):
    config, out = configured(tmp_path, "--metrics.enable_tensorboard=true"), io.StringIO()
    logger = MetricsLogger(config, CPU, out=out)
    log(logger, 1, tokens=1, **(VALUES | {"loss": None}))
    logger.close()
    (line,) = lines(config)
    assert (
        line["loss"] is None and "nonfinite" not in line and "loss    none  grad" in out.getvalue()
    )
    events = events_of(tmp_path)
    assert (
        "loss/train" not in events.Tags()["scalars"]
        and "optim/grad_norm" in events.Tags()["scalars"]
    )


def test_a_resumed_run_cuts_and_appends(config, clock):
    logger = logger_of(config)
    for step in (1, 10, 20):
        clock[0] += 1
        log(logger, step, tokens=step * 100, **VALUES)
    clock[0] += 7
    logger = logger_of(config, start_step=10, start_tokens=1000)
    clock[0] += 2
    log(logger, 20, tokens=2000, **VALUES)
    assert [line["step"] for line in lines(config)] == [1, 10, 20]
    assert lines(config)[-1]["tokens_per_second"] == 500.0


def test_tensorboard_shows_each_step_once(tmp_path):
    config = configured(tmp_path, "--metrics.enable_tensorboard=true")
    for start, loss in ((0, 5.0), (10, 4.0)):
        logger = logger_of(config, start_step=start)
        for step in (1, 10, 20):
            if step > start:
                log(logger, step, tokens=step, **(VALUES | {"loss": loss}))
        logger.after_validation(20, loss, {}, "")
        logger.close()
    events = events_of(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [
        (1, 5.0),
        (10, 5.0),
        (20, 4.0),
    ]
    assert [(e.step, e.value) for e in events.Scalars("loss/validation")] == [(20, 4.0)]
    assert (
        not (tmp_path / "tb" / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").exists()
    )


def test_tensorboard_is_laid_out_in_groups(tmp_path, clock):
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    config = configured(tmp_path, "--metrics.enable_tensorboard=true", "--optimizer.lr=0.125")
    logger = logger_of(config, peak_tflops=1.0)
    clock[0] += 6
    more = {
        "skipped_steps": 0,
        "data_seconds": 0.5,
        "memory_reserved_gib": 2.0,
        "memory_fragmentation": 0.1,
        "seq_len": 64,
        "work_balance": 1.5,
        "compiled_graphs": 2,
        "graph_breaks": 0,
        "sm_clock_mhz": 1980,
        "power_watts": 650.0,
    }
    log(logger, 3, tokens=3, work=IntervalWork(flops=1, valid=1, waited=0.0), **more, **VALUES)
    logger.after_validation(3, 2.25, {}, "")
    logger.close()
    assert "step_seconds" not in lines(config)[0] and lines(config)[0]["data_seconds"] == 0.5
    events = events_of(tmp_path)
    tags = set(events.Tags()["scalars"])
    assert tags == set(metrics.TAGS.values())
    assert {tag.partition("/")[0] for tag in tags} == {"loss", "optim", "perf", "memory"}
    assert events.Scalars("perf/step_seconds")[0].value == 2.0
    (text,) = events.Tensors("configuration/text_summary")
    assert "    lr = 0.125" in text.tensor_proto.string_val[0].decode()
    (layout,) = events.Tensors("custom_scalars__config__")
    categories = Layout.FromString(layout.tensor_proto.string_val[0]).category
    assert [category.title for category in categories] == [
        "first",
        "loss",
        "optimizer",
        "speed",
        "memory",
    ]
    assert [list(chart.multiline.tag) for chart in categories[0].chart] == FIRST
    assert list(categories[1].chart[0].multiline.tag) == ["loss/train", "loss/validation"]
    charts = {
        tag for category in categories for chart in category.chart for tag in chart.multiline.tag
    }
    drawn = {tag for tag in charts if "*" not in tag}
    assert {"optim/skipped_steps", "perf/work_balance"} <= drawn <= set(metrics.TAGS.values())


FIRST = [["loss/train"], ["loss/validation"], ["perf/tokens_per_second"]]


def test_weights_and_biases(tmp_path, monkeypatch, clock):
    """With a stand-in for the package: one run however often it is started, the same tags, steps as a number."""
    started, logged = [], []
    run = SimpleNamespace(
        define_metric=lambda *a, **k: None, log=logged.append, finish=lambda: logged.append("end")
    )
    stub = SimpleNamespace(
        init=lambda **keys: started.append(keys) or run,
        Histogram=list,
        Html=lambda text: text,
        __spec__=None,
    )
    monkeypatch.setitem(sys.modules, "wandb", stub)
    config = configured(tmp_path, "--metrics.enable_wandb=true", "--job.description=why")
    for _ in range(2):
        logger = logger_of(config)
        clock[0] += 2
        log(logger, 1, tokens=1000, **VALUES)
        # a histogram of one, and of none
        broken = {"layers.0": [1.0, math.inf], "layers.1": [math.nan, math.nan]}
        logger.log_telemetry(1, {"half_life": broken, "loss_by_position": {"1": 2.0}})
        logger.after_validation(1, 2.0, {}, "a < b")
        logger.close()
    assert (
        started[0]["id"] == started[1]["id"]
        and started[0]["resume"] == "allow"
        and started[0]["notes"] == "why"
    )
    numbers, seen, validated, text, end = logged[:5]
    assert (
        numbers["step"] == 1
        and numbers["loss/train"] == 2.5
        and numbers["perf/step_seconds"] == 2.0
    )
    assert seen == {"step": 1, "per_layer_half_life/layers.0": [1.0], "loss_by_position/1": 2.0}
    assert validated == {"step": 1, "loss/validation": 2.0}
    assert text == {"step": 1, "sample": "<pre>a &lt; b</pre>"} and end == "end"


def test_a_page_of_weights_and_biases(monkeypatch, capsys):
    """TensorBoard's charts, of which a few are open."""
    page = SimpleNamespace(save=lambda: None, url="https://page")
    LinePlot, Section, Workspace = (
        Mock(side_effect=lambda **of: of["metric_regex"]),
        Mock(),
        Mock(return_value=page),
    )
    monkeypatch.setitem(
        sys.modules, "wandb_workspaces.reports.v2", SimpleNamespace(LinePlot=LinePlot)
    )
    both = SimpleNamespace(Section=Section, Workspace=Workspace)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", both)
    wandb_page.main("us", "models")
    assert (
        capsys.readouterr().out == "https://page\n"
        and Workspace.call_args.kwargs["project"] == "models"
    )
    sections = [call.kwargs for call in Section.call_args_list]
    assert sections[0] == {"name": "first", "panels": [tag for (tag,) in FIRST], "is_open": True}
    assert [section["name"] for section in sections if not section["is_open"]] == [*metrics.CHARTS][
        1:
    ]
    assert "perf/tokens_per_second|perf/valid_tokens_per_second" in sections[3]["panels"]


def test_a_killed_run_keeps_every_line(config):
    code = """if True:
        import os, signal, sys
        from titan_linear.config import load_config
        from tests.hooks.test_metrics import CPU, MetricsLogger, log
        logger = MetricsLogger(load_config(sys.argv[1:]), CPU)
        for step in range(1, 4):
            log(logger, step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=step, memory_gib=1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    argv = [f"--job.dump_folder={config.job.dump_folder}", "--metrics.enable_tensorboard=false"]
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(config)] == [1, 2, 3]


def test_durations_are_shown_in_two_units():
    shown = [metrics._duration(s) for s in (0, 59.6, 185, 7620, 273600)]
    assert shown == ["0s", "1m00s", "3m05s", "2h07m", "3d04h"]


def test_memory_is_what_this_process_has_had():
    assert 0.05 < peak_memory_gib() < 100


def test_a_full_disk_is_one_line(monkeypatch, capsys, tmp_path):
    """Also where it is the metrics that find it full."""

    def run(config):
        logger = MetricsLogger(config, CPU)
        logger.file = open("/dev/full", "w")  # noqa: SIM115
        logger.after_validation(1, 2.0, {}, "")

    monkeypatch.setattr(train, "join", run)
    monkeypatch.setattr(train, "die_with_parent", lambda: None)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--job.dump_folder", str(tmp_path), "--metrics.enable_tensorboard", "false"]
    assert train.main(argv) == 3
    assert capsys.readouterr().err == (
        "error: rank 0: writing in the run's folder failed: No space left on device; make room or mend the "
        "disk, and start again, from the newest checkpoint if any\n"
    )
