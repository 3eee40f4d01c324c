# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`write_report`: writes ``results.md``, the pictures and ``report.html`` of a benchmark."""

from __future__ import annotations

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
    """Writes tables, pictures and the page of a benchmark into a folder.

    Args:
        results: the results, or the contents of ``results.json``.
        folder: the folder, which is made if it does not exist.

    Returns:
        The files: the tables, the pictures and the page. Without matplotlib there are no pictures, which the page says
        (and `missing_library`).

    Raises:
        ResultsError: as `read_results`.
        OSError: a file cannot be written.
    """
    if not isinstance(results, Results):
        results = read_results(results)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Pictures first: both documents show the files that were drawn.
    pictures = draw_pictures(results, folder)
    write_atomically(folder / MARKDOWN_FILE, render_markdown(results, pictures))
    write_atomically(folder / PAGE_FILE, render_page(results, pictures))
    drawn = [picture.path for picture in pictures if picture.path is not None]
    return [folder / MARKDOWN_FILE, *drawn, folder / PAGE_FILE]
