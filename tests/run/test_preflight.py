"""A run's schedule and degrees of parallelism. Whole preflights are in test_resume.py and test_hf_io.py."""

import os
import re
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.keys import argv_of
from tests.records import write_json, write_texts
from tests.refusals import refused
from titan_linear.config import ActivationCheckpoint, load_config
from titan_linear.data import ByteTokenizer, build_tokenizer, write_corpus
from titan_linear.models.config import fingerprint
from titan_linear.models.presets import preset
from titan_linear.run import preflight as preflight_module
from titan_linear.run.data import check_content
from titan_linear.run.model_checks import (
    check_checkpointing,
    check_expert_parallel,
    check_heads,
    check_node_heads,
    check_tensor_parallel,
    spans_nodes,
)
from titan_linear.run.preflight import check_mixture_step, check_prompts, check_schedule, preflight
from titan_linear.storage.step_folders import Content, Progress


def run(folder, **keys):
    base = {"job.dump_folder": folder, "training.steps": 100, "lr_scheduler.warmup_steps": 10}
    return load_config(argv_of(base, **keys))


@pytest.mark.parametrize(
    "stored, now, step, remedy",
    [
        ({}, {}, 50, ""),
        ({}, {"training__steps": 200}, 50, "training.steps to at most 100"),
        ({}, {"training__steps": 60}, 50, "lr_scheduler.total_steps = 100"),
        (
            {"lr_scheduler__total_steps": 300},
            {"training__steps": 200},
            50,
            "lr_scheduler.total_steps = 300",
        ),
        # the same, said otherwise
        ({"lr_scheduler__total_steps": 200}, {"training__steps": 200}, 50, ""),
        ({}, {"training__steps": 200, "lr_scheduler__total_steps": 200}, 50, ""),  # said
        ({}, {"training__steps": 200}, 10, ""),  # it has not begun to decay
        (
            {"lr_scheduler__decay_ratio": 0.2},
            {"lr_scheduler__decay_ratio": 0.2, "training__steps": 200},
            80,
            "",
        ),
        (
            {"lr_scheduler__decay_ratio": 0.2},
            {"lr_scheduler__decay_ratio": 0.2, "training__steps": 200},
            81,
            "training.steps to at most 100",
        ),
        (
            {"lr_scheduler__decay_ratio": 0.0},
            {"lr_scheduler__decay_ratio": 0.0, "training__steps": 200},
            90,
            "",
        ),
    ],
)
def test_steps_that_are_done_keep_their_rate(stored, now, step, remedy, tmp_path):
    progress = Progress(step=step, total_steps=run(tmp_path, **stored).schedule_steps)

    def check(**keys):
        config = run(tmp_path, **keys)
        check_schedule(config.training.steps, config.optimizer.lr, config.lr_scheduler, progress)

    if not remedy:
        check(**now)
        return
    steps = now["training__steps"]
    with refused(f"training.steps = {steps} would change") as error:
        check(**now)
    assert (
        f"; set {remedy} to keep the schedule, or lr_scheduler.total_steps = {steps} to resume"
        in str(error.value)
    )
    # a remedy
    check(**now, lr_scheduler__total_steps=max(steps, 300))


def test_another_model_is_refused(tmp_path):
    """By what it computes: of a folder's config.json that was changed, say."""
    model, config = preset("hybrid", "debug"), run(tmp_path)

    def content(model):
        return Content(tokenizer="t", model=fingerprint(model), corpora={"": "c"}, mixture=[])

    known = content(model)
    assert fingerprint(replace(model, init_std=0.5)) == known.model
    wider = replace(
        model, pattern=tuple(replace(m, rope_theta=5) if m.rotary else m for m in model.pattern)
    )
    same = replace(
        model, pattern=tuple(replace(m, rope_theta=5.0) if m.rotary else m for m in model.pattern)
    )
    assert fingerprint(wider) == fingerprint(same) != known.model
    check_content(config, known, content(model))
    for other in (wider, replace(model, norm_eps=0.5), replace(model, num_layers=1)):
        with refused("flavor, sizes or hf_assets_path gives another model than the run in"):
            check_content(config, known, content(other))


