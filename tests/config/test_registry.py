"""A user's module adds losses, mixers, hooks, sources and families: the ones of docs/extending.md, as they stand."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import titan_linear
from tests.keys import argv_of
from tests.records import read_lines
from tests.refusals import refused
from tests.state import isolated
from titan_linear.commands import generate, plan
from titan_linear.config import Config, Optimizer, check_config, config_to_toml, load_config
from titan_linear.config.registry import TABLES, register
from titan_linear.distributed.options import SessionOptions
from titan_linear.hooks import HOOKS
from titan_linear.losses import LOSSES, build_loss
from titan_linear.losses.loss import LocalBatch
from titan_linear.models.mixers import MIXERS
from titan_linear.models.presets import MODELS, preset, resized
from titan_linear.ops.cross_entropy import ChunkedLogits
from titan_linear.proof import doctor
from titan_linear.proof.definitions import missing
from titan_linear.proof.subject import narrowed
from titan_linear.run.session import Session, mesh

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
FILES = {
    "__init__": "# Extending",
    "gce": "## A loss",
    "convolution": "## A mixer",
    "least": "## A hook",
    "table": "## A source of texts",
    "family": "## A family",
}
KEYS = {
    "job.custom_import": "my_package",
    "loss.name": "gce",
    "loss.options.q": 0.5,
    "model.pattern": '["scaled_conv", "attention"]',
    "model.num_layers": 2,
    "model.scaled_conv.channels": 32,
    "model.attention": "{kv_heads = 2, head_dim = 16, qk_norm = '', output_gate = false}",
    "training.dataset": "csv",
    "training.seq_len": 64,
    "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 2,
    "parallelism.context_parallel_degree": 2,
    "metrics.enable_tensorboard": "false",
}


def write_package(folder):
    """The page's programs as the files that it names, and texts for its source."""
    (folder / "my_package").mkdir()
    for name, heading in FILES.items():
        code = re.search(r"```python\n(.*?)```", PAGE[PAGE.index(heading) :], re.DOTALL)[1]
        (folder / "my_package" / f"{name}.py").write_text(code)
    rows = "".join(f'{i},"def f{i % 7}(x):\n    return x + {i}\n"\n' for i in range(200))
    (folder / "texts.csv").write_text("number,text\n" + rows)


@contextmanager
def inside(folder):
    """In this working directory; modules that are imported from it are forgotten, and so is what they register."""
    with isolated():
        os.chdir(folder)
        yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path):
    """A folder with the page's package, in which a run starts."""
    write_package(tmp_path)
    with inside(tmp_path):
        yield tmp_path


def arguments(folder, **more):
    paths = {"training.dataset_path": folder / "texts.csv", "job.dump_folder": folder / "run"}
    return argv_of(KEYS | paths, **more)


# --- A whole run ------------------------------------------------------------------------------------------------------


