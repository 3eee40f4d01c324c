# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tables of a benchmark in a terminal."""

from __future__ import annotations

from typing import Any

from accelerate_lshdp.comparing.report.comparison import describe_fastest, group_cases
from accelerate_lshdp.comparing.report.reading import read_results
from accelerate_lshdp.comparing.report.results import Results
from accelerate_lshdp.comparing.report.tables import Table, limits_table, step_table


_LEAST_WIDTH = 100  # what the other commands print, and what the tables need with two peers


def print_results(results: Results | dict[str, Any]) -> None:
    """Prints the steps of each cluster, model and network, which strategy is fastest, and the limits.

    Args:
        results: what was measured, or the contents of ``results.json``.

    Raises:
        ResultsError: as `read_results`.
    """
    from rich.console import Console
    from rich.text import Text

    if not isinstance(results, Results):
        results = read_results(results)  # the same checks as for a file
    console = Console(highlight=False)
    for group in group_cases(results):
        for network in group.networks:
            _print_table(step_table(group, network))
            sentence = describe_fastest(group, network)
            if sentence is not None:
                console.print(Text(f"{sentence}\n"))
    if results.limits:
        _print_table(limits_table(results))


def _print_table(table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(table.columns):  # one word a line keeps columns narrow
        shown.add_column(Text("\n".join(name.split())), justify="right" if place else "left", no_wrap=True)
    for place, row in enumerate(table.rows):  # Text: names and errors may hold what rich takes for markup
        shown.add_row(*map(Text, row), style="bold red" if place in table.alarming else None)
    console = Console(highlight=False)
    # Where the table is wider than the terminal, lines wrap: better than figures that are cut off.
    width = Measurement.get(console, console.options.update(width=10_000), shown).maximum
    Console(width=max(width, console.width), highlight=False).print(shown)
    for note in table.notes:
        console.print(Text(note, style="red"))
