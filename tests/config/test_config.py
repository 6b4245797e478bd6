import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.refusals import refused
from titan_linear.config import KEYS, Config, check_config, config_to_toml, load_config
from titan_linear.config.reading import ABSENT, MEANT
from titan_linear.data import build_tokenizer
from titan_linear.data.corpus.sources import source_files
from titan_linear.storage.files import default_cache_dir


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def toml(tmp_path):
    """toml(text): arguments that read a file with this text."""

    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return ["--job.config_file", str(path)]

    return write


def overrides(**keys):
    """overrides(training__steps=3): the command line that says so."""
    text = {True: "true", False: "false"}
    return [
        f"--{k.replace('__', '.')}={text[v] if isinstance(v, bool) else v}" for k, v in keys.items()
    ]


def test_the_command_line_overrides_the_file_overrides_the_defaults(toml):
    config = load_config(
        [
            *toml("[training]\nsteps = 5\nseq_len = 64\n[optimizer]\nlr = 1\n"),
            "--training.steps",
            "7",
        ]
    )
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (7, 64, 1.0)
    assert isinstance(config.optimizer.lr, float)
    assert config.debug == Config().debug


def test_command_line_values_have_the_types_of_their_keys():
    argv = [
        "--checkpoint.enable",
        "false",
        "--parallelism.data_parallel_shard_degree",
        "-1",
        "--optimizer.lr",
        ".001",
    ]
    argv += [
        "--sample.prompt=--x",
        "--job.description",
        "true",
        "--metrics.enable_tensorboard=true",
    ]
    config = load_config(argv)
    assert config.checkpoint.enable is False and config.metrics.enable_tensorboard is True
    assert config.parallelism.data_parallel_shard_degree == -1 and config.optimizer.lr == 0.001
    assert config.sample.prompt == "--x" and config.job.description == "true"


@pytest.mark.parametrize("value", ['"3"', "true", "3.0", "[3]", "0", "-1"])
def test_a_file_with_another_type_or_range_is_refused(toml, value):
    with refused(r"run.toml: training.steps = .* must be"):
        load_config(toml(f"[training]\nsteps = {value}\n"))


@pytest.mark.parametrize(
    "key, value",
    [("training.steps", v) for v in ("3.0", "true", "1e3", "", "x")]
    + [("checkpoint.enable", v) for v in ("True", "1", "yes", "")]
    + [("optimizer.lr", v) for v in ("nan", "inf", "true", "0")]
    + [("comm.train_timeout_seconds", "9000000000")]
    + [("training.dtype", "fp32"), ("job.dump_folder", "")],
)
def test_a_command_line_with_another_type_or_range_is_refused(key, value):
    with refused(f"command line: {key} = .* must "):
        load_config([f"--{key}={value}"])


@pytest.mark.parametrize("value", ["1", '"true"', "0.5"])
def test_a_boolean_in_a_file_is_true_or_false(toml, value):
    with refused(r"checkpoint.enable = .* must be true or false"):
        load_config(toml(f"[checkpoint]\nenable = {value}\n"))


@pytest.mark.parametrize(
    "text, unknown, nearest",
    [
        ("[training]\nsequence_len = 3", "training.sequence_len", "training.seq_len"),
        ("[training]\nlr = 3", "training.lr", "optimizer.lr"),
        ("[optimiser]\nlr = 3", "optimiser", "optimizer"),
        ("steps = 3", "steps", "training.steps"),
        ("[model]\nlayers = 3", "model.layers", "model.num_layers"),
        ("[telemetry]\nfreq = 3", "telemetry", "metrics.telemetry_freq"),
        ("[optimizer]\nlearning_rate = 3", "optimizer.learning_rate", "optimizer.lr"),
        ("[checkpoint]\nfreq = 3", "checkpoint.freq", "checkpoint.interval"),
    ],
)
def test_an_unknown_key_names_its_file_and_the_nearest_key(toml, text, unknown, nearest):
    with refused(rf"run.toml: {unknown} is not a (key|section); did you mean {nearest}\?"):
        load_config(toml(text))


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text(
        '[job]\ndump_folder = "~/run"\n[checkpoint]\ninitial_load_path = "~/old"\n'
    )
    config = load_config(
        ["--job.config_file=~/run.toml", "--model.flavor=hf", "--model.hf_assets_path=~/assets"]
    )
    given = config.job.dump_folder, config.checkpoint.initial_load_path, config.model.hf_assets_path
    assert given == tuple(str(tmp_path / name) for name in ("run", "old", "assets"))
    folders = (
        "checkpoint.folder",
        "profiling.save_traces_folder",
        "profiling.save_memory_snapshot_folder",
    )
    # inside the run's they would be named "~"
    config = load_config([f"--{key}=~/{key}" for key in folders])
    assert {key: config.flat_keys()[key] for key in folders} == {
        key: str(tmp_path / key) for key in folders
    }


