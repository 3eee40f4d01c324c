# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tables of a benchmark as Markdown, with machine, versions, configuration and command."""

from __future__ import annotations

import re
from collections.abc import Sequence

from accelerate_lshdp.comparing.report.comparison import describe_fastest, group_cases
from accelerate_lshdp.comparing.report.gallery import Picture, missing_library
from accelerate_lshdp.comparing.report.provenance import describe_provenance, format_config
from accelerate_lshdp.comparing.report.results import Results
from accelerate_lshdp.comparing.report.tables import (
    DETAIL_LEGEND,
    STEP_LEGEND,
    Table,
    detail_table,
    limits_table,
    step_table,
)


def render_markdown(results: Results, pictures: Sequence[Picture]) -> str:
    """The whole report as one Markdown document (GitHub's dialect).

    Args:
        results: the results of a benchmark.
        pictures: pictures beside the document, and the reasons for those that were not drawn.
    """
    parts = ["# Benchmark", *(f"* {_escape(name)}: {_code(text)}" for name, text in describe_provenance(results))]
    parts = ["\n".join([parts[0], "", *parts[1:]])]
    for group in group_cases(results):
        parts.append(f"## {_escape(group.title)}")
        for network in group.networks:
            parts.append(f"### {_escape(network)}")
            parts.append(_render_table(step_table(group, network)))
            sentence = describe_fastest(group, network)
            if sentence is not None:
                parts.append(_escape(sentence))
    parts.append(_escape(STEP_LEGEND))
    if results.limits:
        parts += ["## Limits", _render_table(limits_table(results))]
    parts.append("## Pictures")
    missing = missing_library()
    if missing is not None:
        parts.append(_escape(missing))
    for picture in pictures:
        if picture.path is None:
            parts.append(f"{_escape(picture.title)}: {_escape(picture.caption)}")
        else:
            parts.append(f"![{_escape(picture.title)}]({picture.path.name})\n\n{_escape(picture.caption)}")
    parts += ["## Ranks and nodes", _escape(DETAIL_LEGEND)]
    for group in group_cases(results):
        for network in group.networks:
            table = detail_table(group, network)
            if table.rows:
                parts += [f"### {_escape(table.title)}", _render_table(table)]
    parts += ["## Configuration", _fence(format_config(results.config))]
    return "\n\n".join(parts) + "\n"


def _render_table(table: Table) -> str:
    lines = [_row(table.columns), "|" + "|".join(["---", *["---:"] * (len(table.columns) - 1)]) + "|"]
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines) + "".join(f"\n\n{_escape(note)}" for note in table.notes)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(text: str) -> str:
    """Text on one line, escaped so that no Markdown reader takes it for markup."""
    # Underscores inside words are left alone, as GitHub does not take them for emphasis and names are full of them.
    return re.sub(r"([\\`*\[\]<>|&#]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Text on one line as inline code, whatever backticks are in it."""
    # CommonMark: the fence must be longer than any run of backticks inside; a space separates it from one at the end.
    text = " ".join(text.split())
    ticks = "`" * (_longest_run_of_backticks(text) + 1)
    padding = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{padding}{text}{padding}{ticks}"


def _fence(text: str) -> str:
    fence = "`" * max(3, _longest_run_of_backticks(text) + 1)
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"


def _longest_run_of_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