def test_a_run_with_all_kinds_resumes_exports_and_generates(package, capsys):
    """By the command, a script elsewhere, in a working directory that has the package."""
    run = package / "run"
    (package / "bin").mkdir()
    command = package / "bin/titan-linear"
    command.write_text("from titan_linear.__main__ import entry\n\nentry()\n")
    environment = os.environ | {"NGPU": "2", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    more = {
        "validation__enable": "true",
        "validation__freq": 1,
        "validation__holdout": 0.2,
        "checkpoint__interval": 1,
    }
    for steps in (1, 2):
        argv = arguments(
            package,
            training__steps=steps,
            lr_scheduler__total_steps=2,
            checkpoint__last_save_in_hf="true" if steps == 2 else "false",
            **more,
        )
        done = subprocess.run(
            [sys.executable, command, "train", *argv],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "grad_norm" in line]
    assert steps[0] == 1 and 'custom_import = "my_package"' in (run / "config.toml").read_text()
    least = json.loads((run / "least.json").read_text())
    losses = [
        x["validation_loss"] for x in read_lines(run / "metrics.jsonl") if "validation_loss" in x
    ]
    assert least["loss"] == pytest.approx(min(losses), rel=1e-6)
    # The export is of the package's family, and has the checkpoint's weights.
    checkpoint = run / "checkpoint/step-2"
    folder = run / "checkpoint/step-2-hf"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["ScaledConvForCausalLM"] and config["conv_dim"] == 32
    assert generate.main([str(checkpoint), "--prompt", "def", "--max-new-tokens", "2"]) == 0
    ours = dict(titan_linear.load(checkpoint).weights())
    keys = ["--job.custom_import=my_package", "--model.tokenizer_path=bytes"]
    theirs = dict(titan_linear.load(folder, *keys).weights())
    assert "model.layers.0.conv.scale" in ours
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    dist.destroy_process_group()


def test_the_doctor_and_the_planner_know_them(package, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "2")
    argv = arguments(package, training__seq_len=128, model__pattern='["scaled_conv"]')
    place = argv.index("--model.attention")
    argv[place : place + 2] = ["--model.num_layers=1"]
    assert doctor.main(argv) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "--   definition: gce has none here, and is only compared" in said
    # Its op is the one of the options that it extends.
    assert "definition: scaled_conv" not in said and "causal_conv1d, layer 0" in said
    assert plan.main(["--gpus", "2", *argv]) == 0
    assert "1 scaled_conv" in capsys.readouterr().out


def test_what_has_no_definition_is_named(monkeypatch):
    """A mixer without a case; and ours have one."""
    kind = type("Other", (), {"name": "other"})
    subject = SimpleNamespace(
        config=Config(), model=SimpleNamespace(mixers=(kind(), *preset("hybrid", "debug").mixers))
    )
    (note,) = missing(subject)
    said = "definition: other has none here, and is only compared with itself"
    assert str(note) == f"--   {said}"


# --- Each kind --------------------------------------------------------------------------------------------------------


def test_the_loss_is_its_definition(package):
    load_config(arguments(package))
    loss = build_loss("gce", LOSSES["gce"].section(q=0.5))
    draw = torch.Generator().manual_seed(0)
    x, W = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (20, 30))
    x.requires_grad_()
    labels = torch.randint(30, (20,), generator=draw)
    labels[3] = -100
    weights = torch.rand(1, 20, generator=draw) * (labels != -100)
    batch = LocalBatch(x[None], labels[None], {"weights": weights}, (0,))
    got = loss(ChunkedLogits(x, W, 7), batch)
    logp = (x @ W.T).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    want = (weights[0] * (1 - logp.exp() ** 0.5) / 0.5).sum()
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    (ours,), (theirs,) = (torch.autograd.grad(value, x) for value in (got, want))
    torch.testing.assert_close(ours, theirs)
    assert build_loss("gce").keys.q == 0.7


def mixer_on_rank(rank, world_size, folder):
    """Loss and gradient norm of a step of the page's mixer and loss, on each split."""
    with inside(folder):
        return steps_of(load_config(arguments(folder)), world_size)


def steps_of(config, world_size):
    model = replace(resized(preset("hybrid", "debug"), config.model.model_dump()), vocab_size=64)
    types = dict.fromkeys(("dtype", "compute_dtype", "reduce_dtype"), torch.float64)
    found = []
    for degrees in (
        {},
        {"context_parallel_degree": world_size},
        {"tensor_parallel_degree": world_size},
    ):
        session = Session(model, mesh(**degrees), SessionOptions(**types), optimizer=Optimizer())
        session.initialise(seed=0)
        tokens = torch.arange(64) % 50
        session.forward_backward(session.cut(tokens, torch.tensor([0, 5, 40, 64])), "gce")
        found.append(session.step(lr=1e-3)[:2])
    return found


def test_the_mixer_is_alike_on_every_split(package, worlds):
    ((one, *_),) = worlds(1).run(mixer_on_rank, package)
    for found in worlds(2).run(mixer_on_rank, package):
        for got in found:
            assert got == pytest.approx(one, rel=1e-9)


def test_a_model_without_heads_is_narrowed(package):
    """As the doctor does with a large model: a mixer need not have heads."""
    load_config(arguments(package))
    model = MODELS["lfm2"]["350M"]
    kinds = [
        x if x.name == "attention" else MIXERS["scaled_conv"](channels=1024) for x in model.pattern
    ]
    for pattern in (model.pattern, tuple(kinds)):
        thinner, factor = narrowed(replace(model, pattern=pattern), Config().parallelism, 1e6)
        assert factor > 1 and thinner.dim < model.dim


def test_records_of_a_source_have_formats_and_columns(package):
    """As those of our sources: other names than `jsonl` are records."""
    config = load_config(arguments(package, training__dataset_text_field="number"))
    check_config(config, 2)
    check_config(load_config(arguments(package, training__dataset_format="completion")), 2)
    check_config(load_config(arguments(package, training__dataset_columns='["weights"]')), 2)
    source = '[{name = "a", weight = 1, dataset = "csv", dataset_path = "texts.csv"}]'
    argv = ["--job.custom_import=my_package", f"--training.mixture={source}"]
    check_config(load_config(argv), 1)


