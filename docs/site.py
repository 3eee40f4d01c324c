# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Pages from beside `docs/` in the site that mkdocs makes, and links between them as they are there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parents[1]
#: Files of the repository that are pages of the site, and their names there.
BESIDE = {
    "README.md": "introduction.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/HISTORY.md": "benchmarks_before.md",
}
_NAMED_BLOCK = re.compile(r"^```(\w+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from beside this folder, and leaves this program out."""
    files.remove(files.get_file_from_path("site.py"))
    for path, name in BESIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turns links of files of the repository into links of pages of the site, and names of blocks into text."""
    in_repository = {name: path for path, name in BESIDE.items()}
    own = in_repository.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    # GitHub takes no more than the first word for the language; the Markdown of mkdocs would see no block at all.
    markdown = _NAMED_BLOCK.sub(r"`\2`:\n\n```\1", markdown)

    def on_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), match[1]))
        # A link that leads elsewhere stays as it is: mkdocs says that it is broken.
        return BESIDE.get(path, path.removeprefix("docs/"))

    return _LINK.sub(on_site, markdown)
