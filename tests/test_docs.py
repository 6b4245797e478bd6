"""What README and docs/ show runs and exists: programs, configurations, files."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import titan_linear
from tests.browser import chromium
from tests.commands.pages import Page
from tests.models.ours import initialised
from tests.refusals import exit_of, own_handlers, refused
from tests.training import arguments, train_on_rank
from titan_linear.commands import convert, generate, plan
from titan_linear.commands import corpus as corpora
from titan_linear.config import Optimizer, check_config, load_config
from titan_linear.losses import LOSSES
from titan_linear.models.mixers import MIXERS
from titan_linear.models.plan import BatchPlan
from titan_linear.models.presets import preset, resized
from titan_linear.ops.reference.linear_attention import recurrent_simple_gla
from titan_linear.planner.memory import parameters
from titan_linear.proof import doctor
from titan_linear.run import console, launch
from titan_linear.run.console import finished
from titan_linear.run.generate import decode, prefill
from titan_linear.run.origin import Origin
from titan_linear.run.preflight import preflight

ROOT = Path(__file__).parents[1]


def program(page):
    """The names that the page's first Python program defines, as a module."""
    (code, *_) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL
    )
    module = sys.modules[page] = ModuleType(page)
    exec(compile(code, page, "exec"), vars(module))
    return vars(module)


def _two_ranks(rank, world_size):
    return program("ops.md")["main"]()


def test_the_ops_on_two_ranks(worlds):
    for found in worlds(2).run(_two_ranks):
        assert list(found) == ["convolution", "KDA", "attention"]
        assert max(found.values()) < 64 * 2**-24, found  # products of 64 numbers in float32