@pytest.mark.parametrize(
    "name, degree, said",
    [
        ("hybrid", 2, ""),
        (
            "hybrid",
            4,
            "= 4 cannot split the 2 heads of kda, .*, 2 key heads of attention in .* 'debug'; use 1 or 2$",
        ),
        (
            "kimi-linear",
            3,
            "the 2 heads of kda, 4 query heads of mla, .* hidden channels of each expert, ",
        ),
        ("qwen3.5", 3, r"320 rows of the vocabulary \(model.vocab_size\)"),
        (
            "nemotron-h",
            4,
            "the 2 groups of mamba2, 2 key heads of attention in .* 'debug'; use 1 or 2$",
        ),
        ("granite-h", 8, "4 query heads of attention"),
        (
            "falcon-h1",
            4,
            "the 2 groups of mamba2, 2 key heads of attention in .* 'debug'; use 1 or 2$",
        ),
    ],
)
def test_what_tensor_parallelism_cannot_split(name, degree, said, tmp_path):
    keys = run(tmp_path, model__name=name).model
    model = preset(name, "debug")
    if not said:
        return check_tensor_parallel(model, keys, degree)
    with refused(said):
        check_tensor_parallel(model, keys, degree)


def test_every_nth_layer_is_one_of_the_model():
    model = replace(preset("hybrid", "debug"), num_layers=4)

    def every(option):
        return ActivationCheckpoint(mode="selective", selective_ac_option=option)

    for option in ("op", "1", "4"):
        check_checkpointing(model, every(option))
    with refused(r"selective_ac_option = '5' computes none of the model's 4 layers again"):
        check_checkpointing(model, every("5"))
    check_checkpointing(model, ActivationCheckpoint())


def test_an_all_to_all_splits_the_heads_that_tensor_parallelism_leaves(tmp_path):
    keys = {
        "parallelism__context_parallel_degree": 2,
        "parallelism__context_parallel_linear_method": "ulysses",
    }
    config = run(tmp_path, **keys)
    both = run(tmp_path, **keys, parallelism__tensor_parallel_degree=2).parallelism
    check_heads(preset("hybrid", "debug"), config.model, config.parallelism)
    with refused(r"the 2 heads .*degree = 2 × tensor_parallel_degree = 2 ranks"):
        check_heads(preset("hybrid", "debug"), config.model, both)
    with refused(r"= 'ulysses' cannot split the 2 groups of .*; use 'kcp', or a degree"):
        check_heads(preset("nemotron-h", "debug"), config.model, both)


def test_ranks_of_a_node_share_the_heads(tmp_path):
    """Of 4 query and 2 key heads; 12 ranks on nodes of 8 are on one in fours, and of three groups of 8 on nodes of 12
    one is on two nodes."""
    keys = {"parallelism__context_parallel_method": "ulysses+ring", "training__seq_len": 768}

    def check(ranks, world_size, node_size, **more):
        cp = {"parallelism__context_parallel_degree": ranks}
        config = run(tmp_path, **keys, **cp, **more)
        model = preset("hybrid", "debug")
        check_node_heads(model, config.model, config.parallelism, world_size, node_size)

    for ranks, node_size in ((12, 8), (16, 4), (4, 2)):
        check(ranks, ranks, node_size)
    for ranks, world_size, node_size in ((16, 16, 8), (8, 24, 12)):
        with refused(r"4 query heads .* the 8 ranks .* a node of \d+ processes; use 'ring' or"):
            check(ranks, world_size, node_size)
    check(16, 32, 4, parallelism__tensor_parallel_degree=2)
    with refused(r"4 query heads .* among the 4 ranks"):
        check(16, 32, 8, parallelism__tensor_parallel_degree=2)


@pytest.mark.parametrize(
    "name, degree, said",
    [
        ("qwen3.5", 3, "= 3 cannot share out the .* experts .*; use a divisor of"),
        ("qwen3.5", 512, "= 512 cannot share out"),
        ("hybrid", 2, "= 2: .* has no experts; leave it at 1"),
    ],
)
def test_experts_that_cannot_be_shared_out(name, degree, said, tmp_path):
    with refused(said):
        keys = run(tmp_path, model__name=name).model
        check_expert_parallel(preset(name, "debug"), keys, degree)