# --- Names ------------------------------------------------------------------------------------------------------------

# An entry of each kind, and its key in messages.
ENTRIES = {
    "loss.name": "class X(titan_linear.losses.loss.LossFunction): name = {name!r}",
    "model.pattern": "class X(titan_linear.models.config.MixerOptions): name = {name!r}",
    "hook": "class X(titan_linear.hooks.Hook): name = {name!r}",
    "training.dataset": "X = titan_linear.data.corpus.sources.RecordSource({name!r}, (), list)",
    "architectures": "X = replace(titan_linear.models.families.FAMILIES['Lfm2ForCausalLM'], name={name!r})",
}
OURS = {
    "loss.name": "dpo",
    "model.pattern": "kda",
    "training.dataset": "tokens",
    "architectures": "KDAForCausalLM",
}


def module(folder, name, code):
    (folder / f"{name}.py").write_text(code)
    return f"--job.custom_import={name}"


@pytest.mark.parametrize("key", ENTRIES)
def test_a_name_is_registered_once(key, package):
    code = dedent(
        """
        from dataclasses import replace
        import titan_linear, titan_linear.losses, titan_linear.hooks, titan_linear.models.families
        import titan_linear.data.corpus.sources
        {entry}
        titan_linear.register(X)
        """
    )
    taken = {"my_new": "new"} | ({"my_ours": OURS[key]} if key in OURS else {})
    for name, entry in taken.items():
        text = code.replace("{entry}", ENTRIES[key].format(name=entry))
        if entry == "new":
            load_config([module(package, name, text)])
            assert entry in TABLES[key]
            name = "my_twice"
        with refused(
            rf"job.custom_import = '{name}' cannot be imported .*{key} = '{entry}' exists already; register another"
        ):
            load_config([module(package, name, text)])


def test_a_module_that_cannot_be_imported(package):
    here = re.escape(repr(str(package)))
    with refused(
        f"job.custom_import = 'my_absent' cannot be imported in {here}: ModuleNotFoundError: .*; start where"
    ):
        load_config(["--job.custom_import=my_absent"])
    with refused(
        "job.custom_import = 'my_broken' .*ZeroDivisionError: .*python -c 'import my_broken'"
    ):
        load_config([module(package, "my_broken", "1 / 0")])
    (package / "mine.toml").write_text("[job]\ncustom_import = 3")
    with refused("job.custom_import = 3 cannot be imported"):
        load_config(["--job.config_file", "mine.toml"])
    (package / "mine.toml").write_text("job = 3")
    with refused("mine.toml: job = 3 must be a section"):
        load_config(["--job.config_file", "mine.toml"])


def test_names_are_checked_after_the_import(package):
    """On the command line and in the file, whichever names the module."""
    (package / "mine.toml").write_text('[job]\ncustom_import = "my_package"')
    config = load_config(["--job.config_file", "mine.toml", "--loss.name=gce"])
    assert config.objective.q == 0.7
    # What a run writes down starts it again.
    (package / "again.toml").write_text(config_to_toml(config))
    again = load_config(["--job.config_file", "again.toml"])
    assert again.loss == config.loss and again.job.custom_import == "my_package"
    with refused("loss.name = 'gcf' must be .*; did you mean 'gce'"):
        load_config(["--job.config_file", "mine.toml", "--loss.name=gcf"])


def test_options_of_a_loss(package):
    argv = ["--job.custom_import=my_package", "--loss.name=gce"]
    (package / "mine.toml").write_text("[loss.options]\nq = 3")
    assert load_config([*argv, "--job.config_file=mine.toml"]).objective.q == 3
    for option, problem in (
        ("p = 3", "Extra inputs"),
        ("q = 'x'", "Input should be a valid number"),
    ):
        said = f"loss.options.{option}: {problem}.*; loss.name = 'gce' has the options q"
        with refused(said):
            load_config([*argv, f"--loss.options.{option.replace(' ', '')}"]).objective  # noqa: B018
    with refused(
        r"loss.options = \{q = 3\} has no effect with loss.name = 'dpo'; use the section \[dpo\]"
    ):
        check_config(load_config(["--loss.options.q=3", "--loss.name=dpo"]), 1)


def test_what_registers_is_public():
    assert titan_linear.register is register


def test_isolation_of_tables(package):
    """What a test registers is gone after it."""
    with isolated():
        load_config(arguments(package))
        assert "gce" in LOSSES and "scaled_conv" in MIXERS and [*HOOKS] == ["least"]
    assert "gce" not in LOSSES and "scaled_conv" not in MIXERS and not HOOKS