def test_without_a_home_folder(monkeypatch):
    """No HOME, and no entry in passwd: a container that runs as any user id."""

    def no_entry(_):
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with refused("HOME is not set; set it, or XDG_CACHE_HOME"):
        default_cache_dir()
    for path in ("~/texts", "~nobody-of-this-name/texts"):
        with refused(f"nothing is at '{path}'"):
            source_files("text", path)
        with refused(f"{path} does not exist"):
            build_tokenizer(path)


@pytest.mark.parametrize("key", ["training.dataset_path", "job.dump_folder", "sample.prompt"])
def test_a_text_that_is_not_utf8_is_refused(key):
    """As the name of a file may be; config.toml could not hold it."""
    with refused(rf"command line: {key} = 'a\\udcff' is not UTF-8; rename the file"):
        load_config([f"--{key}=a\udcff"])


@pytest.mark.parametrize(
    "argument, nearest",
    [
        ("--training.step=3", "training.steps"),
        ("--validaton.steps=3", "validation.steps"),
        ("--lr", "optimizer.lr"),
        ("--telemetry.freq", "metrics.telemetry_freq"),
        ("--training", "training.steps"),
        ("--wandb", "metrics.enable_wandb"),
        ("--model.tokenizer=x", "model.tokenizer_path"),
        *((f"--{name}", key) for name, key in MEANT.items()),
    ],
)
def test_an_unknown_option_names_the_nearest_key(argument, nearest):
    with refused(rf"command line: {argument} is not a key; did you mean {nearest}\?"):
        load_config([argument])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["train.toml"], "'train.toml' belongs to no key; keys are given as --section.key value"),
        (["training.steps", "5"], "'training.steps' belongs to no key"),
        (["--training.steps"], "--training.steps needs a value, INT; write"),
        (["--training.seq", "3"], "--training.seq is not a key"),
    ],
)
def test_other_arguments_are_refused(argv, message):
    with refused(f"command line: {message}"):
        load_config(argv)


def test_values_that_look_like_options():
    argv = ["--job.description", "-draft", "--sample.prompt", "--- a/file", "--debug.seed=7"]
    config = load_config([*argv, "--training.steps", "5", "--training.steps", "6"])
    assert (config.job.description, config.sample.prompt) == ("-draft", "--- a/file")
    assert (config.debug.seed, config.training.steps) == (7, 6)
    with refused("--training.steps needs a value, INT"):
        load_config(["--training.steps", "--training.seq_len", "64"])


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ValueError) as error:
        load_config(["--training.steps=x", "--optimizer.lr=y"])
    assert "training.steps" in str(error.value) and "optimizer.lr" in str(error.value)


