"""What MkDocs does beside mkdocs.yml: pages of the root belong to the site, and where a page names one it is a link."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}


def on_files(files, config):
    for name, page in PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(markdown, **_):
    markdown = markdown.replace("](docs/", "](")
    return re.sub(
        r"`(?:docs/)?(\w+\.md)`",
        lambda name: f"[{name[0]}]({PAGES.get(name[1], name[1])})",
        markdown,
    )