def _own_loop(rank, world_size, folder):
    """The losses of the page's loop, and the names of what its other programs make."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    loop, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert loop.count("\n") <= 37
    names = program("python.md")
    names["session"], names["batch"], losses = names["main"](cp=world_size)
    for code in others:
        code = code.replace('"checkpoints"', repr(str(folder / str(world_size))))
        exec(compile(code, "python.md", "exec"), names)
    return losses, names["numbers"].loss, list(names["sizes"])


def test_a_training_loop_of_ones_own(worlds, tmp_path):
    ((losses, loss, sizes),) = worlds(1).run(_own_loop, tmp_path)
    assert losses[-1] < 0.8 * losses[0] and loss == pytest.approx(-1, abs=0.01)
    assert "model.norm.weight" in " ".join(sizes)
    for found in worlds(2).run(_own_loop, tmp_path):
        assert found[0] == pytest.approx(losses, rel=1e-4) and found[2] == sizes


def _own_loss(rank, world_size):
    """Loss and report of the page's loss, its weights' gradient, and the loss as a function of log-probabilities."""
    names = program("adding_a_loss.md")
    assert LOSSES.pop("focal") is names["FocalLoss"]
    dims = titan_linear.mesh(context_parallel_degree=world_size)
    session = titan_linear.Session(preset("gdn", "debug"), dims, optimizer=Optimizer())
    session.initialise(seed=0)
    tokens = torch.randint(256, (192,), generator=torch.Generator().manual_seed(0))
    batch = session.cut(tokens, torch.tensor([0, 50, 192]))
    logp = session.logprobs(batch, whole=True)
    labelled = logp[logp < 0]
    focal = -((1 - labelled.exp()) ** 2 * labelled).mean()
    sums = session.forward_backward(batch, names["FocalLoss"](names["Focal"]())).clone()
    dist.all_reduce(sums)
    return sums.flatten().tolist(), focal.item(), session.step(lr=1e-3).grad_norm


def test_a_loss_of_ones_own_is_its_formula_on_every_split(worlds):
    (one,) = worlds(1).run(_own_loss)
    assert one[0][0] == pytest.approx(one[1], rel=1e-5) and 0 < one[0][1] < 0.1
    for found in worlds(2).run(_own_loss):
        assert found[0] == pytest.approx(one[0], rel=1e-4)
        assert found[2] == pytest.approx(one[2], rel=1e-4)


def _inside_transformers(rank, world_size):
    return program("transformers.md")["main"](dist.group.WORLD if world_size > 1 else None)


def test_a_loop_inside_transformers(worlds):
    (one,) = worlds(1).run(_inside_transformers)
    assert one[-1] < one[0]
    for found in worlds(2).run(_inside_transformers):
        assert found == pytest.approx(one, rel=1e-4)


def test_the_model_of_ones_own(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    (file := tmp_path / "mine.toml").write_text(toml)
    model = Origin.of(load_config(["--job.config_file", str(file)])).definition
    assert toml.count("\n") == 18 and f"here {parameters(model) / 1e6:.0f}M parameters" in readme
    assert [mixer.name for mixer in model.layers] == 3 * ["kda", "kda", "kda", "attention"]


def test_the_tour_is_as_long_as_it_says():
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    tour = page[page.index("## A tour in twelve files") : page.index("## The tree")]
    names = re.findall(r"`([\w/]+\.py)`", tour.replace("`delta.py", "`models/mixers/delta.py"))
    files = [(ROOT / "titan_linear" / name).read_text(encoding="utf-8") for name in names]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(files) == 12 and "is twelve files of 3,000 lines together" in readme
    assert sum(text.count("\n") for text in files) == pytest.approx(3000, rel=0.1)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = [
    ROOT,
    ROOT / "docs",
    ROOT / "titan_linear",
    ROOT / "titan_linear/ops",
    ROOT / "titan_linear/ops/triton",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    """`titan_linear/step/passes.py`, `ops/delta_rule.py`, `docs/data.md`, and in a folder of ours `models/mixers/`."""
    named = re.findall(
        r"`(\w+/[\w./-]*\.(?:py|md|sh|toml)|(?:titan_linear|models|ops|tests|docs)/[\w/]*/)`",
        page.read_text("utf-8"),
    )
    assert [
        name
        for name in dict.fromkeys(named)
        if not any((place / name).exists() for place in PLACES)
    ] == []


@pytest.mark.parametrize("page", [*PAGES[2:]], ids=lambda page: page.stem)
def test_a_page_opens_with_what_it_answers(page):
    """But for those that are made of the code."""
    if page.stem not in ("api", "keys"):
        _, first, *_ = page.read_text("utf-8").split("\n\n")
        assert re.match(r"This page (answers|lists|explains)|A user's mistake", first)


def test_there_is_no_more_to_read_than_this():
    """Words of README.md, and of all pages but the keys' and the results'."""
    words = {page.stem: len(page.read_text("utf-8").split()) for page in PAGES}
    assert words["README"] <= 2000
    assert sum(words.values()) - words["keys"] - words["results"] <= 30_000


def test_the_site_has_every_page():
    (nav,) = re.findall(
        r"^nav:\n(.*)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    pages = {page.name for page in PAGES if page.name != "README.md"}
    assert Counter(re.findall(r"\w+\.md", nav)) == Counter(pages | {"start.md", "CHANGELOG.md"})


@pytest.mark.browser
def test_the_site_is_built_and_searched(tmp_path):
    """From README.md and docs/ as they are; a word of a docstring is found, and nobody else is asked."""
    from playwright.sync_api import expect

    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        view, asked = browser.new_page(), []
        view.on("request", lambda request: asked.append(request.url))
        view.goto(url)
        view.get_by_role("link", name="docs/first_hour.md").click()
        expect(view.get_by_role("heading", name="The first hour")).to_be_visible()
        view.get_by_placeholder("Search").fill("chunk_gated_delta_rule")
        expect(
            view.locator("a[href$='rule#titan_linear.ops.chunk_gated_delta_rule']").first
        ).to_be_visible()
        for page, pictures in (("telemetry", 1), ("results", 3)):
            view.goto(f"{url}{page}/")
            widths = view.locator("article img").evaluate_all(
                "images => images.map(image => image.naturalWidth)"
            )
            assert len(widths) == pictures and min(widths) > 300, page
        assert {
            address for address in asked if not address.startswith((url, "blob:", "data:"))
        } == set()
        server.shutdown()


def test_the_notebook_runs(tmp_path):
    notebook = json.loads((ROOT / "examples/first_run.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    environment = os.environ | {"MPLBACKEND": "Agg", "NGPU": "2", "PYTHONPATH": str(ROOT)}
    options = dict(
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(cells)], **options)
    assert done.returncode == 0 and "Warning" not in done.stdout, done.stdout
    trained, written = done.stdout.rsplit("report.html: ", 1)
    assert "step 8/8  validation loss" in trained and "\ndef " in written
    assert Page((tmp_path / "outputs/notebook/report.html").read_text("utf-8")).texts["figcaption"]


def test_an_image_has_what_a_run_needs(tmp_path):
    """Of the files that the Dockerfile copies."""
    for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines():
        if line.startswith("COPY"):
            *sources, target = line.split()[1:]
            for source in map(ROOT.joinpath, sources):
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, tmp_path / source.name if source.is_dir() else tmp_path / target)
    command = ["./run_train.sh", "--print-config", "--training.steps", "7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "steps = 7" in done.stdout, done.stderr


# --- Commands ---------------------------------------------------------------------------------------------------------

COMMAND = re.compile(
    r"(\w+=\S+ )*(\./run_train\.sh |titan-linear |torchrun |python -m t|export \w+=)"
)
RECORD = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$NGPU" "$@"; printf '\\n\\0'; } >>"$LOG"
"""
TOMLS = sorted((ROOT / "train_configs").glob("*.toml"))
PARSERS = {"convert": convert.parse, "corpus": corpora.parse, "generate": generate.parse}