def test_tables_inside_a_section_are_merged_key_by_key(toml):
    argv = toml("[model]\nkda = {heads = 1, head_dim = 8}\n[model.gdn]\nheads = 3\n")
    config = load_config(
        [*argv, "--model.kda.head_dim=4", "--model.kda.lower_bound", "", "--model.dim=7"]
    )
    assert config.model.mixers == {
        "kda": {"heads": 1, "head_dim": 4, "lower_bound": ""},
        "gdn": {"heads": 3},
    }
    assert load_config(toml(config_to_toml(config))) == config
    for argv in itertools.permutations(
        ["--model.kda={heads=1}", "--model.kda.head_dim=4", "--model.mixers={gdn={}}"]
    ):
        assert load_config([*argv]).model.mixers == {"kda": {"heads": 1, "head_dim": 4}, "gdn": {}}


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            ["--model.kda=3"],
            r"--model.kda=3 is not a key; did you mean the table of a mixer, \[model.kda\]\?",
        ),
        (
            ["--model.name=qwen35"],
            r"model.name = 'qwen35' must be 'bamba', .* or 'rwkv7'; did you mean 'qwen3.5'\?$",
        ),
        (["--model.name=zzz"], r"model.name = 'zzz' must be 'bamba', .* or 'rwkv7'$"),
        (
            ["--model.mixers=3", "--model.kda.heads=2"],
            r"model.mixers = 3 must be a table, \[model.mixers\]",
        ),
        (["--model.moe=3", "--model.moe.top_k=2"], r"model.moe = 3 must be a table, \[model.moe\]"),
        (["--model.dimm=3"], r"--model.dimm=3 is not a key; did you mean model.dim\?"),
        (["--training.foo=3"], "--training.foo=3 is not a key; --help lists all keys"),
        (
            ["--float8.filter_fqns=o_proj"],
            r"float8.filter_fqns = 'o_proj' must be a list, \[\"…\", \"…\"\]",
        ),
        (
            ["--model.heads=3"],
            r"--model.heads=3 is not a key: each mixer has its own, model.kda.heads",
        ),
    ],
)
def test_wrong_tables_of_a_model(argv, words):
    with refused(words):
        load_config(argv)


def test_an_unreadable_file_is_named(toml, tmp_path):
    with refused(r"none.toml' cannot be read: No such file"):
        load_config(["--job.config_file", str(tmp_path / "none.toml")])
    with refused(r"cannot be read: Is a directory"):
        load_config(["--job.config_file", str(tmp_path)])
    with refused(r"run.toml is not TOML: .*line 2"):
        load_config(toml("[training]\nsteps 3\n"))
    with refused(r"run.toml: training = 3 must be a section, \[training\]"):
        load_config(toml("training = 3\n"))
    with refused(r"job.config_file belongs on the command line"):
        load_config(toml("[job]\nconfig_file = 'other.toml'\n"))


def test_a_file_as_windows_writes_it(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert load_config(["--job.config_file", str(tmp_path / "run.toml")]).training.steps == 3


@pytest.mark.parametrize(
    "value, why",
    [
        ("[" * 5000 + "]" * 5000, "nested 5,000 deep, and 50 is the most"),
        ("{a = " * 600 + "1" + "}" * 600, "nested 600 deep"),
        ("{" + "a." * 600 + "a = 1}", "nested 51 deep"),
        ("{a = 1979-05-27}", "no key is a date"),
    ],
    ids=["lists", "tables", "dotted keys", "date"],
)
def test_what_no_key_has_is_refused(toml, value, why):
    with refused(f"run.toml is not TOML: .*{why}"):
        load_config(toml(f"[model]\nkda = {value}\n"))
    with refused("command line: "):
        load_config(["--model.kda", value])


def test_of_many_mistakes_some_are_named(toml):
    with refused(r"training.k0 is not a key[^$]*99,980 more problems$"):
        load_config(toml("[training]\n" + "".join(f"k{n} = 1\n" for n in range(100_000))))


def test_the_written_file_starts_the_same_run(toml):
    hard = 'a "b" \\ \n\t\x7f\x01 é 😀 #'
    argv = [
        '--metrics.loss_by_source=[{name = "a b", files = "**/*.py, é/\\"*"}]',
        f"--job.description={hard}",
        "--optimizer.lr=1.2345678901234567e-05",
        "--model.tokenizer_path=",
    ]
    config = load_config(argv)
    written = config_to_toml(config)
    assert load_config(toml(written)).model_dump(
        exclude={"job": {"config_file"}}
    ) == config.model_dump(exclude={"job": {"config_file"}})
    assert all(
        f"\n{dotted.partition('.')[2]} = " in written
        for dotted in KEYS
        if dotted != "job.config_file"
    )
    assert "auto" not in (
        config.training.mixed_precision_param,
        config.training.mixed_precision_reduce,
    )


@pytest.mark.parametrize(
    "cuda, dtype, param, reduce",
    [
        (False, "float32", "float32", "float32"),
        (True, "float32", "bfloat16", "float32"),
        (False, "float64", "float64", "float64"),
        (True, "bfloat16", "bfloat16", "float32"),
    ],
)
def test_automatic_types_are_resolved_once(monkeypatch, cuda, dtype, param, reduce):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    training = load_config(overrides(training__dtype=dtype)).training
    assert (training.mixed_precision_param, training.mixed_precision_reduce) == (param, reduce)


def test_help_documents_every_key_quickly():
    """--help needs no torch."""
    code = "import sys; from titan_linear.config import load_config\ntry: load_config(['--help'])\n"
    code += "finally: assert 'torch' not in sys.modules"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"--{dotted} " in shown for dotted in KEYS)
    assert all(field.description for field in KEYS.values())
    assert '(default: "stdlib")' in " ".join(shown.split())