def test_tensor_parallelism_across_nodes_is_a_warning():
    assert spans_nodes(8, 8) == spans_nodes(8, 16) == ""
    assert "= 8 reaches across nodes of 4 processes" in spans_nodes(8, 4)


SHIPPED = [
    path
    for path in Path(__file__).parents[2].glob("train_configs/hybrid*.toml")
    if "\ndataset_path" in path.read_text()
]


@pytest.mark.parametrize("file", sorted(SHIPPED), ids=lambda path: path.stem)
def test_a_shipped_configuration_starts_with_one_line_changed(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "own.jsonl", (f"document {n}\n" * 30 for n in range(500)))
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("dataset_path")]
    own = tmp_path / "own.toml"
    own.write_text(file.read_text().replace(line, 'dataset_path = "own.jsonl"'))
    config = load_config(["--job.config_file", str(own)])
    preflight(config, config.parallelism.context_parallel_degree)


def test_the_first_hour_begins(tmp_path, monkeypatch):
    """The page's own configuration, with the texts that it takes."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "first_hour.md").read_text()
    _, _, copied = next(line for line in page.splitlines() if "cp docs" in line).partition("cp ")
    *globs, texts = copied.split()
    (tmp_path / texts).mkdir()
    for file in (file for pattern in globs for file in root.glob(pattern)):
        (tmp_path / texts / file.name).write_bytes(file.read_bytes())
    block = page[page.index("    [job]") : page.index("What it resolves to")]
    (tmp_path / "mine.toml").write_text(textwrap.dedent(block))
    monkeypatch.chdir(tmp_path)
    preflight(load_config(["--job.config_file", "mine.toml"]), 1)


def test_groups_of_files_fit_the_corpus(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for name in ("a.py", "b.md"):
        (tmp_path / "texts" / name).write_text("text")
    keys = {
        "training__dataset": "text",
        "training__dataset_path": tmp_path / "texts",
        "checkpoint__enable": "false",
    }
    keys["training__seq_len"] = 8
    preflight(
        run(tmp_path, **keys, metrics__loss_by_source='[{name = "code", files = "**/*.py"}]'), 1
    )
    assert capsys.readouterr().out.endswith("loss by source: code 5 tokens, other 5 tokens\n")
    with refused(r"metrics.loss_by_source, group 'c': files = '\*.c' fits none of 2 files .*a.py"):
        preflight(run(tmp_path, **keys, metrics__loss_by_source='[{name = "c", files = "*.c"}]'), 1)


def test_a_corpus_of_less_than_a_step_is_a_warning(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text" * 8)
    keys = {
        "training.dataset": "text",
        "training.dataset_path": tmp_path / "a.txt",
        "training.global_batch_size": 2,
    }
    mixture = f'[{{name = "a", weight = 1, dataset = "text", dataset_path = "{tmp_path}/a.txt"}}]'
    for key, given in (
        ("dataset_path", keys),
        ("mixture", {"training.mixture": mixture, **dict([*keys.items()][2:])}),
    ):
        preflight(run(tmp_path, **given, **{"training.seq_len": 16}), 1)
        assert "warning" not in capsys.readouterr().out
        preflight(run(tmp_path, **given, **{"training.seq_len": 32}), 1)
        said = (
            f"training.{key}: the corpus has 33 tokens, and a step takes .* = 2 × 32 = 64, so that"
        )
        assert re.search(f"warning: {said}", capsys.readouterr().out)
        with refused(said.replace("32 = 64", "34 = 68")):  # not even a stream
            preflight(run(tmp_path, **given, **{"training.seq_len": 34}), 1)


@pytest.mark.parametrize("verify", ["changed", "always"])
def test_a_corpus_is_read_at_each_start_only_if_asked(verify, tmp_path):
    """A byte that changes without the file's size and time is noticed only then."""
    write_corpus(tmp_path / "corpus", [np.arange(64) % 9], ByteTokenizer())
    keys = {"training.dataset": "tokens", "training.dataset_path": tmp_path / "corpus"}
    keys |= {"training.seq_len": 8, "training.global_batch_size": 2, "training.verify": verify}
    preflight(run(tmp_path, **keys), 1)
    (file,) = (tmp_path / "corpus").glob("tokens*")
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with refused("tokens") if verify == "always" else nullcontext():
        preflight(run(tmp_path, **keys), 1)