def commands_of(page):
    """Those in indented blocks, those of four words or more in a sentence, and those in a TOML's comments."""
    text = re.sub(r" *\\\n[ #]*", " ", page.read_text(encoding="utf-8") + "\n")
    lines = re.findall(r"^(?:#   |    )(.*)$", text, re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text.replace("```", ""))]
    found = lines + [
        span for span in spans if span.count(" ") > 2 and not re.search(r"[|…$]", span)
    ]
    return [command for command in found if COMMAND.match(f"{command} ")]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """run_train.sh and the configurations, where commands record their arguments and do nothing."""
    shutil.copy(ROOT / "run_train.sh", tmp_path)
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    for folder in ("tools", "docs", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tools/env.sh").write_text("ROOT=$PWD\nfind_python() { PYTHON=launcher; }\n")
    for name in ("launcher", "titan-linear", "torchrun", "python"):
        (file := tmp_path / "bin" / name).write_text(RECORD)
        file.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.delenv("NGPU", raising=False)
    return tmp_path


def ran(checkout, script):
    """Program, NGPU and arguments of each command."""
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [
        command.split("\0")[:-1] for command in (checkout / "log").read_text().split("\n\0")[:-1]
    ]


@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, *TOMLS) if commands_of(page)], ids=lambda page: page.stem
)
def test_commands_are_complete_as_they_stand(page, checkout, capfd):
    """Their keys exist and fit together, and what continues a published model has a rate for that."""
    blocks = re.findall(
        r"```toml\n((?:.*\n)*?)```|^(    \[job\]\n(?:    .*\n|\n)*)", page.read_text("utf-8"), re.M
    )
    mine = next((textwrap.dedent(fenced or indented) for fenced, indented in blocks), "")
    for name in ("mine.toml", "my.toml"):
        (checkout / name).write_text(mine)
    for program, ngpu, *argv in ran(checkout, "\n".join(commands_of(page))):
        if program in ("torchrun", "python") and "-m" in argv:
            module, *argv = argv[argv.index("-m") + 1 :]
            # verl has an environment of its own (tests/verl).
            assert module.startswith("verl.") or find_spec(module), module
            program = {"titan_linear.train": "launcher", "titan_linear": "titan-linear"}.get(
                module, ""
            )
        elif program == "launcher":
            argv = argv[2:]
        if program == "titan-linear":
            name, *argv = argv
            if name in PARSERS:
                PARSERS[name](argv)
            elif name == "plan":
                load_config(plan.parse(argv)[1], cuda=True)
            program = "launcher" if name in ("train", "doctor") else ""
        if program == "launcher":
            starts(argv, ngpu, capfd)


def starts(argv, ngpu, capfd):
    if "--help" in argv or "--print-config" in argv:
        with own_handlers():
            assert exit_of(launch.main, argv, capfd)[0] == 0
        return
    config = load_config(argv)
    p = config.parallelism
    check_config(config, int(ngpu or p.context_parallel_degree * p.tensor_parallel_degree))
    assert not Origin.of(config).folder or config.optimizer.lr <= 1e-4, argv
    assert config.job.dump_folder != "outputs/debug" or "train_configs/debug.toml" in argv[1], argv