@pytest.mark.parametrize(
    "argument", ["--parallelism.pipeline_parallel_degree=2", "--pipeline_parallel_degree"]
)
def test_a_capability_that_is_not_here_is_said_so(argument):
    with refused("is not a key: there is no pipeline parallelism"):
        load_config([argument])


def test_what_is_here_is_not_called_absent():
    here = {name for dotted in KEYS for name in dotted.split(".")}
    assert not here & set(ABSENT)


def test_types_of_a_run_that_is_for_gpus_elsewhere():
    assert load_config([], cuda=True).training.mixed_precision_param == "bfloat16"
    assert (
        load_config(["--training.dtype=float64"], cuda=True).training.mixed_precision_param
        == "float64"
    )


def test_help_of_a_section(capsys):
    with pytest.raises(SystemExit):
        load_config(["--job.config_file", "none.toml", "--help", "debug"])
    shown = capsys.readouterr().out
    assert "--debug.seed" in shown and "--training." not in shown
    with refused(r"--help debugging: sections are job, model, "):
        load_config(["--help", "debugging"])


def test_the_page_of_keys_is_up_to_date(capsys):
    with pytest.raises(SystemExit):
        load_config(["--help", "markdown"])
    shown, page = capsys.readouterr().out, Path(__file__).parents[2] / "docs/keys.md"
    assert page.read_text(encoding="utf-8") == shown, (
        "./run_train.sh --help markdown > docs/keys.md"
    )
    assert all(f"\n- `{dotted.partition('.')[2]}` (" in shown for dotted in KEYS)


