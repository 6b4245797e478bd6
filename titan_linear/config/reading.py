"""Configurations from TOML files and the command line, and back to TOML; `--help`."""

import argparse
import inspect
import json
import os
import re
import sys
from collections import deque
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from pydantic import ValidationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from titan_linear.config.nesting import check_depth, check_nesting
from titan_linear.config.registry import TABLES, import_custom
from titan_linear.config.schema import (
    KEYS,
    PRINT,
    SECTIONS,
    Config,
    KeyRule,
    Section,
    Training,
    keys_with,
)

# Tables of TOML.
Tables = dict[str, Any]
# Number of problems that a message names.
LISTED = 20
# Other names of keys, and replacements for TorchTitan's keys and sections that do not exist
# here.
OTHER_NAMES = json.loads(Path(__file__).with_name("other_names.json").read_text())
MEANT = OTHER_NAMES["meant"]
ABSENT = OTHER_NAMES["absent"]
# An option of the command line, perhaps with its value.
_OPTION = re.compile(r"-h$|--[^\s=]+(=|$)")

# --- Reading ---------------------------------------------------------------------------------------------------------


def load_config(argv: list[str], *, cuda: bool | None = None) -> Config:
    """Return the configuration that `argv` asks for, with every "auto" type resolved.

    Args:
        argv: arguments without the program's name.
        cuda: whether the run is for GPUs; by default, whether this machine has any.

    Raises:
        ValueError: an unreadable file, an unknown key, or a value of another type or out of
            range.
        SystemExit: after `--help` and `--print-config`.
    """
    prints = PRINT in argv
    overrides = _with_mixers(
        _read_command_line([argument for argument in argv if argument != PRINT])
    )
    path = overrides.get("job", {}).get("config_file", "")
    tables = _with_mixers(_read_toml(path)) if path else {}
    # The command line takes precedence over the file.
    merged = _merged(tables, overrides)
    job = merged.get("job")
    if isinstance(job, dict) and (module := job.get("custom_import")):
        import_custom(module)
    # Each source is validated separately, so that an error names its source.
    _validate(overrides, "command line")
    if path:
        _validate(tables, path)
        if "config_file" in tables.get("job", {}):
            raise ValueError(
                f"{path}: job.config_file belongs on the command line; remove it from the file"
            )
    given = _validate(merged, "configuration")
    # The saved configuration is explicit: home folders, and types that depend on the device.
    values = given.flat_keys()
    expanded = {key: os.path.expanduser(values[key]) for key in keys_with(KeyRule.HOME)}
    auto = _auto_types(given.training, cuda)
    config = given.changed(expanded | auto)
    if prints:
        origins = _origins({path: tables, "command line": overrides})
        origins |= {key: f"{origins[key]}: auto" for key in auto}
        print(config_to_toml(config, origins), end="")
        raise SystemExit(0)
    return config


def _merged(tables: Tables, overrides: Tables) -> Tables:
    """Merge tables, and tables inside them; values of `overrides` take precedence."""
    merged = {**tables, **overrides}
    for name in tables.keys() & overrides.keys():
        if isinstance(tables[name], dict) and isinstance(overrides[name], dict):
            merged[name] = _merged(tables[name], overrides[name])
    return merged


def _with_mixers(tables: Tables) -> Tables:
    """Move mixers' tables in [model] to their key: model.kda → model.mixers.kda.

    Any table in [model] that is not a key belongs to a mixer.
    """
    model = tables.get("model")
    if not isinstance(model, dict):
        return tables
    own: Tables = {}
    rest: Tables = {}
    for name, value in model.items():
        is_mixer = isinstance(value, dict) and f"model.{name}" not in KEYS
        (own if is_mixer else rest)[name] = value
    # Otherwise, validation refuses it.
    merges = own and isinstance(rest.get("mixers", {}), dict)
    return {**tables, "model": _merged(rest, {"mixers": own}) if merges else rest}