def test_weights_and_biases_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_module, "find_spec", lambda name: None)
    config = load_config([f"--job.dump_folder={tmp_path}", "--metrics.enable_wandb=true"])
    with refused(r"metrics.enable_wandb = true needs the package wandb, .* pip install wandb"):
        preflight_module.preflight(config, 1)


def test_a_folder_for_checkpoints_that_cannot_be_made_is_refused_before_the_corpus(tmp_path):
    (tmp_path / "disk").write_text("")
    keys = {
        "checkpoint__folder": tmp_path / "disk",
        "training__dataset": "text",
        "training__dataset_path": "nowhere",
    }
    with refused(r"checkpoint\.folder = .*disk' is not a folder; use another"):
        preflight(run(tmp_path, **keys), 1)


@pytest.mark.parametrize(
    "prompt, tokens",
    [
        ("validation.sample_prompt", "validation.sample_tokens"),
        ("sample.prompt", "sample.max_new_tokens"),
    ],
)
def test_a_prompt_without_tokens_is_refused_before_the_run(prompt, tokens, tmp_path):
    """Not at the first validation, or when the run ends."""
    blanks_left_out = {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"},
        "normalizer": {"type": "Strip", "strip_left": True, "strip_right": True},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    write_json(
        tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], **blanks_left_out}
    )
    keys = {
        "model.tokenizer_path": tmp_path,
        "validation.enable": "true",
        "training.steps": 1,
        tokens: 3,
    }
    with refused(rf"{prompt} = '  ' has no tokens; give some text to continue"):
        preflight(run(tmp_path, **keys, **{prompt: "  "}), 1)
    for more in ({prompt: "a"}, {tokens: 0, prompt: "  "}):
        config = run(tmp_path, **keys | more)
        check_prompts(config.validation, config.sample, build_tokenizer(str(tmp_path)))


def test_a_mixture_does_not_change_in_a_run_that_is_not_there(tmp_path):
    """The wrong folder, say: another run would begin, with the new mixture alone."""
    (tmp_path / "a.txt").write_text("text " * 100)
    source = f'[{{name = "a", weight = 1, dataset = "text", dataset_path = "{tmp_path}"}}]'
    keys = {"training.mixture": source, "training.seq_len": 16, "training.mixture_from_step": 500}
    message = rf"mixture_from_step = 500 goes on from step 500 of a run, and job.dump_folder = '{tmp_path}' has"
    with refused(message):
        preflight(run(tmp_path, **keys), 1)
    # what it may be there, its mixtures say
    check_mixture_step(500, str(tmp_path), Progress(step=480))
    for step in (-1, 0):
        check_mixture_step(step, str(tmp_path), None)


@pytest.mark.parametrize("known", ["bytes-257", None, "of another file"])
def test_weights_that_know_another_tokenizer_are_named(known, tmp_path, monkeypatch, capsys):
    """Their vocabularies may be alike in size."""
    weights = tmp_path / "old/checkpoint/step-3"
    weights.mkdir(parents=True)
    (weights / "manifest.json").touch()
    content = Content(tokenizer=known, model="m", corpora={}, mixture=[]) if known else None
    (weights / "progress.json").write_text(Progress(step=3, content=content).model_dump_json())
    for name in ("verify", "check_weights", "lacks_base"):
        monkeypatch.setattr(f"titan_linear.run.origin.{name}", lambda *_: None)
    keys = {"checkpoint.initial_load_path": tmp_path / "old", "training.dataset": "text"}
    with refused("nothing is at"):
        preflight(run(tmp_path / "new", **keys, **{"training.dataset_path": "nowhere"}), 1)
    warned = (
        f"'{weights}' were trained with another tokenizer than model.tokenizer_path gives"
        in capsys.readouterr().out
    )
    assert warned == (known == "of another file")
