"""Writes docs/keys.md, every key of a configuration, from titan_linear/config.py: `python -m tools.keys`."""

from __future__ import annotations

import sys

from titan_linear.config import SECTIONS, toml_value, type_name
from tools.pages import DOCS, write

PAGE = DOCS / "keys.md"
HEAD = """\
# Every key

The keys of a run's TOML file. On the command line they are `--section.key value`, which takes precedence over the file.
`./run_train.sh --help SECTION` prints the same; `--print-config` prints what a run resolves to, and where each value
comes from. `python -m tools.keys` writes this page.
"""


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for section, keys in SECTIONS.items():
        parts += [f"## [{section}]\n\n{keys.__doc__}\n\n| key | type | default | |\n|---|---|---|---|"]
        for key, field in keys.model_fields.items():
            kind = type_name(field.annotation).strip("{}").replace(",", ", ")
            cells = (f"`{key}`", kind, f"`{toml_value(field.default)}`", " ".join(field.description.split()))
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write(PAGE, page()))