def config_to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return TOML that starts the same run.

    `job.config_file` is left out, as it only names the file from which this configuration
    was read.

    Args:
        origins: "section.key" → the value's origin, for a comment next to it.
    """
    tables = []
    for section, values in config.model_dump(exclude={"job": {"config_file"}}).items():
        lines = [f"[{section}]"]
        for key, value in values.items():
            line = f"{key} = {toml_value(value)}"
            lines.append(f"{line:<48}  # {origins[f'{section}.{key}']}" if origins else line)
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + "\n"


def _origins(sources: dict[str, Tables]) -> dict[str, str]:
    """Return each key's origin: the last of `sources` that has a value, or the default."""
    origins = dict.fromkeys(KEYS, "default")
    for name, tables in sources.items():
        for section, values in tables.items():
            origins |= {f"{section}.{key}": name for key in values}
    return origins


def difference(old: Any, new: Any) -> str:
    """Describe a change of a key's value.

    For lists of named tables, name the added, removed and changed tables.
    """
    if not (isinstance(new, list) and all("name" in table for table in [*old, *new])):
        return f"{old!r} → {new!r}"
    before, now = ({table["name"]: table for table in tables} for tables in (old, new))
    lines = [f"{name!r} added" for name in now if name not in before]
    lines += [f"{name!r} left out" for name in before if name not in now]
    lines += [
        f"{name!r}: {key} {before[name][key]!r} → {value!r}"
        for name in now
        if name in before
        for key, value in now[name].items()
        if value != before[name][key]
    ]
    return ", ".join(lines) or f"in the order {', '.join(now)}"