def test_the_first_texts_are_copied(tmp_path):
    (command,) = re.findall(
        r"^    (mkdir .*)$", (ROOT / "docs/first_hour.md").read_text("utf-8"), re.MULTILINE
    )
    done = subprocess.run(
        ["bash", "-c", command.replace("texts", str(tmp_path))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_configuration_only_the_demo_runs(checkout):
    scripts = ["--training.steps 3", "--help model", "--job.config_file mine.toml --model.name kda"]
    assert [
        argv[5:]
        for argv in ran(checkout, "\n".join(f"./run_train.sh {script}" for script in scripts))
    ] == [[f"{checkout}/train_configs/debug.toml", *script.split()] for script in scripts]
    # one process has nobody to share streams with
    *_, alone = ran(checkout, "NGPU=1 ./run_train.sh")
    assert alone[-2:] == ["--parallelism.context_parallel_degree", "1"]
    for key in (
        "model.flavor=hf",
        "training.dataset jsonl",
        "training.mixture []",
        "checkpoint.initial_load_path x",
    ):
        done = subprocess.run(
            ["bash", "./run_train.sh", *f"--{key}".split()], capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr.startswith(
            f"error: --{key.split()[0].split('=')[0]} needs a CONFIG"
        )


def test_the_demo_is_short_and_shows_everything(monkeypatch):
    # as in a fresh clone
    monkeypatch.setattr(console, "program", lambda name, _: f".venv/bin/{name}")
    config = load_config(["--job.config_file", str(ROOT / "train_configs/debug.toml")])
    t, freqs = (
        config.training,
        (config.metrics.telemetry_freq, config.validation.freq, config.checkpoint.interval),
    )
    # tokens; two slow cores: 2,800 a second
    assert t.steps * t.global_batch_size * t.seq_len <= 2**18
    assert all(freq > 0 and t.steps // freq >= 2 for freq in freqs)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"    step {t.steps}/{t.steps}  validation loss " in readme
    assert textwrap.indent(finished(config, t.steps), "    ") in readme


# --- A mixer of one's own ---------------------------------------------------------------------------------------------

MINE = [
    '--model.pattern=["gla", "attention"]',
    "--model.num_layers=2",
    "--model.gla={heads = 4, head_dim = 16}",
]


def mixer_of_the_page(patch):
    # A process that was forked from one with this mixer has it.
    MIXERS.pop("gla", None)
    names = program("adding_a_mixer.md")
    assert MIXERS["gla"] is names["GLA"]
    patch.setitem(MIXERS, "gla", MIXERS.pop("gla"))
    return names


def _train(rank, world_size, argv):
    with pytest.MonkeyPatch.context() as patch:
        mixer_of_the_page(patch)
        losses, norms, _ = train_on_rank(rank, world_size, argv)
        return losses, norms


def test_a_mixer_of_ones_own_trains_alike_on_every_split(corpus, worlds, monkeypatch):
    names = mixer_of_the_page(monkeypatch)
    # Its scans on a GPU are planned, though it says nothing of them: one program per head.
    assert names["GLA"](heads=4, head_dim=16).scan_programs(2) == 2
    argv = [*arguments(corpus, {"training.dtype": "float64", "training.steps": 3}), *MINE]
    preflight(load_config(argv), world_size=1)
    cp = ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_layout=zigzag"]
    splits = (["--training.local_batch_size=2"], cp, ["--parallelism.tensor_parallel_degree=2"])
    found = [worlds(2).run(_train, [*argv, *split])[0] for split in splits]
    for losses, norms in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-9) and norms == pytest.approx(
            found[0][1], rel=1e-9
        )
    monkeypatch.setattr(names["GLA"], "over_heads", True)
    with refused(r"gla layers cannot split the 4 heads .* = 8 ranks; use a degree"):
        preflight(load_config([*argv, "--parallelism.context_parallel_degree=8"]), world_size=8)


def test_a_mixer_of_ones_own_is_proved_and_planned(corpus, monkeypatch, capsys):
    mixer_of_the_page(monkeypatch)
    monkeypatch.setenv("NGPU", "2")
    argv = [
        *arguments(corpus, {"training.seq_len": 128}),
        *MINE,
        "--parallelism.context_parallel_degree=2",
    ]
    argv += ['--model.pattern=["gla"]', "--model.num_layers=1"]
    assert doctor.main(argv) == 0, capsys.readouterr().out
    assert plan.main(["--gpus", "2", *argv]) == 0
    assert "activations of layers: 1 gla" in capsys.readouterr().out


def test_a_mixer_of_ones_own_is_its_definition(monkeypatch):
    """Packed; and token by token with a cache as at once."""
    mixer_of_the_page(monkeypatch)
    model = resized(preset("hybrid", "debug"), load_config(MINE).model.model_dump())
    decoder = initialised(replace(model, pattern=model.pattern[:1]))
    mixer, cu_seqlens = decoder.double().layers[0].mixer, torch.tensor([0, 3, 100, 110, 250, 333])
    x = torch.randn(
        1, 333, model.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    q, k, v, z = (getattr(mixer, f"{name}_proj")(x).unflatten(-1, (4, 16)) for name in "qkvz")
    g = mixer.g_proj(x).sigmoid().log() / 16
    o, _ = recurrent_simple_gla(q, k, v, g, cu_seqlens=cu_seqlens)
    want = mixer.o_proj(
        (mixer.o_norm.weight * F.rms_norm(o, (16,), eps=model.norm_eps) * F.silu(z)).flatten(2)
    )
    assert torch.allclose(
        mixer(x, BatchPlan(torch.arange(333), cu_seqlens=cu_seqlens)), want, atol=1e-12
    )
    decoder.float()
    prompt = list(range(70))
    whole = prefill(decoder, [prompt], chunk=128, device=torch.device("cpu"))
    parts = prefill(decoder, [prompt[:-1]], chunk=32, device=torch.device("cpu"))
    parts = decode(decoder, parts, torch.tensor(prompt[-1:]))
    assert torch.allclose(whole.logits, parts.logits, atol=1e-5)
