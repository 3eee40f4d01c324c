# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Writes the report of a benchmark: ``results.md``, the pictures and ``report.html``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate_lshdp.comparing.report.gallery import draw_pictures
from accelerate_lshdp.comparing.report.markdown import render_markdown
from accelerate_lshdp.comparing.report.page import render_page
from accelerate_lshdp.comparing.report.reading import read_results
from accelerate_lshdp.comparing.report.results import Results
from accelerate_lshdp.documents.atomic_files import write_atomically


MARKDOWN_FILE = "results.md"
PAGE_FILE = "report.html"


def write_report(results: Results | dict[str, Any], folder: Path) -> list[Path]:
    """Writes tables, pictures and the page.

    Args:
        results: what was measured, or the contents of ``results.json``.
        folder: where to write; made if it does not exist.

    Returns:
        The files: the tables, the pictures and the page. Without matplotlib there are no pictures, which the page says
        (and `missing_library`); without jinja2 there is no page, which the tables say.

    Raises:
        ResultsError: as `read_results`.
        OSError: a file cannot be written.
    """
    if not isinstance(results, Results):
        results = read_results(results)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(results, folder)
    tables = render_markdown(results, pictures)
    drawn = [picture.path for picture in pictures if picture.path is not None]
    if find_spec("jinja2") is None:
        tables += "\nNo HTML page: jinja2 is not installed; pip install 'accelerate-lshdp[pictures]'\n"
        write_atomically(folder / MARKDOWN_FILE, tables)
        return [folder / MARKDOWN_FILE, *drawn]
    write_atomically(folder / MARKDOWN_FILE, tables)
    write_atomically(folder / PAGE_FILE, render_page(results, pictures))
    return [folder / MARKDOWN_FILE, *drawn, folder / PAGE_FILE]