def toml_value(value: Any, depth: int = 0) -> str:
    """Return a key's value in TOML, `depth` levels within others.

    JSON writes bool, int, float and str in the same way, except that TOML escapes DEL.

    Raises:
        ValueError: the value is nested too deep.
    """
    check_depth(depth)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(x, depth + 1) for x in value)}]"
    if isinstance(value, dict):
        pairs = (f"{key} = {toml_value(x, depth + 1)}" for key, x in value.items())
        return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_toml(path: str) -> Tables:
    try:
        return _toml_tables(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(
            f"job.config_file = {path!r} cannot be read: {error.strerror}; give a TOML file"
        ) from None
    except ValueError as error:
        # Malformed TOML or UTF-8.
        raise ValueError(f"{path} is not TOML: {error}; correct it there") from None


def _read_command_line(argv: list[str]) -> Tables:
    """Return {section: {key: value}} of the given keys."""
    tables: Tables = {}
    for name, value in _options(argv).items():
        section, key, *inner = name.split(".")
        table = tables.setdefault(section, {})
        # Merge, for example, model.kda and model.kda.heads.
        parts = [table.get(key, {}), {inner[0]: value} if inner else value]
        wrong = [part for part in parts if not isinstance(part, dict)]
        table[key] = wrong[0] if wrong else parts[0] | parts[1]
    return tables


def _options(argv: list[str]) -> dict[str, Any]:
    """Return the value of each option; the last one counts."""
    values = {}
    rest = deque(argv)
    while rest:
        # A value stands in the option's argument, or in the next one.
        argument = rest.popleft()
        option, *text = argument.split("=", 1)
        if not text and rest and not _OPTION.match(rest[0]):
            text.append(rest.popleft())
        if option in ("-h", "--help"):
            _print_help(*text)
        if not _OPTION.match(argument):
            raise ValueError(
                f"command line: {argument!r} belongs to no key; keys are given as --section.key value"
            )
        name = option.removeprefix("--")
        if not _is_key(name, *text):
            raise ValueError(f"command line: {argument} is not a key{_nearest(name)}")
        kind = KEYS[name].annotation if name in KEYS else Any
        if not text:
            raise ValueError(
                f"command line: {option} needs a value, {type_name(kind)}; write it behind the key"
            )
        values[name] = _typed(text[0], kind)
    return values


def _is_key(name: str, text: str = "") -> bool:
    """Whether an option, with this value, is a key, a key of a table, or a mixer's table.

    Examples are training.steps, model.kda.heads and model.kda. In [model], tables that are
    not keys may belong to mixers (`_with_mixers`).
    """
    parent, _, _ = name.rpartition(".")
    if name.count(".") == 2:
        in_model = parent.startswith("model.")
        return get_origin(KEYS[parent].annotation) is dict if parent in KEYS else in_model
    return name in KEYS or (parent == "model" and isinstance(_toml(text), dict))


def _typed(text: str, annotation: type) -> Any:
    """Return the value that `text` spells, as strictly as in TOML.

    Other text is returned unchanged, for validation to refuse.
    """
    if annotation is bool:
        return {"true": True, "false": False}.get(text, text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    is_toml = annotation is Any or get_origin(annotation) in (list, dict)
    return _toml(text) if is_toml else text


def _toml(text: str) -> Any:
    """Return the value that TOML reads, or the text itself."""
    try:
        return _toml_tables(f"value = {text}")["value"]
    except ValueError:
        return text


def _toml_tables(text: str) -> Tables:
    """Parse TOML.

    Raises:
        ValueError: it is not TOML, or contains what `toml_value` cannot write.
    """
    check_nesting(text)
    tables = tomllib.loads(text)
    try:
        toml_value(tables)
    except TypeError:
        raise ValueError("no key is a date or time") from None
    return tables


def _parser(only: str = "") -> argparse.ArgumentParser:
    """Return the parser that prints all keys, or one section's keys."""
    parser = argparse.ArgumentParser(
        prog="run_train.sh",
        usage="%(prog)s [--section.key value ...]",
        description="Train a linear-attention or hybrid language model.",
        add_help=False,
    )
    if not only:
        about = parser.add_argument_group("about")
        about.add_argument(
            "-h",
            "--help",
            nargs="?",
            metavar="SECTION",
            help="the keys, of all sections or of one; --help flavors: the presets of every model.name; "
            "--help markdown: the keys as a page",
        )
        about.add_argument(
            PRINT,
            action="store_true",
            help="print the resolved configuration, and where each value is from; nothing is started",
        )
    # One group of options for each section.
    for section, cls in SECTIONS.items():
        if only not in ("", section):
            continue
        group = parser.add_argument_group(f"[{section}]", cls.__doc__)
        for key, field in cls.model_fields.items():
            text = f"{field.description} (default: {toml_value(field.default)})".replace("%", "%%")
            group.add_argument(f"--{section}.{key}", metavar=type_name(field.annotation), help=text)
    return parser


def _print_help(section: str = "") -> NoReturn:
    """Print all keys, a section's keys, or the page docs/keys.md."""
    if section == "markdown":
        print(keys_page())
    elif section in ("", *SECTIONS):
        _parser(section).print_help()
    else:
        raise ValueError(
            f"--help {section}: sections are {', '.join(SECTIONS)}; --help flavors lists presets"
        )
    raise SystemExit(0)


def keys_page() -> str:
    """Return docs/keys.md: every key with its default, other choices and description."""
    lines = [
        "# Every key",
        "The keys of a run's TOML file, each with its default and other choices. On the command line they are\n"
        "`--section.key value`, which goes before the file; a list is written as in TOML, in quotes. `./run_train.sh\n"
        "--help SECTION` prints a section's, `--print-config` what a run resolves to, and where each value is from.\n"
        "A run may resume with other values of the keys marked `may change`, and with other paths to the same content.",
    ]
    # A section for each section, and an item for each key.
    may_change = keys_with(KeyRule.MAY_CHANGE)
    for section, keys in SECTIONS.items():
        lines += [f"## [{section}]", inspect.cleandoc(keys.__doc__ or "")]
        rows = []
        for key, field in keys.model_fields.items():
            default = toml_value(field.default)
            choices = [
                f'"{choice}"' for choice in get_args(field.annotation) if isinstance(choice, str)
            ]
            values = ", ".join(f"`{value}`" for value in dict.fromkeys([default, *choices]))
            values += "; may change" * (f"{section}.{key}" in may_change)
            rows.append(f"- `{key}` ({values}): {' '.join(field.description.split())}")
        lines.append("\n".join(rows))
    return "\n\n".join(lines)


def type_name(annotation: type) -> str:
    if annotation is bool:
        return "{true,false}"
    if get_origin(annotation) in (list, dict):
        return "LIST" if get_origin(annotation) is list else "TABLE"
    choices = get_args(annotation)
    return f"{{{','.join(choices)}}}" if choices else annotation.__name__.upper()


def _validate(tables: Tables, source: str) -> Config:
    try:
        return Config.model_validate(tables)
    except ValidationError as invalid:
        problems = [_explain(error) for error in invalid.errors()[:LISTED]]
        if (more := invalid.error_count() - LISTED) > 0:
            problems.append(f"{more:,} more problems")
        raise ValueError("\n".join(f"{source}: {problem}" for problem in problems)) from None


def _explain(error: Any) -> str:
    """Return a pydantic error in our words: the key, the value, and a valid value."""
    key = ".".join(map(str, error["loc"]))
    value = error["input"]
    kind = error["type"]
    list_key = ".".join(map(str, error["loc"][:2]))
    table = _table_of(list_key)
    # Unknown or missing keys.
    if kind == "extra_forbidden" and table:
        return f"{key} is not a key; a table of {list_key} has {', '.join(table.model_fields)}"
    if kind == "extra_forbidden":
        return f"{key} is not a {'key' if '.' in key else 'section'}{_nearest(key)}"
    if kind == "string_unicode":
        return f"{key} = {value!r} is not UTF-8; rename the file, or give its folder or a glob"
    if kind == "missing":
        return f"{key} is missing; give it"
    # Values of another type.
    if kind == "list_type":
        items = _example(table) if table else '"…", "…"'
        return f"{key} = {value!r} must be a list, [{items}]"
    if kind == "dict_type":
        return f"{key} = {value!r} must be a table, [{key}]"
    if kind == "model_type":
        what = f"table, {_example(table)}" if table else f"section, [{key}]"
        return f"{key} = {value!r} must be a {what}"
    if kind == "bool_type":
        return f"{key} = {value!r} must be true or false"
    # Values that are not among the choices or out of range.
    choices = error["ctx"]["expected"].split("'")[1::2] if kind == "literal_error" else []
    near = get_close_matches(str(value), [*choices, *TABLES.get(key, ())], 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{key} = {value!r} must {error['msg'].partition(' should ')[2] or error['msg']}{meant}"


def _table_of(key: str) -> type[Section] | None:
    """Return the model of the tables in a key that holds a list of tables."""
    of = get_args(KEYS[key].annotation) if key in KEYS else ()
    return next((kind for kind in of if isinstance(kind, type) and issubclass(kind, Section)), None)


def _example(table: type[Section]) -> str:
    """Return a table with its required keys."""
    required = [f"{name} = …" for name, field in table.model_fields.items() if field.is_required()]
    return f"{{{', '.join(required)}}}"


def _nearest(key: str) -> str:
    """Return a suggestion for an unknown key or section.

    It names what exists instead, the same name elsewhere, or the closest name.
    """
    for name in key.split("."):
        if name in ABSENT:
            return f": {ABSENT[name]}"
    name = key.rpartition(".")[2]
    words = set(re.split("[._]", key))
    known = {*KEYS, *SECTIONS} - {key}
    if meant := MEANT.get(key) or MEANT.get(name):
        return f"; did you mean {meant}?"
    # The same words, as in telemetry.freq for metrics.telemetry_freq, or the same name.
    alike = [dotted for dotted in KEYS if words <= set(re.split("[._]", dotted))]
    alike = alike or [dotted for dotted in KEYS if dotted.endswith(f".{name}")]
    sure = get_close_matches(key, known, 1, 0.9) or get_close_matches(key, alike, 1, 0.0)
    near = sure or [
        dotted
        for dotted in get_close_matches(key, known, 1, 0.6)
        # The similarity must not come from the section alone.
        if get_close_matches(name, [dotted.rpartition(".")[2]], 1, 0.5)
    ]
    tables = [f"the table of a mixer, [{key}]"] if key.startswith("model.") and not sure else []
    return (
        f"; did you mean {' or '.join([*near, *tables])}?"
        if near or tables
        else "; --help lists all keys"
    )


def _auto_types(training: Training, cuda: bool | None) -> dict[str, str]:
    """Return the values of the types that depend on the device, by "section.key"."""
    auto = {}
    wide = training.dtype == "float64"
    if training.mixed_precision_param == "auto":
        cuda = on_cuda() if cuda is None and not wide else cuda
        auto["training.mixed_precision_param"] = (
            "float64" if wide else "bfloat16" if cuda else "float32"
        )
    if training.mixed_precision_reduce == "auto":
        auto["training.mixed_precision_reduce"] = "float64" if wide else "float32"
    return auto


def on_cuda() -> bool:
    # torch is slow to import; --help and errors in keys do without.
    import torch

    return torch.cuda.is_available()