def test_the_resolved_configuration_says_where_each_value_is_from(toml, capsys, tmp_path):
    file = toml("[training]\nsteps = 5\nseq_len = 64\n")
    with pytest.raises(SystemExit) as stop:
        load_config([*file, "--training.steps=7", "--print-config"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    lines = {line.partition(" = ")[0]: line for line in shown.splitlines()}
    assert "seq_len = 64" in shown and lines["seq_len"].endswith(f"# {file[1]}")
    assert next(line for line in shown.splitlines() if line.startswith("steps = 7")).endswith(
        "# command line"
    )
    assert (
        lines["mixed_precision_param"].endswith("# default: auto")
        and '"float32"' in lines["mixed_precision_param"]
    )
    assert lines["seed"].endswith("# default")
    (tmp_path / "again.toml").write_text(shown)
    again = load_config(["--job.config_file", str(tmp_path / "again.toml")])
    assert (again.training.steps, again.training.seq_len) == (7, 64)


def test_a_configuration_does_not_change():
    with refused("frozen"):
        Config().training.steps = 3


@pytest.mark.parametrize(
    "value, message",
    [
        ("*.py", r"loss_by_source = '\*.py' must be a list, \[{name = …, files = …}\]"),
        ("[3]", r"loss_by_source.0 = 3 must be a table, {name = …, files = …}"),
        ('[{name = "a"}]', r"loss_by_source.0.files is missing; give it"),
        (
            '[{name = "", files = "*"}]',
            r"loss_by_source.0.name = '' must have at least 1 character",
        ),
        ('[{name = "a", glob = "*", files = "*"}]', r"loss_by_source.0.glob is not a key"),
    ],
)
def test_groups_of_files_that_are_none(value, message):
    with refused(message):
        load_config([f"--metrics.loss_by_source={value}"])


@pytest.mark.parametrize(
    "world_size, keys, degrees",
    [
        (1, {}, (1, 1)),
        (8, {}, (1, 8)),
        (8, {"context_parallel_degree": 4}, (1, 2)),
        (8, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, (1, 2)),
        (8, {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2}, (2, 2)),
        (2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, (2, 1)),
    ],
)
def test_the_rest_of_the_ranks_shard(world_size, keys, degrees):
    config = load_config(overrides(**{f"parallelism__{k}": v for k, v in keys.items()}))
    assert config.parallelism.data_parallel_degrees(world_size) == degrees
    check_config(config, world_size)


@pytest.mark.parametrize(
    "world_size, keys, message",
    [
        (
            2,
            {"parallelism__context_parallel_degree": 4},
            "context_parallel_degree = 4 need a multiple of 4 processes",
        ),
        (
            6,
            {"parallelism__context_parallel_degree": 4},
            "need a multiple of 4 processes, and there are 6",
        ),
        (
            4,
            {"parallelism__data_parallel_shard_degree": 3},
            "shard_degree = 3, .* need 3 processes",
        ),
        (
            1,
            {"activation_checkpoint__selective_ac_option": "0"},
            "option = .0. must be .op., or a number n above 0",
        ),
        (
            1,
            {"activation_checkpoint__selective_ac_option": "2"},
            "option = .2. has no effect with .*mode = .none.",
        ),
        (
            1,
            {"parallelism__data_parallel_shard_degree": 0},
            "shard_degree = 0 must be 1 or more, or -1",
        ),
        (
            2,
            {"parallelism__context_parallel_degree": 2, "training__seq_len": 63},
            "seq_len = 63 .* for example 64",
        ),
        (
            2,
            {"parallelism__tensor_parallel_degree": 4},
            "tensor_parallel_degree = 4, .* need a multiple of 4",
        ),
        (
            4,
            {"parallelism__context_parallel_degree": 4, "parallelism__fsdp_shard_degree": 3},
            "fsdp_shard_degree = 3 does not divide the 4 ranks .* use a divisor of 4, or -1",
        ),
        (
            2,
            {"parallelism__fsdp_shard_degree": 0},
            "fsdp_shard_degree = 0 does not divide the 2 ranks",
        ),
        (
            4,
            {"parallelism__fsdp_shard_degree": 2, "parallelism__expert_parallel_degree": 4},
            "expert_parallel_degree = 4 does not divide the 2 ranks .* use a divisor of 2",
        ),
        (
            4,
            {"parallelism__tensor_parallel_degree": 4, "training__seq_len": 66},
            "by 4 ranks .* for example 68",
        ),
        (
            4,
            {"parallelism__tensor_parallel_degree": 2, "parallelism__expert_parallel_degree": 4},
            "expert_parallel_degree = 4 does not divide the 2 ranks",
        ),
        (
            2,
            {
                "parallelism__context_parallel_degree": 2,
                "parallelism__context_parallel_layout": "zigzag",
                "training__seq_len": 66,
            },
            "seq_len = 66 .*'zigzag'.* multiple of 4, for example 68",
        ),
        (
            4,
            {"training__global_batch_size": 6},
            "global_batch_size = 6 is not a multiple of .* 1 × 4 = 4",
        ),
        (
            2,
            {"training__local_batch_size": 3},
            "global_batch_size = 8 is not a multiple of .* 3 × 2 = 6",
        ),
        (
            1,
            {"lr_scheduler__total_steps": 10},
            "total_steps = 10 is less than training.steps = 1000",
        ),
        (
            1,
            {"training__epochs": 2, "lr_scheduler__total_steps": 2000},
            "training.epochs = 2 is not for lr_scheduler.total_steps, which counts steps",
        ),
        (
            1,
            {
                "training__epochs": 2,
                "training__seq_len_schedule": "[{until_step = 3, seq_len = 1024}]",
            },
            "training.epochs = 2 is not for training.seq_len_schedule",
        ),
        (
            1,
            {"training__dtype": "float64", "training__mixed_precision_param": "float32"},
            "float64 is for all three",
        ),
        (
            1,
            {"training__expert_balance_coefficient": -0.5},
            "coefficient = -0.5 must be 0 or more, or -1 for the",
        ),
        (
            1,
            {"training__expert_bias_update_rate": -1e-9},
            "update_rate = -1e-09 must be 0 or more, or -1",
        ),
        (
            1,
            {"training__mixed_precision_reduce": "float64"},
            "float64 is for all three or for none",
        ),
        (
            1,
            {"training__dataset_path": "x"},
            "dataset_path = 'x' is not used by training.dataset = 'stdlib'",
        ),
        (
            1,
            {"training__dataset": "jsonl"},
            "training.dataset = 'jsonl' needs training.dataset_path",
        ),
        (
            1,
            {"validation__enable": True, "validation__dataset_path": "x"},
            "validation.dataset_path = 'x' is not used",
        ),
        (1, {"validation__enable": True, "validation__holdout": 0.0}, "nothing to validate on"),
        (1, {"validation__steps": 0}, "validation.steps = 0"),
        (
            1,
            {"optimizer__momentum": 0.9},
            "optimizer.momentum = 0.9 has no effect with optimizer.name = .AdamW.; set",
        ),
        (1, {"validation__sample_tokens": 9}, "validation.sample_tokens = 9 has no effect"),
        (
            1,
            {"adapter__enable": True, "optimizer__name": "muon"},
            "name = .muon. has no effect with adapter.enable",
        ),
        (1, {"compile__backend": "aot_eager"}, "compile.backend = .aot_eager. has no effect with"),
        (
            1,
            {"profiling__enable_profiling": True, "profiling__profiler_active": 11},
            "profile_freq = 10, the steps",
        ),
        (
            1,
            {
                "metrics__loss_by_source": '[{name = "a", files = "*"}]',
                "metrics__telemetry_freq": 0,
            },
            "loss_by_source is shown by telemetry, which metrics.telemetry_freq = 0 turns off; set that to 100",
        ),
        (
            1,
            {"metrics__loss_by_source": '[{name = "other", files = "*"}]'},
            "name = 'other' stands for two",
        ),
        (
            1,
            {"metrics__loss_by_source": '[{name = "a", files = "*"}, {name = "a", files = "b"}]'},
            "name = 'a' stands for two",
        ),
        (
            1,
            {
                "metrics__loss_by_source": '[{name = "web", files = "*"}]',
                "training__mixture": '[{name = "web", weight = 1, dataset = "stdlib"}]',
            },
            "name = 'web' stands for two, of groups, sources of training.mixture",
        ),
        (
            1,
            {
                "metrics__loss_by_source": '[{name = "web", files = "*"}]',
                "training__mixture": '[{name = "other", weight = 1, dataset = "stdlib"}]',
            },
            "name = 'other' stands for two",
        ),
        (
            1,
            {"checkpoint__enable": False, "checkpoint__load_step": 5},
            "checkpoint.load_step = 5 has no effect",
        ),
        (
            1,
            {"checkpoint__enable": False, "checkpoint__last_save_model_only": True},
            "last_save_model_only = true has",
        ),
    ],
)
def test_contradictions_are_refused(world_size, keys, message):
    config = load_config(overrides(**keys))
    with refused(message):
        check_config(config, world_size)


def test_float64_is_for_the_cpu(monkeypatch):
    config = load_config(overrides(training__dtype="float64"))
    check_config(config, 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with refused(r"training.dtype = 'float64' runs on the CPU only"):
        check_config(config, 1)


def test_a_step_that_takes_the_weights_whole_is_refused():
    config = load_config(["--optimizer.lr", "10"])
    with refused(r"optimizer.lr = 10.0 times optimizer.weight_decay = 0.1 is 1, .* lower one"):
        check_config(config, 1)


def test_an_eps_that_vanishes_is_refused():
    """Rows of the embedding that no document has had so far would become NaN."""
    for dtype in ("float32", "bfloat16"):
        check_config(load_config(overrides(optimizer__eps=1.2e-38, training__dtype=dtype)), 1)
        with refused(rf"eps = 1e-46 is 0 in training.dtype = '{dtype}', .* at least 1.2e-38"):
            check_config(load_config(overrides(optimizer__eps=1e-46, training__dtype=dtype)), 1)
    check_config(load_config(overrides(optimizer__eps=1e-60, training__dtype="float64")), 1)
